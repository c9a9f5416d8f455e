"""The counts of --check-scale are those of real ranks, and nothing that 16,384 ranks need is refused."""
import os
import resource
import subprocess
from collections import Counter
from dataclasses import replace
from unittest import mock

import msgspec
import psutil
import pytest

from mpi_impl.checkpoints.checkpoint import boxes_to_save
from mpi_impl.checkpoints.manifest import MOST_BOXES, StoredTensor, text_of
from mpi_impl.comm.group import Group
from mpi_impl.launch.guard import MOST_FILES, children
from mpi_impl.launch.launcher import find_mpiexec, mpi_vendor
from mpi_impl.parallel.model_state import ModelState
from mpi_impl.parallel.pipeline import largest_tag
from mpi_impl.runtime.mpis import FILES, FILES_OF_A_HOST, FILES_OF_A_RANK, PROXY_FILES
from mpi_impl.training.trainer import Trainer
from reference.config import ModelConfig, ParallelConfig
from reference.optimizers.adam import OptimizerConfig
from reference.parallel.boxes import boxes_of_run
from reference.parallel.stages import schedule_of
from reference.precision import Precision
from shardlab.dry_run import scale
from shardlab.dry_run.__main__ import main
from shardlab.dry_run.matching import Matching
from shardlab.dry_run.scale import Count, checkpoint_of, describe, files_to_start, most_sends, partners
from shardlab.dry_run.world import DryRun
from shardlab.predict.rank import ImaginedWorld, run_rank, saved_bytes
from tests.launching import command
from tests.training_theorems import connected
from tests.zoo.experts import EXPERTS

MODEL = ModelConfig(4, 32, 4, 64, 16)


@pytest.mark.parametrize("choices", [
    dict(p=2), dict(context_parallel_size=2, zero_stage=3), dict(expert_model_parallel_size=2),
    dict(zero_stage=1, expert_model_parallel_size=2, whole_matrices=True),
    dict(zero_stage=1, num_distributed_optimizer_instances=2)])
def test_communicators_and_checkpoints_are_those_of_real_ranks(ranks, choices):
    """Each of 8 ranks forms as many groups; all save as many files, of as many bytes; no tensor is in more boxes than
    was said.
    """
    parallel, files, size, boxes = ParallelConfig.for_world(8, t=2, **choices), 0, 0, Counter[str]()
    model = replace(MODEL, experts=EXPERTS.experts if parallel.expert_model_parallel_size > 1 else None)
    optimizer = OptimizerConfig(1e-2, 10, optimizer="muon" if parallel.whole_matrices else "adam")
    world = ImaginedWorld(model, parallel, Precision("float64"), 1, 16, 2, optimizer=optimizer)
    for rank, (formed, states, its_bytes) in enumerate(ranks.run(8, real_rank, world)):
        assert sorted(run_rank(world, rank).groups) == formed
        files, size = files + sum(map(bool, states)), size + its_bytes
        boxes.update(states[0])
    found = checkpoint_of(world)
    assert found[:2] == (files, size)
    assert max(boxes.values()) <= found[2]


def real_rank(group, world):
    """Return the groups that this rank forms, the names of tensors in each of its files, and their bytes."""
    formed = list[str]()

    def noting(method):
        def noted(self, which, name):
            formed.append(name)
            return method(self, which, name)
        return noted

    with (mock.patch.object(Group, "split", noting(Group.split)),
          mock.patch.object(Group, "subgroup", noting(Group.subgroup)), connected(group, world.parallel) as topology):
        trainer = Trainer(ModelState(world.model, topology, 1, world.precision), world.optimizer)
        return sorted(formed), [[name for name, _ in boxes_to_save(trainer, state)[1]]
                                for state in trainer.state.optimizer_states], saved_bytes(trainer)


def small_world(p: int, d: int, m: int, schedule: str = "1f1b") -> ImaginedWorld:
    return ImaginedWorld(ModelConfig(p, 16, 2, 64, 16), ParallelConfig(2, p, d, pipeline_schedule=schedule),
                         Precision("float32"), 1, 16, m)


@pytest.mark.parametrize("p", [2, 4])
def test_a_rank_that_runs_ahead_has_its_warm_up_under_way(p):
    """With 1F1B they are as many as the stages; with GPipe as many as the microbatches; without a pipeline, none."""
    assert most_sends(DryRun(small_world(p, 1, 3 * p))) == p
    assert most_sends(DryRun(small_world(p, 1, p + 1, "gpipe"))) == p + 1
    assert most_sends(DryRun(small_world(1, p, 3 * p))) == 0


