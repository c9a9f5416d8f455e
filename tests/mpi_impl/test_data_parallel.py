"""The reduction over replicas: every bucket as soon as it is complete, while backward still works on others."""
from collections import Counter, defaultdict
from itertools import pairwise
from random import Random
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from mpi_impl.comm.ledger import Ledger
from mpi_impl.models import stage as stages
from mpi_impl.parallel import sinks
from mpi_impl.parallel.data_parallel import Gradients
from mpi_impl.parallel.model_state import ModelState
from mpi_impl.parallel.zero import ScatteredGradients, ShardedGradients
from mpi_impl.training.trainer import Trainer
from reference.config import ModelConfig
from reference.models.model import model_tensors
from reference.optimizer import OptimizerConfig
from reference.parallel.layout import Bucket, Layout
from reference.params import leaves, tree_map
from reference.precision import Precision
from tests.deep import one_fast_of
from tests.strategies import ANY_MODEL, Case, cases, close
from tests.training_theorems import Plan, connected, dealt, training_equals_one_process

MODELS = cases(sizes=st.just(1), architectures=ANY_MODEL)
BUCKETS = st.sampled_from([1, 5, 60, 300, 1 << 30])
USES = st.integers(1, 2).map(lambda uses: {"embedding.word": uses})     # of a tied table on one rank: 2 a microbatch
STAGES = {0: Gradients, 1: ScatteredGradients, 2: ShardedGradients}     # 3 is like 2
OF_A_STEP = pytest.mark.parametrize("stage", [0, 1])
OF_ANY = pytest.mark.parametrize("stage", STAGES)
RANDOM = st.randoms(use_true_random=False)
RUNS = [(1, "1f1b", None), (1, "zb-h1", None), (2, "gpipe", None), (2, "1f1b", None), (2, "zb-h1", None),
        (2, "zb-h2", None), (2, "interleaved", 2), (2, "zb-v", None), (2, "dualpipe-v", None)]


class Posting:
    """Stands for a group of two, of which the other rank has zeros: writes down what is summed."""

    size, rank = 2, 1

    def __init__(self):
        self.ledger, self.sums = Ledger(), list[PostedSum]()

    def post_all_reduce(self, x, reason):
        self.sums.append(PostedSum(x, x, x))
        return self.sums[-1]

    def post_reduce_scatter(self, x, out, reason):
        self.sums.append(PostedSum(x, out, x.reshape(self.size, -1)[self.rank]))
        return self.sums[-1]

    @property
    def under_way(self):
        return [one for one in self.sums if not one.waited]


class PostedSum:
    """Stands for a Pending: counts polls and waits, and sees that nobody changes what is summed before."""

    def __init__(self, flat, x, total):
        self.flat, self.x, self.total, self.posted, self.polled, self.waited = flat, x, total, flat.copy(), 0, 0

    def poll(self):
        self.polled += 1
        return False

    def wait(self):
        assert np.array_equal(self.flat, self.posted), "an array was changed while it was summed"
        self.waited += 1
        self.x[...] = self.total
        return self.x


def gradients_of(case, stage, bucket_size, uses, group):
    """Return the gradients of a whole model under a ZeRO stage, and their units by name."""
    tensors = model_tensors(case.model)
    layout = Layout(tensors, 1, bucket_size, group.size if stage else 1)
    ours = STAGES[stage](layout, group, uses, np.empty(0))
    return ours, dict((unit.name, unit) for _, unit in leaves(ours.units(tensors)))


def contributions(units, m, uses, random):
    """Return the units' names in a random order, each as many times as m microbatches contribute to it."""
    names = [name for name in units for _ in range(m * uses.get(name, 1))]
    random.shuffle(names)
    return names


@OF_A_STEP
@given(MODELS, BUCKETS, st.integers(1, 4), USES, RANDOM)
def test_a_bucket_begins_with_its_last_contribution(stage, case, size, m, uses, random):
    """In whatever order they come, and however often in a microbatch: not before, not later, and once a step.

    Each contribution polls what is under way: MPI makes little progress unless it is asked.
    """
    group = Posting()
    ours, units = gradients_of(case, stage, size, uses, group)
    for _ in range(2):
        group.sums.clear()
        ours.expect(m)
        left, begun = contributions(units, m, uses, random), []
        while left:
            polled = [one.polled for one in group.sums]
            ours.contributed(units[left.pop()])
            assert all(one.polled > before for one, before in zip(group.sums, polled))
            begun += [b for b in ours.layout.buckets if b not in begun and not set(b.units) & set(left)]
            assert len(group.sums) == len(group.under_way) == len(begun)
        ours.finish()
        assert [one.waited for one in group.sums] == [1] * len(ours.layout.buckets)
        for one, bucket in zip(group.sums, begun, strict=True):
            assert same_memory(one.flat, ours.own.flat[bucket.slice])


