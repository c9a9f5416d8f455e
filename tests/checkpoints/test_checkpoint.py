"""Any topology loads what any other has saved, to the bit; a resumed run is the run; no rank holds the model."""
import tempfile
from dataclasses import replace
from math import lcm
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from safetensors.numpy import load_file

from mpi_impl.checkpoints import checkpoint, on_disk
from mpi_impl.checkpoints.manifest import FORMAT, Manifest, key_of
from mpi_impl.checkpoints.on_disk import TRACKER
from reference.config import ExpertsConfig, ModelConfig
from reference.errors import UserError
from reference.parallel.layout import Piece, Segment
from reference.params import Tensor, leaves
from reference.precision import LossScaling, Precision, ScaleState
from reference.schedules.generators import make
from tests.allocated import most_bytes
from tests.cases import MuonChoices
from tests.checkpoint_theorems import goes_on, resumed_is_uninterrupted
from tests.checkpoints.saved_runs import SMALL, Run, join_replica, load_and_train, load_says, train_and_save
from tests.deep import one_fast_of
from tests.mpi_impl.test_training import WITHOUT_V, places
from tests.strategies import ANY_MODEL, Case, cases, instances
from tests.training_theorems import Plan, connected

# ---- any topology loads any other -----------------------------------------------------------------------------------


@st.composite
def plans(draw, t, p, d, most, shared=False):
    """Draw how these ranks share the work, with at most these stages -> the plan, and a divisor of m."""
    schedule = draw(st.sampled_from([*WITHOUT_V, *["interleaved"] * (2 * p <= most)]), "schedule")
    v = 2 if schedule == "interleaved" else None
    if make(schedule, p, p, v).stages > most:
        schedule, v = "1f1b", None
    stage = draw(st.integers(0, 2 if shared else 3), "ZeRO stage")
    offload = stage > 0 and draw(st.booleans(), "offload")
    return Plan(p, schedule, v, bucket_size=draw(st.sampled_from([1, 7, 100, 1000, 1 << 30]), "bucket size"),
                zero_stage=stage, cpu_offload=offload, instances=draw(instances(d, stage), "instances")), p if v else 1


@st.composite
def pairs(draw, architectures=ANY_MODEL):
    """Draw two runs of the same model and batches on two topologies."""
    (t1, p1, d1), (t2, p2, d2) = one, other = [draw(st.sampled_from(places()), "t, p, d") for _ in range(2)]
    heads, layers = lcm(t1, t2), max(p1, p2) + draw(st.integers(0, 2), "more layers")
    shared = draw(st.booleans(), "share layers")
    case = draw(cases(sizes=st.just(1), architectures=architectures, num_layers=layers, share_layers=shared,
                      num_attention_heads=heads, hidden_size=2 * heads, rotary_percent=1.0,
                      max_position_embeddings=2 * heads))
    found, batch = [], 1
    for t, p, d in (one, other):
        plan, m = draw(plans(t, p, d, layers, shared))
        batch = lcm(batch, m * d)
        found.append((t, t * p * d, plan, t > 1 and draw(st.booleans(), "sequence parallel")))
    return [Run(n, replace(case, t=t, b=1, s=heads, sequence_parallel=cut), plan, batch) for t, n, plan, cut in found]


