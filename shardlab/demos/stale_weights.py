"""A pipeline that is never flushed, and its late gradients: `mpirun -np 4 python -m shardlab.demos.stale_weights`.

Every rank moves its weights after each microbatch's backward. It shows which version of the weights each microbatch
meets on each rank, in the three ways of reference/parallel/stale_weights.py, which simulates the same in one process
(PipeDream, Harlap et al. 2018).
"""
import numpy as np

from mpi_impl.comm.topology import connect, disconnect
from mpi_impl.parallel.stale_weights import train_without_flush
from reference.batches import GPTBatch
from reference.config import ParallelConfig
from reference.models.model import model_tensors
from reference.parallel import stale_weights as textbook
from reference.parallel.pipeline import split_into_stages
from reference.parallel.stages import layers_of_stage
from reference.params import initialize
from reference.schedules.generators import make
from shardlab.demos.runner import Demo, Size, program, run_demo
from shardlab.demos.tiny_gpt import SEED, global_batch, tiny_gpt

SAMPLES, RATE = 2, 0.1
MICROBATCHES = Size("--microbatches", "stale_weights", "M", least=8, sharded=False,
                    help="each of which is a step")

INTRODUCTION = """\
The layers of a GPT are distributed over {ranks}, a stage to each. In most pipelines a step ends with a flush: all
ranks wait until every microbatch has had its backward, and then all weights move. Here each rank moves its weights as
soon as it has a microbatch's gradient, and begins the next forward at once. So no rank waits for a flush, but the
microbatches that are under way meet weights that are too old, or even two versions of them.

The tables have a column for each of {m} microbatches. 3 says that its forward and its backward met weights after three
updates; 3/5 says that the forward met those after three updates, and the backward those after five.
"""
SAYS = {textbook.NEWEST: "Newest: always the weights as they are. Where two numbers stand, the forward's activations "
                         "and the\nbackward's weights do not belong together: the result is the gradient of no model.",
        textbook.STASHED: "Stashed: a rank keeps the weights of the forward for the backward. That is the gradient of "
                          "a model,\nbut in a column the ranks' numbers differ: its stages are of different ages.",
        textbook.VERTICAL_SYNC: "Vertical sync: all ranks use the age that rank 0 had. That is the gradient of the "
                                "model as it was\np - 1 updates ago, and every rank keeps p versions."}


@program(MICROBATCHES.parse)
def show(demo: Demo, m: int) -> None:
    p, stage, model = demo.n, demo.rank, tiny_gpt(num_layers=demo.n)
    demo.introduce(INTRODUCTION, m=m)
    stages = split_into_stages(initialize(model_tensors(model), SEED, np.float64),
                               [layers_of_stage(i, p, p) for i in range(p)], model)
    batches, schedule = [GPTBatch(*global_batch(i, SAMPLES)) for i in range(m)], make("1f1b", p, m)
    topology = connect(demo.ranks, ParallelConfig(pipeline_model_parallel_size=p))
    for way in textbook.WAYS:
        losses, _, versions = textbook.train_without_flush(batches, stages, schedule, model, RATE, way)
        found = train_without_flush(topology, batches, stages[stage], schedule, model, RATE, way)
        demo.equal("losses", demo.ranks.allgather_objects(found.losses)[-1], np.array(losses))
        demo.equal("weights at the end", found.versions.newest.params, versions[stage].newest.params)
        demo.say(SAYS[way])
        demo.say_each(*(f"{met}/{used}" if met != used else f"{met}" for _, (met, used) in sorted(found.ages.items())))
        demo.say(f"The last loss is {losses[-1]:.4f}, and the ranks keep "
                 f"{' '.join(map(str, demo.ranks.allgather_objects(found.versions.most)))} versions.\n")
    disconnect(topology)


if __name__ == "__main__":
    run_demo(show)
