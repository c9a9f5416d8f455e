# %% [markdown]
# # 22. When a rank dies: failure, checkpoints, restart
#
# A run of weeks on thousands of devices is interrupted again and again. What is lost then depends on three things: how
# soon the others notice, what has been saved, and how often.
#
# **You will** kill a rank of a real run, twice, and finish the run on the ranks that are left, with the curve of a run
# that nothing has happened to; find out what a checkpoint must contain by leaving it out; and derive how often to save.
#
# **You need** walkthroughs [*ZeRO*](10_zero.ipynb) and [*Training in 3D*](12_training_in_3d.ipynb) (t, p and
# d). About 30 minutes.

# %%
# %load_ext shardlab.notebook
import json
import re
import subprocess
import sys
import tempfile
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from mpi_impl.checkpoints.on_disk import read_manifest
from mpi_impl.data.indexed import write_indexed
from shardlab.demos.tiny_gpt import global_batch, textbook_of, tiny_gpt
from shardlab.notebook.pictures.charts import draw_curves
from shardlab.notebook.predictions import reveal
from reference.batches import GPTBatch
from reference.costs.parameters import parameters

# %% [markdown]
# ## More devices, less time
#
# A device seldom breaks. But a training step needs *all* ranks: if one is missing, the others wait for it in the next
# all-reduce. So if one device fails every $M_1$ hours on average, a job on $n$ devices fails every $M = M_1 / n$ hours:
# its *mean time between failures*.
#
# Here are published numbers. The largest model of [Llama 3](https://arxiv.org/abs/2407.21783) (section 3.3.4) was
# trained on 16,384 GPUs. In 54 days its job was interrupted 466 times, 47 of them on purpose:

# %%
mtbf = 24 * 54 / (466 - 47)     # hours
one = mtbf * 16_384
print(f"the job: every {mtbf:.1f} hours; one GPU, with all that belongs to it: every {one / 24 / 365:.1f} years")

# %% [markdown]
# **Predict.** You train on 1,024 such GPUs. How many hours pass between two failures?

# %%
guess = ...                # hours

# %% tags=["hide-output"]
devices = [2**k for k in range(3, 18)]
hours = [one / n for n in devices]
reveal(guess, round(one / 1024, 1), "hours between failures on 1,024 GPUs")
draw_curves({"": hours}, "GPUs of one job", "hours between failures", "one GPU fails every 5.8 years", devices, "xy")

# %% [markdown]
# Nobody needs to plan for failures on 8 GPUs. On $2^{17}$ the job fails more than twice an hour, and a program that
# takes half an hour to start would hardly ever train.
#
# ## A rank dies
#
# We run the real program, `pretrain_gpt`, on four processes: two stages of a pipeline, of two tensor-parallel ranks
# each, for 9 iterations. It saves a checkpoint after every third. Our `PROGRAM` adds one thing: a place where one of
# the ranks ends itself by SIGKILL, in the middle of the work and without a last word. An operating system that runs out
# of memory kills a process in the same way.

# %%
PROGRAM = """
import os, signal, sys
from mpi_impl import pretrain_gpt
from mpi_impl.checkpoints import checkpoint
from mpi_impl.launch.entry import run
from mpi_impl.training.trainer import Trainer

fate = sys.argv.pop(1)      # such as `step 4 0`: when it calls this function, after this iteration, on this rank

def deadly(function):
    def call(trainer, *args):
        if fate == f"{function.__name__} {trainer.iteration} {trainer.topology.world.rank}":
            os.kill(os.getpid(), signal.SIGKILL)
        return function(trainer, *args)
    return call

Trainer.step, checkpoint.save_shards = deadly(Trainer.step), deadly(checkpoint.save_shards)
run(pretrain_gpt.main)
"""
folder = Path(tempfile.mkdtemp())
saved = folder / "saved"
(folder / "program.py").write_text(PROGRAM)
write_indexed(folder / "tokens", [np.arange(3000) % 20], 20)      # a text that counts
OPTIONS = f"""--num-layers 3 --hidden-size 16 --num-attention-heads 4 --seq-length 8 --micro-batch-size 2
    --global-batch-size 8 --train-iters 9 --eval-iters 0 --lr 0.01 --dtype float64 --tokenizer-type NullTokenizer
    --vocab-size 20 --data-path {folder}/tokens --save {saved} --save-interval 3""".split()
T2P2 = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"


