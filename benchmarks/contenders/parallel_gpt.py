"""A GPT as Megatron's users would write it in PyTorch: parallel_gpt.py FOLDER T C D [OPTIONS].

t ranks divide the layers, c the positions (zigzag) and d the samples; ranks of one t are neighbours, then those of one
c. On gloo, in float64, with the environment of torchrun. All weights are drawn whole on every rank, so that all
topologies begin with the same ones. shardlab_recorder.py, which `shardlab recorder` prints, lies beside this file.
"""
import argparse
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from shardlab_recorder import Recorder
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

H, HEADS, LAYERS, V, S, B = 16, 4, 2, 32, 16, 4
STEPS, RATE, DECAY = 2, 1e-3, 0.1

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("folder")
for name in "tcd":
    parser.add_argument(name, type=int)
parser.add_argument("--sequence-parallel", action="store_true")
parser.add_argument("--clip", type=float, default=float("inf"))
options = parser.parse_args()
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (options.d, options.c, options.t), mesh_dim_names=("dp", "cp", "tp"))


class Axis(NamedTuple):
    """The ranks that divide one thing among them, and this rank's number there."""

    group: dist.ProcessGroup
    rank: int
    size: int


TP, CP, DP = (Axis(mesh[name].get_group(), mesh.get_local_rank(name), mesh[name].size()) for name in ("tp", "cp", "dp"))
SP = options.sequence_parallel


def shard(x, axis, dim):
    return x.chunk(axis.size, dim)[axis.rank]


def all_reduce(x, axis, op=dist.ReduceOp.SUM):
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, op, axis.group)
    return x


def all_gather(x, axis, dim):
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(axis.size)]
    dist.all_gather(parts, x.contiguous(), axis.group)
    return torch.cat(parts, dim)


def reduce_scatter(x, axis, dim):
    return shard(all_reduce(x, axis), axis, dim)


class Enter(torch.autograd.Function):
    """The beginning of a tensor-parallel region, with x [b, s, h], or [b, s/t, h] with sequence parallelism."""

    @staticmethod
    def forward(ctx, x):
        return all_gather(x, TP, 1) if SP else x

    @staticmethod
    def backward(ctx, dx):
        return reduce_scatter(dx, TP, 1) if SP else all_reduce(dx, TP)


class Leave(torch.autograd.Function):
    """The end of a tensor-parallel region, in which each rank has a part of a sum, x [b, s, h]."""

    @staticmethod
    def forward(ctx, x):
        return reduce_scatter(x, TP, 1) if SP else all_reduce(x, TP)

    @staticmethod
    def backward(ctx, dy):
        return all_gather(dy, TP, 1) if SP else dy


class Gather(torch.autograd.Function):
    """Keys and values [2, b, s, a, d] of all context-parallel ranks."""

    @staticmethod
    def forward(ctx, kv):
        return all_gather(kv, CP, 2)

    @staticmethod
    def backward(ctx, dkv):
        return reduce_scatter(dkv, CP, 2)


def positions_of(rank):
    """Return the positions of a context-parallel rank: an early chunk and a late one, so that all do equal work."""
    chunks = torch.arange(S).chunk(2 * CP.size)
    return torch.cat((chunks[rank], chunks[2 * CP.size - 1 - rank]))


def drawn(*shape):
    return 0.2 * torch.randn(shape)


def sharded(whole, dim):
    """Return this rank's shard of a weight."""
    parameter = nn.Parameter(shard(whole, TP, dim).clone())
    parameter.is_shard = True
    return parameter


