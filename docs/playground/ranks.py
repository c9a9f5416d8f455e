"""The computations of the page of t, p, d, c, e and ZeRO: a rank's memory and traffic by the planner's formulas, and
these formulas.

A state has each value as the reader typed or chose it, a text: see START.
"""
import math
import re
import sys
from dataclasses import replace
from importlib.util import find_spec
from types import ModuleType
from typing import Any


class Placeholder(ModuleType):
    """NumPy's place in a browser, whose Python has none: tensors are declared, and nothing is computed with arrays."""

    sqrt = staticmethod(math.sqrt)      # of an integer, in declarations

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_):
        return self

    __add__ = __call__


if not find_spec("numpy"):
    sys.modules["numpy"] = Placeholder("numpy")

from reference.config import ExpertsConfig, ModelConfig, ParallelConfig, Recompute, number_of_microbatches  # noqa: E402
from reference.costs.memory import inside_columns, most_in_flight  # noqa: E402
from reference.costs.parameters import dealt_parameters, parameters, parameters_of_stage  # noqa: E402
from reference.costs.plans import Plan  # noqa: E402
from reference.costs.published import LLAMA_3, PTD_P  # noqa: E402
from reference.errors import UserError  # noqa: E402

KINDS = {"GPT": PTD_P[0].model, "Llama": LLAMA_3[0].model}     # what sizes do not say: norms, gates, dropout
SIZES = ("kind", "L", "h", "a", "g", "f", "V", "s", "E")
PRESETS = {name: dict(zip(SIZES, sizes.split())) for name, sizes in {
    "GPT-3 175B": "GPT 96 12288 96 96 49152 51200 2048 0",
    "Llama-3 8B": "Llama 32 4096 32 8 14336 128256 8192 0",
    "Llama-3 70B": "Llama 80 8192 64 8 28672 128256 8192 0",
    "Llama-3 405B": "Llama 126 16384 128 8 53248 128256 8192 0",
    "Mixtral 8x7B": "Llama 32 4096 32 8 14336 32000 32768 8"}.items()}
START = PRESETS["GPT-3 175B"] | {"t": "8", "p": "12", "d": "8", "c": "1", "e": "1", "zero": "1", "sequence": "yes",
                                 "recompute": "selective", "b": "1", "B": "1536", "w": "2"}
CHOICES = {"kind": KINDS, "sequence": ("no", "yes"), "w": ("2", "4", "8")}      # the trainer refuses other texts
MOST_QUOTED = 40        # characters of a value in a link
CHOSEN = 2      # experts that compute a token

NARAYANAN = "Narayanan et al. 2021 (arXiv 2104.04473)"
ZERO, KORTHIKANTI = "Rajbhandari et al. 2020 (arXiv 1910.02054)", "Korthikanti et al. 2022 (arXiv 2205.05198)"
RING, GSHARD = "Liu et al. 2023 (arXiv 2310.01889)", "Lepikhin et al. 2020 (arXiv 2006.16668)"


def first_answers() -> dict[str, Any]:
    """Return the models to choose from, the settings that the page begins with, and the answer to these."""
    return {"presets": PRESETS, "start": START, "answer": costs(START)}


def costs(state: dict[str, str]) -> dict[str, Any]:
    """Return the bytes that a rank holds and sends in a step, each with its formula. Raises UserError."""
    plan = plan_of(state)
    rank = max((0, plan.parallel.pipeline_model_parallel_size - 1), key=lambda one: sum(plan.memory_of(one)))
    return {"ranks": plan.parallel.world_size, "parameters": parameters(plan.model), "m": plan.m,
            "stage": "last" if rank else "first", "memory": memory(plan, rank), "traffic": traffic(plan)}


def whole(state: dict[str, str], name: str) -> int:
    """Return the whole number that was typed. Raises UserError if it is none."""
    try:
        return int(state[name])
    except ValueError:
        raise UserError(f"{name} is {state[name]!r}, but must be a whole number.") from None


def model_of(state: dict[str, str]) -> ModelConfig:
    """Return the model with these sizes. It has grouped heads if there are fewer of keys than of queries."""
    L, h, a, g, f, V, s, E = (whole(state, name) for name in SIZES[1:])
    return replace(KINDS[state["kind"]], num_layers=L, hidden_size=h, num_attention_heads=a,
                   num_query_groups=None if g == a else g, ffn_hidden_size=f, vocab_size=V, max_position_embeddings=s,
                   experts=ExpertsConfig(E, CHOSEN) if E else None)


def plan_of(state: dict[str, str]) -> Plan:
    """Return the plan of these settings. Raises UserError where they do not go together."""
    state = {name: text[:MOST_QUOTED] for name, text in state.items()}
    for name, choices in CHOICES.items():
        if state[name] not in choices:
            raise UserError(f"{name} is {state[name]!r}, but must be one of {', '.join(choices)}.")
    t, p, d, c, e, zero, b, B, w = (whole(state, name) for name in ("t", "p", "d", "c", "e", "zero", "b", "B", "w"))
    parallel = ParallelConfig(t, p, d, zero_stage=zero, sequence_parallel=state["sequence"] == "yes",
                              recompute=Recompute(state["recompute"]), context_parallel_size=c,
                              expert_model_parallel_size=e)
    return Plan(model_of(state), parallel, number_of_microbatches(B, b, d), b, w)


