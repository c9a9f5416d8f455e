"""transformers' layouts: what it has saved computes and learns the same here, on any topology, and we save it again.

Where transformers is not installed, tests/checkpoints/golden.json says what it has computed.
"""
import errno
import json
import os
import tempfile
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from mpi_impl.checkpoints import huggingface
from mpi_impl.checkpoints.huggingface import INDEX, WEIGHTS, Weights, check_weights, load_weights, places_of, save_model
from mpi_impl.checkpoints.huggingface_config import CONFIG, config_of, layout_of, read_config
from mpi_impl.data.tokenizer import NullTokenizer
from reference.config import ARCHITECTURES, ExpertsConfig, ModelConfig, Recompute
from reference.models.bert import SCORES
from reference.models.model import TUNED, model_tensors
from reference.parallel import stages
from reference.params import leaves
from reference.precision import Precision
from tests.allocated import most_bytes
from tests.cases import Plan
from tests.checkpoints.golden import FAMILIES, KINDS, STEPS, along, golden_batch
from tests.checkpoints.runs import (Run, agrees, compute_on, empty, learn_and_save, model_in, refuses, same_tensors,
                                    taking_turns, tensors_agree, weights_of, write_model)
from tests.program import refusal
from tests.strategies import ANY_MODEL, cases
from tests.training_theorems import connected

PLACES = [      # t, d, the rest, and whether the sequence is sharded; e counts where the model has experts
    (1, 1, Plan(), False),
    (2, 1, Plan(), False),
    (4, 1, Plan(), True),       # of Llamas two or four ranks hold copies of a head
    (1, 2, Plan(e=2), False),
    (1, 1, Plan(2), False),
    (2, 1, Plan(2, "zb-h1"), True),
    (1, 4, Plan(zero_stage=3, cpu_offload=True, e=2), False),
    (2, 2, Plan(2, zero_stage=1, e=2), True),
    (4, 2, Plan(zero_stage=2, bucket_size=50, e=2), False),
    (2, 2, Plan(2, zero_stage=3, e=2), True),
    (2, 2, Plan(2, "gpipe", recompute=Recompute("full"), zero_stage=2), False),
]
EVERYWHERE = [case for family in FAMILIES for case in taking_turns(family, PLACES)]


NOT_IN_EVERY_VERSION = {"position_embedding_type", "rope_theta", "rope_scaling", "num_experts", "head_dim",
                        "attention_bias", "mlp_bias"}      # of transformers, nor in a Mistral


def run_of(model, t, d, plan, sequence_parallel=False) -> Run:
    sharded = sequence_parallel and (t < 4 or model.architecture == "gpt")      # a BERT here has six positions
    return Run(model, t, d, plan if model.experts else replace(plan, e=1), sharded)


@pytest.mark.parametrize("kind, t, d, plan, sharded", EVERYWHERE)
def test_golden_logits_losses_gradients_and_steps(ranks, golden, folder, model, kind, t, d, plan, sharded):
    """They equal transformers' on any topology, to rounding."""
    run, batch = run_of(model, t, d, plan, sharded), golden_batch(KINDS[kind][0])
    found = ranks.run(run.n, compute_on, run, folder, [batch] * (STEPS if "after" in golden else 1))
    agrees(found, golden.get("logits"), golden["losses"], 1e-13)
    tensors_agree(run, found, "gradients", golden["gradients"], 1e-12, along)
    if "after" in golden:
        tensors_agree(run, found, "after", golden["after"], 1e-9, along)


