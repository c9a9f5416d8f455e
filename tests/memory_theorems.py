"""Theorems about memory and time on real ranks: what is materialized for how long, and what overlaps with computing."""
import weakref
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from unittest import mock

import numpy as np

from mpi_impl.models import gpt, stage
from mpi_impl.models.units import Unit
from mpi_impl.parallel import passes, sinks
from mpi_impl.parallel.zero import ShardedGradients, ShardedParameters
from reference.layer_context import LayerContext
from reference.models.gpt import gpt_tensors
from reference.parallel.layout import map_units
from reference.params import leaves
from tests.rank_theorems import Share
from tests.reference.test_recompute import arrays_in
from tests.training_theorems import batch_of, trainer_on

# ---- ZeRO-3: whole parameters ---------------------------------------------------------------------------------------


def units_come_and_go(group, case, m, plan):
    """Check which units are gathered, and when they are freed, in a step and then in an evaluation.

    Only the units that count as whole are in memory: at most two, or the tables of the embedding. While a block
    computes, the next one is prefetched. Each unit is gathered for its forward and for its backward. A recomputed group
    of several layers is gathered once more, all but its last layer. The tables are gathered once, since the backward of
    a lookup needs none.
    """
    with trainer_on(group, case, plan) as trainer, Observed() as observed:
        parameters = trainer.state.parameters
        trainer.step(*batch_of(trainer, case, m))
        assert observed.gathers == {unit: m * times for unit, times in expected_gathers(trainer, plan).items()}
        assert not parameters.whole and not observed.alive()
        trainer.evaluate(*batch_of(trainer, case, m))
        assert not parameters.whole and not observed.alive()
        assert all(works_ahead(call) for call in observed.calls), observed.calls


def works_ahead(call):
    """Report whether, in one forward or backward of a stage, each block's unit and the next block's are whole when the
    block computes.
    """
    return all(whole == {block, next((other for other, _ in call[i:] if other != block), block)}
               for i, (block, whole) in enumerate(call))


def expected_gathers(trainer, plan):
    """Count how many times each of a rank's units must be gathered for a microbatch."""
    times: Counter = Counter()
    for units in trainer.state.stage_params.values():
        for layers, again in plan.recompute.groups(units.blocks):
            times.update({f"blocks.{layer}": 3 if again and layer != layers[-1] else 2 for layer in layers})
        if 0 in units.blocks:
            times.update([unit.name for _, unit in leaves(units.embedding)])
        if trainer.state.model.num_layers - 1 in units.blocks:
            of_heads = [unit.name for _, unit in leaves(replace(units, embedding=None, blocks={}))]
            times.update(dict.fromkeys([*of_heads, *["embedding.word"] * trainer.state.model.tied], 2))
    return times


class Observed:
    """Watches what is gathered, and the work of the blocks, for as long as the `with` block lasts."""

    def __enter__(self):
        self.gathers: Counter = Counter()      # by unit
        self.buffers: list = []                # weak references to all that was ever gathered, and their units
        self.calls: list[list] = []            # of a stage: at each block's work, its unit and all that are whole
        self.patches = ExitStack()
        for module, name, watched in ((ShardedParameters, "gather", self.gather), (passes, "model_forward", self.call),
                                      (passes, "model_backward", self.call), (stage, "block_forward", self.work),
                                      (stage, "block_backward", self.work)):
            self.patches.enter_context(mock.patch.object(module, name, watched(getattr(module, name))))
        return self

    def __exit__(self, *_):
        self.patches.close()

    def alive(self):
        """Return the names of the units that are still in memory."""
        return {unit for unit, buffer in self.buffers if buffer() is not None}

    def gather(self, gather):
        def watched(parameters, unit):
            pending = gather(parameters, unit)
            self.gathers[unit] += 1
            self.buffers += [(unit, weakref.ref(one.x)) for one in pending]
            self.parameters = parameters
            assert self.alive() == parameters.whole
            assert len(parameters.whole) <= 2 or all(name.startswith("embedding.") for name in parameters.whole)
            return pending
        return watched

    def call(self, function):
        def watched(*args):
            self.calls.append([])
            return function(*args)
        return watched

    def work(self, function):
        def watched(x, block, *args):
            own = next(unit for unit, buffer in self.buffers if buffer() is not None and any(
                np.shares_memory(buffer(), view) for _, view in leaves(block)))
            self.calls[-1].append((own, set(self.parameters.whole)))
            return function(x, block, *args)
        return watched


# ---- ZeRO-2 and 3: whole gradients ----------------------------------------------------------------------------------


