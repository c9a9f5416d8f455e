"""What activations a rank must hold, in bytes: as the papers' formulas, and then as an account of what this machine
keeps, item by item, beside them. Model states: reference/parallel/model_states.py.

Korthikanti et al. 2022 is 2205.05198, Qi et al. 2023 is 2401.10241.
Letters as in reference/config.py. A GB is 10^9 bytes, as in the papers' tables.
"""
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from reference.config import RECOMPUTE, ModelConfig, ParallelConfig, Recompute, require_one_of
from reference.costs.parameters import pooled_columns
from reference.models.model import sequences_of
from reference.precision import FORMATS, Precision
from reference.schedules.actions import Action

# ---- activations ----------------------------------------------------------------------------------------------------


class LayerActivations(NamedTuple):
    """Bytes that one layer keeps on each rank for the backward of one microbatch."""

    replicated: float   # outside the tensor-parallel regions: on every rank, unless the sequence is split
    split: float        # inside them: a rank has its heads and its columns
    core: float         # of attention: softmax, its dropout mask and what is left after it, a s^2 of each


def layer_activations(c: ModelConfig, b: int, s: int, t: int = 1, sequence_parallel: bool = False,
                      recompute: str = "none") -> LayerActivations:
    """Of 16-bit activations and one-byte dropout masks (Korthikanti et al. 2022, equations 1 to 4, and table 2).

    In units of s b h:  10   inputs of two layer norms 4, of QKV 2, of the MLP 2; two dropout masks after the branches 2
                        24   Q, K and V 6, input of attention's output layer 2, of GELU 8, of the MLP's second layer 8
                  5 a s/h    softmax 2, dropout's mask 1 and output 2

    Sequence parallelism divides the 10 by t too (the gathered inputs are not kept, but gathered again). `selective`
    recomputes the core. `full` keeps the layer's input, 2 s b h, of which a rank has 1/t if the sequence is split
    (the paper's table 2 has it whole, for there `full` stands without sequence parallelism).
    Raises UserError for an unknown `recompute`.
    """
    require_one_of("The recompute of activations", recompute, RECOMPUTE)
    sbh, outside = s * b * c.hidden_size, t if sequence_parallel else 1
    if recompute == "full":
        return LayerActivations(2 * sbh / outside, 0, 0)
    core = 5 * c.num_attention_heads * s**2 * b / t
    return LayerActivations(10 * sbh / outside, 24 * sbh / t, core if recompute == "none" else 0)


def activations_outside_layers(c: ModelConfig, b: int, s: int, t: int, p: int) -> float:
    """Bytes on a rank of the first stage, with sequence parallelism (Korthikanti et al. 2022, section 4.3).

    The dropout mask after the embedding, for p microbatches in flight; and where the first stage is also the last, what
    the head keeps.
    """
    return p * s * b * c.hidden_size / t + (head_activations(c, b, s, t) if p == 1 else 0)


def head_activations(c: ModelConfig, b: int, s: int, t: int) -> float:
    """Bytes on a rank of the last stage: inputs of the final layer norm and of the logits, 2 b s h each, and the
    logits in float32, 4 b s V (the same).
    """
    return 4 * s * b * (c.hidden_size + c.vocab_size) / t


def most_in_flight(schedule: str, p: int, m: int, rank: int, v: int = 1) -> int:
    """Stages' worth of activations that a rank holds at once, at most. Raises UserError for an unknown schedule.

    GPipe keeps all m; 1F1B one for each rank from this to the last (Narayanan et al. 2021, section 2.2), so that the
    first always holds p x L/p layers' worth: cutting the pipeline further saves nothing. Interleaved, a stage is 1/v
    of a rank's layers, and the first rank holds L (1 + (p - 1)/(p v)) layers' worth (Korthikanti et al. 2022, section
    4.2.3). ZB-H1 holds p everywhere, ZB-H2 2p - 1 (Qi et al. 2023, section 2.3, table 2).
    """
    bounds = {"gpipe": m, "1f1b": p - rank, "interleaved": 2 * (p - rank - 1) + (v - 1) * p + 1,
              "zb-h1": p, "zb-h2": 2 * p - 1}
    require_one_of("The schedule", schedule, tuple(bounds))
    return min(bounds[schedule], v * m)


