"""The speed of a run relative to its devices: FLOP/s of a rank, and the model FLOPs utilization (MFU).

Both count only the FLOPs of the model (`iteration_flops`, reference/costs/flops.py): recompute does not advance a run,
and padding of the vocabulary means nothing. So a run with another parallelism differs in seconds, not in FLOPs.
"""
import re
from collections.abc import Sequence
from dataclasses import dataclass

from mpi_impl.runtime.arrays import HALVES, dtype_of
from reference.costs.flops import iteration_flops, utilization
from shardlab.predict.rank import ImaginedWorld
from shardlab.report.forecast import MeasuredRate, computed_flops

# TFLOP/s of a GPU's matrix products in 16 bits and in float32, from NVIDIA's data sheets: of dense matrices, where some
# sheets print twice as much, for sparse ones; and float32 is not TF32, to which nothing is rounded here. A part of a
# GPU (MIG) has another name, which is not found.
PEAKS = {
    r"NVIDIA (H100 80GB HBM3|H200)": (989, 67),
    r"NVIDIA H100 PCIe": (756, 51),
    r"NVIDIA A100(-(SXM4|PCIE)-[48]0GB| 80GB PCIe)": (312, 19.5),
    r"Tesla V100-SXM2-(16|32)GB": (125, 15.7),
    r"NVIDIA L4": (121, 30.3),
    r"Tesla T4": (65, 8.1),
}


@dataclass(frozen=True)
class Peak:
    """The peak FLOP/s of the devices of a run in matrix products."""

    rate: float     # FLOP/s of all of them together
    source: str     # for a person


def peak_of(gpus: Sequence[str], form: str, found: MeasuredRate) -> Peak:
    """Return the published peak of these GPUs, each named once though ranks may share it, in the parameters' format.

    Other GPUs, other formats, and CPU cores have none, but a rate that was `found`.
    """
    rate = f"measured {format_rate(found.rate)} at which all ranks together multiply in {found.form}"
    if not gpus:
        return Peak(found.rate, rate)
    peaks = [published_peak(name, form) for name in gpus]
    names = ", ".join(sorted(set(gpus)))
    known = [peak for peak in peaks if peak is not None]
    if len(known) < len(peaks):
        return Peak(found.rate, f"{rate}, for not all of their GPUs have a peak in {form} that is known here ({names})")
    total = 1e12 * sum(known)
    return Peak(total, f"{format_rate(total)} of dense products in {form} that NVIDIA publishes for "
                       f"{len(gpus)} GPU{'s' if gpus[1:] else ''} ({names})")


def published_peak(name: str, form: str) -> float | None:
    """Return the TFLOP/s of the GPU with this name, if they are known."""
    for pattern, (half, single) in PEAKS.items():
        if re.fullmatch(pattern, name):
            return half if dtype_of(form) in HALVES else single if form == "float32" else None
    return None


@dataclass(frozen=True)
class Throughput:
    """A converter from an iteration's seconds to rates."""

    flops: int      # of the model in an iteration, on all ranks together
    ranks: int
    peak: Peak

    def of_a_rank(self, seconds: float) -> float:
        """Return the FLOP/s of a rank."""
        return self.flops / (seconds * self.ranks)

    def utilization(self, seconds: float) -> float:
        """Return the MFU, from 0 to 1."""
        return utilization(self.flops, seconds, self.ranks, self.peak.rate / self.ranks)

    def row(self, seconds: float) -> dict[str, float]:
        """Return the rates for a program."""
        return {"tflops_per_rank": self.of_a_rank(seconds) / 1e12, "mfu": self.utilization(seconds)}

    def describe(self, seconds: float) -> str:
        """Format the rates for a person: `8.46 GFLOP/s per rank | MFU 29.4%`."""
        return f"{format_rate(self.of_a_rank(seconds))} per rank | MFU {self.utilization(seconds):.1%}"


def throughput_of(run: ImaginedWorld, gpus: Sequence[str], found: MeasuredRate) -> Throughput:
    flops = iteration_flops(run.model, run.global_batch_size, run.seq_length)
    return Throughput(flops, run.parallel.world_size, peak_of(gpus, run.precision.compute, found))


def describe_flops(run: ImaginedWorld, throughput: Throughput) -> str:
    """Describe the FLOPs that the rates count, and the peak of the MFU."""
    computed = computed_flops(run)
    again = f", and {computed:.3e} with what is computed again, which does not count" * (computed > throughput.flops)
    return (f"a step is {throughput.flops:.3e} FLOPs of the model{again}; MFU is their share of the "
            f"{throughput.peak.source}")


def format_rate(flops_per_second: float) -> str:
    """Format a rate in GFLOP/s for a core, in TFLOP/s for a GPU."""
    units = (1e15, "PFLOP/s"), (1e12, "TFLOP/s"), (1e9, "GFLOP/s")
    unit, name = next((one for one in units if flops_per_second >= one[0]), units[-1])
    found = flops_per_second / unit
    return f"{found:,.0f} {name}" if found >= 100 else f"{found:.3g} {name}"
