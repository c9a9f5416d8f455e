# %% [markdown]
# # 15. Long sequences: positions dealt out to ranks
#
# A rank keeps activations for every position of a text until the backward. With a text of 131,072 tokens they can fill
# a device, even if eight of them shard every layer. *Context parallelism* shards the text: each of $c$ ranks has $s/c$
# of the positions, through the whole model. Only attention needs the others.
#
# **You will** deal out positions so that all ranks have the same work; add up a softmax whose parts are on different
# ranks; send keys around a ring of real ranks; compare three ways to do it; and see what else goes wrong when nobody
# has the whole text, above all the loss.
#
# **You need** walkthroughs *f and g* and *Attention heads*. About 30 minutes.

# %%
# %load_ext shardlab.notebook
from dataclasses import replace

import numpy as np

from shardlab.notebook.pictures.charts import draw_bars, draw_curves
from shardlab.notebook.pictures.positions import draw_deals, draw_ring_of_blocks
from shardlab.notebook.predictions import reveal
from reference.positions import collect, deal, in_order, work_of_ranks, zigzag

c, s = 4, 32

# %% [markdown]
# ## Why another way to shard
#
# How much does a rank keep? Take a model of the size of Llama 3 8B (32 layers, $h = 4096$, 8 heads of keys and values
# for 32 of queries) on 8 tensor-parallel ranks, in 16 bits, with sequence parallelism and a kernel that recomputes
# attention's probabilities. `layer_bytes` lets a rank run a layer without data, and counts the bytes that one text
# leaves there:

# %%
from shardlab.predict.predict import layer_bytes
from shardlab.predict.rank import ImaginedWorld
from reference.config import ModelConfig, ParallelConfig
from reference.precision import Precision

llama = ModelConfig(32, 4096, 32, 128_256, 1 << 20, "rope", hidden_dropout=0.0, attention_dropout=0.0,
                    normalization="RMSNorm", swiglu=True, ffn_hidden_size=14_336, num_query_groups=8,
                    add_bias_linear=False, untie_embeddings_and_output_weights=True)

def gigabytes(length, ranks):
    parallel = ParallelConfig(8, sequence_parallel=True, context_parallel_size=ranks)
    return 32 * layer_bytes(ImaginedWorld(llama, parallel, Precision("bfloat16"), 1, length, 1)) / 1e9

lengths = [1 << n for n in range(12, 21)]
draw_curves({f"c = {n}": [gigabytes(length, n) for length in lengths] for n in (1, 4, 16)}, "tokens in a text",
            "GB on each rank", "activations of one text", x=lengths, log="xy")

# %%
for n in (1, 4, 16):
    print(f"131,072 tokens, c = {n:2}: {gigabytes(131_072, n):2.0f} GB on each rank")
H100, H200 = 80, 141        # GB
assert 0.9 * H100 < gigabytes(131_072, 1) < H100 and gigabytes(131_072, 1) < H200 < 2 * gigabytes(131_072, 1)

# %% [markdown]
# It grows with the text, and a rank also holds weights and optimizer states. 73 GB nearly fill an H100, which has 80.
# (An H200 has 141 GB: there one text of this length fits, two do not.) A batch has at least one text, $t$ is limited by
# the heads, a pipeline has several microbatches in flight, and to compute whole layers again costs a third more time.
# So the largest Llama 3 was trained with $c = 16$ on texts of 131,072 tokens
# ([2407.21783](https://arxiv.org/abs/2407.21783), table 4).
#
# ## Who gets which positions
#
# Norms, MLPs, the embedding and the loss treat every position by itself, so any deal would do. In attention position
# $i$ looks at $i + 1$ positions. So if the ranks take the positions in order, the last rank has the most work. The
# picture shows attention's scores, a row for each query, in the colour of the rank that has the query.

# %%
draw_deals({"in order": in_order(c, s), "zigzag": zigzag(c, s)})

# %% [markdown]
# *Zigzag* cuts the text into $2c$ chunks and gives rank $i$ the chunks $i$ and $2c-1-i$: a short row from the front and
# a long one from the back. The bars count pairs of a query and a key that it sees, and here they are the same on all
# ranks, to the last pair. In order, the last rank of a long text has $(2c-1)/c$ times the mean, and everybody waits for
# it.
#
# **Predict.** In order, how many pairs has the last of the 4 ranks, with positions 24 to 31?

# %%
guess = ...                # pairs

# %% tags=["hide-output"]
for name, chunks in (("in order", in_order(c, s)), ("zigzag", zigzag(c, s))):
    print(f"{name}: {work_of_ranks(chunks)}")
