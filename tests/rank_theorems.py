"""Sharded = unsharded on real ranks, a function for each layer: run by every rank of a group, which has t ranks.

Rank 0 computes the whole layer with the textbook, for all: where cores are few that is faster than each for itself.
Each rank computes its own share with the machine, and compares. With `wrap` arrays are of another library: the
machine's are wrapped, the textbook's are not.

At the end stand the theorems on training, on groups of t x p x d ranks.
"""
import gc
import traceback
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from mpi_impl import kernels
from mpi_impl.comm.mappings import SequenceParallelRegion, TensorParallelRegion
from mpi_impl.comm.ledger import Ledger
from mpi_impl.comm.topology import Place, connect, disconnect
from mpi_impl.layers import attention, block, cross_entropy, embedding, linear, mlp
from mpi_impl.models import gpt
from mpi_impl.parallel import passes
from mpi_impl.parallel.pipeline import Pipeline
from mpi_impl.parallel.sinks import ImmediateSink
from mpi_impl.parallel.units import Unit
from mpi_impl.training.batches import Batches
from mpi_impl.training.trainer import StepResult, Trainer
from reference.actions import Schedule
from reference import training
from reference.config import ParallelConfig, Recompute
from reference.data_parallel import samples_of
from reference.layers import attention as textbook_attention
from reference.layers import block as textbook_block
from reference.layers import cross_entropy as textbook_cross_entropy
from reference.layers import embedding as textbook_embedding
from reference.layers import linear as textbook_linear
from reference.layers import mlp as textbook_mlp
from reference.models import gpt as textbook_gpt
from reference.models.gpt import KEEP_ALL, GPTCache, gpt_join, has_embedding, has_head
from reference.optimizer import OptimizerConfig
from reference.layout import Layout, map_units
from reference.params import join, split, tree_map
from reference.precision import Precision
from reference.simulate import activations_in_flight
from reference.stages import schedule_of
from reference.traffic import Work, traffic
from tests.strategies import Case, close, trees_close
from tests.textbook_theorems import rotary_of, spread


def as_is(x):
    return x


def host(x):
    """What a device array holds; a host array as it is."""
    return x if isinstance(x, np.ndarray) else x.get()


class Share:
    """This rank's parameters and gradients for a layer, and the check of what it computed."""

    def __init__(self, group, tensors, p, case: Case, wrap=as_is):
        self.group, self.tensors, self.case, self.wrap = group, tensors, case, wrap
        self.region = (SequenceParallelRegion(group, case.keep_gathered_inputs) if case.sequence_parallel else
                       TensorParallelRegion(group))
        self.p = tree_map(wrap, split(p, tensors, group.size)[group.rank])
        self.layout = Layout(tensors, group.size)
        self.flat = wrap(np.ones(self.layout.size, case.main))      # gradients are *added* to what is there
        self.grads = self.layout.views(self.flat)

    def outside(self, x):
        """What this rank holds of x [b, s, h] outside the region."""
        return self.wrap(spread(x, self.case)[self.group.rank].copy())

    def outside_equals(self, mine, expected, tolerance=1e-11):
        close(host(mine), spread(expected, self.case)[self.group.rank], tolerance)

    def gradients_equal(self, expected, tolerance):
        """The ranks' gradients, joined, are the whole ones; replicated ones are alike; padding got nothing."""
        def check(everyone):
            shards = self.case.region.complete([self.layout.views(flat - 1) for flat in everyone], self.tensors)
            trees_close(join(shards, self.tensors), expected, tolerance)
            for mine, again in zip(shards, split(expected, self.tensors, self.group.size), strict=True):
                trees_close(mine, again, tolerance)

        first_checks(self.group, host(self.flat), check)


def column_parallel_equals_whole(group, case: Case, gather_output: bool, wrap=as_is, tolerance=1e-11):
    h, m = case.model.hidden_size, 3 * case.t
    tensors = textbook_linear.column_parallel_tensors(h, m, 1.0)

    def whole():
        p, x, dy = case.params(tensors), case.x(), case.array("dy", case.b, case.s, m)
        y, cache = textbook_linear.linear_forward(x, p)
        return p, x, dy, y, *textbook_linear.linear_backward(dy, p, cache)

    p, x, dy, y, dx, grads = group.from_first(whole)
    share = Share(group, tensors, p, case, wrap)
    mine = slice(None) if gather_output else slice(3 * group.rank, 3 * group.rank + 3)
    y_mine, cache = linear.column_parallel_forward(share.outside(x), share.p, gather_output, share.region)
    dx_mine = linear.column_parallel_backward(wrap(dy[..., mine].copy()), share.p, cache, gather_output, share.grads,
                                              kernels.accumulate, share.region)
    close(host(y_mine), y[..., mine], tolerance)
    share.outside_equals(dx_mine, dx, tolerance)
    share.gradients_equal(grads, tolerance)


