"""The work of an action, part by part, with shapes and the files that do it: the details of the page's player."""
from collections.abc import Sequence
from typing import NamedTuple

from reference.config import ModelConfig, ParallelConfig
from reference.models.bert import CLASSIFIERS


class StagePart(NamedTuple):
    """One part of a stage's forward."""

    name: str
    x: str             # the shape of its input
    weights: str       # the shapes of what it multiplies by; "" for none of two dimensions
    y: str             # the shape of its output
    file: str


def work_of(c: ModelConfig, p: ParallelConfig, b: int, s: int, layers: Sequence[int], kind: str) -> list[list[str]]:
    """Return what a rank does in an action of this kind, on a stage with these layers: [part, shapes, file].

    A microbatch is b sequences of s tokens.
    """
    forward = parts(c, p, b, s, layers)
    if kind == "F":
        return [[part.name, f"{part.x}{part.weights and f' @ {part.weights}'} -> {part.y}", part.file]
                for part in forward]
    if kind == "W":
        return [[part.name, f"dW = xᵀ dy of {part.weights}", part.file] for part in forward
                if part.weights and part.name != "embedding"]
    weights = {"B": "; dW of ", "I": ", no dW yet, of "}[kind]
    return [[part.name, f"dy {part.y} -> dx {'none' if 'tokens' in part.x else part.x}"
             f"{part.weights and weights + part.weights}", part.file] for part in reversed(forward)]


def parts(c: ModelConfig, p: ParallelConfig, b: int, s: int, layers: Sequence[int]) -> list[StagePart]:
    """Return the forward's parts, in order."""
    t, h, a, found = p.tensor_model_parallel_size, c.hidden_size, c.num_attention_heads, []
    inside, outside = f"[{b}, {s}, {h}]", f"[{b}, {s // t if p.sequence_parallel else s}, {h}]"
    rows, folder = c.padded_vocab_size(t) // t, "mpi_impl/layers"
    if layers[0] == 0:
        found.append(StagePart("embedding", f"tokens [{b}, {s}]", f"table [{rows}, {h}]", outside,
                               f"{folder}/embedding.py"))
    named = f"of layer {layers[0]}" if len(layers) == 1 else f"in each of the layers {layers[0]} to {layers[-1]}"
    found += [StagePart(f"attention {named}, {a // t} of its {a} heads", inside,
                   f"[{h}, {3 * h // t}], scores [{b}, {a // t}, {s}, {s}], @ [{h // t}, {h}]", outside,
                   f"{folder}/attention.py"),
              StagePart(f"MLP {named}", inside, f"[{h}, {4 * h // t}], {c.activation}, @ [{4 * h // t}, {h}]", outside,
                   f"{folder}/mlp.py"),
              StagePart(f"layer norms and residual sums {named}", outside, "", outside, f"{folder}/block.py")]
    if layers[-1] == c.num_layers - 1:
        found += [StagePart("logits", inside, f"[{h}, {rows}]", f"[{b}, {s}, {rows}]",
                       f"mpi_impl/models/{c.architecture}.py"),
                  StagePart("loss", f"[{b}, {s}, {rows}]", "", f"[{b}, {s}]", f"{folder}/cross_entropy.py")]
        found += [StagePart(f"head {head}", f"[{b}, {h}]", f"[{h}, 2]", f"[{b}, 2]", f"{folder}/heads.py")
                  for head in c.heads if head in CLASSIFIERS]
    return found
