# %% [markdown]
# # Lab 8. All of it: one training run on eight ranks
#
# In the labs before this one you built pieces: a ring, a sharded layer, a schedule, a sum over replicas. Here they
# become one training run on $t \times p \times d$ ranks: $t$ tensor-parallel ranks in each of $p$ pipeline stages, and
# $d$ replicas of that. Before it runs, you predict what it sends, holds and wastes; then you set the predictions beside
# what was counted. At the end you measure something that no formula gives, and hand in a page about all of it.
#
# **You need**: labs 1, 2, 5 and 6, or what they teach. **Time**: about eight hours.
# **Points**: 60, and 10 for words.
#
# As in lab 1: cells that begin with `%%answer` are yours, a check runs them in separate processes, and the checks that
# give the points try more than you see. `group` has only `exchange(x, to, source)`, `send(x, to)` and
# `receive(source)`: everything else is made of your own pieces. An answer may call the functions of other answers.
#
# ## The model
#
# It predicts the next token from the current one, so it can be tiny, and still has all that matters: an embedding, $L$
# residual layers, and logits.
#
# $$x_0 = E[\text{token}] \qquad x_{l+1} = x_l + \max(0, x_l A_l) B_l \qquad z = x_L U$$
#
# $E$ is $[V, h]$, $A_l$ is $[h, f]$, $B_l$ is $[f, h]$, $U$ is $[h, V]$. The loss of a sample is the cross-entropy of
# its target, $\log \sum_j e^{z_j} - z_k$, and that of a batch is the mean over *all* its samples.
#
# Each stage has $L/p$ layers, one after the other. The first stage also has $E$, the last one $U$. Tensor-parallel
# ranks have $f/t$ columns of each $A_l$ and the same rows of $B_l$; $E$ and $U$ are whole on each of them. A rank's
# *shard* is a dict of `A` $[L/p, h, f/t]$, `B` $[L/p, f/t, h]$, and `E` or `U` if its stage has them. All sizes divide.
#
# Each replica gets $m$ microbatches of $b$ samples: a step sees $N = d m b$ samples.

# %%
# %load_ext course.grading
import numpy as np

from course.grading import each, run

# %% locked="tools"
import numpy as np

from course.grading import check_data, each, expect, expect_dicts, expect_equal, expect_sent, expect_values, passed, run

MESSAGES = ("send", "receive", "exchange")
LIMIT = 60.0            # seconds for a training run on eight ranks,
SOON = 20.0             # and for a step
STEPS = 40              # of a training run
ABOVE = 0.35            # nats per sample that the loss may be above the best one


def place(rank, t, p, d):
    """Return a rank's numbers in its tensor, data and pipeline groups."""
    return rank % t, rank // t % d, rank // (t * d)


def draw_model(random, V, h, f, L):
    """Draw a model whose activations neither vanish nor explode."""
    return {"E": random.normal(size=(V, h)), "A": random.normal(size=(L, h, f)) / h**0.5,
            "B": random.normal(size=(L, f, h)) / (f * L)**0.5, "U": random.normal(size=(h, V)) / h**0.5}


