"""An observed training step. Its layers know nothing of the observer.

A pass gives its layers units, a region and a sink, and gets caches back. An observed pass gives them units, a region
and a sink that report to the observer, and shows it the caches:

    units      parameters, when they are used; and the layer at work
    region     the inputs and outputs of the tensor-parallel regions, before and after they are sent
    sink       the factors of each weight's gradient
    caches     the intermediate activations of every layer, recomputed ones included
    the pass   transfers between stages, and the loss
"""
from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mpi_impl.parallel.model_state import ModelState
from mpi_impl.parallel.passes import TrainingPass
from mpi_impl.parallel.sinks import ImmediateSink
from reference.activations import activations
from reference.config import ModelConfig
from reference.layers.block import BlockCache
from reference.models.stage import StageCache
from reference.ops import NormCache
from reference.params import leaves, tree_map, with_names
from reference.schedules.actions import Action
from shardlab.compare.names import is_within_layer, name_inside

if TYPE_CHECKING:
    from shardlab.compare.observer import Observer  # which makes the pass


class ObservedPass(TrainingPass):
    """A TrainingPass that shows its tensors to an observer."""

    def __init__(self, observer: Observer, iteration: int, state: ModelState, *arguments):
        """Take a TrainingPass's arguments."""
        self.observer = observer
        super().__init__(state, *arguments)
        self.region: Any = ObservedRegion(state.region, observer)
        self.params = observe_units(self.params, observer.see_parameters)
        self.grads = observe_units(self.grads, observer.begin_gradients)
        self.sink = ObservedSink(self.sink, observer)
        self.compute = {kind: self.observe_action(function) for kind, function in self.compute.items()}
        observer.begin_step(self, iteration)

    def observe_action(self, function: Callable) -> Callable:
        """Wrap one of the schedule's actions."""
        def act(action: Action, x):
            self.observer.begin_action(action)
            layers = self.observer.state.stages[action.stage]
            before, after = (f"blocks.{layer}.input" for layer in (layers[0], layers[-1] + 1))
            came, goes, phase = (before, after, "forward") if action.kind == "F" else (after, before, "backward")
            if x is not None:
                self.observer.see_outside(phase, came, x)
            y = function(action, x)
            if y is not None:
                self.observer.see_outside(phase, goes, y)
            self.observer.end_action()
            return y

        return act

    def keep(self, action: Action, y, cache: StageCache) -> None:
        super().keep(action, y, cache)
        show_stage(self.observer, self.model, y, cache)

    def measure_recomputed(self, caches) -> None:
        super().measure_recomputed(caches)
        show_blocks(self.observer, "recompute", caches)


# ---- the caches -----------------------------------------------------------------------------------------------------


def show_stage(observer: Observer, c: ModelConfig, losses, cache: StageCache) -> None:
    """Show the caches of a stage's forward, and its losses if it has the heads."""
    mask = cache.embedding and cache.embedding[-1]
    if mask is not None:
        observer.see_outside("forward", "embedding.output_mask", mask.keep)
    for kept in cache.layers:
        show_blocks(observer, "forward", kept.caches or {})
    if cache.head is not None:
        show_heads(observer, c, losses, cache.head)


def show_blocks(observer: Observer, phase: str, caches: dict[int, BlockCache]) -> None:
    for layer, cache in caches.items():
        show(observer, phase, f"blocks.{layer}", cache)


def show_heads(observer: Observer, c: ModelConfig, losses, cache) -> None:
    """Show the caches of the heads. A GPT has one head, whose caches lie next to that of the final norm."""
    norm, *rest = cache
    show(observer, "forward", "final_layernorm", norm, NormCache)
    caches = {"lm": rest} if c.architecture == "gpt" else rest[0]
    for head, loss in zip(c.heads, losses):
        scores, loss_cache = caches[head]
        probabilities, (name, axis) = loss_cache.probabilities, ("", 2) if head == "lm" else (f"{head} ", None)
        if head == "lm" and c.architecture == "bert":
            (*_, norm), _, predicted = scores
            show(observer, "forward", "lm_head.layernorm", norm, NormCache)
            probabilities = predicted.scatter(probabilities * predicted.real[..., None])
        if head == "lm" or observer.has_first_position:
            observer.see_inside("forward", f"{name}probabilities", probabilities, axis)
        observer.see_inside("forward", f"{name}loss", loss)


