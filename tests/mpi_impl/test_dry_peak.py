"""The peak of a dry run is that of the program on a GPU: of the emulated one, to the byte."""
import gc
import weakref
from unittest import mock

import numpy as np
import pytest

from mpi_impl.parallel.model_state import ModelState
from mpi_impl.prediction.rank import run_rank
from mpi_impl.training.batches import Batches
from mpi_impl.training.trainer import Trainer
from reference.config import ModelConfig, Recompute
from reference.optimizer import OptimizerConfig
from reference.precision import Precision
from tests import spy
from tests.cases import Case, Plan
from tests.deep import one_fast_of
from tests.dry_run_theorems import world_of
from tests.gpu import emulated
from tests.training_theorems import Words, connected

MODEL = ModelConfig(3, 16, 2, 40, 8, hidden_dropout=0.1, attention_dropout=0.1)
LLAMA = ModelConfig(2, 16, 4, 40, 8, "rope", num_query_groups=2, normalization="RMSNorm", swiglu=True,
                    add_bias_linear=False, hidden_dropout=0.0, attention_dropout=0.0,
                    untie_embeddings_and_output_weights=True)


class LiveBytes:
    """The bytes of arrays on the emulated device."""

    def __init__(self):
        self.live = self.peak = 0
        self.known = dict[int, weakref.finalize]()

    def see(self, elements: np.ndarray) -> None:
        own = spy.owner(elements)
        if id(own) not in self.known:
            self.live += own.nbytes
            self.peak = max(self.peak, self.live)
            self.known[id(own)] = weakref.finalize(own, self.forget, id(own), own.nbytes)

    def forget(self, number: int, size: int) -> None:
        del self.known[number]
        self.live -= size

    def counting(self):
        """Return the context in which every array that comes to the device is seen."""
        def to_spy(value, original=spy.to_spy):
            found = original(value)
            spy.replaced(found, spy.SpyArray, lambda x: self.see(x._elements))
            return found

        def init(x, host):
            x._elements = np.array(host)
            self.see(x._elements)

        return mock.patch.multiple(spy, to_spy=to_spy), mock.patch.object(spy.SpyArray, "__init__", init)


@pytest.mark.skipif(emulated.COMPILER is None, reason="no C++ compiler, to emulate a GPU with")
@pytest.mark.parametrize("model, t, plan, d, precision", one_fast_of(4, [
    (MODEL, 1, Plan(zero_stage=3), 2, "bfloat16"), (MODEL, 1, Plan(), 1, "float32"),
    (MODEL, 2, Plan(zero_stage=2), 2, "float16"), (LLAMA, 2, Plan(2, zero_stage=1), 1, "bfloat16"),
    (MODEL, 1, Plan(2, "zb-h1", recompute=Recompute("full")), 2, "float32")]))
def test_the_peak_is_a_gpus(ranks, model, t, plan, d, precision):
    """While the model is made, and in a step: every array lives exactly as long, on every rank."""
    case = Case(t, model, 2, 8, seed=1, sequence_parallel=t > 1)
    size = t * plan.p * d
    world = world_of(case, plan, size, 2 * plan.p, precision)
    colors = world.colors()
    for rank, (setup, peak) in enumerate(ranks.run(size, peak_on_a_gpu, case, plan, 2 * plan.p, precision)):
        found = run_rank(world, rank, colors)
        assert (found.setup.size, found.peak.size) == (setup, peak)


def peak_on_a_gpu(group, case, plan, m, precision) -> tuple[int, int]:
    """Return the most bytes on the emulated device while the model is made, and in a step."""
    memory = LiveBytes()
    one, other = memory.counting()
    with connected(group, plan.parallel(group.size, case)) as topology, emulated.gpu(), one, other:
        like = spy.SpyArray(np.empty(0))
        trainer = Trainer(ModelState(case.model, topology, 1234, Precision(precision), like),
                          OptimizerConfig(1e-4, 10))
        batches = Batches(Words(case) if topology.place.tensor == 0 else None, case.model, topology, case.s, case.b, m,
                          like)
        setup, memory.peak = memory.peak, memory.live
        gc.collect()
        trainer.step(batches.microbatches_of("train", 0), batches.global_batch_size)
        return setup, memory.peak
