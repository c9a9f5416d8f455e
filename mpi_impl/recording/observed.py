"""An observed training step. Its layers know nothing of the observer.

A pass gives its layers units, a region and a sink, and gets caches back. An observed pass gives them units, a region
and a sink that report to the observer, and shows it the caches:

    units      parameters, when they are used; and the layer at work
    region     the inputs and outputs of the tensor-parallel regions, before and after they are sent
    sink       the factors of each weight's gradient
    caches     the intermediate activations of every layer, recomputed ones included
    the pass   transfers between stages, and the loss
"""
from collections.abc import Callable
from typing import Any

from mpi_impl.layers.context_attention import PartCache
from mpi_impl.layers.cross_entropy import LossCache
from mpi_impl.parallel.model_state import ModelState
from mpi_impl.parallel.passes import TrainingPass
from mpi_impl.parallel.sinks import ImmediateSink
from mpi_impl.recording.observer import Observer
from reference import ops
from reference.config import ModelConfig
from reference.layers.block import BlockCache
from reference.layers.context_attention import BlocksCache, ExchangedCache
from reference.layers.experts import ExpertsCache
from reference.models.stage import StageCache
from reference.params import leaves, tree_map, with_names
from reference.schedules.actions import Action


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
            return y

        return act

    def keep(self, action: Action, y, cache: StageCache) -> None:
        super().keep(action, y, cache)
        observer = self.observer
        if cache.embedding is not None:
            show_mask(observer, "forward", "embedding.output_mask", cache.embedding[-1])
        for kept in cache.layers:
            self.show_blocks("forward", kept.caches or {})
        if cache.head is not None:
            show_heads(observer, self.model, y, cache.head)

    def measure_recomputed(self, caches) -> None:
        super().measure_recomputed(caches)
        self.show_blocks("recompute", caches)

    def show_blocks(self, phase: str, caches: dict[int, BlockCache]) -> None:
        for layer, cache in caches.items():
            show_block(self.observer, phase, f"blocks.{layer}", cache)


# ---- the caches -----------------------------------------------------------------------------------------------------


def show_heads(observer: Observer, c: ModelConfig, losses, cache) -> None:
    """Show the caches of the heads. A GPT has one head, whose caches lie beside that of the final norm."""
    norm, *rest = cache
    show_norm(observer, "forward", "final_layernorm", norm)
    caches = {"lm": rest} if c.architecture == "gpt" else rest[0]
    for head, loss in zip(c.heads, losses):
        scores, loss_cache = caches[head]
        if head == "lm" and c.architecture == "bert":
            show_norm(observer, "forward", "lm_head.layernorm", scores[0][-1])
        name = "" if head == "lm" else f"{head} "
        if head == "lm" or observer.has_first_position:
            observer.see_inside("forward", f"{name}probabilities", probabilities_of(loss_cache))
        observer.see_inside("forward", f"{name}loss", loss)


def probabilities_of(cache):
    """Return what a rank's loss computes from, and the textbook's has kept."""
    return cache.probabilities if isinstance(cache, LossCache) else cache[0]


def show_block(observer: Observer, phase: str, block: str, cache: BlockCache) -> None:
    """Show a block's cache. One in 16 bits holds less, since its kernels recompute more."""
    show_norm(observer, phase, f"{block}.input_layernorm", cache.input_layernorm)
    show_core(observer, phase, f"{block}.attention", cache.attention)
    observer.see_inside(phase, f"{block}.attention.context", cache.attention.context)
    show_mask(observer, phase, f"{block}.attention.output_mask", cache.attention_mask)
    show_norm(observer, phase, f"{block}.post_attention_layernorm", cache.post_attention_layernorm)
    if isinstance(cache.mlp, ExpertsCache):
        show_experts(observer, phase, f"{block}.mlp", cache.mlp)
    else:
        show_mlp(observer, phase, f"{block}.mlp", cache.mlp)
    show_mask(observer, phase, f"{block}.mlp.output_mask", cache.mlp_mask)


def show_mlp(observer: Observer, phase: str, mlp: str, cache) -> None:
    _, activation, hidden = cache
    z = activation[0] if isinstance(activation, tuple) else activation
    if z.dtype != bool:                                                       # ReLU keeps only its sign
        observer.see_inside(phase, f"{mlp}.{'gate_up' if z.ndim == 4 else 'pre_activation'}", z)
    observer.see_inside(phase, f"{mlp}.hidden", hidden)


