# %% [markdown]
# # 13. Choosing t, p, d and b
#
# You have a model, a batch and some number of GPUs. Walkthrough *Training in 3D* showed that every kind of parallelism
# computes the same. So the choice is free, and two questions decide it: does it fit, and how long does a step take?
#
# **You will** see what fits; see where the three rules of [Narayanan et al. 2021](https://arxiv.org/abs/2104.04473)
# come from; recompute the tables of two papers; work out how many days GPT-3 takes; and, at the end, move sliders until
# a plan fits.
#
# **You need** the terms of walkthroughs *Pipelines* and *ZeRO* (microbatch, bubble, ZeRO). Most of this is arithmetic,
# but we begin by comparing it with real ranks. About 60 minutes.
#
# Letters as in the papers: $t$, $p$, $d$ ranks in a tensor group, a pipeline, a data group; $b$ samples in a
# microbatch, $B$ in a step, so $m = B / (b d)$ microbatches; $s$ tokens in a sample, $h$ columns, $a$ heads, $L$
# layers, $V$ tokens in the vocabulary. A GB is $10^9$ bytes.

# %%
# %load_ext shardlab.notebook
import numpy as np

from shardlab.notebook.pictures.charts import draw_bars, draw_curves
from shardlab.notebook.pictures.choices import Machine, choices, draw_choices, gigabytes, idle, seconds
from shardlab.notebook.plan import MODELS, draw_plan, plan
from shardlab.notebook.predictions import reveal
from reference.config import ModelConfig, ParallelConfig, Recompute
from reference.costs.bubbles import bubble_fraction
from reference.costs.flops import iteration_flops, training_seconds, utilization
from reference.costs.parameters import parameters
from reference.costs.volumes import tensor_parallel_traffic
from reference.costs.plans import Plan
from reference.costs.published import A100_PEAK, MEGATRON, PTD_P, V100_REACHED
from reference.parallel.model_states import model_states

# %% [markdown]
# ## How large is a model?
#
# A layer has $12 h^2 + 13 h$ parameters, and the two tables of tokens and positions have $(V + s) h$:
#
# $$P = 12 L h^2 \left(1 + \frac{13}{12 h} + \frac{V + s}{12 L h}\right)$$
#
# That is equation 2 of the paper. Its table 1 has ten models. We compute each size and compare with what is printed:
#
# **Predict.** Mixed precision with Adam takes 16 bytes for each parameter. How many GB is that for the model of 1,008
# billion?

# %%
guess = ...                # GB

# %% tags=["hide-output"]
sizes = {run: parameters(run.model) / 1e9 for run in PTD_P}
print("all ten as printed:", all(f"{size:.1f}" == run.billions for run, size in sizes.items()))
print(" billions      h    L    a   on one GPU, mixed precision with Adam")
for run, size in sizes.items():
    print(f"{size:9.1f} {run.h:6} {run.L:4} {run.a:4}   {16 * size:9,.0f} GB")
assert f"{sizes[PTD_P[-1]]:.0f}" == "1008"
reveal(guess, 16 * sizes[PTD_P[-1]], "GB for the largest model")
assert sum(model_states(1, 1, 0)) == 16 and model_states(1, 1, 0).optimizer == 12

# %% [markdown]
# The last column is 16 bytes for each parameter: 2 for the parameter in 16 bits, 2 for its gradient, and 12 for the
# optimizer, which keeps a float32 copy and Adam's two moments ([Rajbhandari et al.
# 2020](https://arxiv.org/abs/1910.02054), section 3). A large GPU of that time, the A100, has 80 GB. And those must
# hold *activations* too: what the forward pass computed and the backward pass needs. So all but the smallest must be
# sharded.
#
# ### Are the formulas true?
#
# `Plan` below consists of formulas, so first we compare two of them with real ranks: a tiny GPT in float64,
# $t = p = d = 2$, without ZeRO and with its stages 1 and 3. In float64 there is no copy, so a parameter takes 8 bytes,
# its gradient 8, and Adam's moments 16. Stage 1 shards the moments over the two replicas, stage 3 everything. Each rank
# compares the bytes of its arrays with the formula; $\Psi$ (psi) is the number of parameters in its shard of its
# layers:

