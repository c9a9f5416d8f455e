"""GPT-2's layout: what transformers has saved computes the same here, on any topology, and what we save opens there.

Where transformers is not installed, tests/mpi_impl/gpt2_golden.json says what it has computed.
"""
import errno
import json
import os
import tracemalloc
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from mpi_impl.checkpoints import huggingface
from mpi_impl.checkpoints.gpt2_config import CONFIG, check_vocabulary, config_of, read_config
from mpi_impl.checkpoints.huggingface import (INDEX, WEIGHTS, Weights, check_weights, load_weights, save_model,
                                           their_name)
from mpi_impl.comm.topology import Place
from mpi_impl.data.tokenizer import ByteLevelBPETokenizer, GPT2BPETokenizer, NullTokenizer
from mpi_impl.pretrain_gpt import Pretraining
from mpi_impl.training.arguments import parse
from mpi_impl.training.sample import last_logits
from mpi_impl.training.trainer import Trainer
from reference.errors import UserError
from reference.models.gpt import gpt_join, gpt_tensors
from reference.params import join, leaves, tree_map, with_names
from reference.stages import layout_of
from reference.training import loss_and_gradients
from tests.mpi_impl import gpt2_golden
from tests.mpi_impl.gpt2_golden import GOLDEN, TOKENS, direction, weight
from tests.rank_theorems import connected, dealt
from tests.strategies import close

KINDS = json.loads(GOLDEN.read_text())
T, P = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
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


def taking_turns(models, places) -> list:
    """Every model in every place; but for each place's turn they are marked deep."""
    return [pytest.param(model, *place, marks=[] if i % len(models) == turn else pytest.mark.deep)
            for i, place in enumerate(places) for turn, model in enumerate(models)]


# ---- on ranks -------------------------------------------------------------------------------------------------------


class Found(NamedTuple):
    """What one rank says of the model in a folder."""

    place: Place
    loss: float
    logits: Any      # [s, V] of the first sequence, on the last stage's ranks
    grads: Any       # the tree of what it holds
    tensors: Any


def options(folder, more="") -> list[str]:
    """Those of a run that begins with the model in the folder, in float64."""
    return ["--load-hf", str(folder), "--seq-length", "4", "--micro-batch-size", "1", "--dtype", "float64",
            "--clip-grad", "0", *more.split()]


def trainer_of(settings, topology) -> Trainer:
    folder = settings.args.load_hf
    model = settings.model(read_config(folder)["vocab_size"])
    check_weights(folder, model)
    trainer = Trainer(model, settings.optimizer, topology, 1, settings.precision)
    load_weights(trainer, folder)
    return trainer


def computed(group, argv, tokens) -> Found:
    """Logits of the first sequence, the loss of all, [B, s + 1], and its gradients."""
    settings = parse(argv, group.size)
    with connected(group, settings.parallel) as topology:
        trainer = trainer_of(settings, topology)
        logits = [last_logits(trainer, tokens[:1, :n]) for n in range(1, tokens.shape[1])]
        result = trainer.step(dealt(trainer, 1, tokens[:, :-1], tokens[:, 1:]), len(tokens))
        grads = trainer.layout.views(trainer.whole(trainer.gradients.own))
        return Found(topology.place, result.loss, logits, grads, trainer.layout.tensors)


def saved_again(group, argv, steps, folder) -> None:
    """Load, learn for some steps, and save."""
    settings = parse(argv, group.size)
    with connected(group, settings.parallel) as topology:
        trainer = trainer_of(settings, topology)
        for step in range(steps):
            tokens = np.random.default_rng(step).integers(0, trainer.model.vocab_size, (topology.data.size, 5))
            trainer.step(dealt(trainer, 1, tokens[:, :-1], tokens[:, 1:]), len(tokens))
        tokenizer = NullTokenizer(trainer.model.vocab_size - 1) if group.rank == 0 else None
        save_model(trainer, str(folder), tokenizer)


def whole_gradients(ranks: list[Found]) -> dict[str, np.ndarray]:
    """Of the first replica, by our names."""
    replica = [found for found in ranks if found.place.data == 0]
    stages = [[found for found in replica if found.place.pipeline == p]
              for p in sorted({found.place.pipeline for found in replica})]
    return dict(leaves(gpt_join([join([found.grads for found in stage], stage[0].tensors) for stage in stages])))


def full_name(name: str) -> str:
    """Theirs, with the prefix."""
    return their_name(name) if name == "output" else f"transformer.{their_name(name)}"


