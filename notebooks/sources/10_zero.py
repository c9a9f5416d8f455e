# %% [markdown]
# # 10. ZeRO: sharding what is replicated
#
# Data parallelism wastes memory: every rank holds the same parameters, gradients and
# optimizer states. ZeRO removes that waste, one of the three after the other.
#
# **You will** give each rank a part of the flat buffer; take an all-reduce apart; train with ZeRO's stages, 0 to 3, on
# real ranks, counting what each rank holds and sends; and meet an optimizer that cannot be sharded anywhere.
#
# **You need** walkthrough [*Data parallelism*](03_data_parallelism.ipynb): replicas, gradients in a flat buffer and
# its buckets. About 45 minutes.

# %%
# %load_ext shardlab.notebook
import numpy as np

from shardlab.demos.tiny_gpt import OPTIMIZER, SEED, global_batch, tiny_gpt
from shardlab.notebook.pictures.buffers import draw_layout
from shardlab.notebook.pictures.charts import draw_bars, draw_curves
from shardlab.notebook.pictures.shards import by_columns, draw_matrices, partial_sums, whole
from shardlab.notebook.predictions import reveal
from reference.batches import GPTBatch
from reference.models.gpt import gpt_tensors
from reference.params import initialize, leaves
from reference.parallel.layout import Layout

model = tiny_gpt(2)
params = initialize(gpt_tensors(model), SEED, "float64")

# %% [markdown]
# ## A part for each rank
#
# Walkthrough *Data parallelism* stored gradients in a flat buffer, in buckets that are sent as one message each. For
# ZeRO each bucket is also divided into equal parts, one for each replica, without regard to tensors: rank $i$ *owns*
# the $i$-th part of each bucket. Above are the tensors, alternately dark and light (units in blue and sand); below are
# their owners:

# %%
layout = Layout(gpt_tensors(model), bucket_size=900, parts=4)
print(f"{len(layout.segments)} tensors of {layout.size:,} elements in {len(layout.buckets)} buckets")
draw_layout(layout, "the flat buffer of the tiny GPT, for 4 replicas")

# %% [markdown]
# A part may begin or end in the middle of a tensor: rank 1 has the end of one matrix and the beginning of the next. Its
# own parts together are its *shard*. (If a bucket does not divide, as by 5 replicas here, it is padded with zeros.)
#
# Four ranks, each with a gradient; random numbers will do:

# %%
# %%ranks 4
from shardlab.demos.tiny_gpt import tiny_gpt
from reference.models.gpt import gpt_tensors
from reference.parallel.layout import Layout

model = tiny_gpt(2)
layout = Layout(gpt_tensors(model), bucket_size=900, parts=size)
flat = np.random.default_rng(rank).normal(size=layout.size)
print(f"gradient begins {flat[:4].round(4)}")

# %% [markdown]
# ## An all-reduce is two things
#
# Let rank $i$ be responsible for the $i$-th part of the buffer. In a **reduce-scatter** every rank sends rank $i$ the
# $i$-th part of its own gradients, and rank $i$ adds them up: each rank has one part of the sum. In an **all-gather**
# every rank sends its part to all: every rank has the whole sum. One after the other they are an all-reduce.

# %%
draw_matrices([partial_sums("gradients", 4, 12, "4 partial sums"), "reduce-scatter  →",
               by_columns("the sum", 4, 12, 4, "each rank has a part"), "all-gather  →",
               whole("the sum", 4, 12, "every rank has all")], 4, "an all-reduce, in two halves")

# %% [markdown]
# **Predict.** The all-reduce of all 2,000 numbers of 8 bytes sends 24,000 bytes from each of the four ranks. How many
# does its first half send, the reduce-scatter?

# %%
guess = ...                # bytes

# %% tags=["hide-output"]
# %%ranks 4
from mpi_impl.comm.ledger import ring_bytes

