"""The memory of ranks, and what saves it: `mpirun -np 4 python -m shardlab.demos.memory`.

It trains a small GPT for a few steps with every method that saves memory, counts the bytes of all arrays on every rank,
and compares them with the formulas, in a table and in a picture.
"""
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from mpi_impl.comm.group import Group, world
from mpi_impl.comm.topology import Topology, connect, disconnect
from mpi_impl.launch.entry import run
from mpi_impl.launch.option_fields import option_field, option_group, parse_given
from mpi_impl.parallel.model_state import ModelState
from mpi_impl.runtime.files import check_folder
from mpi_impl.runtime.outputs import check_outputs
from mpi_impl.runtime.pictures import save
from mpi_impl.runtime.tables import aligned, count, unit_for, verdict
from mpi_impl.training.trainer import Held, Trainer
from reference.batches import GPTBatch
from reference.config import (ModelConfig, ParallelConfig, check_model_fits, check_sequence_fits, require_positive,
                              round_up)
from reference.costs.parameters import parameters
from reference.optimizer import OptimizerConfig
from reference.precision import FORMATS, Precision
from shardlab.demos.printing import say
from shardlab.predict.predict import predict_alone, predict_pipeline
from shardlab.predict.rank import ImaginedWorld
from shardlab.report.charts import MEMORY, finish
from shardlab.report.forecast import check_memory, check_one_rank, hosts_of
from shardlab.report.layer_memory import (LayerMemory, arrays_table, deferred_formula, explained, measure_layer,
                                          variants, variants_table)
from shardlab.report.memory import RankMemory, distinct, rank_memory

MICROBATCHES = 2      # of each replica, a step
DPI = 150             # of the picture

INTRODUCTION = """\
A rank that trains holds four things. Parameters: the numbers of the model. Gradients: for each of them, the direction
in which it should move. Optimizer states: Adam keeps two averages for each. Activations: the results of the forward
pass, until the backward pass has used them. The first three depend only on the model, activations also on the batch.

{ranks} can hold less in two ways. As replicas, each trains on other samples, and without ZeRO each holds the
whole model. ZeRO shards it over the replicas: the optimizer states (stage 1), the gradients too (2), the parameters
too (3), which are then gathered, layer by layer, where they are used: they are whole for a while, like gradients that
have yet to be sent. Offloading moves a rank's own shards to other memory.
As tensor-parallel ranks they shard every layer, and so the model and most activations. Sequence parallelism shards the
other activations, by position. Recompute keeps fewer, and computes them again: attention's core (selective), or all of
a layer but its input (full), for one layer at a time.

Training drops some activations at random (dropout), so that no other comes to rely on them. The backward pass must know
which: that is a mask, a byte for each.
"""

ARRAYS = """\
(A norm keeps its input, normalised, and 1 / std; GeLU its input, and its tanh.)

The paper counts, in s b h: inputs of two norms 4, of Q, K and V 2, of the MLP 2; two dropout masks 2; Q, K and V 6,
input of attention's output layer 2, of GELU 8, of the MLP's second layer 8; and in a s^2 b: softmax 2, dropout's mask 1
and output 2. In more than 16 bits we keep GELU's tanh, which is slow to compute, and not dropout's output, which is the
product of softmax and mask."""


@option_group
class MemoryDemoOptions:
    """The model, the runs and the picture."""

    num_layers: int = option_field(6, metavar="L")
    num_attention_heads: int = option_field(
        None, "a multiple of the number of ranks (default: the first from 4 on)", "A")
    hidden_size: int = option_field(None, "(default: about 96, a multiple of the heads)", "H")
    seq_length: int = option_field(None, "a multiple of the number of ranks (default: the first from 64 on)", "S")
    micro_batch_size: int = option_field(2, metavar="B")
    vocab_size: int = option_field(512, metavar="V")
    train_iters: int = option_field(2, "steps of each run", "N")
    dtype: str = option_field("float32", choices=FORMATS)
    output: str = option_field("runs/memory.png", "the picture, a .png, .pdf or .svg", "F")