def test_the_others_lag_as_far_as_they_can():
    """Those after a rank go on only where it waits for them, and have posted few receives by then."""
    world = small_world(4, 1, 12)
    events = {rank: run_rank(world, rank).events for rank in range(0, 8, 2)}
    assert [Matching(events).run_ahead(rank) for rank in events] == [4, 2, 1, 1]


def test_the_largest_tag_is_that_of_a_message():
    world = small_world(4, 1, 6)
    tags = {int(event.call.split()[1]) for rank in range(8) for event in run_rank(world, rank).events
            if event.kind == "send"}
    assert max(tags) <= largest_tag(schedule_of(world.parallel, 6)) <= max(tags) + 2


def test_the_ranks_to_which_one_sends():
    """With t 2, d 4, p 4, rank 0 sends to the next rank of each group: tensor, data, pipeline, tied embedding."""
    assert partners(run_rank(small_world(4, 4, 4), 0)) == {1, 2, 8, 24}


@pytest.mark.skipif(mpi_vendor() != "MPICH", reason="the launcher that was measured is MPICH's")
@pytest.mark.parametrize("hosts, ranks", [(2, 2), (5, 10), (16, 16)])
def test_a_launcher_opens_these_files(hosts, ranks):
    """Hosts that are all this machine, each with its proxy: the last of them has one end of every pipe that is open."""
    names = ",".join(f"host{i}" for i in range(hosts))
    job = subprocess.Popen([find_mpiexec("MPICH"), "-launcher", "fork", "-hosts", names, "-ppn", str(ranks // hosts),
                            "-n", str(ranks), "sh", "-c", "echo up; sleep 60"], stdout=subprocess.PIPE, text=True)
    try:
        assert job.stdout and [job.stdout.readline() for _ in range(ranks)] == ["up\n"] * ranks
        proxies = sorted(children(job.pid))
        assert len(proxies) == hosts
        assert psutil.Process(job.pid).num_fds() == FILES + FILES_OF_A_HOST * hosts
        assert psutil.Process(proxies[0]).num_fds() == PROXY_FILES + FILES_OF_A_RANK * (ranks // hosts)
    finally:
        job.terminate()
        job.wait()


def test_a_job_may_open_many_files(tmp_path):
    """The shell allows 100 open files, but ranks may open as many as the system allows."""
    program = tmp_path / "program.py"
    program.write_text("import resource; print(*resource.getrlimit(resource.RLIMIT_NOFILE))")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, before[1]))
    try:
        job = command("-m", "mpi_impl.launch", "-n", 1, program)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert job.stdout.split() == [str(min(before[1], MOST_FILES)), str(before[1])], job.stderr


def test_a_tensor_of_16384_ranks_has_room_in_a_manifest():
    """A replica of each owns an end of a row, whole rows, and the beginning of a row."""
    n, shape = 16_384, (20_000, 16_384)
    size = shape[0] * shape[1] // n
    boxes = {text_of(box): rank for rank in range(n) for box in boxes_of_run(shape, rank * size, (rank + 1) * size)}
    assert n < len(boxes) <= MOST_BOXES
    text = b'{"shape":[20000,16384],"ranks_of_boxes":{%s}}' % ",".join(f'"{k}":{v}' for k, v in boxes.items()).encode()
    assert msgspec.json.decode(text, type=StoredTensor).ranks_of_boxes == boxes


def test_the_count_nearest_to_its_limit_is_named_and_beyond_it_with_advice():
    counts = [Count("ranks", 8), Count("tags", 5, 100, "MPI's"), Count("files", 30, 10, "here", "Raise it.")]
    assert describe(counts).endswith("\n\nthe first limit: files, 300.0% of it. Raise it.")
    assert describe([*counts[:2], Count("files", 10, 10, "here", "Raise it.")]).endswith("files, 100.0% of it.")
    assert "tags, 5.0% of it" in describe(counts[:2])


def test_files_of_a_start_are_counted(tmp_path, monkeypatch):
    """Those that a module and its modules are read from, and no others."""
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    (tmp_path / "alone.py").write_text("")
    (tmp_path / "two.py").write_text("import alone\nopen(__file__).read()")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    one, two = files_to_start("alone"), files_to_start("two")
    assert (two[0] - one[0], two[1] - one[1]) == (1, (tmp_path / "two.py").stat().st_size)


def test_check_scale_prints_a_table(capsys, monkeypatch):
    monkeypatch.setattr(scale, "files_to_start", lambda program: {"shardlab.programs.gpt": (500, 10**8)}[program])
    main("--check-scale --world-size 64 --num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 32 "
         "--vocab-size 128 --global-batch-size 32 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 "
         "--zero-stage 1 --bf16".split())
    text = capsys.readouterr().out
    for line in ("ranks 64 100,000 the", "hosts 8", "files that all of them read 32,000", "files in a checkpoint 192"):
        assert line in " ".join(text.split()), line
