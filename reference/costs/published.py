"""Tables of the papers, as they print them: measurements, which no formula gives."""
from dataclasses import dataclass
from typing import NamedTuple

from reference.config import ModelConfig, ParallelConfig

A100_PEAK = 312e12      # FLOP/s, in 16 bits
H100_PEAK = 989e12
V100_REACHED = 39e12    # FLOP/s of Megatron's baseline, on one GPU


class RunOfGPT:
    """A run of a GPT with s = 2048 and V = 51,200."""

    a: int
    h: int
    L: int

    @property
    def model(self) -> ModelConfig:
        return ModelConfig(self.L, self.h, self.a, 51_200, 2048)


@dataclass(frozen=True)
class PublishedRun(RunOfGPT):
    """A row of Narayanan et al. 2021, table 1: s = 2048, V = 51,200, with full recompute."""

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
    def parallel(self) -> ParallelConfig:
        return ParallelConfig.for_world(self.gpus, self.t, self.p)


PTD_P = tuple(PublishedRun(*row) for row in (
    ("1.7", 24, 2304, 24, 1, 1, 32, 512, 137, "44"), ("3.6", 32, 3072, 30, 2, 1, 64, 512, 138, "44"),
    ("7.5", 32, 4096, 36, 4, 1, 128, 512, 142, "46"), ("18.4", 48, 6144, 40, 8, 1, 256, 1024, 135, "43"),
    ("39.1", 64, 8192, 48, 8, 2, 512, 1536, 138, "44"), ("76.1", 80, 10_240, 60, 8, 4, 1024, 1792, 140, "45"),
    ("145.6", 96, 12_288, 80, 8, 8, 1536, 2304, 148, "47"), ("310.1", 128, 16_384, 96, 8, 16, 1920, 2160, 155, "50"),
    ("529.6", 128, 20_480, 105, 8, 35, 2520, 2520, 163, "52"),
    ("1008.0", 160, 25_600, 128, 8, 64, 3072, 3072, 163, "52")))


@dataclass(frozen=True)
class Compared(RunOfGPT):
    """A row of table 2 of the same paper: PTD-P, or with t = p = 1 DeepSpeed's ZeRO-3; full recompute."""

    billions: str
    a: int
    h: int
    L: int
    t: int
    p: int
    B: int
    gpus: int
    b: int
    teraflops: float
    days: int           # for 300 billion tokens


TABLE_2 = tuple(Compared(*model, *run) for model, runs in (
    (("174.6", 96, 12_288, 96), ((1, 1, 1536, 384, 4, 144, 90), (1, 1, 1536, 768, 2, 88, 74),
                                 (1, 1, 1536, 1536, 1, 44, 74), (8, 12, 1536, 384, 1, 153, 84),
                                 (8, 12, 1536, 768, 1, 149, 43), (8, 12, 1536, 1536, 1, 141, 23))),
    (("529.6", 128, 20_480, 105), ((1, 1, 2560, 640, 4, 138, 169), (1, 1, 2240, 1120, 2, 98, 137),
                                   (1, 1, 2240, 2240, 1, 48, 140), (8, 35, 2240, 560, 1, 171, 156),
                                   (8, 35, 2240, 1120, 1, 167, 80), (8, 35, 2240, 2240, 1, 159, 42)))) for run in runs)


class Scaled(NamedTuple):
    """A row of Shoeybi et al. 2019, table 1 and figure 5: weak scaling, b = 8, s = 1024, V = 51,200, full recompute."""

    billions: str
    h: int
    a: int
    L: int
    t: int
    efficiency: float    # relative to one GPU with the smallest model; the text gives only the largest's
    replicated: float    # the same on 64 times the GPUs, B = 512; likewise

    @property
    def model(self) -> ModelConfig:
        return ModelConfig(self.L, self.h, self.a, 51_200, 1024)


MEGATRON = (Scaled("1.2", 1536, 16, 40, 1, 1.00, 0.96), Scaled("2.5", 1920, 20, 54, 2, 0.95, 0.83),
            Scaled("4.2", 2304, 24, 64, 4, 0.82, 0.79), Scaled("8.3", 3072, 32, 72, 8, 0.77, 0.74))

STRONG_SCALING = {1: 1.0, 2: 1.64, 4: 2.34, 8: 2.98}    # the smallest of these: t, and the speedup

HEADS = {16: 0.82, 24: 0.80, 32: 0.77}      # the largest: a, and its efficiency on 8 GPUs (appendix D)

# Rajbhandari et al. 2020, table 1: GB of model states a device, 7.5 billion parameters, by stage and by replicas.
ZERO = {1: {1: 120, 4: 52.5, 16: 35.6, 64: 31.4, 256: 30.4, 1024: 30.1},
        2: {1: 120, 4: 41.3, 16: 21.6, 64: 16.6, 256: 15.4, 1024: 15.1},
        3: {1: 120, 4: 30, 16: 7.5, 64: 1.88, 256: 0.47, 1024: 0.12}}


