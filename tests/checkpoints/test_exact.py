"""Any topology loads what any other has saved, and goes on: the same formulas as without an interruption."""
import pytest

from reference.config import ModelConfig
from tests.cases import ExactCase
from tests.checkpoints import labels
from tests.checkpoints.saved_runs import Run
from tests.checkpoints.test_checkpoint import one_loads_other
from tests.deep import one_fast_of
from tests.training_theorems import Plan

MODEL = ModelConfig(4, 8, 4, 10, 5, make_vocab_size_divisible_by=3)
# t, sequence parallel or not, replicas, and the rest; each of them loads what the one before it has saved.
ROUND = [Run(t * plan.p * d, ExactCase(t, MODEL, 1, 4, 1, False, cut), plan, 4) for t, cut, d, plan in [
    (2, False, 2, Plan(2)), (1, False, 4, Plan(zero_stage=3)), (4, True, 1, Plan()),
    (1, False, 2, Plan(2, "zb-v", bucket_size=1, zero_stage=2, cpu_offload=True)),
    (2, True, 1, Plan(2, "interleaved", 2)), (1, False, 4, Plan(bucket_size=77, zero_stage=1))]]


@pytest.mark.parametrize("i", one_fast_of(3, range(len(ROUND))))
def test_one_topology_after_the_other(ranks, i):
    """A step, a checkpoint, a load on other ranks, and a second step."""
    one_loads_other(ranks, ROUND[i - 1], ROUND[i], 1, labels.save, labels.load)
