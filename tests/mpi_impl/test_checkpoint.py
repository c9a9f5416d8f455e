"""What is saved is loaded, to the bit, on any ranks; a resumed run is the run; whatever happens to files is said."""
import errno
import json
import os
import re
import resource
import shutil
import tempfile
import tracemalloc
from dataclasses import replace
from math import lcm
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from mpi_impl.checkpoints import checkpoint
from mpi_impl.checkpoints import on_disk
from mpi_impl.checkpoints.on_disk import TRACKER, Manifest, Sealed, box_of, check_free, key_of, text_of
from mpi_impl.comm.topology import Place
from mpi_impl.data.indexed import write_indexed
from mpi_impl.pretrain_gpt import Pretraining
from mpi_impl.training.arguments import parse
from mpi_impl.training.trainer import Trainer
from reference import training
from reference.boxes import shape_of, without_padding
from reference.config import ModelConfig
from reference.errors import UserError
from reference.models.gpt import gpt_join
from reference.optimizer import OptimizerConfig
from reference.params import join, leaves
from reference.precision import LossScaling, Precision
from reference.schedules import make
from tests.launching import launch
from tests.mpi_impl.test_training import WITHOUT_V, places
from tests.rank_theorems import Plan, connected, dealt
from tests.strategies import Case, cases, trees_close

OPTIMIZER = OptimizerConfig(1e-2, 10, lr_warmup_iters=1, clip_grad=0.5, adam_eps=1e-4)
DOUBLE = Precision("float64")


# ---- on ranks -------------------------------------------------------------------------------------------------------


class Run(NamedTuple):
    """A case on some ranks, with so many samples in a batch."""

    n: int
    case: Case
    plan: Plan
    batch: int
    precision: Precision = DOUBLE

    def trainer(self, topology) -> Trainer:
        return Trainer(self.case.model, OPTIMIZER, topology, self.case.seed, self.precision)

    def words(self, step: int):
        """Tokens and targets of a step."""
        return [self.case.ids(f"{what} {step}", self.batch, self.case.s) for what in ("tokens", "targets")]

    def step(self, trainer: Trainer):
        return trainer.step(dealt(trainer, self.case.b, *self.words(trainer.iteration)), self.batch)


class States(NamedTuple):
    """Of one rank."""

    place: Place
    tensors: Any
    views: dict[str, Any]      # by state


def states(trainer: Trainer) -> States:
    return States(trainer.topology.place, trainer.layout.tensors,
                  {name: trainer.layout.views(trainer.whole(buffer).copy())
                   for name, buffer in trainer.optimizer.states.items()})


def joined(everyone: list[States], state: str, replica: int = 0):
    """The whole model's, of one replica."""
    stages = [[found for found in everyone if found.place[1:] == (replica, stage)]
              for stage in range(1 + max(found.place.pipeline for found in everyone))]
    parts = [join([found.views[state] for found in stage], stage[0].tensors) for stage in stages]
    whole = gpt_join(parts)
    for part in parts:
        if part.embedding.word is not None:     # both copies of a tied table
            trees_close(part.embedding.word, whole.embedding.word, 0.0)
    return whole


def train_and_save(group, run: Run, root, steps: int = 1) -> States:
    with connected(group, run.plan.parallel(group.size, run.case)) as topology:
        trainer = run.trainer(topology)
        for _ in range(steps):
            run.step(trainer)
        checkpoint.save(trainer, str(root), {"seed": run.case.seed})
        return states(trainer)


def load_and_train(group, run: Run, root, steps: int = 1) -> tuple[States, list, States]:
    """States after loading, the results of some steps, and the states after them."""
    with connected(group, run.plan.parallel(group.size, run.case)) as topology:
        trainer = run.trainer(topology)
        checkpoint.load(trainer, str(root), group.from_first(lambda: on_disk.read_manifest(str(root))))
        loaded = states(trainer)
        return loaded, [run.step(trainer) for _ in range(steps)], states(trainer)


def refusal(group, run: Run, root) -> str:
    """What a load says, alike on all ranks; "" if it loads."""
    try:
        load_and_train(group, run, root, 0)
        said = ""
    except UserError as error:
        said = str(error)
    assert len(set(group.comm.allgather(said))) == 1, "ranks do not agree"
    return said


