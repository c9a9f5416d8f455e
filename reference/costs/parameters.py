"""What a run costs in parameters, FLOPs, idle time and traffic, as the papers' formulas. Bytes: reference/costs/memory.py.

The papers' letters, see reference/config.py; m microbatches a step, v stages on each pipeline rank. Narayanan et al.
2021 is 2104.04473 ("PTD-P"), Rajbhandari et al. 2020 is 1910.02054 (ZeRO), Korthikanti et al. 2022 is 2205.05198.
"""
from collections.abc import Collection
from typing import NamedTuple

from reference.config import RECOMPUTE, ModelConfig, check_zero_stage, require_one_of

# ---- parameters -----------------------------------------------------------------------------------------------------


def parameters(c: ModelConfig) -> int:
    """V h + s h + L (12 h^2 + 13 h) + 2 h, without padding; an untied output layer adds V h, rope takes s h away.

    A layer has 3h^2 + 3h for Q, K and V, h^2 + h for attention's output, 8h^2 + 5h for the MLP and 4h for two norms.
    Here s is the longest sequence, and the 2 h are the final layer norm's. BERT has a table of two token types and its
    heads besides (`head_parameters`).
    """
    h, tables = c.hidden_size, 2 if c.untie_embeddings_and_output_weights else 1
    return (tables * c.vocab_size * h + positions(c) + token_types(c) + c.num_layers * (12 * h**2 + 13 * h) + 2 * h
            + head_parameters(c, c.vocab_size))


def published_parameters(c: ModelConfig) -> float:
    """P = 12 L h^2 (1 + 13/(12h) + (V + s)/(12 L h)) (Narayanan et al. 2021, section 5.1, equation 2).

    Of a GPT with learned positions and tied logits. It leaves out the 2h of the final layer norm.
    """
    L, h, V, s = c.num_layers, c.hidden_size, c.vocab_size, c.max_position_embeddings
    return 12 * L * h**2 * (1 + 13 / (12 * h) + (V + s) / (12 * L * h))


def parameters_per_rank(c: ModelConfig, t: int) -> int:
    """Elements that one of t tensor-parallel ranks holds where the pipeline has one stage."""
    return parameters_of_stage(c, t, range(c.num_layers))


def parameters_of_stage(c: ModelConfig, t: int, layers: Collection[int]) -> int:
    """Elements that one of t tensor-parallel ranks holds of the stage with these layers.

    It holds 1/t of what is split, padding included, and all of the rest. The first stage embeds; the last has the
    final layer norm and the logits. Tied logits need the word table there too: a copy, unless the stage is both.
    """
    h, first, last = c.hidden_size, 0 in layers, c.num_layers - 1 in layers
    tables, words = int(first or last and c.tied), c.padded_vocab_size(t) // t
    tables += last and c.untie_embeddings_and_output_weights
    split, replicated = (12 * h**2 + 7 * h) // t, 6 * h      # 3h + 4h biases are split; two norms, two biases are not
    return (tables * words * h + (positions(c) + token_types(c) if first else 0)
            + len(layers) * (split + replicated) + (2 * h + head_parameters(c, words) if last else 0))


def positions(c: ModelConfig) -> int:
    """Elements of the table of positions, which every tensor-parallel rank holds whole; rope has none."""
    return c.max_position_embeddings * c.hidden_size if c.position_embedding_type == "learned_absolute" else 0


def token_types(c: ModelConfig) -> int:
    """Elements of BERT's table of two token types."""
    return 0 if c.causal else 2 * c.hidden_size


def head_parameters(c: ModelConfig, words: int) -> int:
    """Elements of BERT's heads beside the word table: a layer, a norm, and a bias for so many words; the pooler, and
    what reads it: two columns for the order of sentences, one for a choice.
    """
    if c.causal:
        return 0
    h, columns = c.hidden_size, pooled_columns(c)
    return ("lm" in c.heads) * (h**2 + 3 * h + words) + bool(columns) * (h**2 + h) + columns * (h + 1)


def pooled_columns(c: ModelConfig) -> int:
    """Of what reads the pooler, together."""
    return sum({"lm": 0, "sop": 2, "choice": 1}[head] for head in c.heads)


# ---- FLOPs and time -------------------------------------------------------------------------------------------------