Panel = dict[str, list[RankMemory]]     # the memory of every rank, by the name of the run
Layers = dict[ImaginedWorld, LayerMemory]     # one layer of this rank: in the run's format, and last in 16 bits


def show(ranks: Group, argv: Sequence[str] | None = None) -> None:
    options = parse_options(argv, ranks.size)
    model, precision = model_of(options), Precision(options.dtype)
    b, s = options.micro_batch_size, options.seq_length
    replicas, sharers = replica_runs(ranks.size, model), sharing_runs(ranks.size, model, s)
    ranks.broadcast_object(lambda: check_output(options))
    hosts = hosts_of(ranks, place=0)
    for parallel in [*replicas.values(), *sharers.values()]:
        imagined = ImaginedWorld(model, parallel, precision, b, s, MICROBATCHES)
        check_one_rank(hosts, imagined)
        check_memory(hosts, imagined, ranks.broadcast_object(partial(predict_alone, imagined)))
    say(ranks, introduction(model, options, ranks.size))
    panels: dict[str, Panel] = {}
    for title, runs in {f"data parallel: {count(ranks.size, 'replica')}": replicas,
                        f"tensor parallel: {count(ranks.size, 'shard')}": sharers}.items():
        panels[title] = {name: train(ranks, parallel, model, options) for name, parallel in runs.items()}
        say(ranks, f"{title}; bytes on a rank, the peak of each kind\n{runs_table(panels[title])}\n")
    layers = {name: measure_layers(ranks, ImaginedWorld(model, parallel, precision, b, s, MICROBATCHES))
              for name, parallel in sharers.items()}
    say(ranks, layers_text(layers))
    ranks.broadcast_object(lambda: write_picture(options, panels, model))
    conclude(ranks, {name: everyone for panel in panels.values() for name, everyone in panel.items()}, layers)


def check_output(options: MemoryDemoOptions) -> None:
    """Make the picture's folder if it does not exist: a fresh clone has none. Raises UserError."""
    check_folder(os.path.dirname(options.output) or ".")
    check_outputs(options)


def write_picture(options: MemoryDemoOptions, panels: dict[str, Panel], model: ModelConfig) -> None:
    draw(options.output, panels, f"a GPT of {parameters(model):,} parameters in {options.dtype}")
    print(f"drawn in {options.output}", flush=True)


# ---- options --------------------------------------------------------------------------------------------------------


def parse_options(argv: Sequence[str] | None, n: int) -> MemoryDemoOptions:
    """Return the options; sizes that are not given fit n ranks. Raises UserError."""
    given = {"num_attention_heads": round_up(4, n), "seq_length": round_up(64, n)} | parse_given(
        "shardlab.demos.memory", "Show what fills the memory of ranks.", MemoryDemoOptions, argv)
    require_positive("num_attention_heads", a := given["num_attention_heads"])
    options = MemoryDemoOptions(**{"hidden_size": a * max(4, round(96 / a))} | given)
    for name in ("seq_length", "micro_batch_size", "train_iters"):
        require_positive(name, getattr(options, name))
    return options


def model_of(options: MemoryDemoOptions) -> ModelConfig:
    return ModelConfig(options.num_layers, options.hidden_size, options.num_attention_heads, options.vocab_size,
                       options.seq_length)


def replica_runs(n: int, model: ModelConfig) -> dict[str, ParallelConfig]:
    """Return the runs with d = n. A bucket of gradients is about the size of a layer's."""
    names = ("ZeRO 0: nothing", "ZeRO 1: optimizer", "ZeRO 2: gradients", "ZeRO 3: parameters")
    plain = ParallelConfig(data_parallel_size=n, ddp_bucket_size=12 * model.hidden_size**2)
    runs = {name: replace(plain, zero_stage=stage) for stage, name in enumerate(names)}
    return runs | {"ZeRO 3, offloaded": replace(plain, zero_stage=3, cpu_offload=True)}


def sharing_runs(n: int, model: ModelConfig, seq_length: int) -> dict[str, ParallelConfig]:
    """Return the runs with t = n. Raises UserError if heads or positions do not divide."""
    for parallel in variants(n).values():
        check_model_fits(model, parallel)
        check_sequence_fits(seq_length, parallel)
    return variants(n)


