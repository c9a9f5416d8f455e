"""The bug zoo: the classic mistakes of parallel training, planted one at a time, and the theorem that catches each.

Read it as a list of what goes wrong in practice: the right line, the wrong one, the theorem that falls. Some comments
tell how the mistake comes about, or what it does.
"""
import pytest

from reference.config import ModelConfig
from tests import rank_theorems, textbook_theorems
from tests.planted import Bug, assert_caught, planted
from tests.strategies import Case

# Four heads on two ranks; 10 words, so that the second rank's table ends in padding.
MODEL = ModelConfig(2, 16, 4, 10, 6, make_vocab_size_divisible_by=3)
CASE = Case(2, MODEL, 2, 5, seed=7)
TRAINING = (CASE, 2, 2)   # steps, microbatches

ON_RANKS = {
    # f and g
    "f without its all-reduce": (    # each rank's dx is a partial sum: layers below get a wrong gradient, silently
        Bug("mpi_impl.comm.mappings", "return self.group.all_reduce(dx, reason)", "return dx"),
        rank_theorems.mlp_equals_whole, CASE),
    "g without its all-reduce": (
        Bug("mpi_impl.comm.mappings", "return self.group.all_reduce(partial, reason)", "return partial"),
        rank_theorems.attention_equals_whole, CASE),
    "g all-reduces backward too": (  # what a framework's own all-reduce does when it is differentiated naively
        Bug("mpi_impl.comm.mappings", "return dy\n\n    def gather",
            "return self.group.all_reduce(dy, reason)\n\n    def gather"),
        rank_theorems.mlp_equals_whole, CASE),
    "a gathered output scattered by the wrong rank": (
        Bug("mpi_impl.comm.mappings", "dy[..., self.rank * n:(self.rank + 1) * n]", "dy[..., :n]"),
        rank_theorems.column_parallel_equals_whole, CASE, True),
    # biases: inside the sum they are added t times (here: t times inside, once taken back, once added after it)
    "the MLP's output bias added t times": (
        Bug("mpi_impl.layers.mlp", 'linear(a, p.w_out), "mlp output")',
            'linear(a, p.w_out, p.b_out), "mlp output") - p.b_out'),
        rank_theorems.mlp_equals_whole, CASE),
    "attention's output bias added t times": (
        Bug("mpi_impl.layers.attention", 'linear(context, p.w_out), "attention output")',
            'linear(context, p.w_out, p.b_out), "attention output") - p.b_out'),
        rank_theorems.attention_equals_whole, CASE),
    "the row-parallel bias added t times": (
        Bug("mpi_impl.layers.linear", 'linear(x, p.w), "linear output")',
            'linear(x, p.w, p.b), "linear output") - p.b'),
        rank_theorems.row_parallel_equals_whole, CASE),
    # vocabulary
    "the vocabulary's offset off by one": (
        Bug("mpi_impl.layers.embedding", "local_ids(tokens, region.rank * len(p.word),",
            "local_ids(tokens, region.rank * len(p.word) + 1,"),
        rank_theorems.embedding_equals_whole, CASE),
    "words of other ranks not zeroed": (
        Bug("mpi_impl.layers.embedding", "lookup(ids, p.word) * held[..., None]", "lookup(ids, p.word)"),
        rank_theorems.embedding_equals_whole, CASE),
    "the gradient of words of other ranks kept": (
        Bug("mpi_impl.layers.embedding", "lookup_backward(dx * held[..., None], ", "lookup_backward(dx, "),
        rank_theorems.embedding_equals_whole, CASE),
    "padding not masked": (          # it takes probability from the real words
        Bug("reference.layers.embedding", "logits[..., real:] = -np.inf", "pass"),
        rank_theorems.logits_equal_whole, CASE),
    # the loss
    "the maximum not shared": (      # each rank's exp has another scale, so their sum means nothing
        Bug("mpi_impl.layers.cross_entropy", 'group.all_reduce(logits.max(-1), "loss: maximum", op="max")',
            "logits.max(-1)"),
        rank_theorems.loss_equals_whole, CASE),
    "the target's logit from every rank": (
        Bug("mpi_impl.layers.cross_entropy",
            "np.where(held, np.take_along_axis(logits, ids[..., None], -1)[..., 0], 0)",
            "np.take_along_axis(logits, ids[..., None], -1)[..., 0]"),
        rank_theorems.loss_equals_whole, CASE),
    "the loss over the local batch": (   # a sum of means: right only if d = m = 1
        Bug("mpi_impl.training.trainer", "weight = 1 / (global_batch_size * tokens.shape[1])",
            "weight = 1 / tokens.size"),
        rank_theorems.training_equals_one_process, *TRAINING),
    # attention
    "QKV cut across, not by heads": (    # [Q | K | V] in two: the first rank gets Q and half of K
        Bug("reference.params", "return np.split(np.pad(x, padding), t, tensor.split)[rank]",
            "return (np.split(np.pad(x, padding), t, tensor.split)[rank] if x.ndim < 4 else\n"
            "            np.split(x.reshape(len(x), -1), t, 1)[rank].reshape(tensor.local_shape(t)))"),
        rank_theorems.attention_equals_whole, CASE),
    "scores divided by the root of the model's size": (
        Bug("mpi_impl.kernels.cpu", "p *= 1 / sqrt(d)\n        if", "p *= 1 / sqrt(a * d)\n        if"),
        rank_theorems.attention_equals_whole, CASE),
    # gradients and optimizer
    "gradients overwritten, not accumulated": (
        Bug("mpi_impl.kernels", "grad += rows(x).T @ rows(dy)", "grad[...] = rows(x).T @ rows(dy)"),
        rank_theorems.mlp_equals_whole, CASE),
    "replicas' gradients not summed": (
        Bug("mpi_impl.parallel.data_parallel", 'group.all_reduce(flat, "gradients")', "pass"),
        rank_theorems.training_equals_one_process, *TRAINING),
    "replicated weights counted t times in the norm": (   # clipping then depends on t
        Bug("mpi_impl.training.optimizer", "if segment.tensor.split is None:", "if False:"),
        rank_theorems.training_equals_one_process, *TRAINING),
    "the norm over one rank's shard": (                   # every rank clips by another factor, and replicas drift apart
        Bug("mpi_impl.training.optimizer", '(split,) = tensor.all_reduce(np.array([split]), "gradient norm")', "pass"),
        rank_theorems.training_equals_one_process, *TRAINING),
    "every rank draws the same shard": (                  # one seed for all ranks: heads are copies of one another
        Bug("reference.params", "first = rank * length if axis == tensor.split else 0", "first = 0"),
        rank_theorems.training_equals_one_process, *TRAINING),
}


