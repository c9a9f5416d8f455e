"""Muon on ranks: what its two ways over tensor-parallel ranks send. That it is one process's: test_training.py."""
import pytest

from reference.config import ModelConfig
from tests.cases import Case, MuonChoices, Plan
from tests.training_theorems import batch_of, trainer_on

H, L = 16, 3


def sent(group, case, plan):
    with trainer_on(group, case, plan) as trainer:
        trainer.step(*batch_of(trainer, case, 1))
        return {entry.reason: tuple(total) for entry, total in group.ledger.totals.items()
                if entry.phase == "optimizer"}


@pytest.mark.parametrize("t, d, stage", [(2, 1, 0), (4, 1, 0), (2, 2, 1)])
@pytest.mark.parametrize("rounds", [5, 2])
def test_tensor_parallel_ranks_send_what_the_formulas_say(ranks, t, d, stage, rounds):
    """Of each layer 12 h^2 elements are gathered once, or of each of its six matrices h^2 summed in every round and the
    norm before them. With ZeRO-1 the owners divide that, and the replicas gather 12 L h^2 elements of matrices.
    """
    case = Case(t, ModelConfig(L, H, 4, 11, 6), 1, 4, seed=1)
    gathered, summed = (ranks.run(t * d, sent, case, Plan(zero_stage=stage, muon=MuonChoices(mode, False, rounds)))
                        for mode in ("duplicated", "distributed"))
    assert total(gathered, "momentum") == t * d * 12 * L * H**2 // (d if stage else 1)
    assert total(summed, "products of the momentum") == t * d * rounds * 6 * L * H**2 // (d if stage else 1)
    assert total(summed, "norm of the momentum") == t * d * 6 * L // (d if stage else 1)
    assert "momentum" not in summed[0] and "products of the momentum" not in gathered[0]


def total(everyone, reason: str) -> int:
    """Return the elements that all ranks have sent for this reason."""
    return sum(found.get(reason, (0, 0))[1] for found in everyone)
