"""Mistakes of Muon: matrices that are orthogonalized in parts, too early, or with the wrong norm, and wrong factors."""
from tests.cases import MuonChoices
from tests.zoo.cases import GROUPED, ROPE, small, trained_case
from tests.zoo.entry import Bug, Entry, Theorem

DUPLICATED, DISTRIBUTED = MuonChoices(), MuonChoices("distributed")
TWO_ROUNDS = MuonChoices(muon_num_ns_steps=2)       # their degrees are small enough for exact numbers
BY_DEFINITION = Theorem("muon_theorems.muon_is_its_definition", 0, (ROPE,))

ENTRIES = [
    Entry("the orthogonalized shard", "missing communication", "optimizer", "classic",
          "Each rank orthogonalizes its shard as if it were a matrix: no message, and the loss goes down. It is "
          "another optimizer for every t, and Megatron's default, blockwise.",
          Bug("mpi_impl.training.muon", "if group.size == 1:", "if True:"),
          small(t=2, muon=DUPLICATED)),
    Entry("another rank's shard of the update", "computation", "optimizer", "classic",
          "All ranks have computed the update of the whole matrix, and take the first shard of it.",
          Bug("mpi_impl.training.muon", "first = group.rank // copies * n", "first = 0"),
          small(t=2, muon=DUPLICATED)),
    Entry("the momentum divided by the norm of a shard", "missing communication", "optimizer", "classic",
          "The norm of a matrix is computed where the matrix is, on a rank that has half of it.",
          Bug("mpi_impl.training.muon",
              'squares = group.all_reduce((x * x).sum(keepdims=True) / copies, "norm of the momentum")',
              "squares = (x * x).sum(keepdims=True) / copies"),
          small(t=2, muon=DISTRIBUTED)),
    Entry("products of one rank's shard", "missing communication", "optimizer", "classic",
          "X X^T is [n, n] on every rank, so nothing says that it is a partial sum.",
          Bug("mpi_impl.training.muon", 'group.all_reduce(x @ x.T / copies, "products of the momentum")',
              "x @ x.T / copies"),
          small(t=2, muon=DISTRIBUTED)),
    Entry("rows orthogonalized as if they were columns", "computation", "optimizer", "classic",
          "The products are summed over the ranks, as those of a matrix that is sharded by columns; but this one is "
          "sharded by rows, and the sum of its ranks' X X^T belongs to no matrix.",
          Bug("reference.optimizers.muon", "if tensor.split == int(tensor.dealt) else found", "if False else found"),
          small(t=2, muon=DISTRIBUTED)),
    Entry("copies of a shard counted twice in the products", "scaling", "optimizer", "classic",
          "Where there are fewer heads of keys than ranks, neighbours hold the same shard, and the sum over all ranks "
          "has it several times.",
          Bug("mpi_impl.training.muon", "group.all_reduce(x @ x.T / copies,", "group.all_reduce(x @ x.T,"),
          trained_case(GROUPED, muon=DISTRIBUTED)),
    Entry("the momentum of one replica's gradients", "missing communication", "optimizer", "classic",
          "Each replica orthogonalizes what its own samples say. To sum the updates afterwards would not help: a sum "
          "of orthogonal matrices is not orthogonal.",
          Bug("mpi_impl.parallel.data_parallel",
              "return group_of(self, bucket).post_all_reduce(flat, reason_of(bucket))",
              "return group_of(self, bucket).post_all_reduce(flat.copy() if bucket.ends else flat, reason_of(bucket))"),
          small(d=2, muon=TWO_ROUNDS)),
    Entry("matrices not gathered from their owners", "missing communication", "ZeRO", "classic",
          "The parameters of the distributed optimizer are gathered, those of Adam. Matrices, which are another "
          "optimizer's, move on their owner alone.",
          Bug("mpi_impl.parallel.zero",
              "        for bucket in self.layout.buckets:\n"
              "            own = self.layout.owned_piece(bucket, self.group.rank)\n"
              "            in_flight",
              "        for bucket in [bucket for bucket in self.layout.buckets if not bucket.ends]:\n"
              "            own = self.layout.owned_piece(bucket, self.group.rank)\n"
              "            in_flight"),
          small(d=2, zero_stage=1, muon=TWO_ROUNDS)),
    Entry("inputs and outputs exchanged in the factor", "scaling", "optimizer", "classic",
          "The formula has a matrix [outputs, inputs], as PyTorch stores it, but here it is [inputs, outputs].",
          Bug("reference.optimizers.muon", '"unit_rms_norm": columns / rows', '"unit_rms_norm": rows / columns'),
          BY_DEFINITION),
    Entry("Q, K and V orthogonalized as one matrix", "computation", "optimizer", "classic",
          "They are stored side by side, so the optimizer sees one matrix of 3 h columns.",
          Bug("reference.optimizers.muon", "for i in range(stack.shape[1])]",
              "for i in range(stack.shape[1])] if False else [\n"
              "        stack.reshape(len(stack), -1) for stack in stacks]"),
          BY_DEFINITION),
]