class ColumnParallel(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight, self.bias = sharded(weight, 0), sharded(torch.zeros(len(weight)), 0)

    def forward(self, x):
        return F.linear(Enter.apply(x), self.weight, self.bias)


class RowParallel(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight, self.bias = sharded(weight, 1), nn.Parameter(torch.zeros(len(weight)))

    def forward(self, x):
        return Leave.apply(F.linear(x, self.weight)) + self.bias


class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = sharded(drawn(V, H), 0)

    def forward(self, tokens):
        ids = tokens - TP.rank * len(self.weight)
        elsewhere = (ids < 0) | (ids >= len(self.weight))
        x = F.embedding(ids.masked_fill(elsewhere, 0), self.weight)
        return Leave.apply(x.masked_fill(elsewhere[..., None], 0))


class Head(nn.Module):
    """The logits [b, s, V/t], from the table of the words."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        return F.linear(Enter.apply(x), self.weight)


class ParallelCrossEntropy(torch.autograd.Function):
    """The losses [b, s] of logits [b, s, V/t]."""

    @staticmethod
    def forward(ctx, logits, targets):
        ids = targets - TP.rank * logits.shape[-1]
        elsewhere = (ids < 0) | (ids >= logits.shape[-1])
        ids = ids.masked_fill(elsewhere, 0)[..., None]
        logits = logits - all_reduce(logits.amax(-1), TP, dist.ReduceOp.MAX)[..., None]
        picked = all_reduce(logits.gather(-1, ids)[..., 0].masked_fill(elsewhere, 0), TP)
        total = all_reduce(logits.exp().sum(-1), TP)
        ctx.save_for_backward(logits.exp() / total[..., None], ids, elsewhere)
        return total.log() - picked

    @staticmethod
    def backward(ctx, dlosses):
        probs, ids, elsewhere = ctx.saved_tensors
        here = (~elsewhere).to(probs.dtype)[..., None]
        return probs.scatter_add(-1, ids, -here) * dlosses[..., None], None


class CrossEntropy(nn.Module):
    def forward(self, logits, targets):
        return ParallelCrossEntropy.apply(logits, targets)


class Core(nn.Module):
    """Attention of this rank's queries to the keys of all positions."""

    def forward(self, q, k, v):
        k, v = Gather.apply(torch.stack((k, v)))
        of_keys = torch.cat([positions_of(rank) for rank in range(CP.size)])
        seen = positions_of(CP.rank)[:, None] >= of_keys
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, seen).transpose(1, 2).flatten(2)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = HEADS // TP.size
        qkv = drawn(3, HEADS, H // HEADS, H).transpose(0, 1)       # a rank has the q, k and v of its heads
        self.qkv, self.core, self.out = ColumnParallel(qkv.reshape(3 * H, H)), Core(), RowParallel(drawn(H, H))

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (self.heads, 3, -1)).unbind(3)
        return self.out(self.core(q, k, v))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.attention, self.norm_2 = nn.LayerNorm(H), Attention(), nn.LayerNorm(H)
        self.up, self.down = ColumnParallel(drawn(4 * H, H)), RowParallel(drawn(H, 4 * H))

    def forward(self, x):
        x = x + self.attention(self.norm_1(x))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.word, self.position = Embedding(), nn.Embedding(S, H)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head, self.loss = nn.LayerNorm(H), Head(self.word.weight), CrossEntropy()

    def forward(self, tokens, targets):
        positions = positions_of(CP.rank)
        x = self.word(tokens) + self.position(shard(positions, TP, 0) if SP else positions)
        for layer in self.layers:
            x = layer(x)
        return self.loss(self.head(self.norm(x)), targets)


def reduce_gradients(model):
    """Sum the parts of each gradient; average over samples and positions."""
    for p in model.parameters():
        if SP and not hasattr(p, "is_shard"):
            p.grad = all_reduce(p.grad, TP)
        p.grad = all_reduce(p.grad, CP)
        p.grad = all_reduce(p.grad, DP)
        p.grad /= CP.size * DP.size


def clip(parameters, largest):
    """Scale the gradients down to the norm that is allowed."""
    shards, whole = ([(p.grad**2).sum() for p in parameters if hasattr(p, "is_shard") == is_shard]
                     for is_shard in (True, False))
    norm = (all_reduce(sum(shards), TP) + sum(whole)).sqrt()
    for p in parameters:
        p.grad *= min(1, largest / norm)


def dims():
    """Return what divides the tensors, for the recorder."""
    s = "s[cp:zigzag]"
    outer = "s[cp:zigzag,tp]" if SP else s
    return {"batch .*|forward (word|root) input|.* (root|loss) output": f"b[dp] {s}",
            "forward position input": outer,
            "forward position output": f"{outer} h",
            "backward position output": f"{outer} h[dp:partial]",
            r".* loss input|.*ward (.*\.(qkv|core|up)|head) output|.* .*\.(out|down) input": f"b[dp] {s} h[tp]",
            ".* .*core input": f"b[dp] {s} heads[tp] d",
            "forward shown loss": "",
            ".*ward .*": f"b[dp] {outer} h",
            r".* (word|.*\.(qkv|up))\.weight": "o[tp] i",
            r".* .*\.(qkv|up)\.bias": "o[tp]",
            r".* .*\.(out|down)\.weight": "o i[tp]"}


def main():
    torch.manual_seed(0)
    model = GPT()
    parameters = list(model.parameters())
    groups = [{"params": [p for p in parameters if p.dim() > 1], "weight_decay": DECAY},
              {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE)
    recorder = Recorder(options.folder, model, optimizer, dims=dims(), axes={"tp": TP[1:], "cp": CP[1:], "dp": DP[1:]})
    data = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        rows, positions = shard(torch.randint(V, (B, S + 1), generator=data), DP, 0), positions_of(CP.rank)
        tokens, targets = rows[:, :-1][:, positions], rows[:, 1:][:, positions]
        recorder.batch(tokens=tokens, targets=targets)
        loss = model(tokens, targets).mean()
        loss.backward()
        shown = all_reduce(all_reduce(loss.detach(), CP), DP) / (CP.size * DP.size)
        recorder.see("forward", "shown loss", shown)
        if dist.get_rank() == 0:
            print(f"loss {shown:.6f}")
        reduce_gradients(model)
        recorder.see_weights("gradients")       # clipping hides what is wrong by one factor
        clip(parameters, options.clip)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    main()
    dist.destroy_process_group()