@settings(max_examples=settings().max_examples // 5)
@given(pairs(), st.integers(1, 2))
def test_any_topology_loads_any_other(ranks, pair, steps):
    """Any two, with ragged models."""
    one_loads_other(ranks, *pair, steps)


MODEL = ModelConfig(4, 16, 4, 21, 8, make_vocab_size_divisible_by=3)
EXPERTS = replace(MODEL, experts=ExpertsConfig(4, 2, moe_ffn_hidden_size=8, moe_layer_freq=2, moe_aux_loss_coeff=0.1))
# t, sequence parallel or not, replicas, and the rest; each of them loads what the one before it has saved.
ROUNDS = {MODEL: [
    (1, False, 2, Plan(c=2, zero_stage=1)), (2, True, 1, Plan(2, c=2, cp_comm_type="all_gather")),
    (2, False, 2, Plan(2, "zb-v", bucket_size=1, zero_stage=3, cpu_offload=True))], EXPERTS: [
    (1, False, 4, Plan(e=4)), (2, True, 4, Plan(zero_stage=3, e=2)),
    (2, False, 2, Plan(2, zero_stage=1, bucket_size=100, e=2)),
    (1, False, 2, Plan(c=2, zero_stage=2, cpu_offload=True, e=4))]}
MUON = {MODEL: [
    (1, False, 4, Plan(zero_stage=1, bucket_size=1000, muon=MuonChoices())), (2, True, 1, Plan(2, muon=MuonChoices())),
    (4, False, 2, Plan(zero_stage=1, bucket_size=1, muon=MuonChoices("distributed")))], EXPERTS: [
    (1, False, 4, Plan(e=2, zero_stage=1, muon=MuonChoices())), (2, False, 2, Plan(2, e=2, muon=MuonChoices()))]}


@pytest.mark.parametrize("model, i", one_fast_of(4, [(model, i) for model, places in ROUNDS.items()
                                                     for i in range(len(places))]))
def test_one_topology_after_the_other(ranks, model, i):
    """Ranks share a sequence, or a layer's experts, which are split over t, dealt out to e, and stored by the replicas
    that have them.
    """
    one, other = (Run(t * plan.p * plan.c * d, Case(t, model, 1, 4, seed=1, sequence_parallel=cut), plan, 8)
                  for t, cut, d, plan in (ROUNDS[model][i - 1], ROUNDS[model][i]))
    one_loads_other(ranks, one, other, 2)


@pytest.mark.parametrize("model, i", one_fast_of(5, [(model, i) for model, places in MUON.items()
                                                     for i in range(len(places))]))
def test_one_topology_after_the_other_with_muon(ranks, model, i):
    """Owners of whole matrices load what other owners, and ranks without owners, have saved. Of matrices no v is saved.
    """
    one, other = (Run(t * plan.p * plan.c * d, Case(t, model, 1, 4, seed=1, sequence_parallel=cut), plan, 8)
                  for t, cut, d, plan in (MUON[model][i - 1], MUON[model][i]))
    one_loads_other(ranks, one, other, 2)


def one_loads_other(ranks, one: Run, other: Run, steps: int) -> None:
    """Check that a run loads another's states to the bit, on every replica, and that one more step is one process's."""
    with tempfile.TemporaryDirectory() as root:
        saved = ranks.run(one.n, train_and_save, one, root, steps)
        after = ranks.run(other.n, load_and_train, other, root, 1)
    goes_on(one, steps, saved, after)


# ---- a resumed run is the run ---------------------------------------------------------------------------------------


@st.composite
def runs_of_any_precision(draw):
    """Draw a run of any precision, with a loss scale that moves if it has one."""
    run = draw(pairs())[0]
    scaling = LossScaling(initial_loss_scale=2.0**draw(st.integers(0, 40), "scale"), loss_scale_window=2, hysteresis=1)
    formats = [Precision(name) for name in ("float64", "float32", "bfloat16")]
    return run._replace(precision=draw(st.sampled_from([*formats, Precision("float16", scaling)]), "precision"))


@settings(max_examples=settings().max_examples // 5)
@given(runs_of_any_precision(), st.integers(1, 3))
def test_a_resumed_run_is_the_run(ranks, run, steps):
    """n + n steps = 2 n steps, to the bit: losses, norms, weights, moments, loss scale; whatever the run is like."""
    ranks.run(run.n, resumed_is_uninterrupted, run, steps)


@pytest.mark.parametrize("before, after", [("bfloat16", "float64"), ("float32", "float16")])
def test_another_precision_goes_on(ranks, tmp_path, before, after):
    """The numbers are the same, rounded to the new format. A scale that follows the gradients starts over."""
    one, other = SMALL._replace(precision=Precision(before)), SMALL._replace(precision=Precision(after, LossScaling()))
    saved = ranks.run(2, train_and_save, one, tmp_path)
    loaded, _, _ = zip(*ranks.run(2, load_and_train, other, tmp_path, 0), strict=True)
    for state in ("parameters", "m", "v"):
        found, expected = (leaves(join_replica(everyone, state)) for everyone in (loaded, saved))
        for (name, x), (_, y) in zip(found, expected, strict=True):
            assert x.dtype == other.precision.main and np.array_equal(x, y.astype(x.dtype)), name


@pytest.mark.parametrize("precision", ["float64", "bfloat16"])
def test_a_resumed_run_with_muon_is_the_run(ranks, precision):
    """To the bit, with offloaded shards."""
    plan = Plan(zero_stage=1, cpu_offload=True, muon=MuonChoices("distributed", True))
    run = Run(4, Case(2, MODEL, 1, 4, seed=1), plan, 4, Precision(precision))
    ranks.run(4, resumed_is_uninterrupted, run, 2)


def test_the_states_of_another_optimizer_are_refused(ranks, tmp_path):
    muon = SMALL._replace(plan=replace(SMALL.plan, muon=MuonChoices()))
    ranks.run(SMALL.n, train_and_save, muon, tmp_path)
    assert load_says(ranks, SMALL, tmp_path).startswith("--optimizer is adam, but ")
    ranks.run(SMALL.n, train_and_save, SMALL, tmp_path / "adam")
    assert "has the states of adam, which keeps others" in load_says(ranks, muon, tmp_path / "adam")


# ---- what is on disk ------------------------------------------------------------------------------------------------


ZERO = SMALL._replace(case=replace(SMALL.case, t=1), plan=Plan(p=2, zero_stage=1), n=4)


@pytest.mark.parametrize("run", [SMALL, ZERO])
def test_the_files_are_safetensors_and_hold_the_model_once(ranks, tmp_path, run):
    """The package itself reads them. In the manifest's boxes they fill every tensor, each element once."""
    saved = ranks.run(run.n, train_and_save, run, tmp_path, 2)
    folder = tmp_path / "iter_0000002"
    manifest = Manifest.from_text((folder / "manifest.json").read_bytes())
    assert Manifest.from_text(manifest.text().encode()) == manifest and (tmp_path / TRACKER).read_text() == "2"
    assert (manifest.iteration, manifest.updates, manifest.dtype) == (2, 2, "float64")
    assert {path.name for path in folder.iterdir()} == {"manifest.json", "manifest.json.sha256", *manifest.files}
    for state in ("parameters", "m", "v"):
        files = {name: load_file(folder / name) for name in manifest.files if name.startswith(f"{state}-")}
        assert sum(len(file) for file in files.values()) == sum(len(x.boxes) for x in manifest.tensors.values())
        for name, expected in leaves(join_replica(saved, state)):
            found = np.full(expected.shape, np.nan)
            for box, rank in manifest.tensors[name].boxes:
                assert np.isnan(found[box]).all()
                found[box] = files[f"{state}-{rank:05}.safetensors"][key_of(name, box)]
            assert np.array_equal(found, expected)


def memory_of_a_save_and_a_load(group, run: Run, root) -> tuple[int, int, int, int]:
    """Return the peak bytes that a save and a load allocate, and the bytes of the rank's largest piece and of one of
    its states.
    """
    with connected(group, run.plan.parallel(group.size, run.case)) as topology:
        trainer = run.trainer(topology)
        trainer.iteration = 1
        saved = most_bytes(lambda: checkpoint.save(trainer, str(root), {}))
        manifest, states = on_disk.read_manifest(str(root)), list(trainer.state.optimizer_states)
        loaded = most_bytes(lambda: checkpoint.load_states(trainer, str(root), manifest, states))
        part, state = max(piece.size for piece in trainer.state.pieces), trainer.state.layout.shard_size
        return saved, loaded, 8 * part, 8 * state


@pytest.mark.parametrize("offload", [False, True])
def test_no_rank_holds_the_model(ranks, tmp_path, offload):
    """A save copies no tensor, offloaded or not: for an element of one it has a boolean, in a thread for each state. A
    load copies a rank's piece of one. (What it does after that, a step of training does too.)
    """
    model = ModelConfig(7, 192, 2, 50, 8)
    run = Run(2, Case(1, model, 1, 4, seed=1), Plan(zero_stage=1, cpu_offload=offload), 2)
    for saved, loaded, part, state in ranks.run(2, memory_of_a_save_and_a_load, run, tmp_path):
        assert saved < 3 * part / 8 + 300_000 < part
        assert loaded < part + 300_000 < state / 5


def test_other_settings_are_named():
    """Each option that differs; and the dtype. The loss scale that is loaded is none."""
    manifest = Manifest(FORMAT, 10, 9, ScaleState(2.0**16, 0, 2), "float32", {}, {
        "seed": 1, "lr": 0.1, "initial_loss_scale": 2.0**32, "fp16": True}, {}, {})
    assert len(checkpoint.describe("D", manifest, dict(manifest.settings), "float32").splitlines()) == 1
    now = {"seed": 2, "lr": 0.1, "initial_loss_scale": 1.0, "fp16": False}
    _, dtype, settings = checkpoint.describe("D", manifest, now, "float64").splitlines()
    assert "float32, and float64" in dtype and settings.endswith(": --seed 2 (was 1), no --fp16 (was given)")
    checkpoint.check_iterations("D", manifest, 11)
    with pytest.raises(UserError, match="--train-iters is 10"):
        checkpoint.check_iterations("D", manifest, 10)


def test_weights_that_are_infinite_in_the_models_format_are_not_saved():
    """70,000 is a number in float32, in which master weights and moments are; float16 ends before it."""
    piece = Piece(Segment("w", 0, (2,), Tensor((2,))), slice(0, 2), slice(0, 2))
    state, values = SimpleNamespace(precision=Precision("float16")), np.array([1.0, 7e4], np.float32)
    trainer = SimpleNamespace(state=state, iteration=3, topology=SimpleNamespace(world=SimpleNamespace(rank=1)))
    with pytest.raises(UserError, match="Iteration 3 .* w .* float16"):
        checkpoint.finite(trainer, "parameters", piece, values)
    assert checkpoint.finite(trainer, "m", piece, values) is values
    state.precision = Precision("bfloat16")
    assert checkpoint.finite(trainer, "parameters", piece, values) is values, "what is saved is not rounded"
