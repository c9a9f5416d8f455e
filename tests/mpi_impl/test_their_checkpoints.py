"""Checkpoints of other programs: chunks make the whole, whoever has saved them, and the first tensor is named."""
import json
import os
import pickle
import re
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st
from safetensors.numpy import save_file

from reference.errors import UserError
from shardlab.compare.their_runs import are_recordings, compared
from shardlab.compare.their_runs.checkpoints import in_natural_order
from tests.torch_programs import TorchPrograms
from tests.torch_saves import save, save_distributed


def chunks(shape, grid):
    """Return the boxes of a grid, each of another rank."""
    edges = [np.linspace(0, n, k + 1).astype(int).tolist() for n, k in zip(shape, grid)]
    return list(enumerate(product(*([slice(*pair) for pair in zip(along, along[1:])] for along in edges))))


def saved(folder, arrays, grid=(2, 1), **more):
    return save_distributed(folder, {name: (x, chunks(x.shape, grid)) for name, x in arrays.items()}, **more)


def model():
    """Return the tensors of a checkpoint, in float32, with what an optimizer has of some."""
    rng = np.random.default_rng(0)
    names = ["model.word.weight", *(f"model.layers.{i}.{name}" for i in (10, 2) for name in ("k.weight", "k.bias"))]
    names += [f"optimizer.state.{name.removeprefix('model.')}.exp_avg" for name in names]
    shapes = [(4,) if "bias" in name else (4, 6) for name in names]
    arrays = {name: rng.normal(size=shape).astype(np.float32) for name, shape in zip(names, shapes)}
    return arrays | {"optimizer.step": np.array(3), "empty": np.ones(0, np.float32)}


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4)), max_size=3), st.data())
def test_chunks_make_the_whole_and_a_wrong_element_is_named(tmp_path_factory, drawn, data):
    """Also of chunks without elements, of ranks that have no row of a small tensor."""
    tmp, shape = tmp_path_factory.mktemp("checkpoints"), tuple(n for n, _, _ in drawn)
    whole = np.random.default_rng(len(shape)).normal(size=shape)
    at = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    wrong = whole.copy()
    wrong[at] += 1
    a, b, c = (saved(tmp / name, {"x.weight": x}, [row[k] for row in drawn])
               for name, x, k in (("a", whole, 1), ("b", whole, 2), ("c", wrong, 2)))
    assert compared(a, b)[0].startswith("A and B agree: 1 tensors of the checkpoints were compared, in float64")
    rank = next(rank for rank, box in chunks(shape, [row[2] for row in drawn])
                if all(along.start <= i < along.stop for i, along in zip(at, box)))
    text, differ = compared(a, c)
    assert differ and f"rank {rank} of B\n" in text and f"at {list(at)} of {list(shape)}" in text, text


def test_all_kinds_of_checkpoints_are_compared_in_the_order_of_layers(tmp_path):
    """Layer 2 is before layer 10, in whatever order they are stored, and whatever wrappers have put into the names."""
    arrays, nested = model(), {}
    for name, x in arrays.items():
        *outer, last = name.split(".")
        inner = nested
        for word in outer:
            inner = inner.setdefault(word, {})
        inner[last] = x
    files = {"model-1.safetensors": 3, "model-2.safetensors": 20}
    (tmp_path / "index").mkdir()
    for file, stop in files.items():
        save_file(dict(list(arrays.items())[stop - 17 if stop > 3 else 0:stop]), tmp_path / "index" / file)
    (tmp_path / "index/model.safetensors.index.json").write_text(json.dumps({"weight_map": {x: x for x in files}}))
    save_file(arrays, tmp_path / "one.safetensors")
    save_file({name.replace("model.", "module.model.module."): x for name, x in arrays.items()},
              tmp_path / "wrapped.safetensors")
    others = [saved(tmp_path / "dcp", arrays, (1, 3)), save(tmp_path / "x.pt", nested | {"words": ["a", 1]}),
              *(str(tmp_path / name) for name in ("index", "one.safetensors", "wrapped.safetensors"))]
    changed = arrays | {name: x + 1e-3 for name, x in arrays.items() if "layers" in name and "exp_avg" not in name}
    a, b = saved(tmp_path / "a", arrays), saved(tmp_path / "b", changed)
    for other in others:
        assert are_recordings(a, other) and not compared(a, other)[1] and not compared(other, others[1])[1]
        text, differ = compared(other, b)
        assert differ and text.split("\n")[2].startswith("  model.layers.2.k."), text


