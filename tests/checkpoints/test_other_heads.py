"""A checkpoint's weights begin a run of the same model with other heads, on any topology, as fine-tuning needs it."""
import tempfile
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from mpi_impl.checkpoints import checkpoint, on_disk
from reference.config import ARCHITECTURES, ModelConfig
from reference.models.model import model_tensors
from reference.params import initialize, leaves, tree_map, with_names
from reference.training import trainer as training
from tests.checkpoints.runs import refuses
from tests.checkpoints.saved_runs import DOUBLE, OPTIMIZER, Run, join_replica, states, train_and_save
from tests.checkpoints.test_checkpoint import pairs
from tests.strategies import Case, trees_close
from tests.training_theorems import Plan, connected

HEADS = st.sampled_from(ARCHITECTURES["bert"])


@settings(max_examples=settings().max_examples // 5)
@given(pairs(("bert",)), st.tuples(HEADS, HEADS))
def test_other_heads_begin_with_the_weights_of_the_rest(ranks, pair, heads):
    """Common tensors are bitwise the checkpoint's; the rest is as in any new run, and so are moments and counters."""
    one, other = (run._replace(case=replace(run.case, seed=i, model=replace(run.case.model, heads=chosen)))
                  for i, (run, chosen) in enumerate(zip(pair, heads)))
    with tempfile.TemporaryDirectory() as root:
        saved = dict(leaves(join_replica(ranks.run(one.n, train_and_save, one, root), "parameters")))
        found = ranks.run(other.n, load_and_step, other, root)
    loaded, missing, counters, results = zip(*found, strict=True)
    tensors = model_tensors(other.case.model)
    expected = tree_map(lambda named: saved.get(named.name, named.leaf),
                        with_names(initialize(tensors, other.case.seed, np.float64)))
    for replica in {found.place.replica for found in loaded}:
        trees_close(join_replica(loaded, "parameters", replica), expected, 0.0)
        for moment in ("m", "v"):
            assert not any(x.any() for _, x in leaves(join_replica(loaded, moment, replica)))
    new = [name for name, _ in leaves(tensors) if name not in saved]
    assert all(one == new for one in missing) and set(counters) == {(0, 0)}
    textbook = training.Trainer(other.case.model, OPTIMIZER, other.case.seed, DOUBLE)
    textbook.params = expected
    loss, norm, _ = textbook.step(other.samples(0))
    assert all((result.loss, result.grad_norm) == pytest.approx((loss, norm), rel=1e-10) for result in results)


def load_and_step(group, run: Run, root):
    """Return the states after loading, the missing tensors, the counters, and the first step's result."""
    with connected(group, run.plan.parallel(group.size, run.case)) as topology:
        trainer = run.trainer(topology)
        missing = checkpoint.load_weights(trainer, str(root), group.broadcast_object(
            lambda: on_disk.read_manifest(str(root))))
        loaded, counters = states(trainer), (trainer.iteration, trainer.optimizer.iteration)
        return loaded, missing, counters, run.step(trainer)


def test_another_model_is_refused(ranks, tmp_path):
    """Heads are all that may differ, and settings of training and of storage."""
    model = ModelConfig(2, 8, 2, 11, 4, architecture="bert", heads=("lm", "sop"))
    ranks.run(2, train_and_save, Run(2, Case(2, model, 1, 4, seed=1), Plan(), 2), tmp_path)
    manifest = on_disk.read_manifest(str(tmp_path))
    choice = replace(model, heads=("choice",))
    checkpoint.check_model(str(tmp_path), manifest, choice, other_heads=True)
    checkpoint.check_model(str(tmp_path), manifest, replace(
        model, hidden_dropout=0.3, attention_dropout=0.3, make_vocab_size_divisible_by=1, init_method_std=1.0))
    refuses(lambda: checkpoint.check_model(str(tmp_path), manifest, choice), "list of heads is ['choice']")
    other = replace(choice, vocab_size=12)
    refuses(lambda: checkpoint.check_model(str(tmp_path), manifest, other, other_heads=True), "--vocab-size ")
