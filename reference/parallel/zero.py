"""ZeRO: data parallelism that shards the model states over the replicas (Rajbhandari et al. 2020, 1910.02054), all in
one process.

Plain data parallelism keeps N = d copies of everything. Each stage of ZeRO divides one more thing into N shards, and
every replica keeps only its own *shard*. For psi parameters with w bytes each, g bytes of gradient and K of Adam's
moments, and m microbatches a step:

    stage  what is sharded   bytes on a rank             elements that a rank sends in a step, over (N - 1)/N
      0    nothing           (w + g + K) psi             2 psi        gradients all-reduced
      1    moments           (w + g) psi + K psi/N       2 psi        gradients reduce-scattered, parameters gathered
      2    and gradients     w psi + (g + K) psi/N       (m + 1) psi  the same, but gradients after every microbatch
      3    and parameters    (w + g + K) psi/N           3 m psi      parameters gathered forward, and again backward

Adam looks at one element at a time, so its work can be sharded anywhere. An all-reduce is a reduce-scatter, then an
all-gather; stage 1 only lets Adam work between the two, on a shard. Stage 3 gathers each unit of the model (a block, a
table) before it is used, and frees it afterwards. (The embedding's backward needs no table, so its psi counts only
twice; a tied table is used once more, for the logits, and counts four times.) A list has one element for each rank.
"""
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from reference.comm.collectives import all_gather, all_reduce, reduce_scatter
from reference.comm.ring import ring_all_gather
from reference.config import check_zero_stage, number_of_microbatches
from reference.errors import UserError
from reference.layer_context import AuxiliaryLosses, LayerContext
from reference.layers.block import block_backward, block_forward
from reference.layers.embedding import Embedding, embedding_backward, embedding_forward
from reference.models.gpt import GPT, gpt_tensors, head_backward, head_forward
from reference.models.stage import stage_rotary
from reference.optimizers.adam import adam_update, clip_coefficient, learning_rate, sum_of_squares
from reference.parallel.data_parallel import samples_of
from reference.parallel.layout import Layout
from reference.parallel.model_states import ModelStates
from reference.params import assign, initialize_shard, tree_map
from reference.random.dropout import Dropout


class ZeroRank(NamedTuple):
    """The state of a replica from step to step: flat buffers, whole [size] or only its shard of them [size/d]."""

    params: Any    # a shard in stage 3
    grads: Any     # a shard in stages 2 and 3
    m: Any         # a shard in stages 1, 2 and 3
    v: Any
    part: int      # the index of its part of every bucket; in stage 0 the one part is everyone's


