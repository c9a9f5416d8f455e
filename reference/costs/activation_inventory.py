"""The tensors that our implementation saves for the backward, to the byte, with the papers' formulas beside them.

The formulas: memory.py. Qi et al. 2023 is 2401.10241.
"""
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from reference.config import Recompute
from reference.costs.rank_elements import RankElements
from reference.costs.saved_tensors import SavedTensor, StageBytes, peak_activations, total
from reference.precision import FORMATS
from reference.schedules.actions import Action


def pooled_columns(c) -> int:
    """Count the columns of all layers that read the pooler."""
    return sum({"lm": 0, "sop": 2, "choice": 1}[head] for head in c.heads)


class ActivationInventory(RankElements):
    """The machine's saved tensors, to the byte: those that a microbatch of b sequences leaves on one rank.

    The papers' items of `layer` add up to `layer_activations`; those of `embedding` and `head` to
    `activations_outside_layers`, with sequence parallelism; those of `layer_deferred`, on one rank, to the 32 s b h of
    Qi et al. 2023, table 1.
    """

    # ---- a layer ----

    def layer(self) -> list[SavedTensor]:
        """List the tensors that are saved from a layer's forward until its backward."""
        if self.parallel.recompute.granularity == "full":
            return [self.array("the layer's input", self.outside, 2 * self.outside)]
        return [*self.norm("first norm"), self.region_input("input of Q, K and V"), *self.core(),
                self.array("input of attention's output layer", self.queries, 2 * self.queries),
                self.mask("dropout mask after attention", self.outside, self.c.hidden_dropout),
                *self.norm("second norm"), *self.mlp(),
                self.mask("dropout mask after the MLP", self.outside, self.c.hidden_dropout)]

    def mlp(self) -> list[SavedTensor]:
        return [self.region_input("input of the MLP"), *self.activation(self.columns),
                self.array("input of the MLP's second layer", self.columns, 2 * self.columns)]

    def experts(self) -> list[SavedTensor]:
        """List the tensors of experts in the MLP's place, all of them on each rank: those of n = b s k copies. The
        papers have no formula. (Where experts are dealt out, the number of copies on a rank depends on the data.)
        """
        assert self.c.experts
        c, main, k = self.c.experts, self.precision.main, self.c.experts.moe_router_topk
        tokens, outside = self.tokens, self.outside // self.c.hidden_size
        n, t, cut = tokens * k, self.parallel.tensor_model_parallel_size, self.parallel.sequence_parallel
        width = (c.moe_ffn_hidden_size or self.c.ffn_size) // t
        found = [self.array("input of the router", self.outside, 0),
                 self.array("the router's probabilities and weights", outside * (c.num_experts + k), 0, "", main),
                 self.array("factors of the router's losses",
                            (self.sequences if self.c.causal else outside) * c.num_experts + outside + 2, 0, "", main),
                 SavedTensor("choices, and the copies in the order of experts", outside * k + n + c.num_experts,
                             8 * (outside * k + n + c.num_experts), 0, "int64"),
                 self.array("weights of the copies", n if cut or self.precision.half else 0, 0,
                            "the router's own, unless they are gathered or rounded"),
                 self.array("copies, and what experts made of them", 2 * n * self.c.hidden_size, 0),
                 *self.activation(n * width), self.array("inputs of the experts' second layers", n * width, 0)]
        if c.moe_shared_expert_intermediate_size:
            n = tokens * c.moe_shared_expert_intermediate_size // t
            gathered = self.whole if self.parallel.keep_gathered_inputs else 0
            found += [self.array("input of the shared expert", gathered, 0, "the router's own, unless it is gathered"),
                      *self.activation(n),
                      self.array("input of the shared expert's second layer", n, 0)]
        return found

    def kept_layer(self) -> list[SavedTensor]:
        """List the same for a layer that full recompute leaves alone."""
        selective = Recompute("selective" if self.parallel.recompute.selective else "none")
        return replace(self, parallel=replace(self.parallel, recompute=selective)).layer()

    def norm(self, name: str) -> list[SavedTensor]:
        return [self.array(f"{name}: input, normalised", self.outside, 2 * self.outside),
                self.array(f"{name}: 1 / std", self.outside // self.c.hidden_size, 0,
                           "one a position: too small for the formula", self.precision.main)]

    def region_input(self, what: str) -> SavedTensor:
        gathered = self.parallel.keep_gathered_inputs
        return self.array(what, self.whole if gathered else self.outside, 2 * self.outside,
                          "all positions: the gathered input is kept" if gathered else "")

    def core(self) -> list[SavedTensor]:
        """List Q, K and V, and attention's results. Selective recompute recomputes them, as does the kernel in 16 bits.

        (FlashAttention, Dao et al. 2022.)
        """
        qkv = self.queries + 2 * self.keys
        found = [self.array("Q, K and V", qkv, 2 * qkv), *self.head_norms()]
        if self.c.position_embedding_type == "rope":
            found.append(self.rotary())
        ranks, way = self.parallel.context_parallel_size, self.parallel.cp_comm_type
        if ranks > 1 and way != "a2a":
            statistics = 2 * self.queries // self.c.head_size
            return [*found, self.array("largest score and sum of each query", statistics, 0,
                                       "too small for the formula, whose probabilities are computed again block by "
                                       "block", self.precision.main)]
        if self.parallel.recompute.selective:
            return found
        n = self.sequences * self.c.num_attention_heads * self.s**2 // (
            self.parallel.tensor_model_parallel_size * ranks)
        dropped = bool(self.c.attention_dropout)
        if self.precision.half:
            return [*found, SavedTensor("attention's probabilities, dropped and not", 0, 0, (5 if dropped else 2) * n,
                                        "the backward's kernel recomputes them")]
        return found + [self.array("attention's probabilities", n, 2 * n),
                        self.mask("their dropout mask", n, self.c.attention_dropout),
                        self.array("the same after dropout", 0, 2 * n * dropped, "recomputed from the two above")]

    def head_norms(self) -> list[SavedTensor]:
        """List the tensors of the norms of Q and K, if the model has them."""
        if not self.c.qk_layernorm:
            return []
        n = self.queries + self.keys
        return [self.array("norms of Q and K: input, normalised", n, 2 * n),
                self.array("norms of Q and K: 1 / std", n // self.c.head_size, 0,
                           "one a head and position: too small for the formula", self.precision.main)]

    def activation(self, n: int) -> list[SavedTensor]:
        """List the tensors of the activation function, or of the gate, of an MLP of n columns for all its tokens."""
        if not self.c.swiglu:
            return self.activation_of(n)
        found = [self.array("the gate, and what it multiplies", 2 * n, 4 * n)]
        if not self.precision.half:
            found.append(self.array("the gate's sigmoid", n, 0,
                                    "slow to compute: saved, while the formula recomputes it"))
        return found

    def activation_of(self, n: int) -> list[SavedTensor]:
        """List the tensors of an activation function of n elements."""
        if self.c.activation == "relu":
            return [SavedTensor("input of ReLU", n, n, 2 * n, "its backward needs only the sign, a byte")]
        found = [self.array("input of GeLU", n, 2 * n)]
        if not self.precision.half:
            found.append(self.array("GeLU's Phi" if self.c.activation == "gelu_exact" else "GeLU's tanh", n, 0,
                                    "slow to compute: saved, while the formula recomputes it"))
        return found

    def rotary(self) -> SavedTensor:
        return self.array("cos and sin of rope", self.own * self.c.rotary_size, 0,
                          "one pair of tables for all layers of the stage")

    def layer_deferred(self) -> list[SavedTensor]:
        """List the tensors from I until W, if a schedule splits the backward: the two factors of each weight gradient.

        Sequence parallelism saves nothing here: the products need all positions, so the inputs that I gathered wait for
        W.
        """
        factors = [("input of Q, K and V", self.whole),
                   ("its gradient: of Q, K and V", self.queries + 2 * self.keys),
                   ("input of attention's output layer", self.queries), ("gradient of its output", self.whole)]
        return [*(self.array(what, n, 2 * n) for what, n in factors), *self.mlp_deferred(self.columns)]

    def mlp_deferred(self, n: int) -> list[SavedTensor]:
        """List the same for an MLP of n columns for all positions of this rank."""
        before = (2 if self.c.swiglu else 1) * n
        factors = [("input of the MLP", self.whole), ("gradient before the activation", before),
                   ("input of the MLP's second layer", n), ("gradient of its output", self.whole)]
        return [self.array(what, n, 2 * n) for what, n in factors]

    def experts_deferred(self) -> list[SavedTensor]:
        """List the same for experts in the MLP's place."""
        assert self.c.experts
        c, t, h = self.c.experts, self.parallel.tensor_model_parallel_size, self.c.hidden_size
        n, shared = self.tokens * c.moe_router_topk, c.moe_shared_expert_intermediate_size
        tokens = self.outside // h
        factors = [("input of the router, and gradient of its logits", tokens * (h + c.num_experts)),
                   ("copies, and gradients of what experts made of them", 2 * n * h),
                   ("what is between the experts' layers, and its gradient",
                    (3 if self.c.swiglu else 2) * n * (c.moe_ffn_hidden_size or self.c.ffn_size) // t)]
        found = [self.array(what, n, 0) for what, n in factors]
        if shared:                       # whose input is the router's own, unless it was gathered
            own, *others = self.mlp_deferred(self.tokens * shared // t)
            found += [own, *others] if self.parallel.sequence_parallel else others
        return found

    # ---- before and after the layers ----

    def embedding(self) -> list[SavedTensor]:
        n = 0 if self.c.causal else self.outside // self.c.hidden_size
        return [self.ids("tokens"),
                SavedTensor("token types: is it the second?", n, n, 0, "a byte a position" if n else ""),
                self.mask("dropout mask after the embedding", self.outside, self.c.hidden_dropout)]

    def head(self) -> list[SavedTensor]:
        """List the tensors of the final layer norm, logits and loss, and of a BERT's other heads."""
        return [*self.norm("final norm"), *(self.transform() if not self.c.causal and "lm" in self.c.heads else []),
                *(self.predicted_tokens() if "lm" in self.c.heads else []), *self.pooled()]

    def predicted_tokens(self) -> list[SavedTensor]:
        logits = 4 * self.b * self.own * self.c.vocab_size / self.parallel.tensor_model_parallel_size
        loss = self.precision.compute if self.c.fp16_lm_cross_entropy else self.precision.main
        return [self.region_input("input of the logits"),
                self.array("logits" if self.precision.half else "exponentials of the logits", self.logits, logits,
                           "padding included"),
                self.array("largest logit and sum of each position", 2 * self.tokens, 0,
                           "too small for the formula", loss),
                self.ids("targets")]

    def transform(self) -> list[SavedTensor]:
        """List the tensors of BERT's layer before the logits."""
        return [self.array("input of the layer before the logits", self.outside, 2 * self.outside),
                *self.activation_of(self.outside), *self.norm("norm before the logits")]

    def pooled(self) -> list[SavedTensor]:
        """List the tensors of the heads that read one position: a vector before and after the pooler; and
        probabilities.
        """
        if not (columns := pooled_columns(self.c)):
            return []
        n = self.sequences * self.c.hidden_size
        return [self.array("first positions, before the pooler and after it", 2 * n, 4 * n),
                self.array("probabilities of the pooled heads", self.sequences * columns, 0,
                           "too small for the formula", self.precision.main)]

    def head_deferred(self) -> list[SavedTensor]:
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

    def ids(self, what: str) -> SavedTensor:
        n = self.sequences * self.own
        return SavedTensor(what, 2 * n, 9 * n, 0, "8 bytes for the row in this rank's shard, 1 for: is it there?")

    # ---- a kind of item ----

    def array(self, what: str, elements: int, paper: float, why: str = "", form: str = "") -> SavedTensor:
        """Make an item in the run's format, or in another. A different format alone explains a difference if `why` is
        empty.
        """
        size = FORMATS[form or self.precision.compute].bytes
        return SavedTensor(what, elements, elements * size, paper,
                           "" if elements * size == paper else why or f"{size} bytes an element, not 2")

    def mask(self, what: str, elements: int, rate: float) -> SavedTensor:
        """Make an item of a byte for each element that dropout may drop, here and in the papers; none without it."""
        found = elements if rate else 0
        return SavedTensor(what, found, found, found, "")

    # ---- all together ----

    @property
    def rope_bytes(self) -> int:
        """Return the bytes of the tables that all layers of a stage share."""
        return self.rotary().bytes if self.c.position_embedding_type == "rope" else 0

    def bytes_of_layers(self, layers: Collection[int]) -> int:
        """Return the bytes that these layers save of their own, if they are not recomputed."""
        experts = sum(map(self.c.has_experts, layers))
        return (len(layers) * (total(self.kept_layer()) - self.rope_bytes)
                + (experts * (total(self.experts()) - total(self.mlp())) if experts else 0))

    def stage(self, layers: Sequence[int]) -> StageBytes:
        """Return the bytes of a stage with these layers."""
        kept, deferred = self.rope_bytes, len(layers) * total(self.layer_deferred())
        if experts := sum(map(self.c.has_experts, layers)):
            deferred += experts * (total(self.experts_deferred()) - total(self.mlp_deferred(self.columns)))
        for group, recompute in self.parallel.recompute.groups(layers):
            kept += self.outside * self.precision.form.bytes if recompute else self.bytes_of_layers(group)
        if 0 in layers:
            kept += total(self.embedding())
        if self.c.num_layers - 1 in layers:
            kept, deferred = kept + total(self.head()), deferred + total(self.head_deferred())
        return StageBytes(kept, deferred)

    def recomputed(self, layers: Sequence[int]) -> int:
        """Return the peak bytes that the backward of these layers recomputes: a whole group's caches."""
        groups = [group for group, recompute in self.parallel.recompute.groups(layers) if recompute]
        return max(map(self.bytes_of_layers, groups)) + self.rope_bytes if groups else 0


def rank_activations(inventory: ActivationInventory, stages: Mapping[int, Sequence[int]],
                     actions: Sequence[Action]) -> tuple[int, int]:
    """Return a rank's peak bytes and its recomputed bytes, for these layers in its stages."""
    kept = {stage: inventory.stage(layers) for stage, layers in stages.items()}
    return peak_activations(kept, actions), max(inventory.recomputed(layers) for layers in stages.values())
