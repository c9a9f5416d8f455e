"""Ways of checking a training run, as functions of a planted bug: each tells whether it sees the bug, and when."""
import re
from collections.abc import Callable
from math import isfinite
from typing import NamedTuple

import numpy as np

from benchmarks.bug_matrix.planted_bug import WINDOW, PlantedBug, sentence, short_text, smooth
from benchmarks.bug_matrix.proofs import exact_theorem, float_theorem, prove
from benchmarks.bug_matrix.runs import SAVED_AFTER, Accounts
from benchmarks.bug_matrix.verdict import Verdict, not_applicable, seen, silent
from mpi_impl.comm.ledger import Total
from mpi_impl.launch.pool import RankFailure
from mpi_impl.parallel.model_state import Held
from reference.errors import UserError
from shardlab.compare.differences import compare as compare_recordings

IN_TEXTBOOK = not_applicable("the bug is in the textbook, whose sharded layers are proven and not trained")
NOT_CALLED = not_applicable("a GPT's or a BERT's training does not call the function")
ENDS = not_applicable("the run ends by itself")


def needs_a_run(detector: Callable[[PlantedBug], Verdict]) -> Callable[[PlantedBug], Verdict]:
    """Let a detector judge only bugs that a training run comes across, and that do not end it."""
    def judged(bug: PlantedBug) -> Verdict:
        if bug.textbook:
            return IN_TEXTBOOK
        if isinstance(bug.accounts[1], RankFailure):
            return not_applicable(f"the run fails without the bug, too: {sentence(bug.accounts[1])}")
        if not isinstance(bug.accounts[0], RankFailure) and not any(one.called for one in bug.accounts[0]):
            return NOT_CALLED
        if bug.failure:
            return ended(sentence(bug.failure)) if detector is by_itself else ENDS
        return detector(bug)

    return judged


def ended(says: str) -> Verdict:
    """Return the verdict on a run that has ended by itself, with its last step if that is known."""
    step = re.search(r"(?:in step|iteration) (\d+)", says)
    return seen(says, int(step[1]) if step else 0)


def by_itself(bug: PlantedBug) -> Verdict:
    """Judge by whether the run ends in an error or hangs."""
    return silent("the run ends as it should")


# ---- what a person watches ------------------------------------------------------------------------------------------


def loss_curve(bug: PlantedBug) -> Verdict:
    """Judge by whether the final loss is beyond two standard deviations of seeds; from which step on for good."""
    if bug.first_steps_are_equal:
        return silent("the first steps are equal to the last bit")
    assert not isinstance(bug.long, RankFailure), "needs_a_run has asked"
    _, mean, deviation = bug.clean.band(bug.setting)
    losses = bug.clean.curve(bug.setting, bug.setting.case.seed)[:-len(bug.long.losses)]
    losses += bug.long.losses
    step = step_of_leaving(smooth(losses), mean, deviation)
    says = (f"the mean of the last {WINDOW} losses is {smooth(losses)[-1]:.3f}; without the bug {mean[-1]:.3f}, with a "
            f"deviation of {deviation[-1]:.3f} over seeds")
    return seen(says, step) if step else silent(says)


def step_of_leaving(curve, mean, deviation) -> int:
    """Return the first step, from 1, after which a curve stays two deviations away from the mean; 0 if it is near."""
    near = np.flatnonzero(abs(curve - mean) <= 2 * deviation)       # a loss that is not a number is not near
    last = near[-1] + 1 if near.size else 0
    return 0 if last == len(curve) else int(last) + 1


def gradient_norm(bug: PlantedBug) -> Verdict:
    """Judge by whether a norm of the first steps differs from that of the same run without the bug."""
    found, expected = bug.short
    if isinstance(expected, RankFailure):
        return not_applicable(f"the run fails without the bug, too: {sentence(expected)}")
    assert not isinstance(found, RankFailure), "needs_a_run has asked"
    largest = 0.0
    for step, (norm, right) in enumerate(zip(found.norms, expected.norms, strict=True), 1):
        if isfinite(norm) != isfinite(right) or isfinite(norm) and abs(norm - right) > bug.tolerance * right:
            step += SAVED_AFTER if bug.setting.loads else 0
            return seen(f"{norm:.6g} in step {step}, where {right:.6g} is right", step)
        largest = max(largest, abs(norm - right) / right if isfinite(norm) else 0.0)
    return silent(f"it differs by {largest:.0e} at most in {len(found.norms)} steps")