@dataclass(frozen=True)
class Recomputed(RunOfGPT):
    """A row of Korthikanti et al. 2022, tables 3 and 5: s = 2048, V = 51,200, t = 8, d = 1. Seconds of an iteration."""

    billions: str
    a: int
    h: int
    L: int
    p: int
    v: int | None
    B: int
    b: int
    full: float        # with full recompute
    selective: float   # with selective recompute and sequence parallelism


KORTHIKANTI = (Recomputed("22", 64, 6144, 48, 1, None, 4, 4, 1.42, 1.10),
               Recomputed("175", 96, 12_288, 96, 8, 3, 64, 1, 18.13, 13.75),
               Recomputed("530", 128, 20_480, 105, 35, 3, 280, 1, 49.05, 37.83),
               Recomputed("1000", 160, 25_600, 128, 64, None, 512, 1, 94.42, 71.49))

# Overhead of recompute for forward and backward of a layer of the first model (table 4).
OVERHEAD = {("full", False): 0.39, ("selective", False): 0.07, ("selective", True): 0.04}   # sequence parallel?


class LongRun(NamedTuple):
    """A row of Meta 2024 (Llama 3, 2407.21783), table 4: 405 billion parameters on H100s, without recompute."""

    gpus: int
    t: int
    c: int
    p: int
    d: int
    s: int
    samples: int        # of a replica, in a step
    teraflops: float    # that each GPU reached
    of_peak: str        # in percent; 400 of 989 round to 40

    @property
    def model(self) -> ModelConfig:
        return ModelConfig(126, 16_384, 128, 128_256, self.s, "rope", untie_embeddings_and_output_weights=True,
                           hidden_dropout=0.0, attention_dropout=0.0, normalization="RMSNorm", swiglu=True,
                           ffn_hidden_size=53_248, num_query_groups=8, add_bias_linear=False)

    def parallel(self, **choices) -> ParallelConfig:
        return ParallelConfig(self.t, self.p, self.d, sequence_parallel=True, context_parallel_size=self.c, **choices)


LLAMA_3 = (LongRun(8192, 8, 1, 16, 64, 8192, 32, 430, "43"), LongRun(16_384, 8, 1, 16, 128, 8192, 16, 400, "41"),
           LongRun(16_384, 8, 16, 16, 8, 131_072, 16, 380, "38"))


# MosaicML's models: h, a, L and parameters, by billions.
MPT = {"70": (8192, 64, 80, 64_862_437_376), "30": (7168, 56, 48, 29_975_214_080), "13": (5120, 40, 40, 12_853_954_560),
       "7": (4096, 32, 32, 6_658_859_008), "3": (2560, 20, 32, 2_651_837_440), "1": (2048, 16, 24, 1_315_950_592)}


class FullyShardedRun(NamedTuple):
    """A row of MosaicML's table for H100s in bfloat16 (github.com/mosaicml/llm-foundry, scripts/train/benchmarking):
    PyTorch's FSDP, which is ZeRO-3, and no model parallelism; s = 2048, V = 50,368.
    """

    billions: str
    gpus: int
    b: int
    m: int
    recompute: bool     # of every layer
    of_peak: float      # in percent; recomputed work does not count

    @property
    def model(self) -> ModelConfig:
        h, a, L, _ = MPT[self.billions]
        return ModelConfig(L, h, a, 50_368, 2048, hidden_dropout=0.0, attention_dropout=0.0)


# All its rows of 2,048 positions, from a billion parameters on.
FSDP = tuple(FullyShardedRun(*row) for row in (
    ("70", 64, 8, 4, True, 42.57), ("70", 32, 2, 16, True, 36.15), ("30", 32, 14, 3, True, 43.92),
    ("30", 16, 10, 3, True, 43.07), ("30", 8, 3, 21, True, 38.11), ("13", 64, 2, 1, False, 39.86),
    ("13", 32, 2, 1, False, 39.95), ("13", 16, 2, 1, False, 39.58), ("13", 8, 2, 1, False, 39.79),
    ("7", 8, 6, 1, False, 46.44), ("3", 64, 6, 3, False, 40.80), ("3", 32, 6, 3, False, 41.70),
    ("3", 16, 10, 3, False, 43.73), ("1", 64, 20, 1, False, 40.85), ("1", 32, 20, 1, False, 41.52),
    ("1", 16, 20, 1, False, 42.36), ("1", 8, 14, 1, False, 41.82)))

# Megatron-Core's README: GPT-3 with s = 4096, V = 131,072 and B = 1152 on this many H100s; percent of the peak. It
# gives no t, p or v.
MEGATRON_CORE = {96: 47, 4608: 42}

# torchtitan's benchmarks of December 2024: Llama 3.1 8B by FSDP, b = 2, s = 8192, on this many H100s; tokens a second
# on each, without and with torch.compile.
TORCHTITAN = {8: (5762, 6667), 128: (5605, 6514)}
