"""config.json of a model in Hugging Face's layout, translated into our options and back.

Both have the same models, so few fields need more than another name. A field that is missing has transformers' default.
A field that asks for something that is not built here is refused. Fields that transformers does not read in this
model_type, and those that do not change what it computes, are not read here.
"""
import difflib
import os
import re
from collections.abc import Mapping
from typing import Any

from mpi_impl.checkpoints.bert_layout import BERT, MEGATRON_BERT
from mpi_impl.checkpoints.gpt2_layout import GPT2
from mpi_impl.checkpoints.huggingface_layout import TransformersLayout, check_type
from mpi_impl.checkpoints.huggingface_tokenizer import OPTIONS, check_words, refuse_foreign, tokenizer_in
from mpi_impl.checkpoints.llama_layout import LLAMA, MISTRAL, QWEN_2, QWEN_3
from mpi_impl.checkpoints.mixtral_layout import MIXTRAL, QWEN_3_MOE
from mpi_impl.data.huggingface_tokenizer import HuggingFaceTokenizer
from mpi_impl.data.tokenizer import Tokenizer, WordPieceTokenizer
from mpi_impl.runtime.files import is_there
from mpi_impl.runtime.formats import Object, read_json
from reference.config import ExpertsConfig, ModelConfig, option
from reference.errors import UserError

CONFIG = "config.json"
LAYOUTS = {layout.model_type: layout for layout in (GPT2, LLAMA, MISTRAL, QWEN_2, QWEN_3, MIXTRAL, QWEN_3_MOE, BERT,
                                                    MEGATRON_BERT)}
NOT_BUILT = {"quantization_config": "quantized weights", "per_layer_config": "layers with sizes of their own"}
ACTIVATIONS = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu": "gelu_exact", "relu": "relu"}


def layouts_of(architecture: str) -> list[TransformersLayout]:
    return [layout for layout in LAYOUTS.values() if layout.architecture == architecture]


def layout_of(model: ModelConfig) -> TransformersLayout:
    """Return the layout in which the model is saved."""
    return next(layout for layout in layouts_of(model.architecture)
                if layout.suits(model) and not differences(layout, options_of(model)))


def options_of(model: ModelConfig) -> dict[str, Any]:
    """Return the model's fields, those of its experts among them, under the names of the options."""
    return vars(model) | (vars(model.experts) if model.experts else {"num_experts": None})


def differences(layout: TransformersLayout, options: dict[str, Any]) -> list[str]:
    """Return the options that differ from the layout's fixed values."""
    return [name for name, value in layout.options.items() if options.get(name, value) != value]


def class_of(model: ModelConfig) -> str:
    """Return transformers' class of the model."""
    return layout_of(model).classes[model.heads]


# ---- read -----------------------------------------------------------------------------------------------------------


def read_config(folder: str, architecture: str) -> dict[str, Any]:
    """Read the fields that shape the model, checked, by their names there, with model_type and vocab_size.

    Raises UserError for a model that is not of this architecture as it is built here.
    """
    path = os.path.join(folder, CONFIG)
    layout, found = layout_in(folder)
    if layout.architecture != architecture:
        types = " or ".join(one.model_type for one in layouts_of(architecture))
        raise UserError(f"{path} says that model_type is {layout.model_type!r}, but this program has a "
                        f"{architecture.upper()}, so it must be {types}. Give the folder of such a model, or choose "
                        "another program.")
    config = {name: check_type(path, name, found.get(name, default), type(default))
              for name, default in layout.fields.items()}
    for name, meaning in NOT_BUILT.items():
        if found.get(name) is not None:
            raise UserError(f"{path} has a {name}, but {meaning} cannot be loaded. Give a model without it.")
    for name, (value, meaning) in layout.fixed.items():
        other = found.get(name, value)
        if type(other) is not type(value) or other != value:
            raise UserError(f"{path} says that {name} is {other!r}, but here it can only be {value}: it says "
                            f"{meaning}.")
    if layout.mlp_width:
        (width, default), hidden = layout.mlp_width, layout.same["hidden_size"]
        if found.get(width, default) not in (None, 4 * config[hidden]):
            raise UserError(f"{path} says that {width} is {found.get(width, default)!r}, but here the MLP is 4 x "
                            f"{hidden} = {4 * config[hidden]} wide.")
    if layout.activation and config[layout.activation] not in ACTIVATIONS:
        raise UserError(f"{path} says that {layout.activation} is {config[layout.activation]!r}, but here it must be "
                        f"one of {', '.join(ACTIVATIONS)}.")
    config |= {"model_type": layout.model_type, "derived": layout.derive(path, found, config)}
    check_sizes(path, layout, config)
    return config


