"""Pipelines without a flush on ranks: what the textbook simulates happens."""
import numpy as np
from hypothesis import given, strategies as st

from mpi_impl.parallel import stale_weights as machine
from reference.config import ParallelConfig
from reference.models.model import model_tensors
from reference.parallel import stale_weights as textbook
from reference.parallel.pipeline import split_into_stages
from reference.parallel.stages import layers_of_stage
from reference.schedules.generators import make
from tests.cases import Case, close, trees_close
from tests.reference.test_stale_weights import pipelines
from tests.training_theorems import connected


def ranks_do_what_is_simulated(group, case: Case, microbatches: int, way: str, lr: float) -> int:
    """Each microbatch's loss, the ages of the weights that it met, and the weights at the end are the textbook's."""
    p, stage = group.size, group.rank
    batches = [case.batch(f"microbatch {i}", case.b) for i in range(microbatches)]
    stages = split_into_stages(case.params(model_tensors(case.model)),
                               [layers_of_stage(i, p, case.model.num_layers) for i in range(p)], case.model)
    schedule = make("1f1b", p, microbatches)
    losses, late, versions = textbook.train_without_flush(batches, stages, schedule, case.model, lr, way)
    with connected(group, ParallelConfig(pipeline_model_parallel_size=p)) as topology:
        found = machine.train_without_flush(topology, batches, stages[stage], schedule, case.model, lr, way)
    if stage == p - 1:
        close(found.losses, np.array(losses), 1e-9)
    assert found.ages == {i: (late[stage, i].forward.updates, late[stage, i].backward.updates)
                          for i in range(microbatches)}
    assert found.versions.most == versions[stage].most
    trees_close(found.versions.newest.params, versions[stage].newest.params, 1e-9)
    return sum(met != used for met, used in found.ages.values())


@given(pipelines(), st.sampled_from(textbook.WAYS))
def test_ranks_do_what_is_simulated(ranks, drawn, way):
    """A backward meets other weights than its forward in one way only, on all stages but the last."""
    case, p, m = drawn
    mixed = ranks.run(p, ranks_do_what_is_simulated, case, m, way, 0.1)
    assert mixed == [(m - 1) * (way == textbook.NEWEST and stage < p - 1) for stage in range(p)]
