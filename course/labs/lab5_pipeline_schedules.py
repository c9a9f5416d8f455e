# %% [markdown]
# # Lab 5. Pipeline schedules for unequal stages
#
# A pipeline distributes the layers of a model over ranks, and a *schedule* says in which order each rank does its
# forwards and backwards. Papers draw schedules for stages that all cost the same and messages that cost nothing. Real
# stages differ (the last has the logits) and messages take time. In this lab you divide a model as evenly as possible,
# write 1F1B with a number of forwards ahead that you choose, find out how many are needed and how fast a pipeline can
# be within a given memory, interleave, and finally play schedules on real ranks without a deadlock.
#
# **You need**: walkthroughs *Splitting matrices* and *Pipelines*, and lab 1's `send` and `receive`.
# **Time**: about six hours. **Points**: 60, and 10 for words.
#
# As in lab 1: cells that begin with `%%answer` are yours, a check runs them in separate processes, and the checks that
# give the points try more sizes than you see. An answer may call the functions of other answers, but not those of other
# cells: copy what you want to use from them.
#
# ## Notation
#
# $p$ ranks, $m$ microbatches, $v$ stages on each rank. An action is a tuple `(kind, stage, microbatch)`, for example
# `("F", 2, 0)`: stage 2's forward of microbatch 0, which is printed as `2F0`. The other kind is `"B"`, a backward.
# Stage $s$ lives on rank $s \bmod p$. A rank's part of a schedule is a list of actions, in the order in which it does
# them, and a schedule is a list with such a list for each rank. Each action happens once, and needs another one to have
# ended:
#
# - `("F", s, i)` needs `("F", s - 1, i)`; for the first stage it needs nothing;
# - `("B", s, i)` needs `("B", s + 1, i)`; for the last stage it needs `("F", s, i)`.
#
# A microbatch is *in flight* on a stage from the start of its forward to the end of its backward: that long the stage
# must keep its activations. The *makespan* is the time from the first start to the last end.
#
# The next cell has a simulator. Read it: it defines what a schedule means.

# %%
# %load_ext course.grading
import numpy as np

from course.grading import each, run

# %% locked="tools"
import itertools
import math

import numpy as np

from course.grading import check_data, each, expect, expect_equal, expect_sent, passed, run
from course.grading.broker import find_cycle

MESSAGES = ("send", "receive", "exchange")


def needs(action, stages):
    """Return the action that must have ended before; None if there is none."""
    kind, stage, i = action
    if kind == "F":
        return ("F", stage - 1, i) if stage > 0 else None
    return ("B", stage + 1, i) if stage < stages - 1 else ("F", stage, i)


def simulate(schedule, forward, backward, wire=0):
    """Let each rank do its actions in order, each as soon as its input is there. Return when each action ends.

    forward[s] and backward[s] are the durations on stage s, and a message to another rank takes `wire`.
    """
    p, stages, ended = len(schedule), len(forward), {}
    done, clock = [0] * p, [0] * p
    waits = {0: None}
    while waits:
        before, waits = sum(done), {}
        for rank, actions in enumerate(schedule):
            for action in actions[done[rank]:]:
                need = needs(action, stages)
                if need is not None and need not in ended:
                    waits[rank] = need
                    break
                sent = need is not None and need[1] % p != rank
                start = clock[rank] if need is None else max(clock[rank], ended[need] + sent * wire)
                ended[action] = clock[rank] = start + (forward if action[0] == "F" else backward)[action[1]]
                done[rank] += 1
        expect(not waits or sum(done) > before, f"The schedule never ends: {describe_waits(waits, p)}.")
    return ended


def describe_waits(waits, p):
    """Describe which rank waits for what, and the cycle."""
    cycle = find_cycle({rank: need[1] % p for rank, need in waits.items()})
    return ", ".join(f"rank {rank} waits for {label(need)} of rank {need[1] % p}" for rank, need in waits.items()) + \
        f"; in a cycle: {' -> '.join(map(str, cycle + cycle[:1]))}"


def label(action):
    """Return 2F0 for ("F", 2, 0)."""
    return f"{action[1]}{action[0]}{action[2]}"


def show(schedule):
    """Print a schedule, a line for each rank."""
    for rank, actions in enumerate(schedule):
        print(f"rank {rank}:", *map(label, actions))


def most_in_flight(actions):
    """Return the largest number of microbatches in flight on one rank at any time, summed over its stages."""
    return max(itertools.accumulate(1 if kind == "F" else -1 for kind, _, _ in actions))


def period_of(costs, wire, in_flight):
    """Return the period by the formula in the section *How many are needed?*"""
    pairs = [(r, q) for r in range(len(costs)) for q in range(r, len(costs))]
    if any(in_flight[r] - in_flight[q] + 1 < 1 for r, q in pairs):
        return math.inf
    return max((sum(costs[r:q + 1]) + 2 * wire * (q - r)) / (in_flight[r] - in_flight[q] + 1) for r, q in pairs)


