"""ZeRO on ranks: what is materialized and for how long, buffers, tiles and files; offloading changes nothing.

That every stage trains as one process does, and which bytes it holds, are other theorems (test_training.py,
test_memory.py).
"""
import gc
import os
from contextlib import suppress
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from mpi_impl.parallel import tiles as tiles_module
from mpi_impl.parallel.buffers import OffloadedShard, Whole
from mpi_impl.parallel.zero import Parameters
from reference.config import ARCHITECTURES, POSITION_EMBEDDINGS, ModelConfig
from reference.optimizers.adam import OptimizerConfig
from reference.parallel.layout import Layout, Piece
from reference.params import Tensor
from tests.cases import Case
from tests.deep import one_fast_of
from tests.memory_theorems import no_gradient_outlives_its_use, units_come_and_go
from tests.strategies import recomputes
from tests.training_theorems import FLOAT64, Plan, batch_of, trainer_on, training_equals_one_process

MAPS = Path("/proc/self/maps")
OPTIMIZER = OptimizerConfig(1e-2, 10, clip_grad=0.05)
SCHEDULES = st.sampled_from([(1, "1f1b", None), (1, "zb-h1", None), (1, "interleaved", 2), (2, "1f1b", None),
                             (2, "zb-h2", None), (2, "zb-v", None)])


def model(layers=5, untied=False, **choices):
    return ModelConfig(layers, 8, 2, 11, 6, make_vocab_size_divisible_by=3, untie_embeddings_and_output_weights=untied,
                       **choices)


SMALL = Case(1, model(), 1, 4, seed=4)
MODELS = st.sampled_from([*(model(untied=untied, position_embedding_type=position) for untied in (False, True)
                            for position in POSITION_EMBEDDINGS),
                          *(model(architecture="bert", heads=heads) for heads in ARCHITECTURES["bert"])])


# ---- what is whole, and for how long --------------------------------------------------------------------------------


@settings(max_examples=settings().max_examples // 5)
@given(SCHEDULES, recomputes(), st.integers(1, 2), MODELS)
def test_units_are_whole_while_they_are_used(ranks, pipeline, recompute, t, model):
    """And no longer, in any schedule, whatever is computed again."""
    p, schedule, v = pipeline
    case = Case(t, model, 1, 4, seed=3, sequence_parallel=t > 1)
    ranks.run(2 * t * p, units_come_and_go, case, 2 * p, Plan(p, schedule, v, zero_stage=3, recompute=recompute))


@settings(max_examples=settings().max_examples // 5)
@given(SCHEDULES, st.sampled_from([2, 3]), MODELS, st.sampled_from([1, 1000]))
def test_whole_gradients_are_gone_once_they_are_sent(ranks, pipeline, stage, model, bucket_size):
    p, schedule, v = pipeline
    ranks.run(2 * p, no_gradient_outlives_its_use, Case(1, model, 1, 4, seed=3), 2 * p,
              Plan(p, schedule, v, bucket_size=bucket_size, zero_stage=stage))


class Replica:
    """The first of two replicas, whose gathering is in flight until it is waited for."""

    rank = in_flight = most = 0

    def post_all_gather(self, x, out, reason, sizes):
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        return self

    def wait(self):
        self.in_flight -= 1


def test_two_buckets_of_parameters_are_in_flight_at_a_time():
    """While one is sent the next is copied; and at last none is left."""
    layout = Layout({f"unit {size}": Tensor((size,)) for size in (12, 40, 20, 8)}, bucket_size=1, parts=2)
    group = Replica()
    Parameters(layout, group, Whole(np.zeros(layout.size))).gather_updated()
    assert group.most == 2 and group.in_flight == 0


# ---- replicas and offloading, to the bit ----------------------------------------------------------------------------


@pytest.mark.parametrize("t, p, d, stage", one_fast_of(3, [(2, 1, 3, 1), (1, 2, 3, 0), (1, 1, 5, 2)]))
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
    found = []
    with trainer_on(group, case, plan, FLOAT64, OPTIMIZER) as trainer:
        for step in range(2):
            trainer.step(*batch_of(trainer, case, 2, step))
            found.append((trainer.topology.place._replace(data=0), trainer.state.parameters.own.flat.copy()))
    return found


@pytest.mark.skipif(not MAPS.exists(), reason="this system does not say what is open and mapped")
def test_no_file_outlives_its_rank(ranks, tmp_path):
    """Nor its trainer, however the rank ends: a file has no name, and goes when nobody has it open or mapped."""
    for names, while_it_lives, after in ranks.run(2, files_of, SMALL, Plan(zero_stage=3, cpu_offload=True),
                                                  str(tmp_path)):
        assert names == [] and all(while_it_lives) and after == (0, 0)


def files_of(group, case, plan, folder):
    """Return the names in the folder, and its open and its mapped files while the trainer lives, and afterwards."""
    with trainer_on(group, case, plan, offload_folder=folder) as trainer:
        trainer.step(*batch_of(trainer, case, 1))
        names, while_it_lives = os.listdir(folder), files_in_use(folder)
    del trainer
    gc.collect()
    return names, while_it_lives, files_in_use(folder)


def files_in_use(folder) -> tuple[int, int]:
    """Count this process's open files in this folder, with or without a name, and those that it maps."""
    found = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):     # the one that lists them
            found += os.readlink(f"/proc/self/fd/{descriptor}").startswith(f"{folder}{os.sep}")
    return found, MAPS.read_text().count(folder)


# ---- buffers and tiles ----------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="this system cannot be asked for room on the disk")
def test_a_file_has_its_room_on_the_disk_from_the_start(tmp_path):
    """A disk that is full is found out now, and not when a number is stored. What is loaded from there is a copy."""
    shard = OffloadedShard(1 << 17, np.float64, np.empty(0), str(tmp_path))
    assert 512 * os.fstat(shard.file.fileno()).st_blocks >= 1 << 20
    shard.load(Piece(None, slice(0, 2), slice(0, 2)))[...] = 1
    assert not shard.flat.any()


@pytest.mark.parametrize("plan", [Plan(zero_stage=1), Plan(zero_stage=3, cpu_offload=True)])
def test_small_tiles_train_as_one_process(ranks, plan):
    """Other theorems' models are so small that every run of pieces is one tile."""
    ranks.run(2, with_small_tiles, training_equals_one_process, SMALL, 2, 1, 0.05, plan)


def with_small_tiles(group, theorem, *args):
    with mock.patch.object(tiles_module, "TILE", 7):
        theorem(group, *args)
