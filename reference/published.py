"""Tables of the papers, as they print them: what was measured, which no formula gives."""
from typing import NamedTuple

from reference.config import ModelConfig, ParallelConfig

A100_PEAK = 312e12      # FLOP/s, in 16 bits
V100_REACHED = 39e12    # FLOP/s of Megatron's baseline, on one GPU


class Run(NamedTuple):
    """Of Narayanan et al. 2021, table 1: s = 2048, V = 51,200, with full recompute."""

    billions: str       # of parameters
    a: int
    h: int
    L: int
    t: int
    p: int
    gpus: int
    B: int
    teraflops: float    # that each GPU reached: FLOP/s / 10^12
    of_peak: str        # in percent

    @property
    def model(self) -> ModelConfig:
        return ModelConfig(self.L, self.h, self.a, 51_200, 2048)

    @property
    def parallel(self) -> ParallelConfig:
        return ParallelConfig.for_world(self.gpus, self.t, self.p)


PTD_P = tuple(Run(*row) for row in (
    ("1.7", 24, 2304, 24, 1, 1, 32, 512, 137, "44"), ("3.6", 32, 3072, 30, 2, 1, 64, 512, 138, "44"),
    ("7.5", 32, 4096, 36, 4, 1, 128, 512, 142, "46"), ("18.4", 48, 6144, 40, 8, 1, 256, 1024, 135, "43"),
    ("39.1", 64, 8192, 48, 8, 2, 512, 1536, 138, "44"), ("76.1", 80, 10_240, 60, 8, 4, 1024, 1792, 140, "45"),
    ("145.6", 96, 12_288, 80, 8, 8, 1536, 2304, 148, "47"), ("310.1", 128, 16_384, 96, 8, 16, 1920, 2160, 155, "50"),
    ("529.6", 128, 20_480, 105, 8, 35, 2520, 2520, 163, "52"),
    ("1008.0", 160, 25_600, 128, 8, 64, 3072, 3072, 163, "52")))


class Scaled(NamedTuple):
    """Of Shoeybi et al. 2019, table 1 and figure 5: weak scaling, b = 8, s = 1024, V = 51,200, with full recompute."""

    billions: str
    h: int
    a: int
    L: int
    t: int
    efficiency: float    # beside one GPU with the smallest model; only that of the largest stands in the text

    @property
    def model(self) -> ModelConfig:
        return ModelConfig(self.L, self.h, self.a, 51_200, 1024)


MEGATRON = (Scaled("1.2", 1536, 16, 40, 1, 1.00), Scaled("2.5", 1920, 20, 54, 2, 0.95),
            Scaled("4.2", 2304, 24, 64, 4, 0.82), Scaled("8.3", 3072, 32, 72, 8, 0.77))

STRONG_SCALING = {1: 1.0, 2: 1.64, 4: 2.34, 8: 2.98}    # of the smallest of these: t, and how many times faster
