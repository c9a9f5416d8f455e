# %% [markdown]
# # 16. Experts
#
# A larger model learns more, but every token pays for all of it. A *mixture of experts* has many MLPs in place of
# one, and a token pays for two of them. Which two, a *router* decides, and it must learn to.
#
# **You will** route tokens; sort them by expert and back; deal out experts to four ranks, and watch the tokens travel;
# find out whose gradients are whole already; see a loss that depends on the number of ranks, and one that does not; and
# see why a capacity makes another run of every topology.
#
# **You need** walkthroughs *f and g* and *Data parallelism* (replicas). About 30 minutes.

# %%
# %load_ext shardlab.notebook
import inspect
from dataclasses import replace

import numpy as np

from shardlab.notebook.pictures.charts import draw_bars, draw_curves
from shardlab.notebook.pictures.dispatch import draw_dispatch
from shardlab.notebook.predictions import reveal
from reference.config import ExpertsConfig, ModelConfig

# %% [markdown]
# ## Parameters grow with the experts, work with those that are used
#
# Take a small GPT, and put 2, 4, 8 experts in place of each MLP, of which every token uses 2. The parameters grow
# with the number of experts. The work of a token grows with the number that it uses:
#
# **Predict.** By how much does the *work* of a token grow with 8 experts, of which it uses 2?

# %%
guess = ...                # times the work of one MLP's GPT

# %% tags=["hide-output"]
from reference.costs.flops import forward_flops
from reference.costs.parameters import parameters

dense = ModelConfig(num_layers=4, hidden_size=64, num_attention_heads=4, vocab_size=512, max_position_embeddings=64)
models = {"an MLP": dense} | {f"{E} experts": replace(dense, experts=ExpertsConfig(E, 2)) for E in (2, 4, 8)}
draw_bars({name: {"parameters": parameters(c) / parameters(dense)} for name, c in models.items()},
          "parameters, relative to a GPT with MLPs")

# %% tags=["hide-output"]
work = {name: sum(forward_flops(c, 1, 64)) for name, c in models.items()}
reveal(guess, work["8 experts"] / work["an MLP"], "times the FLOPs of a token")
assert f"{parameters(models['8 experts']) / parameters(dense):.1f}" == "4.9"
assert f"{work['8 experts'] / work['an MLP']:.1f}" == "1.5"
draw_bars({name: {"FLOPs": flops / work["an MLP"]} for name, flops in work.items()},
          "FLOPs of a token, relative to a GPT with MLPs")

# %% [markdown]
# ## The router
#
# It is one matrix, $[h, E]$. Softmax of its $E$ *logits* gives a probability to each expert, and the $k$ largest are
# chosen. The output is the sum of the $k$ experts' outputs, weighted by their probabilities, which are divided by their
# sum, so that they add up to 1.

# %%
from reference.layers.router import route, top_k

print(inspect.getsource(route))
print(inspect.getsource(top_k))

# %%
c = ExpertsConfig(num_experts=4, moe_router_topk=2)
logits = np.array([[[2.0, 0.0, 1.0, -1.0], [0.0, 0.0, 0.0, 0.0], [-1.0, 3.0, 0.0, 3.0]]])     # [b, s, E]
routing = route(logits, c)
for token in range(3):
    print(f"token {token}: experts {routing.ids[0, token]}, weights {np.round(routing.weights[0, token], 3)}")

# %% [markdown]
# If two logits are equal, the expert with the smaller number wins. (Ranks that compute the same logits must choose the
# same experts, so no rank may toss a coin.) The choice itself has no derivative. The weights have one, and through them
# the router learns which expert helps.
#
# ## Dispatch and combine
#
# An expert should be a matrix product with many rows, not one row at a time. So each token is copied for each of its
# experts, and the copies are sorted by expert. Afterwards they return to their tokens. Both ways are a permutation:

# %%
from reference.layers.dispatch import combine, dispatch, order_of

order = order_of(routing.ids, c)
print("copies, as token x 2 + choice:", order.copies)
print("of each expert:               ", order.counts)

x = np.array([[[1.0], [10.0], [100.0]]])                 # a number for each token
print("dispatched:                   ", dispatch(x, order).ravel())
print("and combined again:           ", combine(dispatch(x, order), routing.weights, order).ravel())

