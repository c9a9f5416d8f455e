"""What the ranks send, line by line, as formulas: the ledger's prediction. For letters see reference/config.py."""
from typing import NamedTuple

from reference.config import ModelConfig, ParallelConfig
from reference.params import Layout
from reference.stages import layouts_of_ranks, stages_of_ranks


class Traffic(NamedTuple):
    """What the ranks of one pipeline hand to one kind of collective, or send, in a whole run, all of them together."""

    operation: str
    group: str       # tensor, data, pipeline, embedding or model
    phase: str
    reason: str
    calls: int
    elements: int
    formula: str     # of the elements, in each microbatch (or step, where it says so)


class Work(NamedTuple):
    """How often a run, as one replica sees it, passes through the model."""

    steps: int
    microbatches: int               # over all steps, forward and backward
    evaluations: int
    evaluation_microbatches: int    # over all evaluations, forward only


def traffic(c: ModelConfig, p: ParallelConfig, b: int, s: int, work: Work) -> list[Traffic]:
    """Every message of a run with tensor, pipeline and data parallelism, in the order of a step.

    b is the micro-batch size, s the sequence length. A layer all-reduces b s h elements twice forward (g) and twice
    backward (f); in a ring that is 4 x 2 (t-1)/t b s h = 8 b s h (t-1)/t elements a layer and microbatch (1909.08053,
    section 3). Between stages on different ranks, b s h elements go each way, or b s h / t from each of t ranks where
    the receivers gather them (2104.04473, section 4.1).
    """
    m, e, steps, evaluations = work.microbatches, work.evaluation_microbatches, work.steps, work.evaluations
    layouts = layouts_of_ranks(c, p)
    ranks, ends = len(layouts), min(2, len(layouts))     # the first and the last rank read the batch
    buckets = sum(len(layout.buckets(p.ddp_bucket_size)) for layout in layouts)
    return [
        Traffic("broadcast", "tensor", "data", "batch", ends * (m + e), ends * (m + e) * b * (s + 1),
                "b (s + 1)" if ends == 1 else "2 b (s + 1)"),
        *forward(c, p, b, s, "forward", m),
        *backward(c, p, b, s, m),
        Traffic("all_reduce", "data", "reduction", "gradients", steps * buckets,
                steps * sum(layout.size for layout in layouts), "parameters of the ranks, a step"),
        *tied_embedding(c, p, layouts, steps),
        *loss("reduction", steps, ranks, "a step"),
        Traffic("all_reduce", "model", "optimizer", "gradient norm", steps * ranks, steps * ranks, "1 a rank, a step"),
        *forward(c, p, b, s, "evaluation", e),
        *loss("evaluation", evaluations, ranks, "an evaluation"),
    ]


def forward(c: ModelConfig, p: ParallelConfig, b: int, s: int, phase: str, m: int) -> list[Traffic]:
    """Of m microbatches."""
    layers, bsh, bs = c.num_layers, b * s * c.hidden_size, b * s
    return [
        all_reduced(phase, "embedding output", m, bsh, "b s h"),
        all_reduced(phase, "attention output", m * layers, bsh, "L b s h"),
        all_reduced(phase, "mlp output", m * layers, bsh, "L b s h"),
        *between_stages(c, p, phase, "activation", m, bsh),
        all_reduced(phase, "loss: maximum", m, bs, "b s"),
        all_reduced(phase, "loss: sum of exp", m, bs, "b s"),
        all_reduced(phase, "loss: logit of the target", m, bs, "b s"),
    ]


def backward(c: ModelConfig, p: ParallelConfig, b: int, s: int, m: int) -> list[Traffic]:
    """Of m microbatches."""
    layers, bsh = c.num_layers, b * s * c.hidden_size
    return [
        all_reduced("backward", "logits input", m, bsh, "b s h"),
        all_reduced("backward", "mlp input", m * layers, bsh, "L b s h"),
        all_reduced("backward", "attention input", m * layers, bsh, "L b s h"),
        *between_stages(c, p, "backward", "gradient", m, bsh),
    ]


def between_stages(c: ModelConfig, p: ParallelConfig, phase: str, content: str, m: int, bsh: int) -> list[Traffic]:
    """Each of m microbatches crosses every edge between two ranks once."""
    n = m * edges(c, p)
    if p.pieces == 1:
        return [Traffic("send", "pipeline", phase, content, n, n * bsh, "edges b s h")]
    return [Traffic("send", "pipeline", phase, content, n, n * bsh // p.pieces, "edges b s h / t"),
            Traffic("all_gather", "tensor", phase, f"gathered {content}", n, n * bsh, "edges b s h")]


def edges(c: ModelConfig, p: ParallelConfig) -> int:
    """How often a stage's result is for another rank: p v - 1 if no two neighbouring stages are on the same rank."""
    rank_of = {stage: r for r, stages in enumerate(stages_of_ranks(c, p)) for stage in stages}
    return sum(rank_of[stage] != rank_of[stage + 1] for stage in range(len(rank_of) - 1))


def tied_embedding(c: ModelConfig, p: ParallelConfig, layouts: list[Layout], steps: int) -> list[Traffic]:
    """First and last stage add up their gradients of the word table, if they are on two ranks and share it."""
    copies = [segment for layout in layouts for segment in layout.segments if segment.name == "embedding.word"]
    if len(copies) < 2:
        return []
    words = c.padded_vocab_size(p.tensor_model_parallel_size) // p.tensor_model_parallel_size
    return [Traffic("all_reduce", "embedding", "reduction", "tied embedding", 2 * steps,
                    2 * steps * words * c.hidden_size, "2 h V/t, a step")]


def loss(phase: str, times: int, ranks: int, each: str) -> list[Traffic]:
    """Over the replicas, and then from the last stage to all others."""
    return [Traffic("all_reduce", "data", phase, "loss", times * ranks, times * ranks, f"1 a rank, {each}"),
            Traffic("broadcast", "pipeline", phase, "loss", times * ranks, times * ranks, f"1 a rank, {each}")]


def all_reduced(phase, reason, calls, elements_a_call, formula) -> Traffic:
    return Traffic("all_reduce", "tensor", phase, reason, calls, calls * elements_a_call, formula)
