"""The detectors that are proofs: the entry's theorem in float64 and on exact numbers, and `prove`."""
from types import SimpleNamespace
from typing import cast

from benchmarks.bug_matrix import runs
from benchmarks.bug_matrix.planted_bug import PlantedBug, sentence, short_text
from benchmarks.bug_matrix.settings import BugSetting
from benchmarks.bug_matrix.texts import VOCAB_SIZE
from benchmarks.bug_matrix.verdict import Verdict, not_applicable, seen, silent
from mpi_impl.launch.pool import RankFailure
from reference.parallel.stages import schedule_of
from shardlab.programs.settings import PretrainingSettings
from shardlab.prove import proof
from shardlab.prove.sizes import ProofSizes, shrink
from tests.zoo.entry import Theorem

PROOFS = 3      # whether an exact norm is above its bound is as good as drawn by lot: most likely both are met


def float_theorem(bug: PlantedBug) -> Verdict:
    """Judge by the entry's theorem."""
    return check(bug, bug.entry.theorem)


def exact_theorem(bug: PlantedBug) -> Verdict:
    """Judge by the same theorem on exact numbers."""
    exact = bug.entry.theorem.exact
    return check(bug, exact) if exact else not_applicable("the theorem is about something else than formulas")


def check(bug: PlantedBug, theorem: Theorem) -> Verdict:
    """Judge by a theorem."""
    n, call = (theorem.ranks, ()) if theorem.ranks else (1, (runs.call_here,))
    call = *call, theorem.function, *theorem.args
    clean = bug.clean.of(n, *call)
    if isinstance(clean, RankFailure):
        return not_applicable(f"the theorem does not hold without the bug, either: {sentence(clean)}")
    found = bug.run(n, *call)
    return seen(sentence(found)) if isinstance(found, RankFailure) else silent("the theorem holds")


# ---- the program ----------------------------------------------------------------------------------------------------


def prove(bug: PlantedBug) -> Verdict:
    """Judge by `prove`, with the run's ranks, schedule and options."""
    setting = bug.setting
    if setting.loads:
        return not_applicable("a proof loads no checkpoint")
    if setting.form != "float32":
        return not_applicable("the run is in 16 bits, and rounding has no formula")
    if setting.order not in (None, schedule_of(parallel_of(setting), setting.m)):
        return not_applicable("the run's schedule has no name")
    for seed in range(PROOFS):
        found, clean = bug.both(prove_run, proof_sizes(setting), seed)
        if isinstance(clean, RankFailure) or clean[0][1]:
            return not_applicable("the run is not proved without the bug, either")
        if isinstance(found, RankFailure):
            return seen(sentence(found))
        iteration, says = found[0]
        if says:
            return seen(short_text(says), iteration)
    return silent(f"proved {PROOFS} times")


def parallel_of(setting: BugSetting):
    return setting.plan.parallel(setting.ranks, setting.case)


def proof_sizes(setting: BugSetting) -> ProofSizes:
    """Return the sizes that `prove` takes in place of the run's."""
    case = setting.case
    run = SimpleNamespace(args=SimpleNamespace(vocab_size=VOCAB_SIZE, seq_length=case.s, micro_batch_size=case.b),
                          parallel=parallel_of(setting), optimizer=setting.optimizer, microbatches=setting.m,
                          model=lambda vocab_size: case.model)
    return shrink(cast(PretrainingSettings, run))


def prove_run(group, sizes: ProofSizes, seed: int) -> tuple[int, str]:
    """Return the iteration in which a tensor is another formula, and what `prove` says; or 0 and nothing."""
    found = proof.prove(group, sizes, seed)
    assert found is not None, "a divisor was 0"
    other = found.comparison.found
    return (other.key.iteration, proof.describe_difference(found.comparison, sizes.parallel)) if other else (0, "")