def show_experts(observer: Observer, phase: str, mlp: str, cache: ExpertsCache) -> None:
    """Show the router's choices. (What travels to the experts has no place in the batch.)"""
    for name in ("probs", "ids", "weights"):
        observer.see_outside(phase, f"{mlp}.{name}", getattr(cache.routing, name))
    if cache.shared is not None:
        show_mlp(observer, phase, f"{mlp}.shared", cache.shared)


def show_core(observer: Observer, phase: str, attention: str, cache) -> None:
    """Show what attention's core keeps, and the norms of queries and keys."""
    core, copies = cache.core, observer.copies_of_keys
    for name, norm, of in zip(("q_norm", "k_norm"), getattr(cache, "norms", ()), (1, copies)):
        for part, x in zip(("normed", "inverse_std"), norm or ()):
            observer.see_inside(phase, f"{attention}.{name}.{part}", x, axis=2, copies=of)
    if isinstance(core, PartCache):
        core = core.kept
    if isinstance(core, ExchangedCache):
        show_exchanged(observer, phase, attention, core)
        return
    inputs = core.inputs if isinstance(core, BlocksCache) else core
    q, k, v = (x.swapaxes(1, 2) for x in core[:3]) if isinstance(core, ops.AttentionCore) else inputs[:3]
    for name, x, of in (("q", q, 1), ("k", k, copies), ("v", v, copies)):
        observer.see_inside(phase, f"{attention}.{name}", x, axis=2, copies=of)        # [b, s, a/t, d]
    if hasattr(core, "probs"):
        observer.see_inside(phase, f"{attention}.probs", core.probs, axis=1)           # [b, a/t, s, s]
        if core.mask is not None:
            observer.see_inside(phase, f"{attention}.probs_mask", core.mask.keep & (core.probs != 0), axis=1)


def show_exchanged(observer: Observer, phase: str, attention: str, cache: ExchangedCache) -> None:
    """Show the cache of heads that were exchanged for positions."""
    for name, x in zip("qkv", cache.inputs):
        observer.see_exchanged(phase, f"{attention}.{name}", x, axis=2)                # [b, s, a/(t c), d]
    if hasattr(cache.core, "probs"):
        observer.see_exchanged(phase, f"{attention}.probs", cache.core.probs, axis=1)
        if cache.core.mask is not None:
            kept = cache.core.mask.keep & (cache.core.probs != 0)
            observer.see_exchanged(phase, f"{attention}.probs_mask", kept, axis=1)


def show_norm(observer: Observer, phase: str, name: str, cache) -> None:
    normed, inverse_std = cache
    observer.see_outside(phase, f"{name}.normed", normed)
    observer.see_outside(phase, f"{name}.inverse_std", inverse_std)


def show_mask(observer: Observer, phase: str, name: str, mask) -> None:
    if mask is not None:
        observer.see_outside(phase, name, mask.keep)


# ---- arguments of the layers ----------------------------------------------------------------------------------------


class ObservedRegion:
    """A region that shows its inputs and outputs, before they are sent and after."""

    def __init__(self, region, observer: Observer):
        self.region, self.observer = region, observer

    def __getattr__(self, name: str) -> Any:
        """Return the region's own attribute, unobserved."""
        return getattr(self.region, name)

    def enter(self, x, reason):
        if reason.tensor != "input":                         # the choices of experts, which `show_experts` shows
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
        if part := self.part_of_experts(layer):
            return f"{part}.input", f"{part}.entered"
        norm = "input_layernorm" if layer == "attention" else "post_attention_layernorm"
        return f"{self.observer.unit}.{norm}.output", f"{self.observer.unit}.{layer}.input"

    def names_at_g(self, layer: str) -> tuple[str, str]:
        """Return the names of the partial sums before g and of their sum, in a layer of the block at work."""
        path = self.part_of_experts(layer) or (layer if layer == "embedding" else f"{self.observer.unit}.{layer}")
        return f"{path}.partial", f"{path}.output"


    def part_of_experts(self, layer: str) -> str:
        """Return the name of the experts, or of the MLP beside them, in a layer with experts; else ""."""
        unit = self.observer.unit
        if layer == "experts":
            return f"{unit}.mlp.experts"
        beside = layer == "mlp" and self.observer.state.model.has_experts(int(unit.split(".")[1]))
        return f"{unit}.mlp.shared" if beside else ""


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
        super().__init__(self.contributed, sink.recomputed, sink.help_on)
        self.sink, self.observer = sink, observer

    def __call__(self, grad, x, dy) -> None:
        self.observer.see_factors(grad, x, dy)
        super().__call__(grad, x, dy)

    def contributed(self, *units) -> None:
        for tree in units:
            for _, unit in leaves(tree):
                self.observer.see_gradients(unit.name)
        self.sink.done(*units)
