"""Activations on a rank in bytes, as the papers' formulas. Model states: reference/parallel/model_states.py.

The arrays that our own implementation keeps: shardlab/report/layer_memory.py, and shardlab/predict.

Korthikanti et al. 2022 is 2205.05198, Qi et al. 2023 is 2401.10241. Letters as in reference/config. A GB is 10^9
bytes, as in the papers' tables.
"""
from typing import NamedTuple

from reference.config import RECOMPUTE, ModelConfig, require_one_of


class LayerActivations(NamedTuple):
    """Bytes that one layer keeps on each rank for the backward of one microbatch."""

    replicated: float   # outside the tensor-parallel regions: on every rank, unless the sequence is sharded
    split: float        # inside them: a rank has its heads and its columns
    core: float         # attention's softmax, its dropout mask and its output after dropout, a s^2 of each


def layer_activations(c: ModelConfig, b: int, s: int, t: int = 1, sequence_parallel: bool = False,
                      recompute: str = "none", experts: bool = False, w: int = 2) -> LayerActivations:
    """Return the bytes of 16-bit activations and one-byte dropout masks (Korthikanti et al. 2022, equations 1 to 4).
    Activations of w bytes make w of each 2 below, but masks stay.

    In units of s b h:  10   inputs of two layer norms 4, of QKV 2, of the MLP 2; two dropout masks after the branches 2
                        24   Q, K and V 6, input of attention's output layer 2, of GELU 8, of the MLP's second layer 8
                  5 a s/h    softmax 2, dropout's mask 1 and output 2

    That is a GPT with dropout; without it there are no masks (2 of the 10), and of the core the softmax alone (2 of the
    5). In the same units a Llama has instead of the 24, for each of its columns: 2 for those of Q, K and V
    (and again for those of Q and K, if they are normalized), attention's output layer, the gate, what it multiplies,
    and the MLP's second layer.

    Sequence parallelism divides the 10 by t too (the gathered inputs are not kept, but gathered again). `selective`
    recomputes the core. `full` keeps the layer's input, 2 s b h, of which a rank has 1/t if the sequence is sharded
    (the paper's table 2 has it whole, since there `full` is without sequence parallelism). Raises UserError for an
    unknown `recompute`.

    `experts` in the MLP's place have columns for each of a token's k copies, whose inputs and outputs every one of the
    t ranks has, 2 k x 2 s b h, if the routers choose evenly.
    """
    require_one_of("The recompute of activations", recompute, RECOMPUTE)
    sbh, outside = s * b * c.hidden_size, t if sequence_parallel else 1
    if recompute == "full":
        return LayerActivations(w * sbh / outside, 0, 0)
    masks, of_a_score = 2 * bool(c.hidden_dropout), 2 * w + 1 if c.attention_dropout else w
    core, columns = of_a_score * c.num_attention_heads * s**2 * b / t, inside_columns(c, t, experts)
    return LayerActivations((4 * w + masks) * sbh / outside, w * s * b * columns, core if recompute == "none" else 0)


def inside_columns(c: ModelConfig, t: int, experts: bool = False) -> float:
    """Count the columns of all that a layer keeps inside the regions, on a rank: 12 h/t for a GPT."""
    queries, fewest = c.num_attention_heads * c.head_size / t, 1 if c.grouped_attention else 0
    keys = c.head_size * max(fewest, c.groups / t)
    normed = queries + keys if c.qk_layernorm else 0
    attention, each = 2 * queries + 2 * keys + normed, 3 if c.swiglu else 2
    if not (experts and c.experts):
        return attention + each * c.ffn_size / t
    k, shared = c.experts.moe_router_topk, c.experts.moe_shared_expert_intermediate_size or 0
    width = c.experts.moe_ffn_hidden_size or c.ffn_size
    return attention + 2 * k * c.hidden_size + each * (k * width + shared) / t


def activations_outside_layers(c: ModelConfig, b: int, s: int, t: int, p: int, w: int = 2) -> float:
    """Return bytes on a rank of the first stage, with sequence parallelism (Korthikanti et al. 2022, section 4.3).

    They are the mask of dropout after the embedding, if there is any, for p microbatches in flight; and if the first
    stage is also the last, the head's.
    """
    masks = p * s * b * c.hidden_size / t if c.hidden_dropout else 0
    return masks + (head_activations(c, b, s, t, w) if p == 1 else 0)


def head_activations(c: ModelConfig, b: int, s: int, t: int, w: int = 2) -> float:
    """Return bytes on a rank of the last stage: inputs of the final norm and the logits, w b s h each, and logits, 4 b
    s V, or w for 4 if that is more; of a BERT as many as it predicts.
    """
    return b * (2 * w * s * c.hidden_size + max(4, w) * c.most_predicted(s) * c.vocab_size) / t


def most_in_flight(schedule: str, p: int, m: int, rank: int, v: int = 1) -> int:
    """Return the peak number of stage activations on a rank. Raise UserError for an unknown schedule.

    GPipe keeps all m; 1F1B one for each rank from this to the last (Narayanan et al. 2021, section 2.2), so the first
    rank always holds p x L/p layers' activations: more stages save nothing. Interleaved, a stage is 1/v of a rank's
    layers, and the first rank holds L (1 + (p - 1)/(p v)) layers' (Korthikanti et al. 2022, section 4.2.3). ZB-H1 holds
    p everywhere, ZB-H2 2p - 1 (Qi et al. 2023, section 2.3, table 2).
    """
    bounds = {"gpipe": m, "1f1b": p - rank, "interleaved": 2 * (p - rank - 1) + (v - 1) * p + 1,
              "zb-h1": p, "zb-h2": 2 * p - 1}
    require_one_of("The schedule", schedule, tuple(bounds))
    return min(bounds[schedule], v * m)
