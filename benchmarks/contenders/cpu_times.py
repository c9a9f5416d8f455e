"""The time of a step on CPU cores by kind of work, measured from outside: functions are replaced by clocked ones.

Computation counts as the thread's CPU time; messages and waits as wall time. The rest of a step's wall time is time in
which the rank had no core. A barrier before each collective tells waiting for the other ranks from moving the bytes.
The time of a kernel does not include that of kernels and products inside it. (blas_clock.cpp times BLAS's products.)
"""
import ctypes
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial, wraps
from typing import Any, NamedTuple
from unittest import mock

from mpi_impl import kernels
from mpi_impl.comm.group import Group
from mpi_impl.comm.pending import Pending
from mpi_impl.kernels.fused import core

PRODUCTS, KERNELS, MESSAGES, WAITING, PYTHON, NO_CORE = KINDS = (
    "matrix products", "our kernels", "messages", "waiting for other ranks", "Python, and NumPy outside kernels",
    "no core")
COLLECTIVES = "all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "all_to_all_rows"
POSTING = "post_send", "post_receive", "post_all_reduce", "post_all_gather", "post_reduce_scatter"
WARM = 2            # steps that do not count
MOST = 100          # shapes of products, as in blas_clock.cpp


class Product(ctypes.Structure):
    """All products of one shape: [m, k] @ [k, n]."""

    _fields_ = [(name, ctypes.c_int64) for name in ("m", "n", "k", "calls")] + [("seconds", ctypes.c_double)]


class Step(NamedTuple):
    """A rank's measurements of a step: its wall time; seconds and calls by (kind, name), and by products' shape."""

    wall: float
    seconds: Counter
    calls: Counter
    product_seconds: Counter
    product_calls: Counter


