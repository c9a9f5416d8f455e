# %% [markdown]
# # 20. Inference: one token at a time
#
# A trained model is read much more often than it is trained. A GPT writes a text token by token, and each token needs
# all weights once. So what was a large matrix product in training becomes thin, and memory, not arithmetic, sets the
# time. Three ideas of this walkthrough are answers to that: keep what never changes, shard it by heads, and let the
# texts of many users share a step.
#
# **You will** count what a KV cache saves, and what it costs; break its positions; see why decoding waits for memory;
# generate on four ranks and count their messages; and schedule requests in static and in continuous batches, whose
# texts you then compare.
#
# **You need** walkthroughs [*Splitting matrices*](01_splitting_matrices.ipynb), [*f and g*](02_f_and_g.ipynb) and
# [*Attention heads*](04_attention_heads.ipynb). About 30 minutes.

# %%
# %load_ext shardlab.notebook
from dataclasses import replace

import numpy as np

from shardlab.notebook.pictures.batches import draw_batches
from shardlab.notebook.pictures.charts import draw_bars, draw_curves
from shardlab.notebook.predictions import reveal
from reference.config import ModelConfig
from reference.kv_cache import KVCache, empty_kv_cache
from reference.models.gpt import gpt_logits, gpt_tensors, next_logits
from reference.params import initialize

c = ModelConfig(num_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=64, max_position_embeddings=128,
                untie_embeddings_and_output_weights=True, init_method_std=0.3)
p = initialize(gpt_tensors(c), 1, np.float64)
prompt, count = [3, 1, 4, 1], 100

# %% [markdown]
# ## Why a cache
#
# To choose the next token, a GPT needs the hidden state of the *last* position. In the simplest program, every token is
# a forward of the whole text so far. But a position attends only to itself and to earlier ones. So what was computed
# for these is the same as before: a longer text does not change it. And a new position needs only two things of an
# earlier one, in each layer: its key and its value (walkthrough *Attention heads*). Keep them, and a new token costs
# one position.
#
# Here are both programs, which always take the likeliest token. The model has not learned anything, which does not
# matter.

# %%
def without_cache(prompt, count):
    """Return a text, and how many positions its forwards have computed."""
    text, computed = list(prompt), 0
    for _ in range(count):
        computed += len(text)
        text.append(int(gpt_logits(np.array([text]), p, c)[0, -1].argmax()))
    return text, computed

def with_cache(prompt, count, kv_cache):
    """Return the same, but show each token to the model once."""
    text, computed = list(prompt), 0
    for _ in range(count):
        new = text[computed:]
        computed += len(new)
        text.append(int(next_logits(np.array([new]), p, c, kv_cache)[0].argmax()))
    return text, computed

kv_cache = empty_kv_cache(c, p.blocks, 128, p.embedding.word)
text, computed = with_cache(prompt, count, kv_cache)
print("with a cache:", computed, "positions;", text[:12], "...")

# %% [markdown]
# With the cache, 103 positions were computed: the 4 of the prompt, in one forward, and one for each token but the last,
# which nobody has asked what follows. Without it, the first token takes 4 positions, the next 5, and so on.
#
# **Predict.** How many positions do the forwards for 100 tokens compute without a cache?

# %%
guess = ...                # positions

# %% tags=["hide-output"]
slow, positions = without_cache(prompt, count)
print("the same text:", slow == text)
reveal(guess, positions, "positions without a cache")

# %% [markdown]
# It grows with the square of the length, and matrix products in proportion to it. (The scores of attention need all
# keys in both programs.)
#
# ## The wrong way: a cache that forgets where it is
#
# A new token arrives alone, as a sequence of length 1. So somebody has to say that it is not at position 0. Our cache
# says it: `runs` returns the positions of new tokens. This one does not know how many it has seen:

# %%
class ForgetfulCache(KVCache):
    def runs(self, new):
        return [new]                   # right: self.length + new.start to self.length + new.stop

forgetful = {layer: ForgetfulCache(1, 128, 4, 8, p.embedding.word) for layer in p.blocks}
wrong, _ = with_cache(prompt, count, forgetful)
same = [a == b for a, b in zip(wrong, text)]
print("the same up to the prompt's end, and one token more:", same[:5])
print("of the rest:", sum(same[5:]), "of", len(same[5:]))

