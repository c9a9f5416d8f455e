# %% [markdown]
# # 11. Precision: training in 16 bits
#
# A number of 16 bits takes half the memory of one of 32, half the time to send, and a GPU multiplies such numbers
# several times as fast; so does a CPU's core, if it has instructions for that ([what that wins, and
# where](../docs/precision.md)). So large models compute in 16 bits. But not everything can be done in 16 bits, and
# where it cannot, it fails quietly: no error, only a model that learns less, or nothing.
#
# **You will** see which numbers 16 bits can represent; watch three computations fail in them, and correct each; let a
# loss scale adjust itself; see an overflow on one of four ranks stop all four; and train in three formats on real
# ranks.
#
# **You need** walkthrough *Splitting matrices*, and from walkthroughs *Data parallelism* and *ZeRO* what replicas,
# gradients and the optimizer are. About 55 minutes.

# %%
# %load_ext shardlab.notebook
import inspect

import numpy as np

from mpi_impl.runtime.arrays import dtype_of
from shardlab.notebook.pictures.charts import draw_bars, draw_curves
from shardlab.notebook.pictures.formats import draw_bits, draw_fates, draw_number_lines, draw_rounding, draw_scale
from shardlab.notebook.predictions import reveal
from reference.precision import FORMATS, rounded

# %% [markdown]
# ## Which numbers there are
#
# A floating-point number is $\pm\, 1.f \times 2^e$: a sign, a *fraction* $f$ of a few binary digits, and an *exponent*
# $e$. For example $0.15625 = 1.25 \times 2^{-3}$. The fraction decides how many digits a number has, the exponent how
# large and how small it can be. Two formats of 16 bits are used for training, and they divide the bits differently:

# %%
float16, bfloat16, float32 = forms = [FORMATS[name] for name in ("float16", "bfloat16", "float32")]
draw_bits(forms)

# %%
for form in forms:
    smallest = form.smallest_normal * form.epsilon
    print(f"{form.name:9} {form.bytes} bytes; after 1 comes 1 + {form.epsilon:.1e}; smallest above 0 {smallest:.0e}, "
          f"with all digits {form.smallest_normal:.0e}; largest {form.largest:.3g}")
assert float16.largest == 65_504 and round(float16.smallest_normal * float16.epsilon, 8) == 6e-8

# %% [markdown]
# float16 has more digits (about 3 decimal ones), but it ends at 65,504 above and $6 \times 10^{-8}$ below. bfloat16 has
# float32's exponent, so it has the same range, but only 2 to 3 digits. The picture has a tick for each number, just
# above 1, near 0, and around the largest of float16 (a band if there are more than can be drawn):

# %%
draw_number_lines(forms, [(1, 1.04), (0, 1e-6), (63_000, 68_000)])

# %% [markdown]
# A result that falls between two numbers is *rounded* to the nearer one, or, if both are equally near, to the one whose
# last bit is 0. Above the largest number it is infinite (`inf`). `rounded` in `reference/precision.py` does this for
# any format. Is it what NumPy's float16 does, and bfloat16 of the package `ml_dtypes`?

# %%
for value in 0.1, 1 / 3, 2049.0, 70_000.0, 1e-8:
    print(f"{value:10.6g} ->", ", ".join(f"{form.name} {rounded(np.array(value), form):.6g}" for form in forms[:2]))

random = np.random.default_rng(1)
many = (random.normal(size=100_000) * np.exp2(random.integers(-30, 20, 100_000))).astype(np.float32)
with np.errstate(over="ignore"):                    # NumPy would warn of what becomes infinite
    for name in "float16", "bfloat16":
        theirs = many.astype(dtype_of(name))
        print(f"{name}: the same, 100,000 times: {np.array_equal(rounded(many, FORMATS[name]), theirs)}")