# ---- and out again --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_saved_is_what_was_loaded(ranks, folder, model, tmp_path):
    """The tensors are bitwise identical, with the same names and shapes, and config.json says the same. (A Mistral is a
    Llama.)
    """
    again = empty(tmp_path / "again")
    ranks.run(1, learn_and_save, Run(model), folder, again)
    same_tensors(again, folder)
    with safe_open(again / WEIGHTS, "np") as file:
        assert file.metadata() == {"format": "pt"}
    (folder / CONFIG).write_text((folder / CONFIG).read_text().replace("Mistral", "Llama").replace("mistral", "llama"))
    assert read_config(again, model.architecture) == read_config(folder, model.architecture)
    ours, theirs = (json.loads((place / CONFIG).read_text()) for place in (again, folder))
    same = ours.keys() & theirs.keys() - {"pad_token_id", "head_dim"}       # which may be null in one of the two
    assert {name: ours[name] for name in same} == {name: theirs[name] for name in same}
    assert ours.keys() - theirs.keys() <= NOT_IN_EVERY_VERSION
    assert sorted(path.name for path in again.iterdir()) == [CONFIG, WEIGHTS], "nothing is left over"


def sharding(draw) -> dict[str, Any]:
    """Draw how replicas share a model."""
    stage = draw(st.integers(0, 3), "ZeRO stage")
    return dict(bucket_size=draw(st.sampled_from([1, 100, 1000]), "bucket size"), zero_stage=stage,
                cpu_offload=stage > 0 and draw(st.booleans(), "offload"))