class ZeroTrainer:
    """The Trainer of reference/training/trainer.py, on d replicas."""

    def __init__(self, model, optimizer, seed, dtype, d, stage, bucket_size=1 << 20):
        """Initialize all replicas from a ModelConfig and an OptimizerConfig. In stage 3 every unit is a bucket.

        Raises UserError for a block that all layers share, and for Muon.
        """
        check_zero_stage(stage)
        if optimizer.muon:
            raise UserError("This trainer shards the work of Adam, element by element, but Muon needs whole matrices: "
                            "their owners are those of reference/parallel/layout.py. Choose adam.")
        if model.share_layers:
            raise UserError("This trainer gathers and reduces the gradients of each block once, but with share_layers "
                            "one block has those of all layers. Leave share_layers out.")
        self.model, self.optimizer, self.seed, self.d, self.stage = model, optimizer, seed, d, stage
        self.iteration = self.reduced = self.gathered = 0    # steps; elements of a step's reduce-scatters, all-gathers
        self.tensors = gpt_tensors(model)
        self.layout = layout = Layout(self.tensors, 1, 1 if stage == 3 else bucket_size, d if stage else 1)
        self.table = "output" if model.untie_embeddings_and_output_weights else "embedding.word"   # gives the logits
        initial = np.zeros(layout.size, dtype)
        tree_map(assign, layout.views(initial), initialize_shard(self.tensors, seed, dtype, t=1, rank=0))
        self.start(initial)

    def start(self, initial):
        """Give every rank its state before the first step, from the whole flat parameters."""
        layout, self.ranks = self.layout, []
        shard = np.zeros_like(initial, shape=layout.shard_size)
        for part in [i % layout.parts for i in range(self.d)]:
            own = np.concatenate([initial[layout.owned_piece(bucket, part).in_buffer] for bucket in layout.buckets])
            self.ranks.append(ZeroRank(own if self.stage >= 3 else initial.copy(),
                                       np.zeros_like(shard if self.stage >= 2 else initial),
                                       np.zeros_like(shard), np.zeros_like(shard), part))

    def step(self, tokens, targets, b):
        """Do one step on tokens, targets [B, s], in microbatches of b; return loss and norm before clipping."""
        self.iteration, loss = self.iteration + 1, 0.0
        self.reduced = self.gathered = 0
        self.auxiliary = AuxiliaryLosses(len(tokens), tokens.size)
        for rank in self.ranks:
            rank.grads[...] = 0
        for k in range(number_of_microbatches(len(tokens), b, self.d)):
            mine = [samples_of(i, k, self.d, b) for i in range(self.d)]
            dropouts = [Dropout(self.model, self.seed, self.iteration, samples.start) for samples in mine]
            losses, *caches = self.forward([tokens[i] for i in mine], [targets[i] for i in mine], dropouts)
            dlosses = [np.full_like(x, 1 / tokens.size) for x in losses]                  # 1 / (B s), not 1 / (b s)
            loss += all_reduce([(x * dloss).sum() for x, dloss in zip(losses, dlosses)])[0]
            self.keep(self.backward(dlosses, *caches))
        if self.stage < 2:
            self.reduce()
        norm = self.update()
        if self.stage in (1, 2):
            self.publish()
        return loss, norm

    # ---- a microbatch: the ranks side by side, unit by unit ---------------------------------------------------------

    def forward(self, tokens, targets, dropouts):
        """Map each rank's tokens, targets [b, s] and Dropout to its loss [b, s] and the caches, a list for each unit.
        """
        c, blocks = self.model, {}
        contexts = [LayerContext(dropout, auxiliary=self.auxiliary) for dropout in dropouts]
        xs, embedding = each(embedding_forward, tokens, map(Embedding, self.whole("embedding.word"),
                                                            self.whole("embedding.position")), contexts)
        rotary = stage_rotary(xs[0], c, [slice(0, tokens[0].shape[1])])
        contexts = [context._replace(rotary=rotary) for context in contexts]
        for layer in self.tensors.blocks:
            xs, blocks[layer] = each(lambda x, p, context: block_forward(x, p, c, context),
                                     xs, self.whole(f"blocks.{layer}"), [context.at(layer) for context in contexts])
        losses, head = each(lambda x, p, ids: head_forward(x, p, c, ids), xs, self.whole_head(), targets)
        return losses, embedding, blocks, head

    def backward(self, dlosses, embedding, blocks, head):
        """Yield each unit's name and each rank's gradients, in the order of the buckets, for each rank's dloss."""
        dxs, norms, tables = each(head_backward, dlosses, self.whole_head(), head)
        if self.table == "output":
            yield "output", tables
        yield "final_layernorm", norms
        for layer in reversed(self.tensors.blocks):
            dxs, grads = each(lambda dx, p, cache: block_backward(dx, p, cache, self.model),
                              dxs, self.whole(f"blocks.{layer}"), blocks[layer])
            yield f"blocks.{layer}", grads
        # A lookup's gradient needs no table, only its shape: nothing is gathered.
        blank = tree_map(lambda tensor: np.empty_like(dxs[0], shape=tensor.local_shape(1)), self.tensors.embedding)
        grads = [embedding_backward(dx, blank, cache) for dx, cache in zip(dxs, embedding)]
        if blank.position is not None:
            yield "embedding.position", [grad.position for grad in grads]
        words = [grad.word for grad in grads]
        yield "embedding.word", words if self.table == "output" else [x + y for x, y in zip(words, tables)]

    def whole(self, unit):
        """Return each rank's parameters of a unit. Stage 3 gathers them, and frees them after use."""
        if unit not in self.layout.bucket_of:
            return [None] * self.d                          # rope has no table of positions
        bucket = self.layout.bucket_of[unit]
        if self.stage < 3:
            flats = [rank.params[bucket.slice] for rank in self.ranks]
        else:
            flats = self.all_gather([rank.params[self.layout.owned_piece(bucket, rank.part).in_shard]
                                     for rank in self.ranks])
        return [self.layout.unit_views(unit, flat) for flat in flats]

    def whole_head(self):
        """Return each rank's parameters that head_forward and head_backward read."""
        return [GPT(Embedding(table, None), {}, norm, None)
                for norm, table in zip(self.whole("final_layernorm"), self.whole(self.table))]

    def keep(self, gradients):
        """Add up a microbatch's gradients. Stages 2 and 3 hold only one bucket whole (and a tied table)."""
        for bucket in self.layout.buckets:
            flats = [np.zeros_like(rank.grads, shape=bucket.size) for rank in self.ranks]
            for unit, trees in islice(gradients, len(bucket.units)):
                for flat, tree in zip(flats, trees):
                    tree_map(assign, self.layout.unit_views(unit, flat), tree)
            at = bucket.slice
            if self.stage >= 2:
                at, flats = self.layout.owned_piece(bucket, 0).in_shard, self.reduce_scatter(flats)
            for rank, flat in zip(self.ranks, flats):
                rank.grads[at] += flat

    # ---- once a step ------------------------------------------------------------------------------------------------

    def reduce(self):
        """Sum the ranks' whole gradients, bucket by bucket: on every rank (stage 0), or on the owner."""
        for bucket in self.layout.buckets:
            flats = [rank.grads[bucket.slice] for rank in self.ranks]
            sums = self.reduce_scatter(flats) if self.stage else self.all_reduce(flats)
            for rank, total in zip(self.ranks, sums):
                rank.grads[self.layout.owned_piece(bucket, rank.part).in_buffer] = total

    def update(self):
        """Run Adam on every rank's own elements; return the global norm before clipping, over all ranks' squares."""
        squares = [sum(sum_of_squares(grad) for _, grad, _, _, _ in self.owned(rank)) for rank in self.ranks]
        norm = np.sqrt(all_reduce(squares)[0] if self.stage else squares[0])       # without ZeRO each has all squares
        clip, lr = clip_coefficient(norm, self.optimizer.clip_grad), learning_rate(self.optimizer, self.iteration)
        for rank in self.ranks:
            for param, grad, m, v, decay in self.owned(rank):
                adam_update(param, clip * grad, m, v, self.iteration, lr, decay, self.optimizer)
        return norm

    def owned(self, rank):
        """Yield, for each tensor, the rank's views of parameters, gradients and moments, and whether it decays."""
        for segment, whole, own in self.layout.pieces(rank.part):
            yield (rank.params[own if self.stage >= 3 else whole], rank.grads[own if self.stage >= 2 else whole],
                   rank.m[own], rank.v[own], segment.tensor.decay)

    def publish(self):
        """Gather the updated parameters from their owners on every rank."""
        for bucket in self.layout.buckets:
            moved = [rank.params[self.layout.owned_piece(bucket, rank.part).in_buffer] for rank in self.ranks]
            for rank, flat in zip(self.ranks, self.all_gather(moved)):
                rank.params[bucket.slice] = flat

    # ---- what it costs ----------------------------------------------------------------------------------------------

    def bytes_held(self):
        """Return each rank's bytes from step to step, padding included."""
        return [ModelStates(r.params.nbytes, r.grads.nbytes, r.m.nbytes + r.v.nbytes) for r in self.ranks]

    def elements_sent(self):
        """Return the elements that each rank sent in the last step, in rings, without the scalars for loss and norm."""
        return ring_all_gather(self.reduced + self.gathered, self.d)

    def reduce_scatter(self, flats):
        self.reduced += len(flats[0])
        return reduce_scatter(flats, axis=0)

    def all_gather(self, shards):
        self.gathered += sum(map(len, shards))
        return all_gather(shards, axis=0)

    def all_reduce(self, flats):
        self.reduced += len(flats[0])
        self.gathered += len(flats[0])
        return all_reduce(flats)


def each(function, *lists):
    """Call function(rank i's elements) for every rank i; return a list of all first results, of all second ones, ..."""
    return [list(results) for results in zip(*map(function, *lists))]
