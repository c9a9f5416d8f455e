"""Replicas: every bucket of gradients is summed as soon as it is complete; each replica has its part of the batch."""
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from mpi_impl.comm.ledger import Ledger
from mpi_impl.parallel.data_parallel import Gradients
from mpi_impl.parallel.zero import ScatteredGradients, ShardedGradients
from mpi_impl.training.batches import whole_batch
from reference.config import ModelConfig
from reference.models.model import model_tensors
from reference.parallel.layout import Layout
from reference.params import leaves
from tests.deep import one_fast_of
from tests.memory_theorems import order_of_a_step, rindex, sums_overlap_with_computing
from tests.mpi_impl.test_training import places
from tests.strategies import ANY_MODEL, Case, cases
from tests.training_theorems import ONE_LAYER, Numbers, Plan, batch_is_dealt_out, training_equals_one_process

MODELS, COUNT = cases(sizes=st.just(1), architectures=ANY_MODEL), st.integers(1, 3)
STAGES = {0: Gradients, 1: ScatteredGradients, 2: ShardedGradients}     # 3 is like 2
RUNS = [(1, "1f1b", None), (1, "zb-h1", None), (2, "gpipe", None), (2, "interleaved", 2), (2, "zb-v", None)]


class Posting:
    """Stands for a group of two, of which the other rank has zeros: a sum that is posted is over when it is waited for.
    """

    size, rank, polls = 2, 1, 0

    def __init__(self):
        self.ledger = Ledger()

    def post_all_reduce(self, x, reason):
        return SimpleNamespace(x=x, poll=self.poll, wait=lambda: x)

    def post_reduce_scatter(self, x, out, reason, sizes=None):
        return SimpleNamespace(x=out, poll=self.poll, wait=lambda: out)

    def poll(self):
        self.polls += 1
        return False


@pytest.mark.parametrize("stage", STAGES)
@given(MODELS, st.sampled_from([1, 60, 1 << 30]), st.integers(1, 3), st.data())
def test_a_contribution_too_few_or_too_many_is_an_error(stage, case, size, m, data):
    """Never a sum without a word that lacks something. Each contribution polls what is under way: MPI makes little
    progress unless it is asked.
    """
    group, tensors = Posting(), model_tensors(case.model)
    ours = STAGES[stage](Layout(tensors, 1, size, group.size if stage else 1), group, {}, np.empty(0))
    units = {unit.name: unit for _, unit in leaves(ours.units(tensors))}
    ours.expect(m)
    every = [name for name in units for _ in range(m)]
    wrong = data.draw(st.sampled_from(sorted(units)))
    every.remove(wrong) if data.draw(st.booleans(), "too few") else every.append(wrong)
    for name in every:
        units[name].wait()
        ours.contributed(units[name])
    assert group.polls or len(ours.layout.buckets) == 1
    with pytest.raises(AssertionError, match="contributions are missing"):
        ours.finish()


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


@pytest.mark.parametrize("p, schedule, v, tied, stage", one_fast_of(5, (
    (*run, i % 2 == 0, stage) for i, run in enumerate(RUNS) for stage in (0, 1, 2))))
def test_reduction_begins_before_backward_ends(ranks, p, schedule, v, tied, stage):
    """On every rank, whether the last weight gradients come in a B or in a W. In one bucket it cannot begin earlier."""
    model = ModelConfig(8, 4, 1, 11, 3, untie_embeddings_and_output_weights=not tied)
    case = Case(1, model, 1, 3, seed=1)
    ranks.run(2 * p, sums_overlap_with_computing, case, 4, Plan(p, schedule, v, bucket_size=1, zero_stage=stage))
    plan = Plan(p, schedule, v, bucket_size=1 << 30, zero_stage=stage)
    for events in ranks.run(2 * p, order_of_a_step, case, 4, plan):
        assert not {"layer", "gradient"} & set(events[rindex(events, "sum"):])


# ---- the samples of a batch -----------------------------------------------------------------------------------------


@given(st.sampled_from(places()), COUNT, COUNT, COUNT, st.integers(0, 5))
def test_a_batch_is_dealt_out(ranks, place, b, m, s, step):
    """Each replica reads its own samples, its tensor ranks get the same ones, and together they have the global batch.
    """
    t, p, d = place
    tokens, targets, _ = whole_batch(Numbers(s), ONE_LAYER, "train", step, m * d * b)
    assert tokens[:, 0].tolist() == list(range(step * m * d * b, (step + 1) * m * d * b))
    assert (targets == tokens + 1).all()
    ranks.run(t * p * d, batch_is_dealt_out, t, p, b, m, s, step)
