# %% [markdown]
# # 21. How fast could it be? Rooflines and MFU
#
# A step takes nine seconds. Is that slow? You can compare it with the step of yesterday, or with the step that the
# machine could do at best. This walkthrough is about the second number. It needs no stopwatch: a few numbers of a
# machine bound the time of every message and of every product.
#
# **You will** find the size from which a message is worth its start; compare a ring with a tree; send an all-reduce
# through servers on real ranks, and count what leaves a server; see which products of a transformer can never be fast;
# and compute MFU and HFU of published runs.
#
# **You need** walkthroughs *Splitting matrices* (products on ranks), *f and g* (the ring) and *Data parallelism*
# (replicas, buckets). About 30 minutes.
#
# Our machine is a DGX A100: servers of 8 GPUs, in which [Narayanan et al. 2021](https://arxiv.org/abs/2104.04473)
# trained. Its file, `shardlab/plan/hardware/dgx-a100.toml`, has the maker's figures, what programs reach of these, and
# latencies. Those are estimates, since neither the paper nor the maker gives any. (The times of messages below are
# formulas with these numbers. Nothing is timed.)

# %%
# %load_ext shardlab.notebook
from math import log2

import numpy as np

from shardlab.notebook.pictures.charts import draw_curves
from shardlab.notebook.pictures.groups import draw_servers
from shardlab.notebook.predictions import reveal
from shardlab.plan.profiles import load
from reference.costs.flops import iteration_flops, utilization
from reference.costs.hardware import Link, size_of_product
from reference.costs.published import A100_PEAK, H100_PEAK, KORTHIKANTI, PTD_P

a100 = load("dgx-a100")
inside, adapter = a100.inside, Link(a100.between.latency, a100.between.bandwidth / a100.server)
print("inside a server:          ", inside)
print("between servers, each GPU:", adapter)

# %% [markdown]
# ## One message
#
# A message of $n$ bytes takes about
#
# $$\alpha + \frac{n}{\beta}$$
#
# seconds. $\alpha$, the *latency*, is paid for a message of any size: start a kernel, find the receiver, cross the
# wire. $\beta$ is the *bandwidth*. Through a GPU's own adapter:

# %%
n = 2.0 ** np.arange(6, 31)
draw_curves({"alpha + n / beta": adapter.seconds("send", 2, n), "alpha": np.full(len(n), adapter.latency),
             "n / beta": n / adapter.bandwidth}, "bytes n", "seconds", "one message between servers", n, "xy")

# %% [markdown]
# To the left the line is flat: a smaller message is not faster. To the right it is steep, and the start costs nothing.
# What lies between? The *effective* bandwidth of a message is its bytes, divided by its seconds.
#
# **Predict.** How many bytes must a message have to reach half of $\beta$? (Latency and bandwidth are printed above.)

# %%
guess = ...                # bytes

# %% tags=["hide-output"]
half = adapter.latency * adapter.bandwidth
reveal(guess, half, "bytes, or alpha beta: both terms are equal")

# %% [markdown]
# $\alpha \beta$ is the one number to know of a link. Gradients travel in buckets (walkthrough *Data parallelism*), and
# a ring sends a bucket in $d$ pieces: each *piece* should be well above $\alpha \beta$. Pieces of a tenth of it would
# reach an eleventh of the bandwidth.
#
# ## From messages to collectives
#
# A ring's all-reduce (walkthrough *f and g*) has $2(d-1)$ steps, in each of which a rank sends $n/d$ bytes. A *tree*
# adds up from pairs to fours to eights, and sends the sum back the same way: $2 \log_2 d$ steps, of the whole array.
#
# $$T_\text{ring} = 2(d-1)\left(\alpha + \frac{n}{d \beta}\right), \qquad
# T_\text{tree} = 2 \log_2 d \left(\alpha + \frac{n}{\beta}\right)$$
#
# So a ring sends less, and a tree has fewer steps. (`Link.seconds` has the ring.)
#
# **Predict.** All 64 ranks add up a single number of 8 bytes, for a check that no gradient is infinite. How many times
# as long does the ring take as the tree?

# %%
guess = ...                # times

# %% tags=["hide-output"]
d = 64

def tree(n):
    return 2 * log2(d) * adapter.seconds("send", 2, n)

reveal(guess, adapter.seconds("all_reduce", d, 8) / tree(8), "times as long")
crossing = half * (d - 1 - log2(d)) / (log2(d) - (d - 1) / d)
print(f"they cross at {crossing / 1e6:.1f} MB, {crossing / half:.1f} times alpha beta")
draw_curves({"ring": adapter.seconds("all_reduce", d, n), "tree": tree(n)}, "bytes n", "seconds",
            "all-reduce on 64 ranks", n, "xy")

