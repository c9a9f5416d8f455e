"""Pipeline schedules. Each function lists the actions (actions.py) of every rank.

`python -m reference.schedules --schedule 1f1b -p 4 -m 8` prints a table. The cost of a schedule: simulate.py. Ranks
that start later often end later, too: this slant of the timeline is not idle time, unless something makes all ranks
wait for one another between two steps.

Letters: p ranks of a pipeline, v stages (model chunks) on each, m microbatches.
"""
from collections import defaultdict
from collections.abc import Callable, Sequence
from inspect import signature

from reference.config import require_positive
from reference.errors import UserError
from reference.schedules.actions import Action, Schedule

MOST_ACTIONS = 250_000      # of one kind on all ranks in a step: a schedule lists them all, within seconds

# ---- generators -----------------------------------------------------------------------------------------------------


def gpipe(p: int, m: int) -> Schedule:
    """Return all forwards, then all backwards (Huang et al. 2019). Every rank holds m microbatches' activations."""
    require_sizes(p, m)
    return per_rank(p, lambda r: alternate(forwards(r, m), backwards(r, m), warmup=m))


def one_f_one_b(p: int, m: int) -> Schedule:
    """Alternate forwards and backwards (PipeDream-Flush; Narayanan et al. 2021, figure 4, top).

    Each rank starts with one forward for each rank after it: at most p - r activations on rank r, and GPipe's bubble.
    """
    require_sizes(p, m)
    return per_rank(p, lambda r: alternate(forwards(r, m), backwards(r, m), warmup=p - 1 - r))


def interleaved(p: int, m: int, v: int) -> Schedule:
    """Do 1F1B over v stages on each rank, r, r + p, r + 2p, ...: 1/v of the bubble (Narayanan et al. 2021, 2.2).

    Microbatches go through a rank's stages in groups of p, so m must be a multiple of p. Raises UserError otherwise.
    """
    require_sizes(p, m, v)
    check_microbatches("interleaved", p, m)

    def rank(r):
        mine = [r + chunk * p for chunk in range(v)]
        groups = [range(first, first + p) for first in range(0, m, p)]
        forward = [Action(stage, "F", i) for group in groups for stage in mine for i in group]
        backward = [[Action(stage, "B", i)] for group in groups for stage in reversed(mine) for i in group]
        return alternate(forward, backward, warmup=2 * (p - 1 - r) + (v - 1) * p)

    return per_rank(p, rank)


def zero_bubble_h1(p: int, m: int) -> Schedule:
    """Split 1F1B's backward (Qi et al. 2023, figure 3): I immediately, since others wait for it; W r turns later.

    Later ranks would idle at the end of a step. They fill that time with the W that they delayed. Memory as on 1F1B's
    first rank: p activations, on every rank.
    """
    require_sizes(p, m)
    return per_rank(p, lambda r: alternate(forwards(r, m), split_backwards(r, m, delay=r), warmup=p - 1 - r))


def zero_bubble_h2(p: int, m: int) -> Schedule:
    """Double ZB-H1's warm-up and its delay of W (Qi et al. 2023, figure 3): 2p - 1 activations.

    With F = I = W and m >= 2p - 1 nothing idles but for the slant of the timeline, as long as no optimizer step makes
    ranks wait.
    """
    require_sizes(p, m)
    return per_rank(p, lambda r: alternate(forwards(r, m), split_backwards(r, m, delay=2 * r), warmup=2 * (p - 1 - r)))


def zero_bubble_v(p: int, m: int) -> Schedule:
    """Place two stages on each rank, r on the way down and 2p - 1 - r on the way up: a V (Qi et al. 2023, section 6).

    Each stage does 1F1B as in a pipeline of 2p ranks, with a split backward, and a rank's two stages take turns. The
    first forward on the way up reaches rank r after 2(p - r) - 1 turns: until then the rank does that many forwards on
    the way down. At the end, results that others wait for go first, and W fills the time.

    Memory as on 1F1B's first rank, on every rank: 2p activations of a stage, which has half a rank's layers. Where F =
    I = W and m >= 2p - 1, nothing idles but for the slant of the timeline.
    """
    require_sizes(p, m)

    def rank(r):
        down, up = r, 2 * p - 1 - r
        actions = in_phases(m, (2 * (p - r) - 1, [(down, "F")]),
                               (r, [(up, "F"), (down, "F")]),
                               (p - r, [(up, "F"), (up, "IW")]),
                               (m, [(down, "F"), (down, "IW"), (up, "F"), (up, "IW")]))
        return put_off_weights(actions, last=p + r, turns=2 * r)

    return per_rank(p, rank)


def dualpipe_v(p: int, m: int) -> Schedule:
    """Pair one stage's forward with the other's backward on the V (DeepSeek's DualPipeV, Sea AI Lab's `cut-in-half`).

    The two are of different microbatches, so on a GPU one computes while the other communicates; here they stand one
    after the other. The backward is split at both ends only. At most 2p + 1 activations of a stage; where F = I = W and
    m >= p, half of ZB-H1's bubble.
    """
    require_sizes(p, m)

    def rank(r):
        down, up = r, 2 * p - 1 - r
        actions = in_phases(m, (2 * (p - r) - 2, [(down, "F")]),
                               (r + 1, [(down, "F"), (up, "F")]),
                               (p - r - 1, [(up, "IW"), (up, "F")]),
                               (m, [(down, "F"), (up, "B"), (up, "F"), (down, "B")]))
        return put_off_weights(actions, last=p, turns=r)

    return per_rank(p, rank)


def forward_only(p: int, m: int, v: int = 1) -> Schedule:
    """Evaluate on the stages of `interleaved`; m need not be a multiple of p."""
    require_sizes(p, m, v)
    return evaluation_schedule([range(r, v * p, p) for r in range(p)], m)


