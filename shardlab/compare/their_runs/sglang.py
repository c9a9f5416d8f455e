"""Dumps of SGLang's dumper, which Megatron-LM's and miles's users have, too: a file of torch.save for each tensor.

Its name has the tags, `step=0___rank=1___dump_index=7___name=mlp_output___layer_id=3.pt`, and it holds `value`, the
rank's part, and `meta`, with the tags, the text of the dims, and the rank's place in the layout (sgl-project/sglang,
python/sglang/srt/debug_utils/dumper.py).
"""
import os
import re
from collections import defaultdict
from typing import Any

from mpi_impl.runtime.torch_files import SavedTensor, opened_saved
from reference.errors import UserError
from shardlab.compare.their_runs.records import About, Line, TheirRun, placed

NUMBER = re.compile(r"\d{1,9}")
INFO = ("megatron_parallel_info", "sglang_parallel_info")       # in `meta`
LETTERS = "ijklmnop"


def is_dump(folder: str) -> bool:
    return os.path.isdir(folder) and any(map(tags_of, os.listdir(folder)))


def read(folder: str) -> TheirRun:
    """Read the dumps of all ranks of the first replica. Raises UserError."""
    lists: dict[int, tuple[About, list[Line]]] = {}
    calls: dict[tuple, int] = defaultdict(int)
    names = filter(tags_of, os.listdir(folder))
    for name, tags in sorted(((name, tags_of(name)) for name in names), key=lambda dump: int(dump[1]["dump_index"])):
        path = os.path.join(folder, name)
        with opened_saved(path) as saved:
            value, meta = content_of(path, saved.content)
        axes = axes_of(meta)
        if value is None or replica_of(meta, axes):
            continue        # a text or a list, or other samples
        rank, step = int(tags["rank"]), int(tags["step"])
        phase, tensor = phase_and_name(tags)
        call = calls[rank, step, phase, tensor]
        calls[rank, step, phase, tensor] += 1
        _, lines = lists.setdefault(rank, (About(1, rank, 0, axes), []))
        lines.append(Line(step, phase, tensor, call, "value", dims_of(value, meta, phase), name))
    if not lists:
        raise UserError(f"{folder} has no dump of a tensor.")
    return placed(folder, [lists[rank] for rank in sorted(lists)])


def tags_of(name: str) -> dict[str, str]:
    """Return the tags of a file's name, none if it is not a dump's."""
    tags = {key: value for key, _, value in (tag.partition("=") for tag in name.removesuffix(".pt").split("___"))}
    tags.setdefault("step", tags.get("curr_step", ""))
    numbers = (tags.get(key, "") for key in ("rank", "dump_index", "step"))
    return tags if name.endswith(".pt") and "name" in tags and all(map(NUMBER.fullmatch, numbers)) else {}


def content_of(path: str, content: Any) -> tuple[SavedTensor | None, dict[str, Any]]:
    """Return a file's value, if it is a tensor, and what else it says. Raises UserError."""
    meta = content.get("meta") if isinstance(content, dict) else None
    if not isinstance(meta, dict) or "value" not in content:
        raise UserError(f"{path} is not what SGLang's dumper writes, a dict with `value` and `meta`.")
    return content["value"] if isinstance(content["value"], SavedTensor) else None, meta


def axes_of(meta: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Return the rank's number along each axis, and the axis's size."""
    info: dict[str, Any] = next((meta[name] for name in INFO if isinstance(meta.get(name), dict)), {})
    axes = {}
    for name in (name for name in info if isinstance(name, str) and name.endswith("_rank")):
        axis = name.removesuffix("_rank")
        number, size = info[name], info.get(f"{axis}_size")
        if type(number) is type(size) is int:
            axes[axis] = (number, size)
    return axes


def replica_of(meta: dict[str, Any], axes: dict[str, tuple[int, int]]) -> int:
    """Return the number of the rank's replica: of the axis that the dims name for that, `dp:=attn_dp`, or dp."""
    named = re.search(r"\bdp:=(\w+)", str(meta.get("dims") or ""))
    return axes.get(named[1] if named else "dp", (0, 1))[0]


def phase_and_name(tags: dict[str, str]) -> tuple[str, str]:
    """Return the phase of a tensor, and its name with its layer."""
    gradient, name = tags["name"].startswith("grad__"), tags["name"].removeprefix("grad__")
    if name.startswith("param__"):
        return "gradients" if gradient else "parameters", name.removeprefix("param__")
    again = tags.get("recompute_status") == "recompute"
    return ("backward" if gradient else "recompute" if again else "forward",
            f"layers.{tags['layer_id']}.{name}" if "layer_id" in tags else name)


def dims_of(value: SavedTensor, meta: dict[str, Any], phase: str) -> str:
    """Return the text of the dims; without one the tensor is whole."""
    text = meta.get("dims_grad") if phase in ("backward", "gradients") else None
    return str(text or meta.get("dims") or " ".join(LETTERS[:len(value.shape)]))
