"""Theorems about checkpoints on ranks: a resumed run is the run, and other ranks go on with what these have saved."""
from contextlib import contextmanager
from tempfile import TemporaryDirectory

import numpy as np

from mpi_impl.checkpoints import checkpoint, on_disk
from reference.parallel.boxes import without_padding
from reference.precision import Precision
from tests.cases import Case, Plan, close, trees_close
from tests.checkpoints.saved_runs import DOUBLE, Run, join_replica, load_and_train, train_and_save
from tests.rank_theorems import first_checks
from tests.training_theorems import connected


@contextmanager
def common_folder(group):
    """Yield a folder that all ranks of the group can use, for as long as the `with` block lasts."""
    mine = TemporaryDirectory() if group.rank == 0 else None
    try:
        yield group.broadcast_object(lambda: mine and mine.name)
    finally:
        if mine:
            mine.cleanup()


def resumed_run_is_the_run(group, case: Case, plan: Plan, precision: Precision, steps: int) -> None:
    """Check the same for these choices, with two microbatches."""
    resumed_is_uninterrupted(group, run_on(group, case, plan, precision), steps)


def another_topology_goes_on(group, saves: Case, plan: Plan, loads: Case, other: Plan, steps: int) -> None:
    """Check that the same ranks, in another topology, load the states to the bit, and that one more step is one
    process's.
    """
    with common_folder(group) as root:
        saved = train_and_save(group, run_on(group, saves, plan), root, steps)
        after = load_and_train(group, run_on(group, loads, other), root)
    first_checks(group, (saved, after), lambda everyone: goes_on(run_on(group, saves, plan), steps, *zip(*everyone)))


def run_on(group, case: Case, plan: Plan, precision: Precision = DOUBLE) -> Run:
    """Return a run on all ranks of the group, with four samples in a batch."""
    return Run(group.size, case, plan, 4, precision)


def resumed_is_uninterrupted(group, run: Run, steps: int) -> None:
    """Check that a resumed and an uninterrupted run have bitwise identical states on each rank. The resumed trainer's
    states begin with other values.
    """
    with connected(group, run.plan.parallel(group.size, run.case)) as topology, common_folder(group) as root:
        through, before, after = run.trainer(topology), run.trainer(topology), run.trainer(topology)
        for _ in range(steps):
            run.step(through)
            run.step(before)
        checkpoint.save(before, root, {})
        for buffer in after.state.optimizer_states.values():
            buffer.flat[...] = 7
        checkpoint.load(after, root, group.broadcast_object(lambda: on_disk.read_manifest(root)))
        for _ in range(steps):
            assert repr(run.step(through)) == repr(run.step(after))
        assert (through.iteration, through.optimizer.iteration, through.scaler.state) == (
            after.iteration, after.optimizer.iteration, after.scaler.state)
        for one, other in ((through.state.parameters.own, after.state.parameters.own), *zip(
                through.state.optimizer_states.values(), after.state.optimizer_states.values(), strict=True)):
            for piece in without_padding(through.state.pieces, topology.place.tensor):
                assert np.array_equal(one.load(piece), other.load(piece), equal_nan=True), piece.of.name


def goes_on(one: Run, steps: int, saved, after) -> None:
    """Assert, of what all ranks have saved and what all ranks have after loading it, that nothing is lost, and that
    every replica's next step is one process's.
    """
    loaded, results, stepped = zip(*after, strict=True)
    replicas = sorted({found.place.replica for found in loaded})
    for state in ("parameters", "m", "v"):
        for replica in replicas:
            trees_close(join_replica(loaded, state, replica), join_replica(saved, state), 0.0)
    textbook = one.textbook()
    for step in range(steps + 1):
        loss, norm, _ = textbook.step(one.samples(step))
    for result, in results:
        close(np.stack([result.loss, result.grad_norm]), np.stack([loss, norm]), 1e-10)
    for state, expected in (("parameters", textbook.params), ("m", textbook.m), ("v", textbook.v)):
        trees_close(join_replica(stepped, state, replicas[-1]), expected, 1e-10)
