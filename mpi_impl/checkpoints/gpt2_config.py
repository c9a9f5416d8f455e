"""config.json of a GPT-2 in Hugging Face's layout: what it says as values of our options, and the other way round.

Both have the same model, so few fields need more than another name. What is left out of a file has the value that
`transformers` gives it. A field that asks for something that is not built here is refused, and none is passed over.
"""
import argparse
import json
import os
from collections.abc import Sequence
from typing import Any

from mpi_impl.data.tokenizer import BytePairTokenizer, Tokenizer
from mpi_impl.files import reading
from reference.config import ModelConfig, option
from reference.errors import UserError

CONFIG, VOCABULARY, MERGES = "config.json", "vocab.json", "merges.txt"
ACTIVATIONS = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu": "gelu_exact", "relu": "relu"}

# Fields that shape the model, and transformers' defaults, which have the types that values must have.
FIELDS: dict[str, Any] = {
    "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257, "n_positions": 1024,
    "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True,
    "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1,
}
# Fields that can have no other value here, and what they say.
FIXED = {
    "scale_attn_weights": (True, "that attention's scores are divided by the root of the head size"),
    "scale_attn_by_inverse_layer_idx": (False, "that attention's scores are also divided by the layer's number"),
    "reorder_and_upcast_attn": (False, "in which format attention's scores are computed"),
    "add_cross_attention": (False, "that each layer also attends to another model's output"),
}
# Our option for a field, where they say the same thing in the same words.
SAME = {
    "num_layers": "n_layer", "hidden_size": "n_embd", "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions", "layernorm_epsilon": "layer_norm_epsilon",
}


# ---- in -------------------------------------------------------------------------------------------------------------


def read_config(folder: str) -> dict[str, Any]:
    """The fields that shape the model, each of the right type. Raises UserError for what is not a GPT-2 as built here.
    """
    path = os.path.join(folder, CONFIG)
    if not os.path.isfile(path):
        raise UserError(f"--load-hf {folder} has no {CONFIG}. Give the folder of a model that transformers has saved.")
    found = read_json(path)
    if found.get("model_type") != "gpt2":
        raise UserError(f"{path} says that model_type is {found.get('model_type')!r}, but only gpt2 can be loaded.")
    config = FIELDS | {name: found[name] for name in FIELDS if name in found}
    for name, default in FIELDS.items():
        config[name] = checked(path, name, config[name], type(default))
    for name, (value, meaning) in FIXED.items():
        if found.get(name, value) is not value:
            raise UserError(f"{path} says that {name} is {found[name]!r}, but here it can only be {value}: it says "
                            f"{meaning}.")
    if found.get("n_inner") not in (None, 4 * config["n_embd"]):
        raise UserError(f"{path} says that n_inner is {found['n_inner']!r}, but here the MLP is 4 x n_embd = "
                        f"{4 * config['n_embd']} wide.")
    if config["activation_function"] not in ACTIVATIONS:
        raise UserError(f"{path} says that activation_function is {config['activation_function']!r}, but here it must "
                        f"be one of {', '.join(ACTIVATIONS)}.")
    return config


def read_json(path: str) -> dict[str, Any]:
    """A JSON object. Raises UserError if there is none."""
    try:
        with reading(path), open(path, encoding="utf-8") as file:
            found = json.load(file)
    except ValueError as error:      # of JSON, or of UTF-8
        raise UserError(f"{path} is not JSON: {error}.") from error
    if not isinstance(found, dict):
        raise UserError(f"{path} is not a JSON object, but a {type(found).__name__}.")
    return found


def checked(path: str, name: str, value, kind: type):
    """A whole number may stand for another; a bool is no number."""
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        expected = {int: "a whole number", float: "a number", bool: "true or false", str: "a name"}[kind]
        raise UserError(f"{path} says that {name} is {value!r}, but it must be {expected}.")
    return value


