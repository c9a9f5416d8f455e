"""memory: let the fullest rank need the least memory.

The model is Megatron's GPT-2 of 8.3 billion parameters, in float16, with 128 samples a step, on 64 GPUs in 8 servers
(dgx-a100). You choose the options of its parallelism, its schedule, its ZeRO stage and its recompute. A step may take
1.7 s.

The score is the bytes at the peak of the fullest rank, while the model is made or in a step, and the time is that of
the slowest rank, both by a dry run (docs/dry_run.md). The ranks' messages must match. A twin, with 2 in the place of
each size above 2, so of at most 8 ranks, is proved on real ranks to compute what one process does (docs/proof.md). It
has your options, but neither your sizes nor your model.
"""
import re
import subprocess

from mpi_impl.launch.launcher import own_job
from reference.config import option
from reference.errors import UserError
from shardlab.dry_run.options import parse
from shardlab.dry_run.world import DryRun, kinds_of_ranks
from shardlab.score.entry import Entry

UNIT, LEAST = "bytes", 18 * 8_317_040_640 // 64       # weights, gradients and Adam's states, shared evenly
SECONDS = 1.7
MODEL = "--preset gpt2-8.3b --hardware dgx-a100 --world-size 64 --global-batch-size 128".split()
ALLOWED = [option(name) for name in (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "pipeline_schedule", "zero_stage",
    "num_layers_per_virtual_pipeline_stage", "no_scatter_gather_tensors_in_pipeline", "ddp_bucket_size",
    "sequence_parallel", "keep_gathered_inputs", "recompute_granularity", "recompute_method", "recompute_num_layers",
    "micro_batch_size")]


def score(entry: Entry) -> int:
    """Return the bytes on the fullest rank. Raises UserError for options that are not possible, or a step too long."""
    words = entry.options.split()
    if wrong := [word for word in words if word.startswith("-") and word.split("=")[0] not in ALLOWED]:
        raise UserError(f"The options have {wrong[0]}, but may have {', '.join(ALLOWED)}.")
    world = parse([*MODEL, *words]).world
    dry = DryRun(world)
    runs = [dry.run(dry.of_pipeline_rank(kind.pipeline_ranks[0])) for kind in kinds_of_ranks(world)]
    if (seconds := round(max(run.seconds for run in runs), 3)) > SECONDS:
        raise UserError(f"A step takes {seconds} s, but may take {SECONDS} s.")
    if mistake := dry.match()[1]:
        raise UserError(mistake)
    prove(words, world.parallel)
    return max(peak.size for run in runs for peak in (run.setup, run.peak))


def prove(words: list[str], sizes) -> None:
    """Prove the twin, on real ranks. Raises UserError if it is not proved."""
    t, p, d = (min(2, size) for size in (sizes.tensor_model_parallel_size, sizes.pipeline_model_parallel_size,
                                         sizes.data_parallel_size))
    twin = {"tensor_model_parallel_size": t, "pipeline_model_parallel_size": p, "micro_batch_size": 1,
            "global_batch_size": 4 * d, "num_layers_per_virtual_pipeline_stage": 1, "recompute_num_layers": 1}
    given = [word.split("=")[0] for word in words]
    for name, size in twin.items():
        if option(name) in given or not name.startswith(("num", "recompute")):
            words = [*words, option(name), str(size)]       # the last one counts
    done = subprocess.run(own_job(t * p * d, "shardlab.prove", *words), capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        sentence = re.search("^error: .*", said, re.MULTILINE)      # some launchers add words of their own
        raise UserError(f"Not proved equal, on {t * p * d} ranks: {sentence[0] if sentence else said[-500:]}")
