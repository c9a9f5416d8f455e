"""The forecast of a run before it begins: the memory of its ranks, and the time of an iteration."""
import os
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from mpi_impl.comm.device import Device, Memory, machine_id
from mpi_impl.comm.group import Group
from mpi_impl.comm.topology import Topology
from mpi_impl.parallel.model_state import Held
from mpi_impl.runtime.arrays import on_device, to_host
from mpi_impl.runtime.tables import bytes_of
from reference.config import Recompute
from reference.costs.flops import iteration_flops
from reference.costs.parameters import parameters
from reference.errors import UserError
from reference.parallel.model_states import model_states
from reference.precision import FORMATS
from shardlab.predict.predict import Predicted, predict_alone, predict_pipeline
from shardlab.predict.rank import ImaginedWorld

# ---- memory ---------------------------------------------------------------------------------------------------------


class Forecast(NamedTuple):
    """Bytes of one rank, without the temporary ones of operations, which are few compared with these."""

    states: float        # parameters, gradients, and what Adam keeps of them
    activations: int     # the peak, with recompute

    @property
    def total(self) -> float:
        return self.states + self.activations


def forecast_of(held: Held, offloaded: bool = True) -> Forecast:
    """Return the forecast for a rank of which a prediction says what it holds, with its offloaded bytes or without."""
    return Forecast(held.states - (0 if offloaded else held.offloaded), held.activations + held.recomputed)


def bytes_of_parameter(run: ImaginedWorld, offloaded: bool) -> float:
    """Return the bytes on a rank of each parameter of its shard, with its gradient and its Adam states, with those that
    are offloaded or without. With Muon nearly all are of matrices, which have one moment.
    """
    parallel, (w, g, k) = run.parallel, run.precision.bytes_each
    k -= FORMATS[run.precision.main].bytes if parallel.whole_matrices else 0
    parameter, gradient, adam = model_states(1, parallel.instance_size, parallel.zero_stage, w, g, k)
    if parallel.cpu_offload and not offloaded:
        parameter, adam = parameter if parallel.zero_stage < 3 else 0, 0
    return parameter + gradient + adam


class MemoryHost(NamedTuple):
    """A machine, or a GPU, and the number of the run's ranks on it for each place in a pipeline."""

    memory: int        # bytes; a GPU's free ones
    ranks: Counter[int]
    kind: str = "machine"

    def holds(self, found: Sequence[Forecast]) -> float:
        return sum(count * found[place].total for place, count in self.ranks.items())

    def has(self) -> str:
        return f"has {bytes_of(self.memory)}{' free' if self.kind == 'GPU' else ''}"