for bucket in layout.buckets:
    summed = flat[bucket.slice].copy()
    group.all_reduce(summed, "both halves")
    part = group.reduce_scatter(flat[bucket.slice], 0, "first half")
    both = group.all_gather(part, 0, "second half")
    assert np.allclose(both, summed, rtol=0, atol=1e-12)
sent_by_halves = {entry.operation: ring_bytes(entry, total) for entry, total in group.ledger.totals.items()}
for entry, total in group.ledger.totals.items():        # the ledger of this cell
    print(f"{entry.operation:14} {entry.reason:11} {ring_bytes(entry, total):6,.0f} bytes that a rank sends")

# %% tags=["hide-output"]
assert layout.size == 2000 and ranks["sent_by_halves"][0]["all_reduce"] == 24_000
reveal(guess, ranks["sent_by_halves"][0]["reduce_scatter"], "bytes that a rank sends for the reduce-scatter")

# %% [markdown]
# Each half costs a rank $\frac{d-1}{d}$ of the buffer, if the ranks form a ring: in each of $d - 1$ rounds a rank sends
# one part, $\frac{1}{d}$ of the buffer, to its neighbour. (The paper of ZeRO writes $N_d$ for our $d$.) Two halves,
# $2\,\Psi\,\frac{d-1}{d}$ numbers for $\Psi$ parameters (read: psi): that is the cost of an
# all-reduce.
#
# ## The idea of ZeRO
#
# After the all-reduce all ranks hold the same gradients, and all do the same: Adam updates all parameters, on each
# rank, in the same way. For that each holds Adam's two *moments* of every parameter, averages of past gradients and of
# their squares. Only Adam needs them. And Adam treats each element by itself. So its work can be divided anywhere:

# %%
from reference.optimizers.adam import adam_update

random = np.random.default_rng(1)
weight, grad, m1, v1 = random.normal(size=(4, 1000))
together, parts = [(weight.copy(), grad, m1.copy(), v1**2) for _ in range(2)]

adam_update(*together, step=3, lr=0.01, decay=True, c=OPTIMIZER)
for part in np.array_split(np.arange(1000), 4):                      # rank 0's, rank 1's, ...
    part = slice(part[0], part[-1] + 1)
    adam_update(*(x[part] for x in parts), step=3, lr=0.01, decay=True, c=OPTIMIZER)
print("the same, bit by bit:", np.array_equal(together[0], parts[0]))

# %% [markdown]
# So put Adam *between the two halves*. After the reduce-scatter a rank has the sum of its part of the gradients. It
# updates its part of the parameters. Then the all-gather gives every rank the updated **parameters**, instead of the
# gradients. Both are $\Psi$ numbers, so **no more is sent**, and each rank keeps the moments of its own part only.
#
# That is stage 1 of ZeRO ([Rajbhandari et al. 2020](https://arxiv.org/abs/1910.02054), section 5). Each stage shards
# one thing more:
#
# | stage | what else is sharded | how it works |
# |---|---|---|
# | 0 | nothing | gradients all-reduced, every rank updates everything |
# | 1 | optimizer states | gradients reduce-scattered, the own part updated, parameters all-gathered |
# | 2 | gradients | reduce-scatter after every microbatch; only the own part of the sum is kept |
# | 3 | parameters | a layer is gathered just before it is used, forward and backward, and then released |
#
# ### A step, event by event
#
# Choose a stage below, and press *next* (or click on a slider and use the arrow keys). The four ranks train a GPT of
# three blocks, with one sample each: the textbook has taken this step, and after each event we have compared every
# element of every rank with one process. A column is a rank. In it are three kinds of arrays, as wide as their elements
# have bytes: a parameter and its gradient take 2 each, in 16 bits; the optimizer states take 12, in 32 bits: two
# moments, and a more exact copy of the parameter (walkthrough *Precision* says why). A row is a *unit*, a block or a
# table, and has a quarter for each rank. So what is not grey is memory:

