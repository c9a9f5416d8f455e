# %% [markdown]
# # Lab 4. A loss that never sees all the logits
#
# The logits are the largest array of a training step: $b\, s\, V$ numbers, one for every token of the vocabulary at
# every position. They are computed in shards, by vocabulary, and must stay sharded: gathering them would send more than
# all layers together. In this lab you build a loss with label smoothing and a z-loss from logits of which every rank
# has only its own shard, with four numbers sent per position, for logits of any size; its backward, which sends
# nothing; and the other parts of a training step around it.
#
# **You need**: walkthrough *Embedding and loss*. **Time**: about five hours. **Points**: 60, and 10 for words.
#
# Labs work as lab 1 explains: cells that begin with `%%answer` are yours, checks run them on separate ranks, and the
# checks that give the points also try other sizes and numbers of ranks. An answer may use functions of other answers,
# but nothing from the locked cells or this project's packages.

# %%
# %load_ext course.grading
import numpy as np

from course.grading import each, run

# %% [markdown]
# ## The loss
#
# The logits of a position are $x_v$, one for each token $v$ of the $V$ in the vocabulary, and its target is the token
# $t$. With
#
# $$\mathrm{lse} = \log \sum_v e^{x_v}, \qquad \mathrm{nll}(v) = \mathrm{lse} - x_v = -\log p_v$$
#
# the plain loss is $\mathrm{nll}(t)$. Ours has two more terms:
#
# $$L = (1 - \varepsilon)\, \mathrm{nll}(t) + \frac{\varepsilon}{V} \sum_v \mathrm{nll}(v) + \zeta\, \mathrm{lse}^2$$
#
# - **Label smoothing** (Szegedy et al. 2016, [arXiv 1512.00567](https://arxiv.org/abs/1512.00567), section 7): instead
#   of $1$ for the target and $0$ for the others, the model should predict $1 - \varepsilon + \varepsilon/V$ and
#   $\varepsilon/V$.
# - **z-loss** (Chowdhery et al. 2022, *PaLM*, [arXiv 2204.02311](https://arxiv.org/abs/2204.02311), section 5): lse is
#   pulled to 0, so that logits do not drift.
#
# Three more things are as in real training:
#
# - **Padding.** The table of tokens is often longer than the vocabulary. Tokens with an id of $V$ or more do not exist:
#   their logits are $-\infty$, they have no probability, no gradient, and no part in the mean over the vocabulary.
# - **Ignored tokens.** A target of $-100$ means that the token does not count: its loss is 0, and so is its gradient.
# - **Size.** Logits may be $\pm 10{,}000$ and more. $e^{710}$ is too large for a float64.
#
# This is the whole loss with its backward, on one process. Your ranks must agree with it.

# %% locked="whole"
import numpy as np

from course.grading import (check_data, count_kept, each, expect, expect_equal, expect_near, expect_sent, expect_values,
                            passed, run)

IGNORED = -100


def whole_loss(logits, targets, V, eps, zeta, dloss):
    """Return loss [b, s], dlogits [b, s, P] for logits [b, s, P], P >= V, and targets and upstream gradient [b, s]."""
    exists, count = np.arange(logits.shape[-1]) < V, (targets != IGNORED)[..., None]
    smooth = (1 - eps) * (np.arange(logits.shape[-1]) == targets[..., None]) + eps / V * exists    # [b, s, P]
    top = logits.max(-1, keepdims=True)
    lse = top + np.log(np.exp(logits - top).sum(-1, keepdims=True))                 # [b, s, 1]
    loss = lse - (smooth * np.where(exists, logits, 0)).sum(-1, keepdims=True) + zeta * lse ** 2
    dlogits = (1 + 2 * zeta * lse) * np.exp(logits - lse) - smooth                  # e^(x - lse) is the probability
    return np.where(count, loss, 0)[..., 0], np.where(count, dloss[..., None] * dlogits, 0)


# %% locked="tools"
def batch(random, P, V, scale=1.0, b=2, s=4):
    """Draw logits of P tokens, V of which exist; targets, some of them ignored; and dloss."""
    logits, targets = scale * random.normal(size=(b, s, P)), random.integers(V, size=(b, s))
    logits[..., V:] = -np.inf
    targets[0, 1] = targets[1, 2] = IGNORED
    return logits, targets, random.normal(size=(b, s))