def test_names_are_sorted_by_their_numbers_alone():
    names = ["w", "layers.10.b", "layers.10.a.12", "layers.10.a.3", "layers.9.a.0", "layers.9.b", "head",
             "layers.9.w2.a"]
    assert in_natural_order(names) == ["w", "layers.9.b", "layers.9.a.0", "layers.9.w2.a", "layers.10.b",
                                       "layers.10.a.3", "layers.10.a.12", "head"]


@pytest.mark.parametrize("numbered", [False, True])
@pytest.mark.parametrize("name, mean, off, said", [
    ("model.layers.2.k.bias", 1e-9, 1e-3, "agree"), ("model.layers.2.k.bias", 1.0, 1e-3, "model.layers.2.k.bias"),
    ("model.layers.2.k.bias", 0.0, 1e-3, "model.layers.2.k.bias"),
    ("model.word.weight", 1e-9, 1e-3, "model.word.weight"),
    ("optimizer.state.layers.2.k.bias.exp_avg", 1e-9, 1e-8, "agree"),
    ("optimizer.state.layers.2.k.bias.exp_avg", 1e-9, 1e-3, "optimizer.state.layers.2.k.bias.exp_avg")])
def test_a_bias_that_rounding_moves_is_left_out(tmp_path, name, mean, off, said, numbered):
    """Adam moves the keys' by whole steps; but a row of an embedding may have rested, and is compared. An optimizer's
    states have the weights' names, or the numbers of these.
    """
    arrays, moment = model(), f"optimizer.state.{name.removeprefix('model.')}.exp_avg"
    if numbered:
        numbers = {f"optimizer.state.{one.removeprefix('model.')}.exp_avg": f"optimizer.state.{i}.exp_avg"
                   for i, one in enumerate(list(arrays)[:5])}
        arrays = {numbers.get(one, one): x for one, x in arrays.items()}
        name, moment, said = (numbers.get(one, one) for one in (name, moment, said))
    moment = moment if moment in arrays else name
    arrays[moment] = np.full_like(arrays[moment], mean)
    a, b = saved(tmp_path / "a", arrays), saved(tmp_path / "b", arrays | {name: arrays[name] + np.float32(off)})
    text, differ = compared(a, b)
    assert differ == (said != "agree") and said in text.split("size")[0], text


def test_a_tensor_is_compared_in_its_own_format(tmp_path):
    arrays = {"a": np.ones(4, "bfloat16"), "b": np.ones(4, np.float32), "n": np.arange(4)}
    a = saved(tmp_path / "a", arrays, (1,))
    for name, off, differs in (("a", 0.03, False), ("b", 0.03, True), ("b", 1e-6, False), ("n", 1, True)):
        changed = (arrays[name] + np.array(off)).astype(arrays[name].dtype)
        b = saved(tmp_path / f"{name}{off}", arrays | {name: changed}, (4,))
        assert compared(a, b)[1] == differs, (name, off)


# ---- two frameworks -------------------------------------------------------------------------------------------------

H = "model.layers.{}."


def llama():
    """Return the weights of transformers' Llama: 4 heads of 8 rows in 2 groups."""
    shapes = {"self_attn.q_proj": (32, 32), "self_attn.k_proj": (16, 32), "self_attn.v_proj": (16, 32), "mlp.up_proj":
              (48, 32), "self_attn.o_proj": (32, 32), "mlp.gate_proj": (48, 32), "mlp.down_proj": (32, 48)}
    rng, names = np.random.default_rng(0), {"model.embed_tokens": (60, 32)}
    names |= {f"{H.format(i)}{name}": shape for i in range(2) for name, shape in shapes.items()}
    return {f"{name}.weight": rng.normal(size=shape).astype(np.float32) for name, shape in names.items()}


def turned(w, heads):
    """Bring rows into the order of interleaved rope, as torchtitan's _reverse_permute does."""
    return w.reshape(heads, 2, -1, w.shape[1]).swapaxes(1, 2).reshape(w.shape)


def titan(w, heads=(4, 2)):
    names = {"self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk", "self_attn.v_proj": "attention.wv",
             "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3",
             "mlp.down_proj": "feed_forward.w2", "model.embed_tokens": "tok_embeddings", "model.layers": "layers"}
    found = {}
    for name, x in w.items():
        x = turned(x, heads["k_proj" in name]) if re.search("[qk]_proj", name) and heads else x
        for old, new in names.items():
            name = name.replace(old, new)
        found[name] = x
    return found


