"""The bug zoo: the classic mistakes of parallel training, planted one at a time, and the theorem that catches each.

Read it as a list of what goes wrong in practice: the right line, the wrong one, the theorem that falls. Some comments
tell how the mistake comes about, or what it does.
"""
from dataclasses import replace

import numpy as np
import pytest

from reference.config import ModelConfig, ParallelConfig, Recompute
from reference.costs.traffic import PassCounts
from reference.schedules.actions import from_csv
from reference.schedules.generators import gpipe
from tests import rank_theorems, textbook_theorems, training_theorems
from tests.cases import Case
from tests.deep import one_fast_of
from tests.mpi_impl import test_mixed_precision
from tests.mpi_impl.test_layers import only_inputs_are_kept
from tests.mpi_impl.test_pipeline import every_message_arrives
from tests.mpi_impl.test_zero import no_gradient_outlives_its_use, units_come_and_go
from tests.planted import Bug, assert_caught, planted
from tests.training_theorems import Plan

# Four heads on two ranks; 10 tokens, so that the second rank's table ends in padding.
MODEL = ModelConfig(2, 16, 4, 10, 6, make_vocab_size_divisible_by=3)
CASE = Case(2, MODEL, 2, 5, seed=7)
SHARDED = Case(2, MODEL, 2, 6, seed=7, sequence_parallel=True)      # each of two ranks has three positions
TRAINING = (CASE, 2, 2)   # steps, microbatches
FULL, IN_PAIRS = Recompute("full"), Recompute("full", "uniform", 2)

