"""Observing a step changes nothing in it; a recording says where its parts lie; the finder finds what was changed."""
import json
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from reference.config import ExpertsConfig, ParallelConfig, Recompute
from reference.errors import UserError
from reference.layers.block import block_tensors
from reference.layers.layer import layers_in
from reference.optimizers.adam import OptimizerConfig
from reference.params import leaves
from reference.precision import LossScaler, LossScaling
from shardlab.compare.completeness import check_whole
from shardlab.compare.differences import check_comparable, compare
from shardlab.compare.names import PHASES, Key
from shardlab.compare.recorder import Recorder
from shardlab.compare.recording import INDEX, RunFacts, TensorPart, in_memory, read
from shardlab.programs.divergence import first_not_finite
from tests.deep import one_fast_of
from tests.planted import Bug, planted_run
from tests.recorded_runs import BATCH, MODEL, batches_of, bits, bits_of, case, record, trainer_of, written
from tests.training_theorems import Plan, connected

BERT = replace(MODEL, architecture="bert", heads=("lm", "sop"))
CHOICE = replace(MODEL, architecture="bert", heads=("choice",), apply_residual_connection_post_layernorm=True)
PLANS = {
    "sequence": (2, case(2, cut=True), Plan(recompute=Recompute("full", "uniform", 3))),
    "selective": (4, case(4), Plan(recompute=Recompute("selective"))),
    "a V, split backward": (2, case(), Plan(2, "zb-v")),
    "ZeRO-1, offloaded": (4, case(2, cut=True), Plan(zero_stage=1, cpu_offload=True)),
    "ZeRO-2": (4, case(), Plan(2, "zb-h2", zero_stage=2)),
    "ZeRO-3": (2, case(), Plan(zero_stage=3)),
    "a ring": (4, case(), Plan(2, c=2)),
    "gathered keys": (4, case(2, cut=True), Plan(c=2, cp_comm_type="all_gather")),
    "exchanged heads": (4, case(2), Plan(c=2, cp_comm_type="a2a", zero_stage=1)),
}

# ---- observed -------------------------------------------------------------------------------------------------------


def observing_changes_nothing(group, of, plan):
    """Check that a step's report and the weights are bitwise identical with and without an observer."""
    found = []
    for observed in (False, True):
        with connected(group, plan.parallel(group.size, of)) as topology:
            trainer, batches = trainer_of(of, topology), batches_of(of, topology)
            recorder = Recorder(trainer.state) if observed else None
            results = []
            for step in range(2):
                with recorder.playing() if recorder else nullcontext():
                    results.append(trainer.step(batches.microbatches_of("train", step), BATCH, recorder))
            found.append((results, trainer.state.whole(trainer.state.parameters.own).tobytes(), trainer.peaks.caches))
    assert found[0] == found[1]


@pytest.mark.parametrize("name", one_fast_of(2, ["sequence", "a V, split backward"]))
def test_observing_changes_nothing(ranks, name):
    ranks.run(PLANS[name][0], observing_changes_nothing, *PLANS[name][1:])


@pytest.fixture(scope="module")
def one_rank(ranks):
    return record(ranks, 1, case())


@pytest.mark.parametrize("name", one_fast_of(3, PLANS))
def test_all_topologies_compute_the_same_tensors(ranks, one_rank, name):
    """Every tensor that one rank sees, other topologies see too, or a part of it that makes up the whole; and agree."""
    other = record(ranks, *PLANS[name])
    check_whole(one_rank, other)
    found = compare(one_rank, other)
    assert not found.differences and found.worst.strain < 0.01 and found.compared > 800


QWEN = replace(MODEL, normalization="RMSNorm", swiglu=True, add_bias_linear=False, add_qkv_bias=True,
               num_query_groups=2, qk_layernorm=True)
ROPE = replace(MODEL, position_embedding_type="rope", untie_embeddings_and_output_weights=True)
OF_QWEN = {"blocks.0.attention.keys_values", "blocks.0.mlp.gate_up", "blocks.1.attention.b_kv"}
OF_BERT = {"pooler": {"lm_head", "pooler", "binary_head"}, "choice": {"pooler", "multichoice_head"}}
SHARDED = 2, case(2, cut=True), Plan()


