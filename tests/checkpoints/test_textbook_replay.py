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
from shardlab.compare.their_runs.replay import batch_of, replay
from shardlab.compare.their_runs.textbook import main
from tests.checkpoints import golden
from tests.checkpoints.test_transformers import random_model
from tests.mpi_impl.test_their_runs import edit, write
from tests.program import pretrain

GOLDEN = json.loads(golden.GOLDEN.read_text())
KINDS = "tied", "untied", "Llama", "Mistral", "Qwen2", "Qwen3"
LAYERS, HEADS, TOKENS = 2, 4, np.array(golden.TOKENS)


# ---- the models of transformers, of which golden.json has the results -----------------------------------------------


def weights_of(kind="tied"):
    return {name: golden.weight(name, shape) for name, shape in GOLDEN[kind]["tensors"].items()}


def recorded(folder, seen=(), kind="tied", tokens=TOKENS, labels=TOKENS):
    """Write a recording of a step on 2 x 2 ranks: samples are divided, and the rows of all matrices."""
    tensors = {(1, "batch", "input_ids"): (tokens, "i[dp] j"), (1, "batch", "labels"): (labels, "i[dp] j")}
    tensors |= {(1, "parameters", name): (x, "i[tp] j" if x.ndim == 2 else "i") for name, x in weights_of(kind).items()}
    tensors |= {(1, "forward", name): (x, "i[dp] j k") for name, x in dict(seen).items()}
    return write(folder, tensors, {"dp": 2, "tp": 2})


def model_in(folder, kind="tied", **changes):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(GOLDEN[kind]["config"] | changes))
    return str(folder)


def outputs_of(tmp):
    """Return the outputs of a GPT-2's modules, as the textbook computes them."""
    again = replay(read(recorded(tmp / "weights")), model_in(tmp / "gpt2"))
    return {key.name: again.whole(key) for key in again.order if key.phase == "forward" and "output" in key.name}


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_it_computes_the_logits_and_the_gradients_of_transformers(tmp_path, kind, shifted):
    """Labels are the tokens themselves, or those that follow."""
    given = {"tokens": TOKENS[:, :-1], "labels": TOKENS[:, 1:]} if shifted else {}
    again = replay(read(recorded(tmp_path / "run", kind=kind, **given)), model_in(tmp_path / "model", kind))
    logits = again.whole(TheirKey(1, "forward", "lm_head output", 0))[0, :4]
    np.testing.assert_allclose(logits, GOLDEN[kind]["logits"], rtol=0, atol=1e-12)
    for name, expected in GOLDEN[kind]["gradients"].items():
        found = golden.along(name, again.whole(TheirKey(1, "gradients", name, 0)))
        assert found == pytest.approx(expected, abs=1e-12), name


@pytest.mark.parametrize("shifted", [False, True])
def test_labels_of_minus_100_do_not_count(tmp_path, shifted):
    given = np.where(TOKENS % 3 == 0, -100, TOKENS)
    tokens, labels = (TOKENS[:, :-1], given[:, 1:]) if shifted else (TOKENS, given)
    found = batch_of(read(recorded(tmp_path / "run", tokens=tokens, labels=labels)))
    np.testing.assert_array_equal(found.weights[:, :4], given[:, 1:] >= 0)
    np.testing.assert_array_equal((found.targets * found.weights)[:, :4], np.maximum(given[:, 1:], 0))
    assert shifted or not found.weights[:, 4].any()


def test_the_program_names_the_run_that_is_wrong(tmp_path, capsys, monkeypatch):
    seen = outputs_of(tmp_path)
    right = recorded(tmp_path / "right", seen)
    seen["transformer.h.1.attn output"] = 1.01 * seen["transformer.h.1.attn output"]
    wrong = recorded(tmp_path / "wrong", seen)
    monkeypatch.setattr(sys, "argv", ["textbook", f"{tmp_path / 'gpt2'}/config.json", right, wrong])
    with pytest.raises(SystemExit, match="1"):
        main()
    said = capsys.readouterr().out
    assert said.startswith(f"The textbook and {right} agree: {len(seen)} tensors of step 1 were compared, in float64")
    assert f"The textbook and {wrong} differ. The first tensor, in the order of computation:\n\n" \
        "  step 1, forward: transformer.h.1.attn output\n" in said and f"ranks 0, 1, 2, 3 of {wrong}, layer 1" in said


@pytest.mark.parametrize("config, change, said", [
    ({"vocab_size": 9}, {}, "transformer.wte.weight as [11, 8], but the model of the config.json asks for [9, 8]"),
    ({"n_layer": 3}, {}, "has no transformer.h.2.ln_1.weight among its parameters; it has transformer.h."),
    ({"model_type": "bert"}, {}, "this program has a GPT, so it must be gpt2 or llama"),
    ({}, {'"input_ids"': '"ids"'}, "has no input_ids or tokens or text among its batch; it has ids, labels"),
    ({}, {"labels": np.zeros((4, 6), np.int64)}, "has tokens [4, 5] and targets [4, 6], but both must be [b, s]"),
    ({}, {"tokens": np.full((4, 5), 11)}, "has the token 11, but the model of"),
    ({}, {'"labels", "call": 0': '"input_ids", "call": 1'}, "several batches in a step")])
def test_what_does_not_belong_together_is_refused(tmp_path, config, change, said):
    """Nor are several batches: the textbook computes the gradient of one, not the mean of several."""
    arrays = {name: x for name, x in change.items() if not isinstance(x, str)}
    folder = recorded(tmp_path / "run", **arrays)
    for old, new in change.items():
        if isinstance(new, str):
            edit(folder, old, new, *range(4))
    with pytest.raises(UserError, match=re.escape(said)):
        replay(read(folder), model_in(tmp_path / "model", **config))


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


@pytest.mark.parametrize("norms_inside", [False, True])
def test_megatrons_weights_are_another_layout_of_gpt_2s(tmp_path, norms_inside):
    """Its activations are [s, b, h]. With Transformer Engine norms belong to the linear layers behind them."""
    weights, seen = as_megatron(weights_of()), outputs_of(tmp_path)
    if norms_inside:
        inside = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_",
                  "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
        weights = {re.sub("|".join(inside), lambda norm: inside[norm[0]], name): x for name, x in weights.items()}
    tensors = {(1, "batch", "tokens"): (TOKENS, "b s"), (1, "batch", "labels"): (TOKENS, "b s")}
    tensors |= {(1, "parameters", name): x for name, x in weights.items()}
    for layer in range(LAYERS):
        for there, here in (("attn", "self_attention"), ("mlp", "mlp")):
            x = seen[f"transformer.h.{layer}.{there} output"]
            tensors[1, "forward", f"decoder.layers.{layer}.{here} output"] = x.swapaxes(0, 1), "s b h"
    run = read(write(tmp_path / "run", tensors, {"tp": 2}))
    again = replay(run, model_in(tmp_path / "model", tie_word_embeddings=False))
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
    tensors = {(1, "parameters", name): x for name, x in as_megatron(weights_of()).items()}
    run = read(write(tmp_path / "run", tensors | {(1, "batch", "tokens"): (TOKENS, "b s")}, {"tp": 2}))
    with pytest.raises(UserError, match="whose experts are not read here"):
        replay(run, model_in(tmp_path / "model", "Mixtral"))


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
@pytest.mark.parametrize("kind", KINDS)
def test_it_computes_what_each_module_of_transformers_does(transformers, tmp_path, kind):
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
