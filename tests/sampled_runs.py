"""Runs of four models on up to eight ranks: in those of each model every two choices that go together meet."""
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations, product
from math import lcm, prod
from typing import NamedTuple

import numpy as np

from reference.config import (ARCHITECTURES, CP_COMM_TYPES, MUON_SCALE_MODES, NORMALIZATIONS, ExpertsConfig,
                              ModelConfig, Recompute)
from reference.ops import ACTIVATIONS
from reference.schedules.generators import SCHEDULES, make, takes_v
from tests.cases import Case, MuonChoices, Plan

RANKS, RUNS = 8, 64         # at most, and of each model
MODELS = ("gpt", "bert", "llama", "experts")
SIZES, INSTANCES = (1, 2, 3, 4), (1, 2, 3)
RECOMPUTES = {"none": Recompute(), "selective": Recompute("selective"), "each": Recompute("full"),
              "pairs": Recompute("full", "uniform", 2), "first": Recompute("full", "block", 1)}
TRAINING_SCHEDULES = tuple(name for name in SCHEDULES if name != "forward-only")


class Choices(NamedTuple):
    """The choices of parallelism of a run."""

    t: int
    p: int
    d: int
    c: int
    e: int
    schedule: str
    zero_stage: int
    cp_comm_type: str | None    # None: c is 1
    sequence_parallel: bool
    recompute: str              # a name in RECOMPUTES
    instances: int              # of hybrid sharding; 1 without ZeRO or with experts

    @property
    def ranks(self) -> int:
        return self.t * self.p * self.d * self.c

    @property
    def heads_multiple(self) -> int:
        """Return the number of which a rank's heads are a multiple."""
        return self.c if self.cp_comm_type == "a2a" else 1


class SampledRun(NamedTuple):
    """A run: its choices, the model and the batch, the number of microbatches, and the plan."""

    choices: Choices
    case: Case
    microbatches: int
    plan: Plan


@cache
def sampled_runs(model: str) -> list[SampledRun]:
    """Return the runs of a model, the same ones each time."""
    rng = np.random.default_rng(list(model.encode()))
    return [draw_run(model, choices, rng) for choices in covering(legal_choices(model == "experts"), rng)]


@cache
def muon_runs(model: str) -> list[SampledRun]:
    """Return the same runs with Muon: in place of ZeRO-2 and 3 with ZeRO-1."""
    rng = np.random.default_rng([*model.encode(), 1])
    return [with_muon(run, rng) for run in sampled_runs(model)]


def with_muon(run: SampledRun, rng: np.random.Generator) -> SampledRun:
    """Draw Muon's choices for a run."""
    muon = MuonChoices(*(values[rng.integers(len(values))] for values in (
        ("duplicated", "distributed"), (False, True), (1, 2, 5), MUON_SCALE_MODES)))
    return run._replace(plan=replace(run.plan, zero_stage=min(run.plan.zero_stage, 1), muon=muon))


# ---- parallelism ----------------------------------------------------------------------------------------------------


@cache
def legal_choices(experts: bool) -> list[Choices]:
    """Return all choices that go together, on up to eight ranks."""
    places = [(*sizes, e) for sizes in product(SIZES, repeat=4) if prod(sizes) <= RANKS
              for e in (SIZES if experts else (1,)) if sizes[2] * sizes[3] % e == 0]
    return [Choices(*place, schedule, stage, way, sharded, recompute, instances) for place in places
            for way in (CP_COMM_TYPES if place[3] > 1 else (None,))
            for sharded in ((False, True) if place[0] > 1 else (False,))
            for schedule, stage, recompute in product(TRAINING_SCHEDULES, range(4), RECOMPUTES)
            for instances in (INSTANCES if stage and not experts else (1,)) if place[2] * place[3] % instances == 0]


def covering(legal: list[Choices], rng: np.random.Generator) -> list[Choices]:
    """Choose so many that every two values that go together meet: each time the one with the most new pairs.

    A pair that has been met counts a hundredth, and so on, so that all are met about equally often.
    """
    order = rng.permutation(len(legal))
    columns = [numbered(column) for column in zip(*legal)]
    sizes, pairs, first = [column.max() + 1 for column in columns], [], 0
    for i, j in combinations(range(len(columns)), 2):
        pairs.append(first + columns[i] * sizes[j] + columns[j])
        first += sizes[i] * sizes[j]
    of_row, weights, chosen = np.stack(pairs, -1)[order], np.ones(first, np.float32), []     # [rows, pairs], [pairs]
    for _ in range(RUNS):
        best = weights[of_row].sum(-1).argmax()
        weights[of_row[best]] *= 0.01
        chosen.append(legal[order[best]])
    return chosen