def test_all_that_the_layers_of_a_block_list_is_seen(ranks):
    """Only the input of a layer within another has two names, results of products are not kept, and Qwen has no b_out.
    """
    parts = record(ranks, 1, case(model=QWEN), steps=1).parts
    seen = {key.name.removeprefix("blocks.0.") for key in parts if key.phase in ("parameters", "forward")}
    listed = {f"{path}.{name}" for path, layer in layers_in(block_tensors(QWEN)) for name in layer.order.split()
              if ":" not in name}
    attention = "queries keys_values q_norm.output k_norm.output b_out".split()
    assert listed - seen == {"mlp.entered", *(f"attention.{name}" for name in attention)}


@pytest.mark.parametrize("model, n, of, plan, form, strain, names", one_fast_of(3, [
    (QWEN, 4, case(4), Plan(zero_stage=1), "float64", 0.01, OF_QWEN),
    (replace(ROPE, activation="gelu_exact"), *SHARDED, "float16", 0.5, set()),
    (replace(QWEN, qk_layernorm=False), *PLANS["sequence"], "float64", 0.01, OF_QWEN),
    (CHOICE, 4, case(2, cut=True), Plan(c=2, cp_comm_type="a2a"), "float64", 0.5, OF_BERT["choice"]),
    (BERT, 2, case(), Plan(c=2), "float64", 0.5, OF_BERT["pooler"])]))
def test_every_model_computes_the_same_tensors(ranks, model, n, of, plan, form, strain, names):
    """Gradients of copies are sums over the ranks that have them; what reads the first position is told by the ranks
    that have it outside the regions.
    """
    model = replace(model, num_layers=2)
    one, other = (record(ranks, size, replace(each, model=model), its, form=form)
                  for size, each, its in ((1, case(), Plan()), (n, of, plan)))
    found = compare(one, other)
    assert not found.differences and found.worst.strain < strain and found.compared > 300, found
    for phase in ("parameters", "kept", "gradients", "optimizer v"):
        seen = {key.name for key in one.parts if key.phase == phase}
        assert seen == {key.name for key in other.parts if key.phase == phase}
    assert names <= {key.name for key in one.parts} | {name.split(".")[0] for name in seen}


def test_what_is_seen_is_what_is_there(one_rank):
    """The weights after the first step are those that the second begins with; one rank's gradients are all there are;
    and a step has its report.
    """
    run = one_rank
    for key, parts in run.parts.items():
        if key.phase == "optimizer parameters" and key.iteration == 1:
            assert bits_of(run, parts) == bits_of(run, run.parts[Key(2, "parameters", key.name)])
        if key.phase == "gradients":
            assert bits_of(run, parts) == bits_of(run, run.parts[key._replace(phase="reduction")])
    assert {key.phase for key in run.parts} == set(PHASES) - {"recompute"}
    report = {key.name: run.load(*parts).item() for key, parts in run.parts.items()
              if key.phase == "step" and key.iteration == 2}
    assert report["loss of each replica"] == report["mean loss"] != report["gradient norm"] > 0.05
    assert report["learning rate"] == 1e-2 and len(report) == 4


def test_what_is_seen_has_its_place_and_its_phase(ranks):
    """A stage receives what another sends, recomputed tensors have their own phase, and no part is padding."""
    run = record(ranks, 4, case(2), Plan(2, recompute=Recompute("full", "block", 1)), steps=1)
    for phase in ("forward", "backward"):
        assert {part.rank for part in run.parts[Key(1, phase, "blocks.2.input")]} == {0, 1, 2, 3}
        assert {key.name for key in run.parts if key.phase == phase and key.name.endswith(".input")
                and key.name.count(".") == 2} == {"blocks.2.input"}
    again = {key.layer for key in run.parts if key.phase == "recompute"}
    kept = {key.layer for key in run.parts if key.phase == "forward" and key.name.endswith("attention.probs")}
    assert again == {0, 2} and kept == {1, 3}
    for phase, name, axis in (("backward", "logits", 2), ("gradients", "embedding.word", 0)):
        assert max(part.box[axis].stop for part in run.parts[Key(1, phase, name)]) == MODEL.vocab_size