@pytest.mark.parametrize("name", ON_RANKS)
def test_on_ranks(ranks, name):
    bug, theorem, *args = ON_RANKS[name]
    replicas = 2 if theorem is rank_theorems.training_equals_one_process else 1
    assert_caught(ranks, CASE.t * replicas, bug, theorem, *args)


IN_THE_TEXTBOOK = {
    "f without its all-reduce": (
        Bug("reference.collectives", "return all_reduce(dxs)[0]", "return dxs[0]"),
        textbook_theorems.mlp_equals_whole, CASE),
    "g without its all-reduce": (
        Bug("reference.collectives", "return all_reduce(partial)[0]", "return partial[0]"),
        textbook_theorems.attention_equals_whole, CASE),
    "the output bias added t times": (
        Bug("reference.layers.mlp", "partial.append(linear(a, p.w_out)) ",
            "partial.append(linear(a, p.w_out, p.b_out) - p.b_out / len(shards)) "),
        textbook_theorems.mlp_equals_whole, CASE),
    "the vocabulary's offset off by one": (
        Bug("reference.layers.embedding", "local_ids(tokens, rank * len(p.word), len(p.word))",
            "local_ids(tokens, rank * len(p.word) - 1, len(p.word))"),
        textbook_theorems.embedding_equals_whole, CASE),
    "padding not masked": (
        Bug("reference.layers.embedding", "logits[..., real:] = -np.inf", "pass"),
        textbook_theorems.gpt_equals_whole, CASE),
    "the maximum not shared": (
        Bug("reference.layers.cross_entropy", "shifted = part - highest[..., None]",
            "shifted = part - part.max(-1, keepdims=True)"),
        textbook_theorems.losses_agree, CASE),
    "QKV cut across, not by heads": (
        Bug("reference.params", "return np.split(np.pad(x, padding), t, tensor.split)[rank]",
            "return (np.split(np.pad(x, padding), t, tensor.split)[rank] if x.ndim < 4 else\n"
            "            np.split(x.reshape(len(x), -1), t, 1)[rank].reshape(tensor.local_shape(t)))"),
        textbook_theorems.attention_equals_whole, CASE),
    "the loss over the local batch": (
        Bug("reference.data_parallel", "np.full_like(microbatch, 1 / tokens.size)",
            "np.full_like(microbatch, 1 / microbatch.size)"),
        textbook_theorems.replicas_equal_one_process, CASE, 2, 1),
    "replicas' gradients not summed": (
        Bug("reference.data_parallel",
            "tree_map(lambda named, replica=replica: reduced[named.name][replica], with_names(tree))\n",
            "tree\n"),
        textbook_theorems.replicas_equal_one_process, CASE, 2, 1),
    "a residual forgotten backward": (
        Bug("reference.layers.block", "dy = dy + dx\n    dnormed, attention = sharded",
            "dy = dx\n    dnormed, attention = sharded"),
        textbook_theorems.block_equals_whole, CASE),
}


@pytest.mark.parametrize("name", IN_THE_TEXTBOOK)
def test_in_the_textbook(name):
    bug, theorem, *args = IN_THE_TEXTBOOK[name]
    theorem(*args)
    with planted(*bug), pytest.raises(AssertionError):
        theorem(*args)
