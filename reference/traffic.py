"""What the ranks send, line by line, as formulas: the ledger's prediction. The papers' letters, see reference/config.py."""
from typing import NamedTuple

from reference.config import ModelConfig, ParallelConfig
from reference.cost import parameters_per_rank


class Traffic(NamedTuple):
    """What one rank hands to one kind of collective in a whole run."""

    operation: str
    group: str       # tensor or data
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
    """Every collective that a run with tensor and data parallelism makes, in the order of a step (1909.08053, sec. 3).

    b is the micro-batch size, s the sequence length. A layer all-reduces b s h elements twice forward (g) and twice
    backward (f); in a ring that is 4 x 2 (t-1)/t b s h = 8 b s h (t-1)/t elements a layer and microbatch.
    """
    m, e, layers, bsh, bs = work.microbatches, work.evaluation_microbatches, c.num_layers, b * s * c.hidden_size, b * s

    def forward(phase, n):
        return [all_reduced("tensor", phase, "embedding output", n, bsh, "b s h"),
                all_reduced("tensor", phase, "attention output", n * layers, bsh, "L b s h"),
                all_reduced("tensor", phase, "mlp output", n * layers, bsh, "L b s h"),
                all_reduced("tensor", phase, "loss: maximum", n, bs, "b s"),
                all_reduced("tensor", phase, "loss: sum of exp", n, bs, "b s"),
                all_reduced("tensor", phase, "loss: logit of the target", n, bs, "b s")]

    return [
        Traffic("broadcast", "tensor", "data", "batch", m + e, (m + e) * b * (s + 1), "b (s + 1)"),
        *forward("forward", m),
        all_reduced("tensor", "backward", "logits input", m, bsh, "b s h"),
        all_reduced("tensor", "backward", "mlp input", m * layers, bsh, "L b s h"),
        all_reduced("tensor", "backward", "attention input", m * layers, bsh, "L b s h"),
        all_reduced("data", "reduction", "gradients", work.steps, parameters_per_rank(c, p.tensor_model_parallel_size),
               "parameters of the rank, a step"),
        all_reduced("data", "reduction", "loss", work.steps, 1, "1, a step"),
        all_reduced("tensor", "optimizer", "gradient norm", work.steps, 1, "1, a step"),
        *forward("evaluation", e),
        all_reduced("data", "evaluation", "loss", work.evaluations, 1, "1, an evaluation"),
    ]


def all_reduced(group, phase, reason, calls, elements_a_call, formula) -> Traffic:
    return Traffic("all_reduce", group, phase, reason, calls, calls * elements_a_call, formula)
