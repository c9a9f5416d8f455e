"""The bug zoo: the classic mistakes of parallel training, planted one at a time, and the theorem that catches each.

Read it as a list of what goes wrong in practice: the right line, the wrong one, the theorem that falls. Some comments
tell how the mistake comes about, or what it does.
"""
import pytest

from reference.actions import from_csv
from reference.config import ModelConfig, ParallelConfig
from reference.schedules import gpipe
from reference.traffic import Work
from tests import rank_theorems, textbook_theorems
from tests.mpi_impl.test_pipeline import every_message_arrives
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
        Bug("mpi_impl.training.trainer", "return 1 / (global_batch_size * microbatches[0][0].shape[1])",
            "return 1 / microbatches[0][0].size"),
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
        Bug("mpi_impl.parallel.data_parallel",
            'self.begun.append(self.group.post_all_reduce(self.flat[self.buckets[bucket].slice], "gradients"))',
            "pass"),
        rank_theorems.training_equals_one_process, *TRAINING),
    "replicated weights counted t times in the norm": (   # clipping then depends on t
        Bug("mpi_impl.training.optimizer", "(segment.tensor.split is not None or tensor_rank == 0)", "True"),
        rank_theorems.training_equals_one_process, *TRAINING),
    "the norm over one rank's shard": (                   # every rank clips by another factor, and replicas drift apart
        Bug("mpi_impl.training.optimizer",
            'sqrt(model.all_reduce(np.array([squares], np.float64), "gradient norm")[0])', "sqrt(squares)"),
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


def trained(schedule="1f1b", chunks=None, t=1, p=2, d=1, m=4):
    """Two steps of a model of nine layers, with clipping at work: the ranks that it takes, theorem and arguments."""
    model = ModelConfig(9, 8, 2, 10, 6, make_vocab_size_divisible_by=3)
    return (t * p * d, rank_theorems.training_equals_one_process, Case(t, model, 2, 5, seed=7), 2, m, 0.05,
            rank_theorems.Pipelining(p, schedule, chunks, bucket_size=300))


def run(theorem, *work, t=1, p=2, schedule="1f1b", chunks=None):
    """Another theorem on that model, without replicas."""
    _, _, case, _, m, _, pipelining = trained(schedule, chunks, t, p)
    return t * p, theorem, case, *(work or [m]), pipelining


def played(schedule, t=1, shape=(2, 3, 4)):
    """A schedule without a model."""
    return t * schedule.p, every_message_arrives, schedule, ParallelConfig(t, schedule.p), shape, "d"


TURNED = from_csv("0F0,0F1,0B0,0B1\n1F1,1B1,1F0,1B0")      # ranks take the microbatches in different orders
LARGE = (1, 1, 1 << 17)      # a megabyte: MPI does not buffer it
TIED_SUM = 'self.embedding_group.all_reduce(self.grads.embedding.word, "tied embedding")'
BROADCAST = 'float(self.topology.pipeline.broadcast(found, "loss", self.last_rank)[0])'
TAG = 'return 2 * (action.microbatch * stages + action.stage) + (action.kind == "F")'

IN_A_PIPELINE = {
    # the word table that the first and the last stage share: each has half of its gradient
    "the tied table's gradients not summed": (
        Bug("mpi_impl.training.trainer", TIED_SUM, "pass"), *trained()),
    "the tied table counted twice in the norm": (
        Bug("mpi_impl.training.trainer",
            'self.counted_elsewhere = "embedding.word" if self.embedding_group and last else ""',
            'self.counted_elsewhere = ""'), *trained()),
    "the tied table counted by no stage": (
        Bug("mpi_impl.training.trainer",
            'self.counted_elsewhere = "embedding.word" if self.embedding_group and last else ""',
            'self.counted_elsewhere = "embedding.word" if self.embedding_group else ""'), *trained()),
    "the tied table's two uses on one rank taken for one": (     # its bucket is on its way when the second one comes
        Bug("mpi_impl.training.trainer", 'self.contributions = {"embedding.word": 2}',
            'self.contributions = {"embedding.word": 1}'), *trained("zb-v")),
    "every stage draws from a seed of its own": (                # so the two copies of the table differ from the start
        Bug("mpi_impl.training.trainer", "initialize_shard(tensors, seed, dtype,",
            "initialize_shard(tensors, seed + topology.place.pipeline, dtype,"), *trained()),
    # the norm and the loss
    "the norm over the tensor group alone": (                    # every stage clips by another factor
        Bug("mpi_impl.training.trainer", "self.optimizer.step(self.flat_grads, self.topology.model)",
            "self.optimizer.step(self.flat_grads, self.topology.tensor)"), *trained(t=2)),
    "the norm over the pipeline alone": (
        Bug("mpi_impl.training.trainer", "self.optimizer.step(self.flat_grads, self.topology.model)",
            "self.optimizer.step(self.flat_grads, self.topology.pipeline)"), *trained(t=2)),
    "the loss broadcast from the first rank": (
        Bug("mpi_impl.training.trainer", '"loss", self.last_rank)', '"loss", 0)'), *trained()),
    "the loss broadcast from the last rank of a V": (            # whose first rank has the last stage
        Bug("mpi_impl.training.trainer", '"loss", self.last_rank)', '"loss", self.topology.pipeline.size - 1)'),
        *trained("zb-v")),
    "the loss not broadcast": (
        Bug("mpi_impl.training.trainer", BROADCAST, "float(found[0])"), *trained()),
    "the loss of one replica": (
        Bug("mpi_impl.training.trainer", 'self.topology.data.all_reduce(np.array([loss]), "loss")',
            "np.array([loss])"), *trained(d=2)),
    "the loss of the last microbatch alone": (
        Bug("mpi_impl.parallel.passes", "self.loss += y.sum", "self.loss = y.sum"), *trained()),
    "the gradient of a microbatch's mean, not of the batch's": (
        Bug("mpi_impl.parallel.passes", "self.weight, shape=targets.shape",
            "self.weight * len(self.microbatches), shape=targets.shape"), *trained()),
    # microbatches
    "the targets of the microbatch before": (
        Bug("mpi_impl.parallel.passes", "params, self.model, targets, self.region)",
            "params, self.model, self.microbatches[action.microbatch - 1][1], self.region)"), *trained()),
    "the cache of the latest forward": (                         # GPipe's ranks would all agree on it
        Bug("mpi_impl.parallel.passes", "self.caches.pop((action.stage, action.microbatch))",
            "self.caches.pop(max(self.caches))"), *trained(p=3)),
    "the last stage gets no targets": (
        Bug("mpi_impl.training.batches", "topology.place.pipeline in (0, topology.pipeline.size - 1)",
            "topology.place.pipeline == 0"), *run(rank_theorems.ledger_equals_formulas, Work(2, 8, 0, 0))),
    # messages
    "no tags": (                                                 # in a V a rank's neighbour sends both ways at once
        Bug("mpi_impl.parallel.pipeline", TAG, "return 0"), *trained("zb-v")),
    "tags without the microbatch": (                             # right as long as ranks keep them in one order
        Bug("mpi_impl.parallel.pipeline", TAG, 'return 2 * action.stage + (action.kind == "F")'), *played(TURNED)),
    "receives into one buffer": (
        Bug("mpi_impl.parallel.pipeline", "piece = np.empty_like(self.like, shape=prod(self.shape) // self.pieces)",
            'piece = self.__dict__.setdefault("piece", np.empty(prod(self.shape)))'), *played(TURNED)),
    "sends from one buffer": (                                   # small messages are buffered by MPI: they get through
        Bug("mpi_impl.parallel.pipeline", "y = self.results.pop(step.action).reshape(-1)",
            'y = self.__dict__.setdefault("buffer", np.empty(prod(self.shape)))\n'
            "        y[...] = self.results.pop(step.action).reshape(-1)"), *played(gpipe(2, 8), shape=LARGE)),
    "the first piece sent by every rank": (
        Bug("mpi_impl.parallel.pipeline", "y = y[self.tensor.rank * n:(self.tensor.rank + 1) * n]", "y = y[:n]"),
        *trained(t=2)),
    "the pieces not gathered": (
        Bug("mpi_impl.parallel.pipeline", """self.tensor.all_gather(x, 0, f"gathered {CONTENT[step.action.kind]}")""",
            "np.tile(x, self.tensor.size)"), *trained(t=2)),
    "the pieces gathered, but the whole sent": (                 # a right result, and no saving: the ledger tells
        Bug("mpi_impl.parallel.pipeline",
            "self.sent.append(self.group.post_send(y, step.to,",
            "self.group.ledger.record('send', 'pipeline', 2, CONTENT[step.action.kind], y.size, y.dtype)\n"
            "        self.sent.append(self.group.post_send(y, step.to,"),
        *run(rank_theorems.ledger_equals_formulas, Work(1, 4, 0, 0), t=2)),
    # weight gradients, put off by I
    "W forgets the last of what I held": (
        Bug("mpi_impl.parallel.sinks", "in self.calls:", "in self.calls[:-2]:"), *trained("zb-h1")),
    "W does nothing": (
        Bug("mpi_impl.parallel.passes", "self.deferred.pop((action.stage, action.microbatch)).drain()",
            "self.deferred.pop((action.stage, action.microbatch))"), *trained("zb-h1")),
    "W adds twice": (
        Bug("mpi_impl.parallel.sinks", "accumulate(grad, x, dy)",
            "accumulate(grad, x, dy), accumulate(grad, x, dy)"), *trained("zb-h1")),
    "I adds, and W again": (
        Bug("mpi_impl.parallel.sinks", "self.calls.append(partial(self.sink, grad, x, dy))",
            "accumulate(grad, x, dy), self.calls.append(partial(self.sink, grad, x, dy))"), *trained("zb-h2")),
    # the sum over replicas
    "gradients summed before the last microbatch": (
        Bug("mpi_impl.parallel.data_parallel", "microbatches * expected for", "(microbatches - 1) * expected for"),
        *trained(d=2)),
    "gradients counted as complete by I": (
        Bug("mpi_impl.parallel.passes", "= DeferredSink(self.sink)",
            "= DeferredSink(self.sink)\n        sink.done = self.sink.done"), *trained("zb-h1", d=2)),
    "gradients of the step before kept": (
        Bug("mpi_impl.training.trainer", "self.flat_grads[...] = 0", "pass"), *trained()),
    # layers
    "interleaved stages given to ranks in a row": (              # rank 0 gets stages 0 and 1, not 0 and p
        Bug("reference.stages",
            "{stage: layers_of_stage(stage, stages, c.num_layers) for stage in held} for held in placement",
            "{stage: layers_of_stage(r * len(held) + i, stages, c.num_layers) for i, stage in enumerate(held)}\n"
            "            for r, held in enumerate(placement)"), *trained("interleaved", 2)),
    "the layers that do not divide lost": (
        Bug("reference.stages", "each, more = divmod(num_layers, stages)", "each, more = num_layers // stages, 0"),
        *trained()),
    "a layer on two stages": (
        Bug("reference.stages", "first + each + (stage < more))", "first + each + (stage <= more))"), *trained(p=4)),
    # memory
    "caches kept until the end of the step": (                   # 1F1B then costs what GPipe does
        Bug("mpi_impl.parallel.passes", "self.caches.pop((action.stage, action.microbatch))",
            "self.caches[action.stage, action.microbatch]"), *trained()),
    "an evaluation that keeps caches": (
        Bug("mpi_impl.parallel.passes", '"""Nothing goes backward, so no cache is kept."""',
            'self.__dict__.setdefault("caches", []).append(cache)'), *run(rank_theorems.no_cache_outlives_its_use)),
}


@pytest.mark.parametrize("name", IN_A_PIPELINE)
def test_in_a_pipeline(ranks, name):
    bug, n, theorem, *args = IN_A_PIPELINE[name]
    assert_caught(ranks, n, bug, theorem, *args)


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