def checked_schedule(found, p, m, v=1):
    """Return an answer's schedule, with a tuple for each action. Check that it is a schedule."""
    expect(isinstance(found, list | tuple) and len(found) == p and all(isinstance(one, list | tuple) for one in found),
           f"Expected a list of {p} lists, one for each rank, got {str(found)[:80]}.")
    schedule = [[checked_action(action, rank) for action in actions] for rank, actions in enumerate(found)]
    for rank, actions in enumerate(schedule):
        right = {(kind, stage, i) for kind in "FB" for stage in range(rank, p * v, p) for i in range(m)}
        for action in actions:
            expect(action in right, f"rank {rank}: {action} does not belong here.", f"rank {rank} of {p} has the "
                   f"stages {list(range(rank, p * v, p))} and microbatches 0 to {m - 1}.")
        missing = right - set(actions)
        expect(not missing, f"rank {rank}: {len(missing)} actions are missing, for example "
               f"{min(missing, default=None)}.")
        expect(len(actions) == len(right), f"rank {rank}: an action is there twice: there are "
               f"{len(actions)} actions, but only {len(right)} different ones.")
    return schedule


def checked_action(action, rank):
    """Return an action as a tuple of a string and two numbers. Check that it is one."""
    expect(isinstance(action, list | tuple) and len(action) == 3 and action[0] in ("F", "B")
           and all(np.ndim(n) == 0 and np.asarray(n).dtype.kind in "iu" for n in action[1:]),
           f"rank {rank}: {action!r} is no action.", 'an action is a tuple such as ("F", 2, 0).')
    return action[0], int(action[1]), int(action[2])


def whole_numbers(found, n, what):
    """Return a list of n whole numbers, at least 1. Check that it is one."""
    listed = isinstance(found, list | tuple | np.ndarray) and len(found) == n
    expect(listed and all(np.ndim(one) == 0 and np.asarray(one).dtype.kind in "iu" and one >= 1 for one in found),
           f"Expected {what}: a list of {n} whole numbers, at least 1 each; got {str(found)[:80]}.")
    return [int(one) for one in found]


# %% [markdown]
# ## Distributing layers
#
# A model is $L$ layers in a row, and layer $l$ costs $c_l$ (forward and backward together). Stages are *contiguous*:
# the first $n_0$ layers, the next $n_1$, and so on, at least one each. The slowest stage sets the pace for all, so the
# best division is the one in which the most expensive stage is as cheap as possible. Find it, exactly. (There may be
# several.)
#
# Trying all divisions is out of the question: for 40 layers on 8 ranks there are 15 million. Let $D(l, k)$ be the cost
# of the most expensive stage if the first $l$ layers are divided into $k$ stages as well as possible. What is
# $D(l, k)$, if you know all $D(j, k - 1)$? And how do you find out afterwards where the stages begin?

# %% answer="distribute"
# %%answer distribute
def distribute(costs, p):
    """Return how many layers each of p stages has, so that the most expensive one is cheapest. costs: of layers."""
    ### BEGIN SOLUTION
    upto = [0]
    for cost in costs:
        upto.append(upto[-1] + cost)
    best = [{0: (0, [])}]
    for k in range(1, p + 1):
        best.append({l: min((max(best[k - 1][j][0], upto[l] - upto[j]), [*best[k - 1][j][1], l - j])
                            for j in best[k - 1] if j < l) for l in range(k, len(costs) + 1)})
    return best[p][len(costs)][1]
    ### END SOLUTION


# %%
distribute([3, 1, 1, 1, 1, 5], 3)

# %% check="check_distribute" points=8
# Distributing layers: contiguous stages, the most expensive one as cheap as possible
def highest_cost(costs, sizes):
    return max(sum(stage) for stage in np.split(np.asarray(costs), np.cumsum(sizes)[:-1]))


def check_distribute(costs, p, best=None):
    layers = len(costs)
    if best is None:
        divisions = itertools.combinations(range(1, layers), p - 1)
        best = min(highest_cost(costs, np.diff([0, *starts, layers])) for starts in divisions)
    found, = run(None, "distribute", costs, p, hint="D(l, k) is a minimum over the beginnings of the last stage; "
                 "keep the values that you have computed.").results
    sizes = whole_numbers(found, p, f"how many layers each of {p} stages has")
    expect(sum(sizes) == layers, f"The stages have {sum(sizes)} layers in all; the model has {layers}.")
    highest = highest_cost(costs, sizes)
    expect(highest <= best * (1 + 1e-12), f"Costs {costs} in {p} stages: yours, {sizes}, has a stage that costs "
           f"{highest:g}; {best:g} can be reached.", "equal numbers of layers are not equal costs, and a stage "
           "that is filled up to the average may leave too much for the others.")


