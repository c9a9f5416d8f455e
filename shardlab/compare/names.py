"""The tensors of a training step: their names, which do not depend on their ranks, and the order of computation.

A tensor is known by iteration, phase and name. Names are paths, as in `blocks.3.mlp.hidden` (layers count from 0), and
a gradient has the name of its tensor: the phase distinguishes the two. The phases, in order:

    batch                  tokens and targets
    parameters             as the first microbatch finds them: gathered, rounded
    forward                activations, from the embedding to the loss
    recompute              activations that a backward has recomputed
    kept                   the inputs of weight matrices, as the backward finds them
    backward               gradients of activations, from the loss to the embedding
    gradients              of the parameters, over all microbatches: before anything is summed over ranks
    reduction              the same, summed
    step                   loss and norm, as the step reports them
    optimizer m, v         Adam's moments, after the update
    optimizer parameters   the weights, after the update

This is the logical order, not the schedule's: first the forward of all microbatches, then the backward.
"""
from collections.abc import Iterable
from typing import NamedTuple

from reference.layers.layer import LAYERS
from reference.models.bert import CLASSIFIERS

PHASES = ("batch", "parameters", "forward", "recompute", "kept", "backward", "gradients", "reduction", "step",
          "optimizer m", "optimizer v", "optimizer parameters")
FROM_THE_LOSS = ("kept", "backward", "gradients", "reduction")      # phases in reverse order of the model


def merged(orders: Iterable[Iterable[str]]) -> list[str]:
    """Merge several orders of names: what an order adds stands behind the name that it follows there."""
    names: list[str] = []
    for order in orders:
        place = 0
        for name in order:
            if name not in names:
                names.insert(place, name)
            place = names.index(name) + 1
    return names


def names_of(layer: str, prefix: str = "") -> list[str]:
    """Return the names of the tensors of all kinds of a layer, and of the layers within it."""
    names = []
    for name in merged(kind.order.split() for kind in LAYERS.values() if kind.name == layer):
        part, _, other = name.partition(":")
        names += names_of(other, f"{prefix}{part}.") if other else [f"{prefix}{name}"]
    return names


# The tensors before the blocks, in a block, and after the blocks, in the order of the forward. The `partial` is g's
# input: its sum over the tensor-parallel ranks is `output`, before the bias is added.
BEFORE = ("tokens", "token_types", "lengths", "embedding.word", "embedding.partial", "embedding.output",
          "embedding.position", "embedding.token_type", "embedding.output_mask")
NORM, LINEAR = names_of("norm"), ("input", "w", "b", "output")
BLOCK = ("input", *names_of("norm", "input_layernorm."), *names_of("attention", "attention."), "attention.output_mask",
         *names_of("norm", "post_attention_layernorm."), *names_of("experts", "mlp."), *names_of("mlp", "mlp."),
         "mlp.output_mask")
OF_SEQUENCES = (*CLASSIFIERS, "span")     # the heads that predict something of a whole sequence
PREDICTED = ("targets", "weights", "swapped", "answers")      # the parts of a batch that only the last stage reads
AFTER = (*(f"final_layernorm.{name}" for name in NORM),
         *(f"lm_head.dense.{name}" for name in LINEAR), *(f"lm_head.layernorm.{name}" for name in NORM),
         "logits.input", "output", "lm_head.bias", "logits", "probabilities",
         *(f"{layer}.{name}" for layer in ("pooler", *CLASSIFIERS.values(), "span_head") for name in LINEAR),
         *(f"{head} probabilities" for head in OF_SEQUENCES), *PREDICTED, "loss",
         *(f"{head} loss" for head in OF_SEQUENCES),
         "loss of each replica", "mean loss", "gradient norm", "learning rate")


class Key(NamedTuple):
    """One tensor of a run."""

    iteration: int
    phase: str
    name: str

    @property
    def order(self) -> tuple:
        """Return the sort key for the order of computation."""
        place, turn = place_of(self.name), -1 if self.phase in FROM_THE_LOSS else 1
        return self.iteration, PHASES.index(self.phase), *(turn * along for along in place)

    @property
    def layer(self) -> int | None:
        number = self.name.split(".")[1] if self.name.startswith("blocks.") else ""
        return int(number) if number.isdigit() else None

    @property
    def of_a_gradient(self) -> bool:
        """Report whether it is the gradient of the named tensor."""
        return self.phase in ("backward", "gradients", "reduction")

    def __str__(self):
        what = "gradient of " if self.of_a_gradient else ""
        return f"iteration {self.iteration}, {self.phase}: {what}{self.name}"


def place_of(name: str) -> tuple[int, int]:
    """Return the layer (-1: before all of them), and the place in it."""
    if name in BEFORE:
        return -1, BEFORE.index(name)
    if name in AFTER:
        return 1 << 30, AFTER.index(name)
    _, layer, site = name.split(".", 2)
    return 0 if layer == "shared" else int(layer), BLOCK.index(site)      # the first layer uses a shared block first


def is_within_layer(layer: str) -> bool:
    """Report whether a layer is within another one of its block, as `blocks.3.mlp.shared` is."""
    return layer.count(".") > 2


def name_inside(layer: str) -> str:
    """Return the name of a layer's input inside its region: of a layer within another, `input` is the one outside."""
    return f"{layer}.{'entered' if is_within_layer(layer) else 'input'}"
