# %% [markdown]
# # 9. Pipelines, and which rank waits for which
#
# Tensor parallelism gives each rank a part of *every* layer. A model can also be divided between layers: rank 0 has the
# first few, rank 1 the next few. Then hardly anything must be sent. But a rank cannot begin before the one ahead of it
# has sent it something to work on, and so ranks wait. How long depends on the order in which all ranks work, and that
# is the subject of this walkthrough.
#
# **You will** write such orders down as data, see what each costs in idle time and in memory, and let four ranks train
# with four of them; compare their timeline with a prediction; and make a plan that hangs, and find out why before it
# runs.
#
# **You need** walkthrough *Splitting matrices*, and that training goes forward through the layers and then backward.
# About 60 minutes.

# %%
# %load_ext shardlab.notebook
import inspect

import numpy as np

from shardlab.notebook.pictures.pipelines import draw_bubbles, draw_held, draw_schedules, play
from shardlab.notebook.predictions import reveal
from reference.schedules import generators as schedules
from reference.schedules.generators import make

p, m = 4, 8

# %% [markdown]
# ## Stages
#
# Consecutive layers on one rank are a *stage*. With $L$ layers on $p$ ranks a stage has $L/p$ of them. In its forward
# (F) a stage computes from the output of the stage before it: an array $[b, s, h]$, the *activations*. In its backward
# (B) it receives from the stage after it how the loss depends on its own output, the *gradient* of that array. From
# this, and from the activations that it must have kept until then, it computes the gradients of its own weights, and
# the gradient for the stage before.
#
# If all samples of a step go through together, this is what four ranks do. A backward takes about twice as long as a
# forward, since it computes two matrix products for each one of the forward.

# %%
draw_schedules({"all samples together": make("gpipe", p, 1)})

# %% [markdown]
# Hatched areas are idle time. One rank works at a time, and four devices are as slow as one. (The *makespan* above it
# is the total time; the unit is a stage's forward. The *bubble fraction* compares idle time with working time, on the
# rank that works longest; we come to it.) The remedy: divide the samples of a step into $m$ *microbatches*. While rank
# 1 works on the first one, rank 0 takes the second. That is GPipe.
#
# **Predict.** All samples together take 12, and 3 if nobody ever waited. How long do 8 microbatches take? (A forward of
# a microbatch takes an eighth.)

# %%
guess = ...                # time units

# %% tags=["hide-output"]
print(f"all samples together: {play(make('gpipe', p, 1)).makespan:g}; {m} microbatches: "
      f"{play(make('gpipe', p, m)).makespan / m:g}; if nobody ever waited: {play(make('gpipe', p, 1)).work:g}")
reveal(guess, play(make("gpipe", p, m)).makespan / m, "is the time of 8 microbatches")
print(f"The picture's unit is a microbatch's forward: {play(make('gpipe', p, m)).makespan:g} of it.")
draw_schedules({f"{m} microbatches": make("gpipe", p, m)})

# %% [markdown]
# The remaining idle time is where the pipeline fills and where it drains. It is called the *bubble*.
#
# ## A schedule is data
#
# A *schedule* says which rank does what, in which order. Here it is a value: a list of *actions* for each rank. `2F0`
# is stage 2's forward of microbatch 0.

# %%
small = make("gpipe", p, 3)
print(small)
small.ranks[2][0]

# %% [markdown]
# Because it is data, it can be written in a few lines, printed, compared, simulated, drawn, checked, and played by real
# ranks, and none of that code needs to know which schedule it is. The function that made it:

# %%
print(inspect.getsource(schedules.gpipe))
print(inspect.getsource(schedules.alternate))

# %% [markdown]
# Sends are not written down. They follow from the actions and from which rank holds which stage; `lower` adds them. For
# rank 1, `0F0<0` means to receive the result of `0F0` from rank 0, and `1F0>2` to send its own to rank 2:

# %%
from reference.schedules.actions import lower

print(*lower(small)[1])

# %% [markdown]
# ## The bubble
#
# When rank 0 has done its last forward, that microbatch still needs $p - 1$ forwards to the end of the pipeline, and
# the first gradient needs $p - 1$ backwards until it is back. In this time rank 0 has nothing to do. It works for $m$
# forwards and $m$ backwards. So if $F$ and $B$ are the times of the two on a rank ([Narayanan et al.
# 2021](https://arxiv.org/abs/2104.04473), section 2.2):
#
# $$\text{bubble fraction} = \frac{\text{idle time}}{\text{ideal time}} = \frac{(p-1)(F+B)}{m(F+B)} = \frac{p-1}{m}$$
#
# It does not depend on $F$ and $B$, and **more microbatches make it vanish**. The simulator plays a schedule with given
# times; does it find the same?

