# %% [markdown]
# # Lab 6. ZeRO, with a momentum and a norm
#
# In data-parallel training every replica keeps the whole optimizer, though all of them compute the same thing with it.
# ZeRO (Rajbhandari et al. 2020) lets each keep a shard: of the optimizer states in stage 1, of the gradients, too, in
# stage 2. In this lab you build both. The optimizer is SGD with momentum and with clipping by the global norm, batches
# are uneven, and nothing divides by the number of ranks. At the end you read a checkpoint that another number of ranks
# has written.
#
# **You need**: lab 1, and walkthroughs *Data parallelism* and *ZeRO*. **Time**: about five hours. **Points**:
# 60, and 10 for words.
#
# As in lab 1: cells that begin with `%%answer` are yours, a check runs them in separate processes, and the checks that
# give the points try more sizes than you see. An answer may call the functions of other answers, but not those of other
# cells.
#
# Letters: $N$ parameters in all, $d$ replicas (ranks).

# %%
# %load_ext course.grading
import numpy as np

from course.grading import each, run

# %% locked="tools"
import numpy as np

from course.grading import check_data, each, expect, expect_equal, expect_sent, passed, run

COLLECTIVES = ("reduce_scatter", "all_gather", "all_reduce")
MESSAGES = ("send", "receive", "exchange")
FEW = 8                 # single numbers that may be sent in a step
LR, MU = 0.1, 0.8       # learning rate and momentum in the checks


def data(random, sizes, n):
    """Draw for every rank its samples, x [sizes[rank], n] and y [sizes[rank]]."""
    return [(random.normal(size=(size, n)), random.normal(size=size)) for size in sizes]


def join(batches):
    """Join batches to one."""
    return tuple(np.concatenate(part) for part in zip(*batches))


def mean_gradient(params, x, y):
    """Return the gradient of the loss (x w - y)^2 / 2, averaged over the samples; 0 if there are none."""
    return x.T @ (x @ params - y) / max(len(y), 1)


def whole_step(params, momentum, gradient, clip):
    """Return the new params and momentum of one process: clip by the norm, then SGD with momentum."""
    norm = np.linalg.norm(gradient)
    momentum = MU * momentum + gradient * (min(1, clip / norm) if norm > 0 else 1)
    return params - LR * momentum, momentum


def expect_pairs(outcome, what):
    """Check that every rank has returned two arrays."""
    for rank, found in enumerate(outcome.results):
        expect(isinstance(found, list | tuple) and len(found) == 2, f"rank {rank}: expected two arrays, {what}; got "
               f"{type(found).__name__}.", "return params, momentum")


def momentum_parts(momentum, d):
    """Split the momentum over d ranks."""
    return np.array_split(momentum, d)


def expect_step(outcome, params, momentum, what, hint):
    """Check that every rank has returned all new parameters, and its part of the new momentum."""
    expect_pairs(outcome, "the new params and its part of the new momentum")
    d = len(outcome.results)
    expect_equal([found[1] for found in outcome.results], momentum_parts(momentum, d),
                 f"{what}: its part of the momentum", hint)
    expect_equal([found[0] for found in outcome.results], [params] * d, f"{what}: params", hint)


# %% [markdown]
# ## One flat buffer
#
# A model has many tensors, a collective needs one array. So all parameters are stored in one *flat buffer*, one tensor
# after the other, each row by row (as `reshape(-1)` gives it). Write three functions:
#
# - `to_flat(tensors)`: a list of arrays of any shapes -> one 1-d array;
# - `from_flat(flat, shapes)`: the inverse, a list of arrays of these shapes;
# - `bounds(n, d)`: rank $r$ *owns* the elements from `bounds[r]` up to, but not including, `bounds[r + 1]`. Split as
#   `np.array_split` does: if $d$ does not divide $n$, the first ranks have one element more. -> a list of $d + 1$
#   numbers.
#
# Note that a rank's part does not respect tensors: it may begin in the middle of one.

# %% answer="layout"
# %%answer layout
import numpy as np


def to_flat(tensors):
    ### BEGIN SOLUTION
    return np.concatenate([np.asarray(tensor).reshape(-1) for tensor in tensors])
    ### END SOLUTION


def from_flat(flat, shapes):
    ### BEGIN SOLUTION
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes])
    return [part.reshape(shape) for part, shape in zip(np.split(flat, ends[:-1]), shapes)]
    ### END SOLUTION