def check_sizes(path: str, layout: TransformersLayout, config: dict[str, Any]) -> None:
    """Raise UserError, in the words of the file, for sizes and shares that no model has."""
    ours = layout.same | layout.derived | {"hidden_dropout": " or ".join(layout.hidden_dropout),
                                           "attention_dropout": layout.attention_dropout, "vocab_size": "vocab_size"}
    theirs = {option(name): field for name, field in ours.items()}
    shares = [("hidden_dropout", field) for field in layout.hidden_dropout]
    try:
        for name, field in [*shares, ("attention_dropout", layout.attention_dropout)]:
            model_of(config, **{"architecture": layout.architecture, "heads": next(iter(layout.classes)),
                                name: config[field]})
    except UserError as error:
        words = re.sub("--[a-z-]+", lambda name: theirs.get(name[0], name[0]), str(error))
        raise UserError(f"{path} asks for a model that cannot be: {words}") from error


def layout_in(folder: str) -> tuple[TransformersLayout, dict[str, Any]]:
    """Return the layout of the model in a folder, and its config.json. Raise UserError if there is none."""
    path = os.path.join(folder, CONFIG)
    if not is_there(path):
        raise UserError(f"{folder} has no {CONFIG}. Give the folder of a model that transformers has saved.")
    found = read_json(path, Object)
    if str(found.get("model_type")) not in LAYOUTS:
        raise UserError(f"{path} says that model_type is {found.get('model_type')!r}, but only {', '.join(LAYOUTS)} "
                        "can be loaded.")
    layout = LAYOUTS[found["model_type"]]
    return layout, found | {name: found[alias] for alias, name in layout.aliases.items() if alias in found}


def notes(folder: str) -> str:
    """Return lines about unknown fields of config.json that look like a misspelling of a missing one."""
    layout, found = layout_in(folder)
    absent = [name for name in (*layout.fields, *layout.fixed) if name not in found]
    slips = {name: close[0] for name in found if name not in layout.fields
             if (close := difflib.get_close_matches(name, absent, n=1, cutoff=0.85))}
    return "".join(f"\nnote: {os.path.join(folder, CONFIG)} has {name}, which means nothing; {meant} is not there, and "
                   f"so is {layout.fields.get(meant, layout.fixed.get(meant, ('',))[0])}"
                   for name, meant in slips.items())