class Stopwatch:
    """The seconds and the calls of a step by (kind, name)."""

    def __init__(self):
        library = ctypes.CDLL(None)
        self.products = (Product * MOST).in_dll(library, "products")
        self.product_seconds = ctypes.c_double.in_dll(library, "product_seconds")
        self.products_run = ctypes.c_int.in_dll(library, "running")
        self.group: Group | None = None         # inside one of its calls: those that it makes itself are not counted

    def start(self) -> None:
        self.seconds, self.calls = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
        self.of_halves, self.calls_of_halves = Counter[tuple](), Counter[tuple]()
        self.current = PYTHON, ""
        ctypes.memset(self.products, 0, ctypes.sizeof(self.products))
        self.products_run.value = 1
        self.resume()

    def resume(self) -> None:
        """Start to count CPU time."""
        self.in_products = self.product_seconds.value
        self.mark = time.thread_time()

    def switch(self, work: tuple[str, str]) -> tuple[str, str]:
        """Charge the CPU time since the last switch to the work until now, and return that."""
        now, in_products = time.thread_time(), self.product_seconds.value
        products = in_products - self.in_products
        self.seconds[self.current] += now - self.mark - products
        if products:
            self.seconds[PRODUCTS, self.current[1]] += products
        self.mark, self.in_products = now, in_products
        before, self.current = self.current, work
        return before

    def compiled(self, name: str, function: Callable, *arguments):
        """Call a compiled kernel. Products of halves are charged to the kernel that asks for them, and by shape."""
        if not name.startswith("product"):
            return self.charge((KERNELS, f"{name}, compiled"), function, *arguments)
        its, began = arguments[-1], time.thread_time()
        self.charge((PRODUCTS, self.current[1]), function, *arguments)
        self.of_halves[its.m, its.k, its.n] += time.thread_time() - began
        self.calls_of_halves[its.m, its.k, its.n] += 1

    def charge(self, work: tuple[str, str], function: Callable, *arguments):
        """Call the function, and charge its time to this work."""
        self.calls[work] += 1
        before = self.switch(work)
        try:
            return function(*arguments)
        finally:
            self.switch(before)

    def time_call(self, function: Callable, kind: str, barrier: bool) -> Callable:
        """Return a function of a group or a posted call as one that charges its wall time to the kind of work."""
        @wraps(function)
        def timed(first, *arguments, **keywords):
            group = first if isinstance(first, Group) else first.group
            if group.size == 1 or self.group:
                return function(first, *arguments, **keywords)
            self.group = group
            self.switch(self.current)
            began = time.perf_counter()
            if barrier:
                group.comm.Barrier()
            came = time.perf_counter()
            result = function(first, *arguments, **keywords)
            for work, seconds in (((WAITING, function.__name__), came - began),
                                  ((kind, function.__name__), time.perf_counter() - came)):
                self.seconds[work] += seconds
                self.calls[work] += seconds > 0
            self.group = None
            self.resume()
            return result

        return timed

    def of_step(self, step: Callable[[], object]) -> "Step":
        self.start()
        began = time.perf_counter()
        step()
        wall = time.perf_counter() - began
        self.switch(self.current)
        self.products_run.value = 0
        shapes = {(p.m, p.k, p.n): p for p in self.products if p.calls}
        self.seconds[NO_CORE, ""] = wall - self.seconds.total()
        return Step(wall, self.seconds, self.calls,
                    self.of_halves + Counter({shape: p.seconds for shape, p in shapes.items()}),
                    self.calls_of_halves + Counter({shape: p.calls for shape, p in shapes.items()}))

    def replaced(self) -> ExitStack:
        """Replace all functions that are timed, until the result is closed."""
        names = {id(row): name for name, row in vars(kernels).items() if isinstance(row, kernels.Kernel)}
        call, compiled, patches = kernels.Kernel.__call__, core.function, ExitStack()

        def replace(place, name, function):
            patches.enter_context(mock.patch.object(place, name, function))

        replace(kernels.Kernel, "__call__",
                lambda row, *arguments: self.charge((KERNELS, names[id(row)]), call, row, *arguments))
        replace(core, "function", lambda name, form: partial(self.compiled, name, compiled(name, form)))
        for name in (*COLLECTIVES, *POSTING):
            replace(Group, name, self.time_call(getattr(Group, name), MESSAGES, name in COLLECTIVES))
        replace(Pending, "wait", self.time_call(Pending.wait, WAITING, False))
        return patches


def time_of_steps(step: Callable[[], object], steps: int, ranks: Group) -> dict:
    """Return the milliseconds of a step without the stopwatch, and with it, of which `rows` [kind, name, milliseconds,
    calls] are the parts; and `products` [m, k, n, milliseconds, calls].

    Both kinds of step take turns. All are means over the ranks and the faster half of the steps.
    """
    watch, plain, found = Stopwatch(), list[float](), list[Step]()
    for _ in range(WARM + steps):
        began = time.perf_counter()
        step()
        plain.append(time.perf_counter() - began)
        with watch.replaced():
            found.append(watch.of_step(step))
    everyone = ranks.allgather_objects((plain[WARM:], found[WARM:]))
    half = (steps + 1) // 2
    plains = sorted(sum(each) / ranks.size for each in zip(*(plain for plain, _ in everyone)))[:half]
    each_step = sorted(zip(*(found for _, found in everyone)), key=lambda of_ranks: sum(one.wall for one in of_ranks))
    walls, *counters = zip(*(one for of_ranks in each_step[:half] for one in of_ranks))
    seconds, calls, product_seconds, product_calls = (mean(each) for each in counters)
    return {"plain": 1e3 * sum(plains) / half, "step": 1e3 * sum(walls) / len(walls),
            "rows": [(*work, 1e3 * took, calls.get(work, 0)) for work, took in seconds.items()],
            "products": [(*shape, 1e3 * took, product_calls[shape]) for shape, took in product_seconds.items()]}


def mean(counters: Sequence[Counter]) -> dict:
    """Return the mean of each count, the largest first."""
    total = Counter[Any]()
    for one in counters:
        total.update(one)
    return {key: value / len(counters) for key, value in total.most_common()}