def row_parallel_equals_whole(group, case: Case, wrap=as_is, tolerance=1e-11):
    n, h = 3 * case.t, case.model.hidden_size
    tensors = textbook_linear.row_parallel_tensors(n, h, 1.0)

    def whole():
        p, x, dy = case.params(tensors), case.array("x", case.b, case.s, n), case.x("dy")
        y, cache = textbook_linear.linear_forward(x, p)
        return p, x, dy, y, *textbook_linear.linear_backward(dy, p, cache)

    p, x, dy, y, dx, grads = group.from_first(whole)
    share, mine = Share(group, tensors, p, case, wrap), slice(3 * group.rank, 3 * group.rank + 3)
    y_mine, cache = linear.row_parallel_forward(wrap(x[..., mine].copy()), share.p, share.region)
    dx_mine = linear.row_parallel_backward(share.outside(dy), share.p, cache, share.grads, kernels.accumulate,
                                           share.region)
    share.outside_equals(y_mine, y, tolerance)
    close(host(dx_mine), dx[..., mine], tolerance)
    share.gradients_equal(grads, tolerance)


def mlp_equals_whole(group, case: Case, wrap=as_is, tolerance=1e-11):
    act, tensors = case.model.activation, textbook_mlp.mlp_tensors(case.model)

    def whole():
        p, x, dy = case.params(tensors), case.x(), case.x("dy")
        y, cache = textbook_mlp.mlp_forward(x, p, act)
        return p, x, dy, y, *textbook_mlp.mlp_backward(dy, p, cache, act)

    p, x, dy, y, dx, grads = group.from_first(whole)
    share = Share(group, tensors, p, case, wrap)
    y_mine, cache = mlp.mlp_forward(share.outside(x), share.p, act, share.region)
    dx_mine = mlp.mlp_backward(share.outside(dy), share.p, cache, act, share.grads, kernels.accumulate, share.region)
    share.outside_equals(y_mine, y, tolerance)
    share.outside_equals(dx_mine, dx, tolerance)
    share.gradients_equal(grads, tolerance)


def attention_equals_whole(group, case: Case, causal=True, selective=False, wrap=as_is, tolerance=1e-11):
    tensors, rotary = textbook_attention.attention_tensors(case.model), rotary_of(case)

    def whole():
        p, x, dy = case.params(tensors), case.x(), case.x("dy")
        y, cache = textbook_attention.attention_forward(x, p, causal, rotary, case.dropout)
        return p, x, dy, y, *textbook_attention.attention_backward(dy, p, cache)

    p, x, dy, y, dx, grads = group.from_first(whole)
    share = Share(group, tensors, p, case, wrap)
    rotary = rotary and tuple(map(wrap, rotary))
    y_mine, cache = attention.attention_forward(share.outside(x), share.p, causal, rotary, share.region, case.dropout,
                                                selective)
    dx_mine = attention.attention_backward(share.outside(dy), share.p, cache, share.grads, kernels.accumulate,
                                           share.region)
    share.outside_equals(y_mine, y, tolerance)
    share.outside_equals(dx_mine, dx, tolerance)
    share.gradients_equal(grads, tolerance)


def block_equals_whole(group, case: Case, selective=False, wrap=as_is, tolerance=1e-11):
    c, tensors, rotary = case.model, textbook_block.block_tensors(case.model), rotary_of(case)

    def whole():
        p, x, dy = case.params(tensors), case.x(), case.x("dy")
        y, cache = textbook_block.block_forward(x, p, c, rotary, case.dropout)
        return p, x, dy, y, *textbook_block.block_backward(dy, p, cache, c)

    p, x, dy, y, dx, grads = group.from_first(whole)
    share = Share(group, tensors, p, case, wrap)
    rotary = rotary and tuple(map(wrap, rotary))
    y_mine, cache = block.block_forward(share.outside(x), share.p, c, rotary, share.region, case.dropout, selective)
    dx_mine = block.block_backward(share.outside(dy), share.p, cache, c, share.grads, kernels.accumulate, share.region)
    share.outside_equals(y_mine, y, tolerance)
    share.outside_equals(dx_mine, dx, tolerance)
    share.gradients_equal(grads, tolerance)