# ---- without transformers -------------------------------------------------------------------------------------------


@pytest.fixture(params=sorted(KINDS))
def kind(request):
    return request.param


@pytest.fixture
def golden(kind):
    return KINDS[kind]


@pytest.fixture
def folder(golden, tmp_path):
    """The golden model, as transformers saves it."""
    return write_model(tmp_path / "model", golden["config"], weights_of(golden))


def weights_of(golden) -> dict[str, np.ndarray]:
    return {name: weight(name, shape) for name, shape in golden["tensors"].items()}


def write_model(folder: Path, config, tensors) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(config))
    save_file(tensors, folder / WEIGHTS)
    return folder


def empty(folder: Path) -> Path:
    folder.mkdir()
    return folder


@pytest.mark.parametrize("kind, n, more", taking_turns(sorted(KINDS), TOPOLOGIES))
def test_golden_logits_loss_and_gradients(ranks, golden, folder, n, more):
    """On any topology what transformers has computed, to rounding."""
    batch = np.array(TOKENS * 3 if n in (3, 6) else TOKENS)
    found = ranks.run(n, computed, options(folder, f"{more} --global-batch-size {len(batch)}"), batch)
    for one in found:
        close(np.array(one.loss), np.array(golden["loss"]), 1e-13)
        if one.logits[0] is not None:
            close(np.stack(one.logits)[:, :golden["config"]["vocab_size"]], np.array(golden["logits"]), 1e-13)
    for name, grad in whole_gradients(found).items():
        theirs, shape = full_name(name), golden["tensors"][full_name(name)]
        along = (grad.reshape(shape) * direction(theirs, shape)).sum()
        close(np.array(along), np.array(golden["gradients"][theirs]), 1e-12)


def test_the_textbook_agrees_with_the_golden_file(golden):
    """So a wrong name cannot hide behind a wrong layer: the tensors are laid out by hand here."""
    settings = parse(["--num-layers", "2", "--hidden-size", "8", "--num-attention-heads", "4", "--seq-length", "6",
                      "--hidden-dropout", "0", "--attention-dropout", "0"], 1)
    config, w = golden["config"], weights_of(golden)
    model = replace(settings.model(11), layernorm_epsilon=config["layer_norm_epsilon"],
                    untie_embeddings_and_output_weights=not config["tie_word_embeddings"],
                    activation={"gelu_new": "gelu", "gelu": "gelu_exact"}[config["activation_function"]])
    params = tree_map(lambda named: w[full_name(named.name)].reshape(named.leaf.shape), with_names(gpt_tensors(model)))
    tokens = np.array(TOKENS)
    loss, _ = loss_and_gradients(tokens[:, :-1], tokens[:, 1:], params, model)
    close(np.array(loss), np.array(golden["loss"]), 1e-13)


@pytest.mark.parametrize("kind, n, more", taking_turns(sorted(KINDS, reverse=True), TOPOLOGIES))
def test_what_is_saved_is_what_was_loaded(ranks, golden, folder, tmp_path, n, more):
    """To the bit, with the same names, shapes and metadata; and config.json says the same."""
    again = empty(tmp_path / "again")
    ranks.run(n, saved_again, options(folder, more), 0, again)
    same_tensors(again, folder)
    with safe_open(again / WEIGHTS, "np") as file:
        assert file.metadata() == {"format": "pt"}
    ours, theirs = (json.loads((place / CONFIG).read_text()) for place in (again, folder))
    assert ours == {name: theirs[name] for name in ours}
    assert sorted(path.name for path in again.iterdir()) == [CONFIG, WEIGHTS], "nothing is left over"


def same_tensors(one: Path, other: Path):
    ours, theirs = load_file(one / WEIGHTS), load_file(other / WEIGHTS)
    assert ours.keys() == theirs.keys()
    for name in theirs:
        assert (ours[name].dtype, ours[name].shape) == (theirs[name].dtype, theirs[name].shape)
        assert ours[name].tobytes() == theirs[name].tobytes(), name


@pytest.mark.parametrize("n, more, m, other", [
    (4, f"{T} 2 {P} 2", 4, "--zero-stage 3"), (4, "--zero-stage 1", 2, f"{P} 2"), (4, "--zero-stage 3", 1, "")])