# ---- compared -------------------------------------------------------------------------------------------------------

ABOUT = RunFacts(replace(MODEL, position_embedding_type="rope"), OptimizerConfig(1.0, 1), 2, BATCH, 4, "float64",
                 ParallelConfig())


@st.composite
def split_tensors(draw):
    """Draw a tensor and two ways to split it along an axis, or to replicate it, over a few ranks."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    whole = np.random.default_rng(draw(st.integers(0, 99))).normal(size=shape)

    def parts():
        axis, copies = draw(st.integers(0, len(shape) - 1)), draw(st.integers(1, 2))
        ends = sorted({0, shape[axis], *draw(st.lists(st.integers(0, shape[axis]), max_size=2))})
        summed = draw(st.booleans())
        found = []
        for start, stop in zip(ends, ends[1:]):
            box = (slice(None),) * axis + (slice(start, stop),)
            for copy in range(copies):
                values = whole[box] * ((0.25, 0.75)[copy] if summed and copies == 2 else 1.0)
                first = tuple(start if i == axis else 0 for i in range(len(shape)))
                found.append((TensorPart(len(found), first, values.shape, summed), np.array(values)))
        return found

    return parts(), parts()


def recording_of(parts, name="loss"):
    return in_memory(ABOUT, [(Key(1, "forward", name), part, values) for part, values in parts])


@given(split_tensors(), st.data())
def test_one_wrong_element_is_found(cut, data):
    """However a tensor is cut, the runs agree; and one element that is wrong on one rank is named, with that rank."""
    one, other = cut
    assert not compare(recording_of(one), recording_of(other)).differences
    part, values = data.draw(st.sampled_from(other))
    at = tuple(data.draw(st.integers(0, n - 1)) for n in values.shape)
    off = data.draw(st.sampled_from([1e-3, -1e-3, np.nan, np.inf]))
    values[at] += off
    difference, = compare(recording_of(one), recording_of(other)).differences
    np.testing.assert_allclose(difference.size, abs(off) if np.isfinite(off) else np.inf)
    assert difference.at == tuple(i + start for i, start in zip(at, part.first))
    assert difference.holders[0].run == "B" and part.rank in difference.holders[0].ranks
    assert part.summed or [holder.ranks for holder in difference.holders] == [(part.rank,)]


@pytest.mark.parametrize("name, shape, changed, inert", [
    ("b_qkv", (3, 2, 4), np.s_[1, 1, 2], True), ("b_qkv", (3, 2, 4), np.s_[0, 1, 2], False),    # of keys, of queries
    ("k", (1, 3, 2, 4), np.s_[0, :, 1, 2], True), ("k", (1, 3, 2, 4), np.s_[0, 1, 1, 2], False),    # all positions, one
    ("k_norm.bias", (4,), np.s_[2], True), ("q_norm.bias", (4,), np.s_[2], False)])
def test_a_constant_added_to_all_scores_is_left_out(name, shape, changed, inert):
    """This is without rope, which rotates an addition to a key by the key's position."""
    x = np.random.default_rng(1).normal(size=shape)
    y = x.copy()
    y[changed] += 1
    a, b = (recording_of([(TensorPart(0, (i, *[0] * (x.ndim - 1)), (1, *x.shape[1:]), False), values[i:i + 1])
                          for i in range(len(x))], f"blocks.0.attention.{name}") for values in (x, y))
    for positions, ignored in {"learned_absolute": inert, "rope": False}.items():
        for run in (a, b):
            run.about = replace(run.about, model=replace(MODEL, position_embedding_type=positions))
        assert bool(compare(a, b).differences) != ignored


DROPPING = replace(MODEL, experts=ExpertsConfig(4, 2, moe_expert_capacity_factor=1.0))