# %%
# %%ranks 8
from shardlab.demos.tiny_gpt import FLOAT64, global_batch, share_of, tiny_gpt, training_on
from reference.config import ParallelConfig
from reference.costs.parameters import parameters_of_stage
from reference.costs.memory import most_in_flight
from reference.parallel.model_states import model_states
from reference.parallel.stages import layers_of_rank

model = tiny_gpt(4)
for zero in (0, 1, 3):
    with training_on(group, model, ParallelConfig(2, 2, 2, zero_stage=zero)) as trainer:
        held, psi = trainer.held(), parameters_of_stage(model, 2, layers_of_rank(trainer.state.stages))
    expected = model_states(psi, 2, zero, *FLOAT64.bytes_each)
    print(f"ZeRO {zero}: psi = {psi:,}; parameters, gradients, optimizer: {held[:3]} bytes", held[:3] == expected)

# %% [markdown]
# Activations grow with the number of microbatches that a rank has *in flight*: forward done, backward not yet. With the
# schedule 1F1B rank $r$ of a pipeline has at most $p - r$, for any number of microbatches in a step:

# %%
# %%ranks 4
model = tiny_gpt(4)
peaks = {}
with training_on(group, model, ParallelConfig(1, 4, 1)) as trainer:
    for m in (2, 4, 8):
        trainer.step(share_of(trainer, *global_batch(0, m), b=1), m)
        peaks[m] = trainer.peaks.caches
print(f"in flight, by m: {peaks}", all(peaks[m] == most_in_flight("1f1b", 4, m, rank) for m in peaks))

# %% [markdown]
# So the first rank holds most: $p$ microbatches of $L/p$ layers, which is *all* $L$ layers' worth. A longer pipeline
# saves parameters, but no activations on its first rank.
#
# ## One plan
#
# 39.1 billion parameters on 64 GPUs. `plan` takes the choices and computes the consequences. On the left the ranks'
# grid (a row is a replica, a box a stage) and the pipeline's timeline, pale where a rank waits; on the right what the
# fullest rank holds and what it sends:

# %%
draw_plan(plan("39.1B", t=8, p=2, d=4, v=1, m=32, zero_stage=0))

# %% [markdown]
# ## What fits? A map
#
# The same model, 64 GPUs, a batch of 128, $b = 1$. Every $t$ and $p$ leaves $d = 64/(t p)$ replicas, and each of them
# $m = 128/d$ microbatches. The map shows how much the fullest rank holds and how long it waits (the bubble, as a
# fraction of the ideal time, $(p-1)/m$). Tensor groups use sequence parallelism (walkthrough *Sequence parallelism*),
# which saves 38 % of the activations at $t = 8$. (The plan above is without it, and so holds more than here.)

# %%
model = MODELS["39.1B"]
with_sp, without = (plan("39.1B", 8, 2, 4, 1, 32, 0, each).memory.activations for each in (True, False))
assert f"{1 - with_sp / without:.0%}" == "38%"
draw_choices(choices(model, n=64, B=128), 80, "39.1 billion parameters on 64 GPUs, B = 128")

# %% [markdown]
# Downwards pipelines get longer: less memory, more bubble. (48 layers are too few for 64 stages, and do not divide by
# 32: some ranks then have two, and all wait for them.) To the right tensor groups get larger: less memory, and less
# bubble, because the batch is divided among fewer replicas and so each has more microbatches. With the same *model
# parallelism* $t \times p$ the larger $t$ is better in both; look at $t p = 16$. But $t$ has a price that is not on the
# map. We come to that.
#
# The memory on the map can be reduced further. Two things save much and cost little: ZeRO stage 1 shards the
# optimizer's 12 bytes over the replicas, and *selective recompute* does not keep attention's probabilities, but
# computes them again ([Korthikanti et al. 2022](https://arxiv.org/abs/2205.05198), section 5):

