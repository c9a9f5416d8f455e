"""config.json: read as the model's options, written as transformers reads it; what is not built here is refused."""
import json
import os

import pytest

from mpi_impl.checkpoints.huggingface_config import CONFIG, config_of, notes, read_config
from mpi_impl.data.tokenizer import NullTokenizer
from mpi_impl.programs.arguments import parse
from tests.checkpoints.gpt2_runs import options, refuses


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
    """From the fields that config_of writes, read_config and the options make the same model again."""
    model = parse(options(folder), 1).model(11)
    (folder / CONFIG).write_text(json.dumps(config_of(model, NullTokenizer(10), "float64")))
    assert parse(options(folder), 1).model(11) == model
    assert read_config(str(folder), "gpt")["vocab_size"] == 11


@pytest.mark.parametrize("more, sentence", [
    ("--num-layers 3", "--num-layers is 3, but {config} says that n_layer is 2. Leave the option out"),
    ("--hidden-size 16", "--hidden-size is 16, but {config} says that n_embd is 8."),
    ("--num-attention-heads 2", "--num-attention-heads is 2, but {config} says that n_head is 4."),
    ("--max-position-embeddings 5", "--max-position-embeddings is 5, but {config} says that n_positions is 6."),
    ("--activation relu", "--activation is relu, but {config} says that activation_function is gelu_new."),
    ("--layernorm-epsilon 0.1", "--layernorm-epsilon is 0.1, but {config} says that layer_norm_epsilon is 1e-05."),
    ("--untie-embeddings-and-output-weights", "--untie-embeddings-and-output-weights is True, but {config} says that "
     "tie_word_embeddings is True."),
    ("--position-embedding-type rope", "--position-embedding-type is rope, but {config} says that model_type is gpt2, "
     "where it is learned_absolute."),
    ("--load somewhere", "--load is somewhere and --load-hf is {folder}"),
    ("--seq-length 7", "--max-position-embeddings is 6 in the config.json of "),
    ("--load-hf no/such", "--load-hf no/such has no config.json."),
    ("--load-hf=", "--load-hf is empty."),
])
@pytest.mark.parametrize("kind", ["tied"])
def test_options_that_contradict_the_file_are_refused(folder, more, sentence):
    refuses(lambda: parse([*options(folder), *more.split()], 1),
            sentence.format(config=folder / CONFIG, folder=folder))


@pytest.mark.parametrize("change, sentence", [
    ({"model_type": "gptj"}, "model_type is 'gptj', but only gpt2, llama, "),
    ({"n_layer": "2"}, "n_layer is '2', but it must be a whole number."),
    ({"n_layer": True}, "n_layer is True, but it must be a whole number."),
    ({"n_layer": 0}, "config.json asks for a model that cannot be: n_layer is 0, but must be at least 1."),
    ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1, but it must be true or false."),
    ({"n_inner": 33}, "n_inner is 33, but here the MLP is 4 x n_embd = 32 wide."),
    ({"activation_function": "silu"}, "activation_function is 'silu', but here it must be one of gelu_new, "),
    ({"scale_attn_weights": False}, "scale_attn_weights is False, but here it can only be True: it says that"),
    ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True, but here it can only be"),
    ({"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn is True, but here it can only be False"),
    ({"add_cross_attention": True}, "add_cross_attention is True, but here it can only be False"),
    ({"resid_pdrop": 0.1}, "resid_pdrop is 0.1 and embd_pdrop is 0.0, but here both are --hidden-dropout. Give that"),
    ({"attn_pdrop": 1}, "cannot be: attn_pdrop is 1.0, but must be in [0, 1)"),
])
def test_a_model_that_is_not_built_here_is_refused(folder, golden, change, sentence):
    (folder / CONFIG).write_text(json.dumps(golden["config"] | change))
    refuses(lambda: parse(options(folder), 1), sentence)


def test_a_config_of_another_kind_of_file(folder):
    for text, sentence in (("{", "is not JSON: input data was truncated"), ("\xff", "is not JSON"),
                           ("[]", "does not hold what it should: expected `object`, got `array`"),
                           ('{"a": ' + "[" * 100_000, "is not JSON that can be read: it is nested too deeply"),
                           (" " * (1 << 20) + "{}", "has 1,048,578 bytes, but a file of its kind has at most")):
        (folder / CONFIG).write_bytes(text.encode("latin1"))
        refuses(lambda: parse(options(folder), 1), f"{folder / CONFIG} {sentence}")


def test_a_config_that_never_ends_or_never_begins_is_refused(folder):
    """A device, a pipe into which nobody writes, and a name that leads in a circle: each is named, and none is read."""
    path = folder / CONFIG
    for make, sentence in ((lambda: path.symlink_to("/dev/zero"), "cannot be read: it is a pipe or a device"),
                           (lambda: os.mkfifo(path), "cannot be read: it is a pipe or a device"),
                           (lambda: path.symlink_to(path), "cannot be looked up: Too many levels of symbolic links"),
                           (lambda: path.mkdir(), "cannot be read: Is a directory")):
        path.unlink()
        make()
        refuses(lambda: parse(options(folder), 1), f"{path} {sentence}")


def test_a_misspelt_field_gets_a_note(folder, golden):
    """It means nothing to transformers either, so it is no error; but what it was meant for has its default."""
    config = golden["config"] | {"atun_pdrop": 0.5, "my_own": 1}
    del config["attn_pdrop"]
    (folder / CONFIG).write_text(json.dumps(config))
    assert notes(str(folder)) == (f"\nnote: {folder / CONFIG} has atun_pdrop, which means nothing; attn_pdrop is not "
                                  "there, and so is 0.1")
    (folder / CONFIG).write_text(json.dumps(golden["config"]))
    assert notes(str(folder)) == ""


def test_only_a_gpt2_is_saved_as_one(tmp_path):
    refuses(lambda: parse(["--save-hf", str(tmp_path), "--position-embedding-type", "rope"], 1),
            "--save-hf writes a gpt2, where --position-embedding-type is learned_absolute, but it is rope.")
