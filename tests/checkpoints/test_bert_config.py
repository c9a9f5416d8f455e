"""config.json of both BERTs: read as the model's options, written as transformers reads it; the rest is refused."""
import json
from dataclasses import replace

import pytest
from hypothesis import given

from mpi_impl.checkpoints.huggingface_config import (CONFIG, check_vocabulary, class_of, config_of, layout_of, model_of,
                                                     read_config)
from mpi_impl.checkpoints.huggingface_tokenizer import SETTINGS, save_tokenizer, tokenizer_in
from mpi_impl.data.tokenizer import BertWordPieceCase, BertWordPieceLowerCase, ByteLevelBPETokenizer, NullTokenizer
from mpi_impl.data.tokenizer_choice import TokenizerChoice, given_tokenizer
from mpi_impl.launching.option_fields import filled
from mpi_impl.programs.arguments import parse
from reference.config import ModelConfig
from tests.checkpoints.gpt2_runs import empty, refuses
from tests.strategies import ANY_MODEL, cases

TEXT = ["Some words, more words: the same Words again, and Élan."]


def options(folder, more=""):
    return ["--load-hf", str(folder), "--seq-length", "5", "--micro-batch-size", "1", *more.split()]


def config(model_type="bert", **change):
    """Return the configuration of a small model, as transformers writes it, with some changes."""
    return {"model_type": model_type, "num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 4,
            "vocab_size": 11, "max_position_embeddings": 6, "intermediate_size": 32, "hidden_act": "gelu",
            "hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.3, "layer_norm_eps": 1e-12,
            "type_vocab_size": 2, "pad_token_id": 0, "use_cache": True, "classifier_dropout": None} | change


@pytest.fixture
def folder(tmp_path):
    return write_config(tmp_path, config())


def write_config(folder, fields):
    (folder / CONFIG).write_text(json.dumps(fields))
    return folder


@pytest.mark.parametrize("model_type", ["bert", "megatron-bert"])
def test_the_model_is_the_files(tmp_path, model_type):
    """The order of norms by model_type; dropout is the file's unless its option is given."""
    folder = write_config(tmp_path, config(model_type))
    model = parse(options(folder), 1, "bert").model(11)
    assert model == ModelConfig(2, 8, 4, 11, 6, activation="gelu_exact", layernorm_epsilon=1e-12, hidden_dropout=0.2,
                                attention_dropout=0.3, architecture="bert", heads=("lm", "sop"),
                                apply_residual_connection_post_layernorm=model_type == "bert")
    other = parse(options(folder, "--num-layers 2 --hidden-dropout 0.1 --attention-dropout 0"), 1, "bert").model(11)
    assert (other.hidden_dropout, other.attention_dropout) == (0.1, 0.0)
    flag = "--apply-residual-connection-post-layernorm"
    if model_type == "bert":
        assert parse(options(folder, flag), 1, "bert").model(11) == model
    else:
        refuses(lambda: parse(options(folder, flag), 1, "bert"), f"{flag} is True, but {folder / CONFIG} says that "
                "model_type is megatron-bert, where it is False. Leave the option out")


@pytest.mark.parametrize("model_type, sizes", [("bert", (12, 768, 12, 512)), ("megatron-bert", (24, 1024, 16, 512))])
def test_what_a_file_leaves_out_is_what_transformers_takes(tmp_path, model_type, sizes):
    model = parse(options(write_config(tmp_path, {"model_type": model_type})), 1, "bert").model(30522)
    assert (model.num_layers, model.hidden_size, model.num_attention_heads, model.max_position_embeddings) == sizes
    assert (model.activation, model.layernorm_epsilon) == ("gelu_exact", 1e-12)
    assert model.hidden_dropout == model.attention_dropout == 0.1


def test_a_bert_that_was_trained_without_a_binary_head_has_none(tmp_path):
    for name, heads in (("BertForMaskedLM", ("lm",)), ("BertForPreTraining", ("lm", "sop"))):
        folder = write_config(tmp_path, config(architectures=[name]))
        assert parse(options(folder), 1, "bert").model(11).heads == heads
        assert parse(options(folder, "--bert-no-binary-head"), 1, "bert").model(11).heads == ("lm",)


@given(cases(architectures=ANY_MODEL, position_embedding_type="learned_absolute", llama=False))
def test_a_config_is_written_as_it_is_read(tmp_path_factory, case):
    """This holds for every model that transformers has: any architecture, order and heads."""
    choices = {"rotary_percent": 1.0}
    if case.model.architecture == "gpt":
        choices["apply_residual_connection_post_layernorm"] = False
    model = replace(case.model, **choices)
    folder = write_config(tmp_path_factory.mktemp("config"), config_of(model, NullTokenizer(3), "float64"))
    found = read_config(str(folder), model.architecture)
    again = model_of(found, architecture=model.architecture, heads=model.heads,
                     make_vocab_size_divisible_by=model.make_vocab_size_divisible_by,
                     hidden_dropout=model.hidden_dropout, attention_dropout=model.attention_dropout)
    layout = layout_of(model)
    assert again == model and class_of(model) in json.loads((folder / CONFIG).read_text())["architectures"]
    assert {found[name] for name in layout.hidden_dropout} == {model.hidden_dropout}
    assert found[layout.attention_dropout] == model.attention_dropout