def test_what_was_learnt_is_saved(ranks, folder, tmp_path, n, more, m, other):
    """After some steps, too, and by whom it is saved makes no difference."""
    learnt, again = empty(tmp_path / "learnt"), empty(tmp_path / "again")
    ranks.run(n, saved_again, options(folder, more), 2, learnt)
    ranks.run(m, saved_again, options(learnt, other), 0, again)
    same_tensors(again, learnt)
    assert any(not np.allclose(x, load_file(folder / WEIGHTS)[name], atol=1e-4)
               for name, x in load_file(learnt / WEIGHTS).items())


@pytest.mark.parametrize("n, more", [(2, f"{T} 2 --zero-stage 0"), (2, "--zero-stage 1"), (1, "--zero-stage 3")])
def test_sixteen_bits_keep_the_weights_they_were_given(ranks, golden, folder, tmp_path, n, more):
    """The model computes with 16 bits; master weights, and what is saved of them, have all 32."""
    write_model(folder, golden["config"], {name: x.astype(np.float32) for name, x in weights_of(golden).items()})
    again = empty(tmp_path / "again")
    ranks.run(n, saved_again, [*options(folder, more), "--dtype", "float32", "--bf16"], 0, again)
    same_tensors(again, folder)
    assert json.loads((again / CONFIG).read_text())["dtype"] == "float32"


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_narrow_weights_are_widened(ranks, golden, folder, tmp_path, dtype):
    narrow = {name: x.astype(dtype) for name, x in weights_of(golden).items()}
    write_model(folder, golden["config"], narrow)
    again = empty(tmp_path / "again")
    ranks.run(2, saved_again, options(folder, f"{T} 2"), 0, again)
    for name, x in load_file(again / WEIGHTS).items():
        assert x.dtype == np.float64 and np.array_equal(x, narrow[name].astype(np.float64))


def test_every_form_in_which_a_model_is_found(ranks, kind, golden, folder, tmp_path):
    """Without the prefix, with the buffers of older versions, with a tied table written twice; in several files."""
    w = {name.removeprefix("transformer."): x for name, x in weights_of(golden).items()}
    buffers = {"h.0.attn.bias": np.tril(np.ones((1, 1, 6, 6), bool)), "h.1.attn.masked_bias": np.array(-1e4)}
    twice = {"lm_head.weight": w["wte.weight"]} if kind == "tied" else {}
    for i, tensors in enumerate([w, w | buffers, weights_of(golden) | twice]):
        form = write_model(tmp_path / f"form {i}", golden["config"], tensors)
        ranks.run(2, saved_again, options(form, f"{P} 2"), 0, form)       # over itself, too
        same_tensors(form, folder)
    names = sorted(w)
    several = write_model(tmp_path / "several", golden["config"], {})
    (several / WEIGHTS).unlink()
    parts = {f"model-{i}-of-3.safetensors": names[i::3] for i in range(3)}
    for file, inside in parts.items():
        save_file({name: w[name] for name in inside}, several / file)
    (several / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": {
        name: file for file, inside in parts.items() for name in inside}}))
    ranks.run(2, saved_again, options(several, f"{T} 2"), 0, several)
    same_tensors(several, folder)


def test_no_rank_reads_more_than_its_part(folder):
    """All ranks together read each element of a split tensor once, and no padding."""
    settings = parse(options(folder, f"{T} 4 --make-vocab-size-divisible-by 2"), 4)
    layout = layout_of(gpt_tensors(settings.model(11)), settings.parallel)
    weights, read = Weights(str(folder)), []
    weights.slice = lambda name: Counted(Weights.slice(weights, name), read)
    for segment in layout.segments:
        read.clear()
        shards = [weights.shard(segment, rank, np.float64) for rank in range(4)]
        assert sum(read) == prod(segment.tensor.shape) * (4 if segment.tensor.split is None else 1)
        assert sum(map(np.count_nonzero, shards)) == sum(read), "what is read has its place, and padding is 0"


class Counted:
    """A tensor in a file, and how many elements have been read of such."""

    def __init__(self, slice, read):
        self.slice, self.read = slice, read

    def __getitem__(self, place):
        x = self.slice[place]
        self.read.append(x.size)
        return x


@pytest.mark.parametrize("n, more", [(4, f"{P} 4"), (4, f"{T} 2 {P} 2"), (4, f"{P} 2 --zero-stage 3")])
def test_no_rank_holds_the_whole_model(ranks, tmp_path, n, more):
    """While it saves or loads, a rank has little more than three times the largest tensor, beside its own part."""
    sizes = "--num-layers 8 --hidden-size 64 --seq-length 8 --dtype float64"
    for saving, loading, largest, whole in ranks.run(n, bytes_at_once, [*sizes.split(), *more.split()], tmp_path):
        allowed = 3 * largest + (1 << 17)
        assert max(saving, loading) < allowed < whole / 4


