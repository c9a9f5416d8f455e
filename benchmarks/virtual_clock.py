"""The time of a step beside the papers' formulas, measured on the virtual clock, for five schedules.

    for p in 2 4 8; do .venv/bin/python -m mpi_impl.launch -n $p benchmarks/virtual_clock.py; done

Real ranks train a small GPT. Each rank's clock advances by its own CPU time and by the time of messages (mpi_impl/comm/
clock.py), so 8 ranks on 2 cores read the time of 8 devices. It measures twice: with the CPU time of every action
("raw"), which is noisy, since ranks share cores and caches; and with the median of the last 51 actions of its kind and
stage ("usual"), as on devices of their own, which leaves dependencies, messages and overheads.

F, I and W are medians, too (I and W are halves of B where a schedule does not split it). A step's time is the longest
of the ranks' own spans, as in the zero-bubble paper, where ranks that start later also end later, and this slant costs
nothing; 1F1B and its relatives have none. The program prints the median over steps beside the closed form:

    m (F + I + W) of the slowest rank, plus for each of the other p - 1 ranks
        F + I + W        gpipe, 1f1b         (Narayanan et al. 2021, section 2.2)
        (F + I + W)/v    interleaved
        F + I - W        zb-h1               (Qi et al. 2023, section 2.3, table 2)
        F + I - 2W       zb-h2               (nothing if that is less than nothing)
"""
from statistics import median

from models import gpt, random_batch, trainer_of

from mpi_impl.comm.clock import VirtualClock
from mpi_impl.comm.group import Group, Instruments, world
from mpi_impl.comm.topology import connect, disconnect
from mpi_impl.comm.trace import Trace
from mpi_impl.launch.entry import run
from mpi_impl.report.timelines.timelines import measured_times, timeline_of
from mpi_impl.training.trainer import Trainer
from reference.config import ParallelConfig
from reference.costs.bubbles import bubbles
from reference.parallel.stages import schedule_of

MODEL = gpt(L=16, h=128, a=4, V=64, s=128)
MICROBATCHES, MICRO_BATCH, STEPS, V = 16, 4, 7, 2
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2")


def main() -> None:
    ranks = world()
    if ranks.rank == 0:
        print(f"p = {ranks.size}, m = {MICROBATCHES}; {STEPS} steps; times in ms\n"
              f"{'schedule':12} {'clock':6} {'F':>6} {'I':>6} {'W':>6} {'measured':>9} {'closed form':>12} "
              f"{'off by':>7}", flush=True)
    for name in SCHEDULES:
        for clock, memory in (("raw", 1), ("usual", 51)):
            by_rank, took = measure(ranks, name, memory)
            closed = closed_form(name, by_rank)
            forward, i, w = (1e3 * sum(column) / ranks.size for column in zip(*by_rank, strict=True))
            if ranks.rank == 0:
                print(f"{name:12} {clock:6} {forward:>6.2f} {i:>6.2f} {w:>6.2f} {1e3 * took:>9.1f} "
                      f"{1e3 * closed:>12.1f} {took / closed - 1:>7.1%}", flush=True)


def measure(ranks: Group, name: str, memory: int) -> tuple[list[list[float]], float]:
    """Train on these ranks. Return F, I and W of each rank, for all its stages, and the time of a step, in seconds."""
    trace = Trace(VirtualClock(memory=memory), recording=True)
    topology = connect(Group(ranks.comm, "world", Instruments(trace=trace)),
                       ParallelConfig(pipeline_model_parallel_size=ranks.size, pipeline_schedule=name,
                                      virtual_pipeline_size=V if name == "interleaved" else None))
    schedule = schedule_of(topology.config, MICROBATCHES)
    everyone = ranks.allgather_objects(steps_of(trainer_of(MODEL, topology), trace))
    disconnect(topology)
    times = measured_times(everyone, schedule, sending=0.0)
    by_rank = [[sum(by_stage[stage] for stage in stages)
                for by_stage in (times.forward, times.input_gradient, times.weight_gradient)]
               for stages in schedule.placement()]
    return by_rank, median(timeline_of([steps[i] for steps in everyone]).cost for i in range(STEPS))


def steps_of(trainer: Trainer, trace: Trace) -> list[list]:
    """Return what this rank did in each step; one step before them is for warming up."""
    batch, steps = random_batch(MODEL, MICRO_BATCH), []
    for _ in range(STEPS + 1):
        trace.slices.clear()
        trainer.step([batch] * MICROBATCHES, MICROBATCHES * MICRO_BATCH)
        steps.append(list(trace.slices))
    return steps[1:]


def closed_form(name: str, by_rank: list[list[float]]) -> float:
    """Return a step's time from F, I and W of each rank, for all its stages."""
    slowest = max(by_rank, key=sum)
    bubble = 0.0
    for times in by_rank:
        if times is not slowest:
            one = bubbles(2, *times)               # of two ranks, which is what one more rank adds
            bubble += {"interleaved": one.one_f_one_b / V, "zb-h1": one.zero_bubble_h1,
                       "zb-h2": max(0.0, one.zero_bubble_h2)}.get(name, one.one_f_one_b)
    return MICROBATCHES * sum(slowest) + bubble


if __name__ == "__main__":
    run(main)
