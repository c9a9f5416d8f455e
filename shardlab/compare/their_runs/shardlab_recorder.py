"""Records what a PyTorch training computes, so that `shardlab compare A B` names the first tensor where two runs part.

    from shardlab_recorder import Recorder
    recorder = Recorder("recorded/two", model, optimizer)           # on every rank, before the first step
    for batch in batches:
        recorder.batch(**batch)
        model(**batch).loss.backward()
        optimizer.step()                                            # ends a step; after two, nothing is recorded
        optimizer.zero_grad()

It records inputs and outputs of all modules, the outputs' gradients, and at the optimizer's step gradients and weights,
before and after. DTensors and Megatron's weights know which part a rank has; batches, and activations with as many
rows, are this rank's samples, if there is an axis "dp"; a linear layer's output or input is divided as its weight, a
DTensor, is. All else is whole and the same on all ranks, unless `dims` says otherwise, by patterns of "PHASE NAME":

    dims={"forward .*qkv output": "s b heads[tp]", "(forward|backward) .*norm output": "s[cp:zigzag,tp] b h"}

A text names the dimensions, and in brackets the axes that divide them, the innermost last; with `cp:zigzag` a rank has
chunks i and 2c - 1 - i of 2c, with `tp:partial` a part of a sum. `axes` has each axis's process group, or this rank's
number and the size; without it, what DTensors' meshes do not name is "dp"; a pipeline's stage is `axes["pp"]`. The loss
is the `mean` over a rank's own samples: activations' gradients and single numbers are divided by the sizes of dp, cp.
What runs without gradients, such as an evaluation, is not recorded. Needs PyTorch 2.5, safetensors.
"""
import json
import math
import os
import re
import traceback

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode


class Recorder:
    """Hooks that write the first `steps` steps of a model and its optimizer into a folder."""

    def __init__(self, folder, model, optimizer, axes=None, dims=None, steps=2, mean=True):
        self.rank, self.ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.axes = {name: [*one] if isinstance(one, (tuple, list)) else [dist.get_rank(one), dist.get_world_size(one)]
                     for name, one in ({"dp": (self.rank, self.ranks)} if axes is None else axes).items()}
        self.dims = {re.compile(key): text for key, text in (dims or {}).items()}
        self.step, self.steps, self.mean, self.samples, self.by_meshes = 1, steps, mean, {0}, axes is None
        self.lines, self.tensors, self.calls, self.formats, self.silent = [], {}, {}, Formats(), False
        os.makedirs(folder, exist_ok=True)
        self.path = os.path.join(folder, f"rank_{self.rank:05}")
        self.parameters = {plain(name): p for name, p in model.named_parameters()}
        for name, module in {plain(name) or "root": module for name, module in model.named_modules()}.items():
            if not isinstance(module, torch.nn.Identity):       # which stands for what another stage has
                self.hook(module, name)     # of a wrapper and what is in it, the latter
        optimizer.register_step_pre_hook(lambda *_: self.see_weights("gradients", "parameters"))
        optimizer.register_step_post_hook(lambda *_: (self.see_weights("optimizer parameters"), self.end_step()))

    def hook(self, module, name):
        def before(module, args, kwargs):
            if not self.formats.inside:     # of any module
                self.silent = is_trial()
                self.formats.__enter__()
            self.formats.inside.append(torch.float64)
            self.see(phase_now(), f"{name} input", first_tensor((*args, *kwargs.values())), module)

        def after(module, args, output):
            y, phase, inside = first_tensor(output), phase_now(), self.formats.inside.pop()
            call = self.see(phase, f"{name} output", y, module, inside=inside)
            if call is not None and phase == "forward" and y.requires_grad:
                y.register_hook(lambda dy: (self.see("backward", f"{name} output", dy, module, call), None)[1])
            if self.formats.inside:
                self.formats.note(inside)
            else:
                self.formats.__exit__(None, None, None)
                self.silent = False

        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after, always_call=True)       # also where a recomputation stops early

    def batch(self, **tensors):
        """Record a step's batch. Call it before the forward."""
        tensors = {name: x for name, x in tensors.items() if isinstance(x, torch.Tensor) and x.dim()}
        for x in sorted(tensors.values(), key=lambda x: x.dim() == 1)[:1]:      # targets may be [b * s]
            self.samples = {x.shape[0], x.shape[:2].numel()}
        for name, x in tensors.items():
            self.see("batch", name, x)

    def see_weights(self, *phases):
        """Record the gradients or the weights as they are now."""
        for phase in phases:
            for name, p in self.parameters.items():
                main = getattr(p, "main_grad", None)        # Megatron's
                self.see(phase, name, p if phase != "gradients" else p.grad if main is None else main)

    def see(self, phase, name, x, module=None, call=None, inside=None):
        """Copy a tensor, if there is one; return which call of its module this is, or None if it is not recorded."""
        stage, stages = self.axes.get("pp", (0, 1))
        border = name == "root input" and stage > 0 or name == "root output" and stage < stages - 1     # of two stages
        if x is None or self.step > self.steps or self.silent or border:
            return None
        if name == "root input" and x.dim():
            self.samples |= {x.shape[0], x.shape[:2].numel()}       # a pipeline's microbatch
        call = self.calls.get((phase, name), -1) + 1 if call is None else call
        dims, key = self.dims_of(phase, name, x, module), str(len(self.lines))
        x = (x.to_local() if isinstance(x, DTensor) else x).detach().to("cpu", copy=True).contiguous()
        means = math.prod(self.axes[axis][1] for axis in ("dp", "cp") if axis in self.axes) if self.mean else 1
        x = x / means if phase == "backward" or dims.startswith("loss") else x
        self.tensors[key] = torch.atleast_1d(x) if dims else x
        self.calls[phase, name] = call
        self.lines.append({"step": self.step, "phase": phase, "name": name, "call": call, "key": key, "dims": dims,
                           "inside": str(inside or "").removeprefix("torch.")})
        return call

    def dims_of(self, phase, name, x, module):
        """Return the names of the dimensions, with the axes that divide them."""
        if text := next((text for key, text in self.dims.items() if key.fullmatch(f"{phase} {name}")), None):
            return text
        if module is not None and not x.dim() and x.is_floating_point():        # a rank's own, as DDP averages it
            return "loss[dp:partial,cp:partial]"
        divided = self.division(x) if isinstance(x, DTensor) else [[] for _ in range(x.dim())]
        if getattr(self.parameters.get(name), "tensor_model_parallel", False):      # in Megatron-core
            divided[self.parameters[name].partition_dim].append("tp")
        if name not in self.parameters and x.dim() and "dp" in self.axes and "dp" not in sum(divided, []):
            if x.shape[0] in self.samples:
                divided[0].insert(0, "dp")
            elif phase == "backward":       # of what all samples use: each rank has its samples' part of the sum
                divided[0].insert(0, "dp:partial")
        if isinstance(module, torch.nn.Linear) and isinstance(module.weight, DTensor) and not isinstance(x, DTensor):
            divided[-1] += [axis for axis in self.division(module.weight)[name.endswith(" input")] if axis != "dp"]
        return " ".join("ijklmnop"[i] + (f"[{','.join(axes)}]" if axes else "") for i, axes in enumerate(divided))

    def division(self, x):
        """Return the axes along each dimension of a DTensor; its mesh becomes known."""
        divided, mesh = [[] for _ in range(max(1, x.dim()))], x.device_mesh
        names = mesh.mesh_dim_names or ["dp", "mesh1", "mesh2", "mesh3"]
        if self.by_meshes and "dp" not in names:
            self.axes["dp"] = [self.rank // mesh.size(), self.ranks // mesh.size()]
        for i, (axis, placement) in enumerate(zip(names, x.placements)):
            self.axes[axis] = [mesh.get_coordinate()[i], mesh.size(i)]
            if placement.is_partial():
                divided[0].append(f"{axis}:partial")
            elif hasattr(placement, "split_factor"):        # FSDP of what the axes behind it have divided before
                divided[placement.dim].append(axis)
            elif placement.is_shard():
                strided = sum(hasattr(one, "split_factor") for one in x.placements[:i])
                divided[placement.dim].insert(len(divided[placement.dim]) - strided, axis)
        return divided

    def end_step(self):
        if self.step <= self.steps:
            about = {"shardlab_recorder": 1, "rank": self.rank, "ranks": self.ranks, "axes": self.axes}
            with open(f"{self.path}.jsonl", "x" if self.step == 1 else "a") as file:        # not into an old recording
                file.writelines(json.dumps(line) + "\n" for line in [about] * (self.step == 1) + self.lines)
            save_file(self.tensors, f"{self.path}_{self.step}.safetensors")
        self.step, self.lines, self.tensors, self.calls = self.step + 1, [], {}, {}


class Formats(TorchFunctionMode):
    """The coarsest format in which each of the modules at work has computed, the innermost last."""

    def __init__(self):
        super().__init__()
        self.inside = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        y = function(*args, **(kwargs or {}))
        if isinstance(y, torch.Tensor) and self.inside and y.is_floating_point():
            self.note(y.dtype)
        return y

    def note(self, dtype):
        self.inside[-1] = max(self.inside[-1], dtype, key=lambda one: torch.finfo(one).eps)


def is_trial():
    """Report whether what runs now leads to no update: without gradients, or to find a pipeline stage's shapes."""
    return not torch.is_grad_enabled() or any(
        frame.f_code.co_name.endswith("_inference") and "pipelining" in frame.f_code.co_filename
        for frame, _ in traceback.walk_stack(None))


def phase_now():
    """Return the phase: a forward inside of a backward is a recomputation."""
    return "forward" if torch._C._current_graph_task_id() == -1 else "recompute"


def plain(name):
    """Return a module's or a parameter's name without what wrappers have put into it."""
    return re.sub(r"\b(module|_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)(\.|$)", "", name).rstrip(".")


def first_tensor(x):
    values = x.values() if isinstance(x, dict) else x if isinstance(x, (tuple, list)) else [x]
    tensors = (one if isinstance(one, torch.Tensor) or one is x else first_tensor(one) for one in values)
    return next((one for one in tensors if isinstance(one, torch.Tensor)), None)