@pytest.fixture
def root():
    """A folder for checkpoints, for each example a new one: hypothesis has one tmp_path for all of them."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


# ---- any topology loads any other -----------------------------------------------------------------------------------


@st.composite
def plans(draw, t, p, d, most):
    """How so many ranks share the work, with at most so many stages -> the plan, and what m must be a multiple of."""
    schedule = draw(st.sampled_from([*WITHOUT_V, *["interleaved"] * (2 * p <= most)]), "schedule")
    v = 2 if schedule == "interleaved" else None
    if make(schedule, p, p, v).stages > most:
        schedule, v = "1f1b", None
    stage = draw(st.integers(0, 3), "ZeRO stage")
    offload = stage > 0 and draw(st.booleans(), "offload")
    return Plan(p, schedule, v, bucket_size=draw(st.sampled_from([1, 7, 100, 1000, 1 << 30]), "bucket size"),
                zero_stage=stage, cpu_offload=offload), p if v else 1


@st.composite
def pairs(draw):
    """The same model and batches on two topologies."""
    (t1, p1, d1), (t2, p2, d2) = one, other = [draw(st.sampled_from(places()), "t, p, d") for _ in range(2)]
    heads, layers = lcm(t1, t2), max(p1, p2) + draw(st.integers(0, 2), "more layers")
    case = draw(cases(sizes=st.just(1), num_layers=layers, num_attention_heads=heads, hidden_size=2 * heads,
                      rotary_percent=1.0, max_position_embeddings=2 * heads))
    found, batch = [], 1
    for t, p, d in (one, other):
        plan, m = draw(plans(t, p, d, layers))
        batch = lcm(batch, m * d)
        found.append((t, t * p * d, plan, t > 1 and draw(st.booleans(), "sequence parallel")))
    return [Run(n, replace(case, t=t, b=1, s=heads, sequence_parallel=cut), plan, batch) for t, n, plan, cut in found]


@settings(max_examples=settings().max_examples // 10)
@given(pairs(), st.integers(1, 2))
def test_any_topology_loads_any_other(ranks, pair, steps):
    """Any two, with ragged models."""
    one_loads_other(ranks, *pair, steps)


MODEL = ModelConfig(4, 16, 4, 21, 8, make_vocab_size_divisible_by=3)
# t, sequence parallel or not, replicas, and the rest; each of them loads what the one before it has saved.
ROUND = [Run(t * plan.p * d, Case(t, MODEL, 1, 4, seed=1, sequence_parallel=cut), plan, 8) for t, cut, d, plan in [
    (2, False, 2, Plan(2)), (1, False, 8, Plan(zero_stage=3)), (4, True, 2, Plan(zero_stage=1)), (1, False, 1, Plan()),
    (2, True, 1, Plan(4)), (2, False, 2, Plan(2, "interleaved", 2, zero_stage=2, cpu_offload=True)),
    (1, False, 4, Plan()), (2, False, 2, Plan(2, "zb-v", bucket_size=1, zero_stage=3, cpu_offload=True))]]


@pytest.mark.parametrize("i", range(len(ROUND)))
def test_one_topology_after_the_other(ranks, i):
    """All of t, p, d, v, ZeRO's stages and the cut sequence have their turn."""
    one_loads_other(ranks, ROUND[i - 1], ROUND[i], 2)


def one_loads_other(ranks, one: Run, other: Run, steps: int) -> None:
    """All states are there to the bit, on every replica; and one more step is one process's."""
    with tempfile.TemporaryDirectory() as root:
        saved = ranks.run(one.n, train_and_save, one, root, steps)
        after = ranks.run(other.n, load_and_train, other, root)
    loaded, results, stepped = zip(*after, strict=True)
    replicas = 1 + max(found.place.data for found in loaded)
    for state in ("parameters", "m", "v"):
        for replica in range(replicas):
            trees_close(joined(loaded, state, replica), joined(saved, state), 0.0)
    textbook = training.Trainer(one.case.model, OPTIMIZER, one.case.seed, DOUBLE)
    for step in range(steps + 1):
        loss, norm, _ = textbook.step(*one.words(step))
    assert all(result[0][:2] == pytest.approx((loss, norm), rel=1e-10) for result in results)
    for state, expected in (("parameters", textbook.params), ("m", textbook.m), ("v", textbook.v)):
        trees_close(joined(stepped, state, replicas - 1), expected, 1e-10)


# ---- a resumed run is the run ---------------------------------------------------------------------------------------


