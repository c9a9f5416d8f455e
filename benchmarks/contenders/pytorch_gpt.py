"""One rank of PyTorch's side of cpu_step.py, and the model of cuda_step.py: with fused attention and AdamW.

A work with `g` is a Llama; the BERT is in pytorch_bert.py, a Mixtral's experts are in pytorch_experts.py.

With `--threads n` it is one process with n threads; with `--ddp` or `--fsdp2` ranks divide the samples. Written as
PyTorch's own users would: modules, autograd functions for f and g, `scaled_dot_product_attention`, fused
AdamW, gloo between ranks; in a Llama gate and up in one product, keys and values repeated for the heads of their group
as transformers does (on a GPU the kernel repeats them), and rope by halves. With `--compile`, `torch.compile` over the
whole model. With `--bf16` products in bfloat16 by `torch.autocast`, weights and AdamW in float32.
"""
import os
import sys
from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from pytorch_experts import TorchExperts, widened
from turns import PROCESS, serve
from works import Work

NONE = -100     # the target of a position that counts for nothing, as in PyTorch itself
DATA = "--ddp" in sys.argv or "--fsdp2" in sys.argv         # whether ranks divide samples in place of layers
RANKS = int(os.environ["WORLD_SIZE"])
RANK, SIZE = (0, 1) if DATA else (int(os.environ[PROCESS]), RANKS)      # of a layer's shard


def all_reduce(x, op=dist.ReduceOp.SUM):
    if SIZE > 1:
        dist.all_reduce(x, op)
    return x


