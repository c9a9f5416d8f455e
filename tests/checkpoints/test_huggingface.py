"""GPT-2's layout: what transformers has saved computes the same here, on any topology, and we save it again.

Where transformers is not installed, tests/checkpoints/gpt2_golden.json says what it has computed.
"""
import errno
import json
import os
from dataclasses import replace
from math import prod
from pathlib import Path
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from mpi_impl.checkpoints import huggingface
from mpi_impl.checkpoints.huggingface import INDEX, WEIGHTS, Weights, check_weights, load_weights, save_model
from mpi_impl.checkpoints.huggingface_config import CONFIG
from mpi_impl.data.tokenizer import NullTokenizer
from mpi_impl.parallel.model_state import ModelState
from mpi_impl.programs.arguments import parse
from mpi_impl.training.trainer import Trainer
from reference.batches import GPTBatch
from reference.models.gpt import gpt_tensors
from reference.models.model import model_tensors
from reference.parallel.stages import layout_of
from reference.params import leaves, tree_map, with_names
from reference.training.trainer import loss_and_gradients
from tests.allocated import most_bytes
from tests.checkpoints.gpt2_golden import TOKENS, direction
from tests.checkpoints.gpt2_runs import (GOLDEN_MODELS, P, T, compute_on, empty, full_name, learn_and_save, options,
                                         refuses, same_tensors, taking_turns, weights_of, whole_gradients, write_model)
from tests.checkpoints.reading import assert_read_once
from tests.program import pretrain, refusal
from tests.strategies import close
from tests.training_theorems import connected

TOPOLOGIES = [      # ranks, and options
    (1, ""),
    (2, f"{T} 2"),
    (4, f"{T} 4 --sequence-parallel --make-vocab-size-divisible-by 1"),
    (2, f"{P} 2"),
    (4, f"{T} 2 {P} 2 --sequence-parallel --pipeline-schedule zb-h1"),
    (4, "--zero-stage 1"),
    (3, "--zero-stage 2 --ddp-bucket-size 50"),
    (4, "--zero-stage 3 --cpu-offload"),
    (8, f"{T} 2 {P} 2 --zero-stage 1 --make-vocab-size-divisible-by 4"),
    (8, f"{T} 2 {P} 2 --zero-stage 3 --sequence-parallel"),
    (6, f"{P} 2 --zero-stage 2 --pipeline-schedule gpipe"),
]


@pytest.mark.parametrize("kind, n, more", taking_turns(sorted(GOLDEN_MODELS), TOPOLOGIES))
def test_golden_logits_loss_and_gradients(ranks, golden, folder, n, more):
    """They equal transformers' on any topology, to rounding."""
    batch = np.array(TOKENS * 3 if n in (3, 6) else TOKENS)
    found = ranks.run(n, compute_on, options(folder, f"{more} --global-batch-size {len(batch)}"), batch)
    for one in found:
        close(np.array(one.loss), np.array(golden["loss"]), 1e-13)
        if one.logits[0] is not None:
            close(np.concatenate(one.logits)[:, :golden["config"]["vocab_size"]], np.array(golden["logits"]), 1e-13)
    for name, grad in whole_gradients(found).items():
        theirs, shape = full_name(name), golden["tensors"][full_name(name)]
        along = (grad.reshape(shape) * direction(theirs, shape)).sum()
        close(np.array(along), np.array(golden["gradients"][theirs]), 1e-12)


def test_the_textbook_agrees_with_the_golden_file(golden):
    """The tensors are laid out by hand here, so that a wrong name cannot hide behind a wrong layer."""
    settings = parse(["--num-layers", "2", "--hidden-size", "8", "--num-attention-heads", "4", "--seq-length", "6",
                      "--hidden-dropout", "0", "--attention-dropout", "0"], 1)
    config, w = golden["config"], weights_of(golden)
    model = replace(settings.model(11), layernorm_epsilon=config["layer_norm_epsilon"],
                    untie_embeddings_and_output_weights=not config["tie_word_embeddings"],
                    activation={"gelu_new": "gelu", "gelu": "gelu_exact"}[config["activation_function"]])
    params = tree_map(lambda named: w[full_name(named.name)].reshape(named.leaf.shape), with_names(gpt_tensors(model)))
    tokens = np.array(TOKENS)
    loss, _ = loss_and_gradients(GPTBatch.unpack(tokens), params, model)
    close(np.array(loss), np.array(golden["loss"]), 1e-13)