def show(observer: Observer, phase: str, path: str, cache, kind: type | None = None) -> None:
    """Show the activations in a cache. One in 16 bits holds less, since its kernels recompute more."""
    for name, x, place in activations(cache, path, kind):
        observer.see_activation(phase, name, x, place)


# ---- arguments of the layers ----------------------------------------------------------------------------------------


class ObservedRegion:
    """A region that shows its inputs and outputs, before they are sent and after."""

    def __init__(self, region, observer: Observer):
        self.region, self.observer = region, observer

    def __getattr__(self, name: str) -> Any:
        """Return the region's own attribute, unobserved."""
        return getattr(self.region, name)

    def enter(self, x, reason):
        if reason.tensor != "input":                         # the choices of experts, which their cache shows
            return self.region.enter(x, reason)
        before, after = self.names_at_f(reason.layer)
        self.observer.see_outside(self.observer.computing, before, x)
        entered = self.region.enter(x, reason)
        self.observer.see_inside(self.observer.computing, after, entered)
        return entered

    def enter_backward(self, dx, reason):
        if reason.tensor != "input":
            return self.region.enter_backward(dx, reason)
        before, after = self.names_at_f(reason.layer)
        self.observer.see_inside("backward", after, dx, summed=True)
        dx = self.region.enter_backward(dx, reason)
        self.observer.see_outside("backward", before, dx)
        return dx

    def leave(self, partial, reason):
        before, after = self.names_at_g(reason.layer)
        self.observer.see_inside(self.observer.computing, before, partial, summed=True)
        y = self.region.leave(partial, reason)
        self.observer.see_outside(self.observer.computing, after, y)
        return y

    def leave_backward(self, dy, reason):
        before, after = self.names_at_g(reason.layer)
        self.observer.see_outside("backward", after, dy)
        dy = self.region.leave_backward(dy, reason)
        self.observer.see_inside("backward", before, dy)
        return dy

    def names_at_f(self, layer: str) -> tuple[str, str]:
        """Return the names of the tensors before and after f in a layer, such as the mlp, of the block at work."""
        if layer == "logits":
            bert = self.observer.state.model.architecture == "bert"
            return "lm_head.layernorm.output" if bert else "final_layernorm.output", "logits.input"
        path, norm = self.path_of(layer), "input_layernorm" if layer == "attention" else "post_attention_layernorm"
        before = f"{path}.input" if is_within_layer(path) else f"{self.observer.unit}.{norm}.output"
        return before, name_inside(path)

    def names_at_g(self, layer: str) -> tuple[str, str]:
        """Return the names of the partial sums before g and of their sum, in a layer of the block at work."""
        path = layer if layer == "embedding" else self.path_of(layer)
        return f"{path}.partial", f"{path}.output"

    def path_of(self, layer: str) -> str:
        """Return the name of a layer of the block at work. In one with experts they, and an MLP, are its `mlp`."""
        unit = self.observer.unit
        if layer == "experts":
            return f"{unit}.mlp.experts"
        is_shared = layer == "mlp" and self.observer.state.model.has_experts(int(unit.split(".")[1]))
        return f"{unit}.mlp.shared" if is_shared else f"{unit}.{layer}"


class ObservedUnit:
    """A unit that reports its use, and where: a shared block is used in all layers."""

    def __init__(self, place: str, unit, used: Callable):
        self.place, self.unit, self.used = place, unit, used

    def __getattr__(self, name: str) -> Any:
        """Return the unit's own attribute, unobserved."""
        return getattr(self.unit, name)

    def wait(self):
        tensors = self.unit.wait()
        self.used(self.place, self.unit.name, tensors)
        return tensors


def observe_units(stages: dict[int, Any], used: Callable) -> dict[int, Any]:
    """Return trees of units, by stage."""
    return {stage: tree_map(lambda named: ObservedUnit(named.name, named.leaf, used), with_names(tree))
            for stage, tree in stages.items()}


class ObservedSink(ImmediateSink):
    """A sink that shows the factors of each gradient when they are multiplied, and the gradients that are complete."""

    def __init__(self, sink: ImmediateSink, observer: Observer):
        super().__init__(self.contributed, sink.recomputed, sink.progress)
        self.sink, self.observer = sink, observer

    def __call__(self, grad, x, dy) -> None:
        self.observer.see_factors(grad, x, dy)
        super().__call__(grad, x, dy)

    def contributed(self, *units) -> None:
        for tree in units:
            for _, unit in leaves(tree):
                self.observer.see_gradients(unit.name)
        self.sink.done(*units)