def same_memory(x, y):
    return x.__array_interface__ == y.__array_interface__


@given(MODELS, BUCKETS, st.integers(1, 4), USES, RANDOM)
def test_with_sharded_gradients_it_does_so_in_every_microbatch(case, size, m, uses, random):
    """Or with as many contributions as a microbatch makes, where two mix. What nobody works on is gone then.

    A sum is under way until the next one begins, or until its bucket is needed again. It is added once.
    """
    group = Posting()
    ours, units = gradients_of(case, 2, size, uses, group)
    ours.expect(m)
    came, taken, expected = Counter[Bucket](), defaultdict[str, list](list), np.zeros(ours.layout.size)
    for i, (kind, name) in enumerate(interleave(contributions(units, m, uses, random), random)):
        bucket, under_way = ours.layout.bucket_of[name], group.under_way
        if kind == "take":
            again = bucket not in ours.whole and any(one.bucket is bucket for one in ours.begun)
            taken[name].append(units[name].wait())
            assert all(np.shares_memory(view, ours.whole[bucket]) for _, view in leaves(taken[name][-1]))
            assert group.under_way == ([] if again else under_way)
            continue
        for views in (taken[name].pop(), ours.layout.views_of(ours.layout.units[name], expected, name)):
            for _, view in leaves(views):
                view += i + 1
        ours.contributed(units[name])
        came[bucket] += 1
        complete = came[bucket] % sum(uses.get(unit, 1) for unit in bucket.units) == 0
        assert group.under_way == (group.sums[-1:] if complete else under_way)
        if complete:
            assert len(group.sums[-1].flat) == bucket.size
            assert (bucket in ours.whole) == (ours.users[bucket] > 0)
    ours.finish()
    assert not ours.whole and len(group.sums) == m * len(ours.layout.buckets)
    assert all(one.waited == 1 for one in group.sums)
    for bucket in ours.layout.buckets:
        own = ours.layout.owned_piece(bucket, group.rank)
        assert (ours.own.load(own) == expected[own.in_buffer]).all()


def interleave(names, random):
    """Return the events ('take', name) and ('contribute', name) in a random order: names are taken from last to first,
    and each is taken before it is contributed.
    """
    events, untaken, waiting = list[tuple[str, str]](), list(names), list[str]()
    while untaken or waiting:
        if untaken and (not waiting or random.random() < 0.6):
            waiting.append(untaken.pop())
            events.append(("take", waiting[-1]))
        else:
            events.append(("contribute", waiting.pop(random.randrange(len(waiting)))))
    return events


@OF_ANY
@given(MODELS, BUCKETS, st.integers(1, 3), st.data())
def test_a_contribution_too_few_or_too_many_is_an_error(stage, case, size, m, data):
    """Never a sum without a word that lacks something."""
    ours, units = gradients_of(case, stage, size, {}, Posting())
    ours.expect(m)
    every = [name for name in units for _ in range(m)]
    wrong = data.draw(st.sampled_from(sorted(units)))
    every.remove(wrong) if data.draw(st.booleans(), "too few") else every.append(wrong)
    for name in every:
        units[name].wait()
        ours.contributed(units[name])
    with pytest.raises(AssertionError, match="contributions are missing"):
        ours.finish()