# ---- tools of this project ------------------------------------------------------------------------------------------


def verify(bug: PlantedBug) -> Verdict:
    """Judge by --verify, in float32 and in float64, or in the run's 16 bits."""
    found, clean = bug.verified
    if isinstance(found, RankFailure):
        return seen(sentence(found))
    if isinstance(clean, RankFailure) or any(step for step, _ in clean[0]):
        return not_applicable("--verify finds fault with the run without the bug, too")
    for form, (step, says) in zip(bug.forms, found[0], strict=True):
        if step:
            return seen(short_text(f"{form}: {says}"), step)
    return silent(f"{bug.compared_steps + 1} steps agree in {' and in '.join(bug.forms)}")


def compare(bug: PlantedBug) -> Verdict:
    """Judge by the divergence finder: a recording with the bug, and one of one rank without it."""
    buggy, clean = bug.recordings
    if isinstance(buggy, RankFailure):
        return seen(sentence(buggy))
    if isinstance(clean, RankFailure):
        return not_applicable("the run cannot be recorded on one rank")
    try:
        found = compare_recordings(clean, buggy, shown=1)
    except UserError as error:
        return silent(short_text(str(error)))
    if not found.differences:
        return silent(f"{found.compared} tensors agree")
    first = found.differences[0].key
    return seen(f"{first.iteration} {first.phase}: {first.name}", first.iteration)


def account(difference: Callable[[Accounts, Accounts], str]) -> Callable[[PlantedBug], Verdict]:
    """Return the detector that compares a run's accounts with those of the run without the bug, which are as predicted
    (tests/test_bug_matrix.py).
    """
    def judge(bug: PlantedBug) -> Verdict:
        found, clean = bug.accounts
        assert not isinstance(found, RankFailure) and not isinstance(clean, RankFailure), "needs_a_run has asked"
        for rank, pair in enumerate(zip(found, clean, strict=True)):
            if text := difference(*pair):
                return seen(f"rank {rank}: {text}", 2)
        return silent("as predicted")

    return judge


def other_traffic(found: Accounts, clean: Accounts) -> str:
    """Describe the first line of the ledger that differs."""
    for entry in sorted(found.ledger.keys() | clean.ledger.keys()):
        sent, predicted = found.ledger.get(entry, Total()), clean.ledger.get(entry, Total())
        if sent != predicted:
            return (f"{entry.operation} over {entry.group}, {entry.phase}, {entry.reason!r}: {sent.calls} calls with "
                    f"{sent.elements} elements, where {predicted.calls} with {predicted.elements} were predicted")
    return ""


def other_caches(found: Accounts, clean: Accounts) -> str:
    return found.simulator if not clean.simulator else ""


def other_memory(found: Accounts, clean: Accounts) -> str:
    return "; ".join(f"{name}: {held:,} bytes, where {predicted:,} were predicted"
                     for name, held, predicted in zip(Held._fields, found.memory, clean.memory) if held != predicted)


class Detector(NamedTuple):
    """A way of checking, with its place in the table and its description."""

    name: str
    judge: Callable[[PlantedBug], Verdict]
    what: str


DETECTORS = (
    Detector("by itself", needs_a_run(by_itself), "the run ends in an error, diverges, or hangs"),
    Detector("loss curve", needs_a_run(loss_curve), "the final loss is far from those of other seeds"),
    Detector("gradient norm", needs_a_run(gradient_norm), "it differs from that of the same run without the bug"),
    Detector("float theorem", float_theorem, "the theorem of the entry, in float64"),
    Detector("exact theorem", exact_theorem, "the same theorem on numbers of a prime field"),
    Detector("prove", needs_a_run(prove), "every tensor of two steps is the same formula as in one process"),
    Detector("verify", needs_a_run(verify), "`--verify`: the textbook trains beside the run"),
    Detector("compare", needs_a_run(compare), "every tensor is compared with a run on one rank"),
    Detector("ledger", needs_a_run(account(other_traffic)), "messages are compared with the prediction"),
    Detector("simulator", needs_a_run(account(other_caches)), "caches in flight are compared with the simulated ones"),
    Detector("memory", needs_a_run(account(other_memory)), "bytes are compared with the prediction"),
)