def bytes_at_once(group, argv, folder) -> tuple[int, int, int, int]:
    """At most, beside what there was: while a model is saved, and while it is loaded; of a tensor; of the model."""
    settings = parse(argv, group.size)
    model = settings.model(100)
    with connected(group, settings.parallel) as topology:
        trainer = Trainer(model, settings.optimizer, topology, 1, settings.precision)
        tokenizer = NullTokenizer(99) if group.rank == 0 else None
        saving = most_bytes(lambda: save_model(trainer, str(folder), tokenizer))
        loading = most_bytes(lambda: load_weights(trainer, str(folder)))
    sizes = [8 * prod(tensor.shape) for _, tensor in leaves(gpt_tensors(model))]
    return saving, loading, max(sizes), sum(sizes)


def most_bytes(act) -> int:
    tracemalloc.start()
    act()
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return most


# ---- options --------------------------------------------------------------------------------------------------------


def test_sizes_and_dropout_are_the_files_unless_options_say_otherwise(folder, golden):
    config = golden["config"] | {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.3}
    (folder / CONFIG).write_text(json.dumps(config))
    model = parse(options(folder), 1).model(11)
    assert (model.num_layers, model.hidden_size, model.num_attention_heads, model.max_position_embeddings) == (
        2, 8, 4, 6)
    assert (model.hidden_dropout, model.attention_dropout) == (0.2, 0.3)
    assert model.activation == {"gelu_new": "gelu", "gelu": "gelu_exact"}[config["activation_function"]]
    assert model.layernorm_epsilon == config["layer_norm_epsilon"]
    assert model.untie_embeddings_and_output_weights != config["tie_word_embeddings"]
    same = parse([*options(folder), "--num-layers", "2", "--hidden-dropout", "0.1", "--attention-dropout", "0"], 1)
    assert (same.model(11).hidden_dropout, same.model(11).attention_dropout) == (0.1, 0.0)


def test_what_a_file_leaves_out_is_what_transformers_takes(folder):
    (folder / CONFIG).write_text(json.dumps({"model_type": "gpt2", "n_embd": 96}))
    model = parse(options(folder), 1).model(50257)
    assert (model.num_layers, model.hidden_size, model.num_attention_heads, model.activation) == (12, 96, 12, "gelu")
    assert not model.untie_embeddings_and_output_weights and model.hidden_dropout == model.attention_dropout == 0.1


def test_a_config_is_written_as_it_is_read(folder, golden):
    """What config_of writes for a model, read_config and the options make the same model again."""
    model = parse(options(folder), 1).model(11)
    (folder / CONFIG).write_text(json.dumps(config_of(model, 10, "float64")))
    assert parse(options(folder), 1).model(11) == model
    assert read_config(str(folder))["vocab_size"] == 11


@pytest.mark.parametrize("more, sentence", [
    ("--num-layers 3", "--num-layers is 3, but {config} says that n_layer is 2. Leave the option out"),
    ("--hidden-size 16", "--hidden-size is 16, but {config} says that n_embd is 8."),
    ("--num-attention-heads 2", "--num-attention-heads is 2, but {config} says that n_head is 4."),
    ("--max-position-embeddings 5", "--max-position-embeddings is 5, but {config} says that n_positions is 6."),
    ("--activation relu", "--activation is relu, but {config} says that activation_function is gelu_new."),
    ("--layernorm-epsilon 0.1", "--layernorm-epsilon is 0.1, but {config} says that layer_norm_epsilon is 1e-05."),
    ("--untie-embeddings-and-output-weights", "--untie-embeddings-and-output-weights is True, but {config} says that "
     "tie_word_embeddings is True."),
    ("--position-embedding-type rope", "--position-embedding-type is rope, but {config} says that it is a GPT-2, whose "
     "positions are learned_absolute."),
    ("--load somewhere", "--load is somewhere and --load-hf is {folder}"),
    ("--seq-length 7", "--max-position-embeddings is 6, but must be at least --seq-length, which is 7."),
    ("--load-hf no/such", "--load-hf no/such has no config.json."),
    ("--load-hf=", "--load-hf is empty."),
])
@pytest.mark.parametrize("kind", ["tied"])
def test_options_that_contradict_the_file_are_refused(folder, more, sentence):
    said_of(lambda: parse([*options(folder), *more.split()], 1),
            sentence.format(config=folder / CONFIG, folder=folder))


