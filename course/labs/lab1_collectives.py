# %% [markdown]
# # Lab 1. Collectives, from send and receive
#
# All communication between ranks consists of messages from one rank to another. In this lab you build the three
# collectives on which all of distributed training rests, all-gather, reduce-scatter and all-reduce, so that no rank
# sends more than necessary; and then one that the libraries do not have.
#
# **You need**: Python, NumPy, and walkthroughs *Splitting matrices* and *f and g*. **Time**: about five hours.
# **Points**: 60, and 10 for words.
#
# ## How this lab works
#
# A cell that begins with `%%answer` is yours: write your code where it says so, do not change the first line, and put
# all imports that it needs into such cells (ranks see nothing else). Run it, then run the check below it. A check runs
# your code on *ranks*: separate processes, each with its own memory. There your code may compute, and communicate with
# other ranks through `group`. It may not read files, start processes, or import this project's own packages. A check
# that you see here uses some sizes and numbers of ranks; the checks that give the points also use others, including
# uneven ones.
#
# In this lab `group` can do three things:
#
# | call | what it does |
# |---|---|
# | `group.send(x, to)` | sends the array `x` to rank `to`; returns when that rank **has received it** |
# | `group.receive(source)` | waits for what rank `source` sends, and returns it |
# | `group.exchange(x, to, source)` | both at the same time: sends `x` to rank `to` while receiving from rank `source` |
#
# `group.rank` is your own number, from 0 to `group.size - 1`.

# %%
# %load_ext course.grading
import numpy as np

from course.grading import each, run

# %% locked="tools"
import numpy as np

from course.grading import check_data, each, expect, expect_equal, expect_sent, passed, run

MESSAGES = ("send", "receive", "exchange")


def arrays(name, n, *shape):
    """Draw a random array for each of n ranks. In your notebook they are the same each time."""
    return list(check_data(name).normal(size=(n, *shape)))


# %% [markdown]
# ## Warming up: which rank goes first?
#
# A send ends when the other rank has received it. So if all ranks send first and receive afterwards, they wait for one
# another for ever. Try it. Each rank would send its array to the next rank:

# %% answer="pass_on"
# %%answer pass_on
def pass_on(group, x):
    """Pass x on to the next rank (from the last one to rank 0). Return the array of the rank before."""
    ### BEGIN SOLUTION
    if group.size == 1:
        return x
    return group.exchange(x, (group.rank + 1) % group.size, (group.rank - 1) % group.size)
    ### END SOLUTION


# %% [markdown]
# To try your code, run it with arrays of your own. `each([a, b, c])` gives every rank a different one:

# %%
run(3, "pass_on", each([np.zeros(2), np.ones(2), np.full(2, 2.0)]), allow=("send", "receive", "exchange")).results

# %% check="check_pass_on" points=5
# Warming up: every rank gets the array of the rank before it
def check_pass_on(n, elements):
    xs = arrays("pass_on", n, elements)
    outcome = run(n, "pass_on", each(xs), allow=MESSAGES,
                  hint="which rank receives, while all ranks are sending? `exchange` does both at the same time.")
    expect_equal(outcome.results, [xs[rank - 1] for rank in range(n)], "the array that it received",
                 "rank r passes its array on to rank (r + 1) % size.")
    each_sends = elements if n > 1 else 0
    expect_sent(outcome, each_sends, each_sends, f"{elements} elements", "one array, once.", messages=1)


for n in (2, 4):
    check_pass_on(n, elements=6)
passed("pass_on on 2 and 4 ranks")
### BEGIN HIDDEN TESTS
for n in (1, 3, 5, 8):
    check_pass_on(n, elements=n)
check_pass_on(2, elements=40_000)
### END HIDDEN TESTS

# %% [markdown]
# ## All-gather
#
# Every rank has a chunk, and at the end every rank has all of them, in rank order. A *ring* works like this: send your
# own chunk to the next rank; then, in each further round, pass on the chunk that you received last. After `size - 1`
# rounds every rank has them all.
#
# Chunks may differ in length. A rank must not send more than it has to: over all rounds it passes on every chunk but
# one.