# %%
draw_choices(choices(model, n=64, B=128, zero_stage=1, recompute="selective"), 80,
             "The same with ZeRO-1 and selective recompute")

# %% [markdown]
# ## Rule 1: t within a server, p between servers
#
# A step takes as long as its matrix products take, plus the bubble, plus the messages that nothing hides. Tensor
# parallelism all-reduces $b s h$ numbers four times for each layer and microbatch, $8 b s h (t-1)/t$ numbers sent
# (section 3.2). Inside a server that goes at 300 GB/s. If a tensor group is larger than a server, it is limited by the
# links outside, 25 GB/s for each GPU.
#
# `seconds` puts that together. The model is that of the paper's figure 13, 162 billion parameters on 64 GPUs; every row
# uses all 64 for one replica. Blocks are recomputed in full, as in the paper's runs: the backward begins with a second
# forward, which computes, and sends, once more:

# %%
a100 = Machine(flops=140e12, inside=300e9, outside=25e9, server=8)
wide = ModelConfig(32, 20_480, 128, 51_200, 2048)
print(f"{parameters(wide) / 1e9:.1f} billion parameters")

def estimate(t, p, B):
    parts = seconds(Plan(wide, ParallelConfig(t, p, recompute=Recompute("full")), m=B), a100)._asdict()
    return {name: part for name, part in parts.items() if part}