@st.composite
def classics(draw):
    """Draw a GPT-2 or a BERT of ragged sizes, a case of it, and its ranks."""
    case = draw(cases(sizes=st.sampled_from([1, 2, 3, 4]), architectures=ANY_MODEL, max_position_embeddings=9,
                      position_embedding_type="learned_absolute", rotary_percent=1.0, llama=False))
    if case.model.architecture == "gpt":
        case = replace(case, model=replace(case.model, apply_residual_connection_post_layernorm=False))
    p = draw(st.integers(1, min(2, case.model.num_layers)), "p")
    d = draw(st.integers(1, min(3, 8 // (case.t * p))), "d")
    return case, Run(case.model, case.t, d, Plan(p, **sharding(draw)), case.sequence_parallel)


@st.composite
def llamas(draw):
    """Draw a Llama, a Qwen 2 or a Qwen 3 of ragged sizes, or one with experts, a case of it, and its ranks."""
    t, c, d, p, e = draw(st.sampled_from([
        (1, 1, 1, 2, 0), (1, 1, 3, 2, 0), (2, 1, 1, 3, 0), (2, 1, 2, 2, 0), (3, 1, 1, 2, 0), (4, 1, 2, 1, 0),
        (1, 1, 2, 1, 2), (1, 1, 4, 1, 2), (2, 1, 3, 1, 3), (1, 2, 1, 2, 2), (2, 2, 2, 1, 4), (2, 1, 2, 2, 2)]))
    case = draw(cases(st.just(t), num_layers=draw(st.integers(p, p + 1)), max_position_embeddings=6, llama=False,
                      position_embedding_type="rope", rotary_percent=1.0, hidden_dropout=0.0, attention_dropout=0.0,
                      activation="gelu", apply_residual_connection_post_layernorm=False))
    heads, experts = case.model.num_attention_heads, None
    groups = [g for g in range(1, heads + 1) if heads % g == 0 and (g % t == 0 or t % g == 0)]
    kind = draw(st.sampled_from(["", "qk_layernorm"] + ["add_qkv_bias"] * (not e)))
    if e:
        number = e * draw(st.integers(1, 2))
        experts = ExpertsConfig(number, draw(st.integers(2, number)), moe_router_pre_softmax=kind == "qk_layernorm"
                                and draw(st.booleans()), moe_ffn_hidden_size=draw(st.sampled_from([None, t, 2 * t])))
    model = replace(
        case.model, normalization="RMSNorm", swiglu=True, add_bias_linear=False, ffn_hidden_size=3 * t, experts=experts,
        num_query_groups=draw(st.sampled_from(groups)), use_rope_scaling=draw(st.booleans()), rope_scaling_factor=32.0,
        kv_channels=2 * draw(st.integers(1, 3)), qk_layernorm=kind == "qk_layernorm",
        add_qkv_bias=kind == "add_qkv_bias")
    return case, Run(model, t, d, Plan(p, c=c, e=max(e, 1), **sharding(draw)))


@settings(max_examples=settings().max_examples // 2)
@given(st.one_of(classics(), llamas()))
def test_any_model_on_any_ranks_is_saved_as_it_was_loaded(ranks, case_and_run):
    """Bitwise, for any sizes, groups and padding of the vocabulary, and any ranks that share experts or hold copies."""
    case, run = case_and_run
    full_name = layout_of(run.model).full_name
    tensors = {full_name(place.name): case.array(place.name, *place.shape)
               for _, _, places in places_of(run.model) for place in places}
    with tempfile.TemporaryDirectory() as root:
        config = config_of(run.model, NullTokenizer(3), "float64")
        folder, again = write_model(Path(root, "model"), config, tensors), empty(Path(root, "again"))
        assert config_of(model_in(folder), NullTokenizer(3), "float64") == config
        ranks.run(run.n, learn_and_save, run, folder, again)
        same_tensors(again, folder)


@pytest.mark.parametrize("dtype, t, d, plan, precision", [
    (np.float32, 2, 2, Plan(zero_stage=3), "bfloat16"), (ml_dtypes.bfloat16, 1, 1, Plan(2), "float64")])
@pytest.mark.parametrize("kind", ["tied"])
def test_narrow_weights_are_widened_and_never_narrowed(ranks, golden, folder, model, tmp_path, dtype, t, d, plan,
                                                       precision):
    """A model may compute with 16 bits: master weights, and what is saved of them, have the format of the master's."""
    narrow, again = {name: x.astype(dtype) for name, x in weights_of(golden).items()}, empty(tmp_path / "again")
    write_model(folder, golden["config"], narrow)
    run = Run(model, t, d, plan, precision=Precision(precision))
    ranks.run(run.n, learn_and_save, run, folder, again)
    main = run.precision.main
    for name, x in load_file(again / WEIGHTS).items():
        assert x.dtype == main and np.array_equal(x, narrow[name].astype(main)), name
    assert json.loads((again / CONFIG).read_text())["dtype"] == main


DECODER, WORDS = "cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"


@pytest.mark.parametrize("kind", ["tied", "original"])
def test_every_form_in_which_a_model_is_found(ranks, golden, folder, model, tmp_path):
    """It may lack the prefix, have buffers of older versions, tied tensors twice, or the names of the first published
    BERTs; and be in several files.
    """
    w = weights_of(golden)
    bare = {name.removeprefix("transformer.").removeprefix("bert."): x for name, x in w.items()}
    if model.architecture == "gpt":
        forms = [bare | {"h.0.attn.bias": np.tril(np.ones((1, 1, 6, 6), bool)), "h.1.attn.masked_bias": np.array(-1e4)},
                 w | {"lm_head.weight": bare["wte.weight"]}]
    else:
        forms = [w | {"bert.embeddings.position_ids": np.arange(7)[None], DECODER: w[WORDS],
                      "cls.predictions.decoder.bias": w["cls.predictions.bias"]},
                 {name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): x
                  for name, x in w.items()}]
    for i, tensors in enumerate([bare, *forms]):
        form = write_model(tmp_path / f"form {i}", golden["config"], tensors)
        ranks.run(2, learn_and_save, Run(model, 2), form, form)       # over itself, too
        same_tensors(form, folder)
    several = write_model(tmp_path / "several", golden["config"], {})
    (several / WEIGHTS).unlink()
    parts = {f"model-{i}-of-3.safetensors": sorted(bare)[i::3] for i in range(3)}
    for file, inside in parts.items():
        save_file({name: bare[name] for name in inside}, several / file)
    (several / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": {
        name: file for file, inside in parts.items() for name in inside}}))
    ranks.run(2, learn_and_save, Run(model, plan=Plan(2)), several, several)
    same_tensors(several, folder)


