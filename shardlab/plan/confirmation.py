"""The memory of a plan that is to be shown, predicted: the first and the last rank of a pipeline take a step without
data. The formulas of all plans: reference/costs/plans.py.
"""
from mpi_impl.comm.topology import Place, rank_at
from reference.costs.hardware import Hardware
from reference.costs.plans import HALF, Plan
from reference.precision import Precision
from reference.schedules.generators import shrink_microbatches
from shardlab.predict.predict import no_capacity
from shardlab.predict.rank import ImaginedWorld, run_rank

FORMATS = {"fp16": "float16", "bf16": "bfloat16"}
CLOSE = 0.8     # of the fullest rank's bytes: the formulas are that exact, and kernels of 16 bits keep less


def precision_of(hardware: Hardware) -> Precision:
    """Return the precision of the run that the launch line starts."""
    return Precision(FORMATS[hardware.half] if hardware.element_bytes == HALF else f"float{8 * hardware.element_bytes}")


def predicted_bytes(plan: Plan, hardware: Hardware) -> int:
    """Predict the bytes on the fullest rank: the first has most in flight, the last the logits, and the formulas say
    which of the two to try, or both. A pipeline that is full holds no more with more microbatches.
    """
    p, parallel = plan.parallel.pipeline_model_parallel_size, plan.parallel
    expected = {stage: sum(plan.memory_of(stage)) for stage in (0, p - 1)}
    fullest = [stage for stage, size in expected.items() if size > CLOSE * max(expected.values())]
    world = ImaginedWorld(no_capacity(plan.model), parallel, precision_of(hardware), plan.b,
                          plan.model.max_position_embeddings,
                          shrink_microbatches(plan.m, parallel.pipeline_schedule, p), cudnn=True)
    return max(sum(run_rank(world, rank_at(Place(0, 0, 0, stage), parallel), measured=True).held)
               for stage in fullest)
