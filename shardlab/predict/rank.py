"""One step of one rank in an imagined world: the trainer itself, on arrays without data."""
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from mpi_impl.checkpoints.checkpoint import boxes_to_save
from mpi_impl.comm.clock import WallClock
from mpi_impl.comm.hosts import Hosts
from mpi_impl.comm.instruments import Instruments
from mpi_impl.comm.ledger import Ledger
from mpi_impl.comm.topology import Place, Topology, connect
from mpi_impl.comm.trace import Slice, Trace
from mpi_impl.parallel.model_state import Held, ModelState
from mpi_impl.training.batches import Batches
from mpi_impl.training.trainer import Trainer
from reference.config import ModelConfig, ParallelConfig
from reference.costs.hardware import Hardware, RankGroup, slowest_link
from reference.optimizers.adam import OptimizerConfig
from reference.parallel.boxes import shape_of
from reference.precision import FORMATS, Precision
from reference.schedules.actions import Action
from shardlab.predict.group import Colors, ImaginedGroup, survey
from shardlab.predict.meta import prototype
from shardlab.predict.meta_device import MemoryPeak, MetaDevice
from shardlab.predict.transport import Diary, Event

NO_ARRIVALS: Mapping[str, float] = {}


@dataclass(frozen=True)
class ImaginedWorld:
    """A run: the model, its parallelism, the sizes of its steps, and the devices."""

    model: ModelConfig
    parallel: ParallelConfig
    precision: Precision
    micro_batch_size: int
    seq_length: int
    microbatches: int           # of each replica
    hardware: Hardware | None = None
    cudnn: bool = False         # whether attention in 16 bits is cuDNN's, where it can be
    optimizer: OptimizerConfig = OptimizerConfig(1e-4, 10)

    @property
    def global_batch_size(self) -> int:
        return self.micro_batch_size * self.microbatches * self.parallel.data_parallel_size

    @property
    def sent_bytes(self) -> int:
        """Return the bytes that a rank sends to the next stage at a time."""
        tokens = self.micro_batch_size * self.seq_length // self.parallel.context_parallel_size
        return tokens * self.model.hidden_size // self.parallel.sent_parts * FORMATS[self.precision.compute].bytes

    @property
    def sending(self) -> float:
        """Return the seconds of a message from one stage to the next."""
        p = self.parallel
        if self.hardware is None or p.pipeline_model_parallel_size == 1:
            return 0.0
        neighbours = RankGroup(p.pipeline_model_parallel_size, p.world_size // p.pipeline_model_parallel_size,
                               p.world_size)
        return slowest_link(self.hardware, neighbours).seconds("send", 2, self.sent_bytes)

    @cached_property
    def colors(self) -> Colors:
        return survey(self.parallel)

    def hosts(self) -> Hosts:
        """Return the servers, which are filled one after the other."""
        size = self.hardware.server if self.hardware else self.parallel.world_size
        of = {rank: rank // size for rank in range(self.parallel.world_size)}
        return Hosts(of, tuple(f"server {number}" for number in sorted(set(of.values()))))


@dataclass(frozen=True)
class RankRun:
    """The first step of one rank."""

    rank: int
    place: Place
    setup: MemoryPeak                 # while the model was made
    peak: MemoryPeak                  # in the step
    held: Held
    saved: int                  # bytes of its files in a checkpoint
    ledger: Ledger
    groups: list[str]           # that it has formed, each a communicator
    events: list[Event]
    slices: list[Slice]
    seconds: float


class MetaClock(WallClock):
    """The time of a device without data."""

    def __init__(self, device: MetaDevice):
        self.device = device
        super().__init__()

    def restart(self) -> None:
        self.device.seconds = 0.0

    def now(self) -> float:
        return self.device.seconds

    def computing(self, action: Action):
        self.device.action += 1
        return super().computing(action)


@dataclass(frozen=True)
class ImaginedRank:
    """One rank of the world, which has made its model."""

    device: MetaDevice
    diary: Diary
    topology: Topology
    trainer: Trainer
    batches: Batches

    def step(self) -> None:
        self.trainer.step(self.batches.microbatches_of("train", 0), self.batches.global_batch_size)


def imagine_rank(world: ImaginedWorld, rank: int, arrivals: Mapping[str, float] = NO_ARRIVALS) -> ImaginedRank:
    """Make a rank's model."""
    device = MetaDevice(world.hardware, world.cudnn)
    diary, instruments = Diary(device, world.parallel.world_size, arrivals), Instruments(
        trace=Trace(MetaClock(device), recording=True), hosts=world.hosts())
    everyone = ImaginedGroup(range(world.parallel.world_size), rank, "world", instruments, diary, world.colors)
    topology = connect(everyone, world.parallel)
    state = ModelState(world.model, topology, 1234, world.precision, prototype(device))
    name_buffers(state)
    batches = Batches(None, world.model, topology, world.seq_length, world.micro_batch_size, world.microbatches,
                      prototype(device))
    return ImaginedRank(device, diary, topology, Trainer(state, world.optimizer), batches)


def run_rank(world: ImaginedWorld, rank: int, arrivals: Mapping[str, float] = NO_ARRIVALS,
             measured: bool = False) -> RankRun:
    """Make a rank's model, and run its first step. `measured` counts the bytes of caches, too, which takes time."""
    one = imagine_rank(world, rank, arrivals)
    device, diary, trainer, instruments = one.device, one.diary, one.trainer, one.topology.world.instruments
    trainer.measured = measured
    setup = device.most()
    device.restart()
    diary.events.clear()
    one.step()
    return RankRun(rank, one.topology.place, setup, device.most(), trainer.held(), saved_bytes(trainer),
                   instruments.ledger, diary.groups, diary.events, instruments.trace.slices, device.seconds)


def saved_bytes(trainer: Trainer) -> int:
    """Return the bytes of a rank's files in a checkpoint, but for their headers."""
    elements = sum(prod(shape_of(box)) for state in trainer.state.optimizer_states
                   for _, box in boxes_to_save(trainer, state)[1])
    return elements * trainer.state.main.itemsize


def name_buffers(state: ModelState) -> None:
    """Tell the device what the buffers are that last from step to step."""
    buffers: dict[str, Any] = {"parameters": state.parameters.own, "gradients": state.gradients.own}
    buffers |= {f"optimizer: {name}": buffer for name, buffer in state.optimizer_states.items()
                if buffer is not state.parameters.own}
    for kind, buffer in buffers.items():
        buffer.flat.storage.name(kind)