def adopt(parser: argparse.ArgumentParser, argv: Sequence[str] | None, folder: str) -> argparse.Namespace:
    """The options, once config.json has given those of the model that argv does not name.

    So has the folder given the tokenizer, if it has one. Dropout is no part of the model: its option counts, if it is
    given. Raises UserError for another option that says something else than the file.
    """
    config = read_config(folder)
    model = model_options(config)
    dropout = {"hidden_dropout": None, "attention_dropout": config["attn_pdrop"]}
    if config["resid_pdrop"] == config["embd_pdrop"]:
        dropout["hidden_dropout"] = config["resid_pdrop"]
    files = [os.path.join(folder, name) for name in (VOCABULARY, MERGES)]
    own_tokenizer = {"tokenizer_type": "GPT2BPETokenizer"} if all(map(os.path.isfile, files)) else {}
    parser.set_defaults(**model, **dropout, **own_tokenizer)
    args = parser.parse_args(argv)
    path = os.path.join(folder, CONFIG)
    for name, value in model.items():
        if getattr(args, name) != value:
            raise UserError(f"{option(name)} is {getattr(args, name)}, but {path} says {said(config, name)}. Leave the "
                            "option out, or load another model.")
    if args.hidden_dropout is None:
        raise UserError(f"{path} says that resid_pdrop is {config['resid_pdrop']} and embd_pdrop "
                        f"{config['embd_pdrop']}, but here both are --hidden-dropout. Give that option.")
    if own_tokenizer and args.tokenizer_type == "GPT2BPETokenizer" and not (args.vocab_file or args.merge_file):
        args.vocab_file, args.merge_file = files
    return args


def model_options(config: dict[str, Any]) -> dict[str, Any]:
    """The options that say which model it is. (Its vocabulary is the tokenizer's.)"""
    return {ours: config[theirs] for ours, theirs in SAME.items()} | {
        "activation": ACTIVATIONS[config["activation_function"]],
        "untie_embeddings_and_output_weights": not config["tie_word_embeddings"],
        "position_embedding_type": "learned_absolute"}


def said(config: dict[str, Any], name: str) -> str:
    """The words of config.json that stand for one of those options."""
    others = {"activation": "activation_function", "untie_embeddings_and_output_weights": "tie_word_embeddings"}
    if name == "position_embedding_type":
        return "that it is a GPT-2, whose positions are learned_absolute"
    theirs = (SAME | others)[name]
    return f"that {theirs} is {config[theirs]}"


def check_vocabulary(folder: str, tokenizer: Tokenizer) -> None:
    """Raises UserError if the tokenizer's words are not the model's: their number, and if the folder tells, each one.
    """
    size, path = read_config(folder)["vocab_size"], os.path.join(folder, VOCABULARY)
    advice = ("Give the tokenizer that the model was trained with: --tokenizer-type GPT2BPETokenizer with --vocab-file "
              f"and --merge-file, or for ids without text --tokenizer-type NullTokenizer --vocab-size {size - 1}.")
    if tokenizer.vocab_size != size:
        raise UserError(f"{os.path.join(folder, CONFIG)} says that vocab_size is {size}, but the {tokenizer.name} has "
                        f"{tokenizer.vocab_size:,} tokens. {advice}")
    if isinstance(tokenizer, BytePairTokenizer) and os.path.isfile(path):
        words = tokenizer.bpe.get_vocab()
        other = next((word for word, i in read_json(path).items() if words.get(word) != i), None)
        if other is not None:
            raise UserError(f"{path} has another number for the token {other!r} than the {tokenizer.name}. {advice}")


# ---- out ------------------------------------------------------------------------------------------------------------


def check_expressible(args) -> None:
    """Raises UserError for a model that is no GPT-2."""
    if args.position_embedding_type != "learned_absolute":
        raise UserError(f"--save-hf writes a GPT-2, whose positions are learned, but --position-embedding-type is "
                        f"{args.position_embedding_type}. Leave one of the two out.")


def config_of(model: ModelConfig, eod: int, dtype: str) -> dict[str, Any]:
    """The fields of config.json, for weights that are written in this dtype. `eod` is the end-of-document token."""
    activation = next(theirs for theirs, ours in ACTIVATIONS.items() if ours == model.activation)
    return {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "dtype": dtype,
        **{theirs: getattr(model, ours) for ours, theirs in SAME.items()},
        "n_inner": None, "vocab_size": model.vocab_size, "activation_function": activation,
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        "resid_pdrop": model.hidden_dropout, "embd_pdrop": model.hidden_dropout, "attn_pdrop": model.attention_dropout,
        "initializer_range": model.init_method_std, **{name: value for name, (value, _) in FIXED.items()},
        "bos_token_id": eod, "eos_token_id": eod}