def embedding_equals_whole(group, case: Case, wrap=as_is, tolerance=1e-11):
    tensors = textbook_embedding.embedding_tensors(case.model)

    def whole():
        p, tokens, dx = case.params(tensors), case.ids("tokens", case.b, case.s), case.x("dx")
        x, cache = textbook_embedding.embedding_forward(tokens, p, case.dropout)
        return p, tokens, dx, x, textbook_embedding.embedding_backward(dx, p, cache)

    p, tokens, dx, x, grads = group.from_first(whole)
    share = Share(group, tensors, p, case, wrap)
    x_mine, cache = embedding.embedding_forward(wrap(tokens), share.p, share.region, case.dropout)
    embedding.embedding_backward(share.outside(dx), cache, share.grads, share.region)
    share.outside_equals(x_mine, x, tolerance)
    share.gradients_equal(grads, tolerance)


def logits_equal_whole(group, case: Case, wrap=as_is, tolerance=1e-11):
    c, tensors = case.model, {"word": textbook_embedding.word_tensor(case.model)}

    def whole():
        p, x, dlogits = case.params(tensors), case.x(), case.array("dlogits", case.b, case.s, c.vocab_size)
        logits, cache = textbook_embedding.logits_forward(x, p["word"], c.vocab_size)
        return p, x, dlogits, logits, *textbook_embedding.logits_backward(dlogits, p["word"], cache)

    p, x, dlogits, logits, dx, dword = group.from_first(whole)
    share = Share(group, tensors, p, case, wrap)
    n = tensors["word"].local_shape(group.size)[0]
    mine = slice(n * group.rank, n * group.rank + n)
    padding = [(0, 0), (0, 0), (0, n * group.size - c.vocab_size)]
    logits = np.pad(logits, padding, constant_values=-np.inf)[..., mine]
    y, cache = embedding.logits_forward(share.outside(x), share.p["word"], c.vocab_size, share.region)
    dx_mine = embedding.logits_backward(wrap(np.pad(dlogits, padding)[..., mine].copy()), share.p["word"], cache,
                                        share.grads["word"], kernels.accumulate, share.region)
    real = np.isfinite(logits)
    assert (np.isfinite(host(y)) == real).all(), "a padded word has a chance, or a real one has none"
    close(host(y)[real], logits[real], tolerance)
    share.outside_equals(dx_mine, dx, tolerance)
    share.gradients_equal({"word": dword}, tolerance)


def loss_equals_whole(group, case: Case, scale=1.0, wrap=as_is, tolerance=1e-11):
    def whole():
        logits = scale * case.array("logits", case.b, case.s, 3 * case.t)
        targets = case.ids("targets", case.b, case.s) % logits.shape[-1]
        dloss = case.array("dloss", case.b, case.s)
        loss, cache = textbook_cross_entropy.cross_entropy_forward(logits, targets)
        return logits, targets, dloss, loss, textbook_cross_entropy.cross_entropy_backward(dloss, cache)

    logits, targets, dloss, loss, dlogits = group.from_first(whole)
    mine = slice(3 * group.rank, 3 * group.rank + 3)
    loss_all, cache = cross_entropy.cross_entropy_forward(wrap(logits[..., mine].copy()), wrap(targets), group)
    close(host(loss_all), loss, tolerance)
    close(host(cross_entropy.cross_entropy_backward(wrap(dloss), cache)), dlogits[..., mine], tolerance)


def gpt_equals_whole(group, case: Case, recompute: Recompute = KEEP_ALL, wrap=as_is):
    c, tensors = case.model, textbook_gpt.gpt_tensors(case.model)

    def whole():
        tokens, targets = (case.ids(what, case.b, case.s) for what in ("tokens", "targets"))
        p, dloss = case.params(tensors), case.array("dloss", case.b, case.s)
        loss, cache = textbook_gpt.gpt_forward(tokens, p, c, targets, case.dropout)
        return p, tokens, targets, dloss, loss, textbook_gpt.gpt_backward(dloss, p, cache, c)[1]

    p, tokens, targets, dloss, loss, grads = group.from_first(whole)
    share = Share(group, tensors, p, case, wrap)
    units, grad_units = (map_units(Unit, tree) for tree in (share.p, share.grads))
    loss_all, cache = gpt.gpt_forward(wrap(tokens), units, c, wrap(targets), share.region, case.dropout, recompute)
    gpt.gpt_backward(wrap(dloss), units, cache, c, grad_units, ImmediateSink(), share.region)
    close(host(loss_all), loss)
    share.gradients_equal(grads, 1e-10)


