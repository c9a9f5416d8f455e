"""What the playground of t, p, d, c, e and ZeRO computes: a rank's memory and traffic, by the planner's formulas, and the
formulas themselves.

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
    """Stands for NumPy in a browser, whose Python has none: tensors are declared, and nothing is computed with arrays."""

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

from reference.config import (ExpertsConfig, ModelConfig, ParallelConfig, Recompute,  # noqa: E402
                              number_of_microbatches)
from reference.costs.memory import inside_columns, most_in_flight  # noqa: E402
from reference.costs.parameters import (dealt_parameters, parameters, parameters_of_stage,  # noqa: E402
                                        published_parameters)
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
            "stage": "last" if rank else "first", "memory": memory(plan, rank), "traffic": traffic(plan),
            "size": size_of_gpt(plan)}


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
    t, p, d, c, e, zero, b, B, w = (whole(state, name) for name in ("t", "p", "d", "c", "e", "zero", "b", "B", "w"))
    parallel = ParallelConfig(t, p, d, zero_stage=zero, sequence_parallel=state["sequence"] == "yes",
                              recompute=Recompute(state["recompute"]), context_parallel_size=c,
                              expert_model_parallel_size=e)
    return Plan(model_of(state), parallel, number_of_microbatches(B, b, d), b, w)


# ---- formulas -------------------------------------------------------------------------------------------------------


def formula(name: str, value: float, text: str, letters: dict[str, float], source: str) -> dict[str, Any]:
    """Describe a formula: its value, its text, the same with the numbers put in, and where it is from."""
    numbers = re.sub("Ψₑ|[a-zA-ZΨℓμκ]", lambda found: f"{letters[found[0]]:,}", text)
    return {"name": name, "value": value, "text": text, "numbers": numbers, "source": source}


def letters_of(plan: Plan, rank: int) -> dict[str, float]:
    """Return the values of the letters in formulas, for a rank of the first stage, or of the last."""
    c, p, w = plan.model, plan.parallel, plan.w
    t, e, stages = p.tensor_model_parallel_size, p.expert_model_parallel_size, p.pipeline_model_parallel_size
    held = plan.pipeline.last if rank else plan.pipeline.first
    return {"L": c.num_layers, "h": c.hidden_size, "a": c.num_attention_heads, "V": c.vocab_size, "t": t, "e": e,
            "p": stages, "c": p.context_parallel_size, "N": p.replicas, "m": plan.m, "b": plan.b, "w": w,
            "K": plan.adam, "s": plan.positions, "ℓ": len(held), "k": CHOSEN,
            "Ψ": parameters_of_stage(c, t, held, e), "Ψₑ": dealt_parameters(c, held, t, e),
            "n": most_in_flight(p.pipeline_schedule, stages, plan.m, rank), "r": p.sequence_shards,
            "q": max(1, c.groups // t) * c.head_size, "u": round(inside_columns(c, t, c.experts is not None)),
            "μ": 4 * w + (2 if c.hidden_dropout else 0), "κ": 2 * w + 1 if c.attention_dropout else w}


def memory(plan: Plan, rank: int) -> list[dict[str, Any]]:
    """Return a formula for each part of what a rank holds, and for each letter that stands in one of them."""
    letters, held, recompute = letters_of(plan, rank), plan.memory_of(rank), plan.parallel.recompute.granularity
    found = []
    for stage, name, of_each in ((3, "parameters", "w"), (2, "gradients", "w"), (1, "optimizer", "K")):
        shards = ("Ψ" if plan.parallel.zero_stage < stage else
                  "((Ψ − Ψₑ)/N + Ψₑ·e/N)" if letters["Ψₑ"] else "Ψ/N")
        found.append(formula(name, getattr(held, name), f"{of_each}·{shards}", letters, f"{ZERO}, section 5"))
    kept, whole = (plan.layer_bytes(one, plan.model.experts is not None) for one in (recompute, "none"))
    letters |= {"A": round(kept), "R": round(whole - kept)}
    outside = head_formula(plan, rank)
    letters["O"] = round(held.activations - letters["n"] * letters["ℓ"] * kept - whole + kept)
    return [*found, formula("activations", held.activations, "n·ℓ·A + R + O", letters, f"{NARAYANAN}, section 2.2"),
            formula("A", kept, layer_formula(plan, recompute), letters, f"{KORTHIKANTI}, equations 1 to 4"),
            formula("R", whole - kept, f"{layer_formula(plan, 'none')} − A", letters, f"{KORTHIKANTI}, section 5"),
            formula("O", letters["O"], outside, letters, f"{KORTHIKANTI}, section 4.3")]


def layer_formula(plan: Plan, recompute: str) -> str:
    """Return the bytes of a layer's activations, as a formula."""
    if recompute == "full":
        return "w·b·s·h/r"
    core = " + κ·a·s/t" if recompute == "none" and plan.parallel.context_parallel_size == 1 else ""
    return f"b·s·(μ·h/r + w·u{core})"


def head_formula(plan: Plan, rank: int) -> str:
    """Return the bytes of activations outside the layers, as a formula: of the embedding's dropout, and of the head."""
    last = rank == plan.parallel.pipeline_model_parallel_size - 1
    masks = ["p·b·s·h/t"] if rank == 0 and plan.model.hidden_dropout else []
    head = [f"b·s·(2·w·h + {max(4, plan.w)}·V)/t"] if last else []
    return " + ".join(masks + head) or "0"


def traffic(plan: Plan) -> list[dict[str, Any]]:
    """Return a formula for what a rank of the first stage sends to each group of ranks."""
    letters, p, sent = letters_of(plan, 0), plan.parallel, plan.messages._asdict() | plan.exchanges._asdict()
    full = p.recompute.granularity == "full"
    around = ("2", "2", "(m + 1)", "3·m")[p.zero_stage]
    replicated = "((Ψ − Ψₑ)·(N − 1)/N + Ψₑ·(N − e)/N)" if letters["Ψₑ"] else "Ψ·(N − 1)/N"
    texts = {
        "tensor": (f"w·m·ℓ·{8 + 2 * p.sequence_parallel + 4 * full}·b·s·h·(t − 1)/t",
                   f"{NARAYANAN}, section 3.2; {KORTHIKANTI}, section 4.2.2"),
        "pipeline": ("w·m·b·s·h/t" if p.pipeline_model_parallel_size > 1 else "0",
                     f"{NARAYANAN}, sections 3.2 and 4.1"),
        "data": (f"w·{around}·{replicated}", f"{ZERO}, section 7"),
        "context": (f"w·m·ℓ·{3 + full}·(c − 1)·2·b·s·q", RING),
        "expert": (f"w·m·ℓ·{4 + 2 * full}·k·b·s·h·(e − 1)/e" if plan.model.experts else "0", GSHARD)}
    return [formula(name, sent[name], text, letters, source) for name, (text, source) in texts.items()]


def size_of_gpt(plan: Plan) -> list[dict[str, Any]]:
    """Return the published formula for the parameters of the whole model, if it is a GPT of the usual form."""
    c = plan.model
    if not c.tied or c.grouped_attention or c.experts or c.ffn_size != 4 * c.hidden_size:
        return []
    letters = letters_of(plan, 0) | {"s": c.max_position_embeddings}
    return [formula("P", published_parameters(c), "12·L·h²·(1 + 13/(12·h) + (V + s)/(12·L·h))", letters,
                    f"{NARAYANAN}, equation 2")]
