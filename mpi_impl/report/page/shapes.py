"""The work of an action, part by part, with shapes and the files that do it: the details of the page's player."""
from collections.abc import Sequence
from typing import NamedTuple

from reference.config import ModelConfig, ParallelConfig
from reference.models.bert import CLASSIFIERS


class StagePart(NamedTuple):
    """One part of a stage's forward."""

    name: str
    x: str             # the shape of its input
    how: str           # what happens to it
    y: str             # the shape of its output
    weights: str       # the shapes of its matrices, "" for none
    file: str


def work_of(c: ModelConfig, p: ParallelConfig, b: int, s: int, layers: Sequence[int], kind: str) -> list[list[str]]:
    """Return what a rank does in an action of this kind, on a stage with these layers: [part, shapes, file].

    A microbatch is b sequences of s tokens.
    """
    forward = parts(c, p, b, s, layers)
    if kind == "F":
        return [[part.name, f"{part.x} {part.how} -> {part.y}".replace("  ", " "), part.file] for part in forward]
    if kind == "W":
        return [[part.name, f"dW = xᵀ dy: {part.weights}", part.file] for part in forward if part.weights]
    later = {"B": "; dW: ", "I": "; later, in W, dW: "}[kind]
    return [[part.name, f"dy {part.y} -> {'no dx' if 'tokens' in part.x else f'dx {part.x}'}"
             f"{part.weights and later + part.weights}", part.file] for part in reversed(forward)]


def parts(c: ModelConfig, p: ParallelConfig, b: int, s: int, layers: Sequence[int]) -> list[StagePart]:
    """Return the forward's parts, in order."""
    t, h, a, found = p.tensor_model_parallel_size, c.hidden_size, c.num_attention_heads, []
    inside, outside = f"[{b}, {s}, {h}]", f"[{b}, {s // t if p.sequence_parallel else s}, {h}]"
    rows, folder = c.padded_vocab_size(t) // t, "mpi_impl/layers"
    heads, keys, f = a // t * c.head_size, max(1, c.groups // t) * c.head_size, c.ffn_size // t
    qkv, out = f"[{h}, {heads + 2 * keys}]", f"[{heads}, {h}]"
    up, down = f"[{h}, {2 * f if c.swiglu else f}]", f"[{f}, {h}]"
    each = f"layer {layers[0]}" if len(layers) == 1 else f"each of layers {layers[0]} to {layers[-1]}"
    if layers[0] == 0:
        found.append(StagePart("embedding", f"tokens [{b}, {s}]", f"-> rows of a table [{rows}, {h}]", outside, "",
                               f"{folder}/embedding.py"))
    found += [
        StagePart(f"attention in {each}, {a // t} of {a} heads", inside,
                  f"@ {qkv} -> scores [{b}, {a // t}, {s}, {s}] -> [{b}, {s}, {heads}] @ {out}", outside,
                  f"{qkv}, {out}", f"{folder}/{'grouped_' if c.grouped_attention else ''}attention.py"),
        StagePart(f"MLP in {each}", inside, f"@ {up} -> {'swiglu' if c.swiglu else c.activation} -> [{b}, {s}, {f}] "
                  f"@ {down}", outside, f"{up}, {down}", f"{folder}/{'gated_' if c.swiglu else ''}mlp.py"),
        StagePart(f"norms and residual sums in {each}", outside, "", outside, "", f"{folder}/block.py")]
    if layers[-1] == c.num_layers - 1:
        logits, file = f"[{b}, {s}, {rows}]", "heads.py" if c.architecture == "bert" else "embedding.py"
        found += [StagePart("logits", inside, f"@ [{h}, {rows}]", logits, f"[{h}, {rows}]",
                            f"{folder}/{file}"),
                  StagePart("loss", logits, "", f"[{b}, {s}]", "", f"{folder}/cross_entropy.py")]
        found += [StagePart(f"head {head}", f"[{b}, {h}]", f"@ [{h}, 2]", f"[{b}, 2]", f"[{h}, 2]",
                            f"{folder}/heads.py") for head in c.heads if head in CLASSIFIERS]
    return found