# %%
from reference.costs.bubbles import bubble_fraction
from reference.schedules.simulate import Times, simulate

random = np.random.default_rng(6)
for n, k in [(2, 4), (4, 8), (8, 24)]:                  # ranks, microbatches
    f, i, w = random.uniform(0.5, 2, size=3)            # what a forward takes, and the two halves of a backward
    found = simulate(make("gpipe", n, k), Times(f, i, w)).bubble_fraction
    print(f"p = {n}, m = {k:2}: bubble fraction {found:.4f}, (p-1)/m = {bubble_fraction(n, k):.4f}")

# %%
assert all(bubble_fraction(n, 4 * n) < 1 / 4 for n in range(2, 65))
draw_bubbles("gpipe", ps=[2, 4, 8, 16], ms=[1, 2, 4, 8, 16, 32, 64, 128])

# %% [markdown]
# With $m = 4p$ it is a quarter, at most. But a step of $m$ microbatches has $m$ times as many samples, and learning
# limits the number of samples in a step, not the pipeline. So the bubble does not vanish by itself at large $p$.
#
# ## 1F1B: the same bubble, less memory
#
# GPipe has another fault, which the timeline does not show. The activations of a forward are kept until its backward,
# and all backwards come at the end: each rank holds those of all $m$ microbatches. But more microbatches were the
# remedy.
#
# *1F1B*, one forward, one backward, does each backward as early as it can. A rank starts with one forward for each rank
# behind it, and from then on it alternates:

# %%
print(inspect.getsource(schedules.one_f_one_b))
both = {name: make(name, p, m) for name in ("gpipe", "1f1b")}
draw_schedules(both)

# %% [markdown]
# The idle time is in other places, but the amount is the same. The next picture shows how many microbatches are *in
# flight* on each rank: those whose forward has begun, and whose backward has not ended:

# %%
draw_held(both)

# %% [markdown]
# **Predict.** With 32 microbatches, GPipe's rank 0 holds 32. How many does it hold with 1F1B?

# %%
guess = ...                # microbatches

# %% tags=["hide-output"]
from reference.schedules.simulate import activations_in_flight

for k in (8, 16, 32):
    print(f"m = {k:2}:", {name: activations_in_flight(make(name, p, k)) for name in ("gpipe", "1f1b")})
reveal(guess, activations_in_flight(make("1f1b", p, 32))[0], "microbatches on rank 0")

# %% [markdown]
# At most $p - r$ on rank $r$, however many microbatches there are. That is why 1F1B has replaced GPipe.
#
# It also says something about deep pipelines. Rank 0 holds $p$ microbatches of $L/p$ layers, and that is $L$ layers'
# worth, for any $p$. A pipeline divides the weights, but it does not reduce rank 0's activations:

# %%
L = 32
for n in (1, 2, 4, 8):
    in_flight = activations_in_flight(make("1f1b", n, 32))[0]
    print(f"p = {n}: rank 0 has {L // n:2} layers, and of up to {in_flight} microbatches the activations: "
          f"{in_flight * L // n} layers' worth")

# %% [markdown]
# ## Interleaved: a smaller bubble, more messages
#
# What if each rank has $v$ stages instead of one: with $p = 4$ and $v = 2$, rank 0 has stages 0 and 4, rank 1 has 1 and
# 5? A stage is then half as long, and so is the time until the last rank gets something to do (Narayanan et al. 2021,
# section 2.2):
#
# $$\text{bubble fraction} = \frac{1}{v} \cdot \frac{p-1}{m}$$

# %%
print(make("interleaved", p, 4, v=2))
draw_schedules({"1f1b": both["1f1b"], "interleaved, v = 2": make("interleaved", p, m, v=2)})

# %% [markdown]
# **Predict.** With 4 ranks and 8 microbatches, 1F1B sends 48 messages. How many are sent with $v = 2$ stages on each
# rank?

# %%
guess = ...                # messages

# %% tags=["hide-output"]
from reference.schedules.actions import Send

for one, v in [(both["1f1b"], 1), *((make("interleaved", p, m, v), v) for v in (2, 4))]:
    messages = sum(isinstance(step, Send) for steps in lower(one) for step in steps)
    print(f"v = {v}: bubble {play(one).bubble_fraction:.4f}, (p-1)/(v m) = {bubble_fraction(p, m, v):.4f}; "
          f"{messages:3} messages; rank 0 holds {activations_in_flight(one)[0] / v:.2f} microbatches' worth")
