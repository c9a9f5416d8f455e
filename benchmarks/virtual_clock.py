"""Does a step take as long as the papers' formulas say? Measured on the virtual clock, p = 2, 4, 8, every schedule.

    for p in 2 4 8; do .venv/bin/python -m mpi_impl.launch -n $p benchmarks/virtual_clock.py; done

Real ranks train a small GPT. Each rank's clock goes on by its own CPU time and by what messages take (mpi_impl/comm/
clock.py), so 8 ranks on 2 cores read what 8 devices would. F, I and W are the medians of all actions of their kind.
A step's time is the longest of the ranks' own spans, as the zero-bubble paper has it: there ranks that start later also
end later, and this slant costs nothing (for 1F1B and its kin it is the whole step). The median over steps is printed
beside the closed form and beside the simulator's time for the medians by stage, which knows that stages differ.

    m(F + I + W) + the bubble,  which is    (p-1)(F+I+W)     gpipe, 1f1b      Narayanan et al. 2021, section 2.2
                                            (p-1)(F+I+W)/v   interleaved
                                            (p-1)(F+I-W)     zb-h1            Qi et al. 2023, section 2
                                            (p-1)(F+I-2W)    zb-h2            (0 if that is less)
                                            0                zb-v             (where F = I = W)
"""
from statistics import median

import numpy as np

from mpi_impl.comm.clock import VirtualClock
from mpi_impl.comm.group import Group, Instruments, world
from mpi_impl.comm.topology import connect, disconnect
from mpi_impl.comm.trace import Trace
from mpi_impl.entry import run
from mpi_impl.training.gantt import timeline_of
from mpi_impl.training.tracing import measured_times
from mpi_impl.training.trainer import Trainer
from reference.config import ModelConfig, ParallelConfig
from reference.optimizer import OptimizerConfig
from reference.simulate import simulate
from reference.stages import schedule_of

MODEL = ModelConfig(num_layers=16, hidden_size=128, num_attention_heads=4, vocab_size=64, max_position_embeddings=128)
MICROBATCHES, MICRO_BATCH, STEPS, V = 16, 4, 7, 2
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v")


def main() -> None:
    ranks = world()
    if ranks.rank == 0:
        print(f"p = {ranks.size}, m = {MICROBATCHES}; {STEPS} steps; times in ms\n"
              f"{'schedule':12} {'F':>6} {'I':>6} {'W':>6} {'measured':>9} {'closed form':>12} {'off by':>7} "
              f"{'simulated':>10} {'off by':>7}", flush=True)
    misses = [measure(ranks, name) for name in SCHEDULES]
    if ranks.rank == 0:
        print(f"median distance from the closed form: {median(misses):.1%}\n")


def measure(ranks: Group, name: str) -> float:
    """Train on these ranks, print a line -> how far from the closed form the step is, relative to it."""
    p, v = ranks.size, V if name == "interleaved" else None
    clock = VirtualClock()
    trace = Trace(clock, recording=True)
    topology = connect(Group(ranks.comm, "world", Instruments(trace=trace)),
                       ParallelConfig(pipeline_model_parallel_size=p, pipeline_schedule=name, chunks=v))
    schedule = schedule_of(topology.config, MICROBATCHES)
    steps = steps_of(Trainer(MODEL, OptimizerConfig(1e-3, STEPS), topology, 1, np.float32), trace)
    everyone = ranks.from_all(steps)
    disconnect(topology)
    took = median(timeline_of([steps[i] for steps in everyone]).cost for i in range(STEPS))
    times = measured_times(everyone, schedule, clock.link.latency)
    forward, i, w = (sum(by_stage) / p for by_stage in (times.forward, times.input_gradient, times.weight_gradient))
    if not any(action.kind == "W" for action in schedule.ranks[0]):
        i, w = i + w, 0.0
    closed, simulated = closed_form(name, p, v or 1, forward, i, w), simulate(schedule, times).cost
    if ranks.rank == 0:
        print(f"{name:12} {1e3 * forward:>6.2f} {1e3 * i:>6.2f} {1e3 * w:>6.2f} {1e3 * took:>9.1f} "
              f"{1e3 * closed:>12.1f} {took / closed - 1:>7.1%} {1e3 * simulated:>10.1f} {took / simulated - 1:>7.1%}",
              flush=True)
    return abs(took / closed - 1)


def steps_of(trainer: Trainer, trace: Trace) -> list[list]:
    """What this rank did in each step; one step before them is for warming up."""
    tokens = np.arange(MICRO_BATCH * 128).reshape(MICRO_BATCH, 128) % MODEL.vocab_size
    steps = []
    for _ in range(STEPS + 1):
        trace.slices.clear()
        trainer.step([(tokens, tokens)] * MICROBATCHES, MICROBATCHES * MICRO_BATCH)
        steps.append(list(trace.slices))
    return steps[1:]


def closed_form(name: str, p: int, v: int, forward: float, i: float, w: float) -> float:
    """A step's time from what F, I and W take for all of a rank's layers."""
    bubble = {"zb-h1": forward + i - w, "zb-h2": max(0.0, forward + i - 2 * w), "zb-v": 0.0}
    return MICROBATCHES * (forward + i + w) + (p - 1) * bubble.get(name, (forward + i + w) / v)


if __name__ == "__main__":
    run(main)
