"""One rank of PyTorch's side of cpu_step.py for a BERT; all that a GPT has, too, is in pytorch_gpt.py.

As Megatron's BERT: blocks with the norms first, a head for masked tokens, and one for the order of two sentences. Keys
that are padding are masked in `scaled_dot_product_attention`, and the head is computed where a token is predicted.
"""
import torch
import torch.nn as nn
import torch.nn.functional as F
from pytorch_gpt import NONE, SIZE, TorchBlock, embed, enter, loss_of_logits, main
from works import lengths_of


class TorchBERT(nn.Module):
    def __init__(self, work):
        super().__init__()
        self.predicted = work.predicted
        self.word, self.position, self.token_type = (
            nn.Parameter(0.02 * torch.randn(rows, work.h)) for rows in (work.V // SIZE, work.s, 2))
        self.blocks = nn.ModuleList(TorchBlock(work) for _ in range(work.L))
        self.norm, self.head_norm = nn.LayerNorm(work.h), nn.LayerNorm(work.h)
        self.dense, self.pooler, self.order = (nn.Linear(work.h, n) for n in (work.h, work.h, 2))
        self.bias = nn.Parameter(torch.zeros(work.V // SIZE))

    @staticmethod
    def batch(work, data):
        """Return tokens, token types and targets [b, s], lengths [b], and which sentences are swapped [b]."""
        tokens, targets = torch.randint(work.V, (2, work.b, work.s), generator=data)
        lengths, position = torch.tensor(lengths_of(work)), torch.arange(work.s)
        order = torch.rand(work.b, work.s, generator=data) + (position >= lengths[:, None])     # padding is last
        targets = targets.masked_fill(order.argsort(1).argsort(1) >= work.predicted, NONE)
        types = (position >= lengths[:, None] // 2).to(torch.int64)
        return tokens, types, targets, lengths, torch.randint(2, (work.b,), generator=data)

    def forward(self, tokens, types, targets, lengths, swapped):
        x = embed(tokens, self.word) + self.position + F.embedding(types, self.token_type)
        seen = (torch.arange(tokens.shape[1]) < lengths[:, None])[:, None, None]
        for block in self.blocks:
            x = block(x, seen)
        x = self.norm(x)
        at = (targets == NONE).to(torch.int8).argsort(dim=1, stable=True)[:, :self.predicted]
        y = x.gather(1, at[..., None].expand(-1, -1, x.shape[-1]))
        y = self.head_norm(F.gelu(self.dense(y), approximate="tanh"))
        lm = loss_of_logits(F.linear(enter(y), self.word, self.bias), targets.gather(1, at))
        return lm + F.cross_entropy(self.order(torch.tanh(self.pooler(x[:, 0]))), swapped)


if __name__ == "__main__":
    main(TorchBERT)