def no_gradient_outlives_its_use(group, case, m, plan):
    """Check, whenever bytes are counted and after the step, that only the buckets are in memory to which a backward
    still adds, or which are under way: as many bytes as are counted.
    """
    buffers: dict[int, weakref.ref] = {}

    def watched(gradients, count_bytes=ShardedGradients.count_bytes):
        flats = [*gradients.whole.values(), *(reduction.flat for reduction in gradients.begun)]
        buffers.update((id(flat), weakref.ref(flat)) for flat in flats)
        alive = [ref() for ref in buffers.values() if ref() is not None]
        assert len(alive) == len(flats)
        gradients.whole_bytes = 0
        count_bytes(gradients)
        assert gradients.whole_bytes == sum(flat.nbytes for flat in alive) + sum(
            one.flat.nbytes // one.bucket.parts for one in gradients.begun)

    with trainer_on(group, case, plan) as trainer:
        with mock.patch.object(ShardedGradients, "count_bytes", watched):
            trainer.step(*batch_of(trainer, case, m))
        assert buffers and not any(ref() is not None for ref in buffers.values())
        assert not trainer.state.gradients.whole


# ---- the reduction over replicas ------------------------------------------------------------------------------------


def sums_overlap_with_computing(group, case, m, plan):
    """Check that this rank begins sums before it has computed everything, goes on before it waits for them, and helps
    them on meanwhile, after the gradient of each matrix.
    """
    events = order_of_a_step(group, case, m, plan)
    begun, last = [i for i, event in enumerate(events) if event == "sum"], rindex(events, "gradient")
    assert begun[0] < last, "it waited until everything was done"
    assert all({"layer", "gradient", "sum"} & set(events[i + 1:events.index(f"wait {n}")])
               for n, i in enumerate(begun) if i < last), "it waited immediately"
    assert all(after == "help" for event, after in pairwise(events) if event == "gradient"), "it did not help"


def rindex(events, event):
    """Return where the last such event is."""
    return len(events) - 1 - events[::-1].index(event)


def order_of_a_step(group, case, m, plan):
    """Return the order of this rank's events in a step: forwards and backwards of layers, weight gradients, and sums
    over replicas as they are posted, and waited for.
    """
    events = []

    def recorded(event, function):
        def call(*args):
            found = function(*args)
            events.append(event)
            return found
        return call

    def posted(post):
        def call(*args):
            found, number = post(*args), events.count("sum")
            found.wait = recorded(f"wait {number}", found.wait)
            events.append("sum")
            return found
        return call

    with trainer_on(group, case, plan) as trainer:
        data, tensor = trainer.topology.data, trainer.topology.tensor
        with (mock.patch.object(data, "post_all_reduce", posted(data.post_all_reduce)),
              mock.patch.object(data, "post_reduce_scatter", posted(data.post_reduce_scatter)),
              mock.patch.object(stage, "block_forward", recorded("layer", stage.block_forward)),
              mock.patch.object(stage, "block_backward", recorded("layer", stage.block_backward)),
              mock.patch.object(sinks, "accumulate", recorded("gradient", sinks.accumulate)),
              mock.patch.object(tensor, "progress", recorded("help", tensor.progress))):
            trainer.step(*batch_of(trainer, case, m))
    return events


# ---- recompute ------------------------------------------------------------------------------------------------------


def only_inputs_are_kept(group, case, recompute):
    """Check that a recomputed group of layers keeps only its input x [b, s, h], and a layer with selective recompute
    nothing of size s^2.

    Everything else must be freed as soon as the group's forward is over.
    """
    c, share = case.model, Share(group, gpt_tensors(case.model), case.params(gpt_tensors(case.model)), case)
    tokens = case.ids("tokens", case.b, case.s)
    made: dict[int, list] = {}
    groups = recompute.groups(range(c.num_layers))

    def watched(x, block, c, region, context, block_forward=stage.block_forward):
        over = [layer for layers, again in groups for layer in layers if again and layers[-1] < context.dropout.layer]
        assert not any(ref() is not None for layer in over for ref in made[layer])
        y, cache = block_forward(x, block, c, region, context)
        made[context.dropout.layer] = [weakref.ref(array) for array in arrays_in(cache)]
        return y, cache

    with mock.patch.object(stage, "block_forward", watched):
        _, cache = gpt.gpt_forward(tokens, map_units(Unit, share.p), c, tokens, share.region,
                                   LayerContext(case.dropout, recompute))
    for kept, (layers, again) in zip(cache.layers, groups, strict=True):
        assert kept.layers == layers
        squares = [array for array in arrays_in(kept) if array.shape[-2:] == (case.s, case.s)]
        assert bool(squares) == (recompute.granularity == "none" or recompute.granularity == "full" and not again)
        if again:
            whole = case.s // (group.size if case.sequence_parallel else 1)
            assert kept.caches is None
            assert {array.size for array in arrays_in(kept)} == {case.b * whole * c.hidden_size}