# %% [markdown]
# How large is the rounding error, relative to the number? With all digits available it is at most half of `epsilon`,
# the distance from 1 to the next number, whatever the size. To the left of $2^{-14}$ float16 has fewer and fewer
# digits, until a number becomes 0 and the error is as large as the number:

# %%
draw_rounding(forms, (-30, 20))

# %% [markdown]
# The next sections show the three things that must not be done in 16 bits ([Micikevicius et al.
# 2017](https://arxiv.org/abs/1710.03740), section 3).
#
# ## One: small updates
#
# A weight is 1, and every step of training moves it by $-0.0001$. After 1,000 steps it should be 0.9. In 16 bits the
# distance to the next number below 1 is more than twice that, so $1 - 0.0001$ is rounded to 1, every time.
# (`np.add.accumulate` adds one number after another, and rounds each time.)
#
# **Predict.** What is the weight in float16 after the 1,000 updates?

# %%
guess = ...                # the weight

# %% tags=["hide-output"]
steps = np.full(1001, -1e-4)
steps[0] = 1.0
weight = {form.name: np.add.accumulate(steps.astype(dtype_of(form.name))).astype(float) for form in forms}
copy = rounded(weight["float32"], bfloat16)
assert all(1 - form.epsilon / 2 < 1 - 2e-4 for form in forms[:2])       # the next number below 1
reveal(guess, weight["float16"][-1], "is the weight in float16")
draw_curves({"float16": weight["float16"], "bfloat16": weight["bfloat16"], "float32, rounded to bfloat16": copy,
             "float32": weight["float32"]}, "updates", "the weight", "a weight that should go from 1 to 0.9")

# %%
for name, course in weight.items():
    print(f"{name:9} after 1,000 updates: {course[-1]:.4f}")

# %% [markdown]
# The remedy is in the picture, too. Keep the weight in float32 and update *that*: it is called the **master weight**.
# The model computes with a rounded copy, and gets a new one after each step. The copy moves in jumps, but it follows
# the master weight.
#
# How often does this happen? Weights of a GPT begin with a standard deviation of 0.02. Adam moves a weight by about the
# learning rate. Which fraction of such updates is lost completely?

# %%
weights = random.normal(size=50_000) * 0.02

def share_lost(form, rate):
    """Return the share of updates by `rate` that leave a weight unchanged."""
    return np.mean(rounded(rounded(weights, form) + rate, form) == rounded(weights, form))

rates = np.exp2(np.arange(-22, -6, 1 / 4) + 1 / 8)
lost = {form.name: [share_lost(form, rate) for rate in rates] for form in (bfloat16, float16, float32)}
draw_curves(lost, "learning rate", "share of updates that are lost", x=rates, log="x")

# %% [markdown]
# The curves have steps. From one power of 2 to the next all numbers of a format are equally far apart, and that
# distance is a power of 2 as well. An update is lost if it is less than half of it. So a learning rate loses the same
# fraction as any other between the same two powers of 2. (At a power of 2 itself some updates end just half-way, and
# are lost if the weight's last bit is 0. The points of the curves avoid these.)
#
# Megatron-LM's GPT was trained with a learning rate of $1.5 \times 10^{-4}$, which falls to $10^{-5}$ in the course of
# training ([Shoeybi et al. 2019](https://arxiv.org/abs/1909.08053), section 4.2). How many updates does bfloat16 lose
# in the beginning, and how many in the end? (`least` is the smallest weight at which its numbers are more than twice
# the update apart.)

# %%
for rate in 1.5e-4, 1e-5:
    least = 2 ** np.ceil(np.log2(2 * rate / bfloat16.epsilon))
    print(f"learning rate {rate:.1e}: {share_lost(bfloat16, rate):.2%} of the updates are lost, "
          f"{np.mean(abs(weights) >= least):.2%} of the weights are {least:.4g} or larger")

# %% [markdown]
# Hardly any in the beginning, and most of them in the end.
#
# This is the place in the machine that updates weights; `param` is a master weight, `model` gets the model's copy:

# %%
from mpi_impl.kernels.plain import adam_update, copy_to_model

print(inspect.getsource(adam_update), inspect.getsource(copy_to_model), sep="\n\n")

# %% [markdown]
# ## Two: long sums
#
# A matrix product adds up thousands of terms; so do softmax, layer norm, and the sum of gradients over a batch. Add
# 0.1, 4,000 times:
#
# **Predict.** The sum should be 400. Where does it end in bfloat16, whose numbers have 8 binary digits?

# %%
guess = ...                # the sum

# %% tags=["hide-output"]
sums = {form.name: np.add.accumulate(np.full(4000, 0.1, dtype_of(form.name))).astype(float) for form in forms}
assert (sums["float16"][-1], sums["bfloat16"][-1]) == (256, 32)
reveal(guess, sums["bfloat16"][-1], "is the sum in bfloat16")
draw_curves(sums, "terms", "sum so far", "0.1, added up 4,000 times")

# %% [markdown]
# When the sum is so large that 0.1 is less than half the distance to the next number, it stops growing: at 256 in
# float16, at 32 in bfloat16. (Before that it is too large: each addition was rounded, for a long time always upwards.)
# The remedy: **add up in float32, and round once**, at the end. That is what a GPU's matrix unit does, and what the
# kernels of this project do (`mpi_impl/kernels/half.py`):

# %%
from mpi_impl.kernels import linear

for name in "float16", "bfloat16":
    x, w = np.full((1, 4000), 0.1, dtype_of(name)), np.ones((4000, 1), dtype_of(name))
    exact, y = float(x[0, 0]) * 4000, linear(x, w)      # 0.1 itself is rounded: that is not the sum's fault
    close = abs(float(y[0, 0]) - exact) <= exact * FORMATS[name].epsilon / 2
    print(f"{name:8} exact {exact:.2f}; one by one {sums[name][-1]:.0f}; the kernel {float(y[0, 0]):.0f}, {y.dtype};",
          f"off by at most epsilon / 2: {close}")

# %% [markdown]
# A sum over ranks is a sum, too. Suppose that rank 0 has 2,048 and seven others 1 each. In float16 there is no number
# between 2,048 and 2,050, so a sum that is rounded after each addition stays at 2,048. The ranks' all-reduce sends 2
# bytes for each number, but it adds up in float32 and rounds once:

# %%
# %%ranks 8
one_by_one = np.add.accumulate(np.array([2048] + 7 * [1], np.float16))[-1]
x = np.array([2048 if rank == 0 else 1], np.float16)
group.all_reduce(x, "a sum of halves")
print(f"rounded after each addition {one_by_one:.0f}, all-reduce {x[0]:.0f}, exact {2048 + 7}")
assert np.float16(2048) + np.float16(2) == 2050 and np.spacing(np.float16(2048)) == 2

# %% [markdown]
# (2,055 is not a float16 number. 2,056 is the nearest with a last bit of 0.) Gradients of weights are summed over many
# microbatches, so they are in float32 all the time. They are called *main gradients*.
#
# ## Three: small gradients
#
# The backward pass sends gradients of *activations* from layer to layer, and those have 16 bits. How large are they?
# Let us look at all of them, in one step of a tiny GPT on real ranks. An `Observer` receives every tensor of a step
# (`shardlab/compare/`); ours keeps the gradients of activations. `connect` forms the groups of ranks, here four
# replicas:

# %%
# %%ranks 4
from mpi_impl.comm.topology import connect, disconnect
from shardlab.demos.tiny_gpt import share_of
from shardlab.compare.observer import Observer
from mpi_impl.parallel.model_state import ModelState
from mpi_impl.training.trainer import Trainer
from reference.config import ModelConfig, ParallelConfig
from reference.optimizers.adam import OptimizerConfig
from reference.precision import LossScaling, Precision

