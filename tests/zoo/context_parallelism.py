"""Mistakes of context parallelism: a rank has some positions of every sequence, and attention needs those of others."""
from tests.context_theorems import ContextCase
from tests.zoo.cases import CHOICE, small, trained_bert
from tests.zoo.entry import Bug, Entry, Theorem

CASE = ContextCase(c=2, b=2, chunk=2, heads=2, queries=1, d=4, causal=True, dropout=0.1, padded=True, seed=5)
RING = "mpi_impl.layers.context_attention"


def in_the_textbook(way: str, case: ContextCase = CASE) -> Theorem:
    """Return the theorem about attention over a list of ranks."""
    return Theorem("context_theorems.attention_over_ranks_equals_one_go", 0, (case, way))


ENTRIES = [
    Entry("the mean of the context ranks' means", "scaling", "CP", "NVIDIA/Megatron-LM #7452",
          "Each rank divides by the tokens that count among its own positions, and the gradients are averaged, which "
          "is right where all tokens count.",
          Bug("mpi_impl.training.trainer",
              'self.topology.replicas.all_reduce(to_host(mine).astype(np.float64), "weights of the losses")',
              'self.topology.data.all_reduce(to_host(mine).astype(np.float64), "weights of the losses") '
              "* self.topology.config.context_parallel_size"),
          trained_bert(c=2)),
    Entry("the loss over a rank's own positions", "scaling", "CP", "NVIDIA/Megatron-LM #906",
          "The loss is a mean over the positions that a rank has, and the sum over the ranks is c times too large.",
          Bug("mpi_impl.training.trainer", "tokens.shape[1] * self.topology.config.context_parallel_size]",
              "tokens.shape[1]]"),
          small(c=2)),
    Entry("gradients summed over data-parallel ranks alone", "wrong group", "CP", "after NVIDIA/Megatron-LM #673",
          "The sum over replicas keeps the group that it had before positions were dealt out, so context ranks drift "
          "apart.",
          Bug("mpi_impl.parallel.zero", "self.gradients = self.gradients_type(layout, topology.shards,",
              "self.gradients = self.gradients_type(layout, topology.data,"),
          small(c=2)),
    Entry("a ring's backward with its own keys", "computation", "CP", "huggingface/diffusers #14265",
          "Keys and values go around once more in the backward, which reads those that the forward has saved: the "
          "rank's own.",
          Bug(RING, "dq, *dkv = attend_backward(dattended, cache, travelling, own,",
              "dq, *dkv = attend_backward(dattended, cache, (inputs.k, inputs.v), own,"),
          small(c=2)),
    Entry("gradients of keys that do not come home", "missing communication", "CP", "after NVIDIA/Megatron-LM #1465",
          "A rank takes the gradients of its keys and values from its own queries, and those of other ranks' queries "
          "stay where they are.",
          Bug(RING, "dk, dv = with_others(found[0][1], gathered)",
              "dk, dv = found[0][1]\n    arrived(gathered)"),
          small(c=2)),
    Entry("gradients of keys that are overwritten on the way", "computation", "CP", "after NVIDIA/Megatron-LM #1464",
          "Each rank passes on what it has found, instead of adding it to what came, which is right for two ranks.",
          Bug(RING, "gathered = pass_on(with_others(found[-1][1], gathered), group,",
              "arrived(gathered)\n            gathered = pass_on(found[-1][1], group,"),
          small(c=3)),
    Entry("a ring turned the other way", "computation", "CP", "classic",
          "Keys come from the rank before, and are taken for those of the rank after, which is the same for two ranks.",
          Bug("reference.layers.context_attention",
              "attend(one, travelling[rank], chunks[rank], chunks[(rank - step) % c], found[rank])",
              "attend(one, travelling[rank], chunks[rank], chunks[(rank + step) % c], found[rank])"),
          in_the_textbook("p2p", ContextCase(3, 1, 2, 1, 1, 4, True, 0.0, False, 5))),
    Entry("blocks added without a common maximum", "computation", "CP", "classic",
          "Each block subtracts its own largest score, and its sums are added to those of others as they are.",
          Bug("reference.layers.online_softmax", "one.total * mine + other.total * its", "one.total + other.total"),
          in_the_textbook("all_gather")),
    Entry("every context rank's positions begin at 0", "computation", "CP", "after modelscope/ms-swift #5683",
          "A rank numbers the positions that it has, as if they were the whole sequence.",
          Bug("reference.layer_context", "return self.part.runs(held)", "return [held]"),
          small(c=2)),
    Entry("targets made from a rank's own tokens", "computation", "CP", "classic",
          "Tokens are dealt out, and the target of each is taken to be the next one there, which it is not at the end "
          "of a chunk.",
          Bug("reference.batches", "return GPTBatch(*(x if x is None else take(x, part.chunks) for x in self))",
              "tokens, targets = take(self.tokens, part.chunks), take(self.targets, part.chunks)\n"
              "        return GPTBatch(tokens, np.concatenate([tokens[:, 1:], targets[:, -1:]], 1))"),
          Theorem("context_theorems.targets_are_the_next_tokens", 0, (CASE,))),
    Entry("every context rank drops the same positions", "random numbers", "CP", "after NVIDIA/Megatron-LM #2658",
          "The masks of a rank's positions are drawn as if these were the first of the sequence.",
          Bug("reference.random.dropout", "if self.part else (positions.start,)", "if False else (positions.start,)"),
          small(c=2)),
    Entry("padding counted from each chunk's beginning", "computation", "CP", "classic",
          "A sample's length hides the keys after it, in each block as if that were the whole sequence.",
          Bug("reference.layers.context_attention", "inputs.lengths - block.first_key", "inputs.lengths"),
          in_the_textbook("p2p")),
    Entry("the first position of every context rank", "scaling", "CP", "classic",
          "Each rank predicts the order of sentences from the first position that it has, and all of them count.",
          Bug("reference.batches", "np.full_like(self.swapped, part.has_first_position)",
              "np.ones_like(self.swapped)"),
          trained_bert(c=2)),
    Entry("answers scored at any rank's first position", "scaling", "CP", "classic",
          "The weight of a question is the same on all ranks, though one of them has the position that is scored.",
          Bug("reference.batches", "self.weights * part.has_first_position", "self.weights"),
          trained_bert(model=CHOICE, c=2, cp_comm_type="all_gather")),
    Entry("exchanged heads with the masks of the first", "random numbers", "CP", "classic",
          "Dropout draws for the first heads of the tensor-parallel rank, whichever heads were exchanged.",
          Bug(RING, "inputs.site and inputs.site.moved(0, group.rank * q.shape[2])", "inputs.site"),
          small(c=2, cp_comm_type="a2a")),
    Entry("exchanged positions in the order of the ranks", "computation", "CP", "classic",
          "What all ranks send is joined in their order, as if each had neighbouring positions, and a causal mask "
          "hides the wrong ones.",
          Bug(RING, "return collect(group.all_to_all(np.split(x, group.size, 2), reason), chunks)",
              "return np.concatenate(group.all_to_all(np.split(x, group.size, 2), reason), 1)"),
          small(c=2, cp_comm_type="a2a")),
    Entry("gathered keys without the reduce-scatter", "missing communication", "CP", "classic",
          "A rank takes the gradients of its keys out of those of all keys that it has computed, and the other ranks' "
          "parts are lost.",
          Bug(RING, 'group.reduce_scatter(np.stack(dkv), 2, "gradients of keys and values")',
              "np.split(np.stack(dkv), group.size, 2)[group.rank]"),
          small(c=2, cp_comm_type="all_gather")),
]
