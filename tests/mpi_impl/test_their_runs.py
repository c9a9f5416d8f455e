"""Recordings of other programs: divided here in every way that dims can say, put together again, and compared."""
import json
import re
from itertools import product
from math import prod
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st
from safetensors.numpy import save_file

from reference.errors import UserError
from reference.positions import take, zigzag
from shardlab.compare.their_runs import are_recordings, compared
from shardlab.compare.their_runs.differences import Comparison
from shardlab.compare.their_runs.dims import parse, written
from shardlab.compare.their_runs.records import About, Line, in_order, read

# ---- a whole, divided -----------------------------------------------------------------------------------------------


def divided(whole, dims, coordinates, axes, seed):
    """Return a rank's part of the whole, as PyTorch's ranks would hold it."""
    x = whole
    for mod in (mod for dim in dims for mod in dim.mods if mod.partial):
        parts = np.random.default_rng(seed).normal(size=(axes[mod.axis], *whole.shape))
        parts[0] += whole - parts.sum(0)
        x = parts[coordinates[mod.axis]]
    for i, dim in enumerate(dims):
        for mod in dim.sharding:
            number, size = coordinates[mod.axis], axes[mod.axis]
            x = take(x, zigzag(size, x.shape[i])[number], i) if mod.zigzag else np.array_split(x, size, i)[number]
    return x


