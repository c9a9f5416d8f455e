"""A tokenizer from the tokenizer.json of a model in Hugging Face's layout, such as a Llama's.

The file does not say which token ends a document, nor how many rows the model's table has, which may be more than
tokens: both stand in files next to it, tokenizer_config.json and config.json. What is saved here has all in one file.
"""
import json
import os
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Library

from mpi_impl.data.tokenizer import END_OF_DOCUMENT, LibraryTokenizer, check_file, panics_as_errors
from mpi_impl.runtime.files import LARGEST
from mpi_impl.runtime.formats import Object, read_json
from reference.errors import UserError

SETTINGS, CONFIG = "tokenizer_config.json", "config.json"


class HuggingFaceTokenizer(LibraryTokenizer):
    """Any tokenizer of the library `tokenizers`."""

    name = "HuggingFaceTokenizer"

    def __init__(self, library: Library, end_of_document: str, vocab_size: int = 0):
        self.end_of_document = end_of_document
        super().__init__(library)
        self.vocab_size = max(self.vocab_size, vocab_size)

    @classmethod
    def load(cls, path: str | Path) -> "HuggingFaceTokenizer":
        """Read a tokenizer.json, with the files next to it, or what `save` wrote. Raise UserError if that fails."""
        check_file("--tokenizer-model", str(path), "a tokenizer.json")
        content: Any = read_json(str(path), Object, LARGEST)
        try:
            about, library = ((content[cls.name], content["library"]) if cls.name in content else
                              (facts_beside(str(path)), content))
            with panics_as_errors():
                return cls(Library.from_str(json.dumps(library)), about["end_of_document"], about["vocab_size"])
        except Exception as error:  # the library raises nothing more specific
            raise UserError(f"--tokenizer-model {path} is not a tokenizer.json whose {SETTINGS} names the token that "
                            f"ends a document ({error}). Give the files as they are published.") from error

    def save(self, path: str | Path) -> None:
        """Write the tokenizer as one JSON file. Raise OSError if that fails."""
        about = {"end_of_document": self.end_of_document, "vocab_size": self.vocab_size}
        content = {self.name: about, "library": json.loads(self.library.to_str())}
        Path(path).write_text(json.dumps(content), "utf-8", newline="\n")


def facts_beside(path: str) -> dict[str, Any]:
    """Return the token that ends a document, and the rows of the model's table, or 0 where no file says it."""
    settings, config = (read_json(file, Object) if os.path.isfile(file) else {}
                        for file in (os.path.join(os.path.dirname(path), name) for name in (SETTINGS, CONFIG)))
    end: Any = settings.get("eos_token", END_OF_DOCUMENT)
    size: Any = config.get("vocab_size", 0)
    return {"end_of_document": end.get("content") if isinstance(end, dict) else end,
            "vocab_size": size if type(size) is int else 0}