class ForwardFlops(NamedTuple):
    """Of the matrix products of one forward pass: [n, k] @ [k, m] takes n k m multiplications and as many additions."""

    linear: int      # the layers' own matrices
    attention: int   # its core, which has no parameters
    logits: int      # and BERT's other heads


def forward_flops(c: ModelConfig, b: int, s: int) -> ForwardFlops:
    """Of b sequences of s tokens, on all ranks together (Narayanan et al. 2021, appendix).

    In a layer: 6 b s h^2 for Q, K and V, 2 b s h^2 for attention's output and 16 b s h^2 for the MLP, twice the weights
    for each token; and 2 b s^2 h for q k^T, as much for the probabilities times v. The causal mask hides half of
    that core, but the papers (and the textbook) compute all of it. What is no matrix product is left out.
    """
    L, h = c.num_layers, c.hidden_size
    return ForwardFlops(linear=L * (6 + 2 + 16) * b * s * h**2, attention=L * (2 + 2) * b * s**2 * h,
                        logits=head_flops(c, b, s))


def head_flops(c: ModelConfig, b: int, s: int) -> int:
    """2 b s h V for the logits. BERT has a layer before them, 2 b s h^2, and heads that read one position, 2 b h^2."""
    h, words = c.hidden_size, ("lm" in c.heads) * c.vocab_size
    if c.causal:
        return 2 * b * s * h * words
    columns = pooled_columns(c)
    return 2 * b * h * (bool(words) * s * (h + words) + bool(columns) * h + columns)


def iteration_flops(c: ModelConfig, B: int, s: int, recompute: str = "none") -> int:
    """Forward and backward of a global batch of B sequences. Raises UserError for an unknown `recompute`.

    Behind every product y = x w of the forward stand two in the backward, dy w^T and x^T dy: three times the forward.
    That is 72 B s L h^2 (1 + s/(6h) + V/(12 L h)), the *model* FLOPs (Korthikanti et al. 2022, equation 7).
    `full` computes every layer, but not the logits, once more: 96 B s L h^2 (1 + s/(6h) + V/(16 L h)) (Narayanan et
    al. 2021, section 5.1, equation 3). `selective` computes attention's core once more: 4 B s^2 h a layer.

    The last differs from Korthikanti et al.: their text adds the same 4 B s^2 h, but their equation 8 has s/(3h), which
    adds three times as much. Their 2.7 and 1.6 % of overhead and their table of utilisations follow the equation.

    Megatron-LM's `num_floating_point_operations` has the padded vocabulary for V, so that its count grows with t; here
    V are the words that there are. Of BERT's heads it knows only the logits; and its later versions count half of
    attention's core, for the mask, also in a BERT, which has none. Here, as in the papers, all of it counts.
    """
    require_one_of("The recompute of activations", recompute, RECOMPUTE)
    linear, attention, logits = forward_flops(c, B, s)
    again = {"none": 0, "selective": attention, "full": linear + attention}[recompute]
    return 3 * (linear + attention + logits) + again


def utilization(flops: float, seconds: float, ranks: int, peak: float) -> float:
    """The share of their peak, in FLOP/s, that the ranks reach (Korthikanti et al. 2022, section 6.3).

    Of the model FLOPs this is the MFU; of all that was computed, recompute included, the HFU. Narayanan et al. 2021
    print the latter in their table 1.
    """
    return flops / (seconds * ranks * peak)


def training_seconds(tokens: float, psi: float, ranks: int, flops_per_second: float) -> float:
    """8 T P / (n X): of a run over T tokens of a model of P = psi parameters, on n GPUs that each reach X FLOP/s.

    With full recompute a token costs 96 L h^2 FLOPs and the model has 12 L h^2 parameters, where the small terms of
    both are left out: 8 FLOPs a token and parameter (Narayanan et al. 2021, section 5.1, equation 4). Without recompute
    it would be 6. The days in their table 2 come from all of `iteration_flops`, and are 2 to 3 % more.
    """
    return 8 * tokens * psi / (ranks * flops_per_second)


# ---- idle time of a pipeline ----------------------------------------------------------------------------------------


def bubble_fraction(p: int, m: int, v: int = 1) -> float:
    """Idle / ideal time: (p - 1) / m of GPipe and 1F1B, (p - 1) / (v m) interleaved (Narayanan et al. 2021, sec. 2.2).

    A rank waits for p - 1 others to go first; with v stages on each, all of them are v times shorter.
    """
    return (p - 1) / (v * m)


