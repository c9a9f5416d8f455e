"""Predictions of runs of every kind of model, in every kind of place, as they once were: no change may move a number.

    python -m tests.test_golden_predictions         # rewrites them, after a change that should
"""
import json
from pathlib import Path

import pytest

from reference.costs.volumes import PassCounts
from shardlab.predict.predict import predict_alone, sent_by_pipeline
from shardlab.predict.rank import ImaginedWorld
from shardlab.programs.settings import parse

GOLDEN = Path(__file__).with_suffix(".json")
SIZES = "--num-layers 4 --hidden-size 24 --num-attention-heads 4 --seq-length 16 --micro-batch-size 2"
T, P, E, C = (f"--{name}-parallel-size" for name in ("tensor-model", "pipeline-model", "expert-model", "context"))
LLAMA = ("--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
         "--group-query-attention --num-query-groups 2 --untie-embeddings-and-output-weights")
MIXTRAL = f"{LLAMA} --num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01"
MUON = "--optimizer muon"
SCHEDULE, V, ZERO = "--pipeline-schedule", "--num-layers-per-virtual-pipeline-stage", "--zero-stage"
RUNS = [        # model, ranks, options
    ("gpt", 1, ""), ("gpt", 1, "--bf16 --recompute-granularity full"), ("gpt", 2, f"{T} 2"),
    ("gpt", 4, f"{T} 4 --sequence-parallel --recompute-granularity selective"), ("gpt", 4, f"{P} 4 {SCHEDULE} gpipe"),
    ("gpt", 2, f"{P} 2 {V} 1"), ("gpt", 2, f"{P} 2 {SCHEDULE} zb-h1"), ("gpt", 2, f"{P} 2 {SCHEDULE} zb-v"),
    ("gpt", 2, f"{P} 2 {SCHEDULE} dualpipe-v --share-layers"), ("gpt", 8, f"{T} 2 {P} 2"),
    ("gpt", 4, f"{ZERO} 1 --fp16"), ("gpt", 4, f"{ZERO} 2 --ddp-bucket-size 2000"), ("gpt", 4, f"{ZERO} 3 --bf16"),
    ("gpt", 8, f"{T} 2 {P} 2 {ZERO} 1 --sequence-parallel"),
    ("gpt", 4, f"{ZERO} 3 --num-distributed-optimizer-instances 2"), ("gpt", 2, f"{C} 2"),
    ("gpt", 4, f"{C} 2 {T} 2 --cp-comm-type a2a"), ("gpt", 8, f"{C} 2 {P} 2 {ZERO} 2 --cp-comm-type all_gather"),
    ("gpt", 2, f"{LLAMA} {T} 2"), ("gpt", 8, f"{LLAMA} {T} 4 {P} 2 --sequence-parallel {ZERO} 1"),
    ("gpt", 4, f"{MIXTRAL} {E} 4"), ("gpt", 8, f"{MIXTRAL} {E} 2 {T} 2 {P} 2"), ("gpt", 4, f"{MIXTRAL} {E} 2 {ZERO} 1"),
    ("gpt", 8, f"{MUON} {T} 2 {P} 2 {ZERO} 1 --bf16"), ("gpt", 4, f"{MIXTRAL} {MUON} {E} 2 {T} 2"),
    ("gpt", 8, f"{LLAMA} {MUON} {T} 4 {ZERO} 1 --ddp-bucket-size 2000 --muon-tp-mode distributed"),
    ("bert", 4, f"{T} 2 {P} 2"), ("bert", 4, f"{ZERO} 3"), ("bert", 2, f"{T} 2 --sequence-parallel")]


def prediction(architecture: str, n: int, options: str) -> dict:
    """Return the messages of three steps and an evaluation, and the bytes of each rank of a pipeline."""
    settings = parse(f"{SIZES} --global-batch-size 32 {options}".split(), n, architecture)
    args, m = settings.args, settings.microbatches
    predicted = predict_alone(ImaginedWorld(settings.model(50), settings.parallel, settings.precision,
                                            args.micro_batch_size, args.seq_length, m, optimizer=settings.optimizer))
    sent = sent_by_pipeline(predicted, PassCounts(3, 3 * m, 1, m))
    return {"messages": {" ".join((entry.group, entry.phase, entry.operation, entry.reason)): list(total)
                         for entry, total in sent.items() if total.elements},
            "bytes": [list(one.held) for one in predicted]}


def name(architecture: str, n: int, options: str) -> str:
    return f"{architecture} on {n}: {options}"


@pytest.mark.parametrize("run", RUNS, ids=lambda run: name(*run))
def test_a_prediction_is_what_it_was(run):
    assert prediction(*run) == json.loads(GOLDEN.read_text())[name(*run)]


if __name__ == "__main__":
    found = {name(*run): prediction(*run) for run in RUNS}
    GOLDEN.write_text(json.dumps(found, separators=(",", ":")).replace('},"', '},\n"') + "\n")
