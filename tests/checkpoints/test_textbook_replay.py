"""The textbook, given the weights and the batch of a recording, computes what the recorded program has computed."""
import importlib.util
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from reference.errors import UserError
from shardlab.compare import recording
from shardlab.compare.names import Key
from shardlab.compare.their_runs import RECORDER, are_recordings, compared, describe, megatron
from shardlab.compare.their_runs.differences import Comparison
from shardlab.compare.their_runs.frameworks import in_common_names
from shardlab.compare.their_runs.ours import read_ours, whole_of
from shardlab.compare.their_runs.records import TheirKey, read
from shardlab.compare.their_runs.replay import replay
from shardlab.compare.their_runs.textbook import main
from tests.checkpoints import golden
from tests.checkpoints.test_transformers import random_model
from tests.mpi_impl.test_their_runs import write
from tests.program import pretrain

H, HEADS, LAYERS, V, B, S, EPSILON = 8, 2, 2, 11, 2, 5, 1e-5
CONFIG = {"model_type": "gpt2", "n_layer": LAYERS, "n_embd": H, "n_head": HEADS, "vocab_size": V, "n_positions": S}
SHAPES = {"ln_1.weight": (H,), "ln_1.bias": (H,), "attn.c_attn.weight": (H, 3 * H), "attn.c_attn.bias": (3 * H,),
          "attn.c_proj.weight": (H, H), "attn.c_proj.bias": (H,), "ln_2.weight": (H,), "ln_2.bias": (H,),
          "mlp.c_fc.weight": (H, 4 * H), "mlp.c_fc.bias": (4 * H,), "mlp.c_proj.weight": (4 * H, H),
          "mlp.c_proj.bias": (H,)}


# ---- a GPT-2 of its own ---------------------------------------------------------------------------------------------


def weights_of(seed):
    shapes = {"wte.weight": (V, H), "wpe.weight": (S, H), "ln_f.weight": (H,), "ln_f.bias": (H,)}
    shapes |= {f"h.{i}.{name}": shape for i in range(LAYERS) for name, shape in SHAPES.items()}
    rng = np.random.default_rng(seed)
    return {f"transformer.{name}": rng.normal(size=shape) / 2 for name, shape in shapes.items()}


def norm(x, weight, bias):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + EPSILON) * weight + bias


def softmax(x):
    exponentials = np.exp(x - x.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)


def forward(w, tokens, targets):
    """Compute a GPT-2 -> the mean loss of the targets that are not -100, and the outputs of modules, by name."""
    seen = {}

    def see(name, x):
        seen[f"{name} output"] = x
        return x

    x = w["transformer.wte.weight"][tokens] + w["transformer.wpe.weight"]
    for layer in (f"transformer.h.{i}" for i in range(LAYERS)):
        p = {name: w[f"{layer}.{name}"] for name in SHAPES}
        y = see(f"{layer}.ln_1", norm(x, p["ln_1.weight"], p["ln_1.bias"]))
        q, k, v = np.moveaxis((y @ p["attn.c_attn.weight"] + p["attn.c_attn.bias"]).reshape(B, S, 3, HEADS, -1),
                              (2, 3), (0, 2))
        scores = np.where(np.tri(S, dtype=bool), q @ np.swapaxes(k, -1, -2) / np.sqrt(H / HEADS), -np.inf)
        y = np.swapaxes(softmax(scores) @ v, 1, 2).reshape(B, S, H)
        x = x + see(f"{layer}.attn", y @ p["attn.c_proj.weight"] + p["attn.c_proj.bias"])
        y = see(f"{layer}.ln_2", norm(x, p["ln_2.weight"], p["ln_2.bias"])) @ p["mlp.c_fc.weight"] + p["mlp.c_fc.bias"]
        y = y / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)))
        x = see(layer, x + see(f"{layer}.mlp", y @ p["mlp.c_proj.weight"] + p["mlp.c_proj.bias"]))
    x = see("transformer.ln_f", norm(x, w["transformer.ln_f.weight"], w["transformer.ln_f.bias"]))
    logits = see("lm_head", x @ w["transformer.wte.weight"].T)
    picked = np.take_along_axis(softmax(logits), np.maximum(targets, 0)[..., None], -1)[..., 0]
    return -(np.log(picked) * (targets >= 0)).sum() / (targets >= 0).sum(), seen