assert sum(isinstance(step, Send) for steps in lower(both["1f1b"]) for step in steps) == 48
twice = lower(make("interleaved", p, m, v=2))
reveal(guess, sum(isinstance(step, Send) for steps in twice for step in steps), "messages with v = 2")

# %% [markdown]
# The price: more activations in flight than with 1F1B, and more messages. A microbatch crosses $vp - 1$ edges between
# stages instead of $p - 1$, so their number grows by $(vp - 1)/(p - 1)$. Messages are cheap here. With $L$
# layers on $p$ stages, compare what a rank sends for one microbatch, to the next stage, and to its tensor-parallel
# neighbours:

# %%
from reference.costs.volumes import pipeline_traffic, tensor_parallel_traffic

s, h, L, t = 2048, 12288, 96, 8         # GPT-3; say its layers are 8 stages, each on t = 8 tensor-parallel ranks
half = 2                                # bytes of a number
print(f"to the next stage, and back to the one before: {half * 2 * pipeline_traffic(1, s, h) / 1e6:6,.0f} MB")
print(f"inside the stage's {L // 8} layers: {half * L // 8 * tensor_parallel_traffic(1, s, h, t) / 1e6:24,.0f} MB")

# %% [markdown]
# So pipelines go between servers, where links are slower, and tensor parallelism stays inside one.
#
# ## Zero bubble: split the backward in two
#
# A backward computes two things: I, the gradient of its input, for which another rank waits; and W, the gradients of
# its own weights, for which nobody waits until the end of the step. [Qi et al. 2023](https://arxiv.org/abs/2401.10241)
# (section 2) do I immediately, and put W where there would be idle time. (They call I "B".)

# %%
draw_schedules({"1f1b": both["1f1b"], "zb-h1": make("zb-h1", p, m)})

# %% [markdown]
# *ZB-H1* holds no more than 1F1B's first rank, and its bubble is a third: $(p-1)(F + I - W)$ instead of
# $(p-1)(F + I + W)$. (The appendix has two schedules with no bubble but the slant at both ends.)
#
# The slant costs nothing if steps follow one another without a break: a rank that ends later also began later. But if
# something makes all ranks wait for one another after each step, such as a norm over all gradients, it is idle time
# like any other. So there are two numbers, one over the time of all ranks and one over the longest time that a single
# rank takes:

# %%
print(f"{'':14} {'idle / ideal':>12} {'if steps overlap':>17}   microbatches' worth held by rank 0 .. 3")
def describe(name, v=None):
    """Print both numbers of a schedule, and what its ranks hold."""
    one = make(name, p, m, v)
    timeline, share = play(one), p / one.stages
    print(f"{name:14} {timeline.bubble_fraction:12.3f} {timeline.cost / timeline.work - 1:17.3f}   "
          + ", ".join(f"{share * n:g}" for n in activations_in_flight(one)))

table = {"gpipe": None, "1f1b": None, "interleaved": 2, "zb-h1": None}
for name, v in table.items():
    describe(name, v)
thirds = [3 * play(make("zb-h1", p, m)).bubble_fraction, play(make("1f1b", p, m)).bubble_fraction]
assert np.isclose(*thirds)

# %% [markdown]
# ## Real ranks play it
#
# One loop plays all of them (`mpi_impl/parallel/pipeline.py`). It goes through a rank's part of the lowered schedule:

# %%
from mpi_impl.parallel import pipeline

print(inspect.getsource(pipeline.Pipeline.play))

# %% [markdown]
# Let four ranks train a tiny GPT of 8 layers. Its texts are numbers, each one more than the last, and it learns to
# count. (The *embedding* turns each token into $h$ numbers, and the *head* turns $h$ numbers into the loss.) The next
# cell only shows which rank holds what; `training_on` gives each rank a trainer, which has its layers:

# %%
# %%ranks 4
from shardlab.demos.tiny_gpt import global_batch, holds, share_of, tiny_gpt, training_on
from reference.config import ParallelConfig

model = tiny_gpt(num_layers=8)

def configured(name, v=None):
    return ParallelConfig(pipeline_model_parallel_size=size, pipeline_schedule=name, virtual_pipeline_size=v)