check_distribute([3, 1, 1, 1, 1, 5], 2)
check_distribute([1, 1, 1, 1, 9, 2, 2, 2, 2, 1], 4)
passed("layers distributed over 2 and 4 stages")
### BEGIN HIDDEN TESTS
random = check_data("distribute")
for layers, p, some in ((1, 1, range(1, 30)), (5, 5, range(1, 30)), (11, 5, range(1, 30)), (9, 3, [1, 1, 9]),
                        (6, 3, [0.125, 0.25, 0.5, 1.5])):
    check_distribute(random.choice(some, layers).tolist(), p)
check_distribute([1] * 20 + [4] * 10 + [1] * 10, 8, best=10)
### END HIDDEN TESTS

# %% [markdown]
# ## 1F1B, as far ahead as you like
#
# One stage on each rank ($v = 1$). In 1F1B (Narayanan et al. 2021, section 2.2; PipeDream-Flush) a rank first does some
# forwards. Then it does a backward and a forward in turn, until it has no forwards left, and then the other backwards.
# Microbatches come in order, 0, 1, 2, ..., in both directions.
#
# Let $a_r \ge 1$ be the number of microbatches that rank $r$ may have in flight. So it does $a_r$ forwards (or all $m$,
# if there are fewer) before its first backward, and after each backward the next forward. The paper has $a_r = p - r$.
# With $m = 4$ and $a = 2$ a rank of stage 0 does
#
# `0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3`.

# %% answer="one_f_one_b"
# %%answer one_f_one_b
def one_f_one_b(p, m, in_flight):
    """Return a schedule. in_flight: for each of the p ranks the number of microbatches that it may have in flight."""
    ### BEGIN SOLUTION
    schedule = []
    for rank, most in enumerate(in_flight):
        forward = [("F", rank, i) for i in range(m)]
        actions = forward[:most]
        for i in range(m):
            actions += [("B", rank, i), *forward[most + i:most + i + 1]]
        schedule.append(actions)
    return schedule
    ### END SOLUTION


# %% [markdown]
# For stages that cost $f + b$ each, and messages that cost nothing, the paper's choice gives a makespan of
# $(m + p - 1)(f + b)$: the *bubble* is $(p - 1)(f + b)$, which is $(p - 1)/m$ of the ideal time. Try it, and try
# smaller numbers in flight. What does the simulator say about `[1, 2, 1, 1]`?

# %%
mine = one_f_one_b(4, 6, [4, 3, 2, 1])
show(mine)
print("makespan", max(simulate(mine, forward=[1] * 4, backward=[2] * 4).values()), "and by the formula", (6 + 3) * 3)

# %% check="check_one_f_one_b" points=8
# 1F1B: valid, no more in flight than allowed, and the makespan (m + p - 1)(f + b) of the paper
def run_one_f_one_b(p, m, in_flight):
    """Return the answer's schedule."""
    found, = run(None, "one_f_one_b", p, m, in_flight).results
    return checked_schedule(found, p, m)


def check_one_f_one_b(p, m, in_flight):
    for rank, (actions, most) in enumerate(zip(run_one_f_one_b(p, m, in_flight), in_flight)):
        for kind in "FB":
            order = [i for what, _, i in actions if what == kind]
            expect(order == sorted(order), f"rank {rank} takes its {kind} in the order {order}; it should be 0, 1, ...")
        most, held = min(most, m), 0
        for position, action in enumerate(actions):
            left = any(later[0] == "F" for later in actions[position:])
            right = "F" if held < most and left else "B"
            expect(action[0] == right, f"rank {rank}, action {position} is {label(action)} with {held} in flight; with "
                   f"at most {in_flight[rank]} of {m} it should be {'a forward' if right == 'F' else 'a backward'}.",
                   "a rank does in_flight[rank] forwards first; then each backward makes room for one more forward.")
            held += 1 if action[0] == "F" else -1


def check_makespan(p, m, forward, backward):
    found = max(simulate(run_one_f_one_b(p, m, [p - r for r in range(p)]), [forward] * p, [backward] * p).values())
    right = (m + p - 1) * (forward + backward)
    expect(found == right, f"p = {p}, m = {m}, F = {forward}, B = {backward}: the makespan is {found}; with p - r in "
           f"flight it should be {right}.")


check_one_f_one_b(2, 4, [2, 1])
check_one_f_one_b(4, 8, [6, 3, 2, 2])
check_makespan(4, 8, 1, 2)
passed("1F1B on 2 and 4 ranks")
### BEGIN HIDDEN TESTS
random = check_data("one_f_one_b")
for p, m in ((1, 3), (3, 2), (5, 7)):
    check_one_f_one_b(p, m, sorted(random.integers(1, 10, p).tolist(), reverse=True))