def recorded(folder, w, tokens, labels, seen=(), more=()):
    """Write a recording of a step on 2 x 2 ranks: samples are divided, and the rows of all matrices."""
    tensors = {(1, "batch", "input_ids"): (tokens, "i[dp] j"), (1, "batch", "labels"): (labels, "i[dp] j")}
    tensors |= {(1, "parameters", name): (x, "i[tp] j" if x.ndim == 2 else "i") for name, x in w.items()}
    tensors |= {(1, "forward", name): (x, "i[dp] j k") for name, x in dict(seen).items()}
    return write(folder, tensors | dict(more), {"dp": 2, "tp": 2})


def model_in(folder, **changes):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    return str(folder)


def batch(seed, shifted):
    """Draw tokens and labels, of which some do not count -> also the token to predict at each position."""
    rng = np.random.default_rng(seed)
    text = rng.integers(V, size=(B, S + 1))
    tokens, targets = text[:, :-1], np.where(rng.random((B, S)) < 0.2, -100, text[:, 1:])
    targets[0, 0] = text[0, 1]
    if shifted:
        return tokens, targets, targets
    labels = np.where(rng.random((B, S)) < 0.2, -100, tokens)
    labels[0, 1] = tokens[0, 1]
    return tokens, labels, np.concatenate([labels[:, 1:], np.full((B, 1), -100)], 1)


@given(seed=st.integers(0, 1000), shifted=st.booleans())
def test_it_computes_what_a_gpt2_does_and_its_gradients_are_derivatives(tmp_path_factory, seed, shifted):
    tmp, w = tmp_path_factory.mktemp("replay"), weights_of(seed)
    tokens, labels, targets = batch(seed, shifted)
    _, seen = forward(w, tokens, targets)
    run = read(recorded(tmp / "run", w, tokens, labels, seen))
    again = replay(run, model_in(tmp / "model"))
    found = Comparison(again, run).findings()
    assert not found.differences and found.compared == len(seen) == 4 * LAYERS + LAYERS + 2
    rng = np.random.default_rng(seed)
    for name, x in w.items():
        step = rng.normal(size=x.shape)
        far, near, back, behind = (forward(w | {name: x + i * 1e-3 * step}, tokens, targets)[0] for i in (2, 1, -1, -2))
        along = (again.whole(TheirKey(1, "gradients", name, 0)) * step).sum()
        slope = (8 * (near - back) - (far - behind)) / 12e-3        # but for the fourth power of the step
        assert abs(slope - along) <= 1e-6 * max(1, abs(along)), name


def test_the_program_names_the_run_that_is_wrong(tmp_path, capsys, monkeypatch):
    w, (tokens, labels, targets) = weights_of(0), batch(0, False)
    _, seen = forward(w, tokens, targets)
    right = recorded(tmp_path / "right", w, tokens, labels, seen)
    seen["transformer.h.1.attn output"] = 1.01 * seen["transformer.h.1.attn output"]
    wrong = recorded(tmp_path / "wrong", w, tokens, labels, seen)
    monkeypatch.setattr(sys, "argv", ["textbook", f"{model_in(tmp_path / 'model')}/config.json", right, wrong])
    with pytest.raises(SystemExit, match="1"):
        main()
    said = capsys.readouterr().out
    assert said.startswith(f"The textbook and {right} agree: 12 tensors of step 1 were compared, in float64 with")
    assert f"The textbook and {wrong} differ. The first tensor, in the order of computation:\n\n" \
        "  step 1, forward: transformer.h.1.attn output\n" in said and f"ranks 0, 1, 2, 3 of {wrong}, layer 1" in said