def shards_of(model, t, p, d):
    """Return each rank's shard of a model, or of its gradients."""
    shards = []
    for rank in range(t * p * d):
        shard, _, stage = place(rank, t, p, d)
        layers = slice(*(len(model["A"]) * k // p for k in (stage, stage + 1)))
        own = {"A": np.split(model["A"][layers], t, 2)[shard], "B": np.split(model["B"][layers], t, 1)[shard]}
        shards.append(own | ({"E": model["E"]} if stage == 0 else {}) | ({"U": model["U"]} if stage == p - 1 else {}))
    return shards


def dealt(batch, t, p, d, stage):
    """Return each rank's microbatches of `batch`, [..., d, m, b]: None outside of the stage that needs them."""
    return [batch[..., place(rank, t, p, d)[1], :, :] if place(rank, t, p, d)[2] == stage else None
            for rank in range(t * p * d)]


def whole_step(model, tokens, targets):
    """Return the mean loss and its gradients, as one process computes them."""
    tokens, targets = tokens.reshape(-1), targets.reshape(-1)
    xs, hidden = [model["E"][tokens]], []
    for A, B in zip(model["A"], model["B"]):
        hidden.append(np.maximum(xs[-1] @ A, 0))
        xs.append(xs[-1] + hidden[-1] @ B)
    z = xs[-1] @ model["U"]
    z = z - z.max(1, keepdims=True)
    total, at = np.exp(z).sum(1), (np.arange(len(z)), targets)
    dz = np.exp(z) / total[:, None]
    dz[at] -= 1
    dz /= len(z)
    grads = {name: np.zeros_like(value) for name, value in model.items()}
    grads["U"], dx = xs[-1].T @ dz, dz @ model["U"].T
    for l in reversed(range(len(hidden))):
        da = dx @ model["B"][l].T * (hidden[l] > 0)
        grads["B"][l], grads["A"][l] = hidden[l].T @ dx, xs[l].T @ da
        dx = dx + da @ model["A"][l].T
    np.add.at(grads["E"], tokens, dx)
    return float((np.log(total) - z[at]).mean()), grads


def draw_chain(random, V):
    """Draw the probabilities [V, V] of the next token after each one, and its entropy in the long run, in nats."""
    chain = random.dirichlet(np.full(V, 0.15), size=V)
    often = np.linalg.matrix_power(0.99 * chain + 0.01 / V, 64)[0]
    return chain, often, float(-(often[:, None] * chain * np.log(np.maximum(chain, 1e-300))).sum())


def draw_samples(random, chain, often, shape):
    """Draw tokens of these frequencies, and their successors, both of this shape."""
    tokens = random.choice(len(often), size=shape, p=often / often.sum())
    ends = np.cumsum(chain, 1)
    targets = (random.random(tokens.shape)[..., None] > ends[tokens]).sum(-1)
    return tokens, np.minimum(targets, len(often) - 1)


def ring(k, n):
    """Return the least and the most that a rank of a ring of k sends of n elements."""
    return np.array([2 * (k - 1) * (n // k), 2 * (k - 1) * -(-n // k)])


def expect_step_sent(outcome, what, t, p, d, m, b, h, shards, steps=1):
    """Check that each rank has sent what these steps need, and no more: then no rank can have computed for the others.
    """
    bounds = []
    for rank, shard in enumerate(shards):
        stage = place(rank, t, p, d)[2]
        between = m * b * h * ((stage > 0) + (stage < p - 1))
        in_layers = 2 * m * len(shard["A"]) * ring(t, b * h)
        bounds.append(steps * (in_layers + between + ring(d, sum(array.size for array in shard.values()))))
    least, most = np.transpose(bounds)
    messages = steps * (4 * m * len(shards[0]["A"]) * (t - 1) + 2 * m + 2 * (d + p) + 16)
    expect_sent(outcome, least, most + 16 * steps, what, "which array is sent more than once, or whole where a shard "
                "would do?", messages)


# %% [markdown]
# ## 1. Who is where
#
# Neighbours are tensor-parallel, since these send the most; then come the replicas, then the stages:
# $\text{rank} = i_t + t \, (i_d + d \, i_p)$. Write `places(rank, t, p, d)`. It returns three lists of ranks: this
# rank's tensor group, its data group (the same shard of the same stage in all replicas) and its pipeline (the same
# shard in all stages of its replica), each in ascending order.

# %% answer="places"
# %%answer places
def places(rank, t, p, d):
    """Return the ranks of this rank's tensor group, of its data group, and of its pipeline: three lists."""
    ### BEGIN SOLUTION
    shard, replica, stage = rank % t, rank // t % d, rank // (t * d)
    return ([i + t * (replica + d * stage) for i in range(t)], [shard + t * (i + d * stage) for i in range(d)],
            [shard + t * (replica + d * i) for i in range(p)])
    ### END SOLUTION


# %% check="check_places" points=5
# The groups of every rank
def check_places(t, p, d):
    ranks = list(range(t * p * d))
    for rank in ranks:
        mine = place(rank, t, p, d)
        right = [[other for other in ranks if all(a == b for k, (a, b) in enumerate(zip(place(other, t, p, d), mine))
                                                  if k != axis)] for axis in range(3)]
        found = expect_values(run(None, "places", rank, t, p, d).results, ("tensor", "data", "pipeline"))
        for name, (group,), ranks_of_group in zip(("tensor group", "data group", "pipeline"), found, right):
            expect_equal([group], [ranks_of_group], f"t = {t}, p = {p}, d = {d}: the {name} of rank {rank}",
                         "which two of the three numbers do all ranks of the group share?", tolerance=0)


check_places(2, 2, 2)
passed("the groups of 2 x 2 x 2 ranks")
### BEGIN HIDDEN TESTS
for sizes in ((1, 4, 2), (4, 1, 2), (2, 1, 3), (1, 2, 3)):
    check_places(*sizes)
### END HIDDEN TESTS

# %% [markdown]
# ## 2. A sum within a group
#
# `sum_among(group, x, ranks)` returns the sum of the arrays `x` of these ranks, on each of them. Other groups do the
# same at the same time. Use the ring of lab 1: with $k$ ranks and $n$ elements, no rank sends more than
# $2 (k - 1) \lceil n/k \rceil$ elements. `x` has any shape; one rank alone sends nothing.

# %% answer="sum_among"
# %%answer sum_among
import numpy as np


def sum_among(group, x, ranks):
    """Return the sum of the arrays x of these ranks, of which this rank is one; on all of them."""
    ### BEGIN SOLUTION
    k, mine = len(ranks), ranks.index(group.rank)
    after, before = ranks[(mine + 1) % k], ranks[mine - 1]
    chunks = [chunk.copy() for chunk in np.array_split(np.asarray(x).reshape(-1), k)]
    for step in range(k - 1):
        chunks[(mine - step - 1) % k] += group.exchange(chunks[(mine - step) % k], after, before)
    for step in range(k - 1):
        chunks[(mine - step) % k] = group.exchange(chunks[(mine - step + 1) % k], after, before)
    return np.concatenate(chunks).reshape(np.shape(x))
    ### END SOLUTION


# %% check="check_sum_among" points=5
# The sum within each group, of all groups at the same time
def run_sum(lists, shape, name="sum"):
    """Run sum_among in these groups. Return what came out, and the right sums."""
    ranks = sum(map(len, lists))
    xs, own = check_data(name).normal(size=(ranks, *shape)), {rank: one for one in lists for rank in one}
    outcome = run(ranks, "sum_among", each(list(xs)), each([own[rank] for rank in range(ranks)]), allow=MESSAGES)
    return outcome, [xs[own[rank]].sum(0) for rank in range(ranks)]


def check_sum(lists, shape):
    outcome, right = run_sum(lists, shape)
    expect_equal(outcome.results, right, f"the sum of {list(shape)} among {lists}",
                 "your neighbours are those in `ranks`, not group.rank + 1.")


check_sum([[0, 2], [1, 3]], (4, 2))
passed("two groups of two ranks")
### BEGIN HIDDEN TESTS
for lists, shape in (([[0, 4], [1, 5], [2, 6], [3, 7]], (3, 5)), ([[0, 2, 4], [1, 3, 5]], (7,)), ([[0], [1, 2]], (2,)),
                     ([[0, 1, 2, 3, 4]], (3,))):
    check_sum(lists, shape)
### END HIDDEN TESTS

# %% check="check_sum_among_cost" points=5
# What the ring sends
def check_sum_cost(lists, shape):
    outcome, right = run_sum(lists, shape, "sum cost")
    expect_equal(outcome.results, right, "the sum")
    k, n = len(lists[0]), int(np.prod(shape))
    expect_sent(outcome, *ring(k, n), f"{n} elements among {k} ranks", "send one chunk at a time, around the ring.")


check_sum_cost([[0, 2], [1, 3]], (4, 4))
passed("the cost of 16 elements among 2 ranks")
### BEGIN HIDDEN TESTS
check_sum_cost([[0, 2, 4, 6], [1, 3, 5, 7]], (9, 5))
check_sum_cost([[0, 2, 4], [1, 3, 5]], (10,))
### END HIDDEN TESTS

# %% [markdown]
# ## 3. A step
#
# `step(group, t, p, d, m, shard, tokens, targets, samples)` computes the gradients of one global batch. `tokens`,
# $[m, b]$, are this replica's on the ranks of the first stage, and `None` elsewhere; so are `targets`, on the last
# stage. `samples` is $N$. It returns the mean loss over *all* samples, on every rank, and a dict of gradients like
# `shard`, summed over the replicas.
#
# - Each layer ends in a sum over the tensor group, forward ($g$) and backward ($f$).
# - Send whole activations $[b, h]$ from stage to stage, shard $i$ to shard $i$.
# - The schedule is yours. A `send` ends only when its receiver has received: in 1F1B two neighbours both want to send,
#   and wait for one another, unless one goes first or both use `exchange`.
# - No rank should send more than what section 4 counts.

# %% answer="step"
# %%answer step
import numpy as np


def forward(group, tensor, shard, x):
    """Return a stage's output, and for each of its layers what the backward needs."""
    ### BEGIN SOLUTION
    caches = []
    for A, B in zip(shard["A"], shard["B"]):
        hidden = np.maximum(x @ A, 0)
        caches.append((x, hidden))
        x = x + sum_among(group, hidden @ B, tensor)
    return x, caches
    ### END SOLUTION


def backward(group, tensor, shard, grads, caches, dx):
    """Return the gradient of a stage's input, and add to the gradients of its layers."""
    ### BEGIN SOLUTION
    for l, (x, hidden) in reversed(list(enumerate(caches))):
        da = dx @ shard["B"][l].T * (hidden > 0)
        grads["B"][l] += hidden.T @ dx
        grads["A"][l] += x.T @ da
        dx = dx + sum_among(group, da @ shard["A"][l].T, tensor)
    return dx
    ### END SOLUTION


def loss_backward(shard, grads, x, targets, samples):
    """Return the part of the mean loss that these samples make, and the gradient of x. Add to the gradient of U."""
    ### BEGIN SOLUTION
    z = x @ shard["U"]
    z = z - z.max(1, keepdims=True)
    total, at = np.exp(z).sum(1), (np.arange(len(z)), targets)
    dz = np.exp(z) / total[:, None]
    dz[at] -= 1
    dz /= samples
    grads["U"] += x.T @ dz
    return (np.log(total) - z[at]).sum() / samples, dz @ shard["U"].T
    ### END SOLUTION


def step(group, t, p, d, m, shard, tokens, targets, samples):
    """Return the mean loss of a global batch, and this rank's gradients, a dict like `shard`."""
    ### BEGIN SOLUTION
    tensor, data, pipeline = places(group.rank, t, p, d)
    stage = pipeline.index(group.rank)
    first, last = stage == 0, stage == p - 1
    grads = {name: np.zeros_like(value) for name, value in shard.items()}
    kept, loss = [], 0.0
    for i in range(m):
        x = shard["E"][tokens[i]] if first else group.receive(pipeline[stage - 1])
        x, caches = forward(group, tensor, shard, x)
        kept.append((x, caches))
        if not last:
            group.send(x, pipeline[stage + 1])
    for i in range(m):
        x, caches = kept[i]
        if last:
            part, dx = loss_backward(shard, grads, x, targets[i], samples)
            loss += part
        else:
            dx = group.receive(pipeline[stage + 1])
        dx = backward(group, tensor, shard, grads, caches, dx)
        if first:
            np.add.at(grads["E"], tokens[i], dx)
        else:
            group.send(dx, pipeline[stage - 1])
    names = sorted(grads)
    flat = np.concatenate([*(grads[name].reshape(-1) for name in names), [loss]])
    flat = sum_among(group, flat, data)
    parts = np.split(flat, np.cumsum([grads[name].size for name in names]))
    loss = sum_among(group, parts.pop(), pipeline)[0]
    return float(loss), {name: part.reshape(grads[name].shape) for name, part in zip(names, parts)}
    ### END SOLUTION


# %% check="check_step" points=12
# The loss and the gradients of a step are those of one process
def run_step(name, t, p, d, m, b, V=5, h=4, f=8, L=None):
    """Run a step. Return what came out, and the right loss and gradients of every rank."""
    random = check_data(name)
    model = draw_model(random, V, h, f, L or p)
    tokens, targets = random.integers(V, size=(2, d, m, b))
    outcome = run(t * p * d, "step", t, p, d, m, each(shards_of(model, t, p, d)), each(dealt(tokens, t, p, d, 0)),
                  each(dealt(targets, t, p, d, p - 1)), d * m * b, allow=MESSAGES, limit=SOON,
                  hint="which rank sends first, and does its receiver come to receive?")
    loss, grads = whole_step(model, tokens, targets)
    return outcome, loss, shards_of(grads, t, p, d)


def check_step(*sizes, **others):
    outcome, loss, grads = run_step("step", *sizes, **others)
    t, p, d, m, b = sizes
    what = f"t = {t}, p = {p}, d = {d}, {m} microbatches of {b}"
    losses, found = expect_values(outcome.results, ("the loss", "the gradients"))
    expect_equal(losses, [loss] * (t * p * d), f"{what}: the loss",
                 "each microbatch adds its samples' losses, divided by all samples; then sum over replicas and stages.")
    for rank, (mine, right) in enumerate(zip(found, grads)):
        expect_dicts([mine], [right], f"{what}: rank {rank}'s gradient", "where is a sum over a group missing, or one "
                     "too many? Compare with t = 1, with p = 1 and with d = 1.")
    expect_step_sent(outcome, what, t, p, d, m, b, others.get("h", 4), grads)


check_step(2, 2, 2, 2, 3)
check_step(1, 2, 1, 3, 2)
passed("a step on 2 x 2 x 2 ranks, and on a pipeline alone")
### BEGIN HIDDEN TESTS
check_step(4, 2, 1, 1, 2)
check_step(1, 4, 2, 5, 1)
check_step(2, 1, 3, 2, 2, L=3)
check_step(1, 3, 2, 2, 2, L=6)
### END HIDDEN TESTS

# %% [markdown]
# ## 4. Predict, before it runs
#
# Count for your own `step`, with $l = L/p$ layers in each stage:
#
# - `sent`: how many *elements* each rank sends. Sums within a group of $k$ ranks cost $2 (k-1) n / k$ elements if $k$
#   divides $n$; let the last sum of the step carry what you like, but count it. It has to be exact for your `step`.
# - `held`: how many elements each rank holds at most: its parameters, as many gradients, and for each layer of each
#   microbatch in flight the input $[b, h]$ and the hidden $[b, f/t]$, with the schedule *1F1B*, in which stage $i$
#   (counted from 0) never has more than $\min(m, p - i)$ microbatches in flight.
# - `bubble`: which fraction of the step each rank idles, with GPipe or 1F1B, if a forward takes 1 and a backward 2 on
#   every stage, and messages take no time.
#
# `predict(t, p, d, m, b, V, h, f, L)` returns a dict of `sent` and `held`, lists with a number for each rank, and
# `bubble`, one number.

# %% answer="predict"
# %%answer predict
def predict(t, p, d, m, b, V, h, f, L):
    """Return {"sent": elements of each rank, "held": elements of each rank, "bubble": a fraction}."""
    ### BEGIN SOLUTION
    def ring(k, n, mine):
        sizes = [n // k + (chunk < n % k) for chunk in range(k)]
        return sum(sizes[(mine - i) % k] + sizes[(mine - i + 1) % k] for i in range(k - 1))

    sent, held = [], []
    for rank in range(t * p * d):
        shard, replica, stage = rank % t, rank // t % d, rank // (t * d)
        own = 2 * (L // p) * h * (f // t) + V * h * (stage == 0) + V * h * (stage == p - 1)
        in_layers = m * 2 * (L // p) * ring(t, b * h, shard)
        to_stages = m * b * h * ((stage < p - 1) + (stage > 0))
        sent.append(in_layers + to_stages + ring(d, own + 1, replica) + ring(p, 1, stage))
        held.append(2 * own + min(m, p - stage) * (L // p) * (b * h + b * f // t))
    return {"sent": sent, "held": held, "bubble": (p - 1) / (m + p - 1)}
    ### END SOLUTION


# %% check="check_sent" points=8
# What was predicted to be sent, beside what was counted; and it is not too much
CASES = [(2, 2, 2, 2, 2, 8, 4, 8, 2)]
### BEGIN HIDDEN TESTS
CASES += [(1, 4, 2, 3, 2, 8, 4, 8, 4), (4, 1, 2, 2, 4, 6, 4, 8, 3), (2, 2, 2, 4, 3, 5, 8, 4, 4)]
### END HIDDEN TESTS


def predicted(case):
    """Return the answer's prediction for a case, checked: two lists of numbers, and a number."""
    found, = run(None, "predict", *case).results
    expect(isinstance(found, dict) and {"sent", "held", "bubble"} <= set(found),
           f"predict should return a dict with sent, held and bubble; it returns {type(found).__name__}.")
    return found


for case in CASES:
    t, p, d, m, b, V, h, f, L = case
    outcome, _, grads = run_step("sent", t, p, d, m, b, V, h, f, L)
    what = f"t, p, d, m, b, V, h, f, L = {case}"
    expect_equal([predicted(case)["sent"]], [outcome.sent], f"{what}: sent", "expected is what was counted, rank by "
                 "rank. Begin with the case in which only one of t, p and d is not 1.", tolerance=0)
    expect_step_sent(outcome, what, t, p, d, m, b, h, grads)
passed("sent is as predicted, element by element")

# %% check="check_held" points=5
# What was predicted to be held
def check_held(case, right):
    expect_equal([predicted(case)["held"]], [right], f"t, p, d, m, b, V, h, f, L = {case}: held",
                 "which stages have E or U? How many microbatches are in flight on the last stage?", tolerance=0)


check_held(CASES[0], [160, 160, 160, 160, 144, 144, 144, 144])
passed("held is as the inventory says")
### BEGIN HIDDEN TESTS
from reference.schedules.generators import make
from reference.schedules.simulate import Times, activations_in_flight, simulate


def held_by_inventory(t, p, d, m, b, V, h, f, L):
    """Return the sizes of all arrays of each rank, added up, with the caches that 1F1B keeps."""
    found, in_flight = [], activations_in_flight(make("1f1b", p, m))
    for rank, shard in enumerate(shards_of(draw_model(check_data("sizes"), V, h, f, L), t, p, d)):
        most = in_flight[place(rank, t, p, d)[2]]
        cache = sum(b * A.shape[0] + b * A.shape[1] for A in shard["A"])
        found.append(2 * sum(array.size for array in shard.values()) + most * cache)
    return found


for case in CASES:
    check_held(case, held_by_inventory(*case))
### END HIDDEN TESTS

# %% check="check_bubble" points=3
# What was predicted to be wasted
def check_bubble(case, right):
    expect_equal([predicted(case)["bubble"]], [right], f"p = {case[1]}, m = {case[3]}: bubble",
                 "draw the schedule, and count the time in which a stage does nothing.")


check_bubble(CASES[0], 1 / 3)
passed("the bubble is as the schedule says")
### BEGIN HIDDEN TESTS
from reference.schedules.generators import make
from reference.schedules.simulate import Times, simulate


def bubble_played(p, m):
    """Return the idle fraction of GPipe, played: each action begins when its inputs are there and its stage is free."""
    played = simulate(make("gpipe", p, m), Times(1.0, 2.0, 0.0)).makespan
    return 1 - 3 * m / played


for case in CASES:
    check_bubble(case, bubble_played(case[1], case[3]))
### END HIDDEN TESTS

# %% [markdown]
# ## 5. Train
#
# `train(group, t, p, d, m, steps, shard, tokens, targets, samples, learning_rate)` trains with plain SGD, a step for
# each global batch: `tokens` and `targets` are $[\text{steps}, m, b]$ or `None`, as before. It returns the list of
# losses, and the shard after the last step.
#
# `settings()` returns a dict with the `learning_rate`, and with `m`, the microbatches into which each replica's 32
# samples are divided. The data are a random chain of 12 tokens: the best possible loss is its entropy. On
# $2 \times 2 \times 2$ ranks, within 40 steps, the mean of the last ten losses must be at most 0.35 nats above that,
# and the bubble no larger than a fifth of the step.

# %% answer="train"
# %%answer train
def train(group, t, p, d, m, steps, shard, tokens, targets, samples, learning_rate):
    """Return the losses of all steps, and this rank's shard after the last one."""
    ### BEGIN SOLUTION
    losses = []
    for i in range(steps):
        loss, grads = step(group, t, p, d, m, shard, None if tokens is None else tokens[i],
                           None if targets is None else targets[i], samples)
        losses.append(loss)
        shard = {name: value - learning_rate * grads[name] for name, value in shard.items()}
    return losses, shard
    ### END SOLUTION


def settings():
    """Return {"learning_rate": ..., "m": ...}."""
    ### BEGIN SOLUTION
    return {"learning_rate": 0.3, "m": 4}
    ### END SOLUTION


# %% check="check_train" points=12
# A run on 2 x 2 x 2 ranks: every loss and the last weights are those of one process, and it learns
SIZES = {"V": 12, "h": 16, "f": 32, "L": 2}
EACH = 32               # samples of a replica
TINY = {"V": 5, "h": 4, "f": 8, "L": 2}     # of a first run of one step, which is too short to gather all shards


def run_training(steps, learning_rate, m, b, sizes):
    """Train on 2 x 2 x 2 ranks. Return what came out, the data's entropy, and the right losses and last shards."""
    random = check_data("training")
    model, (chain, often, entropy) = draw_model(random, **sizes), draw_chain(random, sizes["V"])
    tokens, targets = draw_samples(random, chain, often, (steps, 2, m, b))
    places_of = 2, 2, 2
    outcome = run(8, "train", *places_of, m, steps, each(shards_of(model, *places_of)),
                  each(dealt(tokens, *places_of, 0)),
                  each(dealt(targets, *places_of, 1)), 2 * m * b, learning_rate, allow=MESSAGES, limit=LIMIT)
    losses = []
    for one, other in zip(tokens, targets):
        loss, grads = whole_step(model, one, other)
        losses.append(loss)
        model = {name: value - learning_rate * grads[name] for name, value in model.items()}
    return outcome, entropy, losses, shards_of(model, *places_of)


found, = run(None, "settings").results
expect(isinstance(found, dict) and {"learning_rate", "m"} <= set(found), "settings should return a dict with "
       "learning_rate and m.")
rate, m = found["learning_rate"], found["m"]
expect(isinstance(rate, int | float) and 0 < rate < 100, f"learning_rate should be a positive number; it is {rate!r}.")
expect(type(m) is int and 1 <= m <= EACH and EACH % m == 0,
       f"m should be a whole number that divides {EACH}; it is {m!r}.")
expect(m >= 4, f"With m = {m} the bubble is larger than a fifth of the step.", "more microbatches, smaller bubble.")
for steps, batch, sizes in ((1, (2, 3), TINY), (STEPS, (m, EACH // m), SIZES)):
    outcome, entropy, losses, shards = run_training(steps, float(rate), *batch, sizes)
    mine, last = expect_values(outcome.results, ("the losses", "the shard"))
    expect_equal(mine, [losses] * 8, "the losses", "the first that differs belongs to the first wrong step.", 1e-6)
    for rank, (one, right) in enumerate(zip(last, shards)):
        expect_dicts([one], [right], f"rank {rank}'s shard after {steps} steps",
                     "is every weight moved, by its own gradient?")
    expect_step_sent(outcome, f"{steps} steps of training", 2, 2, 2, *batch, sizes["h"], shards, steps)
end = float(np.mean(losses[-10:]))
expect(end <= entropy + ABOVE, f"The last ten losses are {end:.3f} in the mean; the entropy is {entropy:.3f}, and "
       f"{entropy + ABOVE:.3f} is the goal.", "try other learning rates: by factors of two.")
passed(f"{STEPS} steps end at {end:.3f} nats; the entropy is {entropy:.3f}")

# %% [markdown]
# ## 6. Measure: how large should a bucket be?
#
# Your `step` sums all gradients at its end, when nothing is left to compute meanwhile. Shardlab sums them in *buckets*:
# as soon as the backward has completed one, its sum begins, and the backward goes on. Large buckets begin late, and
# their sums are still under way when the backward has ended: that time is *exposed*. Small ones need many messages,
# each with its latency. No formula of these labs tells you where the best size is. Measure it, on eight ranks:
#
#     python -m mpi_impl.launch -n 8 -m mpi_impl.pretrain_gpt --num-layers 8 --hidden-size 64 --num-attention-heads 4 \
#         --seq-length 32 --vocab-size 301 --data-path LICENSE --micro-batch-size 2 --global-batch-size 16 \
#         --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --train-iters 6 --eval-iters 0 \
#         --ddp-bucket-size SIZE --trace runs/bucket --trace-clock virtual
#
# Run it in the folder that contains `LICENSE`: in a cell of this notebook, write `!cd ../.. && ` before it; in a
# terminal in that folder, write `.venv/bin/python` for `python`. Then `exposed("../../runs/bucket")` reads the trace.
# The virtual clock counts as if each rank had a device of its own, so a laptop will do.
#
# Measure at least five sizes, the largest at least 64 times the smallest, at least three times each, in turn and not
# one after the other (why?). `measured()` returns them, and the size that you choose: a size whose median is within 5 %
# of the smallest median.

# %% locked="trace_tools"
import json
from pathlib import Path
from statistics import median


def exposed(folder):
    """Return the milliseconds in which a rank waits for sums of gradients, over the traced steps; the mean of ranks."""
    events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    ranks = {event["pid"] for event in events}
    return sum(event["dur"] for event in events if event["name"] == "gradients") / 1000 / len(ranks)


# %% answer="measured"
# %%answer measured
def measured():
    """Return {"exposed": {bucket size: [milliseconds, one for each run]}, "chosen": bucket size}."""
    ### BEGIN SOLUTION
    # On two cores, which eight ranks share: so times scatter, and other machines choose other sizes.
    return {"exposed": {1024: [14.55, 4.18, 2.57], 4096: [17.82, 8.37, 14.7], 16384: [42.13, 26.59, 11.81],
                        65536: [14.64, 4.72, 6.12], 262144: [7.33, 4.76, 4.45]}, "chosen": 1024}
    ### END SOLUTION


# %% check="check_measured" points=5
# Enough was measured, and the choice follows from it
found, = run(None, "measured").results
expect(isinstance(found, dict) and {"exposed", "chosen"} <= set(found) and isinstance(found["exposed"], dict),
       "measured should return a dict with exposed, which is a dict, and chosen.")
table = found["exposed"]
expect(all(type(size) is int and size > 0 for size in table) and len(table) >= 5,
       f"exposed should have at least five bucket sizes, whole numbers; it has {len(table)} keys.")
expect(max(table) >= 64 * min(table), f"The sizes reach from {min(table)} to {max(table)}; the largest should be at "
       "least 64 times the smallest.", "the best one may be outside.")
for size, times in table.items():
    expect(isinstance(times, list | tuple) and len(times) >= 3
           and all(isinstance(time, int | float) and 0 <= time < 1e6 for time in times),
           f"Bucket size {size} should have a list of at least three times in milliseconds.")
    expect(len(set(times)) > 1, f"All runs with bucket size {size} took {times[0]} ms: were they measured?",
           "measurements of a computer are never all the same.")
best = min(table, key=lambda size: median(table[size]))
chosen = found["chosen"]
expect(type(chosen) is int and chosen in table, f"chosen should be one of the sizes {sorted(table)}.")
expect(median(table[chosen]) <= 1.05 * median(table[best]),
       f"You chose {chosen}, with a median of {median(table[chosen]):g} ms; {best} has {median(table[best]):g} ms.")
passed(f"{len(table)} sizes were measured, and {chosen} follows from them")

# %% [markdown]
# ## Your page
#
# Put the run on one page, which a colleague can read without this notebook, and hand it in as a PDF beside the
# notebook. It has three plots, each with axes, units and a caption of at most three sentences:
#
# 1. *The run.* The losses of your 40 steps, those of one process, and the entropy. The next cell draws a beginning.
# 2. *Predicted and counted.* For each rank, what `predict` says is sent, beside `outcome.sent`, for two choices of
#    $(t, p, d)$. And for the run of section 6, what it says about itself with `--verbose`: the ledger's elements, the
#    memory of a rank, each beside its formula; and the bubble of its timeline beside yours.
# 3. *Buckets.* The exposed milliseconds for each bucket size, all runs and the medians, with the size that you chose.
#
# Whatever does not agree belongs on the page, with the reason, or with what you would measure to find it.

# %%
# import matplotlib.pyplot as plt
# plt.plot(mine[0], label="8 ranks"); plt.plot(losses, "--", label="one process")
# plt.axhline(entropy, color="gray", label="entropy")
# plt.xlabel("step"); plt.ylabel("nats per sample"); plt.legend(); plt.show()

# %% [markdown]
# ## To think about
#
# - Which of the sums in `step` could run while something else computes? Which order of the backward would allow it?
# - With ZeRO-1 in place of the last sum, which of your predictions change, and by how much?
# - You get 64 ranks for the same model. Which of $t$, $p$ and $d$ do you raise first, and which prediction tells you?

# %% [markdown]
# ## In your own words
#
# Ten points are for two answers in words, which a person reads together with your page: at most 150 words each, with a
# reason for every claim. Write below each question, where it says YOUR ANSWER HERE. A double click opens the cell.
#
# **First** (5 points). Which of bytes, memory and bubble did you predict exactly, which only roughly, and which of your
# first predictions were wrong? Explain the largest difference that your second plot shows, or how you made sure that
# there is none.

# %% [markdown] writing="predicted_and_counted" points=5
# YOUR ANSWER HERE

# %% [markdown]
# **Second** (5 points). Defend your bucket size from your third plot: how far apart are the runs of one size, compared
# with the sizes? What makes small buckets slow here, and what large ones? On which other machine, or for which other
# model, would you choose another size, and in which direction?

# %% [markdown] writing="a_bucket_size_defended" points=5
# YOUR ANSWER HERE
