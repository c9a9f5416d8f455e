"""Steps that are replayed compute what others do, and count the same messages."""
import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

from mpi_impl.comm.ledger import Ledger
from mpi_impl.comm.topology import connect
from mpi_impl.kernels.cuda.recording import Recording
from mpi_impl.parallel.model_state import ModelState
from mpi_impl.training.trainer import Trainer
from reference.batches import GPTBatch
from reference.config import ModelConfig, ParallelConfig, Recompute
from reference.optimizers.adam import OptimizerConfig
from reference.precision import LossScaling, Precision
from tests.gpu import device
from tests.strategies import recomputes

pytestmark = device.needs_somewhere
STEPS = 6
# Sums by atomic additions have another order each time, on a GPU alone: and Adam moves a weight by its gradient's sign.
LOSSES = {"float64": 1e-9, "float32": 1e-3, "float16": 0.02, "bfloat16": 0.02} if device.REAL else {}
WEIGHTS = LOSSES | {"float16": 0.1, "bfloat16": 0.1} if device.REAL else {}
LLAMA = dict(position_embedding_type="rope", normalization="RMSNorm", swiglu=True, add_bias_linear=False,
             num_query_groups=1, untie_embeddings_and_output_weights=True)
PRECISIONS = [Precision("float64"), Precision("float32"), Precision("bfloat16"),
              Precision("float16", LossScaling(None, 2.0**21, 1.0, 2, 1))]     # overflows first, and then grows
# Microbatches, samples in each, and samples of the global batch besides those of this replica.
batches = st.lists(st.tuples(st.integers(1, 2), st.integers(1, 2), st.integers(0, 1)), min_size=STEPS, max_size=STEPS)


@settings(max_examples=8)
@given(st.sampled_from([{}, LLAMA]), recomputes(), st.sampled_from(PRECISIONS),
       batches | batches.map(lambda shapes: shapes[:1] * STEPS), st.integers(0, 9),
       st.sampled_from([6, 64, 128, 200] if device.REAL else [6]))
@example({}, Recompute(), PRECISIONS[0], [(1, 1 + i // 4, 1 - i // 4) for i in range(STEPS)], 0, 6)
@example({}, Recompute(), PRECISIONS[2], [(1, 1, 1)] * STEPS, 0, 6)
def test_replayed_steps_equal_others(ranks, choices, recompute, precision, shapes, seed, length):
    """With other tokens in each step, and now and then another number of them, or another loss scale. Lengths are those
    that blocks of attention divide, and others.
    """
    model = ModelConfig(2, 16, 2, 11, length, make_vocab_size_divisible_by=4, hidden_dropout=0.0, attention_dropout=0.0,
                        **choices)
    (results, weights, *others), (again, their_weights, *others_again) = (
        ranks.run(1, played, model, recompute, precision, shapes, seed, replayed, timeout=device.LIMIT)[0]
        for replayed in (False, True))
    for name, bounds, mine, theirs in (
            ("norm, rate, scale", LOSSES, [step[1:4] for step in results], [step[1:4] for step in again]),
            ("loss", LOSSES, [step.losses for step in results], [step.losses for step in again]),
            ("weights", WEIGHTS, weights.astype(float), their_weights.astype(float))):
        bound = bounds.get(precision.compute, 0)
        np.testing.assert_allclose(theirs, mine, bound, bound, err_msg=name)
    assert others == others_again, "replays count other messages, or other caches"


def played(group, model, recompute: Recompute, precision, shapes, seed, replayed):
    """Train, and return the results of the steps, the weights, the ledger and the peaks."""
    with device.gpu(group.rank) as put:
        random = np.random.default_rng(seed)
        drawn = [[random.integers(model.vocab_size, size=(2, b, model.max_position_embeddings)) for _ in range(m)]
                 for m, b, _ in shapes]
        topology = connect(group, ParallelConfig(recompute=recompute))
        ledger = topology.world.ledger
        ledger.totals.clear()
        trainer = Trainer(ModelState(model, topology, seed, precision, put(np.empty(0))), OptimizerConfig(1e-2, STEPS),
                          replayed)
        results = [trainer.step([GPTBatch(*map(put, tokens)) for tokens in microbatches], m * b + more)
                   for microbatches, (m, b, more) in zip(drawn, shapes)]
        assert (trainer.replays is not None and trainer.replays.recording is not None) == replayed
        return results, trainer.state.parameters.own.flat.get(), dict(ledger.totals), trainer.peaks


def test_what_cannot_be_recorded_is_an_error(ranks):
    """And the next recording is as if there had been none."""
    ranks.run(1, fails_and_succeeds, timeout=device.LIMIT)


def fails_and_succeeds(group):
    with device.gpu(group.rank) as put:
        x = put(np.arange(3.0))
        with pytest.raises(Exception, match="recorded" if not device.REAL else "captur"):
            Recording(lambda: (x + 1).get())
        recording = Recording(lambda: x * 2)
        x += 1
        assert recording.replay().get().tolist() == [2, 4, 6]
        x += 1
        assert recording.replay().get().tolist() == [4, 6, 8]


def test_a_ledger_is_diverted():
    ledger = Ledger()
    record = ("all_reduce", "tensor", 2, "output", 5, np.float32)
    with ledger.phase("forward"):
        ledger.record(*record)
        with ledger.diverted() as other:
            ledger.record(*record)
        assert ledger.calls(phase="forward") == other.calls(phase="forward") == 1
    ledger.add(other)
    assert ledger.elements() == 10