def job(n, options, fate="none"):
    """Run the program on n ranks; print its exit status, and the first part of its error."""
    ended = subprocess.run([sys.executable, "-m", "mpi_impl.launch", "-n", str(n), folder / "program.py", fate,
                            *OPTIONS, *options.split()], capture_output=True, text=True)
    print("exit status", ended.returncode, re.split(";|\n", ended.stderr)[0])


def curve(name):
    """Return the losses that runs have written to a file: one that resumes goes on where its checkpoint was."""
    return [json.loads(line)["lm_loss"] for line in (folder / name).read_text().splitlines()]

# %% [markdown]
# First the unbroken run. Then the same one, in which rank 0 dies when it begins iteration 5. It is the one that
# writes the losses, so it has written four:

# %%
job(4, f"{T2P2} --save {folder}/unbroken --metrics-file {folder}/unbroken.json")
job(4, f"{T2P2} --metrics-file {folder}/broken.json", "step 4 0")
print(len(curve("broken.json")), "iterations are done; the last checkpoint:", read_manifest(saved).iteration)

# %% [markdown]
# One sentence, an exit status that is not 0, and the job has ended: no process of it is left. (A test,
# `tests/mpi_impl/test_kills.py`, kills ranks at random moments, and looks.) MPI's launcher watches its processes, and
# ends all if one dies. If a rank *stops* without dying, the launcher goes on waiting. So every wait has a time limit,
# `--distributed-timeout-minutes`: a rank that has waited so long ends the job, and says for which rank it has waited.
#
# The work of iteration 4 is lost. The job can resume from iteration 3.
#
# ## What must be in a checkpoint?
#
# The weights, of course. What else? We try: take all that a trainer holds, leave one thing out, and compare. The
# textbook's trainer makes 16 steps in one process. After 8 of them we copy its `STATE`:

# %%
STATE = {"params": "the parameters", "m": "Adam's first moments", "v": "Adam's second moments",
         "updates": "the number of updates", "iteration": "the place in dropout's random numbers",
         "batches": "the place in the data"}
model = replace(tiny_gpt(4, heads=4), hidden_dropout=0.1)


def train(state, steps):
    """Give a new trainer this state, and make steps of 8 samples each. Return their losses, and the new state."""
    trainer = textbook_of(model)
    vars(trainer).update({"batches": 0} | deepcopy(state))
    losses = [trainer.step(GPTBatch(*global_batch(trainer.batches + step, 8)))[0] for step in range(steps)]
    trainer.batches += steps
    return losses, {name: vars(trainer)[name] for name in STATE}


unbroken, _ = train({}, 16)
first, state = train({}, 8)
print("with all of it, bit for bit the unbroken run:", first + train(state, 8)[0] == unbroken)

# %% [markdown]
# A loss is computed in the forward, *before* the weights are moved.
#
# **Predict.** The parameters are loaded, and all else but Adam's first moments, which begin at 0 again. Steps 1 to 8
# were made before. Which is the first step whose loss is not that of the unbroken run?

# %%
guess = ...                # the number of a step

# %% tags=["hide-output"]
without = {what: first + train({key: state[key] for key in STATE if key != name}, 8)[0] for name, what in STATE.items()}
for what, losses in without.items():
    off = np.abs(np.subtract(losses, unbroken))
    print(f"without {what:<38} first wrong loss in step {1 + np.argmax(off > 0):2}, off by at most {off.max():.3f}")
reveal(guess, 1 + np.argmax(np.not_equal(without[STATE["m"]], unbroken)), "is the first step with another loss",
       index=True)

# %%
shown = [STATE[name] for name in ("m", "updates", "batches")]
draw_curves({"unbroken": unbroken} | {f"without {what}": without[what] for what in shown}, "step", "loss",
            "resumed after step 8")

# %% [markdown]
# So a first loss that is right proves nothing: three of the six mistakes show only one step later. A curve that falls
# proves nothing either: all of these fall. Compare numbers, over several steps.
#
# Gradients are *not* on the list: between two steps nobody needs them. Random numbers need only a counter here, since a
# dropout mask is a function of (seed, step, place), as in walkthrough *Training in 3D*. A program that draws one random
# number after another must save the state of its generator on every rank, and on another number of ranks these states
# are worth nothing.
#
# ## A checkpoint that is not finished
#
# We resume the broken run on the same four ranks. This time rank 1 dies while it saves iteration 6, before it has
# written its files. The others have written theirs.