# %%
from shardlab.notebook.sliders import play_zero

play_zero(stage=1)

# %% [markdown]
# - Stage 1, after the reduce-scatter: each rank has the sum of its own quarters only. The rest are hatched: they are
#   still the gradients of its own sample, and nobody reads them.
# - Stage 2: a whole gradient lives from the backward of its unit to the reduce-scatter after it.
# - Stage 3: a unit's parameters are whole while it computes, forward and again backward. There is no all-gather at the
#   end: the next step's forward does it.
#
# **Predict.** At stage 0 a rank holds 43,136 bytes all the time. How many does it hold at stage 3, at most? (The
# largest unit is a block, with 872 parameters, and one array of one unit is whole at a time: its parameters or its
# gradients.)

# %%
guess = ...                # bytes

# %% tags=["hide-output"]
from shardlab.notebook.sliders.zero import play_step

helds = [held for _, held, _, _ in play_step(3)]
print(f"between the events: {min(helds):,.0f} bytes, a quarter: {min(helds) == 43_136 / 4}")
assert max(helds) == min(helds) + 2 * 872 * 3 / 4
reveal(guess, max(helds), "bytes that a rank holds at stage 3, at most")

# %% [markdown]
# Figure 1 of the paper shows what that means for a large model: 7.5 billion parameters on 64 devices.
# `reference/parallel/model_states.py` has the formulas.
#
# **Predict.** Without ZeRO, 7.5 billion parameters take 120 GB on each device. How many with stage 1, on 64?

# %%
guess = ...                # GB

# %% tags=["hide-output"]
from shardlab.report.charts import MEMORY
from reference.parallel.model_states import model_states

psi, d = 7_500_000_000, 64

def gigabytes(stage, n):
    return {kind: size / 1e9 for kind, size in model_states(psi, n, stage)._asdict().items()}

totals = [sum(gigabytes(stage, d).values()) for stage in range(4)]
assert [f"{total:.3g}" for total in totals] == ["120", "31.4", "16.6", "1.88"]
assert np.allclose([sum(gigabytes(stage, 10**9).values()) for stage in (1, 2)], [30, 15])    # what is replicated
reveal(guess, totals[1], "GB on each device with stage 1")
draw_bars({f"stage {stage}": gigabytes(stage, d) for stage in range(4)}, "GB on each of 64 devices", unit=" GB",
          title="model states of 7.5 billion parameters", colors=MEMORY)

# %% [markdown]
# Stages 1 and 2 cannot go below what is replicated: 30 and 15 GB, for any number of devices. Stage 3 has no such floor:

# %%
from shardlab.notebook.pictures.shards import OWNERS
from shardlab.report.charts import finish
from shardlab.report.drawing import Picture

devices = [2**k for k in range(11)]
figure = Picture((8.5, 3.4), layout="constrained")
axes = figure.add_subplot(xscale="log", yscale="log", xticks=devices, xticklabels=devices, ylabel="GB on each")
for stage, style in enumerate(("-", "--", "-.", ":")):
    axes.plot(devices, [sum(gigabytes(stage, n).values()) for n in devices], style, color=OWNERS[stage], linewidth=2.5,
              label=f"stage {stage}")
axes.minorticks_off()
axes.legend(frameon=False, loc="lower left")
finish(axes, "devices, each a replica", "the same model on more and more devices", "both")
figure.set_label("GB on each device. " + "; ".join(
    f"Stage {stage}: " + ", ".join(f"{sum(gigabytes(stage, n).values()):.3g} on {n}" for n in (1, 32, 1024))
    for stage in range(4)))
figure

# %% [markdown]
# ## Stages 0 to 3, on real ranks
#
# `Trainer` is the machine's: it trains a GPT as configured. We train the same model at each stage for a few steps, and
# look at the losses, at the weights, at the bytes that a rank holds from step to step, and at the numbers that it sends
# for gradients and parameters. All is in float64 here: 8 bytes for a parameter, 8 for its gradient, 16 for its moments,
# and no copy.

