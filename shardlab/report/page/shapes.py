"""The work of an action, part by part, with shapes and the files that do it: the details of the page's player."""
from collections.abc import Iterator, Sequence
from functools import reduce
from typing import Any, NamedTuple

from mpi_impl.layers.layer import LAYERS
from reference.config import ModelConfig, ParallelConfig
from reference.layers.block import Block, block_tensors
from reference.layers.layer import Layer, layers_in
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
    t, h, found = p.tensor_model_parallel_size, c.hidden_size, []
    inside, outside = f"[{b}, {s}, {h}]", f"[{b}, {s // t if p.sequence_parallel else s}, {h}]"
    rows, folder = c.padded_vocab_size(t) // t, "mpi_impl/layers"
    each = f"layer {layers[0]}" if len(layers) == 1 else f"each of layers {layers[0]} to {layers[-1]}"
    if layers[0] == 0:
        found.append(StagePart("embedding", f"tokens [{b}, {s}]", f"-> rows of a table [{rows}, {h}]", outside, "",
                               f"{folder}/embedding.py"))
    for name, layer, tensors in layers_with_matrices(block_tensors(c, layers[0])):
        steps, shapes = products_of(layer, tensors, t, p.expert_model_parallel_size)
        found.append(StagePart(f"{name} in {each}", inside, steps, outside, ", ".join(shapes),
                               file_of(layer.tensors)))
    found.append(StagePart(f"norms and residual sums in {each}", outside, "", outside, "", f"{folder}/block.py"))
    if layers[-1] == c.num_layers - 1:
        n, file = c.most_predicted(s), "heads.py" if c.architecture == "bert" else "embedding.py"
        logits = f"[{b}, {n}, {rows}]"
        found += [StagePart("logits", inside, f"@ [{h}, {rows}]", logits, f"[{h}, {rows}]",
                            f"{folder}/{file}"),
                  StagePart("loss", logits, "", f"[{b}, {s}]", "", f"{folder}/cross_entropy.py")]
        found += [StagePart(f"head {head}", f"[{b}, {h}]", f"@ [{h}, 2]", f"[{b}, 2]", f"[{h}, 2]",
                            f"{folder}/heads.py") for head in c.heads if head in CLASSIFIERS]
    return found


def layers_with_matrices(block: Block) -> Iterator[tuple[str, Layer, Any]]:
    """Yield the layers of a block that multiply, in order, with their names and tensors: attention, an MLP or experts.
    """
    for part in (block.attention, block.mlp):
        for path, layer in layers_in(part):
            if layer.products:
                yield path or layer.name, layer, reduce(getattr, path.split("."), part) if path else part


def products_of(layer: Layer, tensors, t: int, e: int) -> tuple[str, list[str]]:
    """Describe a layer's products, from matrix to matrix; and return the shapes of a rank's matrices."""
    steps, shapes = [], []
    for name, (kept, result) in layer.products.items():
        shapes.append(str(list(getattr(tensors, name).local_shape(t, e))))
        before, after = "" if kept == "input" else f"{kept} ", "" if result == "partial" else f" -> {result}"
        steps.append(f"{before}@ {shapes[-1]}{after}")
    return "; ".join(steps), shapes


def file_of(tensors: type) -> str:
    """Return the file of a kind of layer on ranks."""
    return f"{LAYERS[tensors].forward.__module__.replace('.', '/')}.py"