@pytest.mark.parametrize("more, sentence", [
    ("--num-layers 3", "--num-layers is 3, but {config} says that num_hidden_layers is 2. Leave the option out"),
    ("--activation gelu", "--activation is gelu, but {config} says that hidden_act is gelu."),
    ("--layernorm-epsilon 1e-5", "--layernorm-epsilon is 1e-05, but {config} says that layer_norm_eps is 1e-12."),
    ("--position-embedding-type rope", "--position-embedding-type is rope, but {config} says that model_type is bert, "
     "where it is learned_absolute."),
    ("--seq-length 7", "--max-position-embeddings is 6 in the config.json of "),
])
def test_options_that_contradict_the_file_are_refused(folder, more, sentence):
    refuses(lambda: parse(options(folder, more), 1, "bert"), sentence.format(config=folder / CONFIG))


@pytest.mark.parametrize("change, sentence", [
    ({"type_vocab_size": 3}, "type_vocab_size is 3, but here it can only be 2: it says how many pieces of text"),
    ({"type_vocab_size": True}, "type_vocab_size is True, but here it can only be 2"),
    ({"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key', but here it can only"),
    ({"is_decoder": True}, "is_decoder is True, but here it can only be False: it says that a position sees only"),
    ({"add_cross_attention": True}, "add_cross_attention is True, but here it can only be False"),
    ({"tie_word_embeddings": False}, "tie_word_embeddings is False, but here it can only be True: it says that masked"),
    ({"intermediate_size": 33}, "intermediate_size is 33, but here the MLP is 4 x hidden_size = 32 wide."),
    ({"hidden_act": "silu"}, "hidden_act is 'silu', but here it must be one of gelu_new, "),
    ({"num_hidden_layers": "2"}, "num_hidden_layers is '2', but it must be a whole number."),
    ({"model_type": "gpt2"}, "model_type is 'gpt2', but this program has a BERT, so it must be bert or "
     "megatron-bert."),
    ({"model_type": "roberta"}, "model_type is 'roberta', but only gpt2, llama, mistral, qwen2, qwen3, "),
])
def test_a_model_that_is_not_built_here_is_refused(folder, change, sentence):
    write_config(folder, config(**change))
    refuses(lambda: parse(options(folder), 1, "bert"), sentence)


def test_a_bert_is_no_gpt(folder):
    refuses(lambda: parse(options(folder), 1, "gpt"), "model_type is 'bert', but this program has a GPT, so it must be "
            "gpt2 or llama or mistral or qwen2 or qwen3")


@pytest.mark.parametrize("architecture, more, sentence", [
    ("bert", "--position-embedding-type rope", "--save-hf writes a megatron-bert, where --position-embedding-type is "
     "learned_absolute, but it is rope. Leave one of the two out."),
    ("bert", "--position-embedding-type rope --apply-residual-connection-post-layernorm", "--save-hf writes a bert"),
    ("gpt", "--apply-residual-connection-post-layernorm", "--save-hf writes a gpt2, where "
     "--apply-residual-connection-post-layernorm is False, but it is True."),
])
def test_what_transformers_has_not_is_not_saved(tmp_path, architecture, more, sentence):
    refuses(lambda: parse(["--save-hf", str(tmp_path), *more.split()], 1, architecture), sentence)


# ---- the tokenizer --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [BertWordPieceLowerCase, BertWordPieceCase])
def test_the_tokenizer_in_the_folder_is_the_runs(tmp_path, kind):
    """It was saved there, and is found again; but not where the options name another."""
    tokenizer = kind.train(TEXT, 100)
    folder = write_config(tmp_path, config(vocab_size=tokenizer.vocab_size))
    save_tokenizer(str(folder), tokenizer)
    args = parse(options(folder), 1, "bert").args
    again = given_tokenizer(filled(TokenizerChoice, args))
    assert (again.name, again.encode(TEXT[0]), again.pad) == (kind.name, tokenizer.encode(TEXT[0]), tokenizer.pad)
    check_vocabulary(str(folder), again)
    assert parse(options(folder, "--tokenizer-model other"), 1, "bert").args.vocab_file is None
    (folder / SETTINGS).write_text(json.dumps({"do_lower_case": kind.lower_case, "strip_accents": not kind.lower_case}))
    assert tokenizer_in(str(folder)) == {}, "it takes accents for what they are not here"
    (folder / SETTINGS).unlink()
    assert tokenizer_in(str(folder))["tokenizer_type"] == "BertWordPieceLowerCase"


def test_the_tokenizer_must_be_the_models(tmp_path):
    tokenizer = BertWordPieceCase.train(TEXT, 100)
    folder = write_config(tmp_path, config(vocab_size=tokenizer.vocab_size))
    save_tokenizer(str(folder), tokenizer)
    lines = (folder / "vocab.txt").read_text().splitlines()
    (folder / "vocab.txt").write_text("\n".join([*lines[:-2], lines[-1], lines[-2]]))
    refuses(lambda: check_vocabulary(str(folder), tokenizer),
            f"{folder / 'vocab.txt'} has another number for the token")
    refuses(lambda: check_vocabulary(str(folder), ByteLevelBPETokenizer.train(TEXT, 260)),
            f"says that vocab_size is {tokenizer.vocab_size}, but the ByteLevelBPETokenizer has 260 tokens. Give the "
            "tokenizer that the model was trained with: --tokenizer-type BertWordPieceLowerCase or BertWordPieceCase")


def test_without_files_there_is_nothing_to_save(tmp_path):
    save_tokenizer(str(empty(tmp_path / "none")), NullTokenizer(3))
    assert not any((tmp_path / "none").iterdir())