def numbered(column: Sequence) -> np.ndarray:
    """Return the number of each value among the different ones."""
    numbers = {value: i for i, value in enumerate(dict.fromkeys(column))}
    return np.array([numbers[value] for value in column])


# ---- models and batches ---------------------------------------------------------------------------------------------


def draw_run(name: str, choices: Choices, rng: np.random.Generator) -> SampledRun:
    """Draw the sizes, ragged ones, of a run with these choices."""
    def pick(*values):
        return values[rng.integers(len(values))]

    t, p, c, schedule, sharded = choices.t, choices.p, choices.c, choices.schedule, choices.sequence_parallel
    v = pick(1, 2) if takes_v(schedule) else None
    least = t * choices.heads_multiple
    heads = least * (pick(1, 2) if least <= 4 else 1)
    size = pick(2, 4) if heads <= 4 else 2          # exact numbers are slow
    unit = lcm(2 * c if c > 1 else 1, c * t if sharded else 1)
    s = unit * pick(1, 2) if unit > 1 else pick(1, 3, 4)
    model = dict(
        num_layers=make(schedule, p, p, v).stages + pick(0, 1), hidden_size=heads * size, num_attention_heads=heads,
        vocab_size=pick(2, 3, 5, 8, 11), make_vocab_size_divisible_by=pick(1, 2, 3),
        max_position_embeddings=s + pick(0, 1),
        untie_embeddings_and_output_weights=name != "bert" and pick(False, True),
        hidden_dropout=pick(0.0, 0.1), attention_dropout=pick(0.0, 0.5))
    if name in ARCHITECTURES:
        model |= dict(architecture=name, heads=pick(*ARCHITECTURES[name]), activation=pick(*sorted(ACTIVATIONS)),
                      predicted_share=pick(1.0, 0.5, 0.15) if name == "bert" else 1.0,
                      position_embedding_type=pick("learned_absolute", "rope"), rotary_percent=2 / size,
                      apply_residual_connection_post_layernorm=pick(False, True))
    else:
        model |= llama_choices(pick, t, heads, size, choices.heads_multiple) | dict(position_embedding_type="rope")
    if name == "experts":
        model |= dict(experts=experts_choices(pick, t, choices.e))
    case = Case(t, ModelConfig(**model), pick(1, 2), s, seed=int(rng.integers(2**32)), sequence_parallel=sharded,
                keep_gathered_inputs=sharded and pick(False, True))
    plan = Plan(p, schedule, v, pick(False, True), pick(1, 7, 100, 1 << 30), choices.zero_stage,
                choices.zero_stage > 0 and pick(False, True), RECOMPUTES[choices.recompute], c,
                choices.cp_comm_type or "p2p", choices.e, choices.instances)
    return SampledRun(choices, case, p if schedule == "interleaved" else pick(1, p, p + 1), plan)


def llama_choices(pick, t: int, heads: int, size: int, heads_of: int = 1) -> dict:
    """Pick what a Llama has, or a Qwen, all or some of it. `heads_of` divides the heads of each of t ranks."""
    kind = pick("", "swiglu", "squared_relu")
    groups = [g for g in range(1, heads + 1) if heads % g == 0
              and (g % (t * heads_of) == 0 or heads_of == 1 and t % g == 0)]
    found = dict(
        normalization=pick(*NORMALIZATIONS), add_bias_linear=not kind, ffn_hidden_size=t * pick(1, 2, 3),
        add_qkv_bias=pick(False, True), num_query_groups=pick(None, *groups), qk_layernorm=pick(False, True),
        rotary_base=pick(1e4, 5e5), use_rope_scaling=pick(False, True))
    if kind:
        found |= {kind: True, "activation": "gelu"}
    if pick(False, True):       # heads of another size
        found |= dict(hidden_size=t * pick(*range(2 if t == 1 else 1, 5)), kv_channels=size)
    return found


def experts_choices(pick, t: int, e: int) -> ExpertsConfig:
    """Pick experts that can be split over t ranks and dealt out to e. With few tokens some have none."""
    n = pick(*[n for n in (2, 3, 4, 1) if n % e == 0] or [e])
    k = pick(*range(1, min(n, 3) + 1))
    return ExpertsConfig(n, k, (k == 1 and n > 1) or pick(False, True), pick(None, 2 * t), pick(1, 2), pick(None, t),
                         pick(0.1, 0.0), pick(0.1, 0.0))