# %% [markdown]
# For small arrays only steps count, $d - 1$ against $\log_2 d$. For large ones only bytes count, and the tree is a
# little more than $\log_2 d$ times as slow. (A tree that sends an array in pieces, one behind the other, loses less.)
# Setting both formulas equal gives the crossing. Libraries therefore choose by size: with another size of buckets,
# the same program may add up in another order.
#
# ## A server's links
#
# So far all links were the same. They are not. Inside a server each GPU reaches every other through a switch; between
# servers it has an adapter:

# %%
draw_servers(2, a100.server, inside, adapter)

# %% [markdown]
# A ring through all GPUs, server by server, leaves each server at one place: through *one* adapter. (It arrives through
# another.) Each step is as slow as its slowest link, so the whole ring runs at that speed, while six of eight adapters
# carry nothing.
#
# A *hierarchical* all-reduce uses them all. Reduce-scatter inside each server: GPU $i$ has piece $i$ of its server's
# sum. All-reduce between the GPUs with the same number in each server, eight of them at the same time, each
# through adapters of its own. All-gather inside. The cell below does it on real ranks, in two "servers" of four.
#
# **Predict.** Each of 8 ranks has 1,024 numbers of 8 bytes. How many bytes leave each *server* of four ranks? (An
# all-reduce of $N$ bytes over $d$ ranks sends $2N(d-1)/d$ from each.)

# %%
guess = ...                # bytes from one server to the other

# %% tags=["hide-output"]
# %%ranks 8
from mpi_impl.comm.ledger import ring_bytes