for name, v in (("1f1b", None), ("interleaved", 2), ("zb-v", None)):
    with training_on(group, model, configured(name, v)) as trainer:
        print(f"{name:12} {holds(trainer)}")

# %% [markdown]
# A step has 16 samples, in $m = 8$ microbatches of $b = 2$. Every schedule trains three steps:

# %%
ranks["table"] = table

# %%
# %%ranks 4
losses, most = {}, {}
for name, v in table.items():
    with training_on(group, model, configured(name, v)) as trainer:
        losses[name] = []
        for step in range(3):
            tokens, targets = global_batch(step, 16)
            losses[name].append(trainer.step(share_of(trainer, tokens, targets, 2), 16).loss)
        most[name] = trainer.peaks.caches

# %%
from shardlab.demos.tiny_gpt import global_batch, textbook_of, tiny_gpt
from reference.batches import GPTBatch

alone = textbook_of(tiny_gpt(num_layers=8))                     # one process, all samples together, no pipeline
right = [alone.step(GPTBatch(*global_batch(step, 16)))[0] for step in range(3)]
print("one process: losses", np.round(right, 4))
for name, found in ranks["losses"][0].items():
    in_flight = [everyone[name] for everyone in ranks["most"]]
    predicted = activations_in_flight(make(name, p, m, table[name]))
    print(f"{name:12} off by less than 1e-12: {np.abs(np.subtract(found, right)).max() < 1e-12};  "
          f"held at most: {in_flight}, as predicted: {in_flight == predicted}")

# %% [markdown]
# No schedule changes what is computed. Each weight gets the sum of the same gradients, in another order.
#
# ## Predicted and measured
#
# Does a real run take the time that the simulator says? On a laptop four ranks may share two cores, and a stopwatch
# would show mostly who had to wait for a core. So each rank here has a *virtual clock*. Messages carry the sender's
# time, and the receiver sets its clock to that plus the transfer time, if that is later. That is how times pass from
# rank to rank. Normally such a clock advances by the CPU time that the rank itself has used. To see the same in every
# run, we give it a fixed time for every action instead.
#
# Suppose that every action takes 1, but the last stage takes 1.5, since it also computes the logits. A message takes
# 0.2.
#
# **Predict.** With 8 microbatches the step takes 36.2 if all stages take 1, and 52.7 if all take 1.5. How long if
# only the last takes 1.5?

# %%
guess = ...                # time units

# %% tags=["hide-output"]
times = Times(forward=[1, 1, 1, 1.5], input_gradient=[1, 1, 1, 1.5], weight_gradient=[1, 1, 1, 1.5], communication=0.2)
slow = {"all take 1": Times(communication=0.2), "the last takes 1.5": times,
        "all take 1.5": Times(1.5, 1.5, 1.5, communication=0.2)}
for k in (8, 64):
    print(f"m = {k:2}: makespan", {what: round(simulate(make("1f1b", p, k), one).makespan, 1)
                                   for what, one in slow.items()})
ends = [simulate(make("1f1b", p, 8), one).makespan for one in slow.values()]
assert np.allclose([ends[0], ends[2]], [36.2, 52.7])
reveal(guess, ends[1], "is the makespan with one slow stage")

# %% [markdown]
# With more microbatches, one slow stage becomes nearly as bad as four. So says the simulator. And the ranks?

# %%
ranks["times"] = times

# %%
# %%ranks 4
from mpi_impl.comm.clock import Link, VirtualClock
from mpi_impl.comm.group import Group, Instruments
from mpi_impl.comm.trace import Trace

clock = VirtualClock(Link(latency=times.communication, bandwidth=np.inf), times)
watched = Group(group.comm, group.name, Instruments(trace=Trace(clock, recording=True)))
with training_on(watched, model, configured("1f1b")) as trainer:
    tokens, targets = global_batch(0, 16)
    trainer.step(share_of(trainer, tokens, targets, 2), 16)
done = [s for s in watched.trace.slices if s.action]

# %%
from shardlab.report.timelines.gantt import Panel, timelines_figure
from shardlab.report.timelines.timelines import slices_of

predicted = slices_of(simulate(both["1f1b"], times))
print("measured and predicted start and end of every action are equal:", ranks["done"] == predicted)
timelines_figure([Panel("predicted, with equal stages, and messages that take no time", slices_of(play(both["1f1b"]))),
                  Panel("measured on four ranks", ranks["done"])], seconds=False)

