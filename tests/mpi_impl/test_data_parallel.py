"""The reduction over replicas: every bucket once, as soon as it is complete, while backward still works on others."""
from random import Random
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpi_impl.comm.ledger import Ledger
from mpi_impl.models import gpt
from mpi_impl.parallel import sinks
from mpi_impl.parallel.data_parallel import GradientReduction
from mpi_impl.training.trainer import Trainer
from reference.config import ModelConfig
from reference.models.gpt import gpt_tensors
from reference.optimizer import OptimizerConfig
from reference.params import Layout, leaves
from tests.rank_theorems import Pipelining, connected, dealt
from tests.strategies import Case, cases, close

BUCKETS = st.sampled_from([1, 5, 60, 300, 1 << 30])
RUNS = [(1, "1f1b", None), (1, "zb-h1", None), (2, "gpipe", None), (2, "1f1b", None), (2, "zb-h1", None),
        (2, "zb-h2", None), (2, "interleaved", 2), (2, "zb-v", None), (2, "dualpipe-v", None)]


class Posted:
    """Stands for a group: writes down what is all-reduced, and when it is waited for."""

    def __init__(self):
        self.ledger, self.slices, self.waited = Ledger(), [], 0

    def post_all_reduce(self, x, reason):
        self.slices.append(x)
        return self

    def poll(self):
        return False

    def wait(self):
        self.waited += 1


def reduction(case, bucket_size, uses):
    layout = Layout(gpt_tensors(case.model), case.t)
    flat = np.zeros(layout.size)
    grads, group = layout.views(flat), Posted()
    return GradientReduction(flat, grads, layout, group, bucket_size, uses), dict(leaves(grads)), layout, group


@given(cases(), BUCKETS, st.integers(1, 4), st.integers(1, 2), st.randoms(use_true_random=False))
def test_a_bucket_begins_with_its_last_contribution(case, size, m, uses, random):
    """In whatever order they come, and however often in a microbatch: not before, not later, and once a step."""
    uses = {"embedding.word": uses}
    ours, views, layout, group = reduction(case, size, uses)
    for step in (1, 2):
        group.slices.clear()
        ours.expect(m)
        left = [name for name in views for _ in range(m * uses.get(name, 1))]
        random.shuffle(left)
        begun = []
        while left:
            name = left.pop()
            ours.contributed(views[name])
            begun += [b for b in layout.buckets(size) if b not in begun and not set(b.names) & set(left)]
            assert len(group.slices) == len(begun)
        ours.finish()
        assert group.waited == step * len(begun)
        for x, bucket in zip(group.slices, begun, strict=True):
            assert np.shares_memory(x, ours.flat[bucket.slice]) and x.shape == ours.flat[bucket.slice].shape
            assert x.__array_interface__["data"] == ours.flat[bucket.slice].__array_interface__["data"]


@given(cases(), BUCKETS, st.integers(1, 3), st.data())
def test_a_contribution_too_few_or_too_many_is_an_error(case, size, m, data):
    """Never a sum without a word that lacks something."""
    ours, views, _, _ = reduction(case, size, {})
    ours.expect(m)
    every = [name for name in views for _ in range(m)]
    wrong = data.draw(st.sampled_from(sorted(views)))
    every.remove(wrong) if data.draw(st.booleans(), "too few") else every.append(wrong)
    for name in every:
        ours.contributed(views[name])
    with pytest.raises(AssertionError, match="contributions are missing"):
        ours.finish()


@settings(max_examples=30)
@given(cases(sizes=st.just(1)), BUCKETS, st.integers(1, 6), st.integers(1, 3))
def test_replicas_are_summed(ranks, case, size, d, m):
    """Of every element, whatever the buckets: the replicas' contributions, all microbatches of them."""
    ranks.run(d, sums_are_right, case, size, m)


def sums_are_right(group, case, size, m):
    layout = Layout(gpt_tensors(case.model))
    flat, random = np.zeros(layout.size), Random(case.seed)     # every rank has the same order
    grads = layout.views(flat)
    ours = GradientReduction(flat, grads, layout, group, size, {})
    ours.expect(m)
    names = [name for name, _ in leaves(grads) for _ in range(m)]
    random.shuffle(names)
    views = dict(leaves(grads))
    for i, name in enumerate(names):
        views[name] += case.array(f"{group.rank} {i}", *views[name].shape)
        ours.contributed(views[name])
    ours.finish()
    expected = np.zeros_like(flat)
    expected_views = dict(leaves(layout.views(expected)))
    for rank in range(group.size):
        for i, name in enumerate(names):
            expected_views[name] += case.array(f"{rank} {i}", *views[name].shape)
    close(flat, expected, 1e-13)
    assert group.ledger.calls(phase="reduction", reason="gradients") == len(layout.buckets(size))
    assert group.ledger.elements(phase="reduction", reason="gradients") == layout.size


@pytest.mark.parametrize("p, schedule, v", RUNS)
@pytest.mark.parametrize("tied", [True, False])
def test_reduction_begins_before_backward_ends(ranks, p, schedule, v, tied):
    """On every rank, whether the last weight gradients come in a B or in a W. In one bucket it cannot begin earlier."""
    model = ModelConfig(8, 4, 1, 11, 3, untie_embeddings_and_output_weights=not tied)
    for events in ranks.run(2 * p, order_of_a_step, Case(1, model, 1, 3, seed=1), Pipelining(p, schedule, v, True, 1)):
        first, last = events.index("all-reduce"), max(i for i, event in enumerate(events) if event == "compute")
        assert first < last, "it waited until everything was done"
    one_bucket = Pipelining(p, schedule, v, True, 1 << 30)
    for events in ranks.run(2 * p, order_of_a_step, Case(1, model, 1, 3, seed=1), one_bucket):
        assert events.count("all-reduce") == 1 and events[-1] == "all-reduce"


def order_of_a_step(group, case, pipelining):
    """What this rank did in a step: backwards of a layer, weight gradients, and all-reduces as they were posted."""
    events = []

    def recorded(event, function):
        def call(*args):
            found = function(*args)
            events.append(event)
            return found
        return call

    with connected(group, pipelining.parallel(group.size, case.t)) as topology:
        trainer = Trainer(case.model, OptimizerConfig(1e-2, 5), topology, case.seed, np.float64)
        data, m = topology.data, 4
        tokens, targets = (case.ids(what, m * data.size, case.s) for what in ("tokens", "targets"))
        with (mock.patch.object(data, "post_all_reduce", recorded("all-reduce", data.post_all_reduce)),
              mock.patch.object(gpt, "block_backward", recorded("compute", gpt.block_backward)),
              mock.patch.object(sinks, "accumulate", recorded("compute", sinks.accumulate))):
            trainer.step(dealt(trainer, case.b, tokens, targets), m * data.size)
    return events