def rows(B):
    return {f"t = {t}, p = {64 // t}": estimate(t, 64 // t, B) for t in (2, 4, 8, 16, 32)}

draw_bars(rows(32), "seconds a step, estimated", "B = 32", unit=" s")

# %% [markdown]
# **Predict.** With a batch of 128 there are four times as many microbatches. Which $t$ is the fastest then?

# %%
guess = ...                # t

# %% tags=["hide-output"]
for B in (32, 128):
    total = {name: sum(parts.values()) for name, parts in rows(B).items()}
    best = min(total, key=total.get)
    reached = utilization(iteration_flops(wide, B, 2048, "full"), total[best], 64, A100_PEAK)
    print(f"B = {B:3}: the fastest is {best}, at {reached:.0%} of the GPUs' peak")
fastest = min((2, 4, 8, 16, 32), key=lambda t: sum(estimate(t, 64 // t, 128).values()))
reveal(guess, fastest, "is the fastest t for B = 128", index=True)
draw_bars(rows(128), "seconds a step, estimated", "B = 128", unit=" s")

# %% [markdown]
# With a smaller $t$ the pipeline is long, and idles because it has too few microbatches. With a larger one the messages
# of tensor groups leave the server. The best is $t = 8$, the size of a server. That is the first rule of the paper
# (section 3.2, takeaway 1): **tensor parallelism up to the size of a server, then pipelines across servers.**
#
# The estimate is rough. It does not know that small matrices are slower than large ones (another price of a large $t$),
# that one all-reduce may use several links of a server at the same time, or that some messages hide behind computing.
# It gets the order right, not the seconds.
#
# ## Rule 2: just enough model parallelism, then replicas
#
# Suppose $t p$ is large enough to fit. More GPUs can make the pipeline longer, or make more replicas. With $t = 1$ and
# $n$ GPUs, $p = n/d$ and $m = B/(b d)$, so the bubble is
#
# $$\frac{p - 1}{m} = \frac{n/d - 1}{B/(b d)} = \frac{b\,(n - d)}{B}$$
#
# (section 3.3.1). It only falls as $d$ grows:

# %%
n, ds = 64, [1, 2, 4, 8, 16, 32, 64]
bubble = {f"B = {B}": [bubble_fraction(n // d, B // d) for d in ds] for B in (64, 128, 512)}
print(all(np.isclose(bubble_fraction(n // d, B // d), (n - d) / B) for d in ds for B in (64, 128, 512)))
draw_curves(bubble, "d, of 64 GPUs", "idle / ideal time", "The bubble of d replicas, each a pipeline of 64/d ranks",
            x=ds, log="x")

# %% [markdown]
# And replicas communicate once per step: $2 \Psi (d-1)/d$ numbers, with $\Psi$ the parameters of a rank, for any batch.
# A tensor group communicates for every microbatch. So (section 3.3, takeaway 2): **$t \times p$ just large enough that
# the model fits, then all the rest into $d$.** On the maps above that is the orange frame.
#
# Replicas have a limit, too: there must be samples for them, $d \le B/b$. And a batch cannot be arbitrarily large,
# since larger batches learn less from each sample.
#
# ## Rule 3: try microbatch sizes
#
# A replica has $b' = B/d$ samples for a step. In microbatches of $b$ they take
#
# $$\left(\frac{b'}{b} + p - 1\right) \big(t_f(b) + t_b(b)\big)$$
#
# (section 3.4, equation 1), where $t_f(b)$ and $t_b(b)$ are the times of a forward and a backward. It is the makespan
# of the pipeline, as the simulator plays it:

# %%
from reference.schedules.generators import one_f_one_b
from reference.schedules.simulate import Times, simulate

p, m, forward, backward = 8, 16, 1.5, 3.0
played = simulate(one_f_one_b(p, m), Times(forward, backward / 2, backward / 2)).makespan
print(played, "=", (m + p - 1) * (forward + backward))

# %% [markdown]
# A large $b$ gives few microbatches, and so a large bubble. A small one gives small matrices, which are inefficient on
# GPUs: a pass has costs that do not depend on $b$ (start kernels, read the weights). Suppose that
# $t_f(b) + t_b(b) = \alpha + \beta b$. Then the formula has its minimum where both effects cancel, at
# $b = \sqrt{b' \alpha / ((p - 1) \beta)}$:

# %%
alpha, beta, bs = 1.0, 1.0, [1, 2, 4, 8, 16, 32]

def busy(b, samples):
    """Return the time that computing these samples needs, as a share of the time that it takes."""
    return samples * beta / ((samples / b + p - 1) * (alpha + beta * b))

for samples in (32, 128, 512):
    best = max(bs, key=lambda b: busy(b, samples))
    formula = np.sqrt(samples * alpha / ((p - 1) * beta))
    print(f"b' = {samples:3}: the best of these b is {best:2}; the formula says {formula:.1f}")

# %%
draw_curves({f"b' = {samples}": [busy(b, samples) for b in bs] for samples in (512, 128, 32)}, "microbatch size b",
            "share of ideal throughput", "p = 8, alpha = beta", x=bs, log="x")

# %% [markdown]
# $\alpha$ and $\beta$ depend on model and GPU, so they must be measured (section 3.4, takeaway 3): **the best $b$
# depends on the model, on $p$, $d$ and $B$. Try a few.** And activations grow with $b$: the fastest choice must also
# fit.
#
# ## What recompute costs
#
# Activations of a layer of GPT-3 (175 billion parameters) for one sample, on each of $t = 8$ ranks, in the ways of
# Korthikanti et al. (equations 1 to 4). *Sequence parallelism* shards what tensor parallelism replicates:

# %%
from reference.costs.memory import layer_activations

gpt3 = ModelConfig(96, 12_288, 96, 51_200, 2048)
kept = {"nothing saved": (False, "none"), "sequence parallel": (True, "none"),
        "selective recompute": (False, "selective"), "both": (True, "selective"), "full recompute": (False, "full")}
draw_bars({name: {what: size / 1e6 for what, size in layer_activations(gpt3, 1, 2048, 8, *way)._asdict().items()}
           for name, way in kept.items()}, "MB of activations that a rank keeps for a layer", unit=" MB")

# %% [markdown]
# **Predict.** How many percent more FLOPs does full recompute cost? (A forward is one part, a backward two.)

# %%
guess = ...                # percent

# %% tags=["hide-output"]
plain = iteration_flops(gpt3, 1, 2048)
for how in ("none", "selective", "full"):
    print(f"{how:<9} {iteration_flops(gpt3, 1, 2048, how) / plain - 1:6.1%} more FLOPs")
kept_by = {name: sum(layer_activations(gpt3, 1, 2048, 8, *way)) for name, way in kept.items()}
assert 0.78 < 1 - kept_by["both"] / kept_by["nothing saved"] < 0.84
reveal(guess, 100 * (iteration_flops(gpt3, 1, 2048, "full") / plain - 1), "% more FLOPs with full recompute")

# %% [markdown]
# (*Replicated* is what tensor parallelism keeps whole on every rank, *split* what it shards, *core* attention's
# probabilities.) Full recompute saves nearly everything, and costs a second forward: a third more work. Selective
# recompute with sequence parallelism saves four fifths, for 1 %. (Measured on a model of 22 billion parameters it was
# 39 % for full and 4 % for the other two together: section 6.) The runs of Narayanan et al. still paid the third.
#
# ## The tables
#
# Here is their table 1, with what was measured (TFLOP/s of each GPU) and what follows from that. FLOPs are counted with
# full recompute: $F = 96 B s L h^2 (1 + \frac{s}{6h} + \frac{V}{16 L h})$, equation 3.

# %%
print("billions  t   p   d   GPUs    B  TFLOP/s  of peak  seconds a step  bubble, b = 1, v = 1")
for run in PTD_P:
    flops, d = iteration_flops(run.model, run.B, 2048, "full"), run.parallel.data_parallel_size
    step = flops / (run.gpus * run.teraflops * 1e12)
    of_peak = utilization(flops, step, run.gpus, A100_PEAK)
    assert f"{of_peak:.0%}" == f"{run.of_peak}%"
    print(f"{run.billions:>8} {run.t:2} {run.p:3} {d:3} {run.gpus:6} {run.B:4}  {run.teraflops:7}  {of_peak:7.0%}"
          f"  {step:14.1f}  {bubble_fraction(run.p, run.B // d):7.1%}")

# %% [markdown]
# From 1.7 to 1,008 billion, GPUs stay at 43 to 52 % of their peak. Look at how $t$, $p$ and $d$ go: first $t$ grows to
# 8, a server. Then $p$ grows, and $d$ is what is left. Those are rules 1 and 2. (The last column would be $v$ times
# smaller with $v$ interleaved stages on each rank, and $b$ times larger with a larger microbatch.)
#
# ### Weak scaling
#
# *Weak* scaling: with more GPUs the problem grows, too, so that the work of each stays the same. (*Strong* scaling,
# where the problem stays, is harder: bubbles and messages become a larger part of each step.) The table above is weak
# scaling, and so is Megatron's ([Shoeybi et al. 2019](https://arxiv.org/abs/1909.08053), figure 5), where the model
# grows with $t$. If bandwidth alone were the limit, how efficient would it be? Their GPUs, V100s, send 150 GB/s
# inside a server. (The 300 GB/s that the paper names count both directions. Of the measurements only the last is in
# the paper's text. The others are read off its figure.)

# %%
print("billions  t  measured  bandwidth alone")
for one in MEGATRON:
    compute = iteration_flops(one.model, 8, 1024, "full") / one.t / V100_REACHED
    numbers = 1.5 * one.L * tensor_parallel_traffic(8, 1024, one.h, one.t)     # recompute: a second forward
    assert f"{parameters(one.model) / 1e9:.1f}" == one.billions
    print(f"{one.billions:>8} {one.t:2} {one.efficiency:9.0%} {compute / (compute + 2 * numbers / 150e9):16.0%}")

# %% [markdown]
# So bandwidth explains about half of the loss on 8 GPUs. The rest is not in the formula: latency of many messages,
# smaller matrices, and work that every rank repeats (layer norms, dropout outside the regions).
#
# For 512 GPUs the paper has two efficiencies: 76 % in its abstract, 74 % in section 5.1. Both compare with one GPU that
# trains the smallest model. The first divides the 15.1 PFLOP/s of all by 512 times the 39 TFLOP/s of this one. The
# second is what is left of linear scaling; how it was counted is not said. What would it need?

# %%
def of_linear(petaflops, teraflops):
    """Return the efficiency of 512 GPUs that reach this together, beside one that reaches this alone."""
    return petaflops * 1e15 / (512 * teraflops * 1e12)

left, smallest = MEGATRON[-1].replicated, MEGATRON[0].replicated
print(f"{of_linear(15.1, 39):.0%}, but {of_linear(15.05, 39.5):.0%} with numbers that also round to 15.1 and 39")
print(f"{left:.0%} is {512 * 39 * left / 1000:.1f} PFLOP/s, or a single GPU's {15.1e3 / 512 / left:.1f} TFLOP/s")
print(f"beside the smallest model on 64 GPUs, which has {smallest:.0%}, it is {left / smallest:.0%}")

# %% [markdown]
# So rounding alone can explain the difference. The choice of a baseline matters as much: with 64 replicas of the
# smallest model as the baseline, the same run is at 77 %, as without replicas, because their cost is now on both sides.
#
# Why these $t$? The paper says that 1.2 billion parameters fit on one GPU, which has 32 GB, and that the largest model
# needs eight. Here are the formulas, with $b = 8$, 16 bytes for each parameter and full recompute.
#
# **Predict.** How many GB does the largest model take on each of *four* GPUs?

# %%
guess = ...                # GB

# %% tags=["hide-output"]
for one in MEGATRON:
    held = {t: sum(Plan(one.model, ParallelConfig(t, recompute=Recompute("full")), m=1, b=8).memory) / 1e9
            for t in (1, 2, 4, 8) if one.a % t == 0}
    assert one.t == min(t for t in held if held[t] < 32)
    print(f"{one.billions:>4} billion, GB on each of t GPUs:", {t: round(size, 1) for t, size in held.items()})
reveal(guess, held[4], "GB on each of four")

# %% [markdown]
# Each model of the paper has the smallest $t$ with which it fits.
#
# ## How many days?
#
# A token costs about 8 FLOPs for each parameter: 2 forward, 4 backward and 2 for recompute. So $T$ tokens on $n$ GPUs
# that reach $X$ FLOP/s each take (section 5.1, equation 4)
#
# $$\frac{8\,T P}{n X} \text{ seconds.}$$
#
# For GPT-3, and for the largest model of the table:
#
# **Predict.** GPT-3 has 175 billion parameters, and was trained on 300 billion tokens. How many days are that on
# 1,024 GPUs at 140 TFLOP/s each?

# %%
guess = ...                # days

# %% tags=["hide-output"]
day = 24 * 3600
for model, T, n, X in ((gpt3, 300e9, 1024, 140e12), (PTD_P[-1].model, 450e9, 3072, 163e12)):
    P = parameters(model)
    print(f"{P / 1e9:5.0f} billion parameters, {T / 1e9:.0f} billion tokens, {n:,} GPUs at {X / 1e12:.0f} TFLOP/s: "
          f"{training_seconds(T, P, n, X) / day:.0f} days")
exact = 300e9 / 2048 * iteration_flops(gpt3, 1, 2048, "full") / (1024 * 140e12) / day
print(f"the first from all FLOPs, logits and attention too: {exact:.0f} days;",
      f"without recompute: {exact * iteration_flops(gpt3, 1, 2048) / iteration_flops(gpt3, 1, 2048, 'full'):.0f} days")
reveal(guess, training_seconds(300e9, parameters(gpt3), 1024, 140e12) / day, "days for GPT-3")

# %% [markdown]
# ## Your turn
#
# The cell after this one has sliders for a plan. They move here and on the site, wherever JavaScript may run. ($v$ is
# the number of stages on each rank: more than one is the interleaved schedule.) If a choice is impossible, a sentence
# says why, and what to change. Elsewhere, here is the plan at which they begin. Sequence parallelism, which the maps
# had on, is off at first, so the same $t$ and $p$ hold more here:

# %%
start = dict(model="39.1B", t=2, p=8, d=4, v=1, m=16, zero_stage=0)
begin = plan(**start)
print(f"{begin.parallel.world_size} GPUs, {gigabytes(begin):.0f} GB, bubble {begin.timeline.bubble_fraction:.0%}")
draw_plan(begin)

# %%
from shardlab.notebook.sliders import explore

explore(**start)

# %% [markdown]
# **Find a plan**
#
# 1. for 39.1B on 64 GPUs that fits into 80 GB with a bubble under 10 %. There are many. Which has the smallest $t p$
#    without ZeRO? Which sends least?
# 2. for 145.6B on 64 GPUs with $m = 64$ that fits. What helps against the green part, and why does a longer pipeline
#    not?
# 3. for 1008.0B, with a bubble under 50 %. The sliders have none: what fills the memory, and which of the savings above
#    is missing on them?
#
# Does the first task have an answer? A search, without ZeRO and without sequence parallelism, with $m$ from 8 to 32:

# %%
from itertools import product

from reference.errors import UserError

def fits(t, p, d, v, m):
    try:
        found = plan("39.1B", t, p, d, v, m, zero_stage=0)
    except UserError:
        return False
    return gigabytes(found) <= 80 and idle(found) < 0.1

answers = [(t, p, 64 // (t * p), v, m) for t, p, v, m in product((1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 3, 4), (8, 16, 32))
           if fits(t, p, 64 // (t * p), v, m)]
print(f"{len(answers)} plans; the smallest t p is {min(t * p for t, p, *_ in answers)};",
      "the values of t are", sorted({t for t, *_ in answers}))

# %% [markdown]
# ## What to take away
#
# | choice | take | because |
# |---|---|---|
# | $t$ | as large as needed, up to a server | it sends for every layer and microbatch |
# | $p$ | as large as needed to fit | it sends little, but idles $(p-1)/(v m)$ |
# | $d$ | all the rest, up to the limit of the batch | it sends once per step, for any batch |
# | $b$ | measure a few | small matrices against few microbatches |
# | recompute | selective, with sequence parallelism | it saves most activations, for 1 % more FLOPs |
#
# - Memory: 16 bytes per parameter, divided by $t p$ (and by $d$ for what ZeRO shards), plus $p$ microbatches'
#   activations on the first rank.
# - $8 T P / (n X)$ seconds, before you begin.
#
# A page of [the playground](../docs/playground.md) has more sliders, also for $c$, $e$ and recompute, and shows every
# formula with its numbers.
#
# ## Try it
#
# 1. Set `outside=200e9` in `a100`: all eight adapters of a server at work for one group. Which $t$ is best for which
#    $B$?
# 2. In the first map, halve the batch, and double it. Which fields change, and which do not?
#
# <details><summary>Answer</summary>
#
# With `B=64` and `B=256` in `choices(model, n=64, B=128)` every field holds what it held: parameters, gradients and
# optimizer do not depend on the batch, and with 1F1B the fullest rank has at most $p$ microbatches under way. What
# changes is the waiting. $m = B/d$ halves, or doubles, and so the bubble $(p-1)/m$ doubles, or halves: with
# $t = p = 8$ it is $7/64$, $7/128$ or $7/256$. In the first column of the first row, $d = 64$, the small batch has
# one microbatch for each replica; with a batch of 32 this field would be gone.
#
# </details>
#
# 3. $v = 4$ interleaved stages divide the bubble by 4. What do they cost? (Compare `plan(...).memory` and `.messages`.)
#
# Next: [14. What is a proof?](14_what_is_a_proof.ipynb). The demos for this walkthrough:
# `python -m mpi_impl.launch -n 4 -m shardlab.demos.memory` and `... -m shardlab.demos.pipeline`.