# ---- the runs -------------------------------------------------------------------------------------------------------


def train(ranks: Group, parallel: ParallelConfig, model: ModelConfig, options: MemoryDemoOptions) -> list[RankMemory]:
    """Train a few steps on random tokens, and return the memory that they took on every rank."""
    topology = connect(ranks, parallel)
    try:
        trainer = Trainer(ModelState(model, topology, 1234, Precision(options.dtype)),
                          OptimizerConfig(1e-3, options.train_iters))
        trainer.measured = True
        b, s = options.micro_batch_size, options.seq_length
        for step in range(options.train_iters):
            trainer.step(random_tokens(topology, model, step, b, s), MICROBATCHES * b * topology.data.size)
        (predicted,) = predict_pipeline(topology, ImaginedWorld(model, parallel, Precision(options.dtype), b, s,
                                                                MICROBATCHES))
        return ranks.allgather_objects(rank_memory(trainer, predicted))
    finally:
        disconnect(topology)


def measure_layers(ranks: Group, run: ImaginedWorld) -> Layers:
    """Measure one layer of a run in its own format, and in 16 bits, which the formulas are for."""
    narrow = run if run.precision.half else replace(run, precision=Precision("bfloat16"))
    return {one: measure_layer(one, ranks) for one in (run, narrow)}


def random_tokens(topology: Topology, model: ModelConfig, step: int, b: int, s: int) -> list:
    """Draw a replica's microbatches, identical on its tensor-parallel ranks."""
    windows = np.random.default_rng([step, topology.place.data]).integers(0, model.vocab_size, (MICROBATCHES, b, s + 1))
    return list(map(GPTBatch.unpack, windows))


# ---- output ---------------------------------------------------------------------------------------------------------


def introduction(model: ModelConfig, options: MemoryDemoOptions, n: int) -> str:
    alone = "\nOne rank has no other to shard with, so that most of this saves nothing: start more.\n" if n == 1 else ""
    return INTRODUCTION.format(ranks="Several ranks" if n == 1 else count(n)) + alone + (
        f"\nThe model: a GPT of {parameters(model):,} parameters in {options.dtype}: {model.num_layers} layers, h = "
        f"{model.hidden_size}, {model.num_attention_heads} heads, V = {model.vocab_size} tokens.\nA microbatch: "
        f"{options.micro_batch_size} x {options.seq_length} tokens.\n")


def runs_table(panel: Panel) -> str:
    """Return a table with a line for each run and each kind of rank in it."""
    used = [name for name in MEMORY if any(parts(fullest(everyone).held)[name] for everyone in panel.values())]
    names, offloaded = [name for name in used if name != "offloaded"], ["offloaded"] * ("offloaded" in used)
    kinds = {run_name: distinct(everyone) for run_name, everyone in panel.items()}
    who = ["ranks"] * any(len(each) > 1 for each in kinds.values())
    rows = [["", *who, *names, "sum", *offloaded, ""]]
    for run_name, each in kinds.items():
        for ranks, one in each:
            sizes = parts(one.held)
            cells = [*(sizes[name] for name in names), sum(sizes[name] for name in names),
                     *(sizes[name] for name in offloaded)]
            rows.append([run_name, *([ranks] if who else []), *(f"{n:,}" for n in cells),
                         "= predicted" if one.as_predicted else "NOT predicted"])
    return aligned(rows, left=(0, 1, len(rows[0]) - 1) if who else (0, len(rows[0]) - 1))


def parts(states: Held) -> dict[str, int]:
    """Return a rank's bytes by kind, as the table shows them."""
    return {"parameters": states.parameters, "gradients": states.gradients, "optimizer": states.optimizer,
            "activations": states.activations, "computed again": states.recomputed,
            "whole for a while": states.gathered + states.unreduced, "offloaded": states.offloaded}


