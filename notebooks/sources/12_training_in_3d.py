# %% [markdown]
# # 12. Training in 3D: t, p and d together
#
# The previous walkthroughs treated one kind of parallelism at a time: ranks that shard every layer (tensor
# parallelism, 1 to 7), ranks that hold different layers (pipelines, 9), replicas that take different samples (data
# parallelism, 3 and 10). Large models are trained with all three together, and every rank then sends in three
# directions.
#
# **You will** see which rank sends to which; train one small GPT on 8 real ranks in six ways, and get the same loss
# curve six times; see what makes that possible; plant a bug that raises no error, and find it from the outside.
#
# **You need** the ideas of walkthroughs *f and g*, *Pipelines* and *ZeRO*, but none of their code. About 45 minutes.

# %%
# %load_ext shardlab.notebook
from dataclasses import replace

import numpy as np

from shardlab.notebook.pictures.groups import crosses, draw_groups, groups_of
from shardlab.notebook.pictures.masks import draw_mask_parts
from shardlab.notebook.predictions import reveal
from reference.costs.volumes import PassCounts
from reference.config import ParallelConfig

# %% [markdown]
# ## A rank has three numbers
#
# | letter | kind | the ranks of one such group ... | they send one another |
# |---|---|---|---|
# | $t$ | tensor | hold a shard of every matrix each | sums of activations, for every layer and microbatch |
# | $p$ | pipeline | hold different layers, in order | activations forward, their gradients back |
# | $d$ | data | hold the same shards, and take different samples | sums of gradients, once per step |
#
# The number of ranks is $t \times p \times d$. What a rank holds and does follows from its place among $t$, its place
# among $p$ and its place among $d$:

# %%
import inspect

from mpi_impl.comm.topology import place

print(inspect.getsource(place))
for rank in range(8):
    print(f"rank {rank}:", place(rank, ParallelConfig(2, 2, 2)))

# %% [markdown]
# Two ranks that differ in only one of the three numbers are in one *group* of that kind. So every rank is in three
# groups. Here is what that looks like on two servers of four ranks. An arc is dashed where it leaves its server:

# %%
server = 4
draw_groups(ParallelConfig(2, 2, 2), server, "t = 2, p = 2, d = 2")

# %% [markdown]
# Why are ranks numbered in this order, and not in another? Inside a server, links are fast (300 GB/s for each GPU on
# the machines of [Narayanan et al. 2021](https://arxiv.org/abs/2104.04473), section 5); between servers they are slower
# (25 GB/s). The ranks of a tensor group send the most, so they get consecutive numbers, and servers are filled in the
# order of the numbers. Pipelines send the least. They get the slow links.
#
# With other $t$, $p$, $d$ another group gets the slow links:

# %%
draw_groups(ParallelConfig(1, 4, 2), server, "t = 1, p = 4, d = 2")

# %%
ways = {"t = 8": (8, 1, 1), "t = p = d = 2": (2, 2, 2), "p = 4, d = 2": (1, 4, 2), "d = 8": (1, 1, 8)}
for name, (t, p, d) in ways.items():
    groups = groups_of(ParallelConfig(t, p, d))
    leaves_server = [kind for kind in groups if any(crosses(group, server) for group in groups[kind])]
    print(f"{name:<14} crosses servers: {', '.join(leaves_server)}")

# %% [markdown]
# ## One model, six ways
#
# A GPT small enough that a step takes milliseconds: 4 layers, 8 heads, 12 tokens, float64. Its text counts: after each
# token comes the next one. Dropout is on, which sets a tenth of the activations to 0 at random. That is the hardest
# thing to keep identical, as we shall see.

# %%
from shardlab.demos.tiny_gpt import POSITIONS, SEED, global_batch, textbook_of, tiny_gpt
from reference.batches import GPTBatch
from reference.costs.parameters import parameters

model = replace(tiny_gpt(4, heads=8), hidden_dropout=0.1, attention_dropout=0.1,
                untie_embeddings_and_output_weights=False)
BATCH, STEPS = 8, 12
print(f"{parameters(model):,} parameters; {BATCH} samples of {POSITIONS} tokens a step, such as",
      *global_batch(0, BATCH)[0][0])