print("rank 1 has", zigzag(c, s)[1])
reveal(guess, work_of_ranks(in_order(c, s))[-1], "pairs on the last rank, in order")
long = work_of_ranks(in_order(c, 1 << 20))
assert np.isclose(long[-1] / np.mean(long), (2 * c - 1) / c, atol=1e-5)

# %% [markdown]
# ## A softmax in parts
#
# A query's result is $\sum_j e^{x_j} v_j \,/\, \sum_j e^{x_j}$, with its scores $x_j$. Two parts of the keys give two
# numerators and two denominators, which can be added. (To average the two *results* is wrong: the part with the higher
# scores must count for more.) But $e^{x}$ overflows, so each part subtracts its own largest score $m$. Then the parts
# have other units, and before the sum each is multiplied by $e^{m - M}$, $M$ the larger of both:

# %%
from reference.layers.online_softmax import block_attention, finish, merge
from reference.ops import attention_core

q, k, v = np.random.default_rng(1).normal(size=(3, 1, 8, 1, 4))       # [b, s, heads, d]
q, k = 5 * q, 5 * k
whole, _ = attention_core(q, k, v, causal=False)
first, second = (block_attention(q, k[:, part], v[:, part], False) for part in (slice(0, 3), slice(3, 8)))
print("merged:  ", np.abs(finish(merge(first, second)) - whole).max())
print("averaged:", np.abs((finish(first) + finish(second)) / 2 - whole).max())

# %% [markdown]
# That is *online softmax* ([Milakov and Gimelshein 2018](https://arxiv.org/abs/1805.02867)), the trick of
# FlashAttention. There the parts are tiles in a fast memory; here they are on other ranks.
#
# ## The ring
#
# Each rank begins with its own keys and values. While it attends to them, it sends them to the next rank, and receives
# those of the rank before ([Liu et al. 2023](https://arxiv.org/abs/2310.01889)). After $c - 1$ steps it has seen all.
# The picture shows which scores each rank computes in which step:

# %%
draw_ring_of_blocks(zigzag(c, s))

# %% [markdown]
# After the first step every rank has two blocks to compute, in every step: with keys from the front, both of its chunks
# of queries see the earlier chunk of keys; with keys from the back, its later chunk sees both. So no step waits for one
# slow rank. On real ranks, with dropout on attention's probabilities:

# %%
from reference.random.dropout import Dropout
from reference.ops import CoreInputs, attention_core_backward

model = ModelConfig(1, 8, 2, 10, s, attention_dropout=0.1)
site = Dropout(model, seed=1, step=1, layer=0).attention()
inputs, dy = CoreInputs(*np.random.default_rng(2).normal(size=(3, 1, s, 2, 4)), True, site), np.random.default_rng(
    3).normal(size=(1, s, 2, 4))
ranks["inputs"], ranks["dy"], ranks["chunks"] = inputs, dy, zigzag(c, s)

# %% [markdown]
# **Predict.** Keys and values are $[1, 8, 2, 4]$ each on a rank. How many elements of them does a rank send in the
# forward, with 4 ranks in the ring?

# %%
guess = ...                # elements

# %% tags=["hide-output"]
# %%ranks 4
from shardlab.demos.printing import traffic_table
from mpi_impl.layers.context_attention import ring_attention_backward, ring_attention_forward
from reference.positions import take

mine = inputs._replace(**{name: take(getattr(inputs, name), chunks[rank]) for name in "qkv"})
with group.ledger.phase("forward"):
    y, cache = ring_attention_forward(mine, chunks, group)
sent = group.ledger.elements(operation="send")
with group.ledger.phase("backward"):
    gradients = ring_attention_backward(take(dy, chunks[rank]), cache, chunks, group)
print(traffic_table(group.ledger))

# %% tags=["hide-output"]
reveal(guess, ranks["sent"][0], "elements that a rank sends in the forward")

# %%
whole, core = attention_core(*inputs)
print("the result is that of one rank:", np.allclose(collect(ranks["y"], zigzag(c, s)), whole))
for name, mine, right in zip(("dQ", "dK", "dV"), zip(*ranks["gradients"]), attention_core_backward(dy, core)):
    print(f"{name} too:", np.allclose(collect(mine, zigzag(c, s)), right))