# ---- activations, item by item --------------------------------------------------------------------------------------


class Kept(NamedTuple):
    """Arrays that wait for a microbatch's backward on one rank, and what the papers' formula has for them."""

    what: str
    elements: int
    bytes: int       # ours
    paper: float     # theirs: 2 for an element of an activation, 1 for one of a mask
    why: str         # ours are more, or fewer; "" where they are as many


class StageBytes(NamedTuple):
    """Of one microbatch on one rank: the layers of a stage, and what stands before and after them."""

    kept: int         # from F until B, or until I
    deferred: int     # from I until W


@dataclass(frozen=True)
class Account:
    """What the machine's arrays are, to the byte: those that a microbatch of b sequences leaves on one rank.

    The papers' items of `layer` add up to `layer_activations`; those of `embedding` and `head` to
    `activations_outside_layers`, where the sequence is cut; those of `layer_deferred`, on one rank, to the 32 s b h of
    Qi et al. 2023, table 1.
    """

    c: ModelConfig
    b: int
    s: int
    precision: Precision
    parallel: ParallelConfig

    # ---- elements ----

    @property
    def sequences(self) -> int:
        """b, or where the model is to choose, as many for each question as there are answers."""
        return self.b * sequences_of(self.c)

    @property
    def whole(self) -> int:
        """[b, s, h]."""
        return self.sequences * self.s * self.c.hidden_size

    @property
    def inside(self) -> int:
        """[b, s, h/t], a rank's heads."""
        return self.whole // self.parallel.tensor_model_parallel_size

    @property
    def outside(self) -> int:
        """Outside tensor-parallel regions: all of [b, s, h], or this rank's positions."""
        return self.whole // self.parallel.sequence_shards

    # ---- a layer ----

    def layer(self) -> list[Kept]:
        """From a layer's forward until its backward."""
        if self.parallel.recompute.granularity == "full":
            return [self.array("the layer's input", self.outside, 2 * self.outside)]
        return [*self.norm("first norm"), self.region_input("input of Q, K and V"), *self.core(),
                self.array("input of attention's output layer", self.inside, 2 * self.inside),
                self.mask("dropout mask after attention", self.outside, self.c.hidden_dropout),
                *self.norm("second norm"), self.region_input("input of the MLP"), *self.activation(),
                self.array("input of the MLP's second layer", 4 * self.inside, 8 * self.inside),
                self.mask("dropout mask after the MLP", self.outside, self.c.hidden_dropout)]

    def kept_layer(self) -> list[Kept]:
        """The same of a layer that full recompute leaves alone."""
        selective = Recompute("selective" if self.parallel.recompute.selective else "none")
        return replace(self, parallel=replace(self.parallel, recompute=selective)).layer()

    def norm(self, name: str) -> list[Kept]:
        return [self.array(f"{name}: input, normalised", self.outside, 2 * self.outside),
                self.array(f"{name}: 1 / std", self.outside // self.c.hidden_size, 0,
                           "one a position: too small for the formula", self.precision.main)]

    def region_input(self, what: str) -> Kept:
        gathered = self.parallel.keep_gathered_inputs
        return self.array(what, self.whole if gathered else self.outside, 2 * self.outside,
                          "all positions, for what was gathered is kept" if gathered else "")

    def core(self) -> list[Kept]:
        """Q, K and V, and what attention makes of them. Selective recompute makes it again; in 16 bits the kernel does,
        as FlashAttention (Dao et al. 2022).
        """
        found = [self.array("Q, K and V", 3 * self.inside, 6 * self.inside)]
        if self.c.position_embedding_type == "rope":
            found.append(self.rotary())
        if self.parallel.recompute.selective:
            return found
        n = self.sequences * self.c.num_attention_heads * self.s**2 // self.parallel.tensor_model_parallel_size
        if self.precision.half:
            return [*found, Kept("attention's probabilities, dropped and not", 0, 0, 5 * n,
                                 "the backward's kernel computes them again")]
        after = ("computed again from the two above" if self.c.attention_dropout else
                 "nothing is dropped: they are the probabilities")
        return found + [self.array("attention's probabilities", n, 2 * n),
                        self.mask("their dropout mask", n, self.c.attention_dropout),
                        self.array("the same after dropout", 0, 2 * n, after)]

    def activation(self) -> list[Kept]:
        """Of the MLP's activation function: 4h/t columns."""
        return self.activation_of(4 * self.inside)

    def activation_of(self, n: int) -> list[Kept]:
        """Of n elements."""
        if self.c.activation == "relu":
            return [Kept("input of ReLU", n, n, 2 * n, "its backward needs the sign alone, a byte")]
        found = [self.array("input of GeLU", n, 2 * n)]
        if not self.precision.half:
            found.append(self.array("GeLU's Phi" if self.c.activation == "gelu_exact" else "GeLU's tanh", n, 0,
                                    "takes long to compute: kept, where the formula computes it again"))
        return found

    def rotary(self) -> Kept:
        return self.array("cos and sin of rope", self.s * self.c.rotary_size, 0,
                          "one pair of tables for all layers of the stage")

    def layer_deferred(self) -> list[Kept]:
        """From I until W, where a schedule splits the backward: the two factors of each weight matrix's gradient.

        Sequence parallelism saves nothing here: the products need all positions, so what I has gathered waits for W.
        """
        factors = [("input of Q, K and V", self.whole), ("its gradient: of Q, K and V", 3 * self.inside),
                   ("input of attention's output layer", self.inside), ("gradient of its output", self.whole),
                   ("input of the MLP", self.whole), ("gradient before the activation", 4 * self.inside),
                   ("input of the MLP's second layer", 4 * self.inside), ("gradient of its output", self.whole)]
        return [self.array(what, n, 2 * n) for what, n in factors]

    # ---- before and after the layers ----

    def embedding(self) -> list[Kept]:
        n = 0 if self.c.causal else self.outside // self.c.hidden_size
        return [self.words("tokens"), Kept("token types: of the second?", n, n, 0, "a byte a position" if n else ""),
                self.mask("dropout mask after the embedding", self.outside, self.c.hidden_dropout)]

    def head(self) -> list[Kept]:
        """Final layer norm, logits and loss; of a BERT the other heads."""
        return [*self.norm("final norm"), *(self.transform() if not self.c.causal and "lm" in self.c.heads else []),
                *(self.words_predicted() if "lm" in self.c.heads else []), *self.pooled()]

    def words_predicted(self) -> list[Kept]:
        logits = 4 * self.b * self.s * self.c.vocab_size / self.parallel.tensor_model_parallel_size
        return [self.region_input("input of the logits"),
                self.array("probabilities of the words", self.logits, logits, "padded words have theirs, too",
                           self.precision.compute if self.c.fp16_lm_cross_entropy else self.precision.main),
                self.words("targets")]

    def transform(self) -> list[Kept]:
        """BERT's layer before the logits."""
        return [self.array("input of the layer before the logits", self.outside, 2 * self.outside),
                *self.activation_of(self.outside), *self.norm("norm before the logits")]

    def pooled(self) -> list[Kept]:
        """Of the heads that read one position: a vector before the pooler and one after it; and probabilities."""
        if not (columns := pooled_columns(self.c)):
            return []
        n = self.sequences * self.c.hidden_size
        return [self.array("first positions, before the pooler and after it", 2 * n, 4 * n),
                self.array("probabilities of the pooled heads", self.sequences * columns, 0,
                           "too small for the formula", self.precision.main)]

    def head_deferred(self) -> list[Kept]:
        found, first = [], self.sequences * self.c.hidden_size
        if "lm" in self.c.heads:
            found = [self.array("input of the logits", self.whole, 2 * self.whole),
                     self.array("gradient of the logits", self.logits, 2 * self.logits)]
            if not self.c.causal:
                found.append(self.array("factors of the layer before the logits", 2 * self.outside, 4 * self.outside))
        if columns := pooled_columns(self.c):
            n = 3 * first + self.sequences * columns
            found.append(self.array("factors of the pooler and of what reads it", n, 2 * n))
        return found

    @property
    def logits(self) -> int:
        """Elements: [b, s, V/t]."""
        t = self.parallel.tensor_model_parallel_size
        return self.b * self.s * self.c.padded_vocab_size(t) // t

    def words(self, what: str) -> Kept:
        n = self.sequences * self.s
        return Kept(what, 2 * n, 9 * n, 0, "8 bytes for the row in this rank's part of the table, 1 for: is it there?")

    # ---- a kind of item ----

    def array(self, what: str, elements: int, paper: float, why: str = "", form: str = "") -> Kept:
        """Of the format in which the run computes, or of another. That alone makes ours differ if nothing is said."""
        size = FORMATS[form or self.precision.compute].bytes
        return Kept(what, elements, elements * size, paper,
                    "" if elements * size == paper else why or f"{size} bytes an element, not 2")

    def mask(self, what: str, elements: int, rate: float) -> Kept:
        """A byte for each element that dropout may drop, here and in the papers."""
        ours = elements if rate else 0
        return Kept(what, ours, ours, elements, "" if rate else "nothing is dropped")

    # ---- all together ----

    def stage(self, layers: Sequence[int]) -> StageBytes:
        """A stage with these layers."""
        rope = self.rotary().bytes if self.c.position_embedding_type == "rope" else 0
        kept, deferred = rope, len(layers) * total(self.layer_deferred())
        its_input, whole = self.outside * self.precision.form.bytes, total(self.kept_layer()) - rope
        for group, again in self.parallel.recompute.groups(layers):
            kept += its_input if again else len(group) * whole
        if 0 in layers:
            kept += total(self.embedding())
        if self.c.num_layers - 1 in layers:
            kept, deferred = kept + total(self.head()), deferred + total(self.head_deferred())
        return StageBytes(kept, deferred)

    def recomputed(self, layers: Sequence[int]) -> int:
        """What the backward of a stage with these layers computes again, and holds at once: a whole group's caches."""
        groups = [len(group) for group, again in self.parallel.recompute.groups(layers) if again]
        rope = self.rotary().bytes if self.c.position_embedding_type == "rope" else 0
        return max(groups) * (total(self.kept_layer()) - rope) + rope if groups else 0


