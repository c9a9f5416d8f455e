"""Mixed precision: 16-bit formats, their rounding, and the loss scale that keeps small gradients in range.

A model that computes in 16 bits moves and holds half the bytes, and a GPU's tensor cores multiply them several times as
fast. Three things must not be done in 16 bits, and each has its remedy (Micikevicius et al. 2018, 1710.03740, section
3):

- *Small updates.* lr x gradient is often less than half the distance from a weight to the next number of its format,
  and then a rounded sum does not change. So the optimizer keeps *master weights* in float32, and the model computes
  with a rounded copy.
- *Long sums.* Products are accumulated in float32 and rounded once. So are gradients over microbatches and replicas
  (the *main gradients*), and the sums in layer norms and in softmax. The loss is computed in float32.
- *Small gradients.* Below 2^-24 float16 has nothing but 0. So the loss is multiplied by a scale, and with it, by the
  chain rule, every gradient; the optimizer divides by it, in float32. The scale is as large as overflow permits.
  (bfloat16 has float32's range, fewer digits, and needs no scale.)

                 bits: sign, exponent, fraction   smallest, and normal, above 0   largest       1 + epsilon is next to 1
    float16                  1    5    10              6e-8      6e-5               65,504             2^-10
    bfloat16                 1    8     7              9e-41     1e-38              3e38               2^-7
    float32                  1    8    23              1e-45     1e-38              3e38               2^-23
"""
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from reference.config import option, require_one_of, require_positive
from reference.errors import UserError

# ---- formats --------------------------------------------------------------------------------------------------------


class Format(NamedTuple):
    """A binary floating-point format, by the rules of IEEE 754."""

    name: str
    exponent: int     # bits
    fraction: int     # bits, without the leading 1 that is not stored

    @property
    def bytes(self) -> int:
        return (1 + self.exponent + self.fraction) // 8

    @property
    def epsilon(self) -> float:
        """Return the distance from 1 to the next number. The relative rounding error is at most half of it."""
        return 2.0**-self.fraction

    @property
    def smallest_normal(self) -> float:
        """Return the number below which the spacing of numbers no longer shrinks."""
        return 2.0**(2 - 2**(self.exponent - 1))

    @property
    def largest(self) -> float:
        return (2 - self.epsilon) * 2.0**(2**(self.exponent - 1) - 1)


FORMATS = {form.name: form for form in (Format("float16", 5, 10), Format("bfloat16", 8, 7), Format("float32", 8, 23),
                                        Format("float64", 11, 52))}


def rounded(x, form: Format):
    """Round x, float32 or float64, to the nearest numbers of a smaller format, ties to even; the dtype stays.

    Values that would round to more than the largest number become infinite.
    """
    if form.bytes >= x.dtype.itemsize:
        return x
    wide = x.astype(np.float64)
    _, exponent = np.frexp(np.maximum(abs(wide), form.smallest_normal))      # 2^(exponent - 1) <= |x| < 2^exponent
    spacing = np.ldexp(1.0, exponent - 1 - form.fraction)
    nearest = np.where(np.isfinite(wide), np.rint(wide / spacing) * spacing, wide)
    return np.where(abs(nearest) > form.largest, np.copysign(np.inf, nearest), nearest).astype(x.dtype)