# %%
job(4, f"{T2P2} --load {saved} --metrics-file {folder}/broken.json", "save_shards 6 1")
print("in the folder:", *sorted(re.sub(r"[.]\w+[.]tmp", ".tmp", path.name) for path in saved.iterdir()))
print("the last checkpoint:", read_manifest(saved).iteration)
print("iterations 1 to 6 bit for bit as in the unbroken run:", curve("broken.json") == curve("unbroken.json")[:6])

# %% [markdown]
# First: `iter_0000006.tmp` is what the dying job has left. (We left out a random part of its name.) A checkpoint is
# written under a name that no run looks for. When all files of all ranks are on the disk, and a list of them with their
# checksums, the folder is *renamed*, which a file system does as a whole or not at all. Then a small file, the tracker,
# is replaced in the same way: it names the last complete checkpoint. At no moment could a death leave half a checkpoint
# under a good name.
#
# Second: on the same ranks, the resumed run is the unbroken one, *bit for bit*. All sums were taken in the same order.
#
# ## Three ranks are left
#
# Say one device is broken, and no other is free. Must the run wait? Not if the checkpoint does not depend on ranks.
# Each rank has saved *boxes* of whole tensors, certain rows and columns, and a list says in which file each box is. A
# rank that loads reads the boxes that overlap its own, whoever saved them:

# %%
manifest = read_manifest(saved)
for name in ("blocks.0.mlp.w_in", "blocks.0.mlp.b_out"):
    print(name, manifest.tensors[name].shape, manifest.tensors[name].ranks_of_boxes)

# %% [markdown]
# (Each box is mapped to the rank that has saved it. A matrix that two tensor-parallel ranks shard is in two boxes. A
# bias that both hold is saved by one of them.) So three ranks can finish what four have begun, as a pipeline of three
# stages. And four replicas can, with ZeRO-3 (walkthrough *ZeRO*), of which each holds a fourth of everything:

# %%
curves = {"unbroken": curve("unbroken.json")[3:]}
for n, options in ((3, "--pipeline-model-parallel-size 3"), (4, "--zero-stage 3")):
    job(n, f"{options} --load {saved} --save {folder}/{n} --metrics-file {folder}/{n}.json")
    curves[f"{n} ranks, {options}"] = curve(f"{n}.json")
print("all losses as in the unbroken run, to 1e-12:", np.ptp(list(curves.values()), 0).max() < 1e-12)
draw_curves(curves, "iteration", "loss", "resumed after iteration 3", range(4, 10))

# %% [markdown]
# It is the same curve, since nothing in it depends on the number of ranks (walkthrough *Training in 3D*), and since a
# replica takes more microbatches if there are fewer: the *global* batch stays the same. If the batch shrinks with the
# ranks, it is another run.
#
# **Predict.** How large is a checkpoint? When our four ranks saved, each held its shards, two of them had copies of the
# biases that are added after a sum, and both stages had the table of tokens. How many numbers are in all files
# together, for each parameter of the model?

# %%
guess = ...                # numbers

# %% tags=["hide-output"]
files = map(load_file, saved.glob("iter_0000003/*.safetensors"))
reveal(guess, sum(x.size for file in files for x in file.values()) / parameters(manifest.config), "for each parameter")

# %% [markdown]
# The parameter and two moments, however many copies the ranks hold. In mixed precision it is three as well, of 4 bytes
# each: the model's own 16 bits need not be saved, for they are the master weights, rounded.
#
# ## How often?
#
# A save takes $C$ minutes, in which no rank trains. It comes after every $T$ minutes of work. A failure, once in $M$
# minutes, throws away the work since the last save: between 0 and $T$, on average half of that. So the share of time
# that is lost, by saving and by computing again, is
#
# $$\frac{C}{T} + \frac{T}{2M}.$$
#
# The first falls with $T$, the second grows. Their product does not depend on $T$, so their sum is smallest where the
# two are equal: $T = \sqrt{2CM}$ ([Young 1974](https://doi.org/10.1145/361147.361115)). This is an approximation, for
# $C$ and $T$ much smaller than $M$ ([Daly 2006](https://doi.org/10.1016/j.future.2004.11.016) has the next terms). We
# check it: the cell draws 100,000 times between failures, and counts the work that is kept. Its share of the time is
# called *goodput*.