@pytest.mark.parametrize("kind", ["original", "words alone", "choices"])
@pytest.mark.parametrize("heads", ARCHITECTURES["bert"])
def test_missing_heads_are_skipped(ranks, folder, model, heads, tmp_path):
    """A model that is to be tuned begins with a new head if the file has none; any other head must be there. The head
    of another task has another shape.
    """
    other, there = replace(model, heads=heads), model.heads
    if "choice" in there and heads[0] in SCORES and heads != there:
        return refuses(lambda: check_weights(str(folder), other), "has classifier.")
    lacking = set(heads) - set(there) - TUNED.keys()
    if lacking:
        tensor = "cls.predictions.transform" if "lm" in lacking else "pooler"
        refuses(lambda: check_weights(str(folder), other), f"has no tensor {tensor}.dense.weight in")
        return
    again = empty(tmp_path / "again")
    ranks.run(2, learn_and_save, Run(other, 2), folder, again)
    before, after = load_file(folder / WEIGHTS), load_file(again / WEIGHTS)
    new = after.keys() - before.keys()
    layer = "qa_outputs" if heads == ("span",) else "classifier"
    assert new == ({f"{layer}.weight", f"{layer}.bias"} if set(heads) - set(there) else set()) | (
        {"bert.pooler.dense.weight", "bert.pooler.dense.bias"} if there == ("lm",) != heads != ("span",) else set())
    assert all(x.any() == name.endswith("weight") if name in new else np.array_equal(x, before[name])
               for name, x in after.items()), "what is new has its initial values"


class Counted:
    """A tensor in a file, which notes how many of its elements are read."""

    def __init__(self, x, read: list[int]):
        self.x, self.read = x, read

    def __getitem__(self, place):
        found = self.x[place]
        self.read.append(found.size)
        return found


@pytest.mark.parametrize("kind", ["tied", "original"])
def test_no_rank_reads_more_than_its_part(folder, model):
    """All ranks together read each element of a split tensor once, each rank all of a replicated one; no padding."""
    run, weights, read = Run(replace(model, make_vocab_size_divisible_by=2), 4), Weights(str(folder)), list[int]()
    of_tensor = weights.slice
    weights.slice = lambda name: Counted(of_tensor(name), read)
    for segment in stages.layout_of(model_tensors(run.model), run.parallel()).segments:
        read.clear()
        for rank in range(4):
            weights.shard(segment, rank, np.float64)
        assert sum(read) == prod(segment.tensor.shape) * (4 if segment.tensor.split is None else 1)


LARGE = ModelConfig(8, 64, 4, 100, 8)


@pytest.mark.parametrize("run", [
    Run(LARGE, 2, 1, Plan(2)),
    Run(replace(LARGE, architecture="bert", heads=("lm", "sop"), apply_residual_connection_post_layernorm=True), 1, 2,
        Plan(2, zero_stage=3))])
def test_no_rank_holds_the_whole_model(ranks, tmp_path, run):
    """While it saves or loads, a rank has little more than three times the largest tensor, beside its own part."""
    sizes = [8 * prod(tensor.shape) for _, tensor in leaves(model_tensors(run.model))]
    for most in ranks.run(run.n, bytes_at_once, run, tmp_path):
        assert max(most) < 3 * max(sizes) + (1 << 17) < sum(sizes) / 4


def bytes_at_once(group, run: Run, folder) -> tuple[int, int]:
    """Return the peak of new bytes in a save and in a load."""
    with connected(group, run.parallel()) as topology:
        trainer = run.trainer(topology)
        tokenizer = NullTokenizer(run.model.vocab_size - 1) if group.rank == 0 else None
        saving = most_bytes(lambda: save_model(trainer, str(folder), tokenizer))
        return saving, most_bytes(lambda: load_weights(trainer, str(folder)))


# ---- files that cannot be loaded ------------------------------------------------------------------------------------


