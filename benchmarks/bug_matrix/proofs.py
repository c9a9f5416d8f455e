"""The two detectors that are theorems: the entry's own in float64, and the same one on numbers of a prime field."""
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

from benchmarks.bug_matrix import runs
from benchmarks.bug_matrix.planted_bug import PlantedBug, sentence
from benchmarks.bug_matrix.settings import a_case, setting_of
from benchmarks.bug_matrix.verdict import Verdict, not_applicable, seen, silent
from mpi_impl.launching.pool import RankFailure
from reference.exact.array import as_exact
from tests.cases import Case, ExactCase
from tests.training_theorems import training_equals_one_process

CLIPS = (0.5, 0.25, 0.75)       # bounds of the norm: whether an exact norm is larger is as good as drawn by lot
INTEGERS = "training_theorems.batch_is_dealt_out"


def float_theorem(bug: PlantedBug) -> Verdict:
    """Judge by the entry's theorem."""
    name, ranks, args = bug.entry.theorem
    function = bug.entry.theorem.function
    found = bug.run(ranks, function, *args) if ranks else bug.run(1, runs.call_here, function, *args)
    return seen(sentence(found)) if isinstance(found, RankFailure) else silent(f"{name} holds")


def exact_proof(bug: PlantedBug) -> Verdict:
    """Judge by the entry's theorem on exact numbers, or by the main theorem on the same ranks."""
    name, ranks, args = bug.entry.theorem
    if name.startswith("mpi_impl.test_mixed_precision.") or bug.entry.kind == "precision":
        return not_applicable("the bug is about rounding, which exact numbers do not have")
    if name.startswith("checkpoint_theorems."):
        return not_applicable("the theorem about checkpoints compares bits already")
    if name == INTEGERS:
        return not_applicable("the theorem is about whole numbers, which are exact already")
    said = ""
    for function, proof in exact_theorems(bug):
        n, caller = (ranks, ()) if ranks else (1, (runs.call_here,))
        clean = bug.clean.of(n, *caller, function, *proof)
        if isinstance(clean, RankFailure):
            said = said or f"the theorem does not take exact numbers: {sentence(clean)}"
            continue
        found = bug.run(n, *caller, function, *proof)
        if isinstance(found, RankFailure):
            return seen(sentence(found))
        said = f"{function.__name__} holds as an equation of formulas"
    return not_applicable(said) if said.startswith("the theorem does") else silent(said)


def exact_theorems(bug: PlantedBug) -> Iterator[tuple[Any, tuple]]:
    """Yield the theorems to check, as functions and arguments: one, or as many as there are bounds of the norm."""
    name, ranks, args = bug.entry.theorem
    function = bug.entry.theorem.function
    if not ranks:
        yield function, exact(args)
    elif name.startswith("rank_theorems."):
        yield on_exact_numbers, (function, exact(args))
    else:
        setting = setting_of(bug.entry)
        case = next((one for one in args if isinstance(one, Case)), a_case(setting.case.t))
        case = replace(case, b=min(case.b, 2), model=replace(case.model, num_layers=setting.case.model.num_layers))
        for clip in CLIPS:
            yield main_theorem, (exact((case,))[0], setting.m, clip, setting.plan, setting.order)


def exact(args: tuple) -> tuple:
    """Return the arguments with an ExactCase in the place of each Case."""
    return tuple(ExactCase(**{field.name: getattr(one, field.name) for field in fields(one)})
                 if isinstance(one, Case) else one for one in args)


def on_exact_numbers(group, function, args: tuple) -> None:
    """Check a theorem of ranks on exact numbers."""
    function(group, *args, wrap=as_exact)


def main_theorem(group, case: ExactCase, m: int, clip: float, plan, order) -> None:
    """Check two training steps on exact numbers."""
    training_equals_one_process(group, case, 2, m, clip, plan, as_exact, order)