def megatron(w, grouped=True, rope=False, swapped=False, transposed=False):
    """Return Megatron-core's weights as its DCP has them, all layers in one, with a padded vocabulary."""
    found = {"embedding.word_embeddings.weight": np.pad(w["model.embed_tokens.weight"], ((0, 4), (0, 0)))}
    layers = []
    for i in range(2):
        q, k, v, o, gate, up, down = (w[f"{H.format(i)}{name}.weight"] for name in (
            *(f"self_attn.{x}_proj" for x in "qkvo"), *(f"mlp.{x}_proj" for x in ("gate", "up", "down"))))
        q, k = (turned(q, 4), turned(k, 2)) if rope else (q, k)
        parts = [x.reshape(2, -1, 32) for x in (q, k, v)]
        layers.append((np.concatenate(parts, 1).reshape(-1, 32) if grouped else np.concatenate([q, k, v]),
                       o.T if transposed else o, np.concatenate([up, gate] if swapped else [gate, up]), down))
    names = "self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2"
    return found | {f"decoder.layers.{name}.weight": np.stack(xs) for name, xs in zip(names, zip(*layers))}


def one_group(w):
    """Return Megatron-core's weights of a Llama whose queries share one head of keys and values."""
    qkv = [np.concatenate([w[f"{H.format(i)}self_attn.{x}_proj.weight"] for x in "qkv"]) for i in range(2)]
    return megatron(llama()) | {"decoder.layers.self_attention.linear_qkv.weight": np.stack(qkv)}


ONE_GROUP = {name: x[:8] if re.search("[kv]_proj", name) else x for name, x in llama().items()}


@pytest.mark.parametrize("a, b, said", [
    (llama(), titan(llama()), "with heads of 8 rows; torchtitan's q and k have theirs in the order of interleaved "
     "rope, which is right"),
    (llama(), megatron(llama()), "A is of transformers and B of Megatron-core, with heads of 8 rows."),
    (ONE_GROUP, one_group(ONE_GROUP), "with heads of 8 rows."),       # one group is the same in both orders
    (llama(), titan(llama(), ()), "with its rows in the same order, but only torchtitan's rope is interleaved"),
    (llama(), megatron(llama(), grouped=False), "q, k and v one after the other, but Megatron-core has them group by"),
    (llama(), megatron(llama(), rope=True), "in the order of interleaved rope, which Megatron-core does not use"),
    (megatron(llama(), rope=True), llama(), "whose rows are in the order of interleaved rope, in that of transformers"),
    (llama(), megatron(llama(), swapped=True), "is A's model.layers.0.mlp.up_proj.weight, but should be A's"),
    (llama(), megatron(llama(), transposed=True), "is A's model.layers.0.self_attn.o_proj.weight, transposed")])
def test_a_converter_is_right_or_named_for_what_it_does(tmp_path, a, b, said):
    """With transformers' config.json, and without it if the heads do not matter, or can be found."""
    known = tmp_path / "config.json"
    for name, arrays in (("a", a), ("b", b)):
        save_file({key: np.ascontiguousarray(x) for key, x in arrays.items()}, tmp_path / f"{name}.safetensors")
    known.write_text('{"hidden_size": 32, "num_attention_heads": 4}')
    for _ in range(1 if "group by" in said else 2):
        text, differ = compared(*(str(tmp_path / f"{name}.safetensors") for name in "ab"))
        assert differ == ("One of the two is wrong" in text) == ("A is of" not in text) and said in text, text
        known.unlink(missing_ok=True)


# ---- what is refused ------------------------------------------------------------------------------------------------


class Harmful:
    def __reduce__(self):
        return os.system, ("touch harmed",)


def tensor_of(metadata):
    return metadata.state_dict_metadata["x.weight"]


def place_of(metadata):
    return list(metadata.storage_data.values())[1]


