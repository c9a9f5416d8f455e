"""config.json: read as the model's options, written as transformers reads it; what is not built here is refused."""
import json
from dataclasses import replace

import pytest

from mpi_impl.checkpoints.huggingface_config import CONFIG, check_vocabulary, config_of, notes
from mpi_impl.checkpoints.huggingface_tokenizer import SETTINGS, save_tokenizer, tokenizer_in
from mpi_impl.data.tokenizer import BertWordPieceCase, BertWordPieceLowerCase, ByteLevelBPETokenizer, NullTokenizer
from mpi_impl.data.tokenizer_choice import TokenizerChoice, given_tokenizer
from mpi_impl.launch.option_fields import filled
from reference.config import ExpertsConfig, ModelConfig
from shardlab.programs.settings import parse
from tests.checkpoints.runs import ODD_FIELDS, model_in, options, refuses

BERT = ModelConfig(2, 8, 4, 11, 7, activation="gelu_exact", layernorm_epsilon=1e-12, architecture="bert",
                   heads=("lm", "sop"), apply_residual_connection_post_layernorm=True)


def write_config(folder, fields):
    (folder / CONFIG).write_text(json.dumps(fields))
    return folder


@pytest.mark.parametrize("kind, dropout, more, expected", [
    ("untied", {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.3}, "", ModelConfig(
        2, 8, 4, 11, 6, activation="gelu_exact", layernorm_epsilon=0.01, untie_embeddings_and_output_weights=True)),
    ("original", {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.3},
     "--apply-residual-connection-post-layernorm", BERT)])
def test_the_model_is_the_files(folder, golden, dropout, more, expected):
    """Dropout, too, unless its option is given; another option may say the same."""
    write_config(folder, golden["config"] | dropout)
    assert model_in(folder, more) == replace(expected, hidden_dropout=0.2, attention_dropout=0.3)
    same = model_in(folder, "--num-layers 2 --hidden-dropout 0.1 --attention-dropout 0")
    assert same == replace(expected, hidden_dropout=0.1, attention_dropout=0.0)


@pytest.mark.parametrize("kind", ["original"])
def test_a_bert_that_was_trained_without_a_binary_head_has_none(folder, golden):
    for name, heads in (("BertForMaskedLM", ("lm",)), ("BertForPreTraining", ("lm", "sop"))):
        write_config(folder, golden["config"] | {"architectures": [name]})
        assert parse(options(folder), 1, "bert").model(11).heads == heads
        assert parse(options(folder, "--bert-no-binary-head"), 1, "bert").model(11).heads == ("lm",)


@pytest.mark.parametrize("kind", ["Mixtral"])
def test_the_experts_options_that_are_no_part_of_the_model(folder):
    """They count: the coefficients of losses, and the capacity."""
    given = "--moe-aux-loss-coeff 0.25 --moe-z-loss-coeff 0.5 --moe-expert-capacity-factor 2"
    assert model_in(folder).experts == ExpertsConfig(4, 2, moe_ffn_hidden_size=12)
    assert model_in(folder, given).experts == ExpertsConfig(
        4, 2, moe_ffn_hidden_size=12, moe_aux_loss_coeff=0.25, moe_z_loss_coeff=0.5, moe_expert_capacity_factor=2.0)


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind, other", [("tied", "bert"), ("rearranged", "gpt")])
def test_the_program_is_for_the_models_architecture(folder, other):
    refuses(lambda: parse(options(folder), 1, other), "but this program")


@pytest.mark.parametrize("kind", ["Llama"])
def test_a_number_of_hundreds_of_digits_is_refused(folder, golden):
    write_config(folder, golden["config"] | {"rope_parameters": {"rope_theta": 10**400}})
    refuses(lambda: model_in(folder), "it must be a number")


REFUSED = ODD_FIELDS["refused"]     # fields with a value that no model here has


@pytest.mark.parametrize("kind", REFUSED)
def test_a_field_that_no_model_here_has_is_refused(kind, folder, golden):
    """The error names the field and its value."""
    for name, value in REFUSED[kind].items():
        write_config(folder, golden["config"] | {name: value})
        refuses(lambda: model_in(folder), f"{name} is {value!r}")


@pytest.mark.parametrize("kind", ["tied"])
def test_a_misspelt_field_gets_a_note(folder, golden):
    """It means nothing to transformers either, so it is not an error; but what it was meant for has its default."""
    config = golden["config"] | {"atun_pdrop": 0.5, "my_own": 1}
    del config["attn_pdrop"]
    write_config(folder, config)
    assert notes(str(folder)).count("note") == 1 and "has atun_pdrop" in notes(str(folder))
    write_config(folder, golden["config"])
    assert notes(str(folder)) == ""


# ---- the tokenizer --------------------------------------------------------------------------------------------------

TEXT = ["Some words, more words: the same Words again, and Élan."]


@pytest.fixture(params=[BertWordPieceLowerCase, BertWordPieceCase])
def word_pieces(request):
    return request.param.train(TEXT, 100)


@pytest.fixture
def bert_folder(word_pieces, tmp_path):
    save_tokenizer(str(tmp_path), word_pieces)
    return write_config(tmp_path, {"model_type": "bert", "vocab_size": word_pieces.vocab_size})


def test_the_tokenizer_in_the_folder_is_the_runs(bert_folder, word_pieces):
    """It was saved there, and is found again; but not where the options name another."""
    folder, lower_case = bert_folder, word_pieces.lower_case
    again = given_tokenizer(filled(TokenizerChoice, parse(options(folder), 1, "bert").args))
    assert (again.name, again.encode(TEXT[0]), again.pad) == (word_pieces.name, word_pieces.encode(TEXT[0]),
                                                              word_pieces.pad)
    check_vocabulary(str(folder), again)
    assert config_of(BERT, again, "float64")["pad_token_id"] == again.pad
    assert parse(options(folder, "--tokenizer-model other"), 1, "bert").args.vocab_file is None
    (folder / SETTINGS).write_text(json.dumps({"do_lower_case": lower_case, "strip_accents": not lower_case}))
    assert tokenizer_in(str(folder)) == {}, "it takes accents for what they are not here"
    (folder / SETTINGS).unlink()
    assert tokenizer_in(str(folder))["tokenizer_type"] == "BertWordPieceLowerCase"


def test_the_tokenizer_must_be_the_models(bert_folder, word_pieces):
    lines = (bert_folder / "vocab.txt").read_text().splitlines()
    (bert_folder / "vocab.txt").write_text("\n".join([*lines[:-2], lines[-1], lines[-2]]))
    refuses(lambda: check_vocabulary(str(bert_folder), word_pieces), "vocab.txt has another number for the token")


@pytest.mark.parametrize("kind", ["tied"])
def test_the_tokenizer_must_be_the_gpt2s(golden, folder):
    check_vocabulary(str(folder), NullTokenizer(10))
    refuses(lambda: check_vocabulary(str(folder), NullTokenizer(11)), "but the NullTokenizer has 12 tokens")
    tokenizer, other = (ByteLevelBPETokenizer.train([text] * 2, 260) for text in ("some words, ", "another text, "))
    write_config(folder, golden["config"] | {"vocab_size": 260})
    check_vocabulary(str(folder), tokenizer)
    tokenizer.library.model.save(str(folder))
    check_vocabulary(str(folder), tokenizer)
    refuses(lambda: check_vocabulary(str(folder), other), "vocab.json has another number for the token")