assert (model.num_layers, model.num_attention_heads, model.vocab_size) == (4, 8, 12)

# %% [markdown]
# **In one process.** The textbook's trainer, which knows nothing about ranks, takes 12 steps. This is the run that all
# others must equal.

# %%
textbook = textbook_of(model)
alone = [textbook.step(GPTBatch(*global_batch(step, BATCH)))[0] for step in range(STEPS)]
print("loss:", *np.round(alone[:5], 4), "...", np.round(alone[-1], 4))

# %% [markdown]
# **On ranks.** The cell defines `train` on each of the 8 processes. `Trainer` (mpi_impl/training/trainer.py) gets the
# groups of its rank and does the rest: it holds this rank's layers and shards, plays the pipeline's schedule, sums
# gradients over replicas, and updates its weights. `share_of` selects the samples of this rank's replica and divides
# them into microbatches of $b$.

# %%
ranks["model"], ranks["BATCH"], ranks["STEPS"] = model, BATCH, STEPS

# %%
# %%ranks 8
from mpi_impl.comm.group import Group
from shardlab.demos.tiny_gpt import apart, global_batch, share_of, training_on
from shardlab.report.traffic import pipeline_ledger
from reference.config import ParallelConfig

def train(t, p, d, b=1, zero=0, kind=Group):
    world = kind(group.comm, "world", apart(group).instruments)     # with a ledger of its own
    with training_on(world, model, ParallelConfig(t, p, d, zero_stage=zero)) as trainer:
        steps = [trainer.step(share_of(trainer, *global_batch(step, BATCH), b), BATCH) for step in range(STEPS)]
        return steps, pipeline_ledger(trainer.topology), trainer.state.layout.size

# %% [markdown]
# The six: all ranks shard every layer; a bit of each; mostly a pipeline; eight replicas; eight replicas that shard
# parameters, gradients and optimizer states (ZeRO stage 3, walkthrough *ZeRO*); and everything together. The microbatch
# size $b$ varies too, and with it the number of microbatches in a step.

# %%
# %%ranks 8
runs = {"t = 8": train(8, 1, 1, b=8), "t = p = d = 2": train(2, 2, 2, b=2), "p = 4, d = 2": train(1, 4, 2),
        "d = 8": train(1, 1, 8), "d = 8, ZeRO-3": train(1, 1, 8, zero=3),
        "t = p = d = 2, ZeRO-3": train(2, 2, 2, b=2, zero=3)}
for name, (steps, *_) in runs.items():
    print(f"{name:<22} loss {steps[0].loss:.4f} ... {steps[-1].loss:.4f}")

# %% [markdown]
# All 8 ranks print the same, and all six ways look the same, although a rank holds different things in each:
#
# **Predict.** The model has 51,456 parameters. How many does each of 8 tensor-parallel ranks hold?

# %%
guess = ...                # parameters

# %% tags=["hide-output"]
found = ranks["runs"]
print(f"{'parameters of rank':<22}", *(f"{rank:>7}" for rank in range(8)))
for name in found[0]:
    print(f"{name:<22}", *(f"{one[name][2]:>7,}" for one in found))
assert parameters(model) == 51_456
reveal(guess, found[0]["t = 8"][2], "parameters on each rank with t = 8")

# %% [markdown]
# (A pipeline's first ranks have the table of tokens and that of positions. Its last ones have a copy of the token
# table, which gives the logits. With ZeRO-3 the replicas shard what is listed here.) All losses in one picture, the
# first drawn widest:

# %%
from shardlab.notebook.pictures.charts import draw_curves

losses = {name: [step.loss for step in steps] for name, (steps, *_) in found[0].items()}
draw_curves({"one process": alone} | losses, "step", "loss", "One model, on one process and in six ways on 8 ranks")

# %%
print("all ranks report the same:", all([step.loss for step in one[name][0]] == losses[name]
                                        for one in found for name in losses))
for name, curve in losses.items():
    print(f"{name:<22} off by less than 1e-12 in every step: {np.abs(np.subtract(curve, alone)).max() < 1e-12}")