# %%
# %%ranks 4
from shardlab.demos.tiny_gpt import OPTIMIZER, apart, global_batch, share_of, training_on
from shardlab.demos.zero import sent
from reference.config import ParallelConfig
from reference.params import leaves

def train(stage, m=1, layers=2, steps=8, optimizer=OPTIMIZER):
    parallel = ParallelConfig(data_parallel_size=size, zero_stage=stage, ddp_bucket_size=900,
                              whole_matrices=optimizer.muon)
    with training_on(apart(group), tiny_gpt(layers), parallel, optimizer) as trainer:      # with a ledger of its own
        losses = []
        for step in range(steps):
            tokens, targets = global_batch(step, m * size)
            losses.append(trainer.step(share_of(trainer, tokens, targets, b=1), len(tokens)).loss)
        weights = dict(leaves(trainer.state.layout.views(trainer.state.whole(trainer.state.parameters.own))))
        return {"losses": losses, "held": trainer.held(), "psi": trainer.state.layout.size,
                "sent": sent(trainer.ledger) / steps, "weights": weights}

stages = [train(stage) for stage in range(4)]
for stage, found in enumerate(stages):
    print(f"stage {stage}: losses {np.round(np.array(found['losses']), 3)}")

# %% [markdown]
# The same losses on all ranks, at all stages. And in one process, from the textbook? And are the weights the same?

# %%
from shardlab.demos.tiny_gpt import textbook_of

textbook = textbook_of(model)
losses = [textbook.step(GPTBatch(*global_batch(step, 4)))[0] for step in range(8)]
expected = dict(leaves(textbook.params))
for stage in range(4):
    found = [everyone[stage] for everyone in ranks["stages"]]
    same_losses = all(np.allclose(one["losses"], losses, rtol=1e-12, atol=0) for one in found)
    same_weights = all(abs(one["weights"][name] - x).max() < 1e-10 for one in found for name, x in expected.items())
    print(f"stage {stage}: same losses {same_losses}, same weights {same_weights}")

# %%
found = ranks["stages"][0]
draw_curves({"one process": losses} | {f"stage {stage}": one["losses"] for stage, one in enumerate(found)}, "step",
            "loss", "five curves over one another")

# %% [markdown]
# What does rank 0 hold? The trainer counts the bytes of its arrays, and they equal the formula:

# %%
print([np.allclose(one["held"][:3], model_states(one["psi"], 4 if stage else 1, stage, 8, 8, 16))
       for stage, one in enumerate(found)])
kinds = "parameters", "gradients", "optimizer"
draw_bars({f"stage {stage}": {kind: getattr(one["held"], kind) / 1000 for kind in kinds}
           for stage, one in enumerate(found)}, "kB on rank 0, of 4, measured", unit=" kB", colors=MEMORY)

# %% [markdown]
# ### What is sent
#
# With one microbatch a step, $m = 1$, and in units of $\Psi \frac{d-1}{d}$: stages 0, 1 and 2 send 2. Stage 3 sends 3:
# parameters gathered for the forward, gathered again for the backward (since they were released), and gradients
# reduce-scattered (section 7 of the paper).
#
# More microbatches have a price that the paper, which assumes one, does not show. Stage 2 keeps no whole gradients, so
# it must reduce-scatter after *every* microbatch: $m + 1$. Stage 3 gathers for every microbatch, too: $3m$.

# %%
# %%ranks 4
four = [train(stage, m=4, steps=2) for stage in range(4)]

# %%
rows = {}
for m, name in (1, "stages"), (4, "four"):
    for stage, one in enumerate(ranks[name][0]):
        rows[f"m = {m}, stage {stage}"] = {f"m = {m}": one["sent"] / (one["psi"] * 3 / 4)}