for p in 8, 1:
    check_makespan(p, *random.integers(1, 8, 3).tolist())
### END HIDDEN TESTS

# %% [markdown]
# ## How many are needed?
#
# Now stage $s$ costs $C_s$ (its forward and its backward together), and a message takes $w$. In the long run a pipeline
# finishes one microbatch in every *period* $T$. Clearly $T \ge \max_s C_s$. What else limits it?
#
# Take ranks $r < q$. Rank $r$ does forward $j$; it goes down to rank $q$, which then does, since it has $a_q$ in
# flight, backward $j - a_q + 1$; that comes back up to rank $r$, which may now do forward $j - a_q + 1 + a_r$. The
# round trip took
#
# $$R_{rq} = C_r + C_{r+1} + \dots + C_q + 2 w (q - r),$$
#
# and in that time rank $r$ came $a_r - a_q + 1$ microbatches further. No rank can be faster than its round trips, and
# it can be shown that nothing else holds it up (with $R_{rr} = C_r$):
#
# $$T = \max_{r \le q} \frac{R_{rq}}{a_r - a_q + 1}, \qquad \text{and a deadlock if } a_r - a_q + 1 < 1.$$
#
# It is Little's law: in flight = time in flight / period. With $w = 0$ and $a_r = p - r$ every fraction is an average
# of costs, so 1F1B runs as fast as its most expensive stage, *however unequal the stages are*. With $w > 0$ that is not
# enough.
#
# Turn it around. Given a period $T \ge \max_s C_s$, what are the smallest $a_r$ with which the pipeline keeps up?
# (There is one answer that is best for all ranks. With which rank do you begin?) Computers round: `17 / (17 / 7)` is a
# bit more than 7, and rounded up it is 8. Take off `1e-9` before you round up, or compute with `fractions.Fraction`.

# %% answer="smallest_in_flight"
# %%answer smallest_in_flight
def smallest_in_flight(costs, wire, period):
    """Return for each rank the smallest number in flight that allows this period. costs: C_s of each stage; wire: w."""
    import math
    ### BEGIN SOLUTION
    p = len(costs)
    found = [1] * p
    for r in reversed(range(p)):
        for q in range(r + 1, p):
            trip = sum(costs[r:q + 1]) + 2 * wire * (q - r)
            found[r] = max(found[r], found[q] - 1 + math.ceil(trip / period - 1e-9))
    return found
    ### END SOLUTION


# %% [markdown]
# See whether the simulator agrees (with many microbatches; the first ones and the last ones fill and drain the
# pipeline):

# %%
costs, wire, period = [6, 3, 9, 3], 2, 9
ahead = smallest_in_flight(costs, wire, period)
ends = simulate(one_f_one_b(4, 200, ahead), [cost / 3 for cost in costs], [2 * cost / 3 for cost in costs], wire)
done = sorted(ends["B", 0, i] for i in range(200))
print(ahead, "a microbatch takes", (done[150] - done[50]) / 100)

# %% check="check_smallest_in_flight" points=10
# In flight: enough for the period, and not one more
def check_smallest_in_flight(costs, wire, period):
    found, = run(None, "smallest_in_flight", costs, wire, period).results
    found = whole_numbers(found, len(costs), "how many are in flight on each rank")
    case = f"Costs {costs}, w = {wire}, T = {period}, and yours, {found}"
    expect(period_of(costs, wire, found) <= period * (1 + 1e-9), f"{case}: the period is "
           f"{period_of(costs, wire, found):g}, more than {period}.", "rank r depends on all ranks behind it, not only "
           "on the next one; and a message goes both ways.")
    for rank, most in enumerate(found):
        less = [*found[:rank], most - 1, *found[rank + 1:]]
        expect(most == 1 or period_of(costs, wire, less) > period * (1 + 1e-9), f"{case}: {most - 1} are enough on "
               f"rank {rank}.", "round up only where it is needed, and do not add 1 for safety.")


check_smallest_in_flight([4, 4], 0, 4)
check_smallest_in_flight([6, 3, 9, 3], 2, 9)
check_smallest_in_flight([6, 3, 9, 3], 2, 30)
passed("in flight on 2 and 4 ranks")
### BEGIN HIDDEN TESTS
random = check_data("smallest_in_flight")
for p, costs in ((1, [7]), (3, [5]), (5, [2, 8, 9]), (8, [1, 1, 1, 10]), (8, [1, 8])):
    costs = random.choice(costs, p).tolist()
    check_smallest_in_flight(costs, int(random.integers(12)), max(costs) * float(random.choice([1, 1.5, 17 / 14])))