@OF_ANY
@settings(max_examples=settings().max_examples // 4)
@given(case=MODELS, size=BUCKETS, d=st.integers(1, 6), m=st.integers(1, 3), uses=USES)
def test_replicas_are_summed(ranks, stage, case, size, d, m, uses):
    """Of every element, whatever the buckets, and however microbatches mix: all contributions of all replicas.

    A step before has left something behind, which does not count.
    """
    ranks.run(d, sums_are_right, stage, case, size, m, uses)


def sums_are_right(group, stage, case, size, m, uses):
    ours, units = gradients_of(case, stage, size, uses, group)
    random = Random(case.seed)     # every rank has the same order
    for step in range(2):
        expected = np.zeros(ours.layout.size)
        ours.expect(m)
        group.ledger.totals.clear()
        views: dict[str, list] = {name: [] for name in units}
        for i, (kind, name) in enumerate(interleave(contributions(units, m, uses, random), random)):
            if kind == "take":
                views[name].append(units[name].wait())
                continue
            for rank in range(group.size):
                add_draws(ours.layout.views_of(ours.layout.units[name], expected, name), case, f"{rank} {step} {i}")
            add_draws(views[name].pop(), case, f"{group.rank} {step} {i}")
            ours.contributed(units[name])
        ours.finish()
    for piece in ours.layout.pieces(group.rank if stage else 0):
        close(ours.own.load(piece), expected[piece.in_buffer], 1e-13)
    times, operation = (m, "reduce_scatter") if stage == 2 else (1, "reduce_scatter" if stage else "all_reduce")
    about = dict(operation=operation, phase="reduction", reason="gradients")
    assert group.ledger.calls(**about) == times * len(ours.layout.buckets)
    assert group.ledger.elements(**about) == times * ours.layout.size


def add_draws(views, case, what):
    """Add random numbers to each array of a tree."""
    def add(view):
        view += case.array(what, *view.shape)

    tree_map(add, views)


class Masked(Case):
    """A batch of which the first sample alone has words to predict, or none has."""

    any_at_all = True

    def batch(self, what, count):
        batch = super().batch(what, count)
        counted = (np.arange(count) == 0) & self.any_at_all
        return batch._replace(weights=np.broadcast_to(counted[:, None], batch.weights.shape).astype(np.int64))


class NothingMasked(Masked):
    any_at_all = False


@pytest.mark.parametrize("kind", [Masked, NothingMasked])
def test_replicas_that_have_nothing_to_predict(ranks, kind):
    """Their microbatches weigh nothing, and where no replica has anything the loss is 0: no gradient, and no NaN."""
    model = ModelConfig(2, 8, 2, 11, 5, architecture="bert", heads=("lm",), make_vocab_size_divisible_by=3)
    ranks.run(6, training_equals_one_process, kind(2, model, 1, 4, seed=1), 2, 2, 0.05, Plan(zero_stage=1))


@pytest.mark.parametrize("p, schedule, v, tied, stage", one_fast_of(11, (
    (*run, tied, stage) for run in RUNS for tied in (True, False) for stage in (0, 1, 2))))
def test_reduction_begins_before_backward_ends(ranks, p, schedule, v, tied, stage):
    """On every rank, whether the last weight gradients come in a B or in a W. In one bucket it cannot begin earlier."""
    model = ModelConfig(8, 4, 1, 11, 3, untie_embeddings_and_output_weights=not tied)
    case = Case(1, model, 1, 3, seed=1)
    ranks.run(2 * p, sums_overlap_with_computing, case, 4, Plan(p, schedule, v, bucket_size=1, zero_stage=stage))
    plan = Plan(p, schedule, v, bucket_size=1 << 30, zero_stage=stage)
    for events in ranks.run(2 * p, order_of_a_step, case, 4, plan):
        assert not {"layer", "gradient"} & set(events[rindex(events, "sum"):])


def sums_overlap_with_computing(group, case, m, plan):
    """Check that this rank begins sums before it has computed everything, goes on before it waits for them, and helps
    them on meanwhile, after the gradient of each matrix.
    """
    events = order_of_a_step(group, case, m, plan)
    begun, last = [i for i, event in enumerate(events) if event == "sum"], rindex(events, "gradient")
    assert begun[0] < last, "it waited until everything was done"
    assert all({"layer", "gradient", "sum"} & set(events[i + 1:events.index(f"wait {n}")])
               for n, i in enumerate(begun) if i < last), "it waited immediately"
    assert all(after == "help" for event, after in pairwise(events) if event == "gradient"), "it did not help"


def rindex(events, event):
    """Return where the last such event is."""
    return len(events) - 1 - events[::-1].index(event)


def order_of_a_step(group, case, m, plan):
    """Return the order of this rank's events in a step: forwards and backwards of layers, weight gradients, and sums
    over replicas as they are posted, and waited for.
    """
    events = []

    def recorded(event, function):
        def call(*args):
            found = function(*args)
            events.append(event)
            return found
        return call

    def posted(post):
        def call(*args):
            found, number = post(*args), events.count("sum")
            found.wait = recorded(f"wait {number}", found.wait)
            events.append("sum")
            return found
        return call

    with connected(group, plan.parallel(group.size, case)) as topology:
        trainer = Trainer(ModelState(case.model, topology, case.seed, Precision("float64")), OptimizerConfig(1e-2, 5))
        data = topology.data
        with (mock.patch.object(data, "post_all_reduce", posted(data.post_all_reduce)),
              mock.patch.object(data, "post_reduce_scatter", posted(data.post_reduce_scatter)),
              mock.patch.object(stages, "block_forward", recorded("layer", stages.block_forward)),
              mock.patch.object(stages, "block_backward", recorded("layer", stages.block_backward)),
              mock.patch.object(sinks, "accumulate", recorded("gradient", sinks.accumulate)),
              mock.patch.object(topology.tensor, "help_on", recorded("help", topology.tensor.help_on))):
            trainer.step(dealt(trainer, case.b, case.batch("", m * data.size)), m * data.size)
    return events
