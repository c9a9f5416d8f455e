"""The experts of a Mixtral in PyTorch: each token's router chooses 2 of E gated MLPs.

The host never waits for the numbers of tokens, so that a step can be a CUDA graph: copies of tokens are sorted by
expert, and in bfloat16 a grouped product multiplies each expert's copies by its own matrix.
"""
import torch
import torch.nn as nn
import torch.nn.functional as F
from works import CHOSEN


class Reordered(torch.autograd.Function):
    """Rows x[order]. The gradient is a lookup, too: autograd would add rows up, as if one could be read twice."""

    @staticmethod
    def forward(ctx, x, order, inverse):
        ctx.save_for_backward(inverse)
        return x[order]

    @staticmethod
    def backward(ctx, dy):
        return dy[ctx.saved_tensors[0]], None, None


def widened(x):
    """Return x in float32 if it is in bfloat16."""
    return x.float() if x.dtype == torch.bfloat16 else x


def grouped(x, w, ends):
    """Multiply the rows of x [n, in] up to each of `ends` [E] by their own matrix of w [E, in, out]."""
    if torch.is_autocast_enabled(x.device.type) or x.dtype == torch.bfloat16:
        return torch._grouped_mm(x.bfloat16(), w.bfloat16(), offs=ends)
    starts = [0, *ends.tolist()]
    return torch.cat([x[start:end] @ matrix for start, end, matrix in zip(starts, starts[1:], w)])


class TorchExperts(nn.Module):
    def __init__(self, work):
        super().__init__()
        self.router = nn.Parameter(0.02 * torch.randn(work.h, work.E))
        self.w_in = nn.Parameter(0.02 * torch.randn(work.E, work.h, 2 * work.f))      # gate and up
        self.w_out = nn.Parameter(0.02 * torch.randn(work.E, work.f, work.h))

    def forward(self, x):
        """Map x [b, s, h] to y [b, s, h]."""
        tokens = x.flatten(0, 1)
        logits, ids = widened(tokens @ self.router).topk(CHOSEN, -1)                   # [b s, 2]
        order = ids.flatten().argsort(stable=True)
        inverse = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=x.device))
        ends = (ids.flatten() == torch.arange(len(self.w_in), device=x.device)[:, None]).sum(1).cumsum(0).int()
        copies = tokens[:, None].expand(-1, CHOSEN, -1).flatten(0, 1)                  # [2 b s, h]
        gate, up = grouped(Reordered.apply(copies, order, inverse), self.w_in, ends).chunk(2, -1)
        y = Reordered.apply(grouped(F.silu(gate) * up, self.w_out, ends), inverse, order)
        return (y.unflatten(0, ids.shape) * logits.softmax(-1)[..., None]).sum(1).type_as(y).view_as(x)