trips = [(w, period_of([1, 2], w, [1, 1]), k) for w in range(1, 40) for k in range(2, 12)]
odd = [(w, trip / k) for w, trip, k in trips if trip / k >= 2 and trip / (trip / k) > k]       # by rounding
check_smallest_in_flight([1, 2], *odd[random.integers(len(odd))])
### END HIDDEN TESTS

# %% [markdown]
# ## As fast as memory allows
#
# Memory is the scarcest resource. Rank $r$ has room for $M_r \ge 1$ microbatches' activations: $a_r \le M_r$. What is
# the smallest period, and with which $a$ is it reached? More is not always better: by the formula a large $a_q$ slows
# down the ranks *before* $q$.
#
# A period that can be the best is one of the fractions $R_{rq}/k$, with a $k$ from 1 to the largest $M_r$. So there are
# not many to try, and your last answer decides for each whether it is possible. (If you compute with
# `fractions.Fraction`, return a `float`.)

# %% answer="fastest"
# %%answer fastest
def fastest(costs, wire, room):
    """Return (the smallest period, the numbers in flight). room: M_r, the largest number in flight on each rank."""
    ### BEGIN SOLUTION
    p = len(costs)
    trips = [sum(costs[r:q + 1]) + 2 * wire * (q - r) for r in range(p) for q in range(r, p)]
    for period in sorted({trip / k for trip in trips for k in range(1, max(room) + 1)}):
        if period >= max(costs):
            found = smallest_in_flight(costs, wire, period)
            if all(mine <= most for mine, most in zip(found, room)):
                return period, found
    ### END SOLUTION


# %%
for most in range(1, 8):
    print(most, fastest([6, 3, 9, 3], 2, [most] * 4))

# %% check="check_fastest" points=8
# As fast as memory allows
def check_fastest(costs, wire, room, best=None):
    if best is None:
        best = min(period_of(costs, wire, one) for one in itertools.product(*(range(1, most + 1) for most in room)))
    found, = run(None, "fastest", costs, wire, room, hint="do not try all numbers in flight: try the periods.").results
    case = f"Costs {costs}, w = {wire}, room for {room}"
    expect(isinstance(found, list | tuple) and len(found) == 2, f"{case}: expected two things, the period and a list "
           f"of numbers in flight; got {str(found)[:80]}.")
    in_flight = whole_numbers(found[1], len(costs), "how many are in flight on each rank")
    over = [rank for rank, (mine, most) in enumerate(zip(in_flight, room)) if mine > most]
    expect(not over, f"{case}: yours, {in_flight}, is too much on ranks {over}.")
    expect_equal([found[0]], [period_of(costs, wire, in_flight)], f"{case}: the period of {in_flight}")
    expect_equal([found[0]], [best], f"{case}: the smallest period",
                 "do you stop too early, or fill all the room?")


check_fastest([4, 4], 1, [3, 3])
check_fastest([6, 3, 9, 3], 2, [4, 3, 2, 1])
check_fastest([6, 3, 9, 3], 2, [4, 4, 4, 4])
passed("the smallest period on 2 and 4 ranks")
### BEGIN HIDDEN TESTS
random = check_data("fastest")
for p, most in ((1, 5), (3, 6), (3, 6), (2, 7), (5, 3)):
    check_fastest(random.integers(1, 8, p).tolist(), int(random.integers(8)), random.integers(1, most + 1, p).tolist())
check_fastest([2, 3, 4, 5, 4, 3, 2, 9], 8, [11, 12, 9, 8, 8, 7, 7, 5], best=13.5)
### END HIDDEN TESTS

# %% [markdown]
# ## Interleaving, with any number of microbatches
#
# Now each rank has $v$ stages: $r, r + p, r + 2p, \dots$ A microbatch runs through all ranks $v$ times. The bubble has
# the same number of actions as before, but an action is $1/v$ as long: $(p - 1)/(v m)$ of the ideal time (Narayanan et
# al. 2021, section 2.2). This is how it goes, if $p$ divides $m$:
#
# - Forwards of a rank: $p$ microbatches through its first stage, the same $p$ through its second, ..., through its
#   last; then the next $p$ microbatches. So with $p = 2$ and $v = 2$ rank 0 has `0F0 0F1 2F0 2F1 0F2 0F3 2F2 2F3`.
# - Backwards: the same, but from its last stage to its first.
# - The two are merged as before: first $2(p - 1 - r) + (v - 1) p + 1$ forwards, then a backward and a forward in turn,
#   then the other backwards.
#
# Megatron-LM's interleaved schedule is made for such $m$. Yours must work for any. The obvious way, a last group of
# fewer than $p$ microbatches, is valid but slow, because it no longer fits between the groups before and after it.
# There is a better way. A hint: if a microbatch is left out of a valid schedule, everywhere, the rest is a valid
# schedule.
#
# Let $m'$ be $m$, rounded up to a multiple of $p$, and $f$ and $b$ the costs of every stage. The makespan must be at
# most
#
# $$\bigl(v m' + p - 1 - (m' - m)\bigr)(f + b),$$
#
# which for $m' = m$ is the paper's, and on rank $r$ at most $2(p - 1 - r) + (v - 1) p + 1$ activations of a stage in
# flight.