def write(folder, tensors, axes, values=None):
    """Write a recording of tensors by (step, phase, name): (whole, dims). `values` changes what a rank has."""
    folder.mkdir()
    for rank, numbers in enumerate(product(*map(range, axes.values()))):
        coordinates = dict(zip(axes, numbers))
        lines = [{"shardlab_recorder": 1, "rank": rank, "ranks": prod(axes.values()),
                  "axes": {axis: [number, axes[axis]] for axis, number in coordinates.items()}}]
        arrays: dict[int, dict] = {}
        for n, ((step, phase, name), (whole, text)) in enumerate(tensors.items()):
            part = divided(whole, parse(text), coordinates, axes, n)
            arrays.setdefault(step, {})[str(n)] = np.ascontiguousarray(values(rank, name, part) if values else part)
            lines.append({"step": step, "phase": phase, "name": name, "call": 0, "key": str(n), "dims": text})
        Path(folder, f"rank_{rank:05}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        for step, held in arrays.items():
            save_file(held, Path(folder, f"rank_{rank:05}_{step}.safetensors"))
    return str(folder)


@st.composite
def tensors(draw):
    """Draw axes, and a tensor whose dimensions some of them divide, in uneven parts where that is possible."""
    axes = {axis: draw(st.integers(1, 3)) for axis in ("dp", "tp", "cp")}
    free, dims, shape = list(draw(st.permutations(list(axes)))), [], []
    for name in "ijk"[:draw(st.integers(1, 3))]:
        mods, size = [], draw(st.integers(1, 5))
        if "cp" in free and draw(st.booleans()):
            free.remove("cp")
            mods.append("cp:zigzag")
            size = 2 * axes["cp"] * draw(st.integers(1, 3))
        while free and draw(st.booleans()):
            mods.append(free.pop() + draw(st.sampled_from(["", "", ":partial"] if not mods else [""])))
        dims.append(f"{name}[{','.join(mods)}]" if mods else name)
        shape.append(max(size, prod(axes[mod.partition(":")[0]] for mod in mods) * 2))
    if any("zigzag" in dim for dim in dims):
        shape = [n + -n % (2 * axes["cp"]) if "zigzag" in dim else n for n, dim in zip(shape, dims)]
    if sum("partial" in dim for dim in dims) > 1:
        dims = [dim.replace(":partial", "") if i else dim for i, dim in enumerate(dims)]
    return axes, " ".join(dims), tuple(shape), draw(st.integers(0, 1000))


@given(tensors(), st.data())
def test_parts_make_the_whole_and_a_wrong_element_is_named_with_its_rank_and_place(tmp_path_factory, drawn, data):
    axes, text, shape, seed = drawn
    whole = np.random.default_rng(seed).normal(size=shape)
    tmp, key = tmp_path_factory.mktemp("runs"), (1, "forward", "layers.0 output")
    summed = "partial" in text
    wrong = 0 if summed else data.draw(st.integers(0, prod(axes.values()) - 1))

    def values(rank, name, part):
        return part + (rank == wrong) * (np.arange(part.size) == part.size - 1).reshape(part.shape)

    alone = write(tmp / "alone", {key: (whole, " ".join("ijk"[:whole.ndim]))}, {})
    ranks, off = (write(tmp / name, {key: (whole, text)}, axes, change) for name, change in (("ranks", None),
                                                                                            ("off", values)))
    assert written(parse(text)) == text
    for a, b in ((alone, ranks), (ranks, alone)):
        said, differ = compared(a, b)
        assert not differ and said.startswith("A and B agree: 1 tensors of step 1 were compared, in float64"), said
    found, = Comparison(read(alone), read(off)).findings().differences
    assert found.size == pytest.approx(1) and (summed or [one.ranks for one in found.holders] == [(wrong,)])
    expected, value = found.values
    assert expected == whole[found.at] and value == pytest.approx(expected + 1)


@given(st.integers(1, 12), st.data())
def test_what_rounding_explains_grows_with_the_root_of_the_layers_before(tmp_path_factory, layers, data):
    layer, backward = data.draw(st.integers(0, layers - 1)), data.draw(st.booleans())
    passed = 2 * layers - layer if backward else layer + 1
    names = [("forward", f"layers.{i} output") for i in range(layers)]
    names += [("backward", f"layers.{i} output") for i in reversed(range(layers))]
    found = {}
    for factor in (0, 0.99, 1.01):
        off = factor * 1e-12 * np.sqrt((1 + passed) / 9)
        wrong = "backward" if backward else "forward", f"layers.{layer} output"
        found[factor] = write(tmp_path_factory.mktemp("runs") / "run", {
            (1, *name): (np.array([1.0, 0.5 + off * (name == wrong)]), "i") for name in names}, {})
    assert [compared(found[0], found[factor])[1] for factor in (0.99, 1.01)] == [False, True]


@pytest.mark.parametrize("inside", [False, True])
def test_a_coarse_format_explains_what_comes_after_it_alone(tmp_path, inside):
    """Whether the tensor is stored in it, or a module has computed in it."""
    stored = np.float64 if inside else np.float32
    right = {(1, "forward", f"layers.{i} output"): np.ones(3, stored if i == 1 else np.float64) for i in range(3)}
    a, *others = (write(tmp_path / f"wrong{wrong}", {
        key: (x + 1e-6 * (key[2] == f"layers.{wrong} output"), "i") for key, x in right.items()}, {})
        for wrong in (9, 0, 1, 2))
    if inside:
        edit(a, '"layers.1 output"', '"layers.1 output", "inside": "float32"', 0)
    assert [compared(a, b)[1] for b in others] == [True, False, False]


# ---- two frameworks -------------------------------------------------------------------------------------------------

# Each framework's names of the word table, a norm, the output of attention, and of layer 1, and one that has no row.
NAMED = {"Megatron-core": ("embedding.word_embeddings", "decoder.layers.0.pre_mlp_layernorm",
                           "decoder.layers.1.self_attention", "decoder.layers.1", "decoder.layers.1.mlp.linear_fc1"),
         "torchtitan": ("tok_embeddings", "layers.0.ffn_norm", "layers.1.attention", "layers.1",
                        "layers.1.attention.wq"),
         "transformers' GPT-2": ("transformer.wte", "transformer.h.0.ln_2", "transformer.h.1.attn", "transformer.h.1",
                                 "transformer.h.1.mlp.c_fc"),
         "transformers": ("model.embed_tokens", "model.layers.0.post_attention_layernorm", "model.layers.1.self_attn",
                          "model.layers.1", "model.layers.1.mlp.gate_proj")}


@pytest.mark.parametrize("one, other", list(product(NAMED, NAMED)))
def test_frameworks_have_other_names_and_other_orders_of_dimensions(tmp_path, one, other):
    """In A samples are the first dimension, on two ranks of dp; in B positions are, zigzag on two ranks of cp."""
    def recorded(folder, framework, turned, axes, wrong=None):
        table, *modules = NAMED[framework]
        rng, found = np.random.default_rng(0), {(1, "parameters", f"{table}.weight"): (np.eye(3), "i j")}
        for i, module in enumerate(modules):
            x = rng.normal(size=(2, 4, 3)) + (i == wrong)
            x = x + 9 * (i == 3) * (framework == one != other)      # what has no row
            part = (x.swapaxes(0, 1), "s[cp:zigzag] b h") if turned else (x, "i[dp] j k")
            found[1, "forward", f"{module} output"] = part
        logits = np.ones((2, 4, 5)) + (framework == one != other)
        found[1, "forward", "root output"] = logits, "b s v"
        return write(folder, found, axes)

    a = recorded(tmp_path / "a", one, False, {"dp": 2})
    b = recorded(tmp_path / "b", other, True, {"cp": 2})
    text, differ = compared(a, b)
    common = 6 if one == other else 4
    assert not differ and f"{common} tensors" in text and ("; 4 more are in one alone" in text) == (one != other), text
    text, differ = compared(a, recorded(tmp_path / "wrong", other, True, {"cp": 2}, wrong=1))
    name = NAMED[one if one == other else "transformers"][2]
    assert differ and f"step 1, forward: {name} output\n  where      ranks 0, 1 of B, layer 1" in text, text


# ---- two steps ------------------------------------------------------------------------------------------------------


def run(tmp, name, changed=(), **more):
    """Write a recording of two steps of a model of two layers, of which some tensors are changed."""
    rng, found = np.random.default_rng(0), {}
    for step in (1, 2):
        for phase, names in (("batch", ["tokens"]), ("forward", ["layers.0 output", "layers.1 output"]),
                             ("backward", ["layers.1 output", "layers.0 output"]),
                             ("gradients", ["layers.0.weight", "layers.1.weight", "layers.1.bias"]),
                             ("parameters", ["layers.0.weight", "layers.1.weight"]),
                             ("optimizer parameters", ["layers.0.weight", "layers.1.weight"])):
            for one in names:
                x = rng.normal(size=(4, 3)) * (1e-20 if one.endswith("bias") else 1)
                found[step, phase, one] = x + ((step, phase, one) in changed), "b h"
    return write(tmp / name, found, {}, **more)


@pytest.mark.parametrize("changed, said", [
    ([(1, "forward", "layers.1 output"), (1, "backward", "layers.0 output")], "step 1, forward: layers.1 output"),
    ([(1, "backward", "layers.0 output"), (1, "backward", "layers.1 output")],
     "step 1, backward: gradient of layers.1 output"),
    ([(1, "gradients", "layers.0.weight"), (1, "gradients", "layers.1.weight")],
     "step 1, gradients: gradient of layers.1.weight"),
    ([(2, "forward", "layers.0 output"), (1, "optimizer parameters", "layers.1.weight")],
     "step 1, optimizer parameters: layers.1.weight"),
    ([(1, "batch", "tokens"), (1, "forward", "layers.0 output")], "A and B were given different batches"),
    ([(1, "parameters", "layers.1.weight")], "A and B begin with different weights")])
def test_the_first_in_the_order_of_computation_is_named(tmp_path, changed, said):
    """Backward that is from the last layer on, and so it is for the gradients of weights."""
    text, differ = compared(run(tmp_path, "a"), run(tmp_path, "b", changed))
    assert differ and said in text[:text.find("where")], text


def test_gradients_before_clipping_come_first():
    """And both from the last layer on."""
    lines = [Line(1, "gradients", name, call, "0", "h") for call in (0, 1) for name in ("first", "last")]
    order = in_order([(About(1, 0, 1, {}), lines)])
    assert [(key.call, key.name) for key in order] == [(0, "last"), (0, "first"), (1, "last"), (1, "first")]


@pytest.mark.parametrize("change, said", [
    (lambda folder: Path(folder, "rank_00001.jsonl").unlink(), "the list of rank 1 is not there"),
    (lambda folder: Path(folder, "rank_00001_1.safetensors").unlink(), "rank_00001_1.safetensors is missing"),
    (lambda folder: Path(folder, "rank_00001_1.safetensors").write_bytes(b"x" * 100), "is not a safetensors file"),
    (lambda folder: Path(folder, "rank_00000.jsonl").write_text("{"), "is not what shardlab_recorder.py writes"),
    (lambda folder: edit(folder, '"i[tp] j"', '"i[tp j"'), "the dims of step 1, forward: x output cannot be read"),
    (lambda folder: edit(folder, '"i[tp] j"', '"i j"'), "is [4, 3] in A, but [2, 3] in B"),
    (lambda folder: edit(folder, '"i[tp] j"', '"i[tp] j k"'), "has 2 dimensions on rank 0, but 3 by its dims"),
    (lambda folder: edit(folder, '"i[tp] j"', '"i[tp] j[tp]"'), "has the axis tp twice"),
    (lambda folder: edit(folder, '"i[tp] j"', '"i j"', 1), "the ranks say different dims"),
    (lambda folder: edit(folder, '"forward"', '"sideways"'), "has the phase 'sideways'"),
    (lambda folder: edit(folder, '"x output"', '"z output"'), "A and B have no tensor of one name: A has x output")])
def test_what_makes_no_sense_is_refused(tmp_path, change, said):
    key, whole = (1, "forward", "x output"), np.arange(12.0).reshape(4, 3)
    a, b = (write(tmp_path / name, {key: (whole, "i[tp] j")}, {"tp": 2}) for name in "ab")
    change(b)
    with pytest.raises(UserError, match=re.escape(said)):
        compared(a, b)


def edit(folder, old, new, *ranks):
    for rank in ranks or (0, 1):
        path = Path(folder, f"rank_{rank:05}.jsonl")
        path.write_text(path.read_text().replace(old, new))


X, Y, ROOT, BATCH = (*((1, "forward", f"{name} output") for name in ("x", "y", "root")), (1, "batch", "tokens"))
W, MOVED, GRAD, BIAS_GRAD = ((1, phase, name) for phase, name in (
    ("parameters", "x.weight"), ("optimizer parameters", "b"), ("gradients", "x.weight"), ("gradients", "b")))
ONES, TABLE, MIXED = np.ones(3), np.arange(12.0).reshape(4, 3), np.array([1e-13, 1e-13, 2e-13])


@pytest.mark.parametrize("a, b, said", [
    ({X: ONES, (2, *X[1:]): ONES}, {X: ONES}, "agree: 1 tensors of step 1 were compared, in float64[.] "),
    ({X: ONES, ROOT: ONES[:1]}, {X: ONES, ROOT: TABLE}, "agree: 1 .* float64; 1 more are in one alone"),
    ({GRAD: ONES, BIAS_GRAD: 1e-20 * ONES}, {GRAD: ONES, BIAS_GRAD: -1e-20 * ONES}, "agree: 2 tensors"),
    ({GRAD: ONES, BIAS_GRAD: 1e-20 * ONES, MOVED: MIXED}, {GRAD: ONES, BIAS_GRAD: -1e-20 * ONES, MOVED: -MIXED},
     "agree: 3 tensors"),
    ({X: TABLE, Y: TABLE}, {X: 2 * TABLE, Y: TABLE.T}, "step 1, forward: x output.*No other tensor differs[.]"),
    ({BATCH: TABLE}, {BATCH: TABLE[[0, 2, 1, 3]]}, "different batches.*in another order"),
    ({BATCH: TABLE}, {BATCH: TABLE + 1}, "different batches(?!.*in another order)"),
    ({X: ONES, W: ONES}, {X: 0 * ONES, W: ONES, (1, "parameters", "head.weight"): ONES},
     "Weights that only one of the two has: head.weight[.]")])
def test_what_is_compared_and_said_of_it(tmp_path, a, b, said):
    """A step or a tensor of one run alone is left out, a loss is not logits, and rounding is no difference: that of a
    key's bias, whose gradient is 0, and Adam moves it in whichever direction the rounding points.
    """
    text, differ = compared(*(write(tmp_path / name, {key: (x, " ".join("ij"[:x.ndim])) for key, x in run.items()}, {})
                              for name, run in (("a", a), ("b", b))))
    assert re.search(said, text, re.DOTALL) and differ != ("agree" in said), text


def test_ours_and_theirs_are_not_mixed(tmp_path):
    theirs = run(tmp_path, "a")
    (tmp_path / "empty").mkdir()
    for other, said in (("-n 2", "a run's options"), ("nowhere", "nowhere is not there"),
                        (str(tmp_path / "empty"), "an empty folder"), (str(tmp_path), "a folder without a recording"),
                        (__file__, "a file of an unknown kind")):
        with pytest.raises(UserError, match=said):
            are_recordings(theirs, other)
    assert not are_recordings("-n 1", str(tmp_path))


# ---- what is said of other mistakes ----------------------------------------------------------------------------------


@given(st.integers(1, 3), st.integers(0, 2**32 - 1), st.sampled_from(["parameters", "optimizer parameters"]))
def test_a_copy_that_drifts_is_named_though_two_runs_may_differ_more(tmp_path_factory, rank, seed, phase):
    """Replicas make the same update, so their weights are equal; two runs' are not."""
    tmp, w = tmp_path_factory.mktemp("drift"), np.random.default_rng(seed).normal(size=(3, 2)) + 3
    tensors = {(1, "gradients", "w"): (np.ones((3, 2)), "i j"), (1, "parameters", "w"): (w, "i j"),
               (1, "optimizer parameters", "w"): (w + 1, "i j")}

    def drifted(drifting, by):
        return lambda at, name, x: x * (1 + by) if at in drifting and name == "w" else x

    right = write(tmp / "a", tensors, {"dp": 4})
    together = write(tmp / "b", tensors, {"dp": 4}, values=drifted(range(4), 1e-13))
    assert not compared(right, together)[1]
    alone = write(tmp / "c", {key: one for key, one in tensors.items() if key[1] != "gradients" and key[1] == phase},
                  {"dp": 4}, values=drifted([rank], 1e-13))
    text, differ = compared(right, alone)
    assert differ and f"step 1, {phase}: w\n  where      rank {rank} of B" in text, text


@given(st.sampled_from([-1, 0.5, 2, 12]), st.integers(0, 2), st.integers(0, 99))
def test_a_multiple_and_another_order_are_called_so(tmp_path_factory, factor, axis, seed):
    """Of the whole, which two ranks of B share, or of one rank's part; and nothing is said of noise."""
    tmp, rng = tmp_path_factory.mktemp("patterns"), np.random.default_rng(seed)
    whole, key = rng.normal(size=(4, 3, 5)), (1, "forward", "x output")
    half = np.repeat([factor, 1], 2)[:, None, None]
    a = write(tmp / "a", {key: (whole, "i j k")}, {})
    for name, x, pattern in (
            ("whole", factor * whole, f"B is {factor} times A, everywhere"),
            ("half", half * whole, f"B is {factor} times A, on these ranks"),
            ("order", np.roll(whole, 1, axis), f"B has the same rows in another order, along axis {axis}"),
            ("noise", whole + rng.normal(size=whole.shape), None)):
        text, differ = compared(a, write(tmp / name, {key: (x, "i[dp] j k")}, {"dp": 2}))
        assert differ and re.findall("pattern +(.*)", text) == [pattern] * bool(pattern), text


@given(st.floats(1e-9, 1e-6), st.integers(0, 99))
def test_a_weight_may_be_off_by_its_last_digit_however_small_its_step(tmp_path_factory, step, seed):
    tmp, w = tmp_path_factory.mktemp("steps"), np.random.default_rng(seed).normal(size=9).astype(np.float32)
    a, near, far = (write(tmp / str(ulps), {
        (1, "parameters", "w"): (w, "i"), (1, "gradients", "w"): (np.ones(9), "i"),
        (1, "optimizer parameters", "w"): (w - np.float32(step) + ulps * np.spacing(abs(w).max()), "i")}, {})
        for ulps in (0, 1, 9))
    assert (compared(a, near)[1], compared(a, far)[1]) == (False, True)


def test_another_number_of_micro_steps_is_called_so(tmp_path):
    x, y = (1, "forward", "x output"), (1, "forward", "y output")
    a = write(tmp_path / "a", {x: (np.ones((2, 3)), "i j"), y: (np.ones((2, 3)), "i j")}, {})
    b = write(tmp_path / "b", {x: (np.ones((4, 3)), "i j")}, {})
    edit(a, '"y output", "call": 0', '"x output", "call": 1', 0)
    with pytest.raises(UserError, match="a step of A has 2 of them, one of B 1. Give both the same number of micro-"):
        compared(a, b)
