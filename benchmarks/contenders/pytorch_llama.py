"""One rank of PyTorch's side of cpu_step.py for a Llama; all that a GPT has, too, is in pytorch_gpt.py.

As PyTorch's own users would write it: `RMSNorm`, gate and up in one product, keys and values repeated for the heads of
their group as transformers does, and rope by halves.
"""
import torch
import torch.nn as nn
import torch.nn.functional as F
from pytorch_gpt import SIZE, Enter, TorchGPT, embed, loss_of_logits, main, row_parallel


def rotary(s, size, base=10_000.0):
    """Return cos and sin [s, size/2] of rope's angles."""
    frequency = base ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    angle = torch.outer(torch.arange(s, dtype=torch.float64), frequency)
    return angle.cos(), angle.sin()


def rotate(x, cos, sin):
    """Rotate the pairs (i, i + size/2) of x [b, a, s, size]."""
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class LlamaBlock(nn.Module):
    def __init__(self, work):
        super().__init__()
        h, size = work.h, work.h // work.a
        self.heads, self.groups, self.size = work.a // SIZE, work.g // SIZE, size
        self.norm_1, self.norm_2 = nn.RMSNorm(h, 1e-5), nn.RMSNorm(h, 1e-5)
        self.qkv = nn.Linear(h, (self.heads + 2 * self.groups) * size, bias=False)
        self.gate_up = nn.Linear(h, 2 * work.f // SIZE, bias=False)
        self.out, self.down = nn.Linear(h // SIZE, h, bias=False), nn.Linear(work.f // SIZE, h, bias=False)

    def forward(self, x, cos, sin):
        b, s, _ = x.shape
        qkv = self.qkv(Enter.apply(self.norm_1(x))).view(b, s, -1, self.size).transpose(1, 2)
        q, k, v = qkv.split((self.heads, self.groups, self.groups), 1)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k, v = (one.repeat_interleave(self.heads // self.groups, 1) for one in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, -1)
        x = x + row_parallel(y, self.out)
        gate, up = self.gate_up(Enter.apply(self.norm_2(x))).chunk(2, -1)
        return x + row_parallel(F.silu(gate) * up, self.down)


class TorchLlama(nn.Module):
    def __init__(self, work):
        super().__init__()
        self.word, self.head = (nn.Parameter(0.02 * torch.randn(work.V // SIZE, work.h)) for _ in range(2))
        self.blocks = nn.ModuleList(LlamaBlock(work) for _ in range(work.L))
        self.norm = nn.RMSNorm(work.h, 1e-5)
        for name, one in zip(("cos", "sin"), rotary(work.s, work.h // work.a)):
            self.register_buffer(name, one.to(torch.get_default_dtype()))

    batch = staticmethod(TorchGPT.batch)

    def forward(self, tokens, targets):
        x = embed(tokens, self.word)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return loss_of_logits(F.linear(Enter.apply(self.norm(x)), self.head), targets)


if __name__ == "__main__":
    main(TorchLlama)