def peak_activations(stages: Mapping[int, StageBytes], actions: Sequence[Action]) -> int:
    """The most bytes that a rank holds at once, if it does these actions on these stages, in this order."""
    held = peak = 0
    for action in actions:
        kept, deferred = stages[action.stage]
        held += {"F": kept, "B": -kept, "I": deferred - kept, "W": -deferred}[action.kind]
        peak = max(peak, held)
    return peak


def rank_activations(account: Account, stages: Mapping[int, Sequence[int]],
                     actions: Sequence[Action]) -> tuple[int, int]:
    """Of a rank with these layers in its stages: the most bytes that it holds at once, and that it computes again."""
    kept = {stage: account.stage(layers) for stage, layers in stages.items()}
    return peak_activations(kept, actions), max(account.recomputed(layers) for layers in stages.values())


def total(items: Iterable[Kept]) -> int:
    """Bytes of ours."""
    return sum(item.bytes for item in items)


# ---- measured -------------------------------------------------------------------------------------------------------


def array_bytes(*trees, besides=()) -> int:
    """Bytes of the memory under all arrays in nested tuples, lists and dicts: once, however many views there are of it.
    What is under arrays in `besides` does not count.
    """
    found = arrays_under(trees)
    return sum(found[key] for key in found.keys() - arrays_under(besides).keys())


def arrays_under(trees) -> dict[int, int]:
    """Of each array that others may be views of its bytes, by id."""
    found, left = {}, [trees]
    while left:
        tree = left.pop()
        if isinstance(tree, dict):
            left += tree.values()
        elif isinstance(tree, (tuple, list)):
            left += tree
        elif hasattr(tree, "nbytes"):
            while getattr(tree, "base", None) is not None and hasattr(tree.base, "nbytes"):
                tree = tree.base             # a view keeps all that it is a view of
            found[id(tree)] = tree.nbytes
    return found