@pytest.mark.parametrize("config, change, said", [
    ({"vocab_size": 9}, {}, "transformer.wte.weight as [11, 8], but the model of the config.json asks for [9, 8]"),
    ({"n_layer": 3}, {}, "has no transformer.h.2.ln_1.weight among its parameters; it has transformer.h."),
    ({"model_type": "bert"}, {}, "this program has a GPT, so it must be gpt2 or llama"),
    ({}, {"input_ids": None}, "has no input_ids or tokens or text among its batch; it has labels"),
    ({}, {"labels": np.zeros((B, S + 1), np.int64)}, "has tokens [2, 5] and targets [2, 6], but both must be [b, s]"),
    ({}, {"input_ids": np.full((B, S), V)}, "has the token 11, but the model of")])
def test_what_does_not_belong_together_is_refused(tmp_path, config, change, said):
    w, (tokens, labels, _) = weights_of(0), batch(0, False)
    arrays = {"input_ids": tokens, "labels": labels} | change
    tensors = {(1, "batch", name): (x, "i[dp] j") for name, x in arrays.items() if x is not None}
    tensors |= {(1, "parameters", name): (x, "i j"[:2 * x.ndim - 1]) for name, x in w.items()}
    with pytest.raises(UserError, match=re.escape(said)):
        replay(read(write(tmp_path / "run", tensors, {"dp": 1})), model_in(tmp_path / "model", **config))


def test_gradient_accumulation_is_refused(tmp_path):
    """The textbook computes the gradient of one batch, not the mean of several."""
    w, (tokens, labels, targets) = weights_of(0), batch(0, False)
    folder = recorded(tmp_path / "run", w, tokens, labels, forward(w, tokens, targets)[1])
    for path in Path(folder).glob("*.jsonl"):
        lines = path.read_text().splitlines()
        again = next(line for line in lines if '"input_ids"' in line).replace('"call": 0', '"call": 1')
        path.write_text("\n".join([*lines, again, ""]))
    with pytest.raises(UserError, match="several batches in a step"):
        replay(read(folder), model_in(tmp_path / "model"))


# ---- Megatron-core's names ------------------------------------------------------------------------------------------


MEGATRON = {"ln_1": "input_layernorm", "attn.c_attn": "self_attention.linear_qkv", "ln_2": "pre_mlp_layernorm",
            "attn.c_proj": "self_attention.linear_proj", "mlp.c_fc": "mlp.linear_fc1", "mlp.c_proj": "mlp.linear_fc2"}
MEGATRON_MODEL = {"wte.weight": "embedding.word_embeddings.weight",
                  "wpe.weight": "embedding.position_embeddings.weight",
                  "ln_f.weight": "decoder.final_layernorm.weight", "ln_f.bias": "decoder.final_layernorm.bias"}


def as_megatron(w):
    """Return GPT-2's weights as Megatron-core has them: transposed, with q, k and v of a head next to one another."""
    found = {"output_layer.weight": (w["transformer.wte.weight"], "v[tp] h")}
    for name, x in w.items():
        short = name.removeprefix("transformer.")
        if short in MEGATRON_MODEL:
            found[MEGATRON_MODEL[short]] = x, "v[tp] h" if short == "wte.weight" else "i j"[:2 * x.ndim - 1]
            continue
        _, layer, rest = short.split(".", 2)
        module, own = rest.rsplit(".", 1)
        if module == "attn.c_attn":         # [.., 3 a d] -> [.., a 3 d]
            x = x.reshape(*x.shape[:-1], 3, HEADS, -1).swapaxes(-2, -3).reshape(x.shape)
        dims = "i"
        if own == "weight" and x.ndim == 2:
            x, dims = x.T, "n[tp] m" if module in ("attn.c_attn", "mlp.c_fc") else "n m[tp]"
        elif module in ("attn.c_attn", "mlp.c_fc"):
            dims = "n[tp]"
        found[f"decoder.layers.{layer}.{MEGATRON[module]}.{own}"] = x, dims
    return found


