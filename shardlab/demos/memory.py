"""The memory of ranks, and what saves it: `mpirun -np 4 python -m shardlab.demos.memory`.

It trains a small GPT with every method that saves memory, counts the bytes of all arrays on every rank, and compares
them with the prediction (shardlab/predict), in a table and in a picture; and those of one layer with the formulas.
"""
import os
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace

from mpi_impl.runtime.files import check_folder
from mpi_impl.runtime.outputs import check_outputs
from mpi_impl.runtime.pictures import save
from mpi_impl.runtime.tables import aligned, count
from mpi_impl.training.batches import Batches
from reference.config import ModelConfig, ParallelConfig, round_up
from reference.costs.parameters import parameters
from reference.precision import FORMATS, Precision
from shardlab.demos.runner import Arguments, Demo, parser_of, program, run_demo
from shardlab.demos.tiny_gpt import training_on
from shardlab.predict.predict import predict_pipeline
from shardlab.predict.rank import ImaginedWorld
from shardlab.report.charts import MEMORY, finish
from shardlab.report.layer_memory import (arrays_table, deferred_formula, explained, measure_layer, variants,
                                          variants_table)
from shardlab.report.memory import rank_memory

LAYERS, V, STEPS = 6, 512, 2
B, MICROBATCHES = 2, 2       # samples of a microbatch; microbatches of each replica, a step
HALF, DPI = Precision("bfloat16"), 150         # of the picture
ZERO = "nothing", "optimizer", "gradients", "parameters"       # sharded in each stage, besides what was before

INTRODUCTION = """\
A rank that trains holds four things. Parameters: the numbers of the model. Gradients: for each of them, the direction
in which it should move. Optimizer states: Adam keeps two averages for each. Activations: the results of the forward
pass, until the backward pass has used them. The first three depend only on the model, activations also on the batch.

With {ranks} there are two ways to hold less. As replicas, each trains on other samples, and without ZeRO each
holds the whole model. ZeRO shards it over the replicas: the optimizer states (stage 1), the gradients too (2), the
parameters too (3), which are then gathered, layer by layer, where they are used: they are whole for a while, like
gradients that have yet to be sent. Offloading moves a rank's own shards to other memory.
As tensor-parallel ranks they shard every layer, and so the model and most activations. Sequence parallelism shards the
other activations, by position. Recompute keeps fewer, and computes them again: attention's core (selective), or all of
a layer but its input (full), for one layer at a time.

Training drops some activations at random (dropout), so that no other comes to rely on them. The backward pass must know
which: that is a mask, a byte for each.

The model: a GPT of {psi:,} parameters in {dtype}: {layers} layers, h = {h}, {a} heads, V = {V} tokens.
A microbatch: {b} x {s} tokens.
"""

ARRAYS = """\
(A norm keeps its input, normalised, and 1 / std; GeLU its input, and its tanh.)

The paper counts, in s b h: inputs of two norms 4, of Q, K and V 2, of the MLP 2; two dropout masks 2; Q, K and V 6,
input of attention's output layer 2, of GELU 8, of the MLP's second layer 8; and in a s^2 b: softmax 2, dropout's mask 1
and output 2. In more than 16 bits we keep GELU's tanh, which is slow to compute, and not dropout's output, which is the
product of softmax and mask.

Some pipelines split the backward in two: I, the gradient of the layer's input, for which another rank waits, and W,
later, those of its weights. Between the two, the two factors of each weight gradient must be kept: in 16 bits
{bytes:,} bytes, {letters} (Qi et al. 2023, table 1). All else the layer kept is gone by then.
"""


def parse_options(argv: Arguments, n: int) -> Namespace:
    """Parse the command line. Raises UserError."""
    parser = parser_of("memory")
    parser.add_argument("--dtype", choices=FORMATS, default="float32", help="(default: %(default)s)")
    parser.add_argument("--output", default="runs/memory.png", metavar="F",
                        help="the picture, a .png, .pdf or .svg (default: %(default)s)")
    return parser.parse_args(argv)


@program(parse_options)
def show(demo: Demo, options: Namespace) -> None:
    demo.ranks.broadcast_object(lambda: check_output(options))
    runs = imagined_runs(demo.n, options)
    c = next(iter(runs["data parallel"].values())).model
    demo.introduce(INTRODUCTION, psi=parameters(c), dtype=options.dtype, layers=c.num_layers, h=c.hidden_size,
                   a=c.num_attention_heads, V=V, b=B, s=c.max_position_embeddings)
    held: dict[str, dict[str, int]] = {}
    for title, panel in runs.items():
        sizes = {name: train(demo, run) for name, run in panel.items()}
        used = [kind for kind in MEMORY if any(one[kind] for one in sizes.values())]
        rows = [[name, *(f"{one[kind]:,}" for kind in used)] for name, one in sizes.items()]
        demo.say(f"{title}, {count(demo.n)}; bytes on a rank, the peak of each kind\n{aligned([['', *used], *rows])}\n")
        held |= sizes
    show_layers(demo, runs["tensor parallel"])
    demo.ranks.broadcast_object(lambda: draw(options.output, held))
    demo.say(f"The picture of all runs is in {options.output}.\n")