def adopt_options(folder: str, architecture: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that a folder decides: the model's, and its tokenizer, if it has one.

    Dropout is not a part of the model: its option counts, if it is given. Raises UserError for another given option
    that says something else than the file.
    """
    config, path = read_config(folder, architecture), os.path.join(folder, CONFIG)
    layout, found = layout_in(folder)
    model, tokenizer = model_options(config), tokenizer_in(folder)
    for name, value in model.items():
        if given.get(name, value) != value:
            raise UserError(f"{option(name)} is {given[name]}, but {path} says {describe_field(config, name)}. Leave "
                            "the option out, or load another model.")
    shares = {config[name] for name in layout.hidden_dropout}
    if len(shares) > 1 and "hidden_dropout" not in given:
        both = " and ".join(f"{name} is {config[name]}" for name in layout.hidden_dropout)
        raise UserError(f"{path} says that {both}, but here both are --hidden-dropout. Give that option.")
    others = any(given.get(name) for name in OPTIONS) or given.get("tokenizer_type", "") not in (
        "", tokenizer.get("tokenizer_type"))
    if not others and not tokenizer:
        refuse_foreign(folder)
    if others and tokenizer:
        tokenizer = {"tokenizer_type": tokenizer["tokenizer_type"]}
    return model | fewer_heads(layout, found) | tokenizer | {
        "hidden_dropout": shares.pop() if shares else 0.0, "attention_dropout": config[layout.attention_dropout]}


def model_options(config: dict[str, Any]) -> dict[str, Any]:
    """Return the options that determine the model. (Its vocabulary is the tokenizer's.)"""
    layout = LAYOUTS[config["model_type"]]
    options = {ours: config[theirs] for ours, theirs in layout.same.items()} | layout.options | config["derived"]
    if layout.activation:
        options["activation"] = ACTIVATIONS[config[layout.activation]]
    if "tie_word_embeddings" in config:
        options["untie_embeddings_and_output_weights"] = not config["tie_word_embeddings"]
    return options


def model_of(config: dict[str, Any], **others: Any) -> ModelConfig:
    """Return the model of a config.json; `others` are further fields. Raise UserError for sizes that do not fit."""
    fields = model_options(config)
    fields.pop("group_query_attention", None)
    fields["add_bias_linear"] = not fields.pop("disable_bias_linear", False)
    experts = {name: fields.pop(name) for name in ExpertsConfig.__dataclass_fields__ if name in fields}
    fields["experts"] = ExpertsConfig(**experts) if experts.get("num_experts") is not None else None
    return ModelConfig(vocab_size=config["vocab_size"], **fields | others)


def fewer_heads(layout: TransformersLayout, found: dict[str, Any]) -> dict[str, bool]:
    """Return the option for a BERT that has no head for the order of sentences."""
    without = layout.architecture == "bert" and found.get("architectures") == [layout.classes["lm",]]
    return {"bert_no_binary_head": True} if without else {}


def describe_field(config: dict[str, Any], name: str) -> str:
    """Describe the field of config.json that stands for an option."""
    layout = LAYOUTS[config["model_type"]]
    if name in layout.options:
        only = layout.options[name]
        return f"that model_type is {layout.model_type}, where it is {'not given' if only is None else only}"
    if name in layout.derived:
        return f"by its {layout.derived[name]} that it is {config['derived'][name]}"
    others = {"activation": layout.activation or "", "untie_embeddings_and_output_weights": "tie_word_embeddings"}
    theirs = (layout.same | others)[name]
    return f"that {theirs} is {config[str(theirs)]}"


def check_vocabulary(folder: str, tokenizer: Tokenizer) -> None:
    """Raise UserError if the tokenizer's tokens differ from the model's, in number or in the folder's list."""
    layout, found = layout_in(folder)
    size = found.get("vocab_size", layout.fields["vocab_size"])
    kind = ("HuggingFaceTokenizer with --tokenizer-model" if layout.derived else
            "GPT2BPETokenizer with --vocab-file and --merge-file")
    advice = "Give the tokenizer that the model was trained with: --tokenizer-type " + (
        "BertWordPieceLowerCase or BertWordPieceCase with --vocab-file." if layout.architecture == "bert" else
        f"{kind}, or for ids without text --tokenizer-type NullTokenizer --vocab-size {size - 1}.")
    if tokenizer.vocab_size != size:
        raise UserError(f"{os.path.join(folder, CONFIG)} says that vocab_size is {size}, but the {tokenizer.name} has "
                        f"{tokenizer.vocab_size:,} tokens. {advice}")
    check_words(folder, tokenizer, advice)


# ---- write ----------------------------------------------------------------------------------------------------------


def check_expressible(args: Any, architecture: str) -> None:
    """Raise UserError for a model that transformers cannot express."""
    def far(layout: TransformersLayout) -> tuple[int, bool]:
        other = differences(layout, vars(args))
        return len(other), "num_experts" in other            # a model with experts is meant to have them

    layout = min(layouts_of(architecture), key=far)
    for name in differences(layout, vars(args)):
        only = layout.options[name]
        raise UserError(f"--save-hf writes a {layout.model_type}, where {option(name)} is "
                        f"{'not given' if only is None else only}, but it is {getattr(args, name)}. Leave one of the "
                        "two out.")


def config_of(model: ModelConfig, tokenizer: Tokenizer, dtype: str) -> dict[str, Any]:
    """Return the fields of config.json, for weights that are written in this dtype."""
    layout = layout_of(model)
    chosen: dict[str, Any] = {}
    if layout.activation:
        chosen[layout.activation] = next(theirs for theirs, ours in ACTIVATIONS.items() if ours == model.activation)
    if layout.mlp_width:
        width, default = layout.mlp_width
        chosen[width] = None if default is None else 4 * model.hidden_size
    return {
        "architectures": [class_of(model)], "model_type": layout.model_type, "dtype": dtype,
        **{name: value for name, (value, _) in layout.fixed.items()},
        **{theirs: options_of(model)[ours] for ours, theirs in layout.same.items()}, **chosen, **layout.write(model),
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        **dict.fromkeys(layout.hidden_dropout, model.hidden_dropout), layout.attention_dropout: model.attention_dropout,
        "initializer_range": model.init_method_std, **special_tokens(layout, tokenizer)}


def special_tokens(layout: TransformersLayout, tokenizer: Tokenizer) -> dict[str, int | None]:
    """Return the tokens with which the model begins, ends or pads a text."""
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return tokenizer.token_ids
    if layout.architecture == "gpt":
        return {"bos_token_id": tokenizer.eod, "eos_token_id": tokenizer.eod}
    return {"pad_token_id": tokenizer.pad if isinstance(tokenizer, WordPieceTokenizer) else None}