@given(seed=st.integers(0, 1000), norms_inside=st.booleans())
def test_megatrons_weights_are_another_layout_of_gpt_2s(tmp_path_factory, seed, norms_inside):
    """Its activations are [s, b, h]. With Transformer Engine norms belong to the linear layers behind them."""
    tmp, w, (tokens, labels, targets) = tmp_path_factory.mktemp("replay"), weights_of(seed), batch(seed, True)
    _, seen = forward(w, tokens, targets)
    weights = as_megatron(w)
    if norms_inside:
        inside = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_",
                  "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
        weights = {re.sub("|".join(inside), lambda norm: inside[norm[0]], name): x for name, x in weights.items()}
    tensors = {(1, "batch", "tokens"): (tokens, "b s"), (1, "batch", "labels"): (labels, "b s")}
    tensors |= {(1, "parameters", name): x for name, x in weights.items()}
    for layer in range(LAYERS):
        for there, here in (("attn", "self_attention"), ("mlp", "mlp")):
            x = seen[f"transformer.h.{layer}.{there} output"]
            tensors[1, "forward", f"decoder.layers.{layer}.{here} output"] = x.swapaxes(0, 1), "s b h"
    run = read(write(tmp / "run", tensors, {"tp": 2}))
    again = replay(run, model_in(tmp / "model", tie_word_embeddings=False))
    found = Comparison(*in_common_names(again, run)).findings()
    assert not found.differences and found.compared == 2 * LAYERS


@given(g=st.integers(1, 3), each=st.integers(1, 3), d=st.integers(1, 3), t=st.integers(1, 3), seed=st.integers(0, 99))
def test_a_llamas_weights_in_megatrons_layout(g, each, d, t, seed):
    """A group's queries are before its key and its value; each rank has its rows of the gate before those of up."""
    rng, h, f, layer = np.random.default_rng(seed), 4, 2 * t, "blocks.0"
    c = SimpleNamespace(groups=g, num_attention_heads=g * each, head_size=d, swiglu=True, vocab_size=9)
    q, kv, gated = rng.normal(size=(h, g * each, d)), rng.normal(size=(h, 2, g, d)), rng.normal(size=(h, 2, f))
    rows = [part for i in range(g) for part in (q[:, i * each:(i + 1) * each].reshape(h, -1), kv[:, 0, i], kv[:, 1, i])]
    qkv = np.concatenate(rows, 1).T
    fc1 = np.concatenate([gated[:, i, 2 * rank:2 * rank + 2].T for rank in range(t) for i in range(2)])
    for name, x, wanted in (("w_q", qkv, q), ("w_kv", qkv, kv), ("b_q", qkv[:, 1], q[1]), ("b_kv", qkv[:, 1], kv[1])):
        np.testing.assert_array_equal(megatron.our_tensor(f"{layer}.attention.{name}", x, t, c), wanted)
    np.testing.assert_array_equal(megatron.our_tensor(f"{layer}.mlp.w_in", fc1, t, c), gated)
    padded = rng.normal(size=(12, h))
    np.testing.assert_array_equal(megatron.our_tensor("output", padded, t, c), padded[:9])
    assert megatron.their_names(f"{layer}.attention.q_norm.weight") == (
        "decoder.layers.0.self_attention.q_layernorm.weight",)


def test_experts_of_megatron_are_refused(tmp_path):
    tokens, labels, _ = batch(0, True)
    tensors = {(1, "parameters", name): x for name, x in as_megatron(weights_of(0)).items()}
    run = read(write(tmp_path / "run", tensors | {(1, "batch", "tokens"): (tokens, "b s")}, {"tp": 2}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mixtral", "num_hidden_layers": 2, "hidden_size": 8,
                                                      "num_attention_heads": 2, "num_key_value_heads": 2}))
    with pytest.raises(UserError, match="whose experts are not read here"):
        replay(run, str(tmp_path))