@pytest.mark.parametrize("model, other, told", [
    (MODEL, dict(model=replace(MODEL, position_embedding_type="rope")), "position_embedding_type"),
    (MODEL, dict(seed=3), "the seed is 2 in A, but 3 in B"), (DROPPING, {}, ""),
    (MODEL, dict(optimizer=replace(ABOUT.optimizer, muon_tp_mode="distributed")), ""),
    (DROPPING, dict(model=replace(DROPPING, experts=ExpertsConfig(4, 1, True))), "moe_router_topk is 2 in A, but 1"),
    (DROPPING, dict(parallel=ParallelConfig(context_parallel_size=2)), "--moe-expert-capacity-factor")])
def test_other_runs_are_not_compared(model, other, told):
    """Nor experts that drop tokens on another topology: a rank has other tokens there, so that others are dropped."""
    a = replace(ABOUT, model=model)
    with pytest.raises(UserError, match=told) if told else nullcontext():
        check_comparable(in_memory(a, []), in_memory(replace(a, **other), []))


def test_steps_that_both_have_skipped_prove_nothing():
    """Gradients that overflow in both may do so in any way: that is said, and not that the runs agree, or differ.

    In float16 they may overflow where those of the other run, in another format, do not: then it alone skips the step.
    """
    part = TensorPart(0, (0,), (1,), False)
    wide, half = ("float32", "float16")
    for one, other, formats, said in (
            (np.inf, np.nan, (wide, wide), "are not finite in either"),
            (np.inf, np.nan, (half, half), "overflow float16"), (1.0, np.inf, (wide, half), "overflow float16"),
            (np.inf, 1.0, (wide, half), ""), (np.inf, 1.0, (wide, wide), "")):
        a, b = (in_memory(replace(ABOUT, format=form), [
            (Key(1, "step", "gradient norm"), part, np.array([norm])),
            (Key(1, "optimizer m", "embedding.word"), part, np.array([float(form == half)]))])
            for norm, form in zip((one, other), formats, strict=True))
        if said:
            with pytest.raises(UserError, match=f"agree until the gradients of iteration 1, which {said}"):
                compare(a, b)
        else:
            assert bool(compare(a, b).differences) == (one != other)


# ---- on disk --------------------------------------------------------------------------------------------------------


def test_what_is_read_is_what_was_recorded(ranks, tmp_path):
    """It is bitwise identical, of two steps at most; rank 0 prints the size."""
    steps, of = 3, case(2, cut=True, model=replace(BERT, num_layers=2))
    found = ranks.run(2, written, of, Plan(zero_stage=1), str(tmp_path / "run"), steps, "bfloat16")
    memory, disk = in_memory(found[0][0], [one for _, taken, _ in found for one in taken]), read(str(tmp_path / "run"))
    assert bits(memory) == bits(disk) and memory.about == disk.about and disk.about.format == "bfloat16"
    assert {key.iteration for key in disk.parts} == {1, 2}
    assert ["B, in" in line for line in found[0][2]] == [True] * 2 and not found[1][2]


def test_what_is_no_recording_is_refused(ranks, tmp_path):
    """Whatever of its index is no part of one, and whatever file is missing."""
    folder, data = str(tmp_path), "iteration-1.rank-0.safetensors"
    ranks.run(1, written, case(), Plan(), folder, 1, "float64")
    whole = json.loads((tmp_path / INDEX).read_text())
    (key, part), *others = whole["parts"]
    for told, changed in (
            ("lists no tensor", {"parts": []}), ("no format int8", {"about": whole["about"] | {"format": "int8"}}),
            ("--record", {"parts": [[[*key[:-1], "no.such.tensor"], part], *others]}),
            ("not a part of", {"parts": [[key, [part[0], [0] * 5, *part[2:]]], *others]}),
            ("names the file", {"parts": [[key, [*part[:4], f"../run/{data}", *part[5:]]], *others]}),
            ("rank-0.*cannot be read", {})):
        (tmp_path / INDEX).write_text(json.dumps(whole | changed))
        if not changed:
            (tmp_path / data).unlink()
        with pytest.raises(UserError, match=told):
            compare(read(folder), read(folder))
    (tmp_path / INDEX).unlink()
    with pytest.raises(UserError, match="holds no recording"):
        read(folder)