ON_RANKS: dict[str, tuple] = {
    # f and g
    "f without its all-reduce": (    # each rank's dx is a partial sum: layers below get a wrong gradient, silently
        Bug("mpi_impl.comm.mappings", "return self.group.all_reduce(dx, reason)", "return dx"),
        rank_theorems.mlp_equals_whole, CASE),
    "g without its all-reduce": (
        Bug("mpi_impl.comm.mappings", "return self.group.all_reduce(partial, reason)", "return partial"),
        rank_theorems.attention_equals_whole, CASE),
    "g all-reduces backward too": (  # what a framework's own all-reduce does when it is differentiated naively
        Bug("mpi_impl.comm.mappings", "return dy\n\n    def keep",
            "return self.group.all_reduce(dy, reason)\n\n    def keep"),
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
        Bug("mpi_impl.layers.attention", 'linear(attended, p.w_out), "attention output")',
            'linear(attended, p.w_out, p.b_out), "attention output") - p.b_out'),
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
    "tokens of other ranks not zeroed": (
        Bug("mpi_impl.layers.embedding", "lookup(ids, p.word) * held[..., None]", "lookup(ids, p.word)"),
        rank_theorems.embedding_equals_whole, CASE),
    "the gradient of tokens of other ranks kept": (
        Bug("mpi_impl.layers.embedding", "lookup_backward(dx * held[..., None], ", "lookup_backward(dx, "),
        rank_theorems.embedding_equals_whole, CASE),
    "padding not masked": (          # it takes probability from the real tokens
        Bug("reference.layers.embedding", "logits[..., real:] = -np.inf", "pass"),
        rank_theorems.logits_equal_whole, CASE),
    # the loss
    "the maximum not shared": (      # each rank's exp has another scale, so their sum means nothing
        Bug("mpi_impl.layers.cross_entropy", 'group.all_reduce(logits.max(-1), "loss: maximum", op="max")',
            "logits.max(-1)"),
        rank_theorems.loss_equals_whole, CASE),
    "the target's logit from every rank": (
        Bug("mpi_impl.layers.cross_entropy",
            "np.where(held, np.take_along_axis(logits, ids[..., None], -1)[..., 0] - highest, 0)",
            "np.take_along_axis(logits, ids[..., None], -1)[..., 0] - highest"),
        rank_theorems.loss_equals_whole, CASE),
    "the loss over the local batch": (   # a sum of means: right only if d = m = 1
        Bug("mpi_impl.training.trainer", "return [global_batch_size * microbatches[0].tokens.shape[1]]",
            "return [microbatches[0].tokens.size]"),
        training_theorems.training_equals_one_process, *TRAINING),
    # attention
    "QKV split across, not by heads": (              # [Q | K | V] in two: the first rank gets Q and half of K
        Bug("reference.params", "return np.split(np.pad(x, padding), t, tensor.split)[rank]",
            "return (np.split(np.pad(x, padding), t, tensor.split)[rank] if x.ndim < 4 else\n"
            "            np.split(x.reshape(len(x), -1), t, 1)[rank].reshape(tensor.local_shape(t)))"),
        rank_theorems.attention_equals_whole, CASE),
    "scores divided by the root of the model's size": (
        Bug("mpi_impl.kernels.cpu", "return 1 / sqrt(q.shape[-1])", "return 1 / sqrt(q.shape[-2] * q.shape[-1])"),
        rank_theorems.attention_equals_whole, CASE),
    # sequence parallelism: outside the regions a rank has some positions of every sequence
    "an all-gather without its reduce-scatter": (    # each rank's own positions, of its own partial sum alone
        Bug("mpi_impl.comm.mappings", "return self.group.reduce_scatter(dx, SEQUENCE, reason)",
            "n = dx.shape[1] // self.size\n        return dx[:, self.rank * n:(self.rank + 1) * n]"),
        rank_theorems.mlp_equals_whole, SHARDED),
    "a reduce-scatter of identical arrays": (        # it is summed once more: t times too large
        Bug("mpi_impl.layers.embedding", 'region.leave(partial, "embedding output")',
            'region.leave(region.group.all_reduce(partial, "words"), "embedding output")'),
        rank_theorems.embedding_equals_whole, SHARDED),
    "a reduce-scatter backward, too": (              # of dy, which holds the rank's own positions only
        Bug("mpi_impl.comm.mappings", "return self.group.all_gather(dy, SEQUENCE, reason)",
            "return self.group.reduce_scatter(self.group.all_gather(dy, SEQUENCE, reason).repeat(self.size, 1), "
            "SEQUENCE, reason)"),
        rank_theorems.attention_equals_whole, SHARDED),
    "every rank's positions begin at 0": (
        Bug("mpi_impl.layers.embedding", "p.position[first + positions.start:first + positions.stop]",
            "p.position[:x.shape[1]]"),
        rank_theorems.embedding_equals_whole, SHARDED),
    "the gradient of positions that other ranks have": (
        Bug("mpi_impl.layers.embedding", "grads.position[region.positions(dx)] +=", "grads.position[:dx.shape[1]] +="),
        rank_theorems.embedding_equals_whole, SHARDED),
    # dropout
    "one mask for the heads of all ranks": (         # Megatron's common state, used inside: draws that repeat t times
        Bug("mpi_impl.layers.attention", "first_head=region.rank * q.shape[2]", "first_head=0"),
        rank_theorems.attention_equals_whole, CASE),
    "another mask on each rank, outside": (          # the rank's own state: identical activations drift apart
        Bug("mpi_impl.layers.block", "dropout.hidden(site,", "dropout.at(dropout.layer + region.rank).hidden(site,"),
        rank_theorems.block_equals_whole, CASE),
    "one mask for the positions of all ranks": (
        Bug("mpi_impl.layers.block", "dropout.hidden(site, region.positions(x).start)", "dropout.hidden(site)"),
        rank_theorems.block_equals_whole, SHARDED),
    "one mask for all layers": (
        Bug("mpi_impl.models.stage", "region, context.at(layer))", "region, context.at(0))"),
        rank_theorems.model_equals_whole, CASE),
    "no mask backward": (
        Bug("mpi_impl.layers.block", "masked = kernels.dropout_backward(dy, cache.mlp_mask)", "masked = dy"),
        rank_theorems.block_equals_whole, CASE),
    # recompute
    "the output kept, where the input is needed": (
        Bug("mpi_impl.models.stage", "LayersCache(layers, None, x) if", "LayersCache(layers, None, y) if"),
        rank_theorems.model_equals_whole, CASE, FULL),
    "a group's layers backward in the order of the forward": (
        Bug("mpi_impl.models.stage", "for layer in reversed(layers):", "for layer in layers:"),
        rank_theorems.model_equals_whole, CASE, IN_PAIRS),
    "a recomputed layer without dropout": (
        Bug("mpi_impl.models.stage", "region, cache.context)", "region, cache.context._replace(dropout=None))"),
        rank_theorems.model_equals_whole, CASE, FULL),
    "a recomputed layer with another mask": (        # a state that has moved on
        Bug("mpi_impl.models.stage", "region, cache.context)", "region, cache.context._replace("
            "dropout=cache.context.dropout and cache.context.dropout.__class__(c, 1, 1)))"),
        rank_theorems.model_equals_whole, CASE, IN_PAIRS),
    "caches kept, though they are recomputed": (     # right, and nothing is saved
        Bug("mpi_impl.models.stage", "LayersCache(layers, None, x) if", "LayersCache(layers, caches, x) if"),
        only_inputs_are_kept, CASE, FULL),
    "caches there while the next ones are made": (
        Bug("mpi_impl.models.stage", "        if keep:\n", "        if True:\n"), only_inputs_are_kept, CASE, FULL),
    "the core kept, though it is recomputed": (
        Bug("mpi_impl.layers.attention", "inputs if context.recompute.selective else core", "core"),
        only_inputs_are_kept, CASE, Recompute("selective")),
    # gradients and optimizer
    "gradients overwritten, not accumulated": (
        Bug("mpi_impl.kernels.plain", "grad += rows(", "grad[...] = rows("),
        rank_theorems.mlp_equals_whole, CASE),
    "replicas' gradients not summed": (
        Bug("mpi_impl.parallel.data_parallel",
            'self.group.post_all_reduce(self.own.flat[bucket.slice], "gradients")',
            'Pending(self.group, "gradients", [], None, None, [])'),
        training_theorems.training_equals_one_process, *TRAINING),
    "replicated weights counted t times in the norm": (   # clipping then depends on t
        Bug("mpi_impl.parallel.model_state", "(piece.of.tensor.split is not None or tensor_rank == 0)", "True"),
        training_theorems.training_equals_one_process, *TRAINING),
    "the norm over one rank's shard": (                   # every rank clips by another factor, and replicas drift apart
        Bug("mpi_impl.training.optimizer",
            'sqrt(everyone.all_reduce(np.array([squares], np.float64), "gradient norm")[0])', "sqrt(squares)"),
        training_theorems.training_equals_one_process, *TRAINING),
    "every rank draws the same shard": (                  # one seed for all ranks: heads are copies of one another
        Bug("reference.params", "rank * length if axis == tensor.split else 0 for", "0 for"),
        training_theorems.training_equals_one_process, *TRAINING),
}


@pytest.fixture(scope="module")
def ranks(small_pools):
    """Return small pools, since many bugs leave ranks hanging."""
    return small_pools


@pytest.mark.parametrize("name", one_fast_of(4, ON_RANKS))
def test_on_ranks(ranks, name):
    bug, theorem, *args = ON_RANKS[name]
    replicas = 2 if theorem is training_theorems.training_equals_one_process else 1
    assert_caught(ranks, CASE.t * replicas, bug, theorem, *args)


def trained(schedule="1f1b", chunks=None, t=1, p=2, d=1, m=4, sequence_parallel=False, layers=9, **plan):
    """Return ranks, theorem and arguments: two steps of a model of nine layers, whose gradients are clipped."""
    model = ModelConfig(layers, 8, 2, 10, 6, make_vocab_size_divisible_by=3)
    case = Case(t, model, 2, 6 if sequence_parallel else 5, seed=7, sequence_parallel=sequence_parallel)
    return (t * p * d, training_theorems.training_equals_one_process, case, 2, m, 0.05,
            training_theorems.Plan(p, schedule, chunks, bucket_size=300, **plan))


def small(d=1, p=1, m=2, **choices):
    """Return the same for a model of three layers, without a pipeline."""
    return trained(d=d, p=p, m=m, layers=3, **choices)


def zero(stage, **choices):
    """Return the same for two replicas that shard the states."""
    return small(d=2, zero_stage=stage, **choices)


def observed(theorem, stage, **choices):
    """Return another theorem, about the states that two replicas hold, with its arguments."""
    _, _, case, *_, plan = zero(stage, **choices)
    return 2, theorem, case, 2, plan


def run(theorem, *work, t=1, p=2, schedule="1f1b", chunks=None):
    """Return another theorem on the model of `trained`, without replicas, with its arguments."""
    _, _, case, _, m, _, plan = trained(schedule, chunks, t, p)
    return t * p, theorem, case, *(work or [m]), plan


def played(schedule, t=1, shape=(2, 3, 4)):
    """Return a theorem on a schedule without a model, with its arguments."""
    return t * schedule.p, every_message_arrives, schedule, ParallelConfig(t, schedule.p), shape, "d"


TURNED = from_csv("0F0,0F1,0B0,0B1\n1F1,1B1,1F0,1B0")      # ranks take the microbatches in different orders
LARGE = (1, 1, 1 << 17)      # a megabyte: MPI does not buffer it
REPLICATED = "piece.of.tensor.split is None"
OWNERS = "state.zero.owners"
BROADCAST = 'self.topology.pipeline.broadcast(found, "loss", self.state.last_rank)'
TAG = 'return 2 * (action.microbatch * stages + action.stage) + (action.kind == "F")'

IN_A_PIPELINE: dict[str, tuple] = {
    # the word table that the first and the last stage share: each has half of its gradient
    "the tied table's gradients not summed": (
        Bug("mpi_impl.parallel.model_state", "if self.embedding_group:", "if False:"), *trained()),
    "the tied table counted twice in the norm": (
        Bug("mpi_impl.parallel.model_state",
            'self.tied_copy = "embedding.word" if self.embedding_group and last else ""',
            'self.tied_copy = ""'), *trained()),
    "the tied table counted by no stage": (
        Bug("mpi_impl.parallel.model_state",
            'self.tied_copy = "embedding.word" if self.embedding_group and last else ""',
            'self.tied_copy = "embedding.word" if self.embedding_group else ""'), *trained()),
    "the tied table's two uses on one rank taken for one": (     # its bucket is on its way when the second one comes
        Bug("mpi_impl.parallel.model_state", 'self.contributions = {"embedding.word": 2}',
            'self.contributions = {"embedding.word": 1}'), *trained("zb-v")),
    "every stage draws from a seed of its own": (                # so the two copies of the table differ from the start
        Bug("mpi_impl.parallel.model_state", "self.parameters.initialize(tensors, seed,",
            "self.parameters.initialize(tensors, seed + topology.place.pipeline,"), *trained()),
    # the norm and the loss
    "the norm over the tensor group alone": (                    # every stage clips by another factor
        Bug("mpi_impl.training.trainer", OWNERS, "self.topology.tensor"), *trained(t=2)),
    "the norm over the pipeline alone": (
        Bug("mpi_impl.training.trainer", OWNERS, "self.topology.pipeline"), *trained(t=2)),
    "the loss broadcast from the first rank": (
        Bug("mpi_impl.training.trainer", '"loss", self.state.last_rank)', '"loss", 0)'), *trained()),
    "the loss broadcast from the last rank of a V": (            # whose first rank has the last stage
        Bug("mpi_impl.training.trainer", '"loss", self.state.last_rank)', '"loss", self.topology.pipeline.size - 1)'),
        *trained("zb-v")),
    "the loss not broadcast": (
        Bug("mpi_impl.training.trainer", BROADCAST, "found"), *trained()),
    "the loss of one replica": (
        Bug("mpi_impl.training.trainer", 'self.topology.data.all_reduce(self.on_host(losses), "loss")',
            "self.on_host(losses)"), *trained(d=2)),
    "the loss of the last microbatch alone": (
        Bug("mpi_impl.parallel.passes", "self.losses[i] += (loss", "self.losses[i] = (loss"), *trained()),
    "the gradient of a microbatch's mean, not of the batch's": (
        Bug("mpi_impl.parallel.passes", "(self.scale * each)",
            "(self.scale * len(self.microbatches) * each)"), *trained()),
    # microbatches
    "the targets of the microbatch before": (
        Bug("mpi_impl.parallel.passes", "self.model, batch, self.region,",
            "self.model, batch._replace(targets=self.microbatches[action.microbatch - 1].targets), self.region,"),
        *trained()),
    "the cache of the latest forward": (                         # GPipe's ranks would all agree on it
        Bug("mpi_impl.parallel.passes", "self.caches.pop((action.stage, action.microbatch))",
            "self.caches.pop(max(self.caches))"), *trained(p=3)),
    "the last stage gets no targets": (
        Bug("mpi_impl.training.batches", "topology.place.pipeline in (0, topology.pipeline.size - 1)",
            "topology.place.pipeline == 0"), *run(training_theorems.ledger_equals_formulas, PassCounts(2, 8, 0, 0))),
    # messages
    "no tags": (                                                 # in a V neighbours send both ways at the same time
        Bug("mpi_impl.parallel.pipeline", TAG, "return 0"), *trained("zb-v")),
    "tags without the microbatch": (                             # right as long as ranks keep them in one order
        Bug("mpi_impl.parallel.pipeline", TAG, 'return 2 * action.stage + (action.kind == "F")'), *played(TURNED)),
    "receives into one buffer": (
        Bug("mpi_impl.parallel.pipeline",
            "piece = np.empty_like(self.like, shape=prod(self.shape) // self.scattered_parts)",
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
        *run(training_theorems.ledger_equals_formulas, PassCounts(1, 4, 0, 0), t=2)),
    # weight gradients, put off by I
    "W forgets the last product that I deferred": (
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
        Bug("mpi_impl.parallel.data_parallel", "self.own.flat[...] = 0", "pass"), *trained()),
    # sequence parallelism: what is on every rank was applied to its own positions, so gradients are partial sums
    "gradients of replicated tensors not summed": (              # and each rank's norms go another way
        Bug("mpi_impl.parallel.model_state", "if self.topology.config.sequence_parallel:", "if False:"),
        *small(t=2, sequence_parallel=True)),
    "the biases' gradients not summed": (
        Bug("mpi_impl.parallel.model_state", REPLICATED, f'{REPLICATED} and not piece.of.name.endswith("b_out")'),
        *small(t=2, sequence_parallel=True)),
    "the norms' gradients not summed": (
        Bug("mpi_impl.parallel.model_state", REPLICATED, f'{REPLICATED} and "layernorm" not in piece.of.name'),
        *small(t=2, sequence_parallel=True)),
    "the positions' gradients not summed": (
        Bug("mpi_impl.parallel.model_state", REPLICATED, f'{REPLICATED} and "position" not in piece.of.name'),
        *small(t=2, sequence_parallel=True)),
    "split tensors' gradients summed, too": (                    # columns of one rank to columns of another
        Bug("mpi_impl.parallel.model_state", REPLICATED, "True"), *small(t=2, sequence_parallel=True)),
    "a sharded activation scattered once more": (                # a receiver gets parts of other positions
        Bug("reference.config", "whole = self.sequence_parallel or not self", "whole = not self"),
        *trained(t=2, sequence_parallel=True)),
    # dropout
    "every microbatch draws the same mask": (
        Bug("mpi_impl.training.trainer", "samples_of(replica, k, d, b).start", "samples_of(replica, 0, d, b).start"),
        *small()),
    "every replica draws the same mask": (
        Bug("mpi_impl.training.trainer", "samples_of(replica, k, d, b).start", "samples_of(0, k, d, b).start"),
        *small(d=2)),
    "every step draws the same mask": (
        Bug("mpi_impl.training.trainer", "self.state.seed, self.iteration, sample",
            "self.state.seed, 1, sample"), *small()),
    "an evaluation with dropout": (
        Bug("mpi_impl.parallel.passes", "[EVALUATION] * len(microbatches)",
            "[LayerContext(__import__('reference.dropout').dropout.Dropout(model, 1, 1))] * len(microbatches)"),
        *small()),
    # ZeRO: replicas that divide the work
    "parameters not gathered after the step": (                  # every replica has moved its own part only
        Bug("mpi_impl.parallel.zero", "for bucket in self.layout.buckets:", "for bucket in ():"), *zero(1)),
    "another replica's part moved": (                            # with gradients that have not been summed
        Bug("mpi_impl.parallel.zero", "return self.topology.data.rank\n",
            "return (self.topology.data.rank + 1) % self.topology.data.size\n"), *zero(1)),
    "the first part on every replica": (
        Bug("mpi_impl.parallel.zero", "flat[own.in_buffer.start - bucket.start:own.in_buffer.stop - bucket.start]",
            "flat[:own.size]"), *zero(3)),
    "only the last microbatch's gradients": (                    # overwritten, where they should be added
        Bug("mpi_impl.parallel.zero", "own += self.group.post_reduce_scatter(",
            "own[...] = self.group.post_reduce_scatter("),
        *zero(2)),
    "the norm over one replica": (                               # which owns a part of the model only
        Bug("mpi_impl.training.trainer", OWNERS, "self.topology.model"), *zero(1)),
    "all pieces with the moments of the first": (
        Bug("mpi_impl.parallel.buffers", "return piece.in_shard", "return slice(0, piece.size)"), *zero(1)),
    "a unit gathered once and for all": (                        # the second step computes with old parameters
        Bug("mpi_impl.parallel.zero", "self.pending = None\n        self.parameters.whole.remove(self.name)", "pass"),
        *zero(3)),
    "gradients sent twice": (    # where backward is split, a bucket may stay when it has been sent: it must be empty
        Bug("mpi_impl.parallel.zero", "            flat[...] = 0\n", ""), *zero(2, p=2, schedule="zb-h2", m=4)),
    "the tied table in a bucket with others": (                  # one stage sums its first half, the other its second
        Bug("reference.parallel.layout", " or ALONE in (unit, units[-1])", ""), *zero(1, p=2)),
    "offloaded shards not stored": (                             # the copy that was loaded has changed, and is gone
        Bug("mpi_impl.training.optimizer", "buffer.store(place, values)", "pass"), *zero(1, cpu_offload=True)),
    # what was whole for a while, and stays: right results, and no memory saved
    "a name that keeps a block": (
        Bug("mpi_impl.models.stage", "del block, dblock", "del dblock"),
        *observed(units_come_and_go, 3, recompute=Recompute("full", "uniform", 3))),
    "a name that keeps the tables": (
        Bug("mpi_impl.models.stage", "del tables ", "pass "), *observed(units_come_and_go, 3)),
    "nothing prefetched": (                                      # right, and every block waits for its parameters
        Bug("mpi_impl.models.units", "units[following].prefetch()", "pass"), *observed(units_come_and_go, 3)),
    "whole gradients kept": (
        Bug("mpi_impl.parallel.zero", "del self.whole[bucket]", "pass"), *observed(no_gradient_outlives_its_use, 2)),
    # layers
    "interleaved stages given to ranks in a row": (              # rank 0 gets stages 0 and 1, not 0 and p
        Bug("reference.parallel.stages",
            "{stage: layers_of_stage(stage, stages, c.num_layers) for stage in held} for held in placement",
            "{stage: layers_of_stage(r * len(held) + i, stages, c.num_layers) for i, stage in enumerate(held)}\n"
            "            for r, held in enumerate(placement)"), *trained("interleaved", 2)),
    "the layers that do not divide lost": (
        Bug("reference.parallel.stages", "each, more = divmod(num_layers, stages)",
            "each, more = num_layers // stages, 0"),
        *trained()),
    "a layer on two stages": (
        Bug("reference.parallel.stages", "first + each + (stage < more))",
            "first + each + (stage <= more))"), *trained(p=4)),
    # memory
    "caches kept until the end of the step": (                   # 1F1B then costs what GPipe does
        Bug("mpi_impl.parallel.passes", "self.caches.pop((action.stage, action.microbatch))",
            "self.caches[action.stage, action.microbatch]"), *trained()),
    "an evaluation that keeps its layers' caches": (            # where a step with recompute would not
        Bug("mpi_impl.parallel.passes", "[EVALUATION] * len(microbatches)", "[LayerContext()] * len(microbatches)"),
        *run(training_theorems.no_cache_outlives_its_use)),
    "an evaluation that keeps caches": (
        Bug("mpi_impl.parallel.passes", '"""Keep nothing: no backward follows."""',
            'self.__dict__.setdefault("caches", []).append(cache)'), *run(training_theorems.no_cache_outlives_its_use)),
}


@pytest.mark.parametrize("name", one_fast_of(8, IN_A_PIPELINE))
def test_in_a_pipeline(ranks, name):
    bug, n, theorem, *args = IN_A_PIPELINE[name]
    assert_caught(ranks, n, bug, theorem, *args)


BERT = replace(MODEL, architecture="bert", heads=("lm", "sop"))
ORIGINAL = replace(BERT, apply_residual_connection_post_layernorm=True)
CHOICE = replace(BERT, heads=("choice",))


def of_bert(theorem, *args, model=BERT, sequence_parallel=False):
    """Return a theorem about a BERT on two ranks, with its arguments."""
    return 2, theorem, replace(SHARDED if sequence_parallel else CASE, model=model), *args


def trained_bert(p=1, d=1, m=2, model=BERT, sequence_parallel=False, layers=3, **plan):
    """Return the main theorem about a BERT, on the ranks of a pipeline and of replicas."""
    n, theorem, case, *args = trained(p=p, d=d, m=m, sequence_parallel=sequence_parallel, layers=layers, **plan)
    return n, theorem, replace(case, model=replace(model, num_layers=layers)), *args


OF_BERT: dict[str, tuple] = {
    # what counts in the loss
    "a mean of the replicas' means": (                           # each has masked another number of tokens
        Bug("mpi_impl.training.trainer",
            'self.topology.data.all_reduce(to_host(mine).astype(np.float64), "weights of the losses")',
            "to_host(mine).astype(np.float64) * self.topology.data.size"), *trained_bert(d=2)),
    "a mean of the microbatches' means": (
        Bug("mpi_impl.parallel.passes", "[weights / total for weights,",
            "[weights / max(weights.sum(), 1) / len(self.microbatches) for weights,"), *trained_bert()),
    "tokens that were not masked count": (
        Bug("mpi_impl.parallel.passes", "[weights / total for weights,", "[(0 * weights + 1) / total for weights,"),
        *trained_bert()),
    # padding
    "padding is attended to": (
        Bug("mpi_impl.layers.attention", "causal, site, context.lengths)", "causal, site)"),
        *of_bert(rank_theorems.attention_equals_whole, False)),
    "padding is attended to in a recomputed layer": (
        Bug("mpi_impl.models.stage", "region, cache.context)", "region, cache.context._replace(lengths=None))"),
        *of_bert(rank_theorems.model_equals_whole, FULL)),
    "a stage in the middle does not get the lengths": (          # it needs no tokens, which is enough for a GPT
        Bug("mpi_impl.training.batches", "not model.causal or topology.place.pipeline in",
            "topology.place.pipeline in"),
        3, training_theorems.ledger_equals_formulas, replace(CASE, t=1, model=replace(BERT, num_layers=3)),
        PassCounts(1, 3, 0, 0), Plan(3)),
    # the order of norms and residual connections
    "the sum past a norm that begins before it": (
        Bug("mpi_impl.layers.block", "        dnormed += dy\n", ""),
        *of_bert(rank_theorems.block_equals_whole, model=ORIGINAL)),
    # token types
    "token types of the first positions on every rank": (
        Bug("mpi_impl.layers.embedding", "token_types[:, positions]", "token_types[:, :x.shape[1]]"),
        *of_bert(rank_theorems.embedding_equals_whole, sequence_parallel=True)),
    "one token type gets the gradient of both": (
        Bug("mpi_impl.layers.embedding", "[~second, second]", "[second | True, second]"),
        *of_bert(rank_theorems.embedding_equals_whole)),
    # heads
    "every rank's first position is [CLS]": (
        Bug("mpi_impl.comm.mappings", "return self.group.broadcast(y, reason)", "return y"),
        *of_bert(rank_theorems.model_equals_whole, sequence_parallel=True)),
    "every rank's first position learns what [CLS] does": (
        Bug("mpi_impl.comm.mappings", "return dy if self.rank == 0 else np.zeros_like(dy)", "return dy"),
        *of_bert(rank_theorems.model_equals_whole, sequence_parallel=True, model=CHOICE)),
    "one head's gradient in the place of the other's": (
        Bug("mpi_impl.models.bert", "dnormed += lm_loss_backward(", "dnormed = lm_loss_backward("),
        *of_bert(rank_theorems.model_equals_whole)),
    "the bias of the first tokens on every rank": (
        Bug("mpi_impl.layers.heads", "    logits += p.bias  ",
            "    logits += region.group.broadcast(p.bias.copy(), 'bias')  "),
        *of_bert(rank_theorems.masked_lm_equals_whole)),
    "a name that keeps the final norm": (                        # while the heads need their own layers
        Bug("mpi_impl.models.bert", "        del norm ", "        pass "),
        *of_bert(units_come_and_go, 2, Plan(zero_stage=3), model=replace(BERT, num_layers=3))),
    "a table without logits waits for theirs": (                 # and is never complete
        Bug("mpi_impl.parallel.model_state", "if self.model.tied and first and last else {}",
            "if first and last else {}"),
        *trained_bert(d=2, model=CHOICE)),
}


@pytest.mark.parametrize("name", one_fast_of(4, OF_BERT))
def test_of_bert(ranks, name):
    bug, n, theorem, *args = OF_BERT[name]
    assert_caught(ranks, n, bug, theorem, *args)


FLOAT16 = (test_mixed_precision.CASE, 2, Plan(2), "float16")     # with four ranks, and microbatches
ZERO_1 = (test_mixed_precision.CASE, Plan(2, zero_stage=1))

IN_16_BITS: dict[str, tuple] = {
    "gradients left as large as the loss scale made them": (
        Bug("mpi_impl.training.optimizer", "clip_coefficient(norm, self.config.clip_grad) / scale",
            "clip_coefficient(norm, self.config.clip_grad)"), test_mixed_precision.close_to_float32, *FLOAT16),
    "the norm of scaled gradients": (                        # all of them are clipped
        Bug("mpi_impl.training.optimizer", "global_norm(grads, self.counted, everyone) / scale",
            "global_norm(grads, self.counted, everyone)"), test_mixed_precision.close_to_float32, *FLOAT16),
    "the loss not scaled": (
        Bug("mpi_impl.parallel.passes", "(self.scale * each)", "each"),
        test_mixed_precision.close_to_float32, *FLOAT16),
    "the loss in 16 bits": (
        Bug("mpi_impl.models.gpt", "if not c.fp16_lm_cross_entropy:", "if False:"),
        test_mixed_precision.the_loss_has_its_format, "float16", False),
    "a skipped step drops what the one before it has": (     # a count of updates, where a count of steps is needed
        Bug("mpi_impl.training.trainer", "self.state.seed, self.iteration, sample",
            "self.state.seed, self.optimizer.iteration + 1, sample"),
        test_mixed_precision.close_to_float32, *FLOAT16, 3, 1),
    "no master weights": (                                   # small updates are rounded away
        Bug("mpi_impl.parallel.model_state", "if self.precision.half:", "if False:"),
        test_mixed_precision.gains_move, "bfloat16", 2.0**-12),
    "master weights that the model never sees": (
        Bug("mpi_impl.kernels.plain", "model[...] = narrowed(param, model.dtype)", "pass"),
        test_mixed_precision.gains_move, "bfloat16", 2.0**-12),
    "an overflow that only its rank sees": (                 # the others move their weights
        Bug("mpi_impl.training.optimizer",
            'sqrt(everyone.all_reduce(np.array([squares], np.float64), "gradient norm")[0])', "sqrt(squares)"),
        test_mixed_precision.one_overflow_skips_on_all, *ZERO_1, 3, np.inf, 0),
    "an overflow that clips all gradients to nothing": (     # 0 x infinity is no number, and goes into the weights
        Bug("mpi_impl.training.optimizer", "if not isfinite(norm):", "if False:"),
        test_mixed_precision.one_overflow_skips_on_all, *ZERO_1, 3, np.inf, 0),
    "a skipped step advances the learning rate": (
        Bug("mpi_impl.training.optimizer", "            return norm, rate\n        self.iteration += 1",
            "            self.iteration += 1\n            return norm, rate\n        self.iteration += 1"),
        test_mixed_precision.scale_is_found, *ZERO_1),
    "the scale stays where everything overflows": (
        Bug("mpi_impl.training.trainer", "self.scaler.update(result.skipped)", "self.scaler.update(False)"),
        test_mixed_precision.scale_is_found, *ZERO_1),
    "no patience with the scale": (
        Bug("reference.precision", "max(patience - 1, 0)", "0"), test_mixed_precision.scale_is_found, *ZERO_1),
}


@pytest.mark.parametrize("name", one_fast_of(4, IN_16_BITS))
def test_in_16_bits(ranks, name):
    bug, theorem, *args = IN_16_BITS[name]
    assert_caught(ranks, 4, bug, theorem, *args)


IN_THE_TEXTBOOK: dict[str, tuple] = {
    "f without its all-reduce": (
        Bug("reference.comm.mappings", "return all_reduce(dxs)", "return dxs"),
        textbook_theorems.mlp_equals_whole, CASE),
    "g without its all-reduce": (
        Bug("reference.comm.mappings", "return all_reduce(partial)", "return partial"),
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
        textbook_theorems.model_equals_whole, CASE),
    "the maximum not shared": (
        Bug("reference.layers.cross_entropy", "shifted = shard - highest[..., None]",
            "shifted = shard - shard.max(-1, keepdims=True)"),
        textbook_theorems.losses_agree, CASE),
    "QKV split across, not by heads": (
        Bug("reference.params", "return np.split(np.pad(x, padding), t, tensor.split)[rank]",
            "return (np.split(np.pad(x, padding), t, tensor.split)[rank] if x.ndim < 4 else\n"
            "            np.split(x.reshape(len(x), -1), t, 1)[rank].reshape(tensor.local_shape(t)))"),
        textbook_theorems.attention_equals_whole, CASE),
    "the loss over the local batch": (
        Bug("reference.parallel.data_parallel", "np.full_like(microbatch, 1 / tokens.size)",
            "np.full_like(microbatch, 1 / microbatch.size)"),
        textbook_theorems.replicas_equal_one_process, CASE, 2, 1),
    "replicas' gradients not summed": (
        Bug("reference.parallel.data_parallel", "return [total for _ in trees]", "return trees"),
        textbook_theorems.replicas_equal_one_process, CASE, 2, 1),
    "gradients of replicated tensors not summed": (      # though each rank has seen its own positions only
        Bug("reference.comm.mappings", "parts[rank] if tensor.split is not None", "parts[rank] if True"),
        textbook_theorems.mlp_equals_whole, SHARDED),
    "every rank's positions begin at 0": (
        Bug("reference.layers.embedding", "xs[rank] + p.position[positions]",
            "xs[rank] + p.position[:positions.stop - positions.start]"),
        textbook_theorems.embedding_equals_whole, SHARDED),
    "one mask for the positions of all ranks": (
        Bug("reference.layers.block", "dropout.hidden(site, positions.start)", "dropout.hidden(site)"),
        textbook_theorems.block_equals_whole, SHARDED),
    "one mask for the heads of all ranks": (
        Bug("reference.layers.attention", "first_head=rank * p.b_qkv.shape[1]", "first_head=0"),
        textbook_theorems.attention_equals_whole, CASE),
    "the output kept, where the input is needed": (
        Bug("reference.models.stage", "LayersCache(layers, None, xs) if", "LayersCache(layers, None, ys) if"),
        textbook_theorems.model_equals_whole, CASE, FULL),
    "a recomputed layer without dropout": (
        Bug("reference.models.stage", "region, cache.context)", "region, cache.context._replace(dropout=None))"),
        textbook_theorems.model_equals_whole, CASE, FULL),
    "the gradient past a norm forgotten": (
        Bug("reference.layers.block", "layer_norm_backward(dnormed + dy, p, cache)",
            "layer_norm_backward(dnormed, p, cache)"),
        textbook_theorems.gradients_are_derivatives, replace(CASE, model=ORIGINAL)),
    "every rank's first position is [CLS]": (
        Bug("reference.models.bert", "loss = region.of_first_position(list(found))[0]",
            "loss = sum(found) / len(found)"),
        textbook_theorems.model_equals_whole, replace(SHARDED, model=BERT)),
    "a residual forgotten backward": (
        Bug("reference.layers.block", "return dx + dy, grads", "return dx, grads"),
        textbook_theorems.gradients_are_derivatives, CASE),
}


@pytest.mark.parametrize("name", IN_THE_TEXTBOOK)
def test_in_the_textbook(name):
    bug, theorem, *args = IN_THE_TEXTBOOK[name]
    theorem(*args)
    with planted(*bug), pytest.raises(AssertionError):
        theorem(*args)
