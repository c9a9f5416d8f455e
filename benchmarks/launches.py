"""The launches of a training step on one GPU, and the bytes that they move, counted without a GPU.

    .venv/bin/python benchmarks/launches.py

The step of cuda_step.py runs on arrays without data (shardlab/predict), as CuPy's arrays would run it. An array of a
launch counts once, also if a kernel reads and overwrites it, but twice if a product is added to it. `at least` is the
time of these bytes at an H100's 3.35 TB/s. Of CuPy's own kernels the file is shown that asks for them.
"""
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from unittest import mock

import numpy as np
from models import gpt
from programs import head, parse, parser_of, row
from works import GPU_WORK, Work

from mpi_impl.kernels import cuda, fused
from mpi_impl.kernels.cuda import flash
from mpi_impl.launch.entry import run_alone
from mpi_impl.layers import attention
from reference.config import ParallelConfig
from reference.precision import Precision
from shardlab.predict.meta import MetaArray, is_meta
from shardlab.predict.meta_device import MetaDevice, path_of
from shardlab.predict.rank import ImaginedWorld, imagine_rank

BANDWIDTH = 3.35e12         # bytes/s of an H100 SXM, by NVIDIA's data sheet


class Launches:
    """The launches so far, and their bytes, by kind and name."""

    def __init__(self):
        self.calls, self.bytes = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
        self.ours = ""          # the kernel of ours that is being launched

    def add(self, kind: str, name: str, size: float) -> None:
        self.calls[kind, name] += 1
        self.bytes[kind, name] += int(size)

    def stream(self, device: MetaDevice, size: float) -> None:
        self.add(*(("our kernels", self.ours) if self.ours else ("CuPy's kernels", asking_file())), size)

    def launch(self, start: Callable, kernel: str, *others, **keywords) -> None:
        self.ours = kernel
        start(kernel, *others, **keywords)
        self.ours = ""

    def multiply(self, product: Callable, x, y, out, add: bool = False):
        self.add("matrix products", "with one row" if len(x) == 1 else "", x.nbytes + y.nbytes + out.nbytes * (1 + add))
        return product(x, y, out, add)

    def attend(self, run: Callable, build: Callable, arrays, *others) -> bool:
        self.add("attention", build.__name__, sum(x.nbytes for x in arrays.values()))
        return run(build, arrays, *others)

    def set(self, assign: Callable, x: MetaArray, key, value) -> None:
        if not is_meta(value):
            self.stream(x.device, x[key].nbytes)
        assign(x, key, value)


def asking_file() -> str:
    """Return the file of the innermost line under way that is neither a kernel's nor this program's."""
    frame = sys._getframe(2)
    while not path_of(frame.f_code).startswith(("mpi_impl/", "reference/")) and frame.f_back:
        frame = frame.f_back
    return path_of(frame.f_code)


def count(work: Work) -> Launches:
    """Run a step in bfloat16, with attention by cuDNN."""
    found = Launches()
    rank = imagine_rank(ImaginedWorld(gpt(work.L, work.h, work.a, work.V, work.s), ParallelConfig(),
                                      Precision("bfloat16"), work.b, work.s, 1, cudnn=True), 0)
    with ExitStack() as patches:
        for place, name, instead in ((fused, "launch", found.launch), (cuda, "multiply", found.multiply),
                                     (flash, "run", found.attend), (MetaArray, "__setitem__", found.set)):
            patches.enter_context(mock.patch.object(place, name, with_first(instead, getattr(place, name))))
        patches.enter_context(mock.patch.object(MetaDevice, "stream", lambda *arguments: found.stream(*arguments)))
        patches.enter_context(mock.patch.object(attention, "stack", stacked))
        rank.step()
    return found


def with_first(function: Callable, first: Callable) -> Callable:
    """Return a function, not a partial, so that it can be a method."""
    return lambda *others, **keywords: function(first, *others, **keywords)


def stacked(parts):
    """Return what cuDNN has written as one array."""
    b, s, heads, d = parts[0].shape
    return np.empty_like(parts[0], shape=(b, s, len(parts), heads, d), order="C")


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(parser_of("launches", __doc__), argv, layers=(GPU_WORK.L, "of the model"))
    found = count(GPU_WORK._replace(L=options.layers))
    print(head("kind", "of", "launches", "GB", "at least"))
    for kind, name in sorted(found.calls, key=lambda key: (key[0], -found.bytes[key])):
        print(line(kind, name, found.calls[kind, name], found.bytes[kind, name]))
    print(line("together", "", found.calls.total(), found.bytes.total()))


def line(kind: str, name: str, launches: int, size: int) -> str:
    return row(kind, name, f"{launches:,}", f"{size / 1e9:.2f}", f"{1e3 * size / BANDWIDTH:.1f} ms")


if __name__ == "__main__":
    run_alone(main)