# %% answer="all_gather"
# %%answer all_gather
def all_gather(group, chunk):
    """Return all ranks' chunks, joined in rank order. chunk: this rank's own 1-d array."""
    import numpy as np
    ### BEGIN SOLUTION
    chunks = {group.rank: chunk}
    for step in range(group.size - 1):
        newest = (group.rank - step) % group.size
        chunks[(newest - 1) % group.size] = group.exchange(chunks[newest], (group.rank + 1) % group.size,
                                                           (group.rank - 1) % group.size)
    return np.concatenate([chunks[rank] for rank in range(group.size)])
    ### END SOLUTION


# %% check="check_all_gather" points=10
# All-gather: every rank has every chunk, in rank order
def run_all_gather(n, elements):
    """Run all_gather on the chunks of a random array. Return the outcome, the chunks, and the whole array."""
    whole, = arrays("all_gather", 1, elements)
    chunks = np.array_split(whole, n)
    return run(n, "all_gather", each(chunks), allow=MESSAGES), chunks, whole


def check_all_gather(n, elements):
    outcome, chunks, whole = run_all_gather(n, elements)
    expect_equal(outcome.results, [whole] * n, "the gathered array",
                 "which rank's chunk does a rank hold after k rounds? Join them by rank, not in order of arrival.", 0)


for n in (2, 4):
    check_all_gather(n, elements=12)
passed("all_gather on 2 and 4 ranks")
### BEGIN HIDDEN TESTS
for n, elements in ((1, 3), (3, 10), (5, 7), (8, 20), (7, 7)):
    check_all_gather(n, elements)
### END HIDDEN TESTS

# %% check="check_all_gather_cost" points=5
# All-gather: no rank sends more than every chunk but one
def check_all_gather_cost(n, elements):
    outcome, chunks, whole = run_all_gather(n, elements)
    expect_equal(outcome.results, [whole] * n, "the gathered array", tolerance=0)
    # The least, too: every rank lacks all elements but its own, and this is how many these are on all ranks together.
    needed = [elements - len(chunks[(rank + 1) % n]) for rank in range(n)]
    expect_sent(outcome, needed, needed, f"{elements} elements on {n} ranks",
                "in each round pass on one chunk, the one that arrived last, not all of your chunks.")


check_all_gather_cost(4, elements=12)
passed("all_gather sends N (p - 1)/p elements")
### BEGIN HIDDEN TESTS
for n, elements in ((2, 5), (3, 10), (8, 20), (6, 25)):
    check_all_gather_cost(n, elements)
### END HIDDEN TESTS

# %% [markdown]
# ## Reduce-scatter
#
# Every rank has an array of `N` elements. It is split into `size` chunks as `np.array_split` splits it. Rank `r` should
# get chunk `r` of the *sum over all ranks*. In a ring a chunk travels once around, and each rank adds its own to it: it
# starts at the rank after its owner, and ends at its owner.
#
# It costs the same as an all-gather, and is its mirror image.

# %% answer="reduce_scatter"
# %%answer reduce_scatter
def reduce_scatter(group, x):
    """Return this rank's chunk of the sum over all ranks. x: 1-d, of the same length on all ranks."""
    import numpy as np
    ### BEGIN SOLUTION
    chunks = np.array_split(x, group.size)
    travelling = chunks[(group.rank - 1) % group.size]
    for step in range(1, group.size):
        arrived = group.exchange(travelling, (group.rank + 1) % group.size, (group.rank - 1) % group.size)
        travelling = arrived + chunks[(group.rank - 1 - step) % group.size]
    return travelling
    ### END SOLUTION


# %% check="check_reduce_scatter" points=10
# Reduce-scatter: rank r has chunk r of the sum
def run_reduce_scatter(n, elements):
    """Return the outcome on random arrays, and the chunks of their sum."""
    xs = arrays("reduce_scatter", n, elements)
    return run(n, "reduce_scatter", each(xs), allow=MESSAGES), np.array_split(sum(xs), n)


def check_reduce_scatter(n, elements):
    outcome, chunks = run_reduce_scatter(n, elements)
    expect_equal(outcome.results, chunks, "its chunk of the sum",
                 "a chunk starts at the rank after its owner, so that the owner is the last to add to it.")


for n in (2, 4):
    check_reduce_scatter(n, elements=12)
