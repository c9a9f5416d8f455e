"""Mistakes of experts: who sums what, and over which tokens a loss is taken."""
from dataclasses import replace

from reference.config import ExpertsConfig
from tests.zoo.cases import CASE, MAIN, MODEL, SHARDED, Plan, in_textbook
from tests.zoo.entry import Bug, Entry, Theorem

EXPERTS = replace(MODEL, experts=ExpertsConfig(4, 2, moe_ffn_hidden_size=8, moe_aux_loss_coeff=0.5,
                                               moe_z_loss_coeff=0.1))


def trained(t=1, d=1, c=1, m=2, sequence_parallel=False, **plan) -> Theorem:
    """Return the main theorem about two steps of a model with four experts, whose gradients are clipped."""
    case = replace(SHARDED if sequence_parallel else CASE, t=t, model=EXPERTS, s=6 if sequence_parallel else 4)
    return Theorem(MAIN, t * d * c, (case, 2, m, 0.05, Plan(bucket_size=300, c=c, **plan)))


ENTRIES = [
    Entry("gradients of experts summed over all replicas", "wrong group", "EP", "after facebookresearch/fairseq #4220",
          "Replicas hold different experts, and the sum adds up gradients of one expert and of another.",
          Bug("mpi_impl.parallel.data_parallel",
              "return holder.expert_group if bucket.dealt else holder.group", "return holder.group"),
          trained(d=2, e=2)),
    Entry("gradients of experts not summed", "missing communication", "EP", "facebookresearch/fairseq #4220",
          "Experts are skipped by the sum, for each rank has its own: but d/e ranks have the same.",
          Bug("mpi_impl.parallel.data_parallel",
              "post_all_reduce(flat, reason_of(bucket))",
              "post_all_reduce(flat.copy() if bucket.dealt else flat, reason_of(bucket))"),
          trained(d=4, e=2, m=1)),
    Entry("gradients of experts too large by e", "scaling", "EP", "deepspeedai/DeepSpeed #6546",
          "All gradients are divided by the number of ranks that hold a copy, but those of experts are sums over the "
          "samples of e times as many ranks.",
          Bug("mpi_impl.parallel.data_parallel",
              "        self.finish_first(len(self.begun))\n",
              "        self.finish_first(len(self.begun))\n"
              "        for bucket in self.layout.buckets:\n"
              "            self.own.flat[bucket.slice] *= self.layout.e if bucket.dealt else 1\n"),
          trained(d=2, e=2)),
    Entry("the norm of one rank's experts", "missing communication", "EP", "laekov/fastmoe #29",
          "The clipping norm is summed over the ranks of one model, and of the experts each has only some.",
          Bug("mpi_impl.parallel.zero", "        return self.topology.holders", "        return self.topology.model"),
          trained(d=2, e=2)),
    Entry("what all ranks with experts hold counted e times", "scaling", "EP", "after laekov/fastmoe #169",
          "The squares of all ranks that share experts are added up, though they have copies of everything else.",
          Bug("mpi_impl.parallel.zero", "return self.topology.expert_rank == 0 or piece.of.tensor.dealt",
              "return True"),
          trained(d=2, e=2)),
    Entry("the router's gradient not summed", "missing communication", "SP", "NVIDIA/Megatron-LM #599",
          "The router is on every rank, outside the region, and sees the rank's own positions alone.",
          Bug("mpi_impl.parallel.model_state", "if piece.of.tensor.split is None and not piece.of.tensor.dealt]",
              'if piece.of.tensor.split is None and not piece.of.tensor.dealt '
              'and not piece.of.name.endswith("router")]'),
          trained(t=2, sequence_parallel=True)),
    Entry("weights of experts whose gradient is partial", "missing communication", "TP", "pytorch/torchtitan #2387",
          "The router is replicated and so is its input, so its gradient seems complete: but each rank has multiplied "
          "its weights by partial sums of the experts' outputs.",
          Bug("mpi_impl.layers.experts", 'dweights = region.enter_backward(dweights, WEIGHTS)',
              "dweights = dweights * 1"),
          trained(t=2)),
    Entry("weights that were gathered without a backward", "missing communication", "SP",
          "NVIDIA-NeMo/Automodel #2995",
          "Each rank takes its own positions out of its own gradient of all of them.",
          Bug("mpi_impl.layers.experts", 'dweights = region.enter_backward(dweights, WEIGHTS)',
              "dweights = np.split(dweights, region.size, 1)[region.rank]"),
          trained(t=2, sequence_parallel=True)),
    Entry("the experts' gradients summed over positions", "extra communication", "SP", "classic",
          "The last bias of an expert is replicated over t, like those that see a rank's positions, but experts are "
          "inside the region, and see all of them.",
          Bug("mpi_impl.parallel.model_state", "if piece.of.tensor.split is None and not piece.of.tensor.dealt]",
              "if piece.of.tensor.split is None]"),
          trained(t=2, sequence_parallel=True)),
    Entry("a bias in each partial sum", "computation", "TP", "classic",
          "Every rank adds the last bias to its own partial sum of the expert's output, and the sum has t of them.",
          Bug("reference.layers.experts", "return p if rank == 0 or not hasattr", "return p if True or not hasattr"),
          trained(t=2)),
    Entry("copies returned in the order of experts", "computation", "EP", "classic",
          "What arrives is sorted by expert, and the results go back as they lie: to other tokens of other ranks.",
          Bug("mpi_impl.comm.expert_parallel",
              "as_arrived[moved_to(by_expert(counts_of_rank(counts, group.rank)), copies)] = copies",
              "as_arrived[...] = copies"),
          trained(d=2, e=2)),
    Entry("every rank draws the first experts", "random numbers", "EP", "classic",
          "A rank draws experts by their numbers on the rank, so that e experts are copies of one another.",
          Bug("mpi_impl.parallel.zero", "self.group.rank % e)", "0)"),
          trained(d=2, e=2)),
    Entry("a load-balancing loss for each microbatch", "scaling", "EP", "NVIDIA-NeMo/Automodel #3359",
          "The losses of the language model are divided by the global batch, and those of the router by the "
          "microbatch.",
          Bug("mpi_impl.training.trainer", "sequences = global_batch_size * sequences_of(model)",
              "sequences = len(microbatches[0].tokens)"),
          trained(m=2)),
    Entry("a load-balancing loss divided by t, too", "scaling", "TP", "NVIDIA/Megatron-LM #5047",
          "All ranks of a layer compute the same loss of the router, and it is divided by their number as if it were a "
          "sum over them.",
          Bug("mpi_impl.training.trainer", "sequences = global_batch_size * sequences_of(model)",
              "sequences = global_batch_size * sequences_of(model) * self.topology.tensor.size"),
          trained(t=2)),
    Entry("a load-balancing loss without its coefficient", "scaling", "EP", "NVIDIA-NeMo/Automodel #1408",
          "The coefficient decides whether there is such a loss, and is not multiplied with it.",
          Bug("reference.layers.router", "c.moe_aux_loss_coeff * losses.shares", "losses.shares"),
          in_textbook("gradients_are_derivatives", replace(CASE, t=1, model=EXPERTS))),
    Entry("a count that an all-reduce has overwritten", "aliasing", "EP", "after NVIDIA/Megatron-LM #7452",
          "The sum over ranks is made in place, so that a rank's own number of tokens is that of all ranks, and is "
          "multiplied by their number once more.",
          Bug("mpi_impl.layers.experts", "length *= region.context_ranks.size",
              "length *= region.context_ranks.size ** 2"),
          trained(c=2)),
    Entry("renormalised weights without their derivative", "computation", "model", "classic",
          "The weights are divided by their sum, and the sum is taken for a constant.",
          Bug("reference.layers.router", "(dweights - (dweights * weights).sum(-1, keepdims=True)) / total",
              "dweights / total"),
          in_textbook("gradients_are_derivatives", replace(CASE, t=1, model=EXPERTS))),
]
