"""The bytes that one layer saves of a microbatch: measured, by our inventory, and by the papers' formulas.

The inventory: reference/costs/activation_inventory.py.
"""
from collections.abc import Mapping, Sequence
from dataclasses import replace
from textwrap import fill

import numpy as np

from mpi_impl.comm.group import Group
from mpi_impl.comm.mappings import region_of
from mpi_impl.models.gpt import gpt_backward, gpt_forward
from mpi_impl.models.units import Unit
from mpi_impl.parallel.sinks import DeferredSink, ImmediateSink
from mpi_impl.runtime.arrays import dtype_of
from mpi_impl.runtime.tables import WIDTH, aligned, verdict
from reference.config import ParallelConfig, Recompute
from reference.costs.activation_inventory import ActivationInventory, SavedTensor, StageBytes, total
from reference.costs.array_bytes import array_bytes
from reference.costs.memory import layer_activations
from reference.dropout import Dropout
from reference.layer_context import LayerContext
from reference.layers.block import block_tensors
from reference.layers.embedding import Embedding
from reference.models.gpt import GPT
from reference.parallel.layout import Layout, map_units
from reference.params import initialize_shard
from reference.precision import Precision

HALF = Precision("bfloat16")      # float16 takes the same


def measure_layer(inventory: ActivationInventory, group: Group) -> StageBytes:
    """Measure a real layer's arrays, after its F and after its I, on all ranks of a tensor-parallel group."""
    c, b, region = inventory.c, inventory.sequences, region_of(group, inventory.parallel)
    dtype, main = (dtype_of(name) for name in (inventory.precision.compute, inventory.precision.main))
    layer, positions = c.num_layers, inventory.outside // (b * c.hidden_size)      # it neither embeds nor has the head
    tensors = GPT(Embedding(None, None), {layer: block_tensors(c)}, None, None)
    layout, params = Layout(tensors, group.size), initialize_shard(tensors, 0, dtype, group.size, group.rank)
    p, grads = (map_units(Unit, tree) for tree in (params, layout.views(np.zeros(layout.size, main))))
    draw = np.random.default_rng(group.rank).normal
    x, dy = (draw(size=(b, positions, c.hidden_size)).astype(dtype) for _ in range(2))
    context = LayerContext(Dropout(c, seed=0, step=1), inventory.parallel.recompute)
    with group.ledger.phase("measured layer"):
        _, cache = gpt_forward(x, p, c, None, region, context)
        kept, sink = array_bytes(cache.layers), DeferredSink(ImmediateSink())
        gpt_backward(dy, p, cache, c, grads, sink, region)
    return StageBytes(kept, array_bytes(sink.held()))


def layer_table(inventory: ActivationInventory, measured: int) -> str:
    """Tabulate the saved tensors of one layer, item by item, beside the formula, with the reasons for differences."""
    published = layer_formula(inventory)
    table = items_table(["kept until the backward", "elements", "bytes", "formula", "why they differ"],
                        inventory.layer(), published, measured)
    return f"{table}\n{bridge(replace(inventory, precision=HALF).layer(), published)}"


def items_table(titles: list[str], items: Sequence[SavedTensor], published: float, measured: int) -> str:
    """Tabulate items, and compare their sum with the published one and the measured one."""
    rows = [[item.what, f"{item.elements:,}", f"{item.bytes:,}", f"{item.paper:,}", item.why] for item in items]
    end = ["sum", f"{sum(item.elements for item in items):,}", f"{total(items):,}", f"{published:,.0f}",
           f"measured: {verdict(measured, total(items), 'the sum')}"]
    return aligned([titles, *rows, end], left=(0, 4))


def bridge(found: Sequence[SavedTensor], published: float) -> str:
    """Explain the step from the formula's bytes to ours in 16 bits."""
    more = [(item.bytes - item.paper, item.what) for item in found if item.bytes != item.paper]
    steps = "".join(f"\n    {'+' if n > 0 else '-'} {abs(n):>14,}  {what}" for n, what in more)
    same = "which is the formula's" if not more else f"which is the formula's {published:,.0f}"
    return f"In 16 bits, as in the papers, ours would be {total(found):,}, {same}{steps}"


def deferred_table(inventory: ActivationInventory, measured: int) -> str:
    """Tabulate the bytes of a layer from I to W, for schedules that split the backward."""
    found = [item._replace(why="") for item in inventory.layer_deferred()]     # which would always be the format
    table = items_table(["kept from I until W", "elements", "bytes", "in 16 bits", ""], found,
                        sum(item.paper for item in found), measured)
    return (f"{table}\n"
            "In 16 bits on one rank it is 32 s b h (Qi et al. 2023, table 1). All else the layer kept is gone by then.")


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


def variants_table(inventories: Mapping[str, ActivationInventory], measured: Mapping[str, int]) -> str:
    """Tabulate a layer's bytes for each variant: measured, our inventory, our inventory in 16 bits, and the formula."""
    rows, why = [["a layer keeps, on a rank", "measured", "our inventory", "in 16 bits", "formula", "which is"]], []
    for name, inventory in inventories.items():
        ours, narrow = total(inventory.layer()), replace(inventory, precision=HALF).layer()
        rows.append([name, f"{measured[name]:,}", verdict(measured[name], ours), f"{total(narrow):,}",
                     f"{layer_formula(inventory):,.0f}", formula_of(inventory.parallel)])
        why.append(fill(f"{name}: {differences(narrow)}", WIDTH, initial_indent="  ", subsequent_indent="    "))
    return "\n".join([aligned(rows, left=(0, 5)), "In 16 bits, beside the formula:", *why])


def differences(items: Sequence[SavedTensor]) -> str:
    """List the items that differ by more than a hundredth of the formula: `+ GeLU's tanh, - the same after dropout`."""
    least = sum(item.paper for item in items) / 100
    return ", ".join(f"{'+' if item.bytes > item.paper else '-'} {item.what}" for item in items
                     if abs(item.bytes - item.paper) > least) or "the same"


def layer_formula(inventory: ActivationInventory) -> float:
    """Return Korthikanti et al. 2022's formula, in bytes."""
    one, p = inventory, inventory.parallel
    return sum(layer_activations(one.c, one.b, one.s, p.tensor_model_parallel_size, p.sequence_parallel,
                                 p.recompute.granularity))


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