V, s, B = 16, 8, 8
def sizes(layers):
    return ModelConfig(layers, 16, 2, V, s, hidden_dropout=0, attention_dropout=0, make_vocab_size_divisible_by=1,
                       init_method_std=0.2, untie_embeddings_and_output_weights=True)

def batch(step):
    """Return tokens that count up from a random first one, so that the next token can be learnt."""
    tokens = (np.random.default_rng(step).integers(V, size=(B, 1)) + np.arange(s + 1)) % V
    return tokens[:, :-1], tokens[:, 1:]

def trainer_on(topology, precision, layers=2, rate=1e-3):
    return Trainer(ModelState(sizes(layers), topology, 1, precision),
                   OptimizerConfig(rate, 1, lr_decay_style="constant"))

def step_of(trainer, step, observer=None):
    microbatches = share_of(trainer, *batch(step), b=B // trainer.topology.data.size)
    with np.errstate(all="ignore"):         # NumPy would warn of infinities
        return trainer.step(microbatches, B, observer)

# %%
# %%ranks 4
class OfActivations(Observer):
    seen = []
    def see(self, phase, name, x, first, summed=False):
        if phase == "backward":
            self.seen.append(np.abs(x).ravel())

topology = connect(group, ParallelConfig(data_parallel_size=size))
trainer = trainer_on(topology, Precision("float32"))
step_of(trainer, 0, OfActivations(trainer.state))
disconnect(topology)
gradients = np.concatenate(OfActivations.seen)
print(f"{gradients.size:,} gradients of activations")

# %% [markdown]
# Our batch has $8 \times 8$ tokens. The loss is a mean over the tokens of the whole batch, so each token's gradients
# are divided by their number. In real training that is millions: the model of 145.6 billion parameters of [Narayanan et
# al. 2021](https://arxiv.org/abs/2104.04473) (table 1) takes 2,304 samples of 2,048 tokens. So let us divide ours as if
# the batch had 4 million tokens, $2^{22}$:

# %%
from reference.costs.published import PTD_P

assert any((run.billions, run.B) == ("145.6", 2304) for run in PTD_P)
gradients = np.concatenate(ranks["gradients"]) * (8 * 8) / 2**22
small = abs(gradients[gradients != 0])
print("a quarter, half and three quarters of them are below",
      *(f"2^{np.log2(np.quantile(small, share)):.1f}" for share in (0.25, 0.5, 0.75)))

# %% [markdown]
# The smallest number of float16 is $2^{-24}$, and numbers larger than half of it are rounded up to it.
#
# **Predict.** Which share of these gradients becomes 0 in float16?

# %%
guess = ...                # as a share: 0.5 is half of them

# %% tags=["hide-output"]
for scale in 1.0, 2.0**20:
    back = rounded(small * scale, float16) / scale
    print(f"scale {scale:9,.0f}: {np.mean(back == 0):4.0%} are 0;",
          f"the errors add up to {np.abs(back - small).sum() / small.sum():.0%} of the gradients")
reveal(guess, np.mean(rounded(small, float16) == 0), "of the gradients become 0")
draw_fates(gradients, [1.0, 2.0**20, 2.0**40], float16)

# %% [markdown]
# In the first panel they are as they are. (The first dashed line is the smallest number of float16. Up to the second
# line digits are missing. The third is 65,504.)
#
# The remedy is to **multiply the loss by a scale** before the backward pass (section 3.2 of the paper). By the chain
# rule all gradients are multiplied by it. They move into the middle of float16's range, and the optimizer divides by it
# again, in float32: the second panel. If the scale is too large, they become infinite: the third. (In bfloat16 none of
# this happens: it has the range of float32.)
#
# If the scale is a power of 2, it changes only exponents, and no digit:

# %%
print("bfloat16, the same bits with a scale of 2^20 and without:",
      np.array_equal(rounded(small * 2.0**20, bfloat16) / 2.0**20, rounded(small, bfloat16)))

# %% [markdown]
# ## A scale that adjusts itself
#
# How large should the scale be? As large as possible without overflow; and gradients change during training. So it is
# found by trying. A step whose gradients are not finite is *skipped*: no weight changes. From the second such step on
# (the *hysteresis*) the scale is halved each time. After a number of good steps in a row (the *window*) it is doubled.
# That is Megatron-LM's rule:

# %%
from reference.precision import LossScaler, LossScaling

print(inspect.getsource(LossScaler.update))

# %% [markdown]
# Here we make up the largest gradient of each step: it wanders, and once it jumps. A step overflows if scale x gradient
# is more than 65,504. (The window of 8 steps is short so that something happens; Megatron-LM's is 1,000.)

# %%
step = np.arange(90)
largest = 2.0**-8 * np.exp2(2 * np.sin(step / 12)) * np.where(step > 60, 2.0**5, 1)
scaler, scales, skipped = LossScaler(LossScaling(initial_loss_scale=2.0**30, loss_scale_window=8)), [], []
for size in largest:
    overflow = scaler.scale * size > float16.largest
    scales.append(scaler.scale)
    skipped.append(overflow)
    scaler.update(overflow)

draw_scale(scales, skipped, float16.largest / largest, "it comes down by trying, and then follows the limit")

# %% [markdown]
# The steps that are skipped are the price. With a window of 1,000 it is one or two of a thousand.
#
# ## An overflow on one rank
#
# Now four ranks in a pipeline, a layer on each (walkthrough *Pipelines*). Gradients go from rank 3 back to rank 0, and
# here they grow on the way. We begin with a scale that is too large, halve it at each overflow, and ask each rank: are
# *your* gradients finite? And what did the step do?

# %%
# %%ranks 4
topology = connect(group, ParallelConfig(pipeline_model_parallel_size=size))
scaling = LossScaling(initial_loss_scale=2.0**25, hysteresis=1)
trainer = trainer_on(topology, Precision("float16", scaling), layers=4)
tried = []
for _ in range(7):
    before = trainer.state.optimizer_states["parameters"].flat.copy()
    result = step_of(trainer, 0)
    tried.append({"scale": result.loss_scale, "finite": bool(np.isfinite(trainer.state.gradients.own.flat).all()),
                  "skipped": result.skipped,
                  "moved": not np.array_equal(before, trainer.state.optimizer_states["parameters"].flat)})
disconnect(topology)

# %%
for everyone in zip(*ranks["tried"]):
    on = {key: str([i for i, one in enumerate(everyone) if one[key]]) for key in ("finite", "skipped", "moved")}
    print(f"2^{np.log2(everyone[0]['scale']):.0f}: own gradients finite on ranks {on['finite']:12}  "
          f"skipped on {on['skipped']:12}  weights moved on {on['moved']}")

# %% [markdown]
# With a scale of $2^{20}$ only rank 0 found an infinity. **If each rank decided for itself**, ranks 1 to 3 would have
# updated their layers, and rank 0 would not. The model would be a mixture of two different steps, and its ranks would
# continue with different scales, without any error.
#
# But in each line all ranks did the same. They did not need another message for it. Gradients are clipped by their
# norm, the root of the sum of the squares of *all* gradients, so that sum is over all ranks anyway. One infinity
# anywhere makes it infinite everywhere:

# %%
from mpi_impl.training.optimizer import global_norm

print(inspect.getsource(global_norm))

# %% [markdown]
# ## Three formats, one curve
#
# Now all remedies together, on $t = 2$ times $d = 2$ ranks. `spoil` will come later. We record the losses, the scales,
# the formats of everything that a rank holds, and what the tensor-parallel ranks sent:

# %%
# %%ranks 4
from mpi_impl.comm.group import Group, Instruments
from mpi_impl.comm.ledger import wire_bytes

def train(precision, steps=40, rate=1e-3, spoil=None):
    apart = Group(group.comm, group.name, Instruments())            # with a ledger of its own
    topology = connect(apart, ParallelConfig(tensor_model_parallel_size=2, data_parallel_size=2))
    trainer, results = trainer_on(topology, precision, rate=rate), []
    for step in range(steps):
        results.append(step_of(trainer, step))
        if spoil:
            spoil(trainer)
    disconnect(topology)
    states = {f"Adam's {name}": buffer.flat.dtype.name for name, buffer in trainer.state.optimizer_states.items()}
    held = {"model": trainer.state.parameters.own.flat.dtype.name,
            "gradients": trainer.state.gradients.own.flat.dtype.name}
    sent = {entry: wire_bytes(entry, total) for entry, total in trainer.ledger.totals.items()
            if entry.group == "tensor"}
    return {"losses": [one.loss for one in results], "scales": [one.loss_scale for one in results],
            "skipped": [one.skipped for one in results], "held": held | states, "sent": sent}

# %%
# %%ranks 4
scaling = LossScaling(initial_loss_scale=2.0**18, loss_scale_window=10)
runs = {"float32": train(Precision("float32")), "bfloat16": train(Precision("bfloat16")),
        "float16": train(Precision("float16", scaling))}
for name, run in runs.items():
    print(f"{name:8} {', '.join(f'{what} {dtype}' for what, dtype in run['held'].items())}")

# %% [markdown]
# (`Adam's parameters` are the master weights. In float32 they are the model's own.)

# %%
runs = ranks["runs"][0]
draw_curves({name: run["losses"] for name, run in runs.items()}, "step", "loss", "the same training in three formats")

# %%
skips = runs["float16"]["skipped"]
together = skips.index(True)
for name in "bfloat16", "float16":
    off = max(abs(a - b) for a, b in zip(runs[name]["losses"][:together], runs["float32"]["losses"]))
    print(f"{name:8} closer to float32 than 0.02, until float16 skips its first step: {off < 0.02}")
draw_scale(runs["float16"]["scales"], skips, title="float16's loss scale")

# %% [markdown]
# The three curves coincide until float16's scale has been doubled once too often and a step is skipped. From then on
# its weights are one update behind, and after the second cross two.
#
# ### Without the remedies
#
# What if float16 had no scale, with the large batch from above? A scale of $2^{-16}$ makes our gradients as small as
# those of $64 \times 2^{16}$ tokens, 4 million. And what if the weights were only in bfloat16? After each step we
# overwrite the master weights with the model's copy, and use a learning rate as near the end of training:

# %%
# %%ranks 4
def forget(trainer):
    trainer.state.optimizer_states["parameters"].flat[...] = trainer.state.parameters.own.flat

no_scale = train(Precision("float16", LossScaling(loss_scale=2.0**-16)))
slowly = {"float32": train(Precision("float32"), rate=2e-4),
          "bfloat16 without master weights": train(Precision("bfloat16"), rate=2e-4, spoil=forget)}

# %%
no_scale = ranks["no_scale"][0]
draw_curves({"float32": runs["float32"]["losses"], "float16 without a scale": no_scale["losses"]}, "step", "loss",
            "a batch of 4 million tokens")

# %%
slowly = ranks["slowly"][0]
draw_curves({name: run["losses"] for name, run in slowly.items()}, "step", "loss", "a small learning rate")

# %%
for name, wrong, right in (("no scale", no_scale, runs["float32"]),
                           ("no master weights", slowly["bfloat16 without master weights"], slowly["float32"])):
    learnt = [run["losses"][0] - run["losses"][-1] for run in (wrong, right)]
    print(f"{name}: steps skipped {sum(wrong['skipped'])}; the loss fell at all: {learnt[0] > 0};",
          f"by less than 80 % of what float32's fell by: {learnt[0] < 0.8 * learnt[1]}")

# %% [markdown]
# Both learn. Nothing shows that something is wrong. You only see it next to a correct curve.
#
# ## What does it save?
#
# Not the memory of the model's states! Bytes for each parameter, as `Precision` counts them; the paper of ZeRO
# has gradients of 2 bytes, which is what walkthrough *ZeRO* counted with:

# %%
from shardlab.report.charts import MEMORY
from reference.precision import Precision

rows = {"float32": Precision("float32").bytes_each, "16 bits, here": Precision("bfloat16").bytes_each,
        "16 bits, in the ZeRO paper": (2, 2, 12)}
draw_bars({name: dict(zip(("parameters", "gradients", "optimizer"), each)) for name, each in rows.items()},
          "bytes for each parameter", colors=MEMORY)

# %% [markdown]
# It saves activations, and messages between the ranks that shard a layer. One layer of Megatron-LM's model of 8.3
# billion parameters, with 4 samples; and what our 4 ranks have sent:

# %%
from shardlab.predict.predict import layer_bytes
from shardlab.predict.rank import ImaginedWorld
from reference.config import ModelConfig, ParallelConfig
from reference.costs.parameters import parameters

large = ModelConfig(72, 3072, 32, 51_200, 1024)
for name in "float32", "bfloat16":
    kept = layer_bytes(ImaginedWorld(large, ParallelConfig(), Precision(name), 4, 1024, 1))
    sent = {}
    for entry, size in runs[name]["sent"].items():
        sent[entry.dtype] = sent.get(entry.dtype, 0) + size // 40
    print(f"{name:8} a layer's activations {kept / 1e9:.2f} GB; sent in a step, bytes:", sent)
assert f"{parameters(large) / 1e9:.1f}" == "8.3"

# %% [markdown]
# (The activations are less than half, since the kernel of 16 bits also computes attention's probabilities again, as
# FlashAttention does. Only the loss is still sent in float32: its maxima and sums.) And on a GPU it saves time.
#
# ## What to take away
#
# | must not be done in 16 bits | because | remedy |
# |---|---|---|
# | updating weights | the update is less than half the distance to the next number | master weights in float32 |
# | long sums | the sum outgrows its terms | add up in float32, round once |
# | small gradients (float16) | below $2^{-24}$ there is only 0 | multiply the loss by a scale |
#
# - bfloat16 has float32's range and 2 to 3 digits: no scale. float16 has a digit more, and needs one.
# - A step that overflows on any rank must be skipped on all. The norm of the gradients shows it to all of them.
# - None of these mistakes raises an error. Compare losses with float32.
#
# ## Try it
#
# 1. Master weights *in bfloat16*, but each update rounded up or down at random, so that it is right on average
#    (stochastic rounding): add it to the first experiment. Where does the weight end?
# 2. Give the made-up gradients a `min_loss_scale`, and a `hysteresis` of 1. What changes, and what is the hysteresis
#    good for?
# 3. Sum the 4,000 numbers pairwise (halves of halves) in float16. How large is the error, and why is it so small?
#
# <details><summary>Answer to 1</summary>
#
# ```python
# def stochastically(x, random):                    # below 1, bfloat16's numbers are 1/256 apart
#     return np.floor(x * 256 + random.random()) / 256
#
# weight, random = 1.0, np.random.default_rng(0)
# for _ in range(1000):
#     weight = stochastically(weight - 1e-4, random)
# ```
#
# Near 0.9: with the seeds 0 to 11 the mean is 0.905, and the standard deviation 0.019. An update is 1/39 of the
# distance to the next number, so one in 39 moves the weight by a whole step, and the others not at all. That is right
# on average, but noisy: the deviation should be about $\frac{1}{256}\sqrt{1000/39} \approx 0.02$.
#
# </details>
#
# Next: [12. Training in 3D](12_training_in_3d.ipynb). The run for this walkthrough finds its scale, and compares every
# step with float32:
# `python -m mpi_impl.launch -n 8 -m mpi_impl.pretrain_gpt --tensor-model-parallel-size 2
# --global-batch-size 16 --train-iters 15 --log-interval 1 --fp16 --verify`.
