"""The files that options write, compared with those they read: no output takes the place of another file of the run.
"""
import os
import re
from typing import NamedTuple

from mpi_impl.runtime.advice import check_installed
from mpi_impl.runtime.files import PICTURES, check_ending, check_folder, check_writable
from reference.config import option
from reference.errors import UserError

ANY, NONE = ".*", "(?!)"
CHECKPOINT = r"latest_checkpointed_iteration\.txt(\.tmp)?|tokenizer\.json|run\.lock|iter_\d+(\.\w+\.tmp)?/.*"
HUGGING_FACE = r"[^/]*\.safetensors(\.index\.json)?|(tokenizer_)?config\.json|vocab\.(json|txt)|merges\.txt"

# The options that name files, or folders with the files in them that are meant, as a regular expression over paths.
FILES_WRITTEN = ("metrics_file", "ledger", "plot", "report", "output")
FOLDERS_WRITTEN = {"trace": r"trace\.json|timeline\.png",
                   "record": r"recording\.json|iteration-\d+\.rank-\d+\.safetensors",
                   "save": CHECKPOINT, "save_hf": HUGGING_FACE, "offload_folder": NONE}     # whose files have no names
FILES_READ = ("tokenizer_model", "vocab_file", "merge_file", "prompts_file", "csv", "hardware")
FOLDERS_READ = {"load": CHECKPOINT, "load_hf": HUGGING_FACE}
ENDINGS = {"plot": PICTURES, "output": PICTURES, "report": (".html",)}     # that names must have


class OptionPath(NamedTuple):
    """A file or a folder that an option names."""

    name: str                    # of the option
    path: str
    files: str | None = None     # of a folder: which files in it are the option's

    def holds(self, path: str) -> bool:
        """Report whether a file is this one, or one of this folder's."""
        if self.files is None:
            return same_file(self.path, path)
        inside = os.path.relpath(os.path.realpath(path), os.path.realpath(self.path))
        return inside.split(os.sep)[0] != os.pardir and re.fullmatch(self.files, inside) is not None

    def found(self) -> list["OptionPath"]:
        """List the files of this folder that are there, and would be rewritten."""
        if self.files is None or not os.path.isdir(self.path):
            return []
        names = [name for name in os.listdir(self.path) if re.fullmatch(self.files, name)]
        return [OptionPath(self.name, os.path.join(self.path, name)) for name in names]


def same_file(a: str, b: str) -> bool:
    """Report whether two names lead to one file, which need not exist yet."""
    if os.path.realpath(a) == os.path.realpath(b):
        return True
    return os.path.exists(a) and os.path.exists(b) and os.path.samefile(a, b)


def check_outputs(args: object) -> None:
    """Make the folders that a program's options name to be written. What is in files stays as it is.

    Raises UserError for an output that cannot be written, or would take the place of another option's file.
    """
    values = vars(args)
    for name in (*FILES_WRITTEN, *FOLDERS_WRITTEN):
        if values.get(name) == "":
            raise UserError(f"{option(name)} is empty. Give a path, or leave the option out.")
    files = [OptionPath(name, values[name]) for name in FILES_WRITTEN if values.get(name)]
    folders = [OptionPath(name, values[name], own) for name, own in FOLDERS_WRITTEN.items() if values.get(name)]
    inputs = paths_read(values)
    for file in files:
        refuse_shared(file, [other for other in [*files, *folders] if other is not file], "writes")
        if os.path.exists(file.path):
            refuse_shared(file, inputs, "reads")
    for folder in folders:
        if folder.name != "save":       # which may be the folder of --load: its checkpoints are never written again
            for file in folder.found():
                refuse_shared(file, inputs, "reads")
    for file in files:
        if file.name in ENDINGS:
            check_ending(file.path, option(file.name), ENDINGS[file.name])
        check_writable(file.path)
    for folder in folders:
        check_folder(folder.path)
        if folder.name == "trace":
            check_installed("matplotlib", "--trace")
            for file in folder.found():
                check_writable(file.path)


def paths_read(values: dict) -> list[OptionPath]:
    """Return the files and folders that the options name as inputs."""
    found = [OptionPath(name, values[name], own) for name, own in FOLDERS_READ.items() if values.get(name)]
    found += [OptionPath(name, path) for name in FILES_READ for path in listed(values.get(name))]
    for name in ("data_path", "input"):
        for path in listed(values.get(name)):        # a file, a folder, or the prefix of a pair
            found += [OptionPath(name, path, ANY if os.path.isdir(path) else None),
                      OptionPath(name, f"{path}.bin"), OptionPath(name, f"{path}.idx")]
    return found


def listed(value: str | list[str] | None) -> list[str]:
    """Return the paths of an option, which may have one, several or none."""
    return [value] if isinstance(value, str) else value or []


def refuse_shared(file: OptionPath, others: list[OptionPath], does: str) -> None:
    """Raise UserError if one of the others holds this file."""
    for other in others:
        if other.holds(file.path):
            where = "" if other.files is None else f" in {other.path}"
            raise UserError(f"{option(file.name)} {file.path} is a file that {option(other.name)} {does}{where}: give "
                            "it another name.")