def bounds(n, d):
    ### BEGIN SOLUTION
    return [rank * (n // d) + min(rank, n % d) for rank in range(d + 1)]
    ### END SOLUTION


# %% check="check_layout" points=3
# The flat buffer: there and back
def check_layout(shapes):
    random = check_data("layout")
    tensors = [random.normal(size=shape) for shape in shapes]
    flat = np.concatenate([tensor.reshape(-1) for tensor in tensors])
    expect_equal(run(None, "to_flat", tensors).results, [flat], f"the flat buffer of {shapes}", tolerance=0)
    found, = run(None, "from_flat", flat, shapes).results
    expect(isinstance(found, list | tuple) and len(found) == len(shapes),
           f"from_flat: expected a list of {len(shapes)} arrays, got {type(found).__name__}.")
    for tensor, right in zip(found, tensors):
        expect_equal([tensor], [right], f"from_flat: the tensor of shape {list(right.shape)}",
                     "how many elements does a shape have? () has one.", tolerance=0)


check_layout([(2, 3), (4,)])
passed("two tensors")
### BEGIN HIDDEN TESTS
check_layout([(), (3, 1, 2), (5,), (0, 4), (1, 1)])
check_layout([(4, 4)])
### END HIDDEN TESTS

# %% check="check_bounds" points=3
# The flat buffer: which elements a rank owns
def check_bounds(n, d):
    right = np.cumsum([0, *map(len, np.array_split(np.zeros(n), d))])
    expect_equal(run(None, "bounds", n, d).results, [right], f"bounds({n}, {d})",
                 "if d does not divide n, the first n % d ranks have one more.", tolerance=0)


check_bounds(8, 4)
passed("8 elements on 4 ranks")
### BEGIN HIDDEN TESTS
for n, d in ((10, 4), (3, 5), (7, 1), (23, 8)):
    check_bounds(n, d)
### END HIDDEN TESTS

# %% [markdown]
# ## What it saves
#
# In mixed precision a model keeps 2 bytes for each parameter and 2 for each gradient. The optimizer keeps its data in
# float32: a master copy of the parameter, and its states. The paper counts $K = 12$ bytes for Adam (section 3.1). What
# is $K$ for SGD with one momentum? Compute exactly what rank $r$ of $d$ holds, in bytes:
#
# - stage 0: everything whole;
# - stage 1: parameters and gradients whole, the optimizer's $K$ bytes for its own part;
# - stage 2: parameters whole, everything else for its own part;
# - stage 3: everything for its own part.

# %% answer="bytes_held"
# %%answer bytes_held
def bytes_held(n, d, rank, stage):
    """Return the bytes that a rank of d ranks holds, a whole number. n: parameters; stage: of ZeRO, 0 to 3."""
    ### BEGIN SOLUTION
    ends = bounds(n, d)
    own = ends[rank + 1] - ends[rank]
    return 2 * (own if stage >= 3 else n) + 2 * (own if stage >= 2 else n) + 8 * (own if stage >= 1 else n)
    ### END SOLUTION


# %%
for stage in range(4):
    print(stage, bytes_held(7_500_000_000, 64, 0, stage) / 1e9, "GB")      # the paper's figure 1, with another K

# %% check="check_bytes" points=6
# The bytes that a rank holds
def check_bytes(n, d, rank, *held):
    for stage, right in enumerate(held):
        found, = run(None, "bytes_held", n, d, rank, stage).results
        expect_equal([found], [right], f"n = {n}, d = {d}: what rank {rank} holds in stage {stage}", "which numbers "
                     "does the optimizer keep for each parameter, and how many bytes does a float32 have?", tolerance=0)


check_bytes(12, 2, 0, 144, 96, 84, 72)
passed("12 parameters on 2 ranks")
### BEGIN HIDDEN TESTS
check_bytes(7, 3, 0, 84, 52, 44, 36)
check_bytes(7, 3, 2, 84, 44, 34, 24)
check_bytes(5, 1, 0, 60, 60, 60, 60)
### END HIDDEN TESTS

# %% [markdown]
# ## Stage 1
#
# Every replica has computed the gradient of its own samples. Replica $k$ had $n_k$ of them, and its gradient $g_k$ is
# the *mean* over those. A step is this, as one process would do it with the whole batch:
#
# $$g = \frac{\sum_k n_k g_k}{\sum_k n_k}, \qquad \hat g = g \min\Bigl(1, \frac{c}{\lVert g \rVert}\Bigr), \qquad
# v \leftarrow \mu v + \hat g, \qquad w \leftarrow w - \eta v.$$
#
# (If $\lVert g \rVert = 0$, nothing is clipped.) The norm is over *all* $N$ elements. A replica may have no sample at
# all, but at least one replica has some.
#
# In stage 1 (section 5.1) a rank keeps only the part of $v$ that it owns. So: reduce-scatter the gradients, after which
# it has its part of $g$; find the norm, of which each rank knows a piece; update the own part of $w$ and $v$;
# all-gather $w$. The two collectives send $2 N (d - 1)/d$ elements together, no more than the all-reduce that they
# replace. A few single numbers may be sent in addition.
#
# Here `group` has `reduce_scatter(x)` (this rank's part of the sum of all ranks' `x`, split as `np.array_split` does),
# `all_gather(x)` (all ranks' `x`, joined in rank order; they may differ in length) and `all_reduce(x)` (the sum, on
# every rank).

# %% answer="zero1_step"
# %%answer zero1_step
import numpy as np


def zero1_step(group, params, momentum, gradient, samples, lr, mu, clip):
    """Do one step of stage 1 on one of the ranks. Return all new params, and this rank's part of the new momentum.

    params: w, whole [N], the same on all ranks; momentum: this rank's part of v; gradient: g_k, whole [N];
    samples: n_k; lr, mu, clip: eta, mu and c.
    """
    ### BEGIN SOLUTION
    return update(group, params, momentum, group.reduce_scatter(gradient * samples), samples, lr, mu, clip)


def update(group, params, momentum, summed, samples, lr, mu, clip):
    """Do the rest of a step. summed: this rank's part of the gradient, summed over all samples of all ranks."""
    mean = summed / group.all_reduce(np.array(samples, float))
    norm = np.sqrt(group.all_reduce((mean * mean).sum()))
    momentum = mu * momentum + mean * (min(1, clip / norm) if norm > 0 else 1)
    first = bounds(len(params), group.size)[group.rank]
    return group.all_gather(params[first:first + len(mean)] - lr * momentum), momentum
    ### END SOLUTION


# %% check="check_zero1" points=10
# Stage 1: three steps are those of one process, and each rank has its own part of the momentum
def check_zero1(sizes, n, clip, steps=3, scale=1.0):
    d, random = len(sizes), check_data("zero1")
    batches = [(x, scale * y) for x, y in data(random, sizes, n)]
    params, momentum = random.normal(size=n) * scale, np.zeros(n)
    parts = momentum_parts(momentum, d)
    for step in range(1, steps + 1):
        gradients = [mean_gradient(params, *batch) for batch in batches]
        outcome = run(d, "zero1_step", params, each(parts), each(gradients), each(sizes), LR, MU, clip,
                      allow=COLLECTIVES)
        params, momentum = whole_step(params, momentum, mean_gradient(params, *join(batches)), clip)
        expect_step(outcome, params, momentum, f"samples {list(sizes)}, N = {n}, c = {clip:g}, step {step}",
                    "weight each gradient with its samples before you add up; the norm is that of the whole mean "
                    "gradient, and the same number on all ranks.")
        parts = [found[1] for found in outcome.results]


check_zero1((3, 3), n=6, clip=1e9)
check_zero1((2, 2, 2, 2), n=8, clip=0.5)
passed("three steps on 2 and 4 ranks")
### BEGIN HIDDEN TESTS
check_zero1((4,), n=3, clip=0.5)
check_zero1((1, 6, 2), n=10, clip=2.0)
check_zero1((2, 0, 5, 1, 3), n=3, clip=1.0)
check_zero1((1, 2, 3, 1, 2, 3, 1, 5), n=21, clip=1e9, steps=2)
check_zero1((2, 1), n=5, clip=1.0, steps=1, scale=0.0)
### END HIDDEN TESTS

# %% check="check_zero1_cost" points=6
# Stage 1: no rank sends more than 2 N (d - 1)/d elements, and a few numbers
def check_zero1_cost(d, n):
    random = check_data("zero1_cost")
    params, gradients = random.normal(size=n), list(random.normal(size=(d, n)))
    outcome = run(d, "zero1_step", params, each(momentum_parts(np.zeros(n), d)), each(gradients), 2, LR, MU, 1.0,
                  allow=COLLECTIVES)
    expect_step(outcome, *whole_step(params, np.zeros(n), sum(gradients) / d, 1.0), "a step", "")
    least = 2 * n * (d - 1) // d
    expect_sent(outcome, least, least + FEW, f"N = {n} on {d} ranks",
                "a rank needs just its own part of the summed gradient, and the norm is one number.")


check_zero1_cost(4, n=64)
passed("a step sends 2 N (d - 1)/d elements")
### BEGIN HIDDEN TESTS
for d, n in ((1, 20), (2, 101), (3, 100), (8, 203)):
    check_zero1_cost(d, n)
### END HIDDEN TESTS

# %% [markdown]
# ## Stage 2: bucket by bucket
#
# In stage 1 every rank has a whole gradient, of $N$ elements, before it is reduced. In stage 2 (section 5.2) it never
# has one. The backward delivers the gradient in *buckets*, as it computes them: first the last elements of the flat
# buffer, then those before. Each bucket is summed over the ranks immediately, each rank adds what it owns to its part,
# and the bucket is freed.
#
# A bucket begins at the element `start` and may have any length. It is not aligned with the ranks' parts: one rank may
# own all of it, another nothing, a third the middle. `group.reduce_scatter` does not help here, because it splits
# evenly. So you need your own reduce-scatter, made of `send`, `receive` and `exchange`: the sum of the elements that
# rank $r$ owns goes to rank $r$.
#
# To keep it simple, every rank sends each owner its piece. So a rank must send no more of the bucket than it does *not*
# own. Which rank goes first? In round $k = 1, \dots, d - 1$ every rank can send something to rank $r + k$ and receive
# something from rank $r - k$, both modulo $d$. (An array of no elements can be sent like any other.)

# %% answer="take_bucket"
# %%answer take_bucket
import numpy as np


def take_bucket(group, own, bucket, start, n):
    """Return this rank's part of the summed gradient, with the sum of all ranks' buckets added.

    own: that part so far. bucket: 1-d, this rank's gradient of the elements start, start + 1, ... of the flat buffer,
    which has n elements.
    """
    ### BEGIN SOLUTION
    ends = bounds(n, group.size)

    def piece(rank):
        return slice(*(min(max(end - start, 0), len(bucket)) for end in ends[rank:rank + 2]))

    mine = piece(group.rank)
    total = bucket[mine]
    for k in range(1, group.size):
        to = (group.rank + k) % group.size
        total = total + group.exchange(bucket[piece(to)], to, (group.rank - k) % group.size)
    own = own.copy()
    first = start + mine.start - ends[group.rank]
    if len(total):
        own[first:first + len(total)] += total
    return own
    ### END SOLUTION


# %% check="check_take_bucket" points=10
# Stage 2: each rank adds what it owns of the summed bucket
def run_take_bucket(d, n, start, length):
    """Give a bucket to all ranks. Return the outcome, the right results, and how much of it each rank owns."""
    random = check_data("take_bucket")
    before, buckets = random.normal(size=n), list(random.normal(size=(d, length)))
    outcome = run(d, "take_bucket", each(np.array_split(before, d)), each(buckets), start, n, allow=MESSAGES,
                  hint="in each round every rank sends to one rank and receives from another: `exchange`.")
    after = before.copy()
    after[start:start + length] += sum(buckets)
    inside = (np.arange(n) >= start) & (np.arange(n) < start + length)
    return outcome, np.array_split(after, d), [int(part.sum()) for part in np.array_split(inside, d)]


def check_take_bucket(d, n, start, length):
    outcome, right, _ = run_take_bucket(d, n, start, length)
    expect_equal(outcome.results, right, f"N = {n}, d = {d}, the bucket of elements {start} to {start + length - 1}: "
                 "its part", "where do a rank's part and the bucket overlap? Count once from the bucket's start, "
                 "and once from the part's. Add to the values that were there before.")


check_take_bucket(2, n=8, start=0, length=8)
check_take_bucket(4, n=8, start=4, length=4)
passed("buckets on 2 and 4 ranks")
### BEGIN HIDDEN TESTS
for case in ((1, 4, 1, 2), (3, 10, 3, 5), (5, 13, 0, 13), (5, 3, 1, 2), (8, 30, 17, 2)):
    check_take_bucket(*case)
### END HIDDEN TESTS

# %% check="check_take_bucket_cost" points=4
# Stage 2: no rank sends what it owns, or anything twice
def check_take_bucket_cost(d, n, start, length):
    outcome, right, owned = run_take_bucket(d, n, start, length)
    expect_equal(outcome.results, right, "its part")
    needed = [length - mine for mine in owned]
    expect_sent(outcome, needed, needed, f"a bucket of {length}, of which the ranks own {owned}",
                "an owner needs its own piece only.")


check_take_bucket_cost(4, n=8, start=2, length=6)
passed("a rank sends just what others own")
### BEGIN HIDDEN TESTS
for case in ((2, 9, 2, 5), (3, 10, 3, 5), (8, 30, 5, 19)):
    check_take_bucket_cost(*case)
### END HIDDEN TESTS

# %% [markdown]
# ## Stage 2: the step
#
# A step now takes several microbatches, and the backward delivers *sums* over samples, not means. So when all buckets
# of all microbatches have been processed, a rank has its part of $\sum_k n_k g_k$. Do the rest of the step: mean, norm,
# update, and the parameters for all. The checks call `take_bucket` for every bucket of every microbatch, in the order
# in which a backward has them, and then this:

# %% answer="zero2_step"
# %%answer zero2_step
def zero2_step(group, params, momentum, own, samples, lr, mu, clip):
    """Do the end of a step of stage 2 on one of the ranks. Return all new params, and this rank's part of the momentum.

    params: w, whole [N]; momentum: this rank's part of v; own: its part of the gradient, summed over all samples of all
    ranks; samples: the number of samples of this rank in all microbatches.
    """
    ### BEGIN SOLUTION
    return update(group, params, momentum, own, samples, lr, mu, clip)
    ### END SOLUTION


# %% check="check_zero2" points=8 also="zero1_step"
# Stage 2: with buckets and microbatches, steps are those of one process
def check_zero2(microbatches, n, edges, clip, steps=2):
    """Check steps. microbatches: for each the numbers of samples of the ranks; edges: the inner ends of buckets."""
    d, random = len(microbatches[0]), check_data("zero2")
    batches = [data(random, sizes, n) for sizes in microbatches]
    params, momentum = random.normal(size=n), np.zeros(n)
    parts, samples = momentum_parts(momentum, d), [sum(sizes) for sizes in zip(*microbatches)]
    for step in range(1, steps + 1):
        own = momentum_parts(np.zeros(n), d)
        for batch in batches:
            sums = [mean_gradient(params, x, y) * len(y) for x, y in batch]
            for start, stop in reversed(list(zip([0, *edges], [*edges, n]))):
                own = run(d, "take_bucket", each(own), each([one[start:stop] for one in sums]), start, n,
                          allow=MESSAGES).results
        outcome = run(d, "zero2_step", params, each(parts), each(own), each(samples), LR, MU, clip,
                      allow=("all_gather", "all_reduce"))
        whole = join([join(batch) for batch in batches])
        params, momentum = whole_step(params, momentum, mean_gradient(params, *whole), clip)
        expect_step(outcome, params, momentum, f"{len(batches)} microbatches, N = {n}, c = {clip:g}, step {step}",
                    "the sum is not yet a mean: over how many samples, of how many ranks?")
        parts = [found[1] for found in outcome.results]
        least = n * (d - 1) // d
        expect_sent(outcome, least, least + FEW, "what comes after the last bucket",
                    "the parameters, and a few single numbers.")


check_zero2([(2, 2), (2, 2)], n=24, edges=[12], clip=1.0)
check_zero2([(1, 1, 1, 1)], n=8, edges=[2, 6], clip=1e9)
passed("stage 2 on 2 and 4 ranks")
### BEGIN HIDDEN TESTS
check_zero2([(1, 2, 0), (3, 1, 2)], n=40, edges=[7, 8, 29], clip=1e9)
check_zero2([(2,), (1,), (4,)], n=4, edges=[1], clip=0.5)
check_zero2([(1, 0, 2, 3, 1)], n=3, edges=[1], clip=1.0)
### END HIDDEN TESTS

# %% [markdown]
# ## A checkpoint of other ranks
#
# A run on $d$ ranks has saved its momentum, each rank its part in its own file. It used another layout: it padded the
# flat buffer with zeros after element $N$ until $d$ divided it. So its parts have equal length, $\lceil N/d \rceil$,
# and the last ones end in padding or consist of it.
#
# You continue with $d'$ ranks, split as `bounds` says. No rank should read more than it needs. Which pieces of which
# files does rank $r$ read? Write a *plan*: a list of `(file, start, stop)`, such that the elements from `start` up to
# `stop` (not included) of those files, counted from the file's beginning and joined in the order of the list, are the
# new part. No piece may be empty, and no padding may be read.

# %% answer="plan"
# %%answer plan
def plan(n, old_d, new_d, rank):
    """Return the list of (file, start, stop) that `rank` of new_d reads. old_d ranks have saved n elements, padded."""
    ### BEGIN SOLUTION
    length = -(-n // old_d)
    first, end = bounds(n, new_d)[rank:rank + 2]
    pieces = [(file, max(first - file * length, 0), min(end - file * length, length)) for file in range(old_d)]
    return [(file, start, stop) for file, start, stop in pieces if start < stop]
    ### END SOLUTION


# %%
for rank in range(3):
    print(rank, plan(10, 4, 3, rank))

# %% check="check_plan" points=10
# The checkpoint: every rank reads its own part, and nothing else
def check_plan(n, old_d, new_d):
    whole = check_data("plan").normal(size=n)
    length = -(-n // old_d)
    files = np.pad(whole, (0, old_d * length - n)).reshape(old_d, length)
    for rank, right in enumerate(np.array_split(whole, new_d)):
        found, = run(None, "plan", n, old_d, new_d, rank).results
        case = f"N = {n}, from {old_d} to {new_d} ranks: rank {rank}"
        listed = isinstance(found, list | tuple)
        expect(listed and all(isinstance(one, list | tuple) and len(one) == 3 for one in found), f"{case}: expected a "
               f"list of (file, start, stop), got {str(found)[:80]}.")
        read = [np.zeros(0)]
        for file, start, stop in found:
            whole_numbers = all(np.ndim(k) == 0 and np.asarray(k).dtype.kind in "iu" for k in (file, start, stop))
            expect(whole_numbers and 0 <= file < old_d and 0 <= start < stop <= length,
                   f"{case}: {(file, start, stop)} is no piece of the {old_d} files of {length} elements.",
                   "leave out files of which the rank needs nothing; count from the file's beginning.")
            read.append(files[file, int(start):int(stop)])
        expect_equal([np.concatenate(read)], [right], f"{case}: what {found} reads", "where does a file begin in the "
                     "whole, and where does the new part?", tolerance=0)


check_plan(8, 2, 4)
check_plan(8, 4, 2)
passed("from 2 ranks to 4, and back")
### BEGIN HIDDEN TESTS
for n, old_d, new_d in ((10, 4, 3), (9, 8, 2), (3, 2, 5), (7, 1, 8), (13, 5, 1)):
    check_plan(n, old_d, new_d)
### END HIDDEN TESTS

# %% [markdown]
# ## To think about
#
# - With $m$ microbatches per step, stage 2 sends each gradient $m$ times. What would be needed to send it once, and why
#   does stage 2 not do so?
# - Lion (Chen et al. 2023) updates by the *sign* of a mean of momentum and gradient. Which of the mistakes that you
#   made here would a test with Lion not have seen?
# - Muon and Shampoo need a whole matrix of gradients at a time. What does that mean for a flat buffer that is split
#   anywhere?

# %% [markdown]
# ## In your own words
#
# Ten points are for two answers in words, which a person reads: at most 150 words each, with a reason for every claim.
# Write below each question, where it says YOUR ANSWER HERE. A double click opens the cell.
#
# **First** (5 points). Compare stages 0, 1 and 2 for $N = 10^9$ parameters, $d = 64$ and 8 microbatches in a step:
# bytes that a rank holds, and elements that it sends in one step. When is stage 2 worth its messages? Name a setting
# in which you would stay at stage 1.

# %% [markdown] writing="what_stage_2_costs" points=5
# YOUR ANSWER HERE

# %% [markdown]
# **Second** (5 points). Clipping needs the norm of the whole gradient, of which each rank has a piece. What goes
# wrong, and when would anybody notice, if each rank clips by the norm of its own piece? And if each rank adds up the
# *norms* instead of their squares? Does the sum's order matter for two runs to agree to the bit?

# %% [markdown] writing="the_norm_in_pieces" points=5
# YOUR ANSWER HERE