@st.composite
def resumed(draw):
    """A run of any precision, whose loss scale moves if it has one."""
    run = draw(pairs())[0]
    scaling = LossScaling(initial_loss_scale=2.0**draw(st.integers(0, 40), "scale"), loss_scale_window=2, hysteresis=1)
    formats = [Precision(name) for name in ("float64", "float32", "bfloat16")]
    return run._replace(precision=draw(st.sampled_from([*formats, Precision("float16", scaling)]), "precision"))


def resumed_is_uninterrupted(group, run: Run, root, steps: int) -> None:
    """On each rank, to the bit. The second trainer begins with other weights than the first."""
    with connected(group, run.plan.parallel(group.size, run.case)) as topology:
        through, before, after = run.trainer(topology), run.trainer(topology), run.trainer(topology)
        for _ in range(steps):
            run.step(through)
            run.step(before)
        checkpoint.save(before, str(root), {})
        for buffer in after.optimizer.states.values():
            buffer.flat[...] = 7
        checkpoint.load(after, str(root), on_disk.read_manifest(str(root)))
        for _ in range(steps):
            assert repr(run.step(through)) == repr(run.step(after))
        assert (through.iteration, through.optimizer.iteration, through.scaler.state) == (
            after.iteration, after.optimizer.iteration, after.scaler.state)
        for one, other in ((through.parameters.own, after.parameters.own), *zip(
                through.optimizer.states.values(), after.optimizer.states.values(), strict=True)):
            for piece in without_padding(through.pieces, topology.place.tensor):
                assert np.array_equal(one.load(piece), other.load(piece), equal_nan=True), piece.of.name