# %% [markdown]
# The weights of a token add up to 1, so experts that change nothing give back the token. An expert without tokens is a
# matrix without rows, and no token is ever dropped.
#
# ## Experts on four ranks
#
# With *expert parallelism* the ranks of data parallelism share the experts: $e$ ranks, $E/e$ experts on each.
# Attention, norms and the router stay on every rank, and every rank has samples of its own. So a copy travels to the
# rank of its expert. That is an *all-to-all*: every rank has a message for every other, each of another length. How
# long they are, nobody knows before the router has chosen, so the ranks first tell each other their counts.

# %%
# %%ranks 4
import numpy as np

from mpi_impl.comm.regions import TensorParallelRegion
from mpi_impl.layers.experts import experts_forward
from reference.config import ExpertsConfig, ModelConfig
from reference.layers.experts import experts_tensors
from reference.params import deal, initialize

c = ModelConfig(1, 8, 1, 1, 12, init_method_std=0.5, experts=ExpertsConfig(8, 2, moe_ffn_hidden_size=16))
whole = initialize(experts_tensors(c), 1, np.float64)
mine = deal(whole, experts_tensors(c), 4)[rank]          # two of eight experts, and the whole router
x = np.random.default_rng(rank).normal(size=(1, 12, 8))  # a sample of this rank's own
alone = group.split(rank, "alone")                       # t = 1: no rank shares the layer with others
y, cache = experts_forward(x, mine, c, TensorParallelRegion(alone, group))
counts = cache.order.counts                              # [4, 8]: of all ranks
shapes = [tensor.shape for tensor in (mine.router, mine.experts.w_in)]

# %%
print("router and first matrices on each rank:", ranks["shapes"])
draw_dispatch(ranks["counts"][0], "copies travel to their experts")

# %% [markdown]
# On the left each rank's own copies, on the right the matrices of the experts, with rows from all ranks. The results
# travel back along the same bands. Is it what one process computes, with all experts and all samples?

# %%
from reference.layers.experts import experts_backward, experts_forward, experts_tensors
from reference.params import deal, initialize

c = ModelConfig(1, 8, 1, 1, 12, init_method_std=0.5, experts=ExpertsConfig(8, 2, moe_ffn_hidden_size=16))
whole = initialize(experts_tensors(c), 1, np.float64)
everyone = np.concatenate(ranks["x"])                    # four samples
y, cache = experts_forward(everyone, whole, c)
print("the same?", abs(np.concatenate(ranks["y"]) - y).max() < 1e-14)

# %% [markdown]
# ## Whose gradient is whole?
#
# In data parallelism every gradient is a partial sum, and all replicas add them up. Not those of experts. Expert 5 is
# on one rank, and has seen the tokens of all four: its gradient is the sum already. The textbook deals out experts over
# a list:

# %%
from reference.layer_context import LayerContext
from reference.layers.experts import averaged_gradients, dealt_experts_backward, dealt_experts_forward

dy = np.random.default_rng(9).normal(size=everyone.shape)
_, expected = experts_backward(dy, whole, cache, c)

shards = deal(whole, experts_tensors(c), 4)
_, caches = dealt_experts_forward(np.split(everyone, 4), shards, c, [LayerContext()] * 4)
_, found = dealt_experts_backward(np.split(dy, 4), shards, caches, c)
print("experts, without any sum:", abs(found[2].experts.w_in - expected.experts.w_in[4:6]).max() < 1e-13)
print("router, after the sum:   ", abs(found[2].router - expected.router).max() < 1e-13)

# %% [markdown]
# ### The wrong way: divide everything by the number of copies
#
# Frameworks often let each replica take the mean over *its own* tokens, and average the gradients afterwards: they
# divide by the number of ranks that hold a copy. A router is on four ranks. An expert is on one, so it is divided by 1:
#
# **Predict.** Four ranks, one copy of each expert. How many times too large is an expert's gradient?

# %%
guess = ...                # times

# %% tags=["hide-output"]
_, local = dealt_experts_backward(np.split(4 * dy, 4), shards, caches, c)     # each mean has a quarter of the tokens
wrong = averaged_gradients(local)
print(f"the router's gradient is {(wrong[0].router / expected.router).mean():.3f} times the right one,",
      f"an expert's {(wrong[0].experts.w_out / expected.experts.w_out[:2]).mean():.3f} times")
ratio = (wrong[0].experts.w_out / expected.experts.w_out[:2]).mean()
reveal(guess, ratio.round(9), "times the right gradient of an expert")