@pytest.mark.parametrize("kind, n, more", taking_turns(sorted(GOLDEN_MODELS, reverse=True), TOPOLOGIES))
def test_what_is_saved_is_what_was_loaded(ranks, golden, folder, tmp_path, n, more):
    """The tensors are bitwise identical, with the same names, shapes and metadata, and so is config.json."""
    again = empty(tmp_path / "again")
    ranks.run(n, learn_and_save, options(folder, more), 0, again)
    same_tensors(again, folder)
    with safe_open(again / WEIGHTS, "np") as file:
        assert file.metadata() == {"format": "pt"}
    ours, theirs = (json.loads((place / CONFIG).read_text()) for place in (again, folder))
    assert ours == {name: theirs[name] for name in ours}
    assert sorted(path.name for path in again.iterdir()) == [CONFIG, WEIGHTS], "nothing is left over"


@pytest.mark.parametrize("n, more, m, other", [
    (4, f"{T} 2 {P} 2", 4, "--zero-stage 3"), (4, "--zero-stage 1", 2, f"{P} 2"), (4, "--zero-stage 3", 1, "")])
def test_what_was_learnt_is_saved(ranks, folder, tmp_path, n, more, m, other):
    """After some steps, too, and by whom it is saved makes no difference."""
    learnt, again = empty(tmp_path / "learnt"), empty(tmp_path / "again")
    ranks.run(n, learn_and_save, options(folder, more), 2, learnt)
    ranks.run(m, learn_and_save, options(learnt, other), 0, again)
    same_tensors(again, learnt)
    assert any(not np.allclose(x, load_file(folder / WEIGHTS)[name], atol=1e-4)
               for name, x in load_file(learnt / WEIGHTS).items())


@pytest.mark.parametrize("n, more", [(2, f"{T} 2 --zero-stage 0"), (2, "--zero-stage 1"), (1, "--zero-stage 3")])
def test_sixteen_bits_keep_the_weights_they_were_given(ranks, golden, folder, tmp_path, n, more):
    """The model computes with 16 bits; master weights, and what is saved of them, have all 32."""
    write_model(folder, golden["config"], {name: x.astype(np.float32) for name, x in weights_of(golden).items()})
    again = empty(tmp_path / "again")
    ranks.run(n, learn_and_save, [*options(folder, more), "--dtype", "float32", "--bf16"], 0, again)
    same_tensors(again, folder)
    assert json.loads((again / CONFIG).read_text())["dtype"] == "float32"


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_narrow_weights_are_widened(ranks, golden, folder, tmp_path, dtype):
    narrow = {name: x.astype(dtype) for name, x in weights_of(golden).items()}
    write_model(folder, golden["config"], narrow)
    again = empty(tmp_path / "again")
    ranks.run(2, learn_and_save, options(folder, f"{T} 2"), 0, again)
    for name, x in load_file(again / WEIGHTS).items():
        assert x.dtype == np.float64 and np.array_equal(x, narrow[name].astype(np.float64))


def test_every_form_in_which_a_model_is_found(ranks, kind, golden, folder, tmp_path):
    """It may lack the prefix, have buffers of older versions or a tied table twice, or be in several files."""
    w = {name.removeprefix("transformer."): x for name, x in weights_of(golden).items()}
    buffers = {"h.0.attn.bias": np.tril(np.ones((1, 1, 6, 6), bool)), "h.1.attn.masked_bias": np.array(-1e4)}
    twice = {"lm_head.weight": w["wte.weight"]} if kind == "tied" else {}
    for i, tensors in enumerate([w, w | buffers, weights_of(golden) | twice]):
        form = write_model(tmp_path / f"form {i}", golden["config"], tensors)
        ranks.run(2, learn_and_save, options(form, f"{P} 2"), 0, form)       # over itself, too
        same_tensors(form, folder)
    names = sorted(w)
    several = write_model(tmp_path / "several", golden["config"], {})
    (several / WEIGHTS).unlink()
    parts = {f"model-{i}-of-3.safetensors": names[i::3] for i in range(3)}
    for file, inside in parts.items():
        save_file({name: w[name] for name in inside}, several / file)
    (several / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": {
        name: file for file, inside in parts.items() for name in inside}}))
    ranks.run(2, learn_and_save, options(several, f"{T} 2"), 0, several)
    same_tensors(several, folder)