passed("reduce_scatter on 2 and 4 ranks")
### BEGIN HIDDEN TESTS
for n, elements in ((1, 3), (3, 10), (5, 7), (8, 21), (7, 3)):
    check_reduce_scatter(n, elements)
### END HIDDEN TESTS

# %% check="check_reduce_scatter_cost" points=5
# Reduce-scatter: no rank sends more than every chunk but one
def check_reduce_scatter_cost(n, elements):
    outcome, chunks = run_reduce_scatter(n, elements)
    expect_equal(outcome.results, chunks, "its chunk of the sum")
    needed = [elements - len(chunks[rank]) for rank in range(n)]        # of all chunks but its own
    expect_sent(outcome, needed, needed, f"{elements} elements on {n} ranks",
                "in each round send one chunk, not the whole array.")


check_reduce_scatter_cost(4, elements=12)
passed("reduce_scatter sends N (p - 1)/p elements")
### BEGIN HIDDEN TESTS
for n, elements in ((2, 5), (3, 10), (8, 21), (6, 25)):
    check_reduce_scatter_cost(n, elements)
### END HIDDEN TESTS

# %% [markdown]
# ## All-reduce, and what it truly costs
#
# Every rank gets the whole sum. The simple way is to send all arrays to rank 0, which adds them up and sends the sum
# back: then rank 0 sends $(p - 1) N$ elements while the others wait. Combine your two collectives, and every rank sends
#
# $$2 N \frac{p - 1}{p}$$
#
# for any number of ranks: less than twice the array. That is why data-parallel training scales.

# %% answer="all_reduce"
# %%answer all_reduce
def all_reduce(group, x):
    """Return the sum over all ranks, on every rank. x: an array of any shape, which is the same on all ranks."""
    ### BEGIN SOLUTION
    return all_gather(group, reduce_scatter(group, x.reshape(-1))).reshape(x.shape)
    ### END SOLUTION


# %% check="check_all_reduce" points=5
# All-reduce: everyone has the sum, in the shape of x
def check_all_reduce(n, shape):
    xs = arrays("all_reduce", n, *shape)
    outcome = run(n, "all_reduce", each(xs), allow=MESSAGES)
    expect_equal(outcome.results, [sum(xs)] * n, "the sum",
                 "x has any shape: flatten it, and restore its shape at the end.")


check_all_reduce(4, (3, 4))
passed("all_reduce on 4 ranks")
### BEGIN HIDDEN TESTS
for n, shape in ((1, (2,)), (2, (3, 5)), (3, (2, 2, 2)), (5, (3,)), (8, (4, 5))):
    check_all_reduce(n, shape)
### END HIDDEN TESTS

# %% check="check_all_reduce_cost" points=5
# All-reduce: 2 N (p - 1)/p elements, up to a chunk that is one longer than another
def check_all_reduce_cost(n, elements):
    xs = arrays("all_reduce", n, elements)
    outcome = run(n, "all_reduce", each(xs), allow=MESSAGES)
    expect_equal(outcome.results, [sum(xs)] * n, "the sum")
    smallest = elements // n
    expect_sent(outcome, elements, 2 * (elements - smallest), f"the sum of {elements} elements on {n} ranks",
                "a reduce-scatter and an all-gather, each N (p - 1)/p.")


check_all_reduce_cost(4, elements=16)
passed("all_reduce sends 2 N (p - 1)/p elements")
### BEGIN HIDDEN TESTS
for n, elements in ((2, 6), (3, 11), (8, 40), (5, 9)):
    check_all_reduce_cost(n, elements)
### END HIDDEN TESTS

# %% [markdown]
# ## A sum that is the same on any ring
#
# Floating-point addition is not associative: $(a + b) + c$ and $a + (b + c)$ may differ in the last bit. In a ring
# every chunk starts at another rank, so every chunk is added up in another order, and the sum depends on the number of
# ranks and on where the chunks begin. Two runs of the same training then differ, first in the last bit, later in the
# loss.
#
# Build an all-reduce that adds **in rank order**: every element of the result is exactly, to the bit,
#
# $$((x_0 + x_1) + x_2) + \dots + x_{p-1}.$$
#
# And it must not be more expensive: over *all* ranks together no more than the ring's $2 N (p - 1)$ elements may be
# sent, and no rank may send more than $2 N$. So one rank cannot do the work for all.

