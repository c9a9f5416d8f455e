# %% [markdown]
# # 17. A bridge to PyTorch
#
# Everything so far was NumPy and MPI. Large models are trained with PyTorch, whose `torch.distributed` has the same
# collectives, and whose libraries have the same regions under other names. If you know what to look for, you can read
# them.
#
# **You will** write f and g for `torch.distributed`, and reproduce our numbers up to rounding; meet an
# all-reduce whose backward is another one; read the trace of PyTorch's own tensor parallelism, and find the lines of
# our ledger in it; see buckets leave while a backward is still at work; and train one model with PyTorch's FSDP and
# with ours.
#
# **You need** walkthroughs [*f and g*](02_f_and_g.ipynb) and [*Data parallelism*](03_data_parallelism.ipynb)
# (buckets), and PyTorch, on any computer: no GPU. It is not among this project's packages. About 30 minutes.

# %%
# %load_ext shardlab.notebook
from importlib.util import find_spec

import numpy as np

from shardlab.notebook.predictions import reveal
from reference.errors import UserError

if not find_spec("torch"):
    raise UserError("This walkthrough needs PyTorch: run `%pip install torch==2.15.0` in a cell, and restart.")

# %% [markdown]
# ## Four ranks, with two ways to communicate
#
# Our ranks are processes that MPI has started. PyTorch does not mind. Each joins a *process group* as well, with the
# backend `gloo`, which runs on CPUs (on GPUs it would be `nccl`). They find one another through a file:

# %%
import tempfile

folder = tempfile.TemporaryDirectory()
ranks["meeting_place"] = f"{folder.name}/meeting_place"

# %%
# %%ranks 4
import torch
import torch.distributed as dist

torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{meeting_place}", rank=rank, world_size=size)

by_gloo = torch.tensor([2.0**rank])
dist.all_reduce(by_gloo)
by_mpi = group.all_reduce(np.array([2.0**rank]), "the same")
print(f"all-reduce of 1, 2, 4 and 8: torch {by_gloo.item():g}, ours {by_mpi[0]:g}")

# %% [markdown]
# ## f and g, once more
#
# PyTorch computes backwards by itself, from what it knows of each operation. Of ours it must be told. An
# `autograd.Function` is a pair of a forward and a backward, and these are the pairs of walkthrough *f and g*:

# %%
# %%ranks 4
class F(torch.autograd.Function):
    """Return x, which every rank has already; backward, add up what the ranks found."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx):
        dx = dx.clone()
        dist.all_reduce(dx)
        return dx


class G(torch.autograd.Function):
    """Add up the ranks' partial sums; backward, return dy, which every rank has already."""

    @staticmethod
    def forward(ctx, partial):
        y = partial.clone()
        dist.all_reduce(y)
        return y

    @staticmethod
    def backward(ctx, dy):
        return dy

# %% [markdown]
# (Megatron-LM has the two in `megatron/core/tensor_parallel/mappings.py`, as `_CopyToModelParallelRegion` and
# `_ReduceFromModelParallelRegion`.) With them the MLP is two lines. It gets our weights and our input:

# %%
from reference.config import ModelConfig
from reference.layers.mlp import mlp_tensors
from reference.params import initialize

c = ModelConfig(num_layers=1, hidden_size=8, num_attention_heads=1, vocab_size=1, max_position_embeddings=4,
                init_method_std=0.5)
random = np.random.default_rng(16)
whole = initialize(mlp_tensors(c), seed=2, dtype=np.float64)
ranks["whole"], ranks["c"] = whole, c
ranks["x"], ranks["dy"] = random.normal(size=(2, 2, 4, 8))

# %%
# %%ranks 4
from torch.nn.functional import gelu

from reference.layers.mlp import mlp_tensors
from reference.params import leaves, split

p = split(whole, mlp_tensors(c), size)[rank]                          # this rank's shard, in NumPy
shard = {name: torch.tensor(tensor, requires_grad=True) for name, tensor in leaves(p)}

def mlp(x, enter=F.apply, leave=G.apply):
    z = gelu(enter(x) @ shard["w_in"] + shard["b_in"], approximate="tanh")      # [b, s, h] @ [h, 4h/t] -> [b, s, 4h/t]
    return leave(z @ shard["w_out"]) + shard["b_out"]                 # and the bias once, after the sum

x_torch = torch.tensor(x, requires_grad=True)
y_torch = mlp(x_torch)
y_torch.backward(torch.tensor(dy))

