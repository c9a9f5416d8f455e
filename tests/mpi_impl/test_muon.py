"""Muon on ranks: what its two ways over tensor-parallel ranks send, and its work on GPUs, which spies stand in for.

That it is one process's: test_training.py.
"""
import pytest

from reference.config import ModelConfig
from tests.cases import Case, MuonChoices, Plan
from tests.fake_cuda import on_gpus
from tests.spy import SpyArray
from tests.training_theorems import batch_of, trainer_on, training_equals_one_process

H, L = 16, 3
MODEL = ModelConfig(L, H, 4, 11, 6)


def sent(group, case, plan):
    with trainer_on(group, case, plan) as trainer:
        trainer.step(*batch_of(trainer, case, 1))
        return {entry.reason: total.elements for entry, total in group.ledger.totals.items()
                if entry.phase == "optimizer"}


@pytest.mark.parametrize("t, d, stage, rounds", [(2, 1, 0, 5), (4, 1, 0, 2), (2, 2, 1, 5)])
def test_tensor_parallel_ranks_send_what_the_formulas_say(ranks, t, d, stage, rounds):
    """A layer's 12 h^2 elements of momentum are gathered once (duplicated). Or every round sums h^2 elements for each
    of its six matrices (distributed). With ZeRO-1 owners do that for what they own.
    """
    def total(mode, reason):
        plan = Plan(zero_stage=stage, muon=MuonChoices(mode, muon_num_ns_steps=rounds))
        return sum(found.get(reason, 0) for found in ranks.run(t * d, sent, Case(t, MODEL, 1, 4, seed=1), plan))

    times = t * L * (1 if stage else d)
    assert total("duplicated", "momentum") == times * 12 * H**2
    assert total("distributed", "products of the momentum") == times * rounds * 6 * H**2
    assert total("distributed", "norm of the momentum") == times * 6


def train_on_gpus(group, way, mode):
    with on_gpus(group, way):
        training_equals_one_process(group, Case(2, MODEL, 2, 4, seed=3), 1, 2, wrap=SpyArray,
                                    plan=Plan(zero_stage=1, bucket_size=900, muon=MuonChoices(mode, True)))


@pytest.mark.parametrize("way, mode", [("nccl", "duplicated"), ("staged", "distributed")])
def test_it_takes_arrays_of_a_gpu(ranks, way, mode):
    """And owners gather and scatter parts of several sizes there."""
    ranks.run(4, train_on_gpus, way, mode)