# %% [markdown]
# Every rank did every action when the simulator said. Yet nobody told the ranks *when*: only in which order, and what
# each action takes. Once it has begun, rank 3 works without a break, and the other three wait for it in every turn.
# (The bubble fraction is that of rank 3, which works longest. The others idle for longer.) That is why layers are
# distributed so that all stages take the same time.
#
# To see such a picture with times that were not made up, train with `--trace DIR --trace-clock virtual` (see
# `docs/pipelines.md`).
#
# ## A schedule that never ends
#
# Let us plan one ourselves. Rank 0 is short of memory, so it takes one microbatch at a time: forward, backward. Rank 1
# has enough, and does GPipe. Each list by itself is right:

# %%
from reference.schedules.actions import Schedule
from reference.schedules.validate import ScheduleError, validate

first = schedules.alternate(schedules.forwards(0, 3), schedules.backwards(0, 3), warmup=0)
wrong = Schedule((tuple(first), make("gpipe", 2, 3).ranks[1]))
ranks["wrong"] = wrong
print(wrong)

# %% [markdown]
# Two ranks play it. What an action computes does not matter here, so it computes nothing:

# %% tags=["raises-exception"]
# %%ranks 2 --timeout 1
from mpi_impl.comm.topology import connect
from mpi_impl.parallel.pipeline import Pipeline

def nothing(action, x):
    return np.zeros(1)

play_it = Pipeline(wrong, connect(group, configured("1f1b"))).play
play_it({"F": nothing, "B": nothing}, np.zeros(1), (1,))

# %% [markdown]
# Both wait in `receive`, forever. No error, no message: that is how it would look on a cluster. The plan alone shows
# the cycle. `validate` plays the lists without computing anything, and marks where it stops:

# %%
def complain(schedule, blocking=False):
    try:
        validate(schedule, blocking)
        print("nothing to complain about")
    except ScheduleError as error:
        print(error)

complain(wrong)

# %% [markdown]
# Rank 0 waits for a gradient that rank 1 computes only after the forward that it waits for from rank 0.
#
# There is a second kind of cycle. In the plans above a sender continues immediately. A beginner's program may use
# *blocking* sends, which wait until the other side receives. With those, 1F1B hangs: two neighbours both want to send,
# one an activation and the other a gradient, and neither comes to its receive.

# %%
complain(make("1f1b", 2, 4), blocking=True)
complain(make("1f1b", 2, 4))

# %% [markdown]
# This bug hides well: MPI copies small messages and lets the sender continue. So the program passes its tests with
# small arrays, and hangs with large ones.
#
# ## Play with it
#
# A page of [the playground](../docs/playground.md), on the site, draws each of the eight schedules for your $p$, $m$
# and $v$, and you can drag its actions. Its fields are the sliders of question 2 below. Choose this one there, and
# then change it:

# %%
draw_schedules({"interleaved, v = 3": make("interleaved", p, m, v=3)})

# %% [markdown]
# ## What to take away
#
# | schedule | bubble, idle / ideal | microbatches held by rank 0, of all its layers | messages a microbatch, each way |
# |---|---|---|---|
# | GPipe | $(p-1)/m$ | $m$ | $p-1$ |
# | 1F1B | $(p-1)/m$ | $p$ | $p-1$ |
# | interleaved | $(p-1)/(v m)$ | $p + (p-1)/v$ | $vp-1$ |
# | ZB-H1 | a third of 1F1B's, if F = I = W | $p$ | $p-1$ |
#
# - The bubble is proportional to $(p-1)/m$: use many microbatches, or few stages.
# - The time of a backward decides how long activations are held. Idle time and memory are two things; look at both.
# - All ranks run at the pace of the slowest stage.
# - A schedule is data, so it can be checked before it hangs.
#
# ## Try it
#
# 1. In `times`, give the slow stage to rank 0 instead of rank 3. Does the step take longer, or shorter? Why is it not
#    the same? (Compare `simulate(both["1f1b"], times).makespan`.)
# 2. With the sliders, take ZB-H1 with few microbatches, $m = 2$. Is it still better than 1F1B? From which $m$ on is its
#    bubble a third?
# 3. Repair `wrong` by changing only rank 1's list. What do the two ranks do now, and what is idle?
#
# <details><summary>Answer to 1</summary>
#
# ```python
# slow_first = Times(*3 * ([1.5, 1, 1, 1],), communication=0.2)
# print(simulate(both["1f1b"], slow_first).makespan, simulate(both["1f1b"], times).makespan)       # about 42.9, 46.2
# ```
#
# Shorter. The slow stage works on eight microbatches in either case. As rank 3 it cannot begin before the first
# microbatch has passed all other ranks, and after its last backward the gradient has to pass them all again. As rank
# 0 it works from time 0 on, and its own last backward ends the step. With 16 microbatches the difference is the same,
# 3.3: it belongs to the beginning and the end.
#
# </details>
#
# ## Appendix: two more ideas
#
# They are for a second reading, and what follows does not need them.
#
# ### No bubble but the slant
#
# Two more schedules of [Qi et al. 2023](https://arxiv.org/abs/2401.10241), and one of DeepSeek's. *ZB-H2* starts with
# twice as many forwards as 1F1B. *ZB-V* has two stages on each rank, one on the way down and one on the way up (paler),
# in a V, and needs no more memory than 1F1B. Only the slant at both ends is idle:

# %%
draw_schedules({name: make(name, p, m) for name in ("zb-h2", "zb-v")})

# %%
for name in ("zb-h2", "zb-v", "dualpipe-v"):
    describe(name)

# %% [markdown]
# | schedule | bubble, idle / ideal | microbatches held by rank 0, of all its layers | messages a microbatch, each way |
# |---|---|---|---|
# | ZB-H2 | none, if steps may overlap | $2p - 1$ | $p-1$ |
# | ZB-V | none, if steps may overlap | $p$ | $2p-2$ |
#
# ### Scatter and gather: send it once
#
# One more thing crosses too often. The $t$ ranks of a stage end their last layer with an all-reduce, so **each of them
# has all of the stage's output**. If each sends it to its partner in the next stage, the same array crosses $t$ times:

# %%
from shardlab.notebook.pictures.crossing import draw_crossing

draw_crossing(4, scattered=False)

# %% [markdown]
# The *scatter/gather optimisation* (Narayanan et al. 2021, section 4.1) sends it once: rank $i$ sends piece $i$ of $t$,
# and the receivers gather the pieces among themselves. That is another message, but inside a server, where links are
# fast:

# %%
draw_crossing(4, scattered=True)

# %% [markdown]
# Measure it. Four ranks are two stages of $t = 2$, and every message is in the ledger of the rank that sends it. The
# step has $m = 4$ microbatches, of $b = 2$ texts with $s = 6$ tokens and $h = 8$, in 8 bytes a number.

# %%
# %%ranks 4
from mpi_impl.comm.group import Group, Instruments
from shardlab.demos.tiny_gpt import global_batch, share_of, tiny_gpt, training_on
from reference.config import ParallelConfig

crossing = {}
for scatter in (False, True):
    watched = Group(group.comm, group.name, Instruments())            # with a ledger of its own
    split = ParallelConfig(2, 2, scatter_gather_tensors_in_pipeline=scatter)
    with training_on(watched, tiny_gpt(num_layers=2), split) as trainer:
        tokens, targets = global_batch(0, 8)
        loss = trainer.step(share_of(trainer, tokens, targets, 2), 8).loss
    sent = watched.ledger.elements(operation="send")
    gathered = sum(watched.ledger.elements(operation="all_gather", reason=f"gathered {what}")
                   for what in ("activation", "gradient"))
    crossing[scatter] = {"to the other stage": 8 * sent, "gathered inside": 8 * gathered // 2, "loss": loss}

# %% [markdown]
# **Predict.** How many bytes does rank 0 send to the next stage, whole?

# %%
guess = ...                # bytes

# %% tags=["hide-output"]
for scatter, name in ((False, "whole"), (True, "scattered")):
    first = ranks["crossing"][0][scatter]
    print(f"{name:10} rank 0 sends {first['to the other stage']:5,} bytes to the other stage, and "
          f"{first['gathered inside']:5,} inside its own; loss {first['loss']:.12f}")
assert all(one[False]["to the other stage"] == 2 * one[True]["to the other stage"] for one in ranks["crossing"])
reveal(guess, ranks["crossing"][0][False]["to the other stage"], "bytes, m b s h of them times 8")

# %% [markdown]
# Between stages $1/t$ of the bytes, and the same loss. With GPT-3's $t = 8$ the 101 MB above become an eighth for each
# rank. That is why interleaved schedules, which send more often, pay off at all between servers. (With
# sequence parallelism each rank has only its positions anyway, and nothing is left to scatter.)
#
# Next: [10. ZeRO](10_zero.ipynb). The demo for this walkthrough:
# `python -m mpi_impl.launch -n 4 -m shardlab.demos.pipeline`; and for the cycle, `shardlab.demos.deadlock`.