def evaluation_schedule(placement: Sequence[Sequence[int]], m: int) -> Schedule:
    """Do forwards only, with the stages placement[r] on rank r, as in another schedule's placement().

    Microbatches go through a rank's stages in groups of p. It ends for every placement: the order of all actions by
    group, stage and microbatch has each after the one that it needs, and every rank follows it.
    """
    p = len(placement)
    require_sizes(p, m)
    groups = [range(first, min(first + p, m)) for first in range(0, m, p)]
    return per_rank(p, lambda r: [Action(stage, "F", i) for group in groups for stage in sorted(placement[r])
                                  for i in group])


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "gpipe": gpipe, "1f1b": one_f_one_b, "interleaved": interleaved, "zb-h1": zero_bubble_h1, "zb-h2": zero_bubble_h2,
    "zb-v": zero_bubble_v, "dualpipe-v": dualpipe_v, "forward-only": forward_only,
}


def takes_v(name: str) -> bool:
    """Report whether the user chooses the number of stages on each rank."""
    return "v" in signature(SCHEDULES[name]).parameters


def make(name: str, p: int, m: int, v: int | None = None) -> Schedule:
    """Return the schedule of that name. Raise UserError if it takes no v and gets one, or needs one and gets none."""
    if name not in SCHEDULES:
        raise UserError(f"{name!r} is not a schedule. There are {', '.join(SCHEDULES)}.")
    if v is not None:
        if not takes_v(name):
            raise UserError(f"-v is {v}, but the number of stages on a rank is not a choice with {name}. Leave it out, "
                            "or choose interleaved.")
        return SCHEDULES[name](p, m, v)
    if name == "interleaved":
        raise UserError("The interleaved schedule needs -v, the number of stages on each rank.")
    return SCHEDULES[name](p, m)


# ---- parts of a rank's list -----------------------------------------------------------------------------------------


def alternate(forward: list[Action], backward: list[list[Action]], warmup: int) -> list[Action]:
    """Do `warmup` forwards, then a forward and a backward in turn while there are forwards, then the rest."""
    ahead = min(warmup, len(forward))
    actions = forward[:ahead]
    for i, turn in enumerate(backward):
        actions += forward[ahead + i:ahead + i + 1] + turn
    return actions


def forwards(stage: int, m: int) -> list[Action]:
    return [Action(stage, "F", i) for i in range(m)]


def backwards(stage: int, m: int) -> list[list[Action]]:
    return [[Action(stage, "B", i)] for i in range(m)]


def split_backwards(stage: int, m: int, delay: int) -> list[list[Action]]:
    """Return turns of I, each with the W of `delay` turns earlier; the last W stand after the last I."""
    turns = [[Action(stage, "I", i), *([Action(stage, "W", i - delay)] if i >= delay else [])] for i in range(m)]
    turns[-1] += [Action(stage, "W", i) for i in range(max(0, m - delay), m)]
    return turns


Turn = list[tuple[int, str]]                          # (stage, its actions: F, B or IW) pairs


def in_phases(m: int, *phases: tuple[int, Turn]) -> list[Action]:
    """Repeat each phase's turn as often as it says. A stage takes its next microbatch; after the last it does nothing.

    So the schedule of few microbatches is the schedule of many without the others: if one ends, so do all.
    """
    actions: list[Action] = []
    done: dict[tuple[int, bool], int] = defaultdict(int)         # (stage, forward or not) -> microbatches
    for times, turn in phases:
        for stage, kinds in turn * times:
            i = done[stage, kinds == "F"]
            if i < m:
                actions += [Action(stage, kind, i) for kind in kinds]
                done[stage, kinds == "F"] += 1
    return actions


def put_off_weights(actions: list[Action], last: int, turns: int) -> list[Action]:
    """Split the last backwards, those that no forward follows, and do each W `turns` turns after its I."""
    end = 1 + max(i for i, action in enumerate(actions) if action.kind == "F")
    late = [i for i in range(end, len(actions)) if actions[i].kind in "BI"][-last:]
    inputs = [actions[i]._replace(kind="I") for i in late]
    weights = [[actions[i]._replace(kind="W")] for i in late]
    return actions[:late[0]] + alternate(inputs, weights, warmup=turns)


def per_rank(p: int, actions: Callable[[int], list[Action]]) -> Schedule:
    return Schedule(tuple(tuple(actions(r)) for r in range(p)))


def shrink_microbatches(m: int, name: str, p: int) -> int:
    """Return as many of m microbatches as fill the pipeline, so that the schedule comes into its own."""
    return min(m, p + 1 if name in ("gpipe", "1f1b", "zb-h1") else 2 * p)


def check_microbatches(name: str, p: int, m: int) -> None:
    """Raise UserError if the schedule of that name does not take m microbatches. Only `interleaved` is restricted."""
    require_sizes(p, m)
    if name == "interleaved" and m % p:
        raise UserError(f"The interleaved schedule takes microbatches in groups of p = {p}, but m = {m} is not a "
                        f"multiple of {p}. The nearest that is: {max(1, round(m / p)) * p}.")


def require_sizes(p: int, m: int, v: int = 1) -> None:
    """Raise UserError for sizes below 1, and if the list of all actions would be too long."""
    for name, value in (("pipeline ranks p", p), ("microbatches m", m), ("stages on each rank v", v)):
        require_positive(name, value)
    if p * v * m > MOST_ACTIONS:
        raise UserError(f"A schedule of p = {p:,} ranks with v = {v:,} stages on each and m = {m:,} microbatches has "
                        f"p v m = {p * v * m:,} forwards, but may have at most {MOST_ACTIONS:,}. Choose smaller sizes.")