# %% [markdown]
# (GPT's GeLU is an approximation by tanh; PyTorch's own default is the exact one, and differs in the fourth digit.) And
# ours, on the same ranks:

# %%
# %%ranks 4
from mpi_impl.comm.regions import TensorParallelRegion
from shardlab.demos.printing import traffic_table
from mpi_impl.layers.mlp import mlp_backward, mlp_forward
from mpi_impl.parallel.sinks import ImmediateSink
from reference.params import tree_map

region, grads = TensorParallelRegion(group), tree_map(np.zeros_like, p)
with group.ledger.phase("forward"):
    y, cache = mlp_forward(x, p, c, region)
with group.ledger.phase("backward"):
    dx = mlp_backward(dy, p, cache, c, grads, ImmediateSink(), region)

def near(theirs, ours):
    return bool(np.abs(theirs.detach().numpy() - ours).max() < 1e-12)

assert near(y_torch, y) and near(x_torch.grad, dx)
print("y:", near(y_torch, y), " dx:", near(x_torch.grad, dx),
      " gradients:", {name: near(shard[name].grad, grad) for name, grad in leaves(grads)})
print(traffic_table(group.ledger))
ours = group.ledger.calls(operation="all_reduce"), group.ledger.elements(operation="all_reduce")

# %% [markdown]
# ## An all-reduce whose backward is an all-reduce
#
# `torch.distributed.nn` has an all-reduce that knows a backward of its own. It is tempting to use it for g. Its authors
# take each rank's result for an array of its own, with a loss of its own (walkthrough *f and g* has this map, f after
# g). Our ranks all hold the same $y$ and compute one loss.
#
# **Predict.** With it in place of g, on four ranks, by what factor are the gradients too large?

# %%
guess = ...                # times the right one

# %% tags=["hide-output"]
# %%ranks 4
import warnings

from torch.distributed.nn.functional import all_reduce

for tensor in (x_torch, *shard.values()):
    tensor.grad = None
with warnings.catch_warnings():
    warnings.simplefilter("ignore")                                   # newer PyTorch recommends another module
    mlp(x_torch, leave=all_reduce).backward(torch.tensor(dy))
ratio = float((x_torch.grad.numpy() / dx).mean())

# %% tags=["hide-output"]
assert len(set(np.round(ranks["ratio"], 9))) == 1
reveal(guess, round(ranks["ratio"][0], 9), "times the right dx")

# %% [markdown]
# No error, and with Adam, which divides by the gradient's size, hardly a difference in the loss. It is not a mistake of
# PyTorch's: it answers another question. When you use a collective that differentiates itself, find out which.
#
# ## PyTorch's own tensor parallelism, in a trace
#
# Nobody has to write f and g: `parallelize_module` replaces a module's weights by *distributed tensors* (DTensor), and
# sends what is needed. `ColwiseParallel` is our split by columns, `RowwiseParallel` that by rows. We let PyTorch's
# *profiler* watch: it writes a trace, a JSON of events with a name, a beginning and a duration, in the format that
# `--trace` of our programs writes, too.
#
# **Predict.** How many all-reduces are in the trace of one forward and backward?

# %%
guess = ...                # all-reduces

# %% tags=["hide-output"]
# %%ranks 4
import json
import tempfile
from pathlib import Path

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.profiler import ProfilerActivity, profile