# ---- a run of our own -----------------------------------------------------------------------------------------------


LLAMA = """--num-layers 2 --hidden-size 16 --num-attention-heads 4 --group-query-attention --num-query-groups 2 --swiglu
    --position-embedding-type rope --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights
    --ffn-hidden-size 24 --seq-length 8 --micro-batch-size 1 --global-batch-size 2 --vocab-size 300 --split 8,2
    --dtype float64 --tensor-model-parallel-size 2 --sequence-parallel --train-iters 400 --exit-interval 2
    --eval-iters 0 --hidden-dropout 0 --attention-dropout 0""".split()
LLAMA_THERE = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 4,
               "num_key_value_heads": 2, "intermediate_size": 24, "max_position_embeddings": 8, "rms_norm_eps": 1e-5}


def test_a_run_of_our_own_is_compared_with_one_of_transformers_names(ranks, corpus, tmp_path):
    """The other has the weights and the batch of ours, and what the textbook computes of them; then a wrong element."""
    mine, folder = str(tmp_path / "mine"), tmp_path / "model"
    ranks.run(4, pretrain, [*LLAMA, *corpus, "--record", mine])
    ours, about = read_ours(mine), recording.read(mine)
    targets = whole_of(about, Key(1, "batch", "targets")).astype(np.int64)
    given = {(1, "batch", "labels"): (targets, "i j")}
    for key in ours.order:
        if key.iteration == 1 and key.phase in ("batch", "parameters"):
            x = ours.whole(key)
            given[key[:3]] = x.astype(np.int64) if key.phase == "batch" else x, " ".join("ijk"[:x.ndim])
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_THERE | {"vocab_size": about.about.model.vocab_size}))
    again = replay(read(write(tmp_path / "given", given, {})), str(folder))
    computed = given | {key[:3]: (again.whole(key), " ".join("ijk"[:again.whole(key).ndim]))
                        for key in again.order}
    theirs = write(tmp_path / "theirs", computed, {})
    assert are_recordings(mine, theirs) and are_recordings(theirs, mine)
    text, differ = compared(theirs, mine)
    assert not differ, text
    found = Comparison(read(theirs), ours).findings()
    assert {key.phase for key in ours.parts if key in read(theirs).parts} == {
        "batch", "parameters", "forward", "backward", "gradients"} and found.compared > 60
    name = (1, "backward", "model.layers.0.self_attn output")
    computed[name][0][1, 2, 3] += 1e-6
    text, differ = compared(write(tmp_path / "wrong", computed, {}), mine)
    assert differ and "step 1, backward: gradient of model.layers.0.self_attn output" in text, text


# ---- transformers itself --------------------------------------------------------------------------------------------


@pytest.mark.deep
@pytest.mark.parametrize("kind", ["tied", "untied", "Llama", "Mistral", "Qwen2", "Qwen3"])
def test_it_computes_what_transformers_does(transformers, tmp_path, kind):
    """All in float64, also the loss, which transformers itself would compute in float32."""
    import torch

    class_name, config = golden.KINDS[kind]
    model = random_model(transformers, class_name, config, 1)
    model.config.save_pretrained(tmp_path / "model")
    found = importlib.util.spec_from_file_location("shardlab_recorder", Path(RECORDER))
    recorder = importlib.util.module_from_spec(found)
    found.loader.exec_module(recorder)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    ids = torch.tensor(golden.TOKENS)
    watch = recorder.Recorder(tmp_path / "run", model, optimizer, steps=1)
    watch.batch(input_ids=ids, labels=ids)
    logits = model(input_ids=ids).logits[:, :-1]
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
    optimizer.step()
    run = read(str(tmp_path / "run"))
    comparison = Comparison(replay(run, str(tmp_path / "model")), run)
    text, differ = describe(comparison)
    assert not differ, text
    assert {form for form, _ in comparison.roundings.values()} == {"float64"}
    assert {key.phase for key in comparison.a.parts if key in run.parts} == {"forward", "backward", "gradients"}