# %% answer="interleaved"
# %%answer interleaved
def interleaved(p, m, v):
    """Return a schedule for p ranks with v stages each, and any number m of microbatches."""
    ### BEGIN SOLUTION
    schedule = []
    for rank in range(p):
        stages = range(rank, v * p, p)
        groups = [range(first, first + p) for first in range(0, m, p)]
        forward = [("F", stage, i) for group in groups for stage in stages for i in group]
        backward = [("B", stage, i) for group in groups for stage in reversed(stages) for i in group]
        most = 2 * (p - 1 - rank) + (v - 1) * p + 1
        actions = forward[:most]
        for i, action in enumerate(backward):
            actions += [action, *forward[most + i:most + i + 1]]
        schedule.append([action for action in actions if action[2] < m])
    return schedule
    ### END SOLUTION


# %%
show(interleaved(2, 3, 2))

# %% check="check_interleaved" points=6
# Interleaving: it ends, and no rank has too much in flight
def check_interleaved(p, m, v):
    found, = run(None, "interleaved", p, m, v).results
    schedule = checked_schedule(found, p, m, v)
    simulate(schedule, [1] * p * v, [1] * p * v)
    for rank, actions in enumerate(schedule):
        bound = 2 * (p - 1 - rank) + (v - 1) * p + 1
        expect(most_in_flight(actions) <= bound, f"p = {p}, m = {m}, v = {v}: rank {rank} has "
               f"{most_in_flight(actions)} in flight; {bound} are enough.", "how many forwards come before the first "
               "backward? After it they take turns.")


check_interleaved(2, 4, 2)
check_interleaved(4, 8, 2)
check_interleaved(2, 3, 2)
passed("interleaving on 2 and 4 ranks")
### BEGIN HIDDEN TESTS
random = check_data("interleaved")
for p, v in ((1, 2), (3, 2), (5, 3), (3, 1), (8, 2)):
    check_interleaved(p, int(random.integers(2, 12)), v)
### END HIDDEN TESTS