def events_of(function):
    """Run a function, and return the events of its trace, in the order in which they begin."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as watched:
        function()
    with tempfile.TemporaryDirectory() as folder:
        watched.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    return sorted((event for event in events if event.get("ph") == "X"), key=lambda event: event["ts"])

def sent(events):
    """Return the shape and the format of what each collective of gloo was given."""
    return [(event["name"].removeprefix("gloo:"), event["args"]["Input Dims"][0], event["args"]["Input type"][0])
            for event in events if event["name"].startswith("gloo:")]

module = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU("tanh"), torch.nn.Linear(32, 8)).double()
with torch.no_grad():
    for layer, w, b in ((module[0], whole.w_in, whole.b_in), (module[2], whole.w_out, whole.b_out)):
        layer.weight.copy_(torch.tensor(w.T))                         # PyTorch keeps the transpose
        layer.bias.copy_(torch.tensor(b))
module = parallelize_module(module, init_device_mesh("cpu", (size,)), {"0": ColwiseParallel(), "2": RowwiseParallel()})

def forward_and_backward():
    global y_module, x_module
    x_module = torch.tensor(x, requires_grad=True)
    y_module = module(x_module)
    y_module.backward(torch.tensor(dy))

forward_and_backward()                                                # the first time is not like the others
collectives = sent(events_of(forward_and_backward))
assert near(y_module, y) and near(x_module.grad, dx)
print("y:", near(y_module, y), " dx:", near(x_module.grad, dx))
print(*collectives, sep="\n")

# %% tags=["hide-output"]
calls, elements = ranks["ours"][0]
theirs = ranks["collectives"][0]
reveal(guess, len(theirs), "all-reduces in PyTorch's trace")
print("as many, and of as many elements, as in our ledger:",
      (calls, elements) == (len(theirs), sum(np.prod(dims) for _, dims, _ in theirs)))

# %% [markdown]
# f and g again, found out from the outside: one all-reduce of $[b, s, h]$ in each direction. That is how to read a
# framework that you do not know. Predict with the formulas what it must send, and look for it in the trace. What the
# trace has besides is what you do not understand yet.
#
# ## Buckets that leave early
#
# In data parallelism `DistributedDataParallel` does what our `Gradients` does (walkthrough *Data parallelism*):
# buckets, last layer first, each of which leaves when it is complete. Three equal layers, of $512 \cdot 512 + 512$
# numbers of 4 bytes each, which is a little more than 1 MiB. A bucket shall have 1 MiB.
#
# **Predict.** How many all-reduces are there in a backward?

# %%
guess = ...                # all-reduces

# %% tags=["hide-output"]
# %%ranks 4
from torch.nn.parallel import DistributedDataParallel

replica = DistributedDataParallel(torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(3))), bucket_cap_mb=1)
samples = torch.randn(4, 512)

def step():
    replica(samples).sum().backward()

step(), step()                                       # after the first step it forms its buckets again
events = events_of(step)
order = ["backward of a layer" if event["name"] == "AddmmBackward0" else "an all-reduce begins"
         for event in events if event["name"] in ("AddmmBackward0", "c10d::allreduce_")]

# %% tags=["hide-output"]
assert 2**20 < 4 * (512 * 512 + 512) < 1.01 * 2**20
reveal(guess, ranks["order"][0].count("an all-reduce begins"), "all-reduces")
print(*ranks["order"][0], sep="\n")

# %% [markdown]
# Each bucket leaves before the backward of the layer before it: communication behind computation. Here are the trace's
# times, of all four ranks, in our picture of a timeline: the backward of each layer above, and below what is on its
# way. The three all-reduces overlap, so they look like one bar, which begins while the backward still runs. Most of it
# lies in idle time (hatched): three small layers compute for milliseconds, and the first rank to arrive at an
# all-reduce waits for the last. (Times differ from run to run. On a computer with fewer cores than ranks you see mostly
# who had to wait for a core.)

# %%
# %%ranks 4
from mpi_impl.comm.trace import Slice

def slice_of(event):
    """Return an event of the trace as one of our own traces has it, in seconds."""
    start, end = event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6
    if event["name"].startswith("gloo:"):
        return Slice("communication", "all-reduce", "communication", start, end)
    return Slice("compute", "backward", "other", start, end)

slices = [slice_of(event) for event in events if event["name"] == "AddmmBackward0" or event["name"].startswith("gloo:")]

# %%
from shardlab.report.timelines.gantt import Panel, timelines_figure

timelines_figure([Panel("a backward with three buckets, read from PyTorch's trace", ranks["slices"])])

# %% [markdown]
# ## FSDP, theirs and ours
#
# A course's example: three linear layers, 8-4, 4-16 and 16-4, on four ranks. PyTorch's `fully_shard` makes each of them
# a unit; our `FSDP` takes a list of layers, and a policy that makes units of them. Both get the same weights and
# samples, and take three steps of Adam. PyTorch averages gradients over the ranks; ours are summed, so we divide `dy`
# by the number of ranks.
#
# **Predict.** The model has 184 parameters. How many elements does a rank send in a step, by ring algorithms? (Each of
# $n$ ranks sends $(n - 1)/n$ of a buffer in an all-gather or a reduce-scatter. Full sharding gathers twice.)

# %%
guess = ...                # elements

# %% tags=["hide-output"]
# %%ranks 4
from torch.distributed.fsdp import fully_shard

from mpi_impl.comm.ledger import ring_bytes
from mpi_impl.training.fsdp import FSDP, size_based
from reference import ops
from reference.optimizers.adam import OptimizerConfig
from reference.parallel.fsdp import AnyLayer

random, rate, steps = np.random.default_rng(0), 1e-2, 3
weights = [{"w": random.normal(size=(n, m)), "b": random.normal(size=m)} for n, m in ((8, 4), (4, 16), (16, 4))]
samples, dys = random.normal(size=(steps, size, 5, 8)), random.normal(size=(steps, size, 5, 4))

def linear_backward(dy, p, x):
    dx, dw, db = ops.linear_backward(dy, x, p["w"])
    return dx, {"w": dw, "b": db}

layers = [AnyLayer(p, lambda x, p: (ops.linear(x, p["w"], p["b"]), x), linear_backward) for p in weights]
fsdp = FSDP(layers, group, auto_wrap_policy=size_based(1))
adam = fsdp.adam(OptimizerConfig(rate, steps, lr_decay_style="constant", weight_decay=0, clip_grad=0))
group.ledger.totals.clear()
for x, dy in zip(samples[:, rank], dys[:, rank]):
    fsdp.zero_grad()
    _, caches = fsdp.forward(x)
    fsdp.backward(dy / size, caches)
    fsdp.step(adam)
sent = sum(ring_bytes(*line) for line in group.ledger.totals.items() if line[0].reason != "gradient norm") / 8 / steps
ours = fsdp.parameters()

module = torch.nn.Sequential(*(torch.nn.Linear(*p["w"].shape) for p in weights)).double()
with torch.no_grad():
    for layer, p in zip(module, weights):
        layer.weight.copy_(torch.tensor(p["w"].T))
        layer.bias.copy_(torch.tensor(p["b"]))
for layer in (*module, module):
    fully_shard(layer, mesh=init_device_mesh("cpu", (size,)))
optimizer = torch.optim.Adam(module.parameters(), lr=rate)
for x, dy in zip(samples[:, rank], dys[:, rank]):
    optimizer.zero_grad()
    module(torch.tensor(x)).backward(torch.tensor(dy))
    optimizer.step()

for layer, p in zip(module, ours):
    assert near(layer.weight.full_tensor().T, p["w"]) and near(layer.bias.full_tensor(), p["b"])
print(sum(x.size for p in weights for x in p.values()), "parameters: the same after three steps")

# %% tags=["hide-output"]
reveal(guess, round(ranks["sent"][0]), "elements")

# %% [markdown]
# Three times $184 \cdot 3/4$: two all-gathers of parameters and a reduce-scatter of gradients. Data parallelism's
# all-reduce sends two thirds of that, but then each rank keeps all parameters, their gradients and Adam's moments.
# [FSDP, argument by argument](../docs/fsdp.md) has the other strategies.

# %%
# %%ranks 4
dist.destroy_process_group()

# %% [markdown]
# ## What to take away
#
# | here | in PyTorch | in Megatron-LM |
# |---|---|---|
# | `group.all_reduce` | `dist.all_reduce` | the same |
# | *f*, `region.enter` | `F` above; inside `ColwiseParallel` | `copy_to_tensor_model_parallel_region` |
# | *g*, `region.leave` | `G` above; inside `RowwiseParallel` | `reduce_from_tensor_model_parallel_region` |
# | the ledger | the profiler's trace | the same |
# | `Gradients`, buckets | `DistributedDataParallel` | `DistributedDataParallel`, of its own |
# | `FSDP`, units | `fully_shard`, modules | `--use-torch-fsdp2`: PyTorch's |
#
# - The two operators are the whole of tensor parallelism, in any framework. The rest is bookkeeping.
# - A collective that differentiates itself has decided how many losses there are. Ask it.
# - Predict what must be sent; then a trace can be read.
#
# ## Try it
#
# 1. Swap `ColwiseParallel` and `RowwiseParallel` in the cell of `parallelize_module`. Is the result still right? What
#    does the trace say now?
# 2. Let the module be `Sequential(Linear, GELU)` with `ColwiseParallel(output_layouts=Replicate())` (from
#    `torch.distributed.tensor`). Which collective appears, and what would `gather_output` of Megatron's
#    `ColumnParallelLinear` do?
# 3. Set `bucket_cap_mb=25`, PyTorch's default. How many all-reduces are there, and when does the first begin?
#
# <details><summary>Answer to 3</summary>
#
# One. The three layers have little more than 3 MiB together, so one bucket of 25 MiB takes them all. It is complete
# when the first layer's backward has ended, which is the last one to run. So the order is
#
# ```text
# backward of a layer
# backward of a layer
# backward of a layer
# an all-reduce begins
# ```
#
# and nothing is hidden behind computation. A model must be larger than several buckets before its communication can
# overlap, and a bucket must be large enough for the link's latency not to count: 25 MiB is made for models of
# gigabytes.
#
# </details>