# %% answer="all_reduce_in_order"
# %%answer all_reduce_in_order
def all_reduce_in_order(group, x):
    """Return ((x_0 + x_1) + x_2) + ..., to the bit, on every rank. x: 1-d, of the same length on all ranks."""
    ### BEGIN SOLUTION
    total, place, before, after = x, group.rank, group.rank - 1, group.rank + 1
    if place > 0:
        total = group.receive(before) + x           # a running sum, passed on in rank order ...
    if place < group.size - 1:
        group.send(total, after)
        total = group.receive(after)                # ... and passed back
    if place > 0:
        group.send(total, before)
    return total
    ### END SOLUTION


# %% check="check_in_order" points=10
# In rank order: the same bits, whatever the number of elements
def run_in_order(n, elements):
    """Return the outcome on random arrays, and their sum in rank order."""
    scale = 10.0 ** np.arange(n)[:, None]          # sums in another order differ visibly
    xs = list(np.array(arrays("in_order", n, elements)) * scale)
    first, *others = xs
    right = first
    for x in others:
        right = right + x
    return run(n, "all_reduce_in_order", each(xs), allow=MESSAGES), right


def check_in_order(n, elements):
    outcome, right = run_in_order(n, elements)
    expect_equal(outcome.results, [right] * n, "the sum in rank order",
                 "which rank must add before which, so that x_0 + x_1 comes first?", tolerance=0)


for n in (2, 4):
    check_in_order(n, elements=9)
passed("all_reduce_in_order on 2 and 4 ranks, to the bit")
### BEGIN HIDDEN TESTS
for n, elements in ((1, 2), (3, 100), (5, 64), (8, 33)):
    check_in_order(n, elements)
### END HIDDEN TESTS

# %% check="check_in_order_cost" points=5
# In rank order: all ranks together send no more than a ring
def check_in_order_cost(n, elements):
    outcome, right = run_in_order(n, elements)
    expect_equal(outcome.results, [right] * n, "the sum in rank order", tolerance=0)
    expect(sum(outcome.sent) <= 2 * elements * (n - 1), f"all {n} ranks together have sent {sum(outcome.sent):,} "
           f"elements; 2 N (p - 1) = {2 * elements * (n - 1):,} are enough.",
           "a partial sum is as large as x, however many ranks have added to it.")
    expect_sent(outcome, elements, 2 * elements, f"a sum in rank order of {elements} elements on {n} ranks",
                "does one rank send the sum to all the others?")


check_in_order_cost(4, elements=9)
passed("no more than 2 N (p - 1) elements are sent, and 2 N by any rank")
### BEGIN HIDDEN TESTS
for n, elements in ((2, 7), (3, 20), (8, 15)):
    check_in_order_cost(n, elements)
### END HIDDEN TESTS

# %% [markdown]
# ## To think about
#
# - Your all-reduce in rank order sends no more than the ring. Why does nobody use it for gradients? (How long does it
#   take, if a rank can send $\beta$ elements a second? And the ring?)
# - With 1,024 ranks and 1,024 elements, a chunk of the ring is one element. What dominates then?

# %% [markdown]
# ## In your own words
#
# Ten points are for two answers in words, which a person reads: at most 150 words each, with a reason for every claim.
# Write below each question, where it says YOUR ANSWER HERE. A double click opens the cell.
#
# **First** (5 points). Say a message takes $\alpha$ seconds, and $\beta$ more for each element. How long does your
# all-reduce take for $N$ elements on $p$ ranks? From which $N$ on does the time no longer depend on $p$, to within a
# factor of two? Give that $N$ for $p = 8$ and for $p = 1{,}024$, with $\alpha$ = 5 µs and $\beta$ = 1 ns, and say
# what follows for gradients that are many small tensors.

# %% [markdown] writing="time_of_a_ring" points=5
# YOUR ANSWER HERE

# %% [markdown]
# **Second** (5 points). Your sum in rank order sends no more than a ring. How can it also be nearly as *fast*, with
# the same bits? Describe the change, say what each rank does in one round, count the rounds, and explain why every
# element is still added in rank order.

# %% [markdown] writing="faster_in_order" points=5
# YOUR ANSWER HERE
