"""ZeRO on ranks: which rank owns what, what is materialized and for how long; offloading changes nothing.

That every stage trains as one process does is the main theorem's business (test_training.py).
"""
import gc
import re
import weakref
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import mpi_impl
from mpi_impl.models import stage
from mpi_impl.parallel import passes
from mpi_impl.parallel.buffers import Shard, Whole
from mpi_impl.parallel.model_state import ModelState
from mpi_impl.parallel.zero import GatheredUnit, Parameters, ShardedGradients, ShardedParameters
from mpi_impl.training.trainer import Trainer
from reference.batches import GPTBatch
from reference.config import ARCHITECTURES, POSITION_EMBEDDINGS, ModelConfig
from reference.errors import UserError
from reference.optimizer import OptimizerConfig, sum_of_squares
from reference.parallel.layout import Layout
from reference.params import Tensor, leaves, tree_map
from reference.precision import Precision
from reference.training import trainer as training
from tests.deep import every_other_deep, one_fast_of
from tests.strategies import Case, recomputes
from tests.training_theorems import Plan, connected, dealt, training_equals_one_process

MAPS, MACHINE = Path("/proc/self/maps"), Path(mpi_impl.__file__).parent
OPTIMIZER = OptimizerConfig(1e-2, 10, clip_grad=0.05)
SCHEDULES = st.sampled_from([(1, "1f1b", None), (1, "zb-h1", None), (1, "interleaved", 2), (2, "1f1b", None),
                             (2, "zb-h2", None), (2, "zb-v", None)])


def model(layers=5, untied=False, **choices):
    return ModelConfig(layers, 8, 2, 11, 6, make_vocab_size_divisible_by=3, untie_embeddings_and_output_weights=untied,
                       **choices)


MODELS = st.sampled_from([*(model(untied=untied, position_embedding_type=position) for untied in (False, True)
                            for position in POSITION_EMBEDDINGS),
                          *(model(architecture="bert", heads=heads) for heads in ARCHITECTURES["bert"])])


def trainer_on(topology, case, offload_folder=None):
    return Trainer(ModelState(case.model, topology, case.seed, Precision("float64"), offload_folder=offload_folder),
                   OPTIMIZER)


def batch_of(trainer, case, m, step=0):
    """Return this replica's m microbatches, and the size of the global batch."""
    n = m * trainer.topology.data.size * case.b
    return dealt(trainer, case.b, case.batch(str(step), n)), n


# ---- the stages -----------------------------------------------------------------------------------------------------

REPORTS = re.compile(  # and options
    "(demos|dry_runs|experiments|notebook|planning|programs|proof|reports)/|plan.py|recording/completeness.py")


def test_the_stage_is_chosen_in_one_place():
    """Whatever trains asks the stage's object, and not which stage it is."""
    asking = {str(path.relative_to(MACHINE)) for path in MACHINE.rglob("*.py") if "zero_stage" in path.read_text()}
    assert {path for path in asking if not REPORTS.match(path)} == {"parallel/model_state.py"}
    assert (MACHINE / "parallel/model_state.py").read_text().count("zero_stage") == 1


# ---- stage 3: what is whole -----------------------------------------------------------------------------------------