def edit(name: str, tensor):
    """Return a function that changes a tensor in the file of a folder, or removes it if it is None."""
    def write(folder: Path):
        tensors = load_file(folder / WEIGHTS) | {name: tensor}
        save_file({name: x for name, x in tensors.items() if x is not None}, folder / WEIGHTS)
    return write


def rename(folder: Path, to: str):
    (folder / WEIGHTS).rename(folder / to)


def truncate(folder: Path):
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[:-1])


def index(folder: Path, file: str):
    rename(folder, "a.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"wte.weight": file}}))


C_FC = "transformer.h.1.mlp.c_fc.weight"


@pytest.mark.parametrize("kind", ["tied"])
@pytest.mark.parametrize("damage, words", [
    (partial(rename, to="old"), "has no model.safetensors, nor"),
    (partial(rename, to="pytorch_model.bin"), "pytorch_model.bin is a pickle"),
    (truncate, "model.safetensors is not a safetensors file, or is damaged"),
    (edit(C_FC, None), "has no tensor h.1.mlp.c_fc.weight"), (edit(C_FC, np.zeros((32, 8))), "as [32, 8]"),
    (edit(C_FC, np.zeros((8, 32), int)), "in the format I64"),
    (edit("h.2.ln_1.bias", np.zeros(8)), "has a tensor h.2.ln_1.bias"),
    (partial(index, file="../b.safetensors"), "'../b.safetensors'"),
    (partial(index, file="b.safetensors"), "b.safetensors cannot be read"),
])
def test_weights_that_are_not_the_models_are_refused(folder, model, damage, words):
    damage(folder)
    refuses(lambda: check_weights(str(folder), model), words)


@pytest.mark.parametrize("kind", ["tied"])
@pytest.mark.parametrize("rows", [1, 4, 1024])
def test_a_tied_table_may_be_written_twice_if_both_are_equal(folder, model, rows):
    """They are compared to the last row, whatever the size of a block."""
    twice = load_file(folder / WEIGHTS)["transformer.wte.weight"]
    with mock.patch.object(huggingface, "ROWS", rows):
        edit("lm_head.weight", twice)(folder)
        check_weights(str(folder), model)
        twice[-1, -1] += 1
        edit("lm_head.weight", twice)(folder)
        refuses(lambda: check_weights(str(folder), model), "has a tensor lm_head.weight, for which")


@pytest.mark.parametrize("kind", ["tied"])
def test_a_file_that_one_rank_cannot_read_ends_all(ranks, folder, model, tmp_path):
    other = empty(tmp_path / "other")
    (other / CONFIG).write_bytes((folder / CONFIG).read_bytes())
    (said,) = set(ranks.run(4, refusal, load_from_two_folders, Run(model, 2, 2), folder, other))
    assert said.startswith(f"--load-hf {other} has no model.safetensors")


def load_from_two_folders(group, run: Run, folder, other):
    """Load the model on all ranks, on rank 2 from another folder than on the others."""
    with connected(group, run.parallel()) as topology:
        load_weights(run.trainer(topology), str(other if group.rank == 2 else folder))


def test_what_cannot_be_written_leaves_what_was_there(ranks, tmp_path):
    """All ranks hear of it, in a sentence, however much they have still to send; the folder is as it was."""
    there = write_model(tmp_path / "there", {"some": "model"}, {"x": np.zeros(3)})
    before = {path.name: path.read_bytes() for path in there.iterdir()}
    (said,) = set(ranks.run(4, refusal, save_on_a_full_disk, there))
    assert said == f"{there} cannot be written: No space left on device."
    assert {path.name: path.read_bytes() for path in there.iterdir()} == before


def save_on_a_full_disk(group, folder):
    with mock.patch.object(huggingface, "write_tensors", write_one_and_fail):
        bytes_at_once(group, Run(ModelConfig(2, 256, 4, 100, 8), 2, 1, Plan(2)), folder)


def write_one_and_fail(path, dtype, shapes, elements, metadata):
    next(elements)
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
