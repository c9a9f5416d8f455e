"""The work that all contenders of the step benchmarks do."""
from typing import NamedTuple


class Work(NamedTuple):
    """A GPT or a Llama, no dropout, and the samples of a step."""

    h: int      # columns
    L: int      # layers
    a: int      # heads
    s: int      # tokens in a sample
    b: int      # samples
    V: int      # tokens in the vocabulary
    g: int = 0  # heads of keys and values of a Llama, whose logits have a table of their own; 0: a GPT

    @property
    def f(self) -> int:
        """Return the columns of the MLP: of a Llama's, which has a gate, 8/3 of h, down to a multiple of 64."""
        return 8 * self.h // 3 // 64 * 64 if self.g else 4 * self.h

    def __str__(self) -> str:
        return ", ".join(f"{letter} {size}" for letter, size in self._asdict().items() if size)

    @property
    def argument(self) -> str:
        """Return the sizes as the contenders' programs take them: '512,6,8,256,8,8192,0'."""
        return ",".join(map(str, self))

    @property
    def tokens(self) -> int:
        return self.b * self.s

    @property
    def flops(self) -> float:
        """Return the FLOPs of a step's matrix products: 6 for each weight and token, and for attention what the mask
        leaves.
        """
        attention, mlp = (2 + 2 * (self.g or self.a) / self.a) * self.h**2, (3 if self.g else 2) * self.h * self.f
        weights = self.L * (attention + mlp) + self.V * self.h
        core = 2 * self.L * self.h * (self.s + 1) / 2      # q k^T and probabilities times v, for a token
        return 6 * self.tokens * (weights + core)


# On CPUs; and on a GPU the smallest model of Shoeybi et al. 2019, table 1.
WORKS = {"h512": Work(h=512, L=6, a=8, s=256, b=8, V=8192), "h128": Work(h=128, L=4, a=8, s=128, b=8, V=1024),
         "llama512": Work(h=512, L=6, a=8, s=256, b=8, V=8192, g=4)}
GPU_WORK = Work(h=1536, L=40, a=16, s=1024, b=8, V=51200)
