"""The numbers on the page of open questions are what the formulas give."""
from pathlib import Path

from reference.config import ModelConfig
from reference.costs.bubbles import bubble_fraction
from reference.costs.parameters import parameters

PAGE = " ".join(Path("docs/open_questions.md").read_text(encoding="utf-8").split())
V100, NVLINK = 900e9, 150e9         # bytes/s of its memory, and in each direction between GPUs


def model(tokens, layers=72, h=3072):
    return ModelConfig(layers, h, 24, tokens, 1024)


def says(*texts):
    for text in texts:
        assert text in PAGE, text


def test_the_padded_vocabulary():
    padded = model(50_257).padded_vocab_size(8)
    says(f"{padded:,} is the next multiple of 1,024 after 50,257", f"each of 8 ranks gets {padded // 8:,} rows",
         f"{padded - 50_257} rows belong to no token, {(padded - 50_257) / padded:.1%}".replace("%", " %"),
         f"On one rank the padded size is {model(50_257).padded_vocab_size(1):,}")


def test_what_every_rank_computes():
    h, b, s = 3072, 8, 1024
    layer = parameters(model(51_200)) - parameters(model(51_200, layers=71))
    held = (4 + 2) * h                    # two norms, and the biases of two row-parallel layers
    numbers = 2 * b * s * h               # bytes, in 16 bits
    says(f"{100 * held / layer:.3f} % of a layer's", f"reads and writes {2 * numbers / 1e6:.0f} MB",
         f"in {1e3 * 2 * numbers / V100:.2f} ms", f"would take {1e3 * numbers / NVLINK:.2f} ms")


def test_the_bubble():
    for m, microbatches in ((8, "8 microbatches that is"), (64, "with 64 microbatches")):
        idle = bubble_fraction(8, m)
        says(f"{microbatches} {100 * idle:.0f} %", f"{100 * idle / (1 + idle):.0f} % of a step")