@settings(max_examples=settings().max_examples // 10)
@given(resumed(), st.integers(1, 3))
def test_a_resumed_run_is_the_run(ranks, run, steps):
    """n + n steps = 2 n steps, to the bit: losses, norms, weights, moments, loss scale; whatever the run is like."""
    with tempfile.TemporaryDirectory() as root:
        ranks.run(run.n, resumed_is_uninterrupted, run, root, steps)


@pytest.mark.parametrize("before, after", [("float32", "float64"), ("float64", "float32"), ("bfloat16", "float32"),
                                           ("float32", "float16")])
def test_another_precision_goes_on(ranks, root, before, after):
    """With the same numbers, as far as the new format has them. A scale that follows the gradients begins anew."""
    one, other = SMALL._replace(precision=Precision(before)), SMALL._replace(precision=Precision(after, LossScaling()))
    saved = ranks.run(2, train_and_save, one, root)
    loaded, _, _ = zip(*ranks.run(2, load_and_train, other, root, 0), strict=True)
    for state in ("parameters", "m", "v"):
        for (name, x), (_, y) in zip(leaves(joined(loaded, state)), leaves(joined(saved, state)), strict=True):
            assert x.dtype == other.precision.main and np.array_equal(x, y.astype(x.dtype)), name


# ---- what is on disk ------------------------------------------------------------------------------------------------


SMALL = Run(2, Case(2, ModelConfig(2, 8, 2, 11, 4, make_vocab_size_divisible_by=3), 1, 4, seed=1), Plan(), 2)
ZERO = SMALL._replace(case=replace(SMALL.case, t=1), plan=Plan(p=2, zero_stage=1), n=4)


@pytest.mark.parametrize("run", [SMALL, ZERO])
def test_the_files_are_safetensors_and_hold_the_model_once(ranks, root, run):
    """As the package itself reads them: with the manifest's boxes they fill every tensor, each element once."""
    saved = ranks.run(run.n, train_and_save, run, root, 2)
    folder = root / "iter_0000002"
    manifest = Manifest.from_text((folder / "manifest.json").read_text())
    assert Manifest.from_text(manifest.text()) == manifest and (root / TRACKER).read_text() == "2"
    assert (manifest.iteration, manifest.updates, manifest.dtype) == (2, 2, "float64")
    assert {path.name for path in folder.iterdir()} == {"manifest.json", "manifest.json.sha256", *manifest.files}
    for state in ("parameters", "m", "v"):
        files = {name: load_file(folder / name) for name in manifest.files if name.startswith(f"{state}-")}
        assert sum(len(file) for file in files.values()) == sum(len(x.boxes) for x in manifest.tensors.values())
        for name, expected in leaves(joined(saved, state)):
            found = np.full(expected.shape, np.nan)
            for box, rank in manifest.tensors[name].boxes:
                assert np.isnan(found[box]).all()
                found[box] = files[f"{state}-{rank:05}.safetensors"][key_of(name, box)]
            assert np.array_equal(found, expected)


def test_a_manifest_that_is_not_all_of_its_tensors_is_none():
    manifest = Manifest(1, 1, [2.0**32, 0, 2], "float32", {}, {}, {"x": on_disk.Stored((2, 3), [
        (box_of("0:1,0:3"), 0), (box_of("1:2,0:3"), 1)])}, {"m": Sealed(3, "abc")})
    assert Manifest.from_text(manifest.text()) == manifest
    assert all(text_of(box_of(text)) == text for text in ("0:1", "2:3,4:5,0:10"))
    assert shape_of(box_of("2:3,4:6,0:10")) == (1, 2, 10)
    for wrong in ("1:2,0:2", "0:2,0:3"):
        with pytest.raises(ValueError, match="x"):
            Manifest.from_text(manifest.text().replace("1:2,0:3", wrong))


def memory_of_a_save_and_a_load(group, run: Run, root) -> tuple[int, int, int, int]:
    """Bytes, at most, beside what is held -> of the save, of the load; of the largest part of a tensor, of a state."""
    with connected(group, run.plan.parallel(group.size, run.case)) as topology:
        trainer = run.trainer(topology)
        trainer.iteration = 1
        peaks = []
        for work in (lambda: checkpoint.save(trainer, str(root), {}), lambda: checkpoint.load(
                trainer, str(root), on_disk.read_manifest(str(root)))):
            tracemalloc.start()
            work()
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
        part, state = max(piece.size for piece in trainer.pieces), trainer.layout.shard_size
        return *peaks, 8 * part, 8 * state


@pytest.mark.parametrize("offload", [False, True])
def test_no_rank_holds_the_model(ranks, root, offload):
    """A save copies nothing, or its part of one tensor from far memory; a load has that part, and what it is read as.

    (The package has that more than once for a moment.)
    """
    model = ModelConfig(7, 128, 2, 50, 8)
    run = Run(2, Case(1, model, 1, 4, seed=1), Plan(zero_stage=1, cpu_offload=offload), 2)
    for saved, loaded, part, state in ranks.run(2, memory_of_a_save_and_a_load, run, root):
        assert saved < part * offload + 300_000 < state / 4
        assert loaded < 4 * part + 300_000 < state


# ---- whatever happens to the files ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    """A checkpoint of SMALL after its first step. Tests work on copies."""
    root = tmp_path_factory.mktemp("saved")
    ranks.run(2, train_and_save, SMALL, root)
    return root


@pytest.fixture
def copy(saved, root):
    shutil.copytree(saved, root, dirs_exist_ok=True)
    return root


@given(st.randoms(use_true_random=False), st.integers(1, 255))
def test_a_changed_byte_is_found_wherever_it_is(ranks, saved, random, change):
    """In the tracker, the manifest, its checksum, a header, or among the elements: the load fails and names a file."""
    with tempfile.TemporaryDirectory() as root:
        shutil.copytree(saved, root, dirs_exist_ok=True)
        path = random.choice(sorted(path for path in Path(root).rglob("*") if path.is_file()))
        content = bytearray(path.read_bytes())
        content[random.randrange(len(content))] ^= change
        path.write_bytes(content)
        said = ranks.run(2, refusal, SMALL, root)[0]
        assert path.name in said or path.name.removesuffix(".sha256") in said


def names_of_files(run: Run) -> list[str]:
    shards = [f"{state}-{rank:05}.safetensors" for state in ("parameters", "m", "v") for rank in range(run.n)]
    return [TRACKER, *(f"iter_0000001/{name}" for name in ("manifest.json", "manifest.json.sha256", *shards))]


@pytest.mark.parametrize("name", names_of_files(SMALL))
def test_a_missing_a_short_or_a_long_file_is_found(ranks, copy, name):
    """Each in turn, by name."""
    path, named = copy / name, str(copy / name).removesuffix(".sha256")
    content = path.read_bytes()
    for wrong in (content[:len(content) // 2], b"", content + b"\0"):
        path.write_bytes(wrong)
        assert named in ranks.run(2, refusal, SMALL, copy)[0]
    path.unlink()
    assert named in ranks.run(2, refusal, SMALL, copy)[0]
    path.mkdir()
    assert f"{path} cannot be read: Is a directory." in ranks.run(2, refusal, SMALL, copy)[0]
    path.rmdir()
    path.write_bytes(content)
    assert ranks.run(2, refusal, SMALL, copy)[0] == ""


def test_a_checkpoint_without_its_folder_or_under_another_name(ranks, copy):
    (copy / "iter_0000001").rename(copy / "iter_0000003")
    assert ranks.run(2, refusal, SMALL, copy)[0] == (
        f"{copy}/{TRACKER} names iteration 1, but {copy}/iter_0000001 is not there. Of checkpoints {copy} has those of "
        f"iterations 3; {TRACKER} there says which one is loaded.")
    (copy / TRACKER).write_text("3\n")
    assert "manifest.json is of iteration 1" in ranks.run(2, refusal, SMALL, copy)[0]
    assert ranks.run(1, refusal, SMALL._replace(case=ZERO.case), copy / "none")[0] == (
        f"--load {copy}/none holds no checkpoint: {copy}/none/{TRACKER} is not there.")


@pytest.mark.parametrize("choice, sentence", [
    (dict(num_layers=3), "--num-layers is 3, but 2 in"),
    (dict(hidden_size=12), "--hidden-size is 12, but 8 in"),
    (dict(vocab_size=12), "--vocab-size (which the tokenizer decides) is 12, but 11 in"),
    (dict(untie_embeddings_and_output_weights=True), "--untie-embeddings-and-output-weights is True, but False in"),
    (dict(activation="relu"), "--activation is relu, but gelu in"),
    (dict(max_position_embeddings=5), "--max-position-embeddings is 5, but 4 in"),
])
def test_another_model_is_refused(ranks, saved, choice, sentence):
    """What its steps and its storage are like may change."""
    def with_model(**choice):
        return SMALL._replace(case=replace(SMALL.case, model=replace(SMALL.case.model, **choice)))

    said = ranks.run(2, refusal, with_model(**choice), saved)[0]
    assert said.startswith(f"{sentence} {saved}/iter_0000001: ")
    same = with_model(hidden_dropout=0.3, attention_dropout=0.3, make_vocab_size_divisible_by=1, init_method_std=1.0)
    assert ranks.run(2, refusal, same, saved)[0] == ""


# ---- whatever happens while it is written ---------------------------------------------------------------------------

OPERATIONS = ("fsync", "rename", "replace", "mkdir", "listdir", "open")     # of the module os


def recorded_save(group, run: Run, root) -> tuple[list[tuple[str, int]], dict[str, int]]:
    """What one save asks the system, in order, with the file it is about; and which file is which."""
    asked = []

    def recorded(name, place):
        def call(*args):
            asked.append((name, place(*args)))
            return getattr(os, name)(*args)
        return call

    recorder = mock.Mock(wraps=os, path=os.path, O_RDONLY=os.O_RDONLY)
    recorder.fsync = recorded("fsync", lambda file: os.fstat(file).st_ino)
    recorder.rename = recorded("rename", lambda source, _: os.stat(source).st_ino)
    recorder.replace = recorded("replace", lambda source, _: os.stat(source).st_ino)
    with mock.patch.object(on_disk, "os", recorder):
        save_again(group, run, root, 1)
    return asked, {str(path.relative_to(root)): path.stat().st_ino for path in [root, *root.rglob("*")]}


def test_everything_is_on_the_disk_before_it_gets_its_name(ranks, root):
    """Though the power may fail: the files and their folder before the rename, and that before the tracker's."""
    alone = SMALL._replace(n=1, case=replace(SMALL.case, t=1))
    (asked, files), = ranks.run(1, recorded_save, alone, root)
    folder, tracker = files.pop("iter_0000001"), files.pop(TRACKER)
    top = files.pop(".")
    named = asked.index(("rename", folder))
    assert {("fsync", file) for file in (*files.values(), folder)} == set(asked[:named])
    assert asked[named - 1] == ("fsync", folder), "names of files that come later may be lost"
    assert asked[named + 1:] == [("fsync", top), ("fsync", tracker), ("replace", tracker), ("fsync", top)]


class Killed(BaseException):
    """No handler of errors may catch it: it stands for the end of the process."""


class Failing:
    """Stands for `os` in the module that writes: the n-th operation fails, before it does anything."""

    def __init__(self, n: int, error: BaseException):
        self.left, self.error = n, error

    def __getattr__(self, name):
        return self.counted(getattr(os, name)) if name in OPERATIONS else getattr(os, name)

    def counted(self, operation):
        def call(*args):
            self.left -= 1
            if self.left == 0:
                raise self.error
            return operation(*args)
        return call


def failing_saves(group, run: Run, root, failing_rank: int, error: BaseException) -> list[str]:
    """A good checkpoint of step 1; then step 2 is saved, and in turn each operation of a rank fails, until none does.

    After each failure the last good checkpoint loads -> what every failed save said, of those that did not kill.
    """
    root, said = str(root), []
    with connected(group, run.plan.parallel(group.size, run.case)) as topology:
        trainer, fresh = run.trainer(topology), run.trainer(topology)
        run.step(trainer)
        checkpoint.save(trainer, root, {})
        run.step(trainer)
        n, good = 1, 1
        while True:
            failing = Failing(n if group.rank == failing_rank else -1, error)
            with mock.patch.object(on_disk, "os", failing):
                try:
                    checkpoint.save(trainer, root, {})
                    assert failing.left > 0 or group.rank != failing_rank
                    return said
                except UserError as refused:
                    said.append(str(refused))
                    assert not [name for name in os.listdir(root) if re.fullmatch(r"iter_\d+\.tmp", name)]
                except Killed:
                    pass
            group.from_first(lambda: None)
            manifest = on_disk.read_manifest(root)
            assert manifest.iteration >= good
            good = manifest.iteration
            checkpoint.load(fresh, root, manifest)
            if good == 2:       # the tracker is the last to be written: it is there, though perhaps not on the disk
                return said
            n += 1


def test_killed_while_it_writes(ranks, root):
    """At every operation on files in turn: the last good checkpoint loads, and the next save clears what is left."""
    alone = SMALL._replace(n=1, case=replace(SMALL.case, t=1))
    ranks.run(1, failing_saves, alone, root, 0, Killed())
    ranks.run(1, load_and_train, alone, root, 1)
    assert sorted(path.name for path in root.iterdir()) == ["iter_0000001", "iter_0000002", TRACKER]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_disk_that_fails_while_it_writes(ranks, root, rank):
    """At every operation of a rank in turn: all say the same, which names the file; what was begun is removed."""
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    one, other = ranks.run(2, failing_saves, SMALL, root, rank, error)
    assert one == other and len(one) > 2
    assert all(re.match(rf"{root}.* cannot be written: No space left on device\.", said) for said in one)
    if rank == 0:
        assert {re.match(r"\S+", said)[0].split("/")[-1] for said in one} > {
            "m-00000.safetensors", "manifest.json", "manifest.json.sha256", "iter_0000002"}


def save_in_little_room(group, run: Run, root) -> tuple[str, str]:
    """The last rank cannot write more than a few bytes to a file, really -> what it says, and what then is there."""
    with connected(group, run.plan.parallel(group.size, run.case)) as topology:
        trainer = run.trainer(topology)
        trainer.iteration = 2
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000 if group.rank == group.size - 1 else soft, hard))
        try:
            with pytest.raises(UserError) as refused:
                checkpoint.save(trainer, str(root), {})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        group.from_first(lambda: None)
        return str(refused.value), " ".join(sorted(os.listdir(root)))


def test_no_room_for_a_file(ranks, copy):
    """The system's own error, on one rank: all say so, and the good checkpoint stays."""
    for said in ranks.run(2, save_in_little_room, SMALL, copy):
        assert said == (f"{copy}/iter_0000002.tmp/parameters-00001.safetensors cannot be written: File too large.",
                        f"iter_0000001 {TRACKER}")
    assert ranks.run(2, refusal, SMALL, copy)[0] == ""


def save_again(group, run: Run, root, iteration: int) -> None:
    with connected(group, run.plan.parallel(group.size, run.case)) as topology:
        trainer = run.trainer(topology)
        trainer.iteration = iteration
        checkpoint.save(trainer, str(root), {})


def test_no_good_checkpoint_is_written_again(ranks, copy):
    """Only one that the tracker does not name is: of a run that was killed just before, or chosen by hand."""
    for last, next_one, free in ((1, 1, False), (1, 2, True), (1, 3, True), (3, 2, False)):
        (copy / TRACKER).write_text(str(last))
        if free:
            check_free(str(copy), next_one)
            ranks.run(2, save_again, SMALL, copy, next_one)
        else:
            with pytest.raises(UserError, match=f"--save {copy} holds a checkpoint of iteration {last}, .* Add --load"):
                check_free(str(copy), next_one)
    (copy / TRACKER).write_text("1")
    (copy / "iter_0000002" / "old").touch()
    ranks.run(2, save_again, SMALL, copy, 2)
    assert not (copy / "iter_0000002" / "old").exists() and (copy / TRACKER).read_text() == "2"


def test_what_is_said_of_other_settings():
    """Each option that differs, with both values; and the dtype."""
    manifest = Manifest(10, 9, None, "float32", {}, {"seed": 1, "lr": 0.1, "split": "1,1"}, {}, {})
    assert checkpoint.told("D", manifest, dict(manifest.settings), "float32") == "loaded iteration 10: 0 bytes, " + (
        os.path.join("D", "iter_0000010"))
    lines = checkpoint.told("D", manifest, {"seed": 2, "lr": 0.1, "split": "2,1"}, "float64").splitlines()[1:]
    assert lines == ["its weights and moments are float32, and float64 from now on",
                     "note: other settings than before, so the run is not the same: --seed 2 (was 1), --split 2,1 "
                     "(was 1,1)"]
    with pytest.raises(UserError, match="--train-iters is 10, but D/iter_0000010, .* Choose more"):
        checkpoint.check_iterations("D", manifest, 10)
    checkpoint.check_iterations("D", manifest, 11)


# ---- the program ----------------------------------------------------------------------------------------------------

OPTIONS = """--num-layers 4 --hidden-size 16 --num-attention-heads 4 --seq-length 8 --micro-batch-size 1
    --global-batch-size 8 --lr 0.01 --lr-warmup-iters 2 --lr-decay-iters 6 --log-interval 1000 --eval-interval 1
    --eval-iters 1 --split 8,2 --tokenizer-type NullTokenizer --vocab-size 20""".split()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A corpus, in the options that name it."""
    folder = tmp_path_factory.mktemp("data")
    write_indexed(folder / "tokens", [np.random.default_rng(1).integers(0, 20, 3000)], 21)
    return ["--data-path", str(folder / "tokens")]


def pretrain(group, options):
    Pretraining(parse(options, group.size), group).run()


def curve(ranks, n, options, metrics) -> list[dict]:
    """What a run writes about its iterations and evaluations, but for how fast they were."""
    ranks.run(n, pretrain, [*OPTIONS, *options, "--metrics-file", str(metrics)], timeout=60)
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [{name: value for name, value in row.items() if name != "tokens_per_second"} for row in rows]


T2P2 = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"


@pytest.mark.parametrize("n, options", [
    (4, "--zero-stage 3 --cpu-offload --pipeline-model-parallel-size 2"),
    (2, "--fp16 --initial-loss-scale 1e8 --loss-scale-window 2 --tensor-model-parallel-size 2 --num-layers 1"),
    pytest.param(8, f"{T2P2} --sequence-parallel", marks=pytest.mark.deep),
    pytest.param(4, "--bf16 --pipeline-model-parallel-size 2 --pipeline-schedule zb-v", marks=pytest.mark.deep),
])
def test_three_iterations_and_three_are_six(ranks, data, root, capfd, n, options):
    """Bit by bit in all that is reported: losses, norms, rates, loss scales, evaluations.

    The second run is told to stop early. Both have saved at their ends.
    """
    options = [*options.split(), *data]
    whole = curve(ranks, n, [*options, "--train-iters", "6"], root / "metrics")
    capfd.readouterr()
    first = curve(ranks, n, [*options, "--train-iters", "3", "--save", f"{root}/D"], root / "metrics")
    both = curve(ranks, n, [*options, "--train-iters", "9", "--exit-interval", "6", "--load", f"{root}/D", "--save",
                            f"{root}/D", "--save-interval", "4"], root / "metrics")
    assert (root / "D" / TRACKER).read_text() == "6" and sorted(os.listdir(root / "D")) == [
        "iter_0000003", "iter_0000004", "iter_0000006", TRACKER]
    assert both == whole and both[:len(first)] == first      # in one file, with which the second run has gone on
    said = capfd.readouterr().out
    assert re.search(rf"loaded iteration 3: [\d.]+ kB, {root}/D/iter_0000003\n", said)
    assert re.findall(r"saved iteration (\d+)", said) == ["3", "4", "6"]
    assert "note: other" not in said and "NOT" not in said


def test_other_ranks_go_on_with_it(ranks, data, root):
    """From each topology to the next, on 1 to 8 ranks, with --verify: it is one process's run, evaluations included."""
    options = [*data, "--dtype", "float64"]
    whole = curve(ranks, 1, [*options, "--train-iters", "5"], root / "metrics")
    load: list[str] = []
    for iteration, (n, more) in enumerate([
            (8, T2P2), (1, ""), (4, "--zero-stage 2 --pipeline-model-parallel-size 2 --pipeline-schedule zb-v"),
            (2, "--zero-stage 1"), (8, "--zero-stage 3 --tensor-model-parallel-size 4 --sequence-parallel")], 1):
        found = curve(ranks, n, [*options, *more.split(), *load, "--verify", "--save", f"{root}/D",
                                  "--train-iters", str(iteration)], root / "metrics")
        load = ["--load", f"{root}/D"]
    for ours, one in zip(found, whole, strict=True):
        assert ours == pytest.approx(one, rel=1e-11)


def refused(group, options) -> str:
    """What a run says before it starts, alike on all ranks."""
    try:
        pretrain(group, options)
        said = ""
    except UserError as error:
        said = str(error)
    assert len(set(group.comm.allgather(said))) == 1, "ranks do not agree"
    return said


REFUSED = [
    ("--save {}", "--save {} holds a checkpoint of iteration 7, which this run, at iteration 0 now, would write again"),
    ("--load {} --train-iters 7", "--train-iters is 7, but {}/iter_0000007, which is to be loaded, has 7 behind it"),
    ("--load {}/none", "--load {}/none holds no checkpoint"),
    ("--load {} --hidden-size 32", "--hidden-size is 32, but 16 in {}/iter_0000007"),
    ("--load {} --vocab-size 19", "The tokenizer is another one than that of {}/iter_0000007"),
    ("--load {0} --save {0}/{1}", "{0}/{1} is a file, where a folder is needed"),
    ("--save /proc/none", "/proc/none cannot be written"),
    ("--save-interval 2", "--save-interval is 2, but nothing is saved"),
]


def test_what_cannot_be_is_said_before_the_run(ranks, data, root):
    """And the checkpoint that is there stays."""
    common = [*OPTIONS, *data, "--train-iters", "8"]
    ranks.run(2, pretrain, [*common, "--exit-interval", "7", "--save", str(root)], timeout=60)
    for options, sentence in REFUSED:
        said = ranks.run(2, refused, [*common, *options.format(root, TRACKER).split()])[0]
        assert said.startswith(sentence.format(root, TRACKER))
    assert ranks.run(4, refused, [*common, "--load", str(root), "--save", str(root), *T2P2.split()])[0] == ""


# A rank and how many files it still writes come first, then the program's own options.
KILLED = """\
import os, signal, sys
from itertools import count

from mpi_impl import pretrain_gpt
from mpi_impl.comm.group import world
from mpi_impl.entry import run

rank, last = int(sys.argv[1]), int(sys.argv[2])
del sys.argv[1:3]
fsync, calls = os.fsync, count(1)

def fsync_until(file):
    if next(calls) == last and world().rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    fsync(file)

os.fsync = fsync_until
run(pretrain_gpt.main)
"""


@pytest.mark.deep
def test_killed_again_and_again(ranks, data, root):
    """Real ranks die while they write, each time on another topology; the run goes on, and ends as if nothing was."""
    program, random = root / "program.py", np.random.default_rng(1)
    program.write_text(KILLED)
    options = [*OPTIONS, *data, "--dtype", "float64", "--train-iters", "8", "--save-interval", "1"]
    whole = curve(ranks, 1, [*options, "--save", f"{root}/whole"], root / "metrics")
    load, reached = [], [0]
    while reached[-1] < 8:
        t, p, d = places(4)[random.integers(len(places(4)))]
        t, p, d = (2, 2, 1) if 3 in (t, p, d) else (t, p, d)
        topology = ["--tensor-model-parallel-size", t, "--pipeline-model-parallel-size", p]
        ended = launch(t * p * d, program, random.integers(t * p), random.integers(1, 13), *options, *load, *topology,
                       "--zero-stage", random.integers(4), "--save", root / "D", "--metrics-file", root / "again")
        assert (ended.returncode == 0) == (on_disk.tracked(str(root / "D")) == 8), ended.stderr
        reached.append(on_disk.tracked(str(root / "D")) or 0)
        load = ["--load", root / "D"] if reached[-1] else []
        assert len(reached) < 30 and reached[-1] >= reached[-2]
    assert len(reached) > 3, "hardly anything was killed"
    assert json.loads((root / "again").read_text().splitlines()[-1]) == pytest.approx(whole[-1], rel=1e-9)