# ---- formulas -------------------------------------------------------------------------------------------------------


def letters_of(plan: Plan, layers: list[int], n: int = 0) -> dict[str, float]:
    """Return the values of the letters in formulas, for a rank with these layers, and n microbatches in flight."""
    c, p, w = plan.model, plan.parallel, plan.w
    t, e = p.tensor_model_parallel_size, p.expert_model_parallel_size
    return {"h": c.hidden_size, "a": c.num_attention_heads, "t": t, "e": e, "c": p.context_parallel_size,
            "N": p.replicas, "m": plan.m, "n": n, "b": plan.b, "w": w, "K": plan.adam, "s": plan.positions,
            "ℓ": len(layers), "k": CHOSEN, "r": p.sequence_shards, "q": max(1, c.groups // t) * c.head_size,
            "Ψ": parameters_of_stage(c, t, layers, e), "Ψₑ": dealt_parameters(c, layers, t, e),
            "u": round(inside_columns(c, t, c.experts is not None)), "μ": 4 * w + 2 * bool(c.hidden_dropout),
            "κ": 2 * w + 1 if c.attention_dropout else w}


def memory(plan: Plan, rank: int) -> list[dict[str, Any]]:
    """Return a formula for each part of what a rank of the first or of the last stage holds, and for a layer's A."""
    p, held = plan.parallel, plan.memory_of(rank)
    n = most_in_flight(p.pipeline_schedule, p.pipeline_model_parallel_size, plan.m, rank)
    letters = letters_of(plan, plan.pipeline.last if rank else plan.layers, n)
    sharded = "((Ψ − Ψₑ)/N + Ψₑ·e/N)" if letters["Ψₑ"] else "Ψ/N"
    of_states = [(name, f"{bytes}·{sharded if p.zero_stage >= stage else 'Ψ'}", f"{ZERO}, section 5")
                 for name, bytes, stage in (("parameters", "w", 3), ("gradients", "w", 2), ("optimizer", "K", 1))]
    core = " + κ·a·s/t" if p.recompute.granularity == "none" and letters["c"] == 1 else ""
    layer = "w·b·s·h/r" if p.recompute.granularity == "full" else f"b·s·(μ·h/r + w·u{core})"
    A = plan.layer_bytes(p.recompute.granularity, plan.model.experts is not None)
    letters |= {"A": round(A), "O": round(held.activations - n * letters["ℓ"] * A)}
    texts = [*of_states, ("activations", "n·ℓ·A + O", f"{NARAYANAN}, section 2.2; {KORTHIKANTI}, section 4"),
             ("A", layer, f"{KORTHIKANTI}, equations 1 to 4")]
    return formulas(held._asdict() | {"A": A}, texts, letters)


def traffic(plan: Plan) -> list[dict[str, Any]]:
    """Return a formula for what a rank of the first stage sends to each group of ranks."""
    p, letters, full = plan.parallel, letters_of(plan, plan.layers), plan.parallel.recompute.granularity == "full"
    times = ("2", "2", "(m + 1)", "3·m")[p.zero_stage]
    replicated = "((Ψ − Ψₑ)·(N − 1)/N + Ψₑ·(N − e)/N)" if letters["Ψₑ"] else "Ψ·(N − 1)/N"
    return formulas(plan.messages._asdict() | plan.exchanges._asdict(), [
        ("tensor", f"w·m·ℓ·{8 + 2 * p.sequence_parallel + 4 * full}·b·s·h·(t − 1)/t",
         f"{NARAYANAN}, section 3.2; {KORTHIKANTI}, section 4.2.2"),
        ("pipeline", "w·m·b·s·h/t" if p.pipeline_model_parallel_size > 1 else "0",
         f"{NARAYANAN}, sections 3.2 and 4.1"),
        ("data", f"w·{times}·{replicated}", f"{ZERO}, section 7"),
        ("context", f"w·m·ℓ·{3 + full}·(c − 1)·2·b·s·q", RING),
        ("expert", f"w·m·ℓ·{4 + 2 * full}·k·b·s·h·(e − 1)/e" if plan.model.experts else "0", GSHARD)], letters)


def formulas(values: dict[str, float], texts: list[tuple], letters: dict[str, float]) -> list[dict[str, Any]]:
    """Describe formulas: the value, the text, the same with the numbers put in, and where it is from."""
    return [{"name": name, "value": values[name], "text": text, "source": source,
             "numbers": re.sub("Ψₑ|[a-zA-ZΨℓμκ]", lambda found: f"{letters[found[0]]:,}", text)}
            for name, text, source in texts]