def layers_text(layers: dict[str, Layers]) -> str:
    first, found = next(iter(layers.items()))
    (run, layer), (narrow, half) = next(iter(found.items())), list(found.items())[-1]
    letters = "32 s b h" if run.parallel.tensor_model_parallel_size == 1 else "s b h (8 + 24/t)"
    return "\n".join([
        "Activations of one layer. The formulas are those of Korthikanti et al. 2022, for elements of 2 bytes:",
        variants_table(layers), "",
        f"Array by array: {first}, {run.micro_batch_size} x {run.seq_length} tokens, {run.precision.compute}",
        arrays_table(layer), "", ARRAYS, "",
        "Some pipelines split the backward in two: I, the gradient of the layer's input, for which another rank waits,",
        "and W, later, those of its weights. Between the two, the two factors of each weight gradient must be kept:",
        f"{layer.deferred:,} bytes in {run.precision.compute}. All else the layer kept is gone by then.",
        f"In {narrow.precision.compute} it is {half.deferred:,} "
        f"{verdict(half.deferred, deferred_formula(narrow), f'{letters} (Qi et al. 2023, table 1)')}.", ""])


def conclude(ranks: Group, runs: Panel, layers: dict[str, Layers]) -> None:
    """Check that every number was predicted, or is a paper's. Raises AssertionError if not, on all ranks."""
    pairs = [(f"{name}, rank {rank}, {what}", measured, predicted) for name, everyone in runs.items()
             for rank, one in enumerate(everyone) for what, measured, predicted in one.compared]
    for name, found in layers.items():
        narrow = list(found)[-1]
        expected = explained(narrow), deferred_formula(narrow)
        for rank, measured in enumerate(ranks.allgather_objects((found[narrow].bytes, found[narrow].deferred))):
            pairs += [(f"a layer of {name}, rank {rank}", *pair) for pair in zip(measured, expected)]
    wrong = [f"{what}: {measured:,} bytes and not {predicted:,}" for what, measured, predicted in pairs
             if measured != predicted]
    if wrong:
        raise AssertionError("not as predicted: " + "; ".join(wrong))
    say(ranks, f"Every measured number equals its prediction, to the byte: {len(pairs)} numbers, from {len(runs)} "
               f"runs on {count(ranks.size)}.")


# ---- the picture ----------------------------------------------------------------------------------------------------


def draw(path: str, panels: dict[str, Panel], model: str) -> None:
    """Draw a bar for each run, of the rank that holds most."""
    from matplotlib.figure import Figure  # matplotlib takes a second to import

    from shardlab.report.drawing import draw_legend, name_rows

    unit, name = unit_for(max(sum(parts(fullest(everyone).held).values())
                              for panel in panels.values() for everyone in panel.values()))
    rows = list(map(len, panels.values()))
    figure = Figure((10, 0.4 * sum(rows) + 2.2), dpi=DPI, layout="constrained")
    all_axes = figure.subplots(len(panels), 1, sharex=True, height_ratios=rows)
    for axes, (title, panel) in zip(all_axes, panels.items(), strict=True):
        for row, everyone in enumerate(panel.values()):
            draw_run(axes, row, parts(fullest(everyone).held), unit, name)
        name_rows(axes, list(panel), 0)
        finish(axes, "", title, "x")
    all_axes[-1].set_xlabel(f"{name} on a rank, the peak of each kind; without the temporary arrays of operations",
                            fontsize=9)
    figure.suptitle(f"Memory of a rank: {model}", x=0.01, ha="left", fontsize=12)
    draw_legend(figure, MEMORY)
    save(figure, path, DPI)


def draw_run(axes, row: int, sizes: dict[str, int], unit: float, name: str) -> None:
    left = 0.0
    for what, color in MEMORY.items():
        axes.barh(row, sizes[what] / unit, 0.7, left, color=color)
        left += sizes[what] / unit
    offloaded = sizes["offloaded"] / unit
    label = f"{left - offloaded:.2f} {name}" + (f" + {offloaded:.2f} {name} offloaded" if offloaded else "")
    axes.annotate(label, (left, row), (5, 0), textcoords="offset points", va="center", fontsize=9)


def fullest(everyone: list[RankMemory]) -> RankMemory:
    """Return the memory of the rank that holds most."""
    return max(everyone, key=lambda rank: sum(parts(rank.held).values()))


if __name__ == "__main__":
    run(lambda: show(world()))