# %% [markdown]
# DeepSpeed (#6546) and Megatron's FSDP (#5956) had this mistake. Training goes on, and Adam even hides it, but another
# $e$ is another run. Here each loss is divided by the tokens of the *global* batch, and gradients are only added up:
# over all replicas, or, for experts, over those that hold copies of them.
#
# ## A loss that keeps the load even
#
# Nothing said so far keeps a router from sending all tokens to one expert, which then learns most, and is chosen more.
# So a *load-balancing loss* is added: $E \sum_e f_e P_e$, where $f_e$ is the share of choices that fell on expert $e$
# and $P_e$ its mean probability. It is 1 if both are even.
#
# Here are eight experts that learn $y = \sin 2x$, of which each token uses one. All tokens have something in common
# (the mean of their numbers is not 0, as in a real model), so one expert is ahead from the start:

# %%
from shardlab.notebook.pictures.charts import draw_loads
from reference.layer_context import AuxiliaryLosses
from reference.params import tree_map

def loads(coefficient):
    """Train for 150 steps, and return the share of the tokens that each expert gets [steps, 8]."""
    c = ModelConfig(1, 8, 1, 1, 32, init_method_std=0.1,
                    experts=ExpertsConfig(8, 1, moe_router_pre_softmax=True, moe_aux_loss_coeff=coefficient))
    p, found = initialize(experts_tensors(c), 1, np.float64), []
    for step in range(150):
        x = np.random.default_rng(step).normal(0.5, 1, (4, 32, 8))
        y, cache = experts_forward(x, p, c, LayerContext(auxiliary=AuxiliaryLosses(4, 128)))
        _, grads = experts_backward((y - np.sin(2 * x)) / 64, p, cache, c)
        p = tree_map(lambda weight, grad: weight - 0.3 * grad, p, grads)
        found.append(cache.order.counts / 128)
    return np.array(found)

runs = {"without the loss": loads(0), "with 0.1 times the loss": loads(0.1)}
print("the busiest expert in the last ten steps:", *(f"{run[-10:].mean(0).max():.0%}" for run in runs.values()))
draw_loads(runs)

# %% [markdown]
# Without the loss the router *collapses*: the expert that is ahead learns from more tokens, so it serves them better
# and is chosen more. The other seven take as much memory, and hardly compute. With the loss, every choice of a busy
# expert costs something, and the tokens are divided. (In so short a run the collapsed layer even fits $y$ a little
# better, since one expert that sees most tokens learns fastest. It wastes the room of the others.)
#
# Over which tokens are the shares and the means? Usually over a microbatch. But then it matters how large that is:

# %%
from reference.layers.router import balance_of_microbatches

routing = route(2 * np.random.default_rng(1).normal(size=(8, 4, 4)), ExpertsConfig(4, 2))    # a batch of 8 samples
for parts in 1, 2, 4, 8:
    print(f"{parts} microbatches: {balance_of_microbatches(routing.probs, routing.ids, parts):.4f}")

# %% [markdown]
# A mean of products is not the product of means. With this loss the number of replicas, and the size of a microbatch,
# change what is learnt. The last line, the loss of each *sequence*, averaged over the sequences, can be computed on any
# ranks: that is the definition here (and Megatron's `seq_aux_loss`). Ranks that share a sequence add up their counts.
#
# Now train a tiny GPT with eight experts on four ranks: on each all experts, or four, or two. And without ranks:

# %%
# %%ranks 4
from mpi_impl.comm.group import Group, Instruments
from shardlab.demos.tiny_gpt import global_batch, share_of, tiny_gpt, training_on
from reference.config import ParallelConfig

def train(e, zero_stage=0, steps=12):
    """Train on four replicas, e of which share the experts; return both losses, and the elements this rank holds."""
    experts = ExpertsConfig(8, 2, moe_aux_loss_coeff=0.1)
    model = replace(tiny_gpt(2), experts=experts)
    parallel = ParallelConfig(data_parallel_size=4, expert_model_parallel_size=e, zero_stage=zero_stage)
    with training_on(Group(group.comm, group.name, Instruments()), model, parallel) as trainer:
        results = [trainer.step(share_of(trainer, *global_batch(step, 8), b=1), 8) for step in range(steps)]
        return {"losses": [one.loss for one in results], "balance": [one.auxiliary[0] / 2 for one in results],
                "elements": trainer.state.layout.size}

from dataclasses import replace

runs = {(e, stage): train(e, stage) for e, stage in ((1, 0), (2, 0), (4, 0), (4, 3))}

# %% [markdown]
# **Predict.** With all experts on each rank, $e = 1$, a rank has 9,856 parameters, of which 8,832 are of experts. How
# many does it have with $e = 4$?

# %%
guess = ...                # parameters