class Enter(torch.autograd.Function):
    """f: nothing forward, an all-reduce backward."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, dx):
        return all_reduce(dx.contiguous())


class Leave(torch.autograd.Function):
    """g: an all-reduce forward, nothing backward."""

    @staticmethod
    def forward(ctx, x):
        return all_reduce(x)

    @staticmethod
    def backward(ctx, dy):
        return dy


def enter(x):
    return Enter.apply(x) if SIZE > 1 else x


class ParallelCrossEntropy(torch.autograd.Function):
    """The losses [b, s] of logits [b, s, V/t]; in place where autograd allows it."""

    @staticmethod
    def forward(ctx, logits, targets):
        ids = targets - RANK * logits.shape[-1]
        elsewhere = (ids < 0) | (ids >= logits.shape[-1])
        ids = ids.masked_fill(elsewhere, 0)[..., None]
        logits = widened(logits)
        logits = logits - all_reduce(logits.amax(-1), dist.ReduceOp.MAX)[..., None]
        picked = all_reduce(logits.gather(-1, ids)[..., 0].masked_fill(elsewhere, 0))
        probs = logits.exp_()
        total = all_reduce(probs.sum(-1))
        probs /= total[..., None]
        ctx.save_for_backward(probs, ids, elsewhere)
        return total.log() - picked

    @staticmethod
    def backward(ctx, dlosses):
        probs, ids, elsewhere = ctx.saved_tensors
        probs.scatter_add_(-1, ids, -(~elsewhere).to(probs.dtype)[..., None])
        return probs.mul_(dlosses[..., None]), None


class TorchBlock(nn.Module):
    def __init__(self, work):
        super().__init__()
        h, norm = work.h, partial(nn.RMSNorm, eps=1e-5) if work.g else nn.LayerNorm
        linear = partial(nn.Linear, bias=not work.g)
        self.gated = work.g > 0
        self.heads, self.groups, self.head_size = work.a // SIZE, (work.g or work.a) // SIZE, h // work.a
        self.norm_1, self.norm_2 = norm(h), norm(h)
        self.qkv = linear(h, (self.heads + 2 * self.groups) * self.head_size)
        self.out, self.experts = linear(h // SIZE, h), TorchExperts(work) if work.E else None
        if not work.E:
            self.w_in = linear(h, (1 + self.gated) * work.f // SIZE)    # of a Llama gate and up
            self.w_out = linear(work.f // SIZE, h)

    def forward(self, x, seen=None, rope=None):
        """Map x [b, s, h] to y. A BERT's `seen`, bool [b, 1, 1, s], are the keys that are no padding."""
        b, s, _ = x.shape
        qkv = self.qkv(enter(self.norm_1(x))).view(b, s, -1, self.head_size).transpose(1, 2)
        q, k, v = qkv.split((self.heads, self.groups, self.groups), 1)
        if rope:
            q, k = rotate(q, *rope), rotate(k, *rope)
        if not x.is_cuda:
            k, v = (one.repeat_interleave(self.heads // self.groups, 1) for one in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, seen, is_causal=seen is None, enable_gqa=k.shape[1] < q.shape[1])
        x = x + row_parallel(y.transpose(1, 2).reshape(b, s, -1), self.out)
        y = enter(self.norm_2(x))
        return x + (self.experts(y) if self.experts else self.mlp(y))

    def mlp(self, x):
        y = self.w_in(x)
        if self.gated:
            gate, up = y.chunk(2, -1)
            return row_parallel(F.silu(gate) * up, self.w_out)
        return row_parallel(F.gelu(y, approximate="tanh"), self.w_out)


def rope_of(s, size):
    """Return cos and sin [s, size/2] of rope's angles."""
    frequency = 10_000.0 ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    angle = torch.outer(torch.arange(s, dtype=torch.float64), frequency).to(torch.get_default_dtype())
    return angle.cos(), angle.sin()


def rotate(x, cos, sin):
    """Rotate the pairs (i, i + size/2) of x [b, a, s, size]."""
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).type_as(x)


def row_parallel(x, linear):
    """Add the bias once, after the sum, if there is one."""
    if SIZE == 1:
        return linear(x)
    y = Leave.apply(F.linear(x, linear.weight))
    return y if linear.bias is None else y + linear.bias


def embed(tokens, table):
    """Return the rows of a table [V/t, h] for tokens [b, s] -> [b, s, h]."""
    if SIZE == 1:
        return F.embedding(tokens, table)
    ids = tokens - RANK * len(table)
    elsewhere = (ids < 0) | (ids >= len(table))
    x = F.embedding(ids.masked_fill(elsewhere, 0), table).masked_fill(elsewhere[..., None], 0)
    return Leave.apply(x)


def loss_of_logits(logits, targets):
    """Return the mean loss of logits [b, s, V/t], over all targets but those that are NONE."""
    if SIZE == 1:
        return F.cross_entropy(widened(logits).flatten(0, 1), targets.flatten(), ignore_index=NONE)
    counted = targets != NONE
    return (ParallelCrossEntropy.apply(logits, targets) * counted).sum() / counted.sum()


class TorchGPT(nn.Module):
    def __init__(self, work):
        super().__init__()
        self.word = nn.Parameter(0.02 * torch.randn(work.V // SIZE, work.h))
        if work.g:
            self.head = nn.Parameter(0.02 * torch.randn(work.V // SIZE, work.h))
            self.cos, self.sin = map(nn.Buffer, rope_of(work.s, work.h // work.a))
        else:
            self.position = nn.Parameter(0.02 * torch.randn(work.s, work.h))
        self.blocks = nn.ModuleList(TorchBlock(work) for _ in range(work.L))
        self.norm = nn.RMSNorm(work.h, 1e-5) if work.g else nn.LayerNorm(work.h)
        self.llama = work.g > 0

    @staticmethod
    def batch(work, data):
        return torch.randint(work.V, (2, work.b, work.s), generator=data)

    def forward(self, tokens, targets):
        x, rope = embed(tokens, self.word), (self.cos, self.sin) if self.llama else None
        if not self.llama:
            x = x + self.position
        for block in self.blocks:
            x = block(x, rope=rope)
        return loss_of_logits(F.linear(enter(self.norm(x)), self.head if self.llama else self.word), targets)


def split_by_samples(model, halves):
    """Wrap a model for `--ddp` or `--fsdp2`, which has its own policy for halves; leave it as it is for neither."""
    if "--ddp" in sys.argv:
        return nn.parallel.DistributedDataParallel(model)
    if "--fsdp2" in sys.argv:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if halves else MixedPrecisionPolicy()
        for part in (*model.blocks, model):
            fully_shard(part, mp_policy=policy)
    return model


def main(kind=TorchGPT):
    work = Work.read(sys.argv[1])
    torch.set_num_threads(int(sys.argv[sys.argv.index("--threads") + 1]) if "--threads" in sys.argv else 1)
    if RANKS > 1:
        dist.init_process_group("gloo", rank=int(os.environ[PROCESS]))
    halves = "--bf16" in sys.argv
    torch.manual_seed(0)     # replicated parameters are then identical on every rank
    model = split_by_samples(kind(work), halves)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
    loss_of = torch.compile(model) if "--compile" in sys.argv else model
    mine = work._replace(b=work.b // (RANKS if DATA else 1))
    batch = kind.batch(mine, torch.Generator().manual_seed(0))

    def step():
        with torch.autocast("cpu", torch.bfloat16) if halves and "--fsdp2" not in sys.argv else nullcontext():
            loss = loss_of(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    serve(step)
    if RANKS > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