# %%
def goodput(interval, cost, mtbf, restart=0):
    """Return the share of time whose work is kept: after a restart, work and saves take turns until the next failure.
    """
    lives = np.random.default_rng(22).exponential(mtbf, 100_000)     # minutes, as all others
    kept = np.maximum(lives - restart, 0) // (interval + cost) * interval
    return kept.sum() / lives.sum()

# %% [markdown]
# **Predict.** Failures come every 180 minutes, and a save takes 2.5. Which of the intervals 10, 20, 30, ..., 100
# minutes is best?

# %%
guess = ...                # minutes

# %% tags=["hide-output"]
intervals = range(10, 101, 10)
counted = [goodput(T, 2.5, 180) for T in intervals]
reveal(guess, intervals[np.argmax(counted)], "minutes between saves are best")
draw_curves({"counted": counted, "1 - C/T - T/2M": [1 - 2.5 / T - T / 360 for T in intervals]}, "minutes between saves",
            "goodput", "a save takes 2.5 minutes, failures come every 180", intervals)

# %% [markdown]
# The top is flat: twice as often or half as often costs little. But at the best interval a sixth of all time is lost:
# both terms are $\sqrt{C / 2M}$, together $\sqrt{2C/M}$. More devices make $M$ smaller, and the loss grows with the
# square root of their number. But $C$ can be made small: ranks copy their states into the host's memory, which takes
# seconds, and train on while a thread writes the copy to the disk (an *asynchronous* checkpoint).
#
# **Predict.** Now a save stops the training for only 0.1 minutes, a twenty-fifth. At the interval that is best for it,
# what percentage of the time is lost?

# %%
guess = ...                # percent

# %% tags=["hide-output"]
reveal(guess, round(100 * (1 - goodput((2 * 0.1 * 180)**0.5, 0.1, 180)), 1), "percent is lost")

# %% [markdown]
# One thing is missing. After each failure somebody has to notice it, replace the broken device, start all processes,
# and load: $R$ minutes, which costs the share $R/M$, whatever the interval. On more and more GPUs:

# %%
draw_curves({f"saves of {C} minutes, restarts of {R}": [goodput((120 * C * M)**0.5, C, 60 * M, R) for M in hours]
             for C, R in ((0.1, 1), (0.1, 10), (2.5, 10))}, "GPUs of one job", "goodput", x=devices, log="x")

# %% [markdown]
# For Llama 3, on 16,384 or $2^{14}$, the report states an *effective training time* above 90 %. To get there its
# authors shortened starts and saves, and wrote tools that find the broken part.
#
# ## What to take away
#
# - A step needs all ranks, so failures add up: a job on $n$ devices fails $n$ times as often as one device.
# - A rank that dies must end the job, and so must one that is silent for too long. A job that hangs costs more than one
#   that ends.
# - A checkpoint has the parameters, the moments, the loss scale if there is one (float16), and the counters that decide
#   the learning rate, the random numbers and the data. A right first loss does not show that all of it is there.
# - Write aside, then rename: what has the final name is complete.
# - Save tensors, not ranks: then any topology can resume, and with the same global batch it is the same run.
# - Save every $\sqrt{2CM}$. The loss is $\sqrt{2C/M} + R/M$: to halve the first term, make saves four times as cheap.
#
# ## Try it
#
# 1. Let the rank stop instead of dying: write `signal.SIGSTOP` in `PROGRAM`, add `--distributed-timeout-minutes 0.2` to
#    the options of the second job, and print all of `ended.stderr`. Which rank speaks, and when?
#
# <details><summary>Answer to 1</summary>
#
# First a note: a process of the job has been stopped, and can be continued. MPI's launcher does no more, since the
# process still exists. After 0.2 minutes without a sign of life *another* rank ends the job: its sentence names the
# rank that it has waited for, the group, and the reason, such as "gathered activation". Any of the waiting ranks may be
# the first, so the sentence can differ from run to run. Choose a limit longer than anything that a healthy rank may
# take, such as a save to a slow disk.
#
# </details>
#
# 2. Change one byte in the middle of a file of the checkpoint in `saved`, and resume from it once more. What is said,
#    and what would you do next? What would happen without checksums?
# 3. Begin with the weights alone, `train({"params": state["params"]})`. How far off are the losses? When does one want
#    just that?
# 4. A job on 131,072 of the GPUs above shall lose at most 10 % of its time, and a restart takes one minute. How long
#    may a save take?
#
# Next: the [labs](../course/README.md). The page [checkpoints](../docs/checkpoints.md) has the options.