def said_of(act, sentence: str):
    with pytest.raises(UserError) as caught:
        act()
    assert sentence in str(caught.value)


@pytest.mark.parametrize("change, sentence", [
    ({"model_type": "llama"}, "model_type is 'llama', but only gpt2 can be loaded."),
    ({"n_layer": "2"}, "n_layer is '2', but it must be a whole number."),
    ({"n_layer": True}, "n_layer is True, but it must be a whole number."),
    ({"n_layer": 0}, "--num-layers is 0, but must be at least 1."),
    ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1, but it must be true or false."),
    ({"n_inner": 33}, "n_inner is 33, but here the MLP is 4 x n_embd = 32 wide."),
    ({"activation_function": "silu"}, "activation_function is 'silu', but here it must be one of gelu_new, "),
    ({"scale_attn_weights": False}, "scale_attn_weights is False, but here it can only be True: it says that"),
    ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True, but here it can only be"),
    ({"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn is True, but here it can only be False"),
    ({"add_cross_attention": True}, "add_cross_attention is True, but here it can only be False"),
    ({"resid_pdrop": 0.1}, "resid_pdrop is 0.1 and embd_pdrop 0.0, but here both are --hidden-dropout. Give that"),
    ({"attn_pdrop": 1}, "--attention-dropout is 1.0, but must be in [0, 1)"),
])
def test_a_model_that_is_not_built_here_is_refused(folder, golden, change, sentence):
    (folder / CONFIG).write_text(json.dumps(golden["config"] | change))
    said_of(lambda: parse(options(folder), 1), sentence)


def test_a_config_of_another_kind_of_file(folder):
    for text, sentence in (("{", "is not JSON: Expecting property name"), ("[]", "is not a JSON object, but a list."),
                           ("\xff", "is not JSON")):
        (folder / CONFIG).write_bytes(text.encode("latin1"))
        said_of(lambda: parse(options(folder), 1), f"{folder / CONFIG} {sentence}")


def test_only_a_gpt2_is_saved_as_one(tmp_path):
    said_of(lambda: parse(["--save-hf", str(tmp_path), "--position-embedding-type", "rope"], 1),
            "--save-hf writes a GPT-2, whose positions are learned, but --position-embedding-type is rope.")


# ---- files that cannot be loaded ------------------------------------------------------------------------------------


def changed(**change):
    """Other tensors in the file; None for one that is not there."""
    def write(folder: Path):
        tensors = load_file(folder / WEIGHTS) | {name.replace("_at_", "."): x for name, x in change.items()}
        save_file({name: x for name, x in tensors.items() if x is not None}, folder / WEIGHTS)
    return write


def renamed(to: str):
    def rename(folder: Path):
        (folder / WEIGHTS).rename(folder / to)
    return rename


def cut_off(folder: Path):
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[:-1])