# ---- training -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """How a case's work is shared by ranks, beside t: the pipeline, the replicas, and what is kept where."""

    p: int = 1
    schedule: str = "1f1b"
    chunks: int | None = None
    scatter_gather: bool = True
    bucket_size: int = 1000
    zero_stage: int = 0
    cpu_offload: bool = False
    recompute: Recompute = KEEP_ALL

    def parallel(self, world_size: int, case: Case) -> ParallelConfig:
        return ParallelConfig.for_world(world_size, case.t, self.p, pipeline_schedule=self.schedule,
                                        virtual_pipeline_size=self.chunks,
                                        scatter_gather_tensors_in_pipeline=self.scatter_gather,
                                        ddp_bucket_size=self.bucket_size, zero_stage=self.zero_stage,
                                        cpu_offload=self.cpu_offload, sequence_parallel=case.sequence_parallel,
                                        keep_gathered_inputs=case.keep_gathered_inputs, recompute=self.recompute)


@contextmanager
def connected(group, parallel: ParallelConfig):
    """The topology, for as long as the `with` block lasts."""
    topology = connect(group, parallel)
    try:
        yield topology
    finally:
        disconnect(topology)


class Found(NamedTuple):
    """What one rank says after a step."""

    place: Place
    result: StepResult
    peak_caches: int
    grads: Any
    params: Any
    tensors: Any


def training_equals_one_process(group, case: Case, steps: int, microbatches: int, clip_grad: float = 0.5,
                                plan: Plan = Plan(), wrap=as_is, order: Schedule | None = None):
    """The main theorem: losses, norms, clipped gradients and weights are one process's, step by step; evaluation too.

    Also, every rank holds as many caches at once as the simulator says. With `order` the stages do their work in that
    order, whatever the schedule's name.
    """
    with connected(group, plan.parallel(group.size, case)) as topology:
        # eps is above the rounding in a gradient that is zero otherwise, the key bias's: Adam must not blow that up.
        optimizer = OptimizerConfig(1e-2, 10, lr_warmup_iters=1, clip_grad=clip_grad, adam_eps=1e-4)
        ours = Trainer(case.model, optimizer, topology, case.seed, Precision("float64"), wrap(np.empty(0)))
        textbook = training.Trainer(case.model, optimizer, case.seed, ours.precision) if group.rank == 0 else None
        if order is not None:
            ours.pipelines["training", microbatches] = Pipeline(order, topology)
        in_flight = activations_in_flight(order or schedule_of(topology.config, microbatches))
        batch = microbatches * topology.data.size * case.b
        for step in range(steps):
            tokens, targets = (case.ids(f"{what} {step}", batch, case.s) for what in ("tokens", "targets"))
            result = ours.step(dealt(ours, case.b, tokens, targets, wrap), batch)
            grads, params = (ours.layout.views(host(ours.whole(states.own)))
                             for states in (ours.gradients, ours.parameters))
            found = Found(topology.place, result, ours.peak_caches, grads, params, ours.layout.tensors)
            first_checks(group, found, lambda everyone, tokens=tokens, targets=targets: step_equals(
                textbook.step(tokens, targets), textbook.params, in_flight, everyone))
        fewer = (microbatches + 1) // 2 * topology.data.size * case.b     # an evaluation takes any number
        tokens, targets = tokens[:fewer], targets[:fewer]
        loss = ours.evaluate(dealt(ours, case.b, tokens, targets, wrap), fewer)
        first_checks(group, loss, lambda everyone: close(np.array(everyone), np.full(len(everyone), (
            training.loss_and_gradients(tokens, targets, textbook.params, case.model)[0]))))