def check_output(options: Namespace) -> None:
    """Make the picture's folder if it does not exist: a fresh clone has none. Raises UserError."""
    check_folder(os.path.dirname(options.output) or ".")
    check_outputs(options)


def imagined_runs(n: int, options: Namespace) -> dict[str, dict[str, ImaginedWorld]]:
    """Return the runs with d = n and those with t = n. A bucket of gradients is about the size of a layer's."""
    a, s = round_up(4, n), round_up(64, n)
    c = ModelConfig(LAYERS, a * max(4, round(96 / a)), a, V, s)
    plain = ParallelConfig(data_parallel_size=n, ddp_bucket_size=12 * c.hidden_size**2)
    replicas = {f"ZeRO {stage}: {what}": replace(plain, zero_stage=stage) for stage, what in enumerate(ZERO)}
    replicas["ZeRO 3, offloaded"] = replace(plain, zero_stage=3, cpu_offload=True)
    return {title: {name: ImaginedWorld(c, parallel, Precision(options.dtype), B, s, MICROBATCHES)
                    for name, parallel in panel.items()}
            for title, panel in (("data parallel", replicas), ("tensor parallel", variants(n)))}


def train(demo: Demo, run: ImaginedWorld) -> dict[str, int]:
    """Train a few steps, and compare the memory that they take with its prediction. Return the fullest rank's, by kind.
    """
    with training_on(demo.ranks, run.model, run.parallel, precision=run.precision) as trainer:
        trainer.measured = True
        batches = Batches(None, run.model, trainer.topology, run.seq_length, B, MICROBATCHES)
        for step in range(STEPS):
            trainer.step(batches.microbatches_of("train", step), run.global_batch_size)
        memory = rank_memory(trainer, *predict_pipeline(trainer.topology, run))
    for _, measured, predicted in memory.compared:
        demo.equal("bytes of every kind", measured, predicted)
    held = max(demo.ranks.allgather_objects(memory.held), key=sum)
    sizes = {**held._asdict(), "computed again": held.recomputed, "whole for a while": held.gathered + held.unreduced}
    return {kind: sizes[kind] for kind in MEMORY}


def show_layers(demo: Demo, runs: Mapping[str, ImaginedWorld]) -> None:
    """Print and compare one layer of each run, in its own format and in 16 bits, which the formulas are for."""
    layers = {name: {one: measure_layer(one, demo.ranks) for one in (run, replace(run, precision=HALF))}
              for name, run in runs.items()}
    for *_, (run, half) in (found.items() for found in layers.values()):
        demo.equal("bytes of a layer", (half.bytes, half.deferred), (explained(run), deferred_formula(run)))
    demo.say("Activations of one layer. The formulas are those of Korthikanti et al. 2022, for elements of 2 bytes:\n"
             f"{variants_table(layers)}\n")
    (run, layer), *_ = layers[name := next(iter(layers))].items()
    demo.say(f"Array by array: {name}, {B} x {run.seq_length} tokens, {run.precision.compute}\n{arrays_table(layer)}\n")
    demo.say(ARRAYS.format(bytes=deferred_formula(run), letters="32 s b h" if demo.n == 1 else "s b h (8 + 24/t)"))


def draw(path: str, runs: Mapping[str, Mapping[str, int]]) -> None:
    """Draw a bar for each run, of the rank that holds most."""
    from matplotlib.figure import Figure  # matplotlib takes a second to import

    from shardlab.plan.picture import stack
    from shardlab.report.drawing import draw_legend, name_rows

    figure = Figure((10, 6), layout="constrained")
    axes = figure.subplots()
    for row, sizes in enumerate(runs.values()):
        stack(axes, row, [(size / 1e6, MEMORY[kind]) for kind, size in sizes.items()], "{:,.2f} MB")
    name_rows(axes, list(runs), 0)
    finish(axes, "MB on a rank, the peak of each kind; without the temporary arrays of operations", "", "x")
    draw_legend(figure, MEMORY)
    save(figure, path, DPI)


if __name__ == "__main__":
    run_demo(show)
