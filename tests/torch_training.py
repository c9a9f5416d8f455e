"""A training program as PyTorch's users write them: torch_training.py FOLDER WAY [BUG].

A transformer of two layers in float64, which returns its loss as those of transformers do, on gloo ranks that divide
the samples (ddp, fsdp), the layers (tp), or both (fsdp_tp), or that accumulate gradients over microbatches; or a
pipeline of PyTorch's, whose loss is the tokens' mean or, wrongly, their sum. The recorder is next to this file, as
`shardlab recorder` prints it.
"""
import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from shardlab_recorder import Recorder
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

H, HEADS, V, S, B = 16, 4, 32, 6, 4
STEPS = 3       # one more than are recorded
MICROBATCHES = 2
FIRST_RATE = 3e-7     # of a warm-up: some weights move by their last digit in float32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(H), nn.LayerNorm(H)
        self.q, self.k, self.v, self.out = (nn.Linear(H, H) for _ in range(4))
        self.up, self.down = nn.Linear(H, 4 * H), nn.Linear(4 * H, H)

    def forward(self, x):
        y = self.norm_1(x)
        q, k, v = (layer(y).unflatten(-1, (-1, H // HEADS)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(y)
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.word, self.position = nn.Embedding(V, H), nn.Embedding(S, H)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(H), nn.Linear(H, V, bias=False)

    def forward(self, tokens, targets):
        x = self.word(tokens) + self.position(torch.arange(S))
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), targets.flatten()), "logits": logits}


class Stage(nn.Module):
    """A rank's part of a model of two layers."""

    def __init__(self, rank, ranks):
        super().__init__()
        word, layers, head = nn.Embedding(V, H), [Block(), Block()], nn.Linear(H, V)
        self.word = word if rank == 0 else nn.Identity()
        self.layers = nn.ModuleDict({str(i): layer for i, layer in enumerate(layers) if i * ranks // 2 == rank})
        self.head = head if rank == ranks - 1 else nn.Identity()

    def forward(self, x):
        return self.head(nn.Sequential(*self.layers.values())(self.word(x)))


def divided(model, way, ranks, bug):
    """Return the model on this rank, and the mesh."""
    d = {"ddp": ranks, "fsdp": ranks, "tp": 1, "fsdp_tp": ranks // 2}[way]
    mesh = init_device_mesh("cpu", (d, ranks // d), mesh_dim_names=("dp", "tp"))
    if "tp" in way:
        plan = {name: ColwiseParallel() for name in ("q", "k", "v", "up")}
        plan |= {name: RowwiseParallel() for name in ("out", "down")}
        if bug == "down_is_whole":
            del plan["down"], plan["up"]
        for layer in model.layers:
            parallelize_module(layer, mesh["tp"], plan)
    if "fsdp" in way:
        for layer in model.layers:
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    if way == "ddp" and bug != "gradients_not_summed":
        model = nn.parallel.DistributedDataParallel(model, process_group=mesh["dp"].get_group())
    return model, mesh


def train(rank, ranks, way, folder, bug):
    torch.manual_seed(rank if bug == "other_weights" else 0)
    model, axes, part = GPT(), None, SimpleNamespace(number=0, of=1)
    if way != "alone":
        model, mesh = divided(model, way, ranks, bug)
        axes = {"dp": mesh["dp"].get_group(), "tp": mesh["tp"].get_group()}
        part = SimpleNamespace(number=mesh["dp"].get_local_rank(), of=mesh["dp"].size())
    if bug == "one_norm_off" and rank == ranks - 1:
        model.layers[1].norm_2.register_forward_hook(lambda module, args, y: y + 1e-9)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    recorder = Recorder(folder, model, optimizer, axes=axes)
    data = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        text = torch.randint(V, (B, S + 1), generator=data)
        n = B // part.of
        text = text[:n] if bug == "same_samples" else text[part.number * n:(part.number + 1) * n]
        batch = {"tokens": text[:, :-1], "targets": text[:, 1:]}
        recorder.batch(**batch)
        loss = model(**batch)["loss"]
        (loss / part.of if bug == "loss_divided_twice" else loss).backward()
        optimizer.step()
        optimizer.zero_grad()


def train_in_stages(rank, ranks, way, folder):
    """Train a pipeline. A loss that is a sum over the tokens is hidden from the weights, by clipping."""
    torch.manual_seed(0)
    model = Stage(rank, ranks)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    recorder = Recorder(folder, model, optimizer, axes={"pp": (rank, ranks)})

    def loss_of(logits, targets):
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=way)

    if ranks > 1:
        schedule = Schedule1F1B(PipelineStage(model, rank, ranks, torch.device("cpu")), MICROBATCHES, loss_of,
                                scale_grads=False)
    for _ in range(2):
        text = torch.randint(V, (B, S + 1))
        tokens, targets = text[:, :-1], text[:, 1:]
        recorder.batch(tokens=tokens, targets=targets)
        if ranks > 1:
            schedule.step(*[tokens] * (rank == 0), **{"target": targets} if rank else {})
        else:
            for x, y in zip(tokens.chunk(MICROBATCHES), targets.chunk(MICROBATCHES)):
                loss_of(model(x), y).backward()
        norm = torch.stack([p.grad.square().sum() for p in model.parameters()]).sum()
        dist.all_reduce(norm)
        for p in model.parameters():
            p.grad *= 1e-3 / norm.sqrt()
        optimizer.step()
        optimizer.zero_grad()


def accumulate(rank, ranks, folder, bug):
    """Train in float32, with gradients of several microbatches. Before the first step rank 0 alone evaluates."""
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    model = GPT()
    model = nn.parallel.DistributedDataParallel(model) if ranks > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), FIRST_RATE)
    recorder = Recorder(folder, model, optimizer)
    if rank == 0:
        with torch.no_grad():
            model(*torch.zeros(2, B, S, dtype=int))
    for _ in range(2):
        for micro in range(MICROBATCHES):
            tokens, targets = (x.chunk(ranks) for x in torch.randint(V, (2, B, S)))
            tokens, targets = tokens[rank], targets[0 if bug == "targets_of_rank_0" else rank]
            recorder.batch(tokens=tokens, targets=targets)
            model.require_backward_grad_sync = micro == (0 if bug == "reduced_too_early" else MICROBATCHES - 1)
            loss = model(tokens, targets)["loss"] / MICROBATCHES
            (loss / ranks if bug == "averaged_twice" else loss).backward()
        optimizer.step()
        optimizer.zero_grad()


def on_ranks(run):
    """Call `run(rank, ranks, *arguments)` on a rank of gloo, in float64."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")
    run(dist.get_rank(), dist.get_world_size(), *sys.argv[1:])
    dist.destroy_process_group()


def main(rank, ranks, folder, way, bug=""):
    if way in ("mean", "sum"):
        train_in_stages(rank, ranks, way, folder)
    elif way == "accumulated":
        accumulate(rank, ranks, folder, bug)
    else:
        train(rank, ranks, way, folder, bug)


if __name__ == "__main__":
    on_ranks(main)