@pytest.mark.parametrize("change, said", [
    (lambda it: vars(it).update(version=Harmful()), "wants to use posix.system"),
    (lambda it: vars(it).update(version=pickle.PicklingError), "wants to use _pickle.PicklingError"),
    (lambda it: vars(it).pop("storage_data"), "or it is damaged: KeyError"),
    (lambda it: vars(tensor_of(it)).update(size=(-1, 2)), "or it is damaged: ValueError"),
    (lambda it: vars(tensor_of(it)).update(size=(4, 7)), "do not make the whole, [4, 7]"),
    (lambda it: vars(tensor_of(it)).update(chunks=tensor_of(it).chunks[:1]), "do not make the whole, [4, 6]"),
    (lambda it: vars(tensor_of(it)).update(chunks=tensor_of(it).chunks[:1] * 2), "do not make the whole, [4, 6]"),
    (lambda it: vars(tensor_of(it)).update(chunks=tensor_of(it).chunks * 2), "do not make the whole, [4, 6]"),
    (lambda it: vars(tensor_of(it).chunks[0]).update(sizes=(1 << 40, 6)), "is too short for its part of x.weight"),
    (lambda it: vars(place_of(it)).update(length=1 << 50), "is too short for its part of x.weight"),
    (lambda it: vars(place_of(it)).update(offset=3), "is a damaged zip archive"),
    (lambda it: vars(place_of(it)).update(transform_descriptors=["zstd"]), "has been transformed (zstd)"),
    (lambda it: vars(place_of(it)).update(relative_path="../x"), "a file next to it has a name without a folder"),
    (lambda it: vars(place_of(it)).update(relative_path="__7_0.distcp"), "__7_0.distcp is missing"),
    (lambda it: vars(place_of(it)).update(vars(list(it.storage_data.values())[3])), "has something else where"),
    (lambda it: vars(it).update(state_dict_metadata={}), "holds no tensor")])
def test_a_checkpoint_that_makes_no_sense_is_refused_and_nothing_executed(tmp_path, monkeypatch, change, said):
    monkeypatch.chdir(tmp_path)
    arrays = {"x.weight": np.ones((4, 6)), "y": np.ones((4, 2))}
    a, b = saved(tmp_path / "a", arrays), saved(tmp_path / "b", arrays, change=change)
    with pytest.raises(UserError, match=re.escape(said)):
        compared(a, b)
    assert not os.path.exists("harmed")


def cut_short(folder):
    (folder / ".metadata").write_bytes((folder.parent / "a/.metadata").read_bytes()[:99])


def within_itself(folder):
    deep: list = []
    deep.append(deep)
    return save(folder / "deep.pt", deep)


def of_8_bits(folder):
    header = b'{"x":{"dtype":"F8_E4M3","shape":[4,6],"data_offsets":[0,24]}}'
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(24))


def twice(folder):
    for name in ("a.safetensors", "b.safetensors"):
        save_file({"x": np.ones(4)}, folder / name)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}))


@pytest.mark.parametrize("make, said", [
    (cut_short, "no pickle that can be read"), (within_itself, "too many dicts and lists"),
    (lambda folder: save(folder / "complex.pt", {"x": np.ones((4, 6), complex)}), "complex numbers"),
    (of_8_bits, "has x in a format that is not read here"), (twice, "has the tensor x twice"),
    (lambda folder: "-n 2", "is a checkpoint, and -n 2 is a run's options: both must be of one"),
    (lambda folder: (folder / "rank_00000.jsonl").touch(), "checkpoint, and .* another program: both must be of one")])
def test_other_files_are_refused(tmp_path, make, said):
    a, folder = saved(tmp_path / "a", {"x": np.ones((4, 6))}), tmp_path / "b"
    folder.mkdir()
    b = make(folder) or str(folder)
    with pytest.raises(UserError, match=said):
        are_recordings(a, b)
        compared(a, b)


# ---- PyTorch itself -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a function that runs tests/torch_saving.py on ranks, and returns the folder of its checkpoints."""
    programs = TorchPrograms(tmp_path_factory.mktemp("torch"))
    return lambda way, ranks, *bug: Path(programs.run("torch_saving", ranks, way, *bug))


@pytest.mark.deep
@pytest.mark.parametrize("way, ranks", [("fsdp", 2), ("tp", 2), ("fsdp_tp", 4)])
def test_checkpoints_of_pytorch_are_the_same_however_they_are_divided(trained, way, ranks):
    text, differ = compared(str(trained("alone", 1) / "dcp"), str(trained(way, ranks) / "dcp"))
    assert not differ and text.startswith("A and B agree: 149 tensors of the checkpoints were compared"), text


@pytest.mark.deep
@pytest.mark.parametrize("other, tensors", [("saved.pt", 148), ("saved.safetensors", 37)])
def test_all_kinds_of_checkpoints_of_pytorch_hold_the_same(trained, other, tensors):
    text, differ = compared(str(trained("alone", 1) / other), str(trained("fsdp", 2) / "dcp"))
    assert not differ and text.startswith(f"A and B agree: {tensors} tensors of the checkpoints were compared"), text


@pytest.mark.deep
def test_a_weight_that_one_rank_has_saved_wrongly_is_named(trained):
    text, differ = compared(str(trained("alone", 1) / "dcp"), str(trained("fsdp", 2, "one_weight_off") / "dcp"))
    assert differ and "  model.layers.1.up.weight\n" in text and "rank 1 of B, layer 1" in text, text
    assert "No other tensor differs" in text