class Bubbles(NamedTuple):
    """Idle time of a rank in a step, in the unit of F, I and W."""

    one_f_one_b: float
    zero_bubble_h1: float   # with 1F1B's peak of activations
    zero_bubble_h2: float   # with twice that, and where no optimizer step makes ranks wait


def bubbles(p: int, forward: float, input_gradient: float, weight_gradient: float) -> Bubbles:
    """From a stage's F, I and W for one microbatch (Qi et al. 2023, section 2.3, table 2, where I is called B).

    Splitting the backward lets others go on after I: their wait is shorter by W, and what is left is filled with the W
    that was put off. That fits exactly where W takes no longer than F, nor than I, and m is at least 2p: else a W that
    fills a wait makes another rank wait.
    """
    one = forward + input_gradient
    return Bubbles((p - 1) * (one + weight_gradient), (p - 1) * (one - weight_gradient),
                   (p - 1) * (one - 2 * weight_gradient))


# ---- traffic: elements that each rank sends -------------------------------------------------------------------------


def ring_all_gather(elements: int, ranks: int) -> float:
    """Until all have all `elements`, of which each began with its share. A reduce-scatter is the same, backwards.

    In each of n - 1 steps every rank hands the share that it got last to its neighbour: (n - 1)/n of the elements.
    """
    return elements * (ranks - 1) / ranks


def ring_all_reduce(elements: int, ranks: int) -> float:
    """2 (n - 1)/n of the elements: a reduce-scatter, then an all-gather."""
    return 2 * ring_all_gather(elements, ranks)


# What one rank sends of a whole array if the ranks form a ring.
RING = {
    "all_reduce": ring_all_reduce,
    "reduce_scatter": ring_all_gather,
    "all_gather": ring_all_gather,
    "broadcast": ring_all_gather,                # the mean over ranks: all but the last one pass it on
    "send": lambda size, ranks: size,            # no ring: to one other rank
}


def tensor_parallel_traffic(b: int, s: int, h: int, t: int, gathers_again: bool = False) -> float:
    """8 b s h (t - 1)/t a layer and microbatch: four all-reduces of b s h (Narayanan et al. 2021, section 3.2).

    g after attention and after the MLP, f in the backward of both (Shoeybi et al. 2019, figure 4). Sequence parallelism
    cuts each all-reduce into its two halves and sends as much (Korthikanti et al. 2022, section 4.2.2), as long as
    the gathered inputs of attention and MLP are kept. If the backward `gathers_again`, that makes 10 b s h (t - 1)/t.
    """
    x = b * s * h
    return 4 * ring_all_reduce(x, t) + (2 * ring_all_gather(x, t) if gathers_again else 0)


def pipeline_traffic(b: int, s: int, h: int, t: int = 1, v: int = 1) -> float:
    """b s h between neighbours, for each microbatch and each direction (Narayanan et al. 2021, section 3.2).

    All t tensor-parallel ranks would send the same: with the scatter/gather optimisation (section 4.1) each sends 1/t,
    and the receivers gather. Interleaved, a microbatch comes by v times.
    """
    return v * b * s * h / t


def data_parallel_traffic(psi: int, d: int, zero_stage: int = 0, m: int = 1) -> float:
    """A step of m microbatches on d replicas of psi parameters: 2 psi (d - 1)/d for one, with ZeRO-3 3 psi (d - 1)/d.

    Raises UserError for a stage that is not 0 to 3.
    """
    return data_parallel_rings(zero_stage, m) * ring_all_gather(psi, d)


def data_parallel_rings(zero_stage: int, m: int) -> int:
    """How often psi parameters or gradients go around in a step: an all-gather and a reduce-scatter once, an all-reduce
    twice.

    Plain: an all-reduce of the gradients. ZeRO-1 and 2 cut it in two: a reduce-scatter of gradients, and after the
    optimizer's step an all-gather of parameters. ZeRO-3 gathers parameters twice, for forward and backward, as it does
    not keep them (Rajbhandari et al. 2020, section 7). ZeRO-2 scatters gradients after every microbatch, and ZeRO-3
    gathers for each, too: m + 1 and 3 m. Raises UserError for a stage that is not 0 to 3.
    """
    check_zero_stage(zero_stage)
    return (2, 2, m + 1, 3 * m)[zero_stage]