def hosts_of(world: Group, place: int, gpu: Memory | None = None) -> list[MemoryHost]:
    """Return the machines of a run, or the GPUs of its ranks; called by all ranks, each with its place in a pipeline.

    Tensors that are offloaded from a GPU are not in the forecast.
    """
    machine = Memory(machine_id(), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    sizes, ranks = dict[str, int](), defaultdict[str, Counter[int]](Counter)
    for memory, where in world.allgather_objects((gpu or machine, place)):
        sizes[memory.where] = min(memory.size, sizes.get(memory.where, memory.size))   # a GPU's free memory shrinks
        ranks[memory.where][where] += 1
    return [MemoryHost(sizes[name], ranks[name], "GPU" if gpu else "machine") for name in sizes]


def checked_memory(topology: Topology, run: ImaginedWorld, device: Device, offload_folder: str | None) -> tuple[
        list[MemoryHost], list[Predicted], list[Forecast]]:
    """Return the machines or GPUs of a run, and the prediction and the forecast of a pipeline's ranks; called by all.

    Raises UserError if they do not have the memory.
    """
    hosts = hosts_of(topology.world, topology.place.pipeline, device.memory)
    offloaded = offload_folder is None and device.memory is None        # into the memory of the host
    check_one_rank(hosts, run, offloaded)
    predicted = predict_pipeline(topology, run)
    return hosts, predicted, check_memory(hosts, run, predicted, offloaded)


def check_memory(hosts: Sequence[MemoryHost], run: ImaginedWorld, predicted: Sequence[Predicted],
                 offloaded: bool = True) -> list[Forecast]:
    """Return the forecast of the ranks of a pipeline. Raise UserError if a machine has less: now, and not after hours.

    `offloaded`: whether what is offloaded is in the same memory.
    """
    found = [forecast_of(one.held, offloaded) for one in predicted]
    for host in hosts:
        if host.holds(found) > host.memory:
            states = sum(count * found[place].states for place, count in host.ranks.items())
            raise UserError(
                f"The {host.ranks.total()} ranks of a {host.kind} would hold {bytes_of(host.holds(found))}: "
                f"{bytes_of(states)} of parameters, gradients and moments "
                f"({bytes_of_parameter(run, offloaded):g} bytes a parameter), and "
                f"{bytes_of(host.holds(found) - states)} of activations. It {host.has()}. "
                f"{remedy(hosts, run, offloaded)}")
    return found


def check_one_rank(hosts: Sequence[MemoryHost], run: ImaginedWorld, offloaded: bool = True) -> None:
    """Raise UserError if a rank's states alone exceed every machine's memory, on average over the pipeline.

    A model that is that far too large is not predicted.
    """
    parallel, largest, each = run.parallel, max(hosts, key=lambda host: host.memory), bytes_of_parameter(run, offloaded)
    rank = parameters(run.model) // (parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size)
    if rank * each > largest.memory:
        raise UserError(f"Of {rank:,} parameters a rank would hold {each:g} bytes each, of parameters, gradients and "
                        f"moments: {bytes_of(rank * each)}, but the {largest.kind} {largest.has()}. Choose a smaller "
                        "--num-layers, --hidden-size or --vocab-size, a larger --tensor-model-parallel-size or "
                        "--pipeline-model-parallel-size, or with several replicas a higher --zero-stage.")


def remedy(hosts: Sequence[MemoryHost], run: ImaginedWorld, offloaded: bool) -> str:
    """Name one option that would help, if there is one."""
    parallel = run.parallel
    options = {}
    if parallel.recompute.granularity != "full":
        options["--recompute-granularity full"] = replace(parallel, recompute=Recompute("full"))
    if parallel.replicas > 1:
        options |= {f"--zero-stage {stage}": replace(parallel, zero_stage=stage)
                    for stage in range(parallel.zero_stage + 1, 4)}
    if parallel.num_distributed_optimizer_instances > 1:
        options["--num-distributed-optimizer-instances 1"] = replace(parallel, num_distributed_optimizer_instances=1)
    for option, choice in options.items():
        found = [forecast_of(one.held, offloaded) for one in predict_alone(replace(run, parallel=choice))]
        if all(host.holds(found) <= host.memory for host in hosts):
            return f"With {option} it would be {bytes_of(max(host.holds(found) for host in hosts))}."
    return ("Choose a smaller --num-layers, --hidden-size, --micro-batch-size or --vocab-size, or start the ranks on "
            f"more {hosts[0].kind}s.")


def describe(found: Sequence[Forecast], hosts: Sequence[MemoryHost]) -> str:
    states, activations = (span([getattr(one, name) for one in found]) for name in ("states", "activations"))
    together = sum(host.holds(found) for host in hosts)
    gpus = [host for host in hosts if host.kind == "GPU"]
    free = f"; a GPU has {span([gpu.memory for gpu in gpus])} free" if gpus else ""
    return (f"a rank will hold {states} of parameters, gradients and moments, and at most {activations} of "
            f"activations: {bytes_of(together)} on all of them{free}")


def span(sizes: Sequence[float]) -> str:
    least, most = bytes_of(min(sizes)), bytes_of(max(sizes))
    return most if least == most else f"{least} to {most}"


# ---- time -----------------------------------------------------------------------------------------------------------

SIZE, DEVICE_SIZE, SECONDS = 384, 4096, 0.05     # of the multiplied matrices, and the duration


def multiplications_per_second(world: Group, x) -> float:
    """Measure the FLOP/s at which all ranks together multiply matrices like x, at the same time."""
    y = np.matmul(x, x)
    world.allgather_objects(None)
    count, began = 0, time.perf_counter()
    while (seconds := time.perf_counter() - began) < SECONDS:
        np.matmul(x, x, out=y)
        to_host(y[:1])      # which waits for a device
        count += 1
    return sum(world.allgather_objects(2 * len(x)**3 * count / seconds))


class MeasuredRate(NamedTuple):
    """A measured speed of matrix multiplication."""

    rate: float     # FLOP/s of all ranks together
    form: str       # of the matrices


def measure_rate(world: Group, like) -> MeasuredRate:
    """Measure how fast all ranks multiply, which call this together. `like` is like their parameters, which CPU cores
    widen to float32 first.
    """
    size, form = (DEVICE_SIZE, like.dtype) if on_device(like) else (SIZE, np.promote_types(like.dtype, np.float32))
    a = np.ones_like(like, shape=(size, size), dtype=form)
    return MeasuredRate(multiplications_per_second(world, a), form.name)


def computed_flops(run: ImaginedWorld) -> int:
    """Count the FLOPs of an iteration's matrix products, recompute included.

    In 16 bits the backward's kernel recomputes attention's core, as selective recompute does.
    """
    again = run.parallel.recompute.granularity
    if run.precision.half and again == "none":
        again = "selective"
    return iteration_flops(run.model, run.global_batch_size, run.seq_length, again)


def describe_time(run: ImaginedWorld, found: MeasuredRate) -> str:
    """Describe the time of an iteration's matrix products."""
    flops = computed_flops(run)
    return (f"an iteration takes {flops:.2g} FLOPs of matrix products: {flops / found.rate:.2g} s at the "
            f"{found.rate / 1e9:,.0f} GFLOP/s at which all ranks together multiply in {found.form}, and more for all "
            "else")