inside, between = group.split(rank // 4, "inside"), group.split(rank % 4, "between")
x = np.random.default_rng(rank).integers(100, size=1024)
piece = between.all_reduce(inside.reduce_scatter(x, 0, "first"), "second")
same = np.array_equal(inside.all_gather(piece, 0, "third"), group.all_reduce(x, "flat"))
sent = {entry.group: ring_bytes(entry, total) for entry, total in group.ledger.totals.items()}

# %% tags=["hide-output"]
print("the same sum on every rank:", all(ranks["same"]))
print(f"a flat ring sends {ranks['sent'][0]['world']:,.0f} bytes over the one edge that leaves a server")
reveal(guess, sum(sent["between"] for sent in ranks["sent"][:4]), "bytes leave a server, a quarter from each rank")

# %% [markdown]
# Each GPU all-reduces a quarter of the array between servers, and four do. So less leaves a server, but not four times
# less: with many servers both counts are close to $2N$. The hierarchy wins because *all adapters work*, and because
# there are fewer steps. On 16 servers of 8 GPUs:

# %%
flat, rings = (link.seconds("all_reduce", 16 * 8, n) for link in (adapter, a100.between))
levels = 2 * inside.seconds("all_gather", 8, n) + adapter.seconds("all_reduce", 16, n / 8)     # a reduce-scatter, too

for i in 0, -1:
    print(f"{n[i]:,.0f} bytes: one flat ring takes {flat[i] / levels[i]:.1f} times as long")
draw_curves({"one flat ring": flat, "eight flat rings": rings, "hierarchical": levels}, "bytes n", "seconds",
            "all-reduce on 16 servers of 8 GPUs", n, "xy")

# %% [markdown]
# The second curve is what NCCL does with large arrays: eight rings at the same time, each with an eighth of the array,
# which leave a server through different adapters. They have all the adapters' bandwidth without two extra trips
# inside, and all the latency of a flat ring. So here, too, the size decides.
#
# Measure your own $\alpha$ and $\beta$: `.venv/bin/python benchmarks/calibrate.py --output machine.toml` times
# all-reduces of many sizes and fits a line through them; `load("machine.toml")` reads it.
#
# ## The roofline
#
# Memory is a link, too: before a GPU can multiply, numbers must come from its memory. A product of $m \times k$ and
# $k \times n$ has $2mkn$ FLOPs. In 16 bits it moves $2(mk + kn + mn)$ bytes, if every number moves once. The ratio is
# its *arithmetic intensity*:
#
# $$\frac{2mkn}{2(mk + kn + mn)} = \frac{1}{1/m + 1/k + 1/n} \text{ FLOPs a byte}$$
#
# A device that computes at most $P$ FLOP/s, and moves $W$ bytes a second, reaches $\min(P, W \times \text{intensity})$:
# the *roofline* ([Williams et al. 2009](https://doi.org/10.1145/1498765.1498785)). The *ridge*, $P/W$, is where
# both are equal. To the left memory is the limit, to the right computing. NVIDIA's data sheets give 312 TFLOP/s and
# 2,039 GB/s for an A100 of 80 GB, 989 TFLOP/s and 3,350 GB/s for an H100.
#
# **Predict.** While a model writes, it multiplies the vector of one token, $1 \times 12288$, by the
# $12288 \times 6144$ matrix of its MLP (GPT-3's, on 8 ranks). What percentage of an H100's peak can that reach?

# %%
guess = ...                # percent

# %% tags=["hide-output"]
devices = {"A100 of 80 GB": (A100_PEAK, 2039e9), "H100": (H100_PEAK, 3350e9)}
products = {"one token": (1, 12288, 6144), "64 tokens": (64, 12288, 6144), "scores of a head": (2048, 128, 2048),
            "MLP": (2048, 12288, 6144)}
intensities = {name: size_of_product(*shape) / 3 for name, shape in products.items()}

for device, (P, W) in devices.items():
    print(f"{device}: {P / 1e12:.0f} TFLOP/s, ridge {P / W:.0f};",
          ", ".join(f"{name} {min(1, at * W / P):.1%}" for name, at in intensities.items()))
reveal(guess, 100 * intensities["one token"] * W / P, "% of an H100's peak")

at = 2.0 ** np.arange(-1, 12.1, 0.1)
figure = draw_curves({device: np.minimum(P, W * at) / 1e12 for device, (P, W) in devices.items()},
                     "FLOPs for each byte of memory traffic", "TFLOP/s, at most", "rooflines", at, "xy")
for name, intensity in intensities.items():
    figure.axes[0].axvline(intensity, 0, 0.8, color="gray", linestyle=":")
    figure.axes[0].text(intensity, 1, name, rotation=90, ha="right")
figure

# %% [markdown]
# How much of its bound a kernel reaches is another question. But nothing gets above it.
#
# - One token is far to the left: every weight is read for a single multiplication and addition. Generation is about
#   bytes, and its cure is more tokens for each read: batches. An H100, whose ridge is further to the right, needs more
#   of them than an A100.
# - The large matrices of training are to the right, for thousands of tokens at a time.
# - Attention's scores are not, in training either: a head has only 128 columns, so $1/k$ decides, for any length of the
#   text. Kernels that never write the scores to memory get around that bound, since it assumes that they do.
# - Layer norms, dropout, GeLU and sums have a few FLOPs for each number that is read and written: the far left.
#   That is why they are fused.
#
# Tensor parallelism divides $n$ or $k$ by $t$, which moves products to the left.
#
# ## MFU and HFU
#
# A whole step has one number of this kind: the FLOPs of its products, divided by its time and by the peak of all GPUs.
# Which FLOPs? *Model* FLOPs are those that the model needs: a forward and twice as much for the backward. They give the
# **MFU** ([Chowdhery et al. 2022](https://arxiv.org/abs/2204.02311), appendix B). *Hardware* FLOPs are those that were
# computed, with recompute: the **HFU** ([Korthikanti et al. 2022](https://arxiv.org/abs/2205.05198), section 6.3).
# `iteration_flops` counts both:

# %%
run = PTD_P[-1]
model, hardware = (iteration_flops(run.model, run.B, 2048, how) for how in ("none", "full"))
step = hardware / (run.gpus * run.teraflops * 1e12)
hfu, mfu = (utilization(flops, step, run.gpus, A100_PEAK) for flops in (hardware, model))
print(f"HFU on {run.gpus:,} GPUs at {run.teraflops} TFLOP/s each: {hfu:.0%}")

# %% [markdown]
# That is the largest run of Narayanan et al.: the 163 of 312 TFLOP/s in its table 1 count recompute.
#
# **Predict.** Every layer was recomputed in full. What was the MFU of this run, in percent? (Forward 1, backward 2.)

# %%
guess = ...                # percent

# %% tags=["hide-output"]
reveal(guess, 100 * mfu, "% MFU")

# %% [markdown]
# Both are useful. HFU says how busy the products keep the GPUs. MFU says how fast the model is trained, and only
# MFU compares two runs. An example: the same models on the same machines, once with full recompute, and once with
# selective recompute and sequence parallelism (walkthrough *Sequence parallelism*), by the seconds of Korthikanti et
# al., table 5:

# %%
print("billions  recompute   seconds   HFU    MFU")
for run in KORTHIKANTI:
    for how, seconds in ("full", run.full), ("selective", run.selective):
        hfu, mfu = (utilization(iteration_flops(run.model, run.B, 2048, counted), seconds, 8 * run.p, A100_PEAK)
                    for counted in (how, "none"))
        print(f"{run.billions:>8}  {how:9} {seconds:9}  {hfu:.1%}  {mfu:.1%}")

# %% [markdown]
# With full recompute the GPUs are about as busy, and a quarter of what they do is done for the second time. (For the
# selective runs the paper prints a slightly higher HFU, since it counts the recomputed core three times.) In a run
# of your own, `--log-throughput` prints the MFU.
#
# ## What overlap hides
#
# Messages need not be added to computing: gradients can travel while the backward goes on (walkthrough *Data
# parallelism*). How much can that hide? A roofline answers, with a server's network as the link. A GPU with $\Psi$
# parameters computes $2\Psi$ FLOPs a token forward and $4\Psi$ backward; its gradients have $2\Psi$ bytes in 16 bits,
# of which a ring sends nearly twice as many. There are eight rings, through all eight adapters of a server.
#
# **Predict.** From how many tokens a GPU on can the backward, at the A100's peak, hide all that? ($\Psi$ cancels.)

# %%
guess = ...                # tokens on each GPU, for each step

# %% tags=["hide-output"]
ridge = a100.peak / a100.between.bandwidth
reveal(guess, ridge, "tokens, the ridge of the network")

# %% [markdown]
# At best overlap turns a sum into a maximum. It wins most at the ridge, where the messages take as long as the
# backward, 2/3 of the computing: a step of 5/3 becomes one of 1. Far to the left of it messages decide, overlapped or
# not, and far to the right there is little to hide.
#
# The ridge is less than a sample of 2,048 tokens on each GPU, and a GPU that reaches half its peak needs half as many.
# Where does overlap not help? The very next product needs the result of a tensor-parallel all-reduce. There is nothing
# to compute meanwhile, unless both are divided into pieces. So tensor parallelism stays inside a server, where links
# are fast.
#
# ## What to take away
#
# | question | number | of the A100 |
# |---|---|---|
# | is a message large? | $\alpha \beta$ | 250,000 bytes between servers |
# | ring or tree? | $2(d-1)$ steps of $n/d$, or $2 \log_2 d$ of $n$ | they cross at 2.8 MB on 64 GPUs |
# | is a product limited by memory? | $1/(1/m + 1/k + 1/n)$ against $P/W$ | ridge 153 |
# | can gradients be hidden? | tokens on a GPU, against $P/\beta$ | 1,560 |
# | is the step good? | MFU, never HFU, to compare runs | 39.2 % in the largest run |
#
# - A hierarchical all-reduce wins by using all adapters, and by fewer steps; not by sending much less.
# - Bounds come first: they say which stopwatch to take out.
#
# ## Try it
#
# 1. In the flat ring, let the ranks of two servers alternate: 0, 4, 1, 5, 2, 6, 3, 7. How many bytes leave each server
#    now? (`crossing` in `mpi_impl/comm/hosts.py` gives the share of a ring that leaves.)
#
# <details><summary>Answer</summary>
#
# Now every edge of the ring leaves a server, so `crossing("all_reduce", [0, 1] * 4)` is 1, and it was 0.25. Each of the
# four ranks of a server sends its 14,336 bytes to the other one: 57,344 bytes, four times as many as before. The order
# of the ranks in a ring matters. That is why Megatron numbers the ranks of a server one after the other, and why NCCL
# first finds out which GPU is where.
#
# </details>
#
# 2. With tensor parallelism a layer's forward has $24 b s h^2/t$ FLOPs, and two all-reduces of $2 b s h$ bytes that
#    nothing hides. How many FLOPs are that for each byte that a rank sends, for GPT-3 and $t = 8$? What share of the
#    forward's time, at the A100's peak, are messages? And with $t = 16$, between servers?
# 3. How many tokens must a batch have until the MLP's product above reaches the ridge of an A100? Of an H100? And if
#    its weights, but not its activations, have 8 bits?
# 4. One colleague reports an HFU of 60 % with full recompute, another an MFU of 47 % for the same model and GPUs. Whose
#    run trains faster?
#
# Next: [22. When a rank dies](22_failure_and_restart.ipynb). Walkthrough [*Choosing t, p, d and
# b*](13_choosing_t_p_d_b.ipynb) uses these bounds to choose $t$, $p$ and $d$; `.venv/bin/shardlab plan` does it for
# you.
