"""Theorems about worlds that are not there, which need no ranks."""
from mpi_impl.dry_run.matching import match
from mpi_impl.dry_run.world import DryRun
from mpi_impl.prediction.rank import ImaginedWorld, run_rank
from reference.config import ModelConfig, ParallelConfig, Recompute
from reference.precision import Precision
from tests.cases import Case, Plan


def world_of(case: Case, plan: Plan, size: int, m: int, precision: str = "float64") -> ImaginedWorld:
    """Return the world of a case's training, with steps of m microbatches."""
    return ImaginedWorld(case.model, plan.parallel(size, case), Precision(precision), case.b, case.s, m)


def all_ranks_match(world: ImaginedWorld) -> None:
    """Assert that the messages of all ranks match."""
    mistake = match({rank: run_rank(world, rank).events for rank in range(world.parallel.world_size)})
    assert not mistake, mistake


def kinds_of_ranks_match(world: ImaginedWorld) -> None:
    """Assert that the messages of one pipeline, and of some ranks in its other groups, match."""
    _, mistake = DryRun(world).match()
    assert not mistake, mistake


def large_world(p: int = 64, d: int = 6, **choices) -> ImaginedWorld:
    """Return the topology of a trillion parameters (Narayanan et al. 2021, table 1), on 3,072 ranks, and a small model.
    """
    return ImaginedWorld(ModelConfig(p, 16, 8, 64, 16), ParallelConfig(8, p, d, recompute=Recompute("full"), **choices),
                 Precision("bfloat16"), 1, 16, 2 * p)