# %% [markdown]
# The backward sends two things instead of one. It needs all keys and values again, so they go around once more. And
# each rank finds a part of $dK$ and $dV$ of keys that are not its own. These parts travel behind the keys, one step
# later: each rank adds its own, and passes on, until they are home. (To keep them where they were found is a classic
# bug, and so is to compute the backward from the rank's *own* keys, which are the ones that its forward has saved: see
# [diffusers #14265](https://github.com/huggingface/diffusers/issues/14265). Neither raises an error.)
#
# ## Three ways
#
# Megatron's `--cp-comm-type` knows more ways than the ring, and so do we:
#
# | | what moves | elements that a rank sends in a layer |
# |---|---|---|
# | `p2p` | keys and values around the ring, gradients behind them | $6 b \tfrac{s}{c} d g (c-1)$ |
# | `all_gather` | all keys and values to every rank; gradients reduce-scattered | the same |
# | `a2a` | heads for positions: queries, keys, values, results | $4 b \tfrac{s}{c} d (a + g) \tfrac{c-1}{c}$ |
#
# Here $a$ is the number of heads of queries and $g$ that of keys on a rank, $d$ the size of a head. The first two do
# not send queries. So with *grouped queries*, where several of them share a head of keys, they send less: with 8
# instead of 32 heads of keys a quarter. What the third way sends shrinks as $c$ grows, but it needs $c$ heads of keys
# on every tensor-parallel rank, or more.

# %%
from shardlab.predict.predict import predict_alone
from shardlab.predict.rank import ImaginedWorld

def elements(way, groups, ranks, length=131_072):
    """Let a rank run a step by itself, on arrays without data, and count what it sends."""
    layer = replace(llama, num_layers=1, num_query_groups=groups, max_position_embeddings=length)
    parallel = ParallelConfig(1, context_parallel_size=ranks, cp_comm_type=way)
    (rank,) = predict_alone(ImaginedWorld(layer, parallel, Precision("bfloat16"), 1, length, 1))
    return sum(total.elements * (1 if entry.operation == "send" else (ranks - 1) / ranks)
               for entry, total in rank.step.items() if entry.group == "context") / 1e6

sizes = [2, 4, 8]
draw_bars({f"{way}, {groups} heads of keys, c = {n}": {way: elements(way, groups, n)}
           for way in ("p2p", "a2a") for groups in (32, 8) for n in sizes},
          "million elements that a rank sends in a layer", "131,072 tokens, h = 4096")

# %% [markdown]
# The ring hides its messages behind the blocks that are computed meanwhile. How long must a text be for that? A block
# of $n = s/(2c)$ queries and keys costs about $4 n^2 d$ operations for each head of queries, and two of them cover the
# message of a step, $4 n d$ elements for each head of keys. So the operations for an element grow with $n$, and with
# $a/g$: long texts, and grouped queries, hide it.
#
# ## All that depends on the position
#
# The rest of the model must not notice. What needs to know where a rank's positions are:
#
# - rope and the table of positions: a chunk begins where it begins in the text;
# - dropout's masks, if the run shall be the same on any number of ranks;
# - the targets: the token after a chunk's last one is on another rank. (So they are dealt out, not shifted afterwards.)
# - padding, whose lengths count from the beginning of the text;
# - the **loss**.
#
# Suppose the first part of a text is a question, whose tokens do not count. Then ranks have different numbers of tokens
# that count. What is the loss? The sum over all of them, divided by their number. A rank that divides by *its* number
# and lets the ranks average is wrong, and looks right as long as all tokens count
# ([Megatron-LM #7452](https://github.com/NVIDIA/Megatron-LM/issues/7452) is such a case):
#
# **Predict.** If a single token counts in the whole text, how large is the wrong loss, relative to the right one, on
# 4 ranks?

# %%
guess = ...                # as a share: 1 would be right

# %% tags=["hide-output"]
from reference.parallel.data_parallel import mean_of_means, weighted_loss

losses, weights = np.random.default_rng(4).normal(3, 1, s), (np.arange(s) > 20).astype(int)
dealt, counted = deal(losses, zigzag(c, s), 0), deal(weights, zigzag(c, s), 0)
print("tokens that count on each rank:", [int(own.sum()) for own in counted])
print(f"right: {weighted_loss(dealt, counted)[0]:.4f}; "
      f"the mean of the ranks' means: {mean_of_means(dealt, counted)[0]:.4f}")
one = np.zeros(s)
one[-1] = 1
reveal(guess, mean_of_means(dealt, deal(one, zigzag(c, s), 0))[0] / losses[-1], "of the right loss")