draw_bars(rows, "numbers that rank 0 sent in a step, of Ψ(d-1)/d, from its ledger")

# %% [markdown]
# With $m = 1$ stages 0 to 2 are 2, 2, 2 to the last element, and stage 3 is a little below 3. The difference is the
# tables of tokens and positions: the *backward* of looking up a row needs no table, so they are gathered only once. For
# a real model, where the tables are a small part, it is 3.

# %%
from reference.costs.volumes import data_parallel_traffic

for m, name in (1, "stages"), (4, "four"):
    for stage, one in enumerate(ranks[name][0]):
        tables = m * sum(x.size for _, x in leaves(params.embedding)) * 3 / 4 if stage == 3 else 0
        formula = data_parallel_traffic(one["psi"], 4, stage, m) - tables
        print(f"m = {m}, stage {stage}: as the formula says: {abs(one['sent'] - formula) < 1e-6}")

# %% [markdown]
# ### Stage 3: a layer is whole while it is used
#
# In stage 3 a layer must be whole while it is used, and the next one is on its way meanwhile. So besides its shard a
# rank holds about two layers, whatever their number. This is the loop (`prefetch` begins to gather, `materialized`
# waits for it, and releases it afterwards):

# %%
import inspect

from mpi_impl.models.units import in_turn

print(inspect.getsource(in_turn))

# %% [markdown]
# **Predict.** With 2 layers at most 13,952 bytes are gathered at any time. How many with 8 layers, which have 57,856
# bytes of parameters?

# %%
guess = ...                # bytes

# %% tags=["hide-output"]
# %%ranks 4
depths = {layers: train(3, layers=layers, steps=1) for layers in (2, 4, 8)}
for layers, found in depths.items():
    held = found["held"]
    print(f"{layers} layers: {8 * found['psi']:6,} bytes of parameters in all, {held.parameters:6,} kept here, "
          f"{held.gathered:6,} gathered at any time, at most")

# %% tags=["hide-output"]
assert ranks["depths"][0][2]["held"].gathered == 13_952 and 8 * ranks["depths"][0][8]["psi"] == 57_856
reveal(guess, ranks["depths"][0][8]["held"].gathered, "bytes gathered at any time, with 8 layers")

# %% [markdown]
# PyTorch's FSDP is stage 3 as a wrapper of any layers: `docs/fsdp.md` compares it, argument by argument. And a shard
# need not be on the device: with `cpu_offload` it is in the host's memory, or in a file, and Adam needs each element
# only once a step (`docs/memory.md`).
#
# ## An optimizer that needs whole matrices
#
# Adam looks at one element at a time, so a part of the buffer may end in the middle of a row. Jordan's Muon does
# not: it *orthogonalizes* the momentum $X = U S V^T$ of each matrix, to about $U V^T$, so that all directions in which
# gradients point get the same step. Five rounds of a polynomial do it, without $U$ and $V$: with $A = X X^T$, $X
# \leftarrow a X + (b A + c A^2) X$. What happens if two ranks each orthogonalize a half?

# %%
from reference.optimizers.muon import newton_schulz

x = np.random.default_rng(0).normal(size=(4, 16)) * [[1], [0.3], [0.1], [0.05]]
halves = np.concatenate([newton_schulz(half, 5) for half in np.split(x, 2, 1)], 1)
for name, y in ("the momentum", x / np.linalg.norm(x)), ("orthogonalized", newton_schulz(x, 5)), ("by halves", halves):
    print(f"{name:15} singular values {np.linalg.svd(y)[1].round(2)}")

# %% [markdown]
# Halves make another update, with singular values up to 1.53, and thirds would make a third one. So in ZeRO-1 with Muon
# each matrix has one owner, which has all of it. Owners should have about as much to *compute*: the costliest matrix is
# dealt out first, each to the owner with the least to compute so far. Adam's tensors are sharded as before. Here are
# the owners in a GPT of three layers, on two replicas:

# %%
from reference.optimizers.muon import multiplications
from reference.parallel.layout import Layout
from reference.models.gpt import gpt_tensors

layout = Layout(gpt_tensors(tiny_gpt(3)), parts=2, whole_matrices=True)
for replica in range(2):
    owned = [piece.of for piece in layout.pieces(replica) if piece.of.matrix]
    print(f"replica {replica}: {sum(multiplications(one.tensor) for one in owned):6,} multiplications a round:",
          *(one.name.removeprefix("blocks.") for one in owned))

# %% [markdown]
# A matrix that ranks share by tensor parallelism is gathered by all of them, or $A$ is summed over them in every round.
#
# On real ranks: the same losses at stages 0 and 1, and in one process. Muon has a momentum and no second moment: of
# each element of a matrix 8 bytes less.

# %%
# %%ranks 4
from dataclasses import replace

muon = [train(stage, optimizer=replace(OPTIMIZER, optimizer="muon")) for stage in range(2)]

# %%
from dataclasses import replace

textbook = textbook_of(tiny_gpt(2), replace(OPTIMIZER, optimizer="muon"))
losses = [textbook.step(GPTBatch(*global_batch(step, 4)))[0] for step in range(8)]
for stage in range(2):
    same = all(np.allclose(everyone[stage]["losses"], losses, rtol=1e-11, atol=0) for everyone in ranks["muon"])
    adam, found = ranks["stages"][0][stage], ranks["muon"][0][stage]
    print(f"stage {stage}: same losses {same}; optimizer states {found['held'].optimizer:,} bytes, with Adam "
          f"{adam['held'].optimizer:,}; sent, of Ψ(d-1)/d: {found['sent'] / (found['psi'] * 3 / 4):.2f}")

# %% [markdown]
# ## What to take away
#
# With $w$, $g$ and $K$ bytes for a parameter, its gradient and its optimizer states:
#
# | stage | a rank holds | and sends, of $\Psi\frac{d-1}{d}$ | 7.5 billion, $d = 64$ |
# |---|---|---|---|
# | 0 | $(w + g + K)\,\Psi$ | 2 | 120 GB |
# | 1 | $(w + g)\,\Psi + K\Psi/d$ | 2 | 31.4 GB |
# | 2 | $w\,\Psi + (g + K)\,\Psi/d$ | $m + 1$ | 16.6 GB |
# | 3 | $(w + g + K)\,\Psi/d$ | $3m$ | 1.88 GB |
#
# - An all-reduce is a reduce-scatter and an all-gather. Stage 1 lets the optimizer work between the two, for free.
# - Stages 2 and 3 pay for every microbatch, so they are best with few and large ones. A pipeline needs many
#   (walkthrough *Pipelines*): stage 1 suits it best.
# - No stage changes what is computed: same losses, same weights.
# - How an optimizer can be sharded depends on what its update needs to see: Adam's an element, Muon's a matrix.
#
# ## Try it
#
# 1. Gradients are clipped by their *norm*, the root of the sum of all squares. At stage 1 a rank has a part of the
#    gradients only. What must be sent, and how much is it? (Look for "gradient norm" in the ledger.)
#
# <details><summary>Answer</summary>
#
# One number: each rank squares and adds up its own part, an all-reduce adds the four results, and every rank takes the
# root. Every element is in exactly one shard, so none is counted twice. (At stage 0 nothing is sent: every rank has all
# gradients.)
# </details>
#
# 2. Let `train` have `offload=True` at stage 3: pass `cpu_offload` to `ParallelConfig`, and print `trainer.held()`.
#    What is left on the device, and what is offloaded?
#
# Next: [11. Precision](11_precision.ipynb). The demo for this walkthrough:
# `python -m mpi_impl.launch -n 4 -m shardlab.demos.zero`.
