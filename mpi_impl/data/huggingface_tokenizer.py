"""A tokenizer as `transformers` reads it from the folder of a model in Hugging Face's layout.

tokenizer.json says how texts are split, numbered and joined, and which tokens stand before and after each of them. The
files next to it say which tokens are special and which one ends a document (tokenizer_config.json,
special_tokens_map.json), which ones end a generated text (generation_config.json, or else config.json), and how many
rows the model's table has, which may be more than there are tokens (config.json).

All of them are kept as they are, so that a model is saved again with the tokenizer that it came with.
"""
import json
import os
import re
from pathlib import Path
from typing import Any, Self

from tokenizers import Tokenizer as Library, decoders, pre_tokenizers

from mpi_impl.data.tokenizer import END_OF_DOCUMENT, LibraryTokenizer, check_file, refusing
from mpi_impl.runtime.files import LARGEST, read_text
from mpi_impl.runtime.formats import Object, read_json

WHOLE, SETTINGS, GENERATION, CONFIG = "tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json"
SPECIAL_TOKENS, CHAT_TEMPLATE = "special_tokens_map.json", "chat_template.jinja"
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Fields of generation_config.json that are followed, or do not change a text.
NEUTRAL = {*TOKEN_IDS, "_from_model_config", "transformers_version", "max_length", "max_new_tokens", "do_sample",
           "use_cache", "cache_implementation", "output_attentions", "output_hidden_states", "output_scores"}
FOREIGN = re.compile(r"\.model(\.v\d+)?$|\.tiktoken$|\btekken\.json$")     # files of SentencePiece and tiktoken
RESAVE = "Let transformers write that file: AutoTokenizer.from_pretrained({0!r}).save_pretrained({0!r})."


class HuggingFaceTokenizer(LibraryTokenizer):
    """Any tokenizer of the library `tokenizers`. The names of special tokens in a text become these tokens."""

    name = "HuggingFaceTokenizer"

    def __init__(self, content: Object, beside: Object):
        """Make the tokenizer of a tokenizer.json's content and those of the files next to it, by name.

        Raises some exception, by Python or the library, for contents that do not fit.
        """
        self.content, self.beside = content, beside
        config: Any = beside.get(CONFIG, beside)        # version 0.2.0 saved no files
        settings: Any = beside.get(SETTINGS, {})
        if "added_tokens_decoder" not in settings:      # they have replaced the other file
            settings = settings | beside.get(SPECIAL_TOKENS, {})
        library = Library.from_str(json.dumps(content))
        if content["model"].get("dropout"):
            raise ValueError("its dropout skips merges at random, so that a text has no definite tokens")
        if is_llamas_class(settings, content, config):
            follow_llamas_class(library, settings)
        library.add_special_tokens(special_tokens(settings))
        end = settings.get("eos_token") or beside.get("end_of_document", END_OF_DOCUMENT)
        self.end_of_document = end["content"] if isinstance(end, dict) else end
        self.plain = bool(settings.get("split_special_tokens"))
        super().__init__(library)
        self.fingerprint += "-plain" * self.plain
        self.vocab_size = max(self.vocab_size, config.get("vocab_size", 0))
        whole, n = library.encode("a"), len(library.encode("a", add_special_tokens=False))
        first = (*whole.special_tokens_mask, 0).index(0)
        self.prefix, self.suffix = whole.ids[:first], whole.ids[first + n:]
        self.token_ids = {"bos_token_id": self.eod, "eos_token_id": self.eod} | {
            name: config[name] for name in TOKEN_IDS if name in config}
        generation: Any = beside.get(GENERATION, self.token_ids)
        ends = generation.get("eos_token_id")
        self.ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
        if ignored := [*(f"{name} {value}" for name, value in generation.items()
                         if name not in NEUTRAL and value is not None), *settings.keys() & {"chat_template"}]:
            self.note = (f"\nnote: the model's files set {', '.join(ignored)}, without effect here. Give options, and "
                         "write a chat's control tokens into the prompt.")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a tokenizer.json, with the files next to it, or what `save` wrote. Raise UserError if that fails."""
        check_file("--tokenizer-model", str(path), "a tokenizer.json")
        content: Any = read_json(str(path), Object, LARGEST)
        with refusing(f"--tokenizer-model {path} is not a tokenizer.json whose {SETTINGS} names the token that ends a "
                      "document", "Give the files as they are published."):
            return (cls(content["library"], content[cls.name]) if cls.name in content else
                    cls(content, files_in(os.path.dirname(path))))

    def save(self, path: str | Path) -> None:
        """Write the tokenizer as one JSON file. Raise OSError if that fails."""
        write_json(path, {self.name: self.beside, "library": self.content})

    def save_files(self, folder: str) -> None:
        """Write the files as they were read, but not the model's config.json. Raise OSError if that fails."""
        settings = {"eos_token": self.end_of_document}
        for name, content in {WHOLE: self.content, SETTINGS: settings, **self.beside}.items():
            if name.endswith(".json") and name != CONFIG:
                write_json(Path(folder, name), content)


def write_json(path: str | Path, content: Object) -> None:
    Path(path).write_text(json.dumps(content, indent=1, ensure_ascii=False), "utf-8", newline="\n")


def is_llamas_class(settings: Any, content: Any, config: Any) -> bool:
    """Report whether transformers 5 reads the files as its LlamaTokenizer, which ignores how they split texts."""
    return (settings.get("tokenizer_class") in ("LlamaTokenizer", "LlamaTokenizerFast")
            and config.get("model_type") not in ("mistral", "mixtral", "qwen2") and "ByteLevel" not in str(content))


def follow_llamas_class(library: Library, settings: Any) -> None:
    """Split and join texts as that class does: a blank is put before the first word if there is none."""
    without = settings.get("add_prefix_space") is False
    scheme = "never" if without else "always" if settings.get("legacy") else "first"
    library.normalizer, library.pre_tokenizer = None, pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    library.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                         *([] if without else [decoders.Strip(" ", 1, 0)])])


def special_tokens(settings: Any) -> list[str]:
    """Return the texts of the special tokens in tokenizer_config.json: those with a name of their own, then others."""
    others = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    tokens = [token for name, token in settings.items() if name.endswith("_token")] + list(
        others.values() if isinstance(others, dict) else others)
    texts = [token.get("content") if isinstance(token, dict) else token for token in tokens]
    return [text for text in texts if isinstance(text, str)]


def files_in(folder: str) -> Object:
    """Return the contents of the files in a folder that belong to its tokenizer.json, by name."""
    files: Any = {name: read_json(path, Object, LARGEST) for name in (SETTINGS, SPECIAL_TOKENS, GENERATION, CONFIG)
                  if os.path.isfile(path := os.path.join(folder, name))}
    if os.path.isfile(template := os.path.join(folder, CHAT_TEMPLATE)):
        files[SETTINGS] = files.get(SETTINGS, {}) | {"chat_template": read_text(template)}
    return files