# ---- a run's choices ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LossScaling:
    """Megatron's options for the loss scale, and its factor. Raises UserError for values that make no sense."""

    loss_scale: float | None = None           # a fixed scale; None: it follows the gradients
    initial_loss_scale: float = 2.0**32
    min_loss_scale: float = 1.0
    loss_scale_window: int = 1000             # steps without overflow before the scale is multiplied by the factor
    hysteresis: int = 2                       # overflows before the scale is divided by it
    loss_scale_factor: float = 2.0            # F, which is 2 in Megatron, without an option

    def __post_init__(self):
        for name in ("loss_scale", "initial_loss_scale", "min_loss_scale"):
            value = getattr(self, name)
            if value is not None and not 1e-30 < value < 1e30:
                raise UserError(f"{option(name)} is {value:g}, but must be above 1e-30 and below 1e30: gradients "
                                "are multiplied by it, and divided again in float32.")
        for name in ("loss_scale_window", "hysteresis"):
            require_positive(name, getattr(self, name))
        if not 1 < self.loss_scale_factor <= 2**16:
            raise UserError(f"--loss-scale-factor is {self.loss_scale_factor:g}, but must be above 1 and at most "
                            "65536: the scale is divided by it after an overflow. Leave it out for 2.")
        if self.loss_scale is None and self.initial_loss_scale < self.min_loss_scale:
            raise UserError(f"--initial-loss-scale is {self.initial_loss_scale:g}, but must not be below "
                            f"--min-loss-scale, which is {self.min_loss_scale:g}.")

    def lowest(self, scale: float) -> bool:
        """Report whether an overflow cannot make the scale smaller."""
        return self.loss_scale is not None or scale <= self.min_loss_scale


UNSCALED = LossScaling(loss_scale=1.0)


@dataclass(frozen=True)
class Precision:
    """The format that the model computes in, and the scaling of the loss. Raises UserError for an unknown format."""

    compute: str = "float32"
    scaling: LossScaling = UNSCALED

    def __post_init__(self):
        require_one_of("The format to compute in", self.compute, tuple(FORMATS))

    @property
    def half(self) -> bool:
        """Report whether the format has 16 bits, so that some things are done in another."""
        return self.form.bytes == 2

    @property
    def form(self) -> Format:
        return FORMATS[self.compute]

    @property
    def scaled(self) -> bool:
        """Report whether gradients may overflow, so that the loss is scaled and steps may be skipped."""
        return self.compute == "float16"

    @property
    def main(self) -> str:
        """Return the format of master weights, main gradients, moments and the loss."""
        return "float32" if self.half else self.compute

    @property
    def bytes_each(self) -> tuple[int, int, int]:
        """Return w, g and K of model_states: the bytes of a parameter, its gradient and its Adam states."""
        main = FORMATS[self.main].bytes
        return self.form.bytes, main, 3 * main if self.half else 2 * main


# ---- the loss scale -------------------------------------------------------------------------------------------------


class ScaleState(NamedTuple):
    """The state of a loss scale that follows the gradients."""

    scale: float
    good_steps: int       # without overflow, since the scale or the patience changed
    patience: int         # overflows that are left before the scale shrinks


class LossScaler:
    """A search for the largest loss scale that gradients allow. The rule is Megatron's.

    A step whose gradients overflow is skipped: no weight moves. From the n-th such step on (n is the hysteresis) the
    scale is divided by a factor F each time; after a window of steps without overflow it is multiplied by F, and the
    patience restored. F is 2 by default. A power of 2 only moves a gradient's exponent; any other factor rounds its
    digits.
    """

    def __init__(self, scaling: LossScaling):
        self.scaling = scaling
        first = scaling.initial_loss_scale if scaling.loss_scale is None else scaling.loss_scale
        self.state = ScaleState(first, 0, scaling.hysteresis)

    @property
    def scale(self) -> float:
        return self.state.scale

    def update(self, overflow: bool) -> None:
        """Update the scale after a step: `overflow` is whether a gradient was infinite or not a number."""
        c, (scale, good_steps, patience) = self.scaling, self.state
        if c.loss_scale is not None:
            return
        if overflow:
            patience = max(patience - 1, 0)
            smaller = max(scale / c.loss_scale_factor, min(scale, c.min_loss_scale))
            self.state = ScaleState(smaller if patience == 0 else scale, 0, patience)
        elif good_steps + 1 >= c.loss_scale_window:
            self.state = ScaleState(c.loss_scale_factor * scale, 0, c.hysteresis)
        else:
            self.state = ScaleState(scale, good_steps + 1, patience)