def indexed(weight_map):
    def write(folder: Path):
        (folder / WEIGHTS).rename(folder / "a.safetensors")
        (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return write


C_FC = "transformer_at_h_at_1_at_mlp_at_c_fc_at_weight"


@pytest.mark.parametrize("damage, sentence", [
    (renamed("old"), "--load-hf {folder} has no model.safetensors, nor a model.safetensors.index.json."),
    (renamed("pytorch_model.bin"), "{folder}/pytorch_model.bin is a pickle, which is never opened"),
    (cut_off, "{folder}/model.safetensors is not a safetensors file, or is damaged"),
    (changed(**{C_FC: None}), "--load-hf {folder} has no tensor h.1.mlp.c_fc.weight in model.safetensors, but its "
     "config.json asks for one, [8, 32]."),
    (changed(**{C_FC: np.zeros((32, 8))}), "{folder}/model.safetensors has h.1.mlp.c_fc.weight as [32, 8], but the "
     "folder's config.json asks for [8, 32]."),
    (changed(**{C_FC: np.zeros((8, 32), int)}), "has h.1.mlp.c_fc.weight in the format I64, but it must be one of F64"),
    (changed(h_at_2_at_ln_1_at_bias=np.zeros(8)), "has a tensor h.2.ln_1.bias, for which the model of the folder's "
     "config.json has no place."),
    (changed(lm_head_at_weight=np.zeros((11, 8))), "has a tensor lm_head.weight, for which the model of the folder's"),
    (indexed(["a"]), "model.safetensors.index.json has no weight_map"),
    (indexed({"wte.weight": "b.safetensors"}), "{folder}/b.safetensors cannot be read: No such file or directory."),
])
@pytest.mark.parametrize("kind", ["tied"])
def test_weights_that_are_not_the_models_are_refused(folder, damage, sentence):
    model = parse(options(folder), 1).model(11)
    damage(folder)
    said_of(lambda: check_weights(str(folder), model), sentence.format(folder=folder))


@pytest.mark.parametrize("kind", ["tied"])
@pytest.mark.parametrize("rows", [1, 4, 11, 1024])
def test_a_tied_table_may_be_written_twice_if_both_are_equal(folder, rows):
    """To the last row, however many are compared at a time."""
    model, twice = parse(options(folder), 1).model(11), load_file(folder / WEIGHTS)["transformer.wte.weight"]
    with mock.patch.object(huggingface, "ROWS", rows):
        changed(lm_head_at_weight=twice)(folder)
        check_weights(str(folder), model)
        twice[-1, -1] += 1
        changed(lm_head_at_weight=twice)(folder)
        said_of(lambda: check_weights(str(folder), model), "has a tensor lm_head.weight, for which")


@pytest.mark.parametrize("kind", ["untied"])
def test_an_untied_model_needs_its_own_table(folder):
    changed(lm_head_at_weight=None)(folder)
    said_of(lambda: check_weights(str(folder), parse(options(folder), 1).model(11)), "has no tensor lm_head.weight")


# ---- the tokenizer, and the program ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tied"])
def test_the_tokenizer_must_be_the_models(folder, tmp_path):
    check_vocabulary(str(folder), NullTokenizer(10))
    said_of(lambda: check_vocabulary(str(folder), NullTokenizer(11)),
            f"{folder / CONFIG} says that vocab_size is 11, but the NullTokenizer has 12 tokens. Give the tokenizer")
    tokenizer = ByteLevelBPETokenizer.train(["some words, some words"], 260)
    (folder / CONFIG).write_text(json.dumps(read_config(str(folder)) | {"model_type": "gpt2", "vocab_size": 260}))
    check_vocabulary(str(folder), tokenizer)
    tokenizer.bpe.model.save(str(folder))
    check_vocabulary(str(folder), tokenizer)
    other = ByteLevelBPETokenizer.train(["quite another text, quite another"], 260)
    said_of(lambda: check_vocabulary(str(folder), other), f"{folder}/vocab.json has another number for the token ")


PROGRAM = """--seq-length 16 --micro-batch-size 2 --global-batch-size 4 --eval-iters 1 --split 8,2 --dtype float64
    --log-interval 1""".split()


@pytest.fixture(scope="module")
def run_and_saved(ranks, tmp_path_factory):
    """What every run of the program says of its corpus; and a folder where one has saved what it learnt."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "text.txt").write_text(" ".join(f"{i} times {i % 7} is {i * (i % 7)}." for i in range(400)))
    common = [*PROGRAM, "--data-path", str(folder / "text.txt"), "--data-cache-path", str(folder / "cache")]
    ranks.run(4, pretrain, [*common, *f"{T} 2 --zero-stage 1 --num-layers 2 --hidden-size 32 --vocab-size 300".split(),
                            *f"--num-attention-heads 4 --train-iters 2 --save-hf {folder / 'saved'}".split(),
                            "--metrics-file", str(folder / "metrics")])
    return common, folder / "saved"


def pretrain(group, argv):
    Pretraining(parse(argv, group.size), group).run()


@pytest.mark.parametrize("kind", ["tied"])
def test_a_file_that_one_rank_cannot_read_ends_all(ranks, folder, tmp_path):
    (said,) = set(ranks.run(4, refusal, loaded_by_some, options(folder, f"{T} 2"), empty(tmp_path / "empty")))
    assert said.startswith(f"--load-hf {tmp_path / 'empty'} has no model.safetensors")


def loaded_by_some(group, argv, other):
    """Rank 2 looks for the files in another folder than the others do."""
    settings = parse(argv, group.size)
    with connected(group, settings.parallel) as topology:
        trainer = Trainer(settings.model(11), settings.optimizer, topology, 1, settings.precision)
        load_weights(trainer, str(other) if group.rank == 2 else settings.args.load_hf)


def refusal(group, act, *args) -> str:
    """The sentence that this rank says in place of doing that."""
    with pytest.raises(UserError) as caught:
        act(group, *args)
    return str(caught.value)


def validation_loss(metrics: Path) -> float:
    return json.loads(metrics.read_text().splitlines()[-1])["validation_loss"]


def test_a_run_begins_where_another_has_saved(ranks, run_and_saved, tmp_path, capfd):
    """With the tokenizer in the folder, on another topology, and verified: the same validation loss."""
    common, saved = run_and_saved
    ranks.run(2, pretrain, [*common, "--load-hf", str(saved), P, "2", "--lr", "1e-15", "--train-iters", "1", "--verify",
                            "--metrics-file", str(tmp_path / "metrics")])
    assert validation_loss(tmp_path / "metrics") == pytest.approx(validation_loss(saved.parent / "metrics"), rel=1e-11)
    printed = capfd.readouterr().out
    assert "verified against one process" in printed
    assert f"it begins with the weights in {saved}; dropout 0.1, and 0.1" in printed


def test_the_saved_tokenizer_is_the_one_of_the_run(run_and_saved):
    common, saved = run_and_saved
    (trained,) = saved.parent.glob("cache/*/tokenizer.json")
    ours = ByteLevelBPETokenizer.load(trained)
    again = GPT2BPETokenizer(str(saved / "vocab.json"), str(saved / "merges.txt"))
    assert again.encode("12 times 5 is 60, <|endoftext|> é") == ours.encode("12 times 5 is 60, <|endoftext|> é")
    assert (again.vocab_size, again.eod) == (ours.vocab_size, ours.eod)
    assert json.loads((saved / CONFIG).read_text())["eos_token_id"] == ours.eod


@pytest.mark.parametrize("more, sentence", [
    ("--vocab-size 280 --tokenizer-type ByteLevelBPETokenizer", "says that vocab_size is 300, but the "
     "ByteLevelBPETokenizer has 280 tokens."),
    ("--vocab-size 280", "--vocab-size 280 contradicts --vocab-file"),
    ("--num-layers 3", "--num-layers is 3, but "),
])
def test_a_run_that_does_not_fit_its_weights_is_refused(ranks, run_and_saved, more, sentence):
    """On every rank alike, before the first step."""
    common, saved = run_and_saved
    (said,) = set(ranks.run(2, refusal, pretrain, [*common, "--load-hf", str(saved), *more.split()]))
    assert sentence in said


@pytest.mark.parametrize("kind", ["tied"])
def test_weights_are_checked_before_the_corpus_is_read(ranks, folder):
    changed(**{C_FC: None})(folder)
    (said,) = set(ranks.run(2, refusal, pretrain, [*options(folder), "--data-path", "no/such"]))
    assert "has no tensor h.1.mlp.c_fc.weight" in said


def test_what_cannot_be_written_leaves_what_was_there(ranks, tmp_path):
    """All ranks hear of it, in a sentence, however much they have still to send; the folder is as it was."""
    there = write_model(tmp_path / "there", {"some": "model"}, {"x": np.zeros(3)})
    before = {path.name: path.read_bytes() for path in there.iterdir()}
    (said,) = set(ranks.run(4, refusal, saved_on_a_full_disk, there))
    assert said == f"{there} cannot be written: No space left on device."
    assert {path.name: path.read_bytes() for path in there.iterdir()} == before


def saved_on_a_full_disk(group, folder):
    with mock.patch.object(huggingface, "write_tensors", write_one_and_fail):
        bytes_at_once(group, f"--num-layers 2 --hidden-size 256 --seq-length 8 {T} 2 {P} 2".split(), folder)


def write_one_and_fail(path, dtype, shapes, elements, metadata):
    next(elements)
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


# ---- with transformers ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def transformers():
    return pytest.importorskip("transformers", reason="it comes with `pip install -e '.[huggingface]'`")


SHAPES = [      # of models: sizes that divide, and a vocabulary that does not
    dict(n_layer=3, n_embd=24, n_head=6, vocab_size=37, n_positions=9),
    dict(n_layer=2, n_embd=24, n_head=6, vocab_size=50, n_positions=7, tie_word_embeddings=False,
         activation_function="relu", n_inner=96),
    dict(n_layer=2, n_embd=36, n_head=6, vocab_size=13, n_positions=7, activation_function="gelu",
         layer_norm_epsilon=1e-3),
]
PLACES = [(1, ""), (2, f"{T} 2"), (3, f"{T} 3 --make-vocab-size-divisible-by 1"), (6, f"{T} 3 {P} 2"), (6, f"{T} 6"),
          (4, f"{P} 2 --zero-stage 2"), (2, "--zero-stage 1"), (3, "--zero-stage 3"), (2, "--zero-stage 3"),
          (8, f"{T} 2 {P} 2 --zero-stage 3 --sequence-parallel"), (6, f"{T} 3 --zero-stage 1 --sequence-parallel"),
          (6, f"{T} 6 --sequence-parallel"), (4, f"{T} 2 --zero-stage 2"), (2, f"{P} 2 --pipeline-schedule zb-h2"),
          (2, f"{P} 2 --recompute-granularity full")]


def random_model(transformers, shape, seed):
    """Large weights, biases and gains, too, so that nothing is small enough to be wrong unseen; no dropout."""
    import torch

    torch.manual_seed(seed)
    config = transformers.GPT2Config(**shape, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, initializer_range=0.3,
                                     bos_token_id=0, eos_token_id=0)
    model = transformers.GPT2LMHeadModel(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("shape, n, more", taking_turns(range(len(SHAPES)), PLACES))
def test_same_logits_loss_and_gradients(ranks, transformers, tmp_path, shape, n, more):
    """Of a random model, saved by transformers: each logit, the loss and each element of the gradient, to rounding."""
    theirs = random_model(transformers, SHAPES[shape], seed=n)
    theirs.save_pretrained(tmp_path, **({"max_shard_size": "20KB"} if n == 6 else {}))
    tokens = np.random.default_rng(n).integers(0, theirs.config.vocab_size, (12 if n % 3 == 0 else 8, 7))
    logits, loss, gradients = gpt2_golden.computed(theirs, tokens)
    found = ranks.run(n, computed, [*options(tmp_path, more), "--seq-length", "6", "--global-batch-size",
                                    str(len(tokens))], tokens)
    for one in found:
        close(np.array(one.loss), np.array(loss), 1e-11)
        if one.logits[0] is not None:
            close(np.stack(one.logits)[:, :theirs.config.vocab_size], logits[0], 1e-11)
    ours = whole_gradients(found)
    assert {full_name(name) for name in ours} == gradients.keys()
    for name, grad in ours.items():
        close(grad.reshape(gradients[full_name(name)].shape), gradients[full_name(name)], 1e-10)


@pytest.mark.parametrize("shape, n, more", [(i % 3, *place) for i, place in enumerate(PLACES[::2])])
def test_what_we_save_opens_there(ranks, transformers, tmp_path, shape, n, more):
    """No key is missing, and none too many; the same parameters, to the bit, so the same logits."""
    import torch

    theirs = random_model(transformers, SHAPES[shape], seed=n)
    theirs.save_pretrained(tmp_path)
    again = empty(tmp_path / "again")
    ranks.run(n, saved_again, [*options(tmp_path, more), "--seq-length", "6"], 0, again)
    opened, said = transformers.GPT2LMHeadModel.from_pretrained(again, output_loading_info=True)
    assert not any(said.values()), said
    assert opened.dtype == torch.float64
    for (name, x), (other, y) in zip(opened.named_parameters(), theirs.named_parameters(), strict=True):
        assert name == other and torch.equal(x, y)
    tokens = torch.arange(7)[None]
    close(opened.eval()(tokens).logits.detach().numpy(), theirs.eval()(tokens).logits.detach().numpy(), 1e-14)


def test_what_the_program_saves_opens_there(transformers, run_and_saved):
    """The tokenizer, too, by the folder alone."""
    common, saved = run_and_saved
    model, said = transformers.AutoModelForCausalLM.from_pretrained(saved, output_loading_info=True)
    assert not any(said.values()), said
    tokenizer = transformers.AutoTokenizer.from_pretrained(saved)
    ours = GPT2BPETokenizer(str(saved / "vocab.json"), str(saved / "merges.txt"))
    text = "12 times 5 is 60."
    assert tokenizer.encode(text) == ours.encode(text) and len(tokenizer) == model.config.vocab_size == 300
    assert tokenizer.eos_token_id == model.config.eos_token_id == ours.eod


def test_the_golden_file_is_what_transformers_computes(transformers):
    """As it is now, to rounding."""
    for kind, golden in KINDS.items():
        made = gpt2_golden.made_by_transformers(gpt2_golden.KINDS[kind])
        assert made["tensors"] == golden["tensors"]
        for name in ("logits", "loss"):
            close(np.array(made[name]), np.array(golden[name]), 1e-13)
        for name, value in golden["gradients"].items():
            close(np.array(made["gradients"][name]), np.array(value), 1e-12)