def test_no_rank_reads_more_than_its_part(folder):
    """All ranks together read each element of a split tensor once, and no padding."""
    settings = parse(options(folder, f"{T} 4 --make-vocab-size-divisible-by 2"), 4)
    layout = layout_of(gpt_tensors(settings.model(11)), settings.parallel)
    assert_read_once(Weights(str(folder)), layout.segments, 4)


@pytest.mark.parametrize("n, more, architecture", [
    (4, f"{P} 4", "gpt"), (4, f"{T} 2 {P} 2", "gpt"), (4, f"{P} 2 --zero-stage 3", "gpt"), (4, f"{T} 2 {P} 2", "bert"),
    (4, f"{P} 2 --zero-stage 3 --apply-residual-connection-post-layernorm", "bert")])
def test_no_rank_holds_the_whole_model(ranks, tmp_path, n, more, architecture):
    """While it saves or loads, a rank has little more than three times the largest tensor, beside its own part."""
    sizes = "--num-layers 8 --hidden-size 64 --seq-length 8 --dtype float64"
    for saving, loading, largest, whole in ranks.run(n, bytes_at_once, [*sizes.split(), *more.split()], tmp_path,
                                                        architecture):
        allowed = 3 * largest + (1 << 17)
        assert max(saving, loading) < allowed < whole / 4


def bytes_at_once(group, argv, folder, architecture="gpt") -> tuple[int, int, int, int]:
    """Return the peak of new bytes in a save and in a load, and the bytes of a tensor and of the model."""
    settings = parse(argv, group.size, architecture)
    model = settings.model(100)
    with connected(group, settings.parallel) as topology:
        trainer = Trainer(ModelState(model, topology, 1, settings.precision), settings.optimizer)
        tokenizer = NullTokenizer(99) if group.rank == 0 else None
        saving = most_bytes(lambda: save_model(trainer, str(folder), tokenizer))
        loading = most_bytes(lambda: load_weights(trainer, str(folder)))
    sizes = [8 * prod(tensor.shape) for _, tensor in leaves(model_tensors(model))]
    return saving, loading, max(sizes), sum(sizes)


# ---- files that cannot be loaded ------------------------------------------------------------------------------------


def edit(**change):
    """Return a function that changes tensors in the file of a folder, and removes those that are None."""
    def write(folder: Path):
        tensors = load_file(folder / WEIGHTS) | {name.replace("_at_", "."): x for name, x in change.items()}
        save_file({name: x for name, x in tensors.items() if x is not None}, folder / WEIGHTS)
    return write


def renamer(to: str):
    def rename(folder: Path):
        (folder / WEIGHTS).rename(folder / to)
    return rename


def truncate(folder: Path):
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[:-1])


def index(weight_map):
    def write(folder: Path):
        (folder / WEIGHTS).rename(folder / "a.safetensors")
        (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return write


def deeper(folder: Path):
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | {"n_layer": 10_000}))


C_FC = "transformer_at_h_at_1_at_mlp_at_c_fc_at_weight"


