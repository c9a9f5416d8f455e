"""The textbook as a third run: it computes the first step of a recording again, from its weights and its batch.

It can do so for GPT-2, Llama, Mistral and Qwen, of transformers or Megatron-core: a config.json says which model it is,
and the layout of its checkpoints (mpi_impl/checkpoints) or megatron.py which names it uses. The textbook computes on
one rank, in float64, without dropout. So where two recordings differ, it tells which one is wrong.
"""
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

import numpy as np

from mpi_impl.checkpoints.huggingface import join_shards
from mpi_impl.checkpoints.huggingface_config import layout_in, model_of, read_config
from mpi_impl.checkpoints.huggingface_layout import TransformersLayout
from reference.batches import GPTBatch
from reference.config import ModelConfig
from reference.errors import UserError
from reference.layers.embedding import logits_forward
from reference.layers.layer import LAYERS
from reference.models.gpt import output_table
from reference.models.model import model_tensors
from reference.params import children, leaves, tree_map, with_names
from reference.training.trainer import loss_and_gradients
from shardlab.compare.recording import TensorPart
from shardlab.compare.their_runs import megatron
from shardlab.compare.their_runs.differences import UNNAMED, whole_of
from shardlab.compare.their_runs.frameworks import framework_of
from shardlab.compare.their_runs.records import TheirKey, TheirRun, names_of

TOKENS, TARGETS = ("input_ids", "tokens", "text"), ("labels", "targets")       # as programs call them
NONE = -100             # the target of a position without a loss, in PyTorch
DROPOUTS = "hidden_dropout", "attention_dropout"


class Wholes(TheirRun):
    """A recording in memory, of whole tensors, as the textbook computes them."""

    has_ranks = False

    def __init__(self, folder: str):
        super().__init__(folder, [], {}, {})

    def note(self, step: int, phase: str, name: str, x: Any) -> None:
        """Add a tensor, the next in the order of computation."""
        key = TheirKey(step, phase, name, 0)
        self.order.append(key)
        self.parts[key] = [(TensorPart(0, (0,) * x.ndim, x.shape, False), lambda: x)]
        self.formats[key], self.dims[key] = "float64", UNNAMED[:x.ndim]

    def whole(self, key: TheirKey) -> Any:
        (_, read), = self.parts[key]
        return read()


def replay(run: TheirRun, folder: str) -> Wholes:
    """Compute a recording's first step with the model of the config.json in a folder. Raises UserError if the two do
    not belong together.
    """
    layout, _ = layout_in(folder)
    config = read_config(folder, "gpt")
    model = model_of(config, architecture="gpt", heads=next(iter(layout.classes)), **dict.fromkeys(DROPOUTS, 0.0))
    if model.experts and framework_of(run) == "Megatron-core":
        raise UserError(f"{run.folder} is of Megatron-core, whose experts are not read here. Record a model that has "
                        "none.")
    names = Names(layout, model)
    alone = names.of("embedding.word") in names_of(run)
    names.has_prefix = not alone        # of a model with a head
    batch, params = batch_of(run), params_of(run, model, names)
    if batch.tokens.max() >= model.vocab_size:
        raise UserError(f"{run.folder} has the token {batch.tokens.max()}, but the model of {folder} has a vocabulary "
                        f"of {model.vocab_size}. Give the config.json of the model that was recorded.")
    found, step = Wholes("the textbook"), run.first_step
    paths = {id(p): path for path, p in layers_of(params)}
    inputs = [*(f"blocks.{i}.input_layernorm" for i in range(1, model.num_layers)), "final_layernorm"]
    blocks = {path: names.module(f"blocks.{i}") for i, path in enumerate(inputs)}       # whose output they are given

    def see(p: Any, phase: str, end: str, x: Any) -> None:
        if (path := paths.get(id(p))) is None:
            return
        if end == "input" and path in blocks:
            found.note(step, phase, f"{blocks[path]} output", x)
        found.note(step, phase, f"{names.module(path)} {end}", x)
        if (phase, path, end) == ("forward", "final_layernorm", "output"):
            logits, _ = logits_forward(x, output_table(params), model.vocab_size)
            found.note(step, phase, "lm_head output", logits[..., :model.vocab_size])

    with watched(see):
        _, grads = loss_and_gradients(batch, params, model)
    for name, grad in reversed(list(in_their_layout(grads, names))):
        found.note(step, "gradients", name, grad)
    return found


@contextmanager
def watched(see: Callable[[Any, str, str, Any], None]) -> Iterator[None]:
    """Show what goes into and comes out of each layer of the textbook: see(its tensors, phase, end, x)."""
    def with_eyes(layer):
        def forward(x, p, *arguments):
            see(p, "forward", "input", x)
            y, cache = layer.forward(x, p, *arguments)
            see(p, "forward", "output", y)
            return y, cache

        def backward(dy, p, *arguments):
            see(p, "backward", "output", dy)
            return layer.backward(dy, p, *arguments)

        return layer._replace(forward=forward, backward=backward)

    blind = dict(LAYERS)
    LAYERS.update({kind: with_eyes(layer) for kind, layer in blind.items()})
    try:
        yield
    finally:
        LAYERS.update(blind)


