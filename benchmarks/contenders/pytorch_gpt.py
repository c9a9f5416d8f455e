"""One rank of PyTorch's side of cpu_step.py and cuda_step.py: the same step, with fused attention and AdamW.

The Llama is in pytorch_llama.py, the BERT in pytorch_bert.py.

Written as PyTorch's own users would: modules, autograd functions for f and g, `scaled_dot_product_attention`, fused
AdamW, gloo between ranks; with `--compile`, `torch.compile` over the whole model. With `--cuda` on a GPU, products in
bfloat16 by `torch.autocast`, weights and AdamW in float32.
"""
import os
import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from turns import PROCESS, serve
from works import Work

NONE = -100     # the target of a position that counts for nothing, as in PyTorch itself
RANK, SIZE = int(os.environ[PROCESS]), int(os.environ["WORLD_SIZE"])


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


class ParallelCrossEntropy(torch.autograd.Function):
    """The losses [b, s] of logits [b, s, V/t]; in place where autograd allows it."""

    @staticmethod
    def forward(ctx, logits, targets):
        ids = targets - RANK * logits.shape[-1]
        elsewhere = (ids < 0) | (ids >= logits.shape[-1])
        ids = ids.masked_fill(elsewhere, 0)[..., None]
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
        h = work.h
        self.heads, self.head_size = work.a // SIZE, h // work.a
        self.norm_1, self.norm_2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.qkv, self.w_in = nn.Linear(h, 3 * h // SIZE), nn.Linear(h, 4 * h // SIZE)
        self.out, self.w_out = nn.Linear(h // SIZE, h), nn.Linear(4 * h // SIZE, h)

    def forward(self, x, seen=None):
        """Map x [b, s, h] to y. A BERT's `seen`, bool [b, 1, 1, s], are the keys that are no padding."""
        b, s, _ = x.shape
        qkv = self.qkv(Enter.apply(self.norm_1(x))).view(b, s, 3, self.heads, self.head_size)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, seen, is_causal=seen is None).transpose(1, 2).reshape(b, s, -1)
        x = x + row_parallel(y, self.out)
        y = F.gelu(self.w_in(Enter.apply(self.norm_2(x))), approximate="tanh")
        return x + row_parallel(y, self.w_out)


def row_parallel(x, linear):
    """Add the bias once, after the sum, if there is one."""
    if SIZE == 1:
        return linear(x)
    y = Leave.apply(F.linear(x, linear.weight))
    return y if linear.bias is None else y + linear.bias


def embed(tokens, table):
    """Return the rows of a table [V/t, h] for tokens [b, s] -> [b, s, h]."""
    ids = tokens - RANK * len(table)
    elsewhere = (ids < 0) | (ids >= len(table))
    x = F.embedding(ids.masked_fill(elsewhere, 0), table).masked_fill(elsewhere[..., None], 0)
    return Leave.apply(x)


def loss_of_logits(logits, targets):
    """Return the mean loss of logits [b, s, V/t], over all targets but those that are NONE."""
    if SIZE == 1:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=NONE)
    counted = targets != NONE
    return (ParallelCrossEntropy.apply(logits, targets) * counted).sum() / counted.sum()


class TorchGPT(nn.Module):
    def __init__(self, work):
        super().__init__()
        self.word = nn.Parameter(0.02 * torch.randn(work.V // SIZE, work.h))
        self.position = nn.Parameter(0.02 * torch.randn(work.s, work.h))
        self.blocks = nn.ModuleList(TorchBlock(work) for _ in range(work.L))
        self.norm = nn.LayerNorm(work.h)

    @staticmethod
    def batch(work, data):
        return torch.randint(work.V, (2, work.b, work.s), generator=data)

    def forward(self, tokens, targets):
        x = embed(tokens, self.word) + self.position
        for block in self.blocks:
            x = block(x)
        return loss_of_logits(F.linear(Enter.apply(self.norm(x)), self.word), targets)


def main(kind=TorchGPT):
    work = Work(*map(int, sys.argv[1].split(",")))
    torch.set_num_threads(1)
    if SIZE > 1:
        dist.init_process_group("gloo", rank=RANK)
    device = torch.device("cuda" if "--cuda" in sys.argv else "cpu")
    torch.manual_seed(0)     # replicated parameters are then identical on every rank
    model = kind(work).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
    loss_of = torch.compile(model) if "--compile" in sys.argv else model
    batch = [x.to(device) for x in kind.batch(work, torch.Generator().manual_seed(0))]

    def step():
        with torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext():
            loss = loss_of(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()

    serve(step)
    if SIZE > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