# %% [markdown]
# The prompt's forward begins at position 0, so the first token is right, and a test of one token passes. After it every
# token claims to be the first. No shape is wrong, and a trained model still writes words, only worse ones. That is
# why our test compares the logits of *every* prefix with those of a whole forward.
#
# ## What the cache costs
#
# A position has a key and a value in each of $L$ layers, each of $d$ numbers for each of $g$ heads of keys and values.
# In a text of $s$ positions that is
#
# $$2\,L\,s\,g\,d \cdot \text{bytes of a number.}$$
#
# In the models so far, $g = a$ and $g\,d = h$. With *grouped queries*
# ([Ainslie et al. 2023](https://arxiv.org/abs/2305.13245)) several heads of queries share one head of keys and values,
# and the cache shrinks by $a/g$. Llama 2 70B has 80 layers, 64 heads of 128 numbers, and $g = 8$.
#
# **Predict.** How many GB is its cache for one text of 4,096 positions, in 16 bits?

# %%
guess = ...                # GB

# %% tags=["hide-output"]
llama = ModelConfig(num_layers=80, hidden_size=8192, num_attention_heads=64, num_query_groups=8, ffn_hidden_size=28672,
                    vocab_size=32000, max_position_embeddings=4096, position_embedding_type="rope", swiglu=True,
                    normalization="RMSNorm", add_bias_linear=False, untie_embeddings_and_output_weights=True)

def position_bytes(c):
    """Return the bytes of the arrays of a cache with room for one position, in 16 bits."""
    one_position = empty_kv_cache(c, range(c.num_layers), 1, np.empty(0, np.float16))
    return sum(layer.k.nbytes + layer.v.nbytes for layer in one_position.values())

ungrouped = replace(llama, num_query_groups=64)
assert position_bytes(llama) == 2 * 80 * 8 * 128 * 2
reveal(guess, 4096 * position_bytes(llama) / 1e9, "GB for one text")
draw_bars({f"g = {c.num_query_groups}": {"cache": 4096 * position_bytes(c) / 1e9} for c in (llama, ungrouped)},
          "GB of KV cache for a text of 4,096 positions", unit=" GB")

# %% [markdown]
# ## Prefill and decode
#
# The forward of the prompt is called *prefill*, each later forward *decode*. They use a device in opposite ways. For
# each token a weight takes part in one multiplication and one addition: 2 FLOPs. In 16 bits it has 2 bytes, which are
# read once in a step. So a step of $n$ tokens does $n$ FLOPs for each byte of weights: its *arithmetic intensity*. A
# prefill of $1000$ tokens has an intensity of $1000$. A decode step of one text has 1.
#
# A device computes so many FLOPs in the time in which it reads a byte; with less intensity, it waits for memory.

# %%
peak, bandwidth = 312e12, 2.039e12      # FLOP/s and bytes a second: an A100 of 80 GB, by its data sheet
print(f"an A100 computes {peak / 1e12:g} TFLOP/s and reads {bandwidth / 1e12:g} TB/s")

# %% [markdown]
# **Predict.** How many tokens must a step have at least, so that the A100 does not wait for weights?

# %%
guess = ...                # tokens

# %% tags=["hide-output"]
from reference.costs.parameters import parameters

weights = parameters(llama)

def share_of_peak(texts, read):
    """Return the share of the peak that decode reaches, if each text reads so many bytes of cache."""
    computing, reading = 2 * weights * texts / peak, (2 * weights + texts * read) / bandwidth
    return computing / max(computing, reading)

reveal(guess, peak / bandwidth, "tokens")
batch = [2**i for i in range(11)]
draw_curves({name: [share_of_peak(texts, read) for texts in batch] for name, read in {
    "weights alone": 0, "and 4,096 cached positions, g = 8": 4096 * position_bytes(llama),
    "and 4,096 cached positions, g = 64": 4096 * position_bytes(ungrouped)}.items()},
            "texts in a decode step", "share of the peak", "Llama 2 70B on A100s, at best", x=batch, log="xy")

# %% [markdown]
# A prompt alone fills the device. Decode does not, unless many texts decode together, since then they share the reading
# of weights. But nobody shares a cache: every text reads its own. So with long texts the curve bends, and
# more texts gain little. Grouped queries move the bend.
#
# ## On real ranks
#
# Tensor parallelism needs nothing new. A rank computes queries, keys and values of its own heads, so it keeps the
# cache of these heads, $1/t$ of all. Nothing of the cache is ever sent. What is sent, as in training, is g: one
# all-reduce behind attention and one behind the MLP, of the *new* positions alone. The embedding, sharded by
# vocabulary, has one too; and the logits, sharded in the same way, are gathered to choose a token. Two texts are
# generated on four ranks. First the prefill, then one decode step:
#
# **Predict.** How many elements go into all-reduces in the decode step of two texts, with $L = 2$ and $h = 32$?