# ---- names ----------------------------------------------------------------------------------------------------------


class Names:
    """The names of modules and tensors in a recording of a model in transformers' layout."""

    def __init__(self, layout: TransformersLayout, model: ModelConfig):
        self.layout, self.has_prefix = layout, True
        self.places = {name: layout.places(name, tensor, model.num_layers)
                       for name, tensor in leaves(model_tensors(model))}

    def of(self, name: str) -> str:
        """Return the name of a tensor, or of the first of those that it is there, without the prefix."""
        return self.places[name][0].name

    def full(self, name: str) -> str:
        return self.layout.full_name(name) if self.has_prefix else name

    def module(self, path: str) -> str:
        """Translate the path of a layer: blocks.3.attention -> transformer.h.3.attn."""
        theirs = self.of(next(name for name in self.places if name.startswith(f"{path}."))).split(".")
        return self.full(".".join(theirs[:path.count(".") + 1]))


def layers_of(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path and the tensors of every layer in a tree, also of one within another."""
    if type(tree) in LAYERS:
        yield path, tree
    for key, subtree in children(tree) or ():
        yield from layers_of(subtree, f"{path}.{key}" if path else str(key))


# ---- what the recording holds ---------------------------------------------------------------------------------------


def params_of(run: TheirRun, model: ModelConfig, names: Names) -> Any:
    """Return the textbook's parameters, in float64, of those that the recording begins with. Raises UserError."""
    def from_megatron(named: Any) -> Any:
        key = find(run, "parameters", *megatron.their_names(named.name))
        whole, shards = whole_of("B", run, key), len({part.first for part, _ in run.parts[key]})
        try:
            x = megatron.our_tensor(named.name, whole, shards, model)
            assert x.shape == named.leaf.shape
        except (ValueError, AssertionError):
            raise UserError(f"{run.folder} has {key.name} as {list(whole.shape)}, but the model of the config.json "
                            f"asks for one that makes {list(named.leaf.shape)}.") from None
        return x

    def filled(named: Any) -> Any:
        x = np.zeros(named.leaf.shape)
        for place in names.places[named.name]:
            theirs = names.full(place.name)
            whole = recorded(run, "parameters", theirs)
            if whole.shape != place.shape:
                raise UserError(f"{run.folder} has {theirs} as {list(whole.shape)}, but the model of the config.json "
                                f"asks for {list(place.shape)}.")
            part, there = place.shard_and_place(x, 0)
            part[...] = whole[there]
        return x

    of = from_megatron if framework_of(run) == "Megatron-core" else filled
    return tree_map(of, with_names(model_tensors(model)))


def in_their_layout(tree: Any, names: Names) -> Iterator[tuple[str, Any]]:
    """Yield each of their tensors that a tree of ours makes, by its name."""
    for name, x in leaves(tree):
        places = names.places[name]
        theirs = dict.fromkeys(place.name for place in places)
        yield from zip(map(names.full, theirs), join_shards([x], places), strict=True)


def batch_of(run: TheirRun) -> GPTBatch:
    """Return the batch of the first step. Labels may be the tokens themselves, as transformers expects them, or those
    that follow. Raises UserError.
    """
    if any(key.phase == "batch" and key.call for key in run.parts):
        raise UserError(f"{run.folder} has several batches in a step, of which gradients are a sum or a mean. Record a "
                        "run without gradient accumulation.")
    tokens, targets = (recorded(run, "batch", *names).astype(np.int64) for names in (TOKENS, TARGETS))
    if tokens.ndim != 2 or tokens.shape != targets.shape:
        raise UserError(f"{run.folder} has tokens {list(tokens.shape)} and targets {list(targets.shape)}, but both "
                        "must be [b, s].")
    if (targets == np.where(targets == NONE, NONE, tokens)).all():
        targets = np.concatenate([targets[:, 1:], np.full_like(targets[:, :1], NONE)], 1)
    return GPTBatch(tokens, np.where(targets == NONE, 0, targets), (targets != NONE).astype(np.int64))


def recorded(run: TheirRun, phase: str, *names: str) -> Any:
    """Return a whole tensor of the first step, under the first of these names that is there. Raises UserError."""
    return whole_of("B", run, find(run, phase, *names))


def find(run: TheirRun, phase: str, *names: str) -> TheirKey:
    """Return the first of these names of a phase that is there in the first step. Raises UserError."""
    keys = [TheirKey(run.first_step, phase, name, 0) for name in names]
    if found := next((key for key in keys if key in run.parts), None):
        return found
    there = [key.name for key in run.order if key.phase == phase and key.iteration == run.first_step]
    close = get_close_matches(names[0], there, 3, cutoff=0) or ["nothing"]
    raise UserError(f"{run.folder} has no {' or '.join(names)} among its {phase}; it has {', '.join(close)}"
                    f"{', ...' if len(there) > 3 else ''}. Record the model of the config.json itself, not a part of "
                    "it, and its batch with recorder.batch(...).")