# %% check="check_interleaved_time" points=6
# Interleaving: the bubble of the paper, and little more where p does not divide m
def check_interleaved_time(p, m, v, forward, backward):
    found, = run(None, "interleaved", p, m, v).results
    makespan = max(simulate(checked_schedule(found, p, m, v), [forward] * p * v, [backward] * p * v).values())
    up = -(-m // p) * p
    bound = (v * up + p - 1 - (up - m)) * (forward + backward)
    expect(makespan <= bound, f"p = {p}, m = {m}, v = {v}, f = {forward}, b = {backward}: the makespan is {makespan}; "
           f"{bound} can be reached.", "p = 4 and m = 8 is easy. What remains of it without microbatches 6 and 7?")


check_interleaved_time(2, 4, 2, 1, 2)
check_interleaved_time(4, 8, 2, 1, 2)
check_interleaved_time(4, 6, 2, 1, 2)
passed("the bubble on 2 and 4 ranks")
### BEGIN HIDDEN TESTS
random = check_data("interleaved_time")
for p, v in ((1, 3), (3, 2), (3, 3), (5, 2), (8, 2)):
    forward = int(random.integers(1, 4))
    check_interleaved_time(p, int(random.integers(2, 18)), v, forward, forward * int(random.integers(1, 4)))
### END HIDDEN TESTS

# %% [markdown]
# ## On real ranks
#
# Now play a schedule: any valid one, on ranks that have `send`, `receive` and `exchange`. Stage $s$ computes
# $y = \tanh(x W_s)$; its forward and backward are given. `play` is called on every rank with
#
# - `schedule`: *all* ranks' lists, the same on all ranks;
# - `weights`: `{stage: W_s}` for the stages of this rank;
# - `xs`: the inputs of the first stage, an array for each microbatch (on all ranks, only stage 0 needs them);
# - `dys`: the gradients of the last stage's outputs, an array for each microbatch.
#
# Microbatches may differ in size, and so may the outputs of stages. Return a dict of three: `"ys"`, what the last stage
# has computed for each microbatch, `{i: array}`, on the rank that has it and `{}` elsewhere; `"dxs"`, the same for the
# gradients of the first stage's inputs; and `"dws"`, `{stage: gradient of W_s}` for the stages of this rank, summed
# over all microbatches.
#
# **The trap.** The simulator lets a rank continue as soon as it has computed. Here a send ends when the other rank has
# received the data. So the obvious player, *receive what the action needs, compute, send the result*, hangs: rank 0
# sends the activation of `0F1` down while rank 1 sends the gradient of `1B0` up, and neither receives. (Real libraries
# hide this for small messages, which wait in a buffer, and hang when the model gets larger.)
#
# **The way out.** All ranks know the whole schedule. So they can all compute one and the same *order of all actions of
# all ranks*, in which each comes after the one that it needs, and each rank's own actions are in the order of its list.
# Then every rank goes through this one order. If an action is its own, it computes, and sends the result. If another
# rank's result is for it, it receives that *now*, even if it needs it only later. Why can this never hang? Look at the
# first message in the order that has not ended yet.

# %% answer="play"
# %%answer play
import numpy as np


def stage_forward(w, x):
    """Return y, and a cache for the backward. x: [b, h_in]; w: [h_in, h_out]."""
    y = np.tanh(x @ w)
    return y, (x, y)


def stage_backward(w, cache, dy):
    """Return dx and dw, the gradients of the stage's input and of its weight."""
    x, y = cache
    dz = dy * (1 - y * y)
    return dz @ w.T, x.T @ dz


def needs(action, stages):
    """Return the action that must have ended before; None if there is none."""
    kind, stage, i = action
    if kind == "F":
        return ("F", stage - 1, i) if stage > 0 else None
    return ("B", stage + 1, i) if stage < stages - 1 else ("F", stage, i)


def play(group, schedule, weights, xs, dys):
    """Play this rank's actions. Return {"ys": {i: array}, "dxs": {i: array}, "dws": {stage: array}}."""
    stages = 1 + max(stage for actions in schedule for _, stage, _ in actions)
    ### BEGIN SOLUTION
    arrived = {("F", 0, i): x for i, x in enumerate(xs)} | {("B", stages - 1, i): dy for i, dy in enumerate(dys)}
    caches, dws = {}, {stage: np.zeros_like(w) for stage, w in weights.items()}
    for rank, (kind, stage, i) in one_order(schedule, stages):
        to = stage + 1 if kind == "F" else stage - 1
        elsewhere = 0 <= to < stages and to % group.size != rank
        if rank == group.rank:
            x = arrived.pop((kind, stage, i))
            if kind == "F":
                y, caches[stage, i] = stage_forward(weights[stage], x)
            else:
                y, dw = stage_backward(weights[stage], caches.pop((stage, i)), x)
                dws[stage] += dw
            if elsewhere:
                group.send(y, to % group.size)
            else:
                arrived[kind, to, i] = y
        elif elsewhere and to % group.size == group.rank:
            arrived[kind, to, i] = group.receive(rank)
    last = {kind: {i: y for (what, stage, i), y in arrived.items() if (what, stage) == (kind, end)}
            for kind, end in (("F", stages), ("B", -1))}
    return {"ys": last["F"], "dxs": last["B"], "dws": dws}


def one_order(schedule, stages):
    """Yield all ranks' actions, each with its rank, each after the one that it needs."""
    ended, done = set(), [0] * len(schedule)
    while sum(done) < sum(map(len, schedule)):
        for rank, actions in enumerate(schedule):
            for action in actions[done[rank]:]:
                if needs(action, stages) not in ended | {None}:
                    break
                ended.add(action)
                done[rank] += 1
                yield rank, action
    ### END SOLUTION


# %% check="check_play" points=10
# On real ranks: the same as one process, for schedules of one stage on each rank
def any_schedule(p, m, v, random):
    """Draw a valid schedule at random."""
    schedule, ended = [[] for _ in range(p)], set()
    left = [(kind, stage, i) for kind in "FB" for stage in range(p * v) for i in range(m)]
    while left:
        ready = [action for action in left if needs(action, p * v) in ended | {None}]
        action = ready[random.integers(len(ready))]
        schedule[action[1] % p].append(action)
        ended.add(action)
        left.remove(action)
    return schedule


def whole(weights, xs, dys):
    """Return ys, dxs and dws of one process, stage by stage."""
    ys, dxs, dws = {}, {}, {stage: 0 for stage in weights}
    for i, (x, dy) in enumerate(zip(xs, dys)):
        inputs = [x]
        for w in weights.values():
            inputs.append(np.tanh(inputs[-1] @ w))
        ys[i] = inputs[-1]
        for stage in reversed(weights):
            dz = dy * (1 - inputs[stage + 1] ** 2)
            dws[stage] = dws[stage] + inputs[stage].T @ dz
            dy = dz @ weights[stage].T
        dxs[i] = dy
    return ys, dxs, dws


def expect_arrays(outcome, key, rank, expected, what):
    """Check the dict of arrays that a rank returned under this key."""
    found = outcome.results[rank]
    expect(isinstance(found, dict) and isinstance(found.get(key), dict), f'rank {rank}: expected a dict with "ys", '
           f'"dxs" and "dws", each a dict of arrays; "{key}" is not there, or no dict.')
    expect(set(found[key]) == set(expected), f'rank {rank}: "{key}" has {sorted(map(str, found[key]))}; expected '
           f"{sorted(map(str, expected))}.")
    for k in expected:
        expect_equal([found[key][k]], [expected[k]], f"rank {rank}: {what} {k}",
                     "does every action get what its own microbatch's neighbour sent? Weights' gradients are summed.")


def check_play(p, m, v=1, schedule=None):
    random = check_data("play")
    sizes, stages = random.integers(1, 6, p * v + 1), p * v
    weights = {stage: random.normal(size=sizes[stage:stage + 2]) for stage in range(stages)}
    xs, dys = ([random.normal(size=(1 + i % 3, size)) for i in range(m)] for size in (sizes[0], sizes[-1]))
    schedule = schedule or any_schedule(p, m, v, random)
    own = [{stage: weights[stage] for stage in range(rank, stages, p)} for rank in range(p)]
    outcome = run(p, "play", schedule, each(own), xs, dys, allow=MESSAGES,
                  hint="all ranks should go through the same order of all actions, and receive a result at its place "
                       "in that order, not when they need it.")
    ys, dxs, dws = whole(weights, xs, dys)
    rows = sum(map(len, xs))
    for rank in range(p):
        expect_arrays(outcome, "ys", rank, ys if rank == (stages - 1) % p else {}, "the output of microbatch")
        expect_arrays(outcome, "dxs", rank, dxs if rank == 0 else {}, "the input's gradient of microbatch")
        expect_arrays(outcome, "dws", rank, {stage: dws[stage] for stage in own[rank]}, "the gradient of the weight of "
                      "stage")
    needed = [0 if p == 1 else rows * sum((sizes[stage + 1] if stage < stages - 1 else 0)
                                          + (sizes[stage] if stage else 0) for stage in own[rank]) for rank in range(p)]
    expect_sent(outcome, needed, needed, f"{m} microbatches", "a result goes to one rank, once: an activation to the "
                "next stage's, a gradient to the one before.", messages=2 * m * v)


TWO = [[("F", 0, 0), ("F", 0, 1), ("B", 0, 0), ("F", 0, 2), ("B", 0, 1), ("B", 0, 2)],
       [("F", 1, 0), ("B", 1, 0), ("F", 1, 1), ("B", 1, 1), ("F", 1, 2), ("B", 1, 2)]]
check_play(2, 3, schedule=TWO)
check_play(4, 4)
passed("schedules of one stage on each of 2 and 4 ranks")
### BEGIN HIDDEN TESTS
for p in 1, 3, 5, 8:
    check_play(p, int(check_data(f"play on {p}").integers(2, 6)))
### END HIDDEN TESTS

# %% check="check_play_interleaved" points=4
# On real ranks: several stages on each rank
check_play(2, 4, v=2)
passed("two stages on each of 2 ranks")
### BEGIN HIDDEN TESTS
for p, v in ((1, 3), (3, 2), (5, 2)):
    check_play(p, int(check_data(f"play interleaved on {p}").integers(2, 5)), v)
### END HIDDEN TESTS

# %% [markdown]
# ## To think about
#
# - A real pipeline cannot know beforehand how long a message takes. What is the cost of one too many in flight, and of
#   one too few? Which would you rather have?
# - In `play` a rank may receive a result long before it needs it. How much memory can that take, if the schedule has at
#   most $a_r$ in flight on rank $r$?
# - `distribute` minimizes the cost of the most expensive stage. The first rank has the most in flight, and so the least
#   room. When would you give it fewer layers than `distribute` does?

# %% [markdown]
# ## In your own words
#
# Ten points are for two answers in words, which a person reads: at most 150 words each, with a reason for every claim.
# Write below each question, where it says YOUR ANSWER HERE. A double click opens the cell.
#
# **First** (5 points). The last stage takes twice as long as the others, because of the logits. Explain with your
# formulas what 1F1B's makespan is with $a_r = p - r$, and which rank waits for which. Then compare three ways out:
# fewer layers on the last stage, more microbatches, more in flight. What does each cost?

# %% [markdown] writing="where_a_slow_stage_goes" points=5
# YOUR ANSWER HERE

# %% [markdown]
# **Second** (5 points). Prove that `play` cannot hang, in words that would convince a colleague: name the order in
# which everybody goes through the actions, and say why the first message that has not ended yet must end. Then change
# one thing so that the proof fails, and give a schedule of two ranks that hangs.

# %% [markdown] writing="why_play_cannot_hang" points=5
# YOUR ANSWER HERE