def test_half_a_recording_is_refused(ranks):
    """A missing iteration, tensor, or part of a tensor is named."""
    one, other = (record(ranks, n, of, plan) for n, of, plan in ((1, case(), Plan()), (2, case(2), Plan())))
    check_whole(one, other)
    key = Key(2, "optimizer m", "blocks.0.mlp.w_in")
    assert len({part.first for part in other.parts[key]}) > 1
    for fewer, told in (
            ({k: v for k, v in other.parts.items() if k.iteration == 1}, "iterations 1 and 2, but B"),
            ({k: v for k, v in other.parts.items() if k != key}, f"B lacks a tensor .*{key}"),
            (other.parts | {key: other.parts[key][:1]}, f"B lacks a part of {key}")):
        with pytest.raises(UserError, match=told):
            check_whole(one, replace(other, parts=fewer))
    with pytest.raises(UserError, match="A lacks a tensor"):
        check_whole(replace(one, parts={k: v for k, v in one.parts.items() if k != key}), other)


# ---- not finite -----------------------------------------------------------------------------------------------------


def step_that_fails(group, of, plan, spoiled=""):
    """Return where a step was not finite first. No weight has moved, and the step counts once, for the loss scale too.
    """
    with connected(group, plan.parallel(group.size, of)) as topology:
        trainer, batches = trainer_of(of, topology), batches_of(of, topology)
        for name, parameter in leaves(trainer.state.layout.views(trainer.state.parameters.own.flat)):
            if name == spoiled and topology.place.tensor == 1:
                parameter[0, 0] = np.inf
        before = trainer.state.parameters.own.flat.copy()
        trainer.scaler = LossScaler(LossScaling(initial_loss_scale=4.0))
        batch = batches.microbatches_of("train", 0)
        assert trainer.step(batch, BATCH).skipped
        patience = trainer.scaler.state
        where = first_not_finite(trainer, batch, BATCH)
        np.testing.assert_array_equal(trainer.state.parameters.own.flat, before)
        assert (trainer.iteration, trainer.scaler.state) == (1, patience)
        return where


SPOILED = {     # a line that spoils an element on tensor-parallel rank 1 alone, and what is said then
    "forward": (Bug("mpi_impl.layers.mlp", "    y = region.leave(linear(a",
                    "    a[0, 1, 2] = 1e999 if region.rank else a[0, 1, 2]\n    y = region.leave(linear(a"),
                "first in blocks.0.mlp.hidden, phase forward, layer 0, on rank 1: 1 of its 64 elements there, "
                "the first at [0, 1, 18], which is inf"),
    "backward": (Bug("mpi_impl.layers.mlp", "    sink(grads.w_in,",
                     "    dz[0, 3, 0] += 1e999 if region.rank else 0\n    sink(grads.w_in,"),
                 "first in the gradient of blocks.3.mlp.pre_activation, phase backward, layer 3, on rank 1: 1 of its "),
    "gradients": (Bug("mpi_impl.layers.mlp", "grads.b_in[...] += db_in",
                      "grads.b_in[...] += db_in * (1e999 if region.rank else 1)"),
                  "first in the gradient of blocks.3.mlp.b_in, phase gradients, layer 3, on rank 1: 16 of its 16"),
}


@pytest.mark.parametrize("name, plan, model", [
    ("forward", Plan(), MODEL), ("backward", Plan(2, "zb-h1"), BERT), ("gradients", Plan(), MODEL)])
def test_the_first_that_is_not_finite_is_named(ranks, name, plan, model):
    """Its rank is named, too, and all ranks agree."""
    bug, told = SPOILED[name]
    found = ranks.run(2 * plan.p, planted_run, bug, step_that_fails, case(2, model=model), plan)
    assert told.replace("rank 1", f"rank {2 * plan.p - 1}" if "layer 3" in told else "rank 1") in found[0]
    assert len(set(found)) == 1


def test_weights_that_were_not_finite_are_named(ranks):
    found, *_ = ranks.run(2, step_that_fails, case(2), Plan(), "blocks.2.mlp.w_in")
    assert "when the step began: blocks.2.mlp.w_in" in found and "the first at [0, 16], which is inf" in found