def logits_by_rank(logits, n):
    """Return each rank's logits, and the id of its first token."""
    parts = np.array_split(logits, n, axis=-1)
    return parts, [sum(part.shape[-1] for part in parts[:rank]) for rank in range(n)]


def expect_reduced(outcome, least, most, hint):
    """Check that each rank has sent what an all-reduce of at least and at most so many numbers costs."""
    n = len(outcome.sent)
    expect_sent(outcome, 2 * least * (n - 1) // n, 2 * most * (n - 1) // n, f"an all-reduce of {most} numbers", hint)


# %% [markdown]
# ## 1. log-sum-exp over the ranks
#
# A rank has $[b, s, n_r]$ logits: those of its tokens. The numbers $n_r$ differ; a rank may have no tokens at all
# ($n_r = 0$), or only tokens that do not exist. All ranks need $\mathrm{lse}$, $[b, s]$.
#
# For any number $m$, $\log \sum_v e^{x_v} = m + \log \sum_v e^{x_v - m}$. Which $m$ is safe, if one rank's logits are
# 10,000 and another's are $-10{,}000$, or $-\infty$?
#
# In this lab `group` can do one thing: `group.all_reduce(x)` gives the sum of all ranks' `x`, on every rank, and
# `group.all_reduce(x, "max")` the largest, element by element. Here **two numbers per token** are enough.

# %% answer="log_sum_exp"
# %%answer log_sum_exp
import numpy as np


def log_sum_exp(group, logits):
    """Return lse [b, s] over all ranks' tokens, identical on all ranks. logits: [b, s, n_r], of this rank's tokens."""
    ### BEGIN SOLUTION
    highest = group.all_reduce(logits.max(axis=-1, initial=-np.inf), "max")
    return highest + np.log(group.all_reduce(np.exp(logits - highest[..., None]).sum(axis=-1)))
    ### END SOLUTION


# %% [markdown]
# To see what your code does, run it with logits of your own. `each([a, b])` gives every rank a different array. What
# should the result be here?

# %%
run(2, "log_sum_exp", each([np.full((1, 1, 3), -1e4), np.zeros((1, 1, 1))])).results

# %% check="check_log_sum_exp" points=8
# log-sum-exp: of all ranks' logits, however large, with two numbers per token
REDUCE = ("all_reduce",)


def check_log_sum_exp(P, V, n, scale=1.0):
    logits, _, _ = batch(check_data("log_sum_exp"), P, V, scale)
    outcome = run(n, "log_sum_exp", each(logits_by_rank(logits, n)[0]), allow=REDUCE,
                  hint="all ranks must come to every all-reduce; and the maximum of no numbers is an error, or -inf.")
    top = logits.max(-1)
    expect_equal(outcome.results, [top + np.log(np.exp(logits - top[..., None]).sum(-1))] * n, "lse",
                 "all ranks must subtract the same number, or their sums cannot be added.")
    expect_reduced(outcome, top.size, 2 * top.size, "a maximum and a sum for each token.")


for n in (2, 4):
    check_log_sum_exp(8, 8, n)
passed("log_sum_exp on 2 and 4 ranks")
### BEGIN HIDDEN TESTS
for P, V, n, scale in ((7, 7, 3, 1e4), (3, 3, 5, 1.0), (13, 9, 4, 1.0)):
    check_log_sum_exp(P, V, n, scale)
### END HIDDEN TESTS

# %% [markdown]
# ## 2. The most probable token
#
# To generate text, or to count how often a model is right, we need the token with the largest logit: its id, a whole
# number, $[b, s]$. This rank's first token has the id `start`, the next one `start + 1`, and so on. If several tokens
# have the same, largest logit, it is the one with the lowest id. Again two numbers per token are enough. There is no
# `group.all_reduce(x, "min")`, and you do not need one.

# %% answer="predict"
# %%answer predict
import numpy as np


def predict(group, logits, start):
    """Return the id [b, s] of the most probable token, on all ranks. logits: [b, s, n_r], of start, start + 1, ..."""
    ### BEGIN SOLUTION
    highest = group.all_reduce(logits.max(axis=-1, initial=-np.inf), "max")
    ids, none = start + np.arange(logits.shape[-1]), 2 ** 40
    lowest = np.where(logits == highest[..., None], ids, none).min(axis=-1, initial=none)
    return -group.all_reduce(-lowest, "max")
    ### END SOLUTION


# %% check="check_predict" points=8
# The most probable token: its id, the lowest if several have the largest logit, with two numbers per token
def check_predict(P, V, n, ties=False):
    logits, _, _ = batch(check_data("predict"), P, V)
    if ties:
        logits[..., :V] = np.round(logits[..., :V] / 2)
    parts, starts = logits_by_rank(logits, n)
    outcome = run(n, "predict", each(parts), each(starts), allow=REDUCE,
                  hint="all ranks must come to every all-reduce, also one without tokens.")
    expect_equal(outcome.results, [logits.argmax(-1)] * n, "the most probable token",
                 "which ranks have the largest logit? Of those, which id is the lowest?", 0)
    expect_reduced(outcome, 8, 2 * 8, "first the largest logit, then the tokens that have it.")


for n in (2, 4):
    check_predict(8, 8, n)
passed("predict on 2 and 4 ranks")
### BEGIN HIDDEN TESTS
for P, V, n, ties in ((11, 11, 4, True), (13, 9, 4, False), (3, 3, 5, True)):
    check_predict(P, V, n, ties)
### END HIDDEN TESTS

# %% [markdown]
# ## 3. The loss, forward
#
# Every rank gets the logits of its tokens, the targets (of all ranks' tokens; identical on all ranks), the id `start`
# of its first token, the number `V` of tokens that exist, $\varepsilon$ and $\zeta$. It returns the loss $[b, s]$,
# identical on all ranks, and a cache for the backward: numbers, arrays, or tuples, lists and dicts of them.
#
# Shoeybi et al. 2019 ([arXiv 1909.08053](https://arxiv.org/abs/1909.08053), section 3) send $b s$ numbers instead of
# $b s V$ by computing the loss where the logits are. Here **four numbers per token** may be sent. What does each term
# of $L$ need from the other ranks? In the cache there may be **one** array of the size of the rank's logits, and six
# numbers per token.
#
# Look out: $0 \cdot (-\infty)$ is not 0. And a target of another rank, or $-100$, minus `start` is an index, too, to
# NumPy.

# %% answer="loss_forward"
# %%answer loss_forward
import numpy as np


def loss_forward(group, logits, targets, start, V, eps, zeta):
    """Return loss [b, s], on all ranks, and a cache. logits: [b, s, n_r], of start, start + 1, ...; targets: [b, s]."""
    ### BEGIN SOLUTION
    lse, ids = log_sum_exp(group, logits), start + np.arange(logits.shape[-1])
    wanted = np.where(ids == targets[..., None], 1 - eps, 0.0) + np.where(ids < V, eps / V, 0.0)
    picked = group.all_reduce((wanted * np.where(ids < V, logits, 0)).sum(axis=-1))
    counts = targets != -100
    probs = np.exp(logits - lse[..., None])
    slope = (probs * (1 + 2 * zeta * lse)[..., None] - wanted) * counts[..., None]
    return np.where(counts, lse - picked + zeta * lse * lse, 0.0), slope
    ### END SOLUTION


# %% check="check_loss" points=10
# The loss: nll of the target, smoothed, and the z-loss; 0 for ignored tokens
def run_loss(P, V, n, eps, zeta, scale=1.0):
    """Run loss_forward. Return the outcome, each rank's cache, and the batch."""
    logits, targets, dloss = batch(check_data("loss"), P, V, scale)
    parts, starts = logits_by_rank(logits, n)
    outcome = run(n, "loss_forward", each(parts), targets, each(starts), V, eps, zeta, allow=REDUCE,
                  elements=4 * targets.size, hint="all ranks must come to every all-reduce, also one without tokens.")
    losses, caches = expect_values(outcome.results, ("loss", "cache"))
    return outcome._replace(results=losses), caches, (logits, targets, dloss)


def check_loss(P, V, n, eps=0.1, zeta=0.01, scale=1.0):
    outcome, _, (logits, targets, dloss) = run_loss(P, V, n, eps, zeta, scale)
    expect_equal(outcome.results, [whole_loss(logits, targets, V, eps, zeta, dloss)[0]] * n, "the loss",
                 "try it with eps = 0 and zeta = 0 first. The mean is over all V tokens, not the rank's; a target "
                 "is on one rank only; and -100 is no token.")


for n in (2, 4):
    check_loss(8, 8, n)
passed("loss_forward on 2 and 4 ranks")
### BEGIN HIDDEN TESTS
for V, n, eps, zeta in ((7, 1, 0.3, 0.1), (61, 4, 0.1, 0.0), (9, 8, 0.0, 0.1)):
    check_loss(V, V, n, eps, zeta)
### END HIDDEN TESTS

# %% check="check_extreme" points=6
# The loss with huge logits, with padding, and with ranks that have no tokens
check_loss(8, 8, 2, zeta=1e-4, scale=1e4)
passed("loss_forward of logits of 10,000")
### BEGIN HIDDEN TESTS
for P, V, n, eps, scale in ((67, 61, 4, 0.1, 1.0), (13, 9, 4, 0.0, 1e4), (3, 3, 5, 0.2, 1.0)):
    check_loss(P, V, n, eps, 1e-4, scale)
### END HIDDEN TESTS

# %% check="check_cost" points=6
# The loss: four numbers per token are sent, and one array of logits is kept
def check_cost(V, n):
    outcome, caches, (logits, targets, dloss) = run_loss(V, V, n, eps=0.1, zeta=0.01)
    expect_near(outcome.results, [whole_loss(logits, targets, V, 0.1, 0.01, dloss)[0]] * n, "the loss")
    expect_reduced(outcome, 2 * (targets != IGNORED).sum(), 4 * targets.size, "a rank needs no other's logits, but a "
                   "few sums over them. Terms of one sum can be added up before they are sent.")
    for rank, (cache, part) in enumerate(zip(caches, logits_by_rank(logits, n)[0])):
        may = part.size + 6 * targets.size + 6
        expect(count_kept(cache) <= may, f"rank {rank} keeps {count_kept(cache):,} elements for the backward; {may:,} "
               "are enough.", "which information of the logits, besides the probabilities, does the gradient need?")


check_cost(64, 4)
passed("loss_forward sends and keeps no more than needed")
### BEGIN HIDDEN TESTS
for V, n in ((37, 2), (50, 8)):
    check_cost(V, n)
### END HIDDEN TESTS

# %% [markdown]
# ## 4. The loss, backward
#
# The upstream gradient is $\partial L_{\text{total}} / \partial L$, a number for each position, identical on all ranks.
# Each rank returns the gradient of **its** logits, $[b, s, n_r]$. Derive it before you look at the whole loss above:
# what is $\partial\, \mathrm{lse} / \partial x_v$? Nothing is sent.

# %% answer="loss_backward"
# %%answer loss_backward
import numpy as np


def loss_backward(group, dloss, cache):
    """Return the gradient of this rank's logits [b, s, n_r]. dloss [b, s] is identical on all ranks."""
    ### BEGIN SOLUTION
    return dloss[..., None] * cache
    ### END SOLUTION


# %% check="check_backward" points=12 also="loss_forward"
# The loss, backward: the gradient of a rank's own logits, with nothing sent
def check_backward(P, V, n, eps=0.1, zeta=0.01, scale=1.0):
    _, caches, (logits, targets, dloss) = run_loss(P, V, n, eps, zeta, scale)
    outcome = run(n, "loss_backward", dloss, each(caches), allow=(), hint="the forward already has everything "
                  "that the backward needs from other ranks: keep it.")
    right = whole_loss(logits, targets, V, eps, zeta, dloss)[1]
    expect_equal(outcome.results, logits_by_rank(right, n)[0], "the gradient of its logits",
                 "a sum of three: from lse (in every term!), from the target, from the mean; times dloss. None of it "
                 "for tokens that are ignored or that do not exist.")


for n in (2, 4):
    check_backward(8, 8, n)
passed("loss_backward on 2 and 4 ranks")
### BEGIN HIDDEN TESTS
for P, V, n, eps, zeta, scale in ((7, 7, 1, 0.3, 0.1, 1.0), (67, 61, 4, 0.1, 0.01, 1.0), (3, 3, 5, 0.2, 0.0, 1.0),
                                  (11, 11, 3, 0.1, 1e-4, 1e4)):
    check_backward(P, V, n, eps, zeta, scale)
### END HIDDEN TESTS

# %% [markdown]
# ## 5. The mean over the tokens that count
#
# Now the ranks are *replicas*: each has its own samples, with the loss of all of its tokens, $[b_r, s]$, and their
# targets. The loss of the step is the mean over all tokens **of all ranks** that count. It is not the mean of the
# ranks' means: a rank may have many ignored tokens, fewer samples than others, or none.
#
# `mean_loss` returns the mean, identical on all ranks, and its gradient with respect to this rank's `loss`, which
# `loss_backward` gets as `dloss`. If no token counts anywhere, both are 0. Two numbers in one all-reduce are enough.

# %% answer="mean_loss"
# %%answer mean_loss
import numpy as np


def mean_loss(group, loss, targets):
    """Return the mean over all ranks, and dloss [b_r, s]. loss and targets: [b_r, s], of this rank's own samples."""
    ### BEGIN SOLUTION
    counts = targets != -100
    total, number = group.all_reduce(np.array([loss[counts].sum(), counts.sum()]))
    return total / max(number, 1), counts / max(number, 1)
    ### END SOLUTION


# %% check="check_mean" points=10
# The mean over all ranks' tokens that count, its gradient, and two numbers sent
def check_mean(samples, ignored, s=5):
    """Check mean_loss with these numbers of samples, and of ignored tokens (chosen at random), on the ranks."""
    n, random = len(samples), check_data("mean")
    losses = [random.uniform(1, 9, size=(b, s)) for b in samples]
    targets = [random.integers(7, size=(b, s)) for b in samples]
    for loss, target, some in zip(losses, targets, ignored):
        at = random.permutation(loss.size)[:some]
        loss.flat[at], target.flat[at] = 0, IGNORED
    number = max(sum((target != IGNORED).sum() for target in targets), 1)
    outcome = run(n, "mean_loss", each(losses), each(targets), allow=REDUCE)
    means, dlosses = expect_values(outcome.results, ("mean", "dloss"))
    expect_equal(means, [sum(loss.sum() for loss in losses) / number] * n, "the mean",
                 "how many tokens count on all ranks together? And if there are none?")
    expect_equal(dlosses, [(target != IGNORED) / number for target in targets], "dloss",
                 "by how much does the mean grow with the loss of one token? With that of an ignored one?")
    expect_reduced(outcome, 2, 2, "what must a rank know about the other ranks' tokens?")


check_mean((2, 2), (1, 4))
check_mean((1, 2, 1, 2), (0, 6, 3, 1))
passed("mean_loss on 2 and 4 replicas")
### BEGIN HIDDEN TESTS
for samples, ignored in (((3,), (4,)), ((1, 0, 2), (5, 0, 1)), ((1, 1), (5, 5))):
    check_mean(samples, ignored)
### END HIDDEN TESTS

# %% [markdown]
# ## To think about
#
# - With $b = 8$, $s = 2048$ and $V = 128{,}000$ on 8 ranks, how many bytes does a rank send for your loss, in float32?
#   And if it gathered the logits? Compare with the two all-reduces of one layer with $h = 4096$.
# - Every number per token that you send is summed in another order for another number of ranks. On which of them does
#   it matter most if logits are near 10,000 and computed in float32?
# - Add 5 to all logits of a token. Which terms of $L$ change? What may the logits of a model without z-loss do in a
#   long training, and what does it harm if they are computed in 16 bits?

# %% [markdown]
# ## In your own words
#
# Ten points are for two answers in words, which a person reads: at most 150 words each, with a reason for every claim.
# Write below each question, where it says YOUR ANSWER HERE. A double click opens the cell.
#
# **First** (5 points). Why can the loss be computed from four numbers for each token, while the softmax of attention
# over *positions* that are spread over ranks needs an exchange of whole vectors? Say for each of your four numbers
# which term of $L$ needs it, and whether it could be sent together with another one.

# %% [markdown] writing="four_numbers" points=5
# YOUR ANSWER HERE

# %% [markdown]
# **Second** (5 points). Replica 0 has 1,000 tokens that count, replica 1 has 10. Somebody averages the two replicas'
# mean losses. Which tokens get which weight now, compared with the right mean? Would the loss curve show it? Describe
# a data set with which the model would learn something else.

# %% [markdown] writing="the_mean_of_means" points=5
# YOUR ANSWER HERE