def dealt(trainer: Trainer, b: int, tokens, targets, wrap=as_is) -> list:
    """This replica's microbatches. What the rank need not know of them is made nonsense, so that it cannot use it."""
    d, r = trainer.topology.data.size, trainer.topology.place.data
    if not has_embedding(trainer.layout.tensors):
        tokens = np.full_like(tokens, -1)
    if not has_head(trainer.layout.tensors, trainer.model):
        targets = np.full_like(targets, -1)
    mine = [samples_of(r, k, d, b) for k in range(len(tokens) // (d * b))]
    return [(wrap(tokens[i]), wrap(targets[i])) for i in mine]


def first_checks(group, value, check) -> None:
    """`check` all ranks' values, on rank 0 alone, which is faster. What it finds wrong fails every rank."""
    everyone, fault = group.comm.gather(value), ""
    if group.rank == 0:
        try:
            check(everyone)
        except AssertionError:
            fault = traceback.format_exc()
    fault = group.comm.bcast(fault)
    assert not fault, fault


def step_equals(expected, params, in_flight: list[int], everyone: list[Found]) -> None:
    """Every rank reports one process's loss and norm; every replica has its gradients and weights."""
    loss, norm, grads = expected
    for found in everyone:
        close(np.array(found.result[:2]), np.array([loss, norm]))
        assert found.peak_caches == in_flight[found.place.pipeline], "another number of caches than was simulated"
    for replica in {found.place.data for found in everyone}:
        stages = [[found for found in everyone if found.place[1:] == (replica, stage)]
                  for stage in range(len(in_flight))]
        for field, whole in (("grads", grads), ("params", params)):
            parts = [join([getattr(found, field) for found in stage], stage[0].tensors) for stage in stages]
            trees_close(gpt_join(parts), whole, 1e-10)
            for part in parts:     # both copies of a tied word table
                if part.embedding.word is not None:
                    trees_close(part.embedding.word, whole.embedding.word, 1e-10)


def ledger_equals_formulas(group, case: Case, work: Work, plan: Plan):
    """What a pipeline's ranks have sent, added up, is what the formulas say, to the element, and nothing else."""
    with connected(group, plan.parallel(group.size, case)) as topology:
        trainer = Trainer(case.model, OptimizerConfig(1e-2, 10), topology, case.seed, Precision("float64"))
        together = Ledger()
        batches = Batches(Words(case) if topology.place.tensor == 0 else None, topology, case.s, case.b,
                          work.microbatches // work.steps)
        for step in range(work.steps):
            trainer.step(batches.microbatches_of("train", step), batches.global_batch_size)
        for step in range(work.evaluations):
            trainer.evaluate(batches.microbatches_of("validation", step), batches.global_batch_size)
        for ledger in topology.pipeline.from_all(group.ledger):
            together.add(ledger)
        found = {(e.operation, e.group, e.phase, e.reason): tuple(total) for e, total in together.totals.items()}
        lines = traffic(case.model, topology.config, case.b, case.s, work, topology.place.data)
        assert len({line[:4] for line in lines}) == len(lines)
        expected = {line[:4]: (line.calls, line.elements) for line in lines if line.calls}
        assert found == expected, f"{found.items() ^ expected.items()}"
        return together


class Words:
    """A data set of random words."""

    def __init__(self, case: Case):
        self.case = case

    def batch(self, part, first, count):
        return self.case.ids(f"{part} {first}", count, self.case.s + 1)


def no_cache_outlives_its_use(group, case: Case, microbatches: int, plan: Plan):
    """While an evaluation runs, a rank has no cache from an earlier forward; after a step it has none at all."""
    with connected(group, plan.parallel(group.size, case)) as topology:
        trainer = Trainer(case.model, OptimizerConfig(1e-2, 10), topology, case.seed, Precision("float64"))
        batch = microbatches * topology.data.size * case.b
        mine = dealt(trainer, case.b, case.ids("tokens", batch, case.s), case.ids("targets", batch, case.s))
        gc.collect()        # what another run has left, if it has failed on this rank
        assert live_caches() == 0
        gc.freeze()         # what is there by now is not looked through again, which takes long
        try:
            trainer.step(mine, batch)
            assert live_caches() == 0, "the step is over, but caches are not gone"
            with mock.patch.object(passes, "gpt_forward", forward_of_an_evaluation):
                trainer.evaluate(mine, batch)
        finally:
            gc.unfreeze()


def forward_of_an_evaluation(*args):
    assert live_caches() == 0, "an evaluation keeps caches"
    y, cache = gpt.gpt_forward(*args)
    assert all(kept.caches is None for kept in cache.layers), "an evaluation keeps what a backward needs"
    return y, cache


def live_caches() -> int:
    """Of stages, on this rank."""
    return sum(type(x) is GPTCache for x in gc.get_objects())
