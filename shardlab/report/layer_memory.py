"""The arrays that one layer keeps of a microbatch, found in the caches of a real one, next to the papers' formulas.

The formulas are those of Korthikanti et al. 2022 (2205.05198) and, for a backward in two parts, Qi et al. 2023
(2401.10241), in bytes of a GPT in 16 bits. Letters as in reference/config.
"""
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from mpi_impl.comm.group import Group
from mpi_impl.comm.regions import region_of
from mpi_impl.models.gpt import gpt_backward, gpt_forward
from mpi_impl.models.units import Unit
from mpi_impl.parallel.sinks import DeferredSink, ImmediateSink
from mpi_impl.runtime.arrays import dtype_of
from mpi_impl.runtime.tables import aligned, verdict
from reference.array_bytes import array_bytes, arrays_under
from reference.config import ParallelConfig, Recompute
from reference.costs.memory import layer_activations
from reference.layer_context import LayerContext
from reference.layers.block import block_tensors
from reference.layers.embedding import Embedding
from reference.models.gpt import GPT
from reference.models.model import sequences_of
from reference.parallel.layout import Layout, map_units
from reference.params import initialize_shard
from reference.random.dropout import Dropout
from shardlab.predict.rank import ImaginedWorld


class SavedArray(NamedTuple):
    """An array that a layer keeps until its backward."""

    name: str
    shape: tuple[int, ...]
    bytes: int


class LayerMemory(NamedTuple):
    """The arrays that one layer keeps of a microbatch."""

    kept: list[SavedArray]     # from F until B, or until I
    deferred: int              # bytes from I until W

    @property
    def bytes(self) -> int:
        return sum(array.bytes for array in self.kept)


def measure_layer(run: ImaginedWorld, group: Group) -> LayerMemory:
    """Find a real layer's arrays, after its F and after its I, on all ranks of a tensor-parallel group."""
    c, b, region = run.model, run.micro_batch_size * sequences_of(run.model), region_of(group, run.parallel)
    dtype, main = (dtype_of(name) for name in (run.precision.compute, run.precision.main))
    layer, positions = c.num_layers, run.seq_length // run.parallel.sequence_shards      # no embedding, no head
    tensors = GPT(Embedding(None, None), {layer: block_tensors(c)}, None, None)
    layout, params = Layout(tensors, group.size), initialize_shard(tensors, 0, dtype, group.size, group.rank)
    p, grads = (map_units(Unit, tree) for tree in (params, layout.views(np.zeros(layout.size, main))))
    draw = np.random.default_rng(group.rank).normal
    x, dy = (draw(size=(b, positions, c.hidden_size)).astype(dtype) for _ in range(2))
    context = LayerContext(Dropout(c, seed=0, step=1), run.parallel.recompute)
    with group.ledger.phase("measured layer"):
        _, cache = gpt_forward(x, p, c, None, region, context)
        (group_cache,), sink = cache.layers, DeferredSink(ImmediateSink())
        kept = saved_arrays(group_cache.caches[layer] if group_cache.caches else {"x": group_cache.x})
        gpt_backward(dy, p, cache, c, grads, sink, region)
    return LayerMemory(kept, array_bytes(sink.held()))


def saved_arrays(cache) -> list[SavedArray]:
    """Return the arrays of a cache, each once: one with three parts is called `attention.core.q, k, v`."""
    return [SavedArray(", ".join([first, *(name.rpartition(".")[2] for name in others)]), array.shape, array.nbytes)
            for (first, *others), array in arrays_under(cache).values()]


# ---- the papers' formulas -------------------------------------------------------------------------------------------


def layer_formula(run: ImaginedWorld) -> float:
    """Return the bytes that the formula of Korthikanti et al. 2022 has for a layer."""
    p = run.parallel
    return sum(layer_activations(run.model, run.micro_batch_size, run.seq_length, p.tensor_model_parallel_size,
                                 p.sequence_parallel, p.recompute.granularity))