# %% [markdown]
# They are not similar, but **the same curve**. Only rounding differs, because sums are taken in another order. That
# holds in float64; in float32 or 16 bits rounding is larger and grows from step to step (walkthrough *Precision*).
#
# This is worth more than it seems. If a run on 8 ranks is the run on one process, then any difference is a bug, however
# small, and nobody has to judge whether a curve "looks right".
#
# ## The condition: nothing may depend on the number of ranks
#
# Three things are drawn at random in training: initial weights, samples, and what dropout drops. Each must be a
# function of *what it is for*, never of the rank that draws it or of what was drawn before.
#
# **Weights** are a function of (seed, name of the tensor, index in the whole tensor). Rank 5 of 8 draws its shard
# alone, and gets the same numbers as if somebody drew the whole tensor and split it:

# %%
from reference.models.gpt import gpt_tensors
from reference.params import initialize, initialize_shard, leaves, split

tensors = gpt_tensors(model)
drawn_whole = split(initialize(tensors, SEED, np.float64), tensors, 8)[5]
drawn_alone = initialize_shard(tensors, SEED, np.float64, 8, 5)
print(all(np.array_equal(one, other) for (_, one), (_, other) in zip(leaves(drawn_whole), leaves(drawn_alone))))

# %% [markdown]
# The usual way is to give a generator a seed and draw in order. Then either all ranks have one seed, and hold the
# *same* shard, so that the model is $t$ copies of a smaller one; or each has its own, and another $t$ is another model:

# %%
def drawn_in_order(seeds, rows=4, columns=8):
    return np.concatenate([np.random.default_rng(seed).normal(size=(rows, columns // len(seeds))) for seed in seeds], 1)

one, other = np.split(drawn_in_order([1, 1]), 2, axis=1)
print("one seed for both ranks: the same shard twice?", np.array_equal(one, other))
print("a seed for each rank: the same model on 2 and on 4 ranks?",
      np.array_equal(drawn_in_order([1, 2]), drawn_in_order([1, 2, 3, 4])))

# %% [markdown]
# **Samples** are a function of (step, index in the global batch). `samples_of` says which of them a replica takes as
# its microbatch $k$. However they are distributed, together they are the same eight:

# %%
from reference.parallel.data_parallel import samples_of

for d, b in ((1, 4), (2, 1), (2, 2), (8, 1)):
    assigned = [[list(range(BATCH))[samples_of(replica, k, d, b)] for k in range(BATCH // (d * b))]
                for replica in range(d)]
    print(f"d = {d}, b = {b}:", "   ".join(f"replica {replica}: {mine}" for replica, mine in enumerate(assigned[:3])),
          "..." if d > 3 else "")

# %% [markdown]
# Each sample's loss is divided by the size of the *global* batch immediately, $1/(B s)$. So gradients of microbatches
# and replicas are just added, and the distribution of the samples does not change the sum.
#
# **Dropout** is a function of (seed, step, layer, place in the layer, sample, head, position). In attention each rank
# has some heads. Here is the mask of one sample over 8 heads; each rank draws only its own rows, in its own colour:

# %%
from reference.random.dropout import Dropout
from reference.ops import draw_mask

def masks_of(t, sample=3):
    """Return the masks that t ranks draw for their heads: [heads, positions x positions] each."""
    heads = model.num_attention_heads // t
    at = Dropout(model, SEED, step=1, sample=sample).at(layer=2)
    shape, like = (1, heads, POSITIONS, POSITIONS), np.zeros(0)
    return [draw_mask(at.attention(rank * heads), shape, like).keep.reshape(heads, -1) for rank in range(t)]

draw_mask_parts({"one process": masks_of(1), "t = 2": masks_of(2), "t = 4": masks_of(4)},
                "Dropout in attention: white is dropped, colours are ranks")

# %%
print("the same mask?", all(np.array_equal(np.concatenate(masks_of(t)), masks_of(1)[0]) for t in (2, 4, 8)))

# %% [markdown]
# And the classic mistake: every rank believes that its first head is head 0 of the model (`first_head=0`). No error,
# and training goes on. But the heads of different ranks get identical masks, which should be independent:

# %%
mistaken = [masks_of(4)[0]] * 4
draw_mask_parts({"t = 4, right": masks_of(4), "t = 4, every rank begins at head 0": mistaken})

# %% [markdown]
# ## How much each rank has sent
#
# Each rank's *ledger* has recorded what it sent. A rank can predict all of it before the first step: it runs a step by
# itself, on arrays that have shapes and no data (`shardlab/predict`). For the run with $t = p = d = 2$, in one step,
# added up over the two ranks of a pipeline:
#
# **Predict.** With $t = p = d = 2$ a replica takes 2 microbatches of $b = 2$ samples of 6 tokens, $h = 32$, through 4
# layers. How many numbers go into the all-reduces after attention (`attention output`), in the forward of one step?

# %%
guess = ...                # numbers

# %% tags=["hide-output"]
from shardlab.predict.predict import predict_alone, sent_by_pipeline
from shardlab.predict.rank import ImaginedWorld
from shardlab.report.traffic import compare as beside_prediction
from mpi_impl.runtime.tables import aligned
from reference.config import number_of_microbatches
from reference.precision import Precision

def ledger_lines(name, t, p, d, b=1, zero=0):
    m = number_of_microbatches(BATCH, b, d)
    world = ImaginedWorld(model, ParallelConfig(t, p, d, zero_stage=zero), Precision("float64"), b, POSITIONS, m)
    sent = sent_by_pipeline(predict_alone(world), PassCounts(STEPS, STEPS * m, 0, 0))
    return beside_prediction(found[0][name][1], {entry: one for entry, one in sent.items() if entry.phase != "data"})

rows = [["group", "phase", "why", "operation", "calls", "numbers", "predicted", "as predicted"]]
rows += [[line.entry.group, line.entry.phase, line.entry.reason, line.entry.operation, f"{line.total.calls // STEPS}",
          f"{line.total.elements // STEPS:,}", f"{line.predicted.elements // STEPS:,}", str(line.as_predicted)]
         for line in ledger_lines("t = p = d = 2", 2, 2, 2, b=2)]
print(aligned(rows, left=(0, 1, 2, 3, 7)))
outputs = [total.elements // STEPS for entry, total, *_ in ledger_lines("t = p = d = 2", 2, 2, 2, b=2)
           if (entry.reason, entry.phase) == ("attention output", "forward")]
reveal(guess, sum(outputs), "numbers in all-reduces after attention")

# %% [markdown]
# (`model` is the $t \times p$ ranks of a replica, which sum the norm of the gradient. `embedding` is the first and the
# last rank of a pipeline: both use the table of tokens, so its gradients are summed over the two.)
#
# The bytes are counted as if every collective ran as a ring, as in the papers: an all-reduce of $N$ numbers on $n$
# ranks costs each $2N(n-1)/n$. All runs, by the kind of group, measured and predicted:

# %%
from mpi_impl.comm.ledger import ring_bytes
from shardlab.notebook.pictures.charts import draw_bars

options = {"t = 8": (8, 1, 1, 8), "t = p = d = 2": (2, 2, 2, 2), "p = 4, d = 2": (1, 4, 2), "d = 8": (1, 1, 8),
           "d = 8, ZeRO-3": (1, 1, 8, 1, 3), "t = p = d = 2, ZeRO-3": (2, 2, 2, 2, 3)}
measured, predicted = {}, {}
for name, sizes in options.items():
    lines, each = ledger_lines(name, *sizes), 1e3 * STEPS * sizes[1]       # kB, steps, ranks of a pipeline
    measured[name] = dict.fromkeys(("tensor", "pipeline", "data", "other"), 0.0)
    for line in lines:
        kind = line.entry.group if line.entry.group in measured[name] else "other"
        measured[name][kind] += ring_bytes(line.entry, line.total) / each
    predicted[name] = sum(ring_bytes(line.entry, line.predicted) for line in lines) / each
    print(f"{name:<22} all lines as predicted: {all(line.as_predicted for line in lines)}")

# %%
figure = draw_bars(measured, "kB that a rank sends in a step (float64), the mean over its pipeline; | is predicted",
                   unit=" kB")
figure.axes[0].plot([*predicted.values()], range(len(predicted)), "|", color="black", markersize=32, markeredgewidth=2)
figure

# %% [markdown]
# Every line of every ledger is as predicted, to the last element. What do the bars say?
#
# - **Tensor** parallelism sends activations, for every microbatch and layer. That grows with the batch.
# - **Data** parallelism sends gradients, once per step, for any size of the batch. Here the batch is tiny, so it looks
#   expensive; in real training it is the opposite. ZeRO-3 also sends parameters, for every microbatch.
# - **Pipelines** send least. But their ranks wait for one another (walkthrough *Pipelines*), which no ledger shows.
#
# With the sizes of a real model (39 billion parameters, $t = 8$, $p = 2$, $d = 32$, as in table 1 of the paper):
#
# **Predict.** How many GB does a rank send in a step to its tensor-parallel neighbours? (48 microbatches, 24 layers
# on each rank, $4 \cdot 2 \frac{7}{8} b s h$ numbers of 2 bytes, with $s = 2048$ and $h = 8192$.)

# %%
guess = ...                # GB

# %% tags=["hide-output"]
from shardlab.notebook.plan import plan

realistic = plan("39.1B", t=8, p=2, d=32, v=1, m=48, zero_stage=0)
for kind, size in realistic.messages._asdict().items():
    print(f"{kind:<9} {size / 1e9:8.1f} GB a step")
assert (len(realistic.layers), realistic.model.hidden_size) == (24, 8192)
reveal(guess, realistic.messages.tensor / 1e9, "GB to tensor-parallel neighbours")
assert round(parameters(realistic.model) / 1e9) == 39

# %% [markdown]
# ## A bug in one line
#
# Gradients are summed over the replicas in pieces, called buckets. When the last contribution to a bucket has arrived,
# its sum begins. This is the line that begins it:

# %%
from mpi_impl.parallel.data_parallel import Gradients

print(inspect.getsource(Gradients.post))

# %% [markdown]
# Now somebody is careful, and sends a *copy*. The sum arrives in the copy, which nobody reads. Each replica continues
# with its own gradients. We plant the bug in a class of its own, and train with groups of that class on all ranks:

# %%
# %%ranks 8
from mpi_impl.comm.pending import Pending

class CopyingGroup(Group):
    def post_all_reduce(self, x, reason: str) -> Pending:
        return super().post_all_reduce(x.copy(), reason)

buggy = {"t = p = d = 2": train(2, 2, 2, b=2, kind=CopyingGroup), "d = 8": train(1, 1, 8, kind=CopyingGroup)}
print("done, and no error")

# %% [markdown]
# No error, no hang. And the ledger cannot see it either: what was sent is right.

# %%
bad = ranks["buggy"]
with_bug = {f"{name}, with the bug": [step.loss for step in bad[0][name][0]] for name in bad[0]}
print("same ledger:", all(bad[0][name][1].totals == found[0][name][1].totals for name in bad[0]))
draw_curves({"right": alone} | with_bug, "step", "loss", "Gradients that are never summed")

# %% [markdown]
# Both models *learn*. With two replicas the curve might come from a slightly worse learning rate; without a correct
# curve for comparison you would go on training for weeks. Look closer: each replica has learnt from its own samples
# only, so the replicas are no longer copies of one another, and the norms of the gradient that they report differ from
# the first step on:

# %%
for name in bad[0]:
    for what, runs_of_ranks in (("right", found), ("bug", bad)):
        norms = sorted({round(one[name][0][0].grad_norm, 6) for one in runs_of_ranks})
        print(f"{name:<14} {what:<6} norm of the gradient in step 1, over the ranks:", *norms)

# %% [markdown]
# The *loss* of step 1 is right, because nothing has been learnt yet. On a logarithmic scale the difference to one
# process leaves no doubt. Rounding is at the bottom, the bug at the top:

# %%
off = {name: np.maximum(np.abs(np.subtract(curve, alone)), 1e-17) for name, curve in
       {"d = 8": losses["d = 8"], "t = p = d = 2": losses["t = p = d = 2"], **with_bug}.items()}
assert all(max(off[name]) < 1e-12 for name in losses if name in off)
assert all(max(off[name]) > 1e-3 for name in with_bug)
draw_curves(off, "step", "difference", "How far the loss is from one process's", log="y")

# %% [markdown]
# ## Finding out where two runs diverge
#
# We know *that* something is wrong. Where? A `Recorder` keeps every tensor of a step, each with its place in the whole
# tensor, and `compare` names the first, in the order of computation, that differs by more than rounding. First one
# process:

# %%
# %%ranks 8
from shardlab.demos.tiny_gpt import POSITIONS
from shardlab.compare.recorder import Recorder, facts_of

def recorded(world, t, p, d, b):
    with training_on(world, model, ParallelConfig(t, p, d)) as trainer:
        recorder = Recorder(trainer.state)
        trainer.step(share_of(trainer, *global_batch(0, BATCH), b), BATCH, recorder)
        return facts_of(trainer.state, trainer.optimizer.config, BATCH, POSITIONS), recorder.pop_parts()

# %%
# %%ranks 1
record = recorded(group, 1, 1, 1, b=BATCH)

# %%
from shardlab.compare.differences import compare
from shardlab.compare.recording import in_memory

def recording(parts):
    return in_memory(parts[0][0], [one for _, taken in parts for one in taken])

one_process = recording(ranks["record"])

# %%
# %%ranks 8
record = recorded(group, 2, 2, 2, b=2)
record_with_bug = recorded(CopyingGroup(group.comm, "world", group.instruments), 2, 2, 2, b=2)

# %%
from shardlab.compare.report import first

eight_ranks, with_bug = recording(ranks["record"]), recording(ranks["record_with_bug"])
agreed = compare(one_process, eight_ranks)
print(f"Right: {agreed.compared} tensors compared, {len(agreed.differences)} differ.", "With the bug:", "",
      *first(compare(one_process, with_bug)), sep="\n")

# %% [markdown]
# *Reduction* is where gradients are summed over the replicas. Everything before it agrees, activations and each rank's
# own gradients: the bug is exactly there. (In the backward the last layers come first, which is why the final layer
# norm is what it names.)
#
# The same from a shell, for two runs of `pretrain_gpt`: `python -m shardlab.compare "-n 1 ..." "-n 8 ..."`.
#
# ## What to take away
#
# - A rank has a place among $t$, among $p$ and among $d$, and is in one group of each kind. Ranks of a tensor group
#   have consecutive numbers.
# - Tensor groups send activations, four times per layer and microbatch; pipelines activations, once per boundary;
#   replicas gradients, once per step.
# - Weights, samples and dropout are functions of *global* indices. Then every topology gives one and the same run.
# - A run that learns is not necessarily right. Compare with one process, in float64: rounding was below 1e-12, the bug
#   above 1e-3.
#
# ## Try it
#
# 1. Train with `train(4, 2, 1)` and `train(2, 1, 4, zero=2)`, and compare. Why does `train(1, 8, 1)` not work, and what
#    does the message say?
# 2. Plant another bug: on the ranks, `Dropout.attention` with `first_head` always 0 (keep the right one, and restore
#    it). Which topologies notice, and what does `compare` name?
# 3. In the last picture, what would the curves look like in float32? (`FLOAT64` in shardlab/demos/tiny_gpt.py.)
#
# <details><summary>Answer to 2</summary>
#
# ```python
# right = Dropout.attention                         # on the ranks, from reference.random.dropout
# Dropout.attention = lambda self, first_head=0: right(self, 0)
# record = recorded(group, 2, 2, 2, b=2)
# Dropout.attention = right
# ```
#
# With $t = 1$ the first head *is* head 0, so `p = 4, d = 2` and `d = 8` stay within 1e-12 of one process. With
# $t = 2$ and $t = 8$ the loss is wrong from the first step on, by up to 0.25, and falls all the same. `compare` names
# `blocks.0.attention.probs_mask` in the forward of iteration 1, on ranks 1 and 3: those with the second half of the
# heads in the first stage. The 65 tensors before it agree.
#
# </details>
#
# Next: [13. Choosing t, p, d and b](13_choosing_t_p_d_b.ipynb). The demo for this walkthrough:
# `python -m mpi_impl.launch -n 8 -m shardlab.demos.train`.