@pytest.mark.parametrize("damage, sentence", [
    (renamer("old"), "--load-hf {folder} has no model.safetensors, nor a model.safetensors.index.json."),
    (renamer("pytorch_model.bin"), "{folder}/pytorch_model.bin is a pickle, which is never opened"),
    (truncate, "{folder}/model.safetensors is not a safetensors file, or is damaged"),
    (edit(**{C_FC: None}), "--load-hf {folder} has no tensor h.1.mlp.c_fc.weight in model.safetensors, but the "
     "model has one, [8, 32]."),
    (edit(**{C_FC: np.zeros((32, 8))}), "{folder}/model.safetensors has h.1.mlp.c_fc.weight as [32, 8], but the "
     "folder's config.json asks for [8, 32]."),
    (edit(**{C_FC: np.zeros((8, 32), int)}), "has h.1.mlp.c_fc.weight in the format I64, but it must be one of F64"),
    (edit(h_at_2_at_ln_1_at_bias=np.zeros(8)), "has a tensor h.2.ln_1.bias, for which the model of the folder's "
     "config.json has no place."),
    (edit(lm_head_at_weight=np.zeros((11, 8))), "has a tensor lm_head.weight, for which the model of the folder's"),
    (index(["a"]), "model.safetensors.index.json does not hold what it should: expected `object`, got `array`"),
    (index({"wte.weight": "../b.safetensors"}), "index.json names the file '../b.safetensors', but a file beside it"),
    (deeper, "config.json asks for 10,000 layers, but model.safetensors has "),
    (index({"wte.weight": "b.safetensors"}), "{folder}/b.safetensors cannot be read: No such file or directory."),
])
@pytest.mark.parametrize("kind", ["tied"])
def test_weights_that_are_not_the_models_are_refused(folder, damage, sentence):
    model = parse(options(folder), 1).model(11)
    damage(folder)
    refuses(lambda: check_weights(str(folder), model), sentence.format(folder=folder))


@pytest.mark.parametrize("kind", ["tied"])
@pytest.mark.parametrize("rows", [1, 4, 11, 1024])
def test_a_tied_table_may_be_written_twice_if_both_are_equal(folder, rows):
    """They are compared to the last row, whatever the size of a block."""
    model, twice = parse(options(folder), 1).model(11), load_file(folder / WEIGHTS)["transformer.wte.weight"]
    with mock.patch.object(huggingface, "ROWS", rows):
        edit(lm_head_at_weight=twice)(folder)
        check_weights(str(folder), model)
        twice[-1, -1] += 1
        edit(lm_head_at_weight=twice)(folder)
        refuses(lambda: check_weights(str(folder), model), "has a tensor lm_head.weight, for which")


@pytest.mark.parametrize("kind", ["untied"])
def test_an_untied_model_needs_its_own_table(folder):
    edit(lm_head_at_weight=None)(folder)
    refuses(lambda: check_weights(str(folder), parse(options(folder), 1).model(11)), "has no tensor lm_head.weight")


@pytest.mark.parametrize("kind", ["tied"])
def test_weights_are_checked_before_the_corpus_is_read(ranks, folder):
    edit(**{C_FC: None})(folder)
    (said,) = set(ranks.run(2, refusal, pretrain, [*options(folder), "--data-path", "no/such"]))
    assert "has no tensor h.1.mlp.c_fc.weight" in said


@pytest.mark.parametrize("kind", ["tied"])
def test_a_file_that_one_rank_cannot_read_ends_all(ranks, folder, tmp_path):
    other = empty(tmp_path / "other")
    (other / CONFIG).write_bytes((folder / CONFIG).read_bytes())
    (said,) = set(ranks.run(4, refusal, load_from_two_folders, options(folder, f"{T} 2"), other))
    assert said.startswith(f"--load-hf {other} has no model.safetensors")


def load_from_two_folders(group, argv, other):
    """Load the model on all ranks, on rank 2 from another folder than on the others."""
    settings = parse(argv, group.size)
    with connected(group, settings.parallel) as topology:
        trainer = Trainer(ModelState(settings.model(11), topology, 1, settings.precision), settings.optimizer)
        load_weights(trainer, str(other) if group.rank == 2 else settings.args.load_hf)


def test_what_cannot_be_written_leaves_what_was_there(ranks, tmp_path):
    """All ranks hear of it, in a sentence, however much they have still to send; the folder is as it was."""
    there = write_model(tmp_path / "there", {"some": "model"}, {"x": np.zeros(3)})
    before = {path.name: path.read_bytes() for path in there.iterdir()}
    (said,) = set(ranks.run(4, refusal, save_on_a_full_disk, there))
    assert said == f"{there} cannot be written: No space left on device."
    assert {path.name: path.read_bytes() for path in there.iterdir()} == before


def save_on_a_full_disk(group, folder):
    with mock.patch.object(huggingface, "write_tensors", write_one_and_fail):
        bytes_at_once(group, f"--num-layers 2 --hidden-size 256 --seq-length 8 {T} 2 {P} 2".split(), folder)


def write_one_and_fail(path, dtype, shapes, elements, metadata):
    next(elements)
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