def formula_of(p: ParallelConfig) -> str:
    """Return the same in letters, as in Korthikanti et al. 2022, table 2."""
    t, sharded = p.tensor_model_parallel_size, p.sequence_parallel
    match p.recompute.granularity:
        case "full":
            return "2 s b h / t" if sharded else "2 s b h"
        case "selective":
            return "34 s b h / t" if sharded else "s b h (10 + 24/t)" if t > 1 else "34 s b h"
    return ("s b h (34 + 5 a s/h) / t" if sharded else "s b h (10 + 24/t + 5 a s/(h t))" if t > 1 else
            "s b h (34 + 5 a s/h)")


def differences(run: ImaginedWorld) -> dict[str, float]:
    """Name what a GPT's layer keeps in 16 bits that the formula has not, and the other way round: bytes."""
    c, b, s, p = run.model, run.micro_batch_size, run.seq_length, run.parallel
    if p.recompute.granularity == "full":
        return {}
    t, sharded = p.tensor_model_parallel_size, p.sequence_shards
    core = layer_activations(c, b, s, t, recompute=p.recompute.granularity).core
    whole = b * s * c.hidden_size
    gathered = 2 * 2 * (whole - whole // sharded) if p.keep_gathered_inputs else 0
    found = {"attention's probabilities, which the kernel computes again": -core,
             "the inputs of attention and MLP at all positions": gathered,
             "1 / std of two norms, in float32": 2 * 4 * b * s // sharded}
    return {what: size for what, size in found.items() if size}


def explained(run: ImaginedWorld) -> int:
    """Return the bytes that a GPT's layer keeps in 16 bits: the formula's, and the differences."""
    return round(layer_formula(run) + sum(differences(run).values()))


def deferred_formula(run: ImaginedWorld) -> int:
    """Return s b h (8 + 24/t) bytes, the two factors of each weight gradient.

    On one rank that is 32 s b h (Qi et al. 2023, table 1). Sequence parallelism saves none of them: the products need
    all positions.
    """
    c, tokens = run.model, run.micro_batch_size * run.seq_length
    return round(tokens * c.hidden_size * (8 + 24 / run.parallel.tensor_model_parallel_size))


# ---- tables ---------------------------------------------------------------------------------------------------------


def variants(t: int) -> dict[str, ParallelConfig]:
    """Return the ways to save fewer activations that t tensor-parallel ranks have, by name."""
    sharded = ParallelConfig(t, sequence_parallel=t > 1)
    found = {"tensor parallel" if t > 1 else "nothing recomputed": ParallelConfig(t)}
    if t > 1:
        found["+ sequence parallel, inputs kept"] = replace(sharded, keep_gathered_inputs=True)
        found["+ sequence parallel, none kept"] = sharded
    plus, instead = ("+ ", " instead") if t > 1 else ("", "")
    found[f"{plus}selective recompute"] = replace(sharded, recompute=Recompute("selective"))
    found[f"{plus}full recompute{instead}"] = replace(sharded, recompute=Recompute("full"))
    return found


def variants_table(found: Mapping[str, Mapping[ImaginedWorld, LayerMemory]]) -> str:
    """Tabulate a layer's bytes in each variant: measured in each format, the last of 16 bits, and the formula; then why
    these two differ.
    """
    rows, why = [], []
    for name, measured in found.items():
        run, layer = list(measured.items())[-1]
        rows.append([name, *(f"{one.bytes:,}" for one in measured.values()), f"{layer_formula(run):,.0f}",
                     formula_of(run.parallel)])
        steps = [f"{'+' if size > 0 else '-'} {abs(size):,.0f}  {what}" for what, size in differences(run).items()]
        why += [f"{name}: {verdict(layer.bytes, explained(run), 'the formula')}", *(f"    {step}" for step in steps)]
    titles = ["a layer keeps, on a rank", *(f"in {run.precision.compute}" for run in measured), "formula", "which is"]
    return "\n".join([aligned([titles, *rows], left=(0, len(titles) - 1)),
                      f"In {run.precision.compute} that is, to the byte:", *why])


def arrays_table(layer: LayerMemory) -> str:
    """Tabulate the arrays of a layer's cache."""
    rows = [[name, " x ".join(map(str, shape)), f"{size:,}"] for name, shape, size in layer.kept]
    return aligned([["kept until the backward", "shape", "bytes"], *rows, ["sum", "", f"{layer.bytes:,}"]])