# %%
guess = ...                # elements

# %% tags=["hide-output"]
ranks["c"], ranks["prompts"] = c, [prompt, [2, 7, 1, 8]]

# %% tags=["hide-output"]
# %%ranks 4
from shardlab.demos.tiny_gpt import training_on
from mpi_impl.inference.decoding import last_logits
from mpi_impl.inference.replica import trained_replica
from reference.config import ParallelConfig

with training_on(group, c, ParallelConfig(tensor_model_parallel_size=size)) as trainer:
    replica = trained_replica(trainer)                    # the same initial weights as p
    kv_cache = replica.empty_kv_cache(10, texts=2)
    first = last_logits(replica, prompts, kv_cache).argmax(-1)
    prefill = group.ledger.elements(operation="all_reduce")
    second = last_logits(replica, first[:, None].tolist(), kv_cache).argmax(-1)
    decode = group.ledger.elements(operation="all_reduce") - prefill
shape = kv_cache[0].k.shape

# %% tags=["hide-output"]
print("keys of a layer on each rank, [b, positions, a/t, d]:", ranks["shape"])
print("the same tokens on each rank:", np.transpose([ranks["first"][0], ranks["second"][0]]).tolist() ==
      [with_cache(one, 2, empty_kv_cache(c, p.blocks, 10, p.embedding.word))[0][4:] for one in ranks["prompts"][0]])
print("formula, (2 L + 1) b h:", (2 * 2 + 1) * 2 * 32, "  prefill, 4 positions each:", ranks["prefill"][0])
reveal(guess, ranks["decode"][0], "elements in all-reduces, decode")

# %% [markdown]
# These messages are small, so their number counts, not their size: each of the $2L + 1$ all-reduces waits for
# its latency. That is why tensor-parallel decoding stays within a server.
#
# ## Who shares a step?
#
# More texts in a step, then. But requests arrive when they like, and end when they like. A *static* batch takes
# the first that fit into its slots, and no other until the longest is finished. In the textbook a schedule is data: a
# list of steps, each with its requests (`reference/generation/batching.py`).

# %%
from reference.generation.batching import Request, Server, continuous_batches, latencies, static_batches, throughput

outputs = [9, 2, 3, 2, 2, 8, 3, 2, 4, 2]
requests = [Request(arrival=0, prompt=3, output=output) for output in outputs]
server = Server(slots=4)                       # every step takes a time of 1
static = static_batches(requests, server)
print(len(static), "steps for", sum(outputs), "tokens in 4 slots")

# %% [markdown]
# Three batches, of $9 + 8 + 4$ steps. A *continuous* batch is chosen again before each step
# ([Yu et al. 2022](https://www.usenix.org/conference/osdi22/presentation/yu)): as soon as a request is finished, the
# next one takes its slot.
#
# **Predict.** How many steps do these ten requests take now? (Draw four rows, and put each request into the first one
# that is free.)

# %%
guess = ...                # steps

# %% tags=["hide-output"]
continuous = continuous_batches(requests, server)
reveal(guess, len(continuous), "steps in continuous batches")
draw_batches({"static": static, "continuous": continuous}, server.slots)

# %% [markdown]
# A colour is a request, and its number stands in its prefill. In the static picture the holes are slots that wait for
# the longest text. The continuous one takes as few steps as 37 tokens in 4 slots can.
#
# Now with a time for each token, and requests that arrive one after another:

# %%
later = [request._replace(arrival=2 * i) for i, request in enumerate(requests)]
server = Server(slots=4, step_time=1, token_time=0.1)
for way in static_batches, continuous_batches:
    steps = way(later, server)
    first, each = np.mean(latencies(later, steps), axis=0)
    print(f"{way.__name__:18} first token after {first:.2f}, then one in {each:.2f};",
          f"{throughput(steps):.2f} tokens a unit of time")

# %% [markdown]
# The first token comes much sooner. The next ones may be a little slower: a step in which somebody's prompt
# is computed takes longer for *all* its requests. Is continuous never worse? If all requests are there at the start
# and none loses its cache, it never ends later: our tests state that. Otherwise there are exceptions, such as a long
# request that arrives just after a step has begun, and they are in the tests, too.
#
# ## The texts must not notice
#
# A step of continuous batching has prompts and single tokens side by side, of requests at different positions. A matrix
# of weights does not mind: it treats every position by itself, so all new tokens go through as *one* sequence. Only
# attention must know whose token it is, and there each request uses its own cache. (Yu et al. call it selective
# batching, and pad nothing.) `PackedCache` does that. Both schedules on four ranks:

# %%
from reference.generation.decoding import Sampling, generate

prompts = np.random.default_rng(5).integers(64, size=(10, 3)).tolist()
greedy = Sampling(temperature=0)
alone = [generate([one], request.output, p, c, greedy)[0] for one, request in zip(prompts, requests)]
ranks["prompts"], ranks["schedules"], ranks["greedy"] = prompts, [static, continuous], greedy

# %%
# %%ranks 4
from reference.generation.batching import serve

with training_on(group, c, ParallelConfig(tensor_model_parallel_size=size)) as trainer:
    replica = trained_replica(trainer)
    texts = [serve(prompts, steps, greedy, lambda: replica.empty_kv_cache(12),
                   lambda tokens, kv_cache: last_logits(replica, tokens, kv_cache)) for steps in schedules]

# %%
print("each text is that of its request alone:", [[each == alone for each in texts] for texts in ranks["texts"]])

# %% [markdown]
# ## Pages
#
# How many requests fit is a question of the cache, and nobody knows how long a text will be. If a request gets one
# piece of memory for the longest text that is allowed, most of it stays empty. *Paged* attention
# ([Kwon et al. 2023](https://arxiv.org/abs/2309.06180)) gives a request a small *block* of positions when it needs one,
# anywhere in memory. Then only the last block of a request has room that is not used.
#
# **Predict.** With blocks of 16 positions and texts of any length, how many positions of a request are wasted at its
# end, on average?

# %%
guess = ...                # positions

# %% tags=["hide-output"]
random = np.random.default_rng(7)
many = [Request(0, int(random.integers(1, 41)), int(random.integers(1, 81))) for _ in range(300)]
reveal(guess, np.mean([-request.positions % 16 for request in many]), "positions of 300 requests")

# %% [markdown]
# The same 1,024 positions of memory, in blocks of four sizes. The longest text may have 128 positions:

# %%
for block in 128, 64, 16, 1:
    steps = continuous_batches(many, Server(slots=300, blocks=1024 // block, block=block))
    used = sum(work.positions for step in steps for work in step.work.values())
    taken = sum(-(-work.positions // block) * block for step in steps for work in step.work.values())
    prefills = sum(work.tokens == work.positions for step in steps for work in step.work.values())
    print(f"blocks of {block:3}: {1 - used / taken:3.0%} of them empty, {throughput(steps):4.1f} texts in a step,",
          f"{prefills - len(many)} requests lost their cache")

# %% [markdown]
# Small blocks hold far more texts in the same memory, so a step's weights serve more of them. The price is in the last
# column: since nobody reserves the end of a text, blocks can run out. Then the request that came last gives up its
# cache, waits, and computes it again, in a second prefill. (That is free here, where every step takes a time of 1.)
# Those before it go on, so nobody waits forever.
#
# ## What to take away
#
# - Keys and values of earlier positions never change. A cache of $2\,L\,s\,g\,d$ numbers turns a forward of the whole
#   text into one of a single position, which has to say where it is.
# - Prefill computes; decode reads. Texts that decode together share the weights, but not their caches.
# - Tensor parallelism shards the cache by heads, and sends $b\,h$ numbers $2L + 1$ times for each token.
# - Whoever is finished should leave the batch, and whoever waits should join: a schedule is a choice before each step.
#   It changes how long a text takes, never the text.
# - Blocks waste less than one block for each text.
#
# ## Try it
#
# 1. Let all ten requests have an output of 4. What do continuous batches gain now? What must requests have, for them to
#    gain much?
#
# <details><summary>Answer</summary>
#
# Nothing in steps: both take three batches of 4 steps, since all slots become free at the same time. Continuous batches
# gain if lengths differ: a static batch of $n$ slots wastes what the longest takes beyond the mean, in each slot. They
# also gain if requests arrive one by one, since a request need not wait for a batch to end.
#
# </details>
#
# 2. With $g = 8$ heads of keys and values on $t = 16$ ranks, how many heads does each rank cache? What does that do to
#    the cache of all ranks together?
# 3. Give request 5 a prompt of 40 tokens, with `token_time=0.1`. What do the users of the other slots notice? How
#    could a scheduler spare them?
# 4. In the last cell, try `slots=12`. Why do so few slots make blocks of 1 and of 16 nearly the same?
#
# Next: [21. How fast could it be?](21_roofline.ipynb). With `shardlab generate` models that have learned something do
# what you saw here: [generation](../docs/generation.md).
