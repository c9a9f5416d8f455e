"""The work that all contenders of the step benchmarks do."""
from typing import NamedTuple, Self

MASKED = 0.15       # the share of a BERT's tokens that are predicted
CHOSEN = 2          # the experts that compute a token


class Work(NamedTuple):
    """A GPT, a Llama, a Mixtral or a BERT, no dropout, and the samples of a step."""

    h: int      # columns
    L: int      # layers
    a: int      # heads
    s: int      # tokens in a sample
    b: int      # samples
    V: int      # tokens in the vocabulary
    g: int = 0  # heads of keys and values of a Llama, whose logits have a table of their own; 0: another model
    bert: int = 0   # 1: a BERT, whose attention looks both ways, with both of its heads
    E: int = 0  # experts in each layer of a Llama, CHOSEN for each token, in place of the MLP: a Mixtral

    @property
    def f(self) -> int:
        """Return the columns of the MLP: of a Llama's, which has a gate, 8/3 of h, down to a multiple of 64."""
        return 8 * self.h // 3 // 64 * 64 if self.g else 4 * self.h

    def __str__(self) -> str:
        kind = "Mixtral: " if self.E else "Llama: " if self.g else "BERT: " if self.bert else ""
        return kind + ", ".join(f"{letter} {getattr(self, letter)}" for letter in "hLasbVgE" if getattr(self, letter))

    @classmethod
    def read(cls, argument: str) -> Self:
        return cls(*map(int, argument.split(",")))

    @property
    def argument(self) -> str:
        """Return the sizes as the contenders' programs take them: '512,6,8,256,8,8192,0,0,0'."""
        return ",".join(map(str, self))

    @property
    def predicted(self) -> int:
        """Return the tokens of a sample that are predicted."""
        return round(MASKED * self.s) if self.bert else self.s

    @property
    def tokens(self) -> int:
        return self.b * self.s

    @property
    def weights(self) -> int:
        """Return the number of a GPT's or a Llama's weights, except for norms, biases and positions."""
        attention, mlp = (2 + 2 * (self.g or self.a) / self.a) * self.h**2, (3 if self.g else 2) * self.h * self.f
        return round(self.L * (attention + mlp * max(1, self.E))) + (2 if self.g else 1) * self.V * self.h

    @property
    def flops(self) -> float:
        """Return the FLOPs of a step's matrix products: 6 for each weight and token, and for attention what the mask
        leaves. (BERT's head for masked tokens has a layer of h columns; that for sentences reads one position only.)
        """
        attention, mlp = (2 + 2 * (self.g or self.a) / self.a) * self.h**2, (3 if self.g else 2) * self.h * self.f
        mlp = CHOSEN * mlp + self.E * self.h if self.E else mlp
        logits = self.V * self.h * self.predicted / self.s
        weights = self.L * (attention + mlp) + logits + self.bert * self.h**2
        keys = self.s if self.bert else (self.s + 1) / 2
        core = 2 * self.L * self.h * keys                   # q k^T and probabilities times v, for a token
        return 6 * self.tokens * (weights + core)


def lengths_of(work: Work) -> list[int]:
    """Return the tokens in each sample of a BERT: one in eight is half as long, and then padding."""
    return [work.s // 2 if i % 8 == 1 else work.s for i in range(work.b)]


# On CPUs, the first two and sizes between them; and on a GPU the smallest model of Shoeybi et al. 2019, table 1.
WORKS = {"h512": Work(h=512, L=6, a=8, s=256, b=8, V=8192), "h128": Work(h=128, L=4, a=8, s=128, b=8, V=1024),
         "llama512": Work(h=512, L=6, a=8, s=256, b=8, V=8192, g=4),
         "h192": Work(h=192, L=4, a=3, s=64, b=16, V=3072), "h256": Work(h=256, L=4, a=8, s=128, b=8, V=4096),
         "h320": Work(h=320, L=4, a=5, s=256, b=4, V=3200), "h384": Work(h=384, L=4, a=6, s=512, b=2, V=4096),
         "llama256": Work(h=256, L=4, a=8, s=256, b=4, V=4096, g=4),
         "llama320": Work(h=320, L=4, a=5, s=64, b=16, V=3200, g=5),
         "bert256": Work(h=256, L=4, a=8, s=128, b=8, V=4096, bert=1),
         "bert384": Work(h=384, L=4, a=6, s=512, b=2, V=4096, bert=1)}
GPU_WORK = Work(h=1536, L=40, a=16, s=1024, b=8, V=51200)
GPU_WORKS = {"1.2B": GPU_WORK, "h1024": Work(h=1024, L=24, a=16, s=1024, b=8, V=51200), "h512": WORKS["h512"],
             "h256": WORKS["h256"], "llama": Work(h=2048, L=16, a=16, s=2048, b=4, V=32000, g=4),
             "mixtral": Work(h=1024, L=12, a=16, s=2048, b=4, V=32000, g=4, E=8)}