# %% tags=["hide-output"]
from shardlab.demos.tiny_gpt import global_batch, textbook_of, tiny_gpt
from reference.batches import GPTBatch

textbook = textbook_of(replace(tiny_gpt(2), experts=ExpertsConfig(8, 2, moe_aux_loss_coeff=0.1)))
losses, balance = [], []
for step in range(12):
    losses.append(textbook.step(GPTBatch(*global_batch(step, 8)))[0])
    balance.append(textbook.auxiliary[0] / 2)            # of two layers
for (e, stage), one in ranks["runs"][0].items():
    print(f"e = {e}, ZeRO {stage}: same losses {np.allclose(one['losses'], losses, rtol=1e-12, atol=0)},",
          f"same balance {np.allclose(one['balance'], balance, rtol=1e-12, atol=0)};",
          f"parameters on a rank, gathered or not: {one['elements']:,}")
elements = {e: ranks["runs"][0][e, 0]["elements"] for e in (1, 4)}
assert elements[1] == 9856 and 4 * (elements[1] - elements[4]) == 3 * 8832
reveal(guess, elements[4], "parameters on a rank with e = 4")

# %%
draw_curves({"loss": losses, "load balance": balance}, "step", "loss", "one curve for every e")

# %% [markdown]
# ## Why a capacity makes another run
#
# Matrices of any number of rows are awkward for some devices, and so some frameworks give each expert room for so many
# copies, and drop the rest. Here is a sample whose fate depends on its neighbours: in a microbatch of its own, and with
# another sample before it.

# %%
few = ExpertsConfig(4, 2, moe_expert_capacity_factor=1.0)
one = np.array([[[2, 3], [0, 1], [2, 1], [0, 3]]])       # the choices of four tokens
other = np.array([[[0, 3], [0, 3], [0, 3], [0, 1]]])     # of another sample

for name, ids in ("alone", one), ("together", np.concatenate([other, one])):
    order = order_of(ids, few)
    kept = combine(np.ones((len(order.copies), 1)), np.ones(ids.shape), order)[-1, :, 0].astype(int)
    print(f"{name:8}: an expert takes {ids.size // 4} copies; of each token of the sample {kept} are kept")

# %% [markdown]
# So the same sample computes something else in a microbatch of another size, or on another rank. That is why
# `--verify` refuses `--moe-expert-capacity-factor`, and why it is off unless you ask for it.
#
# ## What to take away
#
# - Experts add parameters, and a token pays for those that it uses. With 2 of 8 the GPT above has 4.9 times the
#   parameters, and 1.5 times the work.
# - Dispatch and combine are a permutation and its inverse; between ranks, an all-to-all each.
# - A gradient is summed over the ranks that hold a copy of its tensor: all replicas for the router, fewer for an
#   expert.
# - Only a loss that is a mean over the same things on any ranks gives the same run on any ranks.
#
# ## Try it
#
# 1. Megatron dispatches each rank's own positions under sequence parallelism, and gathers over $t$ what has arrived.
#    Here all positions are gathered first. How many numbers does each way send over $e$, and over $t$?
# 2. With $k = 1$ and weights that are renormalised, what is the router's gradient, and why does `ExpertsConfig` refuse
#    that?
# 3. An expert's last bias is on all $t$ tensor-parallel ranks, as the bias after attention is. With sequence
#    parallelism the gradient of one of the two must be summed over $t$. Which, and why not the other?
# 4. ZeRO-1 divides the moments of experts by $d c / e$, not by $d c$. With 8 replicas and $e = 8$, what does it save of
#    them?
#
# <details><summary>Answer to 2</summary>
#
# It is 0. One weight, divided by the sum of the chosen weights, is $p/p = 1$, whatever the logits are, and a constant
# has no gradient. Move each logit of token 0 (`z = [2, 0, 1, -1]`) a little up and down, and see how the weight
# changes:
#
# ```python
# def weight(z, renormalize):                       # softmax is in reference.ops
#     return softmax(z).max() / (softmax(z).max() if renormalize else 1)
# ```
#
# Renormalized, all four slopes are 0.0; else they are 0.229, -0.056, -0.153 and -0.021. So `ExpertsConfig(4, 1)` is
# refused: "softmax over the chosen expert alone is always 1, and the router would never learn from the loss". Such a
# run would raise no error, and its router would stay as it was drawn (but for the loss that balances loads).
#
# </details>
#
# Next: [17. A bridge to PyTorch](17_a_bridge_to_pytorch.ipynb). The demo for this walkthrough:
# `python -m mpi_impl.launch -n 4 -m shardlab.demos.experts`.