@settings(max_examples=settings().max_examples // 5)
@given(SCHEDULES, recomputes(), st.integers(1, 2), MODELS)
def test_units_are_whole_while_they_are_used(ranks, pipeline, recompute, t, model):
    """And no longer, in any schedule, whatever is computed again."""
    p, schedule, v = pipeline
    case = Case(t, model, 1, 4, seed=3, sequence_parallel=t > 1)
    ranks.run(2 * t * p, units_come_and_go, case, 2 * p, Plan(p, schedule, v, zero_stage=3, recompute=recompute))


def units_come_and_go(group, case, m, plan):
    """Check which units are gathered, and when they are freed, in a step and then in an evaluation.

    Only the units that count as whole are in memory: at most two, or the tables of the embedding. While a block
    computes, the next one is prefetched. Each unit is gathered for its forward and for its backward. A recomputed group
    of several layers is gathered once more, all but its last layer. The tables are gathered once, since the backward of
    a lookup needs none.
    """
    with connected(group, plan.parallel(group.size, case)) as topology, Observed() as observed:
        trainer = trainer_on(topology, case)
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


# ---- stages 2 and 3: gradients --------------------------------------------------------------------------------------


@settings(max_examples=settings().max_examples // 5)
@given(SCHEDULES, st.sampled_from([2, 3]), MODELS, st.sampled_from([1, 1000]))
def test_whole_gradients_are_gone_once_they_are_sent(ranks, pipeline, stage, model, bucket_size):
    p, schedule, v = pipeline
    ranks.run(2 * p, no_gradient_outlives_its_use, Case(1, model, 1, 4, seed=3), 2 * p,
              Plan(p, schedule, v, bucket_size=bucket_size, zero_stage=stage))


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

    with connected(group, plan.parallel(group.size, case)) as topology:
        trainer = trainer_on(topology, case)
        with mock.patch.object(ShardedGradients, "count_bytes", watched):
            trainer.step(*batch_of(trainer, case, m))
        assert buffers and not any(ref() is not None for ref in buffers.values())
        assert not trainer.state.gradients.whole


# ---- who owns what --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage, offload", [(0, False), *product([1, 2, 3], [False, True])])
@pytest.mark.parametrize("d", [1, 3, 4])
def test_each_rank_owns_its_part(ranks, stage, offload, d):
    """1/N of what its stage cuts, padding included; the parts together are every element of every tensor once."""
    found = ranks.run(d, what_it_owns, Case(1, model(), 1, 4, seed=1), Plan(zero_stage=stage, cpu_offload=offload))
    size = found[0][1]
    owned = np.concatenate([np.concatenate([np.arange(piece.in_buffer.start, piece.in_buffer.stop) for piece in pieces])
                            for pieces, _, _, _ in (found if stage else found[:1])])
    assert len(np.unique(owned)) == len(owned) == sum(
        segment.slice.stop - segment.slice.start for segment in found[0][3])
    for _, _, held, _ in found:
        parameters, gradients, moments = (8 * size // (d if stage >= least else 1) for least in (3, 2, 1))
        offloaded = (parameters if stage == 3 else 0) + 2 * moments if offload else 0
        resident = 0 if offload and stage == 3 else parameters
        assert held[:4] == (resident, gradients, 0 if offload else 2 * moments, offloaded)


def what_it_owns(group, case, plan):
    with connected(group, plan.parallel(group.size, case)) as topology:
        trainer = trainer_on(topology, case)
        return [piece._replace(of=None) for piece in trainer.state.pieces], trainer.state.layout.size, trainer.held(), (
            [segment._replace(tensor=None) for segment in trainer.state.layout.segments])


@pytest.mark.parametrize("t, p, d, stage", every_other_deep(
    (*place, stage) for place in [(1, 1, 5), (2, 1, 3), (1, 2, 3)] for stage in (0, 1, 2)))
def test_replicas_hold_the_same_bits(ranks, stage, t, p, d):
    """After every step: each moved its own part, and got the others' as they are."""
    case = Case(t, model(), 1, 4, seed=2)
    for step in zip(*ranks.run(t * p * d, parameters_of_steps, case, Plan(p, zero_stage=stage, bucket_size=100))):
        by_place: dict = {}
        for place, flat in step:
            assert (by_place.setdefault(place, flat) == flat).all()
        assert len(by_place) == t * p


def parameters_of_steps(group, case, plan):
    """Return, after each of two steps, this rank's place in its replica and its whole parameters."""
    with connected(group, plan.parallel(group.size, case)) as topology:
        trainer, found = trainer_on(topology, case), []
        for step in range(2):
            trainer.step(*batch_of(trainer, case, 2, step))
            found.append((topology.place._replace(data=0), trainer.state.parameters.own.flat.copy()))
        return found


# ---- offloading -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("t, p, d, stage", every_other_deep(
    (*place, stage) for place in [(1, 1, 3), (2, 1, 2), (1, 2, 2)] for stage in (1, 2, 3)))
def test_offloading_changes_nothing(ranks, tmp_path, stage, t, p, d):
    """In a host buffer or in a file: losses, norms, weights and moments to the bit, and no name in the folder."""
    case = Case(t, model(), 1, 4, seed=4)
    resident, in_host_memory, in_files = (
        ranks.run(t * p * d, two_steps, case, Plan(p, zero_stage=stage, cpu_offload=offload), folder)
        for offload, folder in ((False, None), (True, None), (True, str(tmp_path))))
    for mine, other, third in zip(resident, in_host_memory, in_files):
        assert mine.keys() == other.keys() == third.keys()
        for name, value in mine.items():
            assert np.array_equal(value, other[name]) and np.array_equal(value, third[name]), name
    assert not list(tmp_path.iterdir())


def two_steps(group, case, plan, folder):
    """Return the results of two steps, and the states after them."""
    with connected(group, plan.parallel(group.size, case)) as topology:
        trainer, found = trainer_on(topology, case, folder), {}
        for step in range(2):
            losses, *result, auxiliary = trainer.step(*batch_of(trainer, case, 2, step))
            found[f"result {step}"] = np.array([*losses, *result, *auxiliary])
        found["loss"] = np.array(trainer.evaluate(*batch_of(trainer, case, 1)))
        states = trainer.state.optimizer_states
        return found | {name: trainer.state.whole(buffer).copy() for name, buffer in states.items()}


@pytest.mark.skipif(not MAPS.exists(), reason="this system does not say what is mapped")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_no_file_outlives_its_rank(ranks, tmp_path, stage):
    """Nor its trainer: what was mapped is given back."""
    for names, left in ranks.run(2, files_of, Case(1, model(), 1, 4, seed=4),
                                 Plan(zero_stage=stage, cpu_offload=True), str(tmp_path)):
        assert names == [] and left == 0


def files_of(group, case, plan, folder):
    """Return the names in the folder while the trainer lives, and the number of mappings into it after the trainer is
    gone.
    """
    with connected(group, plan.parallel(group.size, case)) as topology:
        trainer = trainer_on(topology, case, folder)
        trainer.step(*batch_of(trainer, case, 1))
        names = [path.name for path in Path(folder).iterdir()]
        assert folder in MAPS.read_text()
    del trainer
    gc.collect()
    return names, MAPS.read_text().count(folder)


def test_a_folder_that_takes_no_file_is_a_sentence(ranks, tmp_path):
    """Before anything is trained."""
    for error in ranks.run(2, error_of_a_trainer, str(tmp_path / "nowhere")):
        assert "nowhere cannot be written: No such file or directory" in error


def error_of_a_trainer(group, folder):
    case = Case(1, model(), 1, 4, seed=4)
    with connected(group, Plan(zero_stage=1, cpu_offload=True).parallel(group.size, case)) as topology:
        try:
            trainer_on(topology, case, folder)
        except UserError as error:
            return str(error)
    return "no error"


# ---- the norm -------------------------------------------------------------------------------------------------------

# Three words and many layers: norms and biases, which every rank has, outweigh the tables. Counted once for each rank
# they would add two thirds to the squares.
REPLICATED = Case(2, ModelConfig(4, 8, 2, 3, 6, init_method_std=0.1, make_vocab_size_divisible_by=3), 2, 4, seed=6)


def test_replicated_tensors_dominate():
    """The check of the next theorem's case."""
    textbook = training.Trainer(REPLICATED.model, OPTIMIZER, REPLICATED.seed, Precision("float64"))
    _, norm, clipped = textbook.step(GPTBatch(*(REPLICATED.ids(f"{what} 0", 8, 4) for what in ("tokens", "targets"))))
    squares = tree_map(lambda grad: sum_of_squares(grad), clipped)
    replicated = sum(square for (_, tensor), (_, square) in zip(leaves(textbook.tensors), leaves(squares))
                     if tensor.split is None)
    assert norm > 1 and replicated > 0.6 * sum(square for _, square in leaves(squares))


@pytest.mark.parametrize("p, cut, stage", one_fast_of(3, (
    (p, cut, stage) for p in (1, 2) for cut in (False, True) for stage in ((0, 1, 2, 3) if cut else (1, 0, 3, 2)))))
def test_the_norm_counts_what_is_replicated_once(ranks, stage, p, cut):
    """With clipping at work, where it matters most, whoever owns which part of what is on every rank."""
    case = replace(REPLICATED, sequence_parallel=cut)
    ranks.run(4 * p, training_equals_one_process, case, 2, 2, 0.05, Plan(p, zero_stage=stage, bucket_size=100))


# ---- what is under way, and what is whole, at most ------------------------------------------------------------------


class Replica:
    """The first of two replicas, whose gathering is under way until it is waited for."""

    rank = 0

    def __init__(self):
        self.under_way = self.most = 0

    def post_all_gather(self, x, out, reason):
        assert out.size == 2 * x.size
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        return self

    def wait(self):
        self.under_way -= 1


SIZES = {"first": 12, "second": 40, "third": 20, "fourth": 8}


def layout_of_units() -> Layout:
    return Layout({name: Tensor((size,)) for name, size in SIZES.items()}, bucket_size=1, parts=2)


def test_two_buckets_of_parameters_are_under_way_at_a_time():
    """While one is sent the next is copied; and at last none is left."""
    group, layout = Replica(), layout_of_units()
    Parameters(layout, group, Whole(np.zeros(layout.size))).gather_updated()
    assert group.most == 2 and group.under_way == 0


def test_of_units_that_are_whole_at_the_same_time_the_most_bytes_are_told():
    """Whatever comes later is less."""
    layout = layout_of_units()
    parameters = ShardedParameters(layout, Replica(), Shard(np.zeros(layout.shard_size)), np.empty(0, np.float32))
    units, found = {name: GatheredUnit(name, parameters) for name in SIZES}, []
    for step in ("+first", "+second", "-second", "+third", "-first", "+fourth", "-third"):
        unit = units[step[1:]]
        unit.prefetch() if step[0] == "+" else unit.release()
        found.append(parameters.whole_bytes // 4)
    assert found == [12, 12 + 40, *[12 + 40] * 5]