# %% [markdown]
# (In order, one rank would have all of them. That is no reason for zigzag, but it makes the bug larger.)
#
# ## Together with everything else
#
# To all other ranks a context rank is one more copy of the weights: gradients are summed over $c \times d$ ranks, and
# ZeRO shards over them. Sequence parallelism shards a rank's $s/c$ positions again, over $t$; a pipeline sends $1/c$.
# Here is a GPT's training on four ranks in three ways, and in one process:

# %%
from reference.batches import GPTBatch
from reference.optimizers.adam import OptimizerConfig
from reference.training import trainer as training

gpt = ModelConfig(2, 16, 4, 11, 16, make_vocab_size_divisible_by=1)
optimizer = OptimizerConfig(1e-2, 10)
words = np.random.default_rng(5).integers(0, 11, (4, 2, 17))          # [steps, samples, s + 1]
textbook = training.Trainer(gpt, optimizer, 1, Precision("float64"))
curve = [textbook.step(GPTBatch.unpack(batch))[0] for batch in words]
ranks["gpt"], ranks["optimizer"], ranks["words"] = gpt, optimizer, words

# %%
# %%ranks 4
from mpi_impl.comm.topology import connect, disconnect
from mpi_impl.parallel.model_state import ModelState
from mpi_impl.training.trainer import Trainer
from reference.batches import GPTBatch
from reference.config import ParallelConfig
from reference.positions import SequencePart, zigzag
from reference.precision import Precision

def train(parallel):
    topology = connect(group, parallel)
    trainer = Trainer(ModelState(gpt, topology, 1, Precision("float64")), optimizer)
    part = SequencePart(topology.context.rank, zigzag(topology.context.size, 16))
    found = [trainer.step([GPTBatch.unpack(batch).at(part)], 2).loss for batch in words]
    disconnect(topology)
    return found

curves = {"a ring of four": train(ParallelConfig(context_parallel_size=4, zero_stage=3)),
          "t = 2, c = 2, gathered": train(ParallelConfig(2, context_parallel_size=2, cp_comm_type="all_gather",
                                                         sequence_parallel=True)),
          "p = 2, c = 2, exchanged": train(ParallelConfig(1, 2, context_parallel_size=2, cp_comm_type="a2a"))}

# %%
for name, found in ranks["curves"][0].items():
    print(f"{name}: {' '.join(f'{loss:.6f}' for loss in found)}, off by less than 1e-12: "
          f"{np.abs(np.subtract(found, curve)).max() < 1e-12}")

# %% [markdown]
# ## What to take away
#
# - Context parallelism is the only one that shards activations along the text all the way through.
# - Zigzag gives each rank an early chunk and a late one, and so the same share of a causal mask.
# - Online softmax adds up parts: three numbers for each query, whoever computes them, in any order.
# - Keys travel or are gathered; or heads are exchanged for positions. Grouped queries make the first two cheaper.
# - A loss is a sum over all ranks divided by a sum over all ranks.
#
# ## Try it
#
# 1. Without a causal mask (a BERT) every query sees every key. Which deal is best then, and does zigzag do any harm?
#    `work_of_ranks(..., causal=False)` tells you.
# 2. A document mask lets a token see only its own document. Make documents of random lengths and count the pairs of
#    each rank with zigzag. How uneven is it? What could you do about it?
# 3. In `mpi_impl/layers/context_attention.py`, let `with_others` forget to add. Which gradients are wrong on how many
#    ranks? On two ranks, and on four? Which loss curve would you see? (`tests/zoo/context_parallelism.py` has seventeen
#    such mistakes.)
# 4. How many elements does the ring send in the forward if only the queries travelled, with their `m`, `l` and `o`,
#    instead of keys and values? When would that be less?
#
# <details><summary>Answer to 2</summary>
#
# ```python
# def pairs_of(lengths, chunks):
#     seen = np.concatenate([np.arange(1, n + 1) for n in lengths])        # keys that each position sees
#     return np.array([sum(seen[chunk].sum() for chunk in mine) for mine in chunks])
# ```
#
# With `lengths=[4096]` all four ranks of `zigzag(4, 4096)` have 2,097,664 pairs. With 200 texts of random documents
# (lengths from an exponential distribution, mean 512) the slowest rank has 1.54 times the mean on average, and 2.47
# times at worst; with a mean of 64, 1.30 times. A token's work depends on its place in its *document*, and zigzag
# looks at its place in the text. Distribute each document in zigzag by itself, or give texts to ranks so that the
# sums are even.
#
# </details>
#
# Next: [16. Experts](16_experts.ipynb). The demo for this walkthrough:
# `python -m mpi_impl.launch -n 4 -m shardlab.demos.context_parallel`.
