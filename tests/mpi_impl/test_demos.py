"""The demos: on any number of ranks their output is complete and in order, their checks pass, and detect faults."""
import re
from importlib import import_module
from pathlib import Path
from unittest import mock

import pytest

from mpi_impl.launch.pool import RankAssertion
from reference.errors import UserError
from reference.schedules.generators import SCHEDULES, make
from shardlab.demos import DEMOS, __main__ as listing, deadlock, pipeline
from shardlab.demos.collectives import ELEMENTS
from shardlab.demos.mlp import HIDDEN_SIZE
from tests.launching import command, launch
from tests.planted import Bug, planted_run
from tests.program import refusal

CHECKED = "The check against reference/, which computes everything whole, in one process: "
OWN_SIZES = [       # what a user may choose for 3 ranks
    ("collectives", "--elements 24"), ("mlp", "--hidden-size 6"), ("attention", "--num-attention-heads 27"),
    ("llama", "--num-attention-heads 9"), ("embedding", "--sentence so"),
    ("cross_entropy", "--vocab-size 3"), ("sequence_parallel", "--seq-length 3"), ("zero", "--microbatches 3"),
    ("context_parallel", "--chunk-length 1"), ("context_parallel", "--chunk-length 5"),
    ("experts", "--experts-per-rank 1"), ("stale_weights", "--microbatches 1"),
    ("train", "--tensor-model-parallel-size 1 --train-iters 2"),
    *(("pipeline", f"--microbatches 6 --schedule {name}") for name in SCHEDULES if name != "forward-only")]
SHARDED = {         # what the ranks own, each a part
    "collectives": ["element"], "mlp": ["column", "row"], "attention": ["head", "column", "row"], "embedding": ["row"],
    "cross_entropy": ["token"], "sequence_parallel": ["position", "head", "column"], "experts": ["expert"],
    "pipeline": ["layer"]}


def show(group, name, options=""):
    """Run a demo. It looks at a deadlock sooner than a person would like."""
    with mock.patch.object(deadlock, "PATIENCE", 0.2):
        import_module(f"shardlab.demos.{name}").show(group, options.split())


@pytest.mark.parametrize("name, n, options", [
    *((name, n, "") for name in DEMOS if name != "memory" for n in (1, 8)),
    ("memory", 2, "--dtype bfloat16 --output FOLDER/memory.png"),
    *((name, 3, options) for name, options in OWN_SIZES)])
def test_a_demo_ends_in_its_check(ranks, capsys, tmp_path, name, n, options):
    """Its lines fit on a screen; where one rank has a line all have one, in rank order, and name pieces that tile the
    whole; and all measurements are as predicted.
    """
    ranks.run(n, show, name, options.replace("FOLDER", str(tmp_path)), timeout=120)
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert max(map(len, lines)) <= 120 and "NOT" not in text
    of_ranks = [(int(found[1]), line) for line in lines if (found := re.match(r"  rank (\d+): *\S", line))]
    assert [rank for rank, _ in of_ranks] == [*range(n)] * (len(of_ranks) // n)
    for what in SHARDED.get(name, ()):
        owned = [piece for _, line in of_ranks if (piece := piece_in(line, what)) is not None]
        assert owned and len(owned) % n == 0
        for first in range(0, len(owned), n):
            pieces = sum(owned[first:first + n], [])
            assert pieces == [*range(len(pieces))]
    if (name, n) == ("deadlock", 1):
        assert "A single rank has nobody to wait for" in text
    else:
        assert re.search(f"{CHECKED}.* are the same on {n} ranks?, to [^:]*$", " ".join(lines))
        assert of_ranks or (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")


def piece_in(line, what):
    """Return the numbers that a rank's line names as its own; None if it names none, but shares in percent."""
    if "%" in line:
        return None
    if re.search(rf"\bno {what}s\b", line):
        return []
    found = re.search(rf"\b{what}s? (\d+)(?: to (\d+))?(?=[ ,:;])", line)
    return found and [*range(int(found[1]), int(found[2] or found[1]) + 1)]


@pytest.mark.parametrize("size", [ELEMENTS, HIDDEN_SIZE])
@pytest.mark.parametrize("n", [1, 3, 6, 16, 24])
def test_the_default_is_the_first_size_that_the_ranks_can_shard(size, n):
    """It is accepted, and no smaller size from the least on is."""
    default = size.parse([], n)
    assert size.parse([size.option, str(default)], n) == default >= size.least
    for smaller in range(size.least, default):
        with pytest.raises(UserError, match="The number of ranks"):
            size.parse([size.option, str(smaller)], n)


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "forward-only"])
def test_the_picture_of_a_schedule(name):
    """It shows every action once, in order, the second stage of a rank in small letters, and dots where none is."""
    schedule = make(name, 3, 6, 2 if name == "interleaved" else None)
    with mock.patch.object(pipeline, "WIDTH", 200):
        picture = pipeline.picture(name, schedule)
    rows = re.findall(r"^  rank \d: +((?:[FBIWfbiw]\d[ =]*|\. *)+)$", picture, re.MULTILINE)
    works, lasts = map(int, re.search(r"works for (\d+) units of (\d+):", picture).groups())
    for row, actions in zip(rows, schedule.ranks, strict=True):
        upper = min(stage for stage, _, _ in actions)
        assert re.findall(r"[A-Za-z]\d", row) == [
            f"{kind if stage == upper else kind.lower()}{i}" for stage, kind, i in actions]
        assert row.count(".") == lasts - works


@pytest.mark.parametrize("n", [2, 8])
def test_a_deadlock_is_explained(ranks, capsys, n):
    """Every rank's stack ends in a wait, for the rank before it, and these make a cycle of all ranks."""
    ranks.run(n, show, "deadlock")
    text = capsys.readouterr().out
    stands = re.findall(r"line (\d+), in play: (.*)\n +waits for rank (\d+): receive (\d+)F0\n", text)
    assert [(int(whom), int(layer)) for _, _, whom, layer in stands] == [((r - 1) % n, (r - 1) % n) for r in range(n)]
    source = Path(deadlock.__file__).read_text().splitlines()
    assert all(source[int(line) - 1].strip() == code and code.endswith(".wait()") for line, code, _, _ in stands)
    others = "".join(f", which waits for rank {rank}" for rank in range(n - 2, -1, -1))
    assert f"rank 0 waits for rank {n - 1}{others}." in " ".join(text.split())


# ---- the checks can fail --------------------------------------------------------------------------------------------

DEMO = "shardlab.demos."


@pytest.mark.parametrize("name, said, bug", [
    ("collectives", "the ring", Bug(f"{DEMO}collectives", "pieces[incoming] += arrived", "pieces[incoming] = arrived")),
    ("mlp", "dX", Bug(f"{DEMO}layer_case", "self.dy[held].copy()", "2 * self.dy[held]")),
    ("attention", "every weight's gradient", Bug("mpi_impl.layers.attention", "sink(grads.w_out, context, dy)",
                                                 "sink(grads.w_out, context, 2 * dy)")),
    ("llama", "every weight's gradient", Bug(f"{DEMO}llama", 'all_reduce(dw_kv, "gradients of copies")',
                                             'all_reduce(dw_kv.copy(), "gradients of copies")')),
    ("embedding", "every word's gradient", Bug("mpi_impl.layers.embedding", "lookup_backward(dx * held[..., None],",
                                               "lookup_backward(dx,")),
    ("cross_entropy", "the first one by hand", Bug(f"{DEMO}cross_entropy", "- own.start)", ")")),
    ("sequence_parallel", "every weight's gradient", Bug(f"{DEMO}sequence_parallel", "if tensor.split is None:",
                                                         "if False:")),
    ("sequence_parallel", "what is sent", Bug("mpi_impl.comm.regions", 'f"{reason}, again"', "reason")),
    ("context_parallel", "attention in a ring", Bug("mpi_impl.layers.context_attention", "else merge(before, partial)",
                                                    "else merge(before, before)")),
    ("context_parallel", "every gradient", Bug("mpi_impl.layers.context_attention", "dkv += others", "pass")),
    ("pipeline", "activations kept", Bug("mpi_impl.parallel.passes",
                                         "self.caches.pop((action.stage, action.microbatch))",
                                         "self.caches[action.stage, action.microbatch]")),
    ("stale_weights", "losses", Bug("mpi_impl.parallel.stale_weights", "self.versions.move(grads, self.lr)",
                                    "self.versions.move(grads, 0.9 * self.lr)")),
    ("zero", "numbers sent", Bug(f"{DEMO}zero", '("gradients", "parameters")', '("gradients",)')),
    ("experts", "every weight's gradient", Bug(f"{DEMO}experts", "ranks.all_reduce(found.grads.router, ",
                                    "ranks.all_reduce(found.grads.router.copy(), ")),
    ("deadlock", "the cycle", Bug(f"{DEMO}deadlock", "enumerate(everyone)", "enumerate(everyone[::-1])")),
    ("train", "every loss", Bug(f"{DEMO}tiny_gpt", "samples_of(replica, k", "samples_of(0, k")),
])
def test_the_check_can_fail(ranks, capsys, name, said, bug):
    """A fault in a layer, a region or the demo raises AssertionError, which names what differs, and no check passes."""
    options = "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1" if name == "train" else ""
    with pytest.raises(RankAssertion, match=f"{said} (differs from|has shape)"):
        ranks.run(3, planted_run, bug, show, name, options, timeout=120)
    assert CHECKED not in capsys.readouterr().out


# ---- options --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, options, said", [
    ("collectives", "--elements 4", "number of ranks is 3, but must divide --elements"),
    ("collectives", "--elements 100000000000", "--elements is 100,000,000,000, but a demo holds everything twice"),
    ("attention", "--num-attention-heads -3", "--num-attention-heads is -3"),
    ("embedding", "--sentence=", "There is no word in --sentence"),
    ("pipeline", "--schedule forward-only", "invalid choice: 'forward-only'"),
    ("pipeline", "--microbatches 1000000", "at most 250,000"),
    ("pipeline", "--schedule interleaved --microbatches 4", "m = 4 is not a multiple of 3"),
    ("zero", "--microbatches 1000000", "Choose at most 1,000."),
    ("train", "--tensor-model-parallel-size 2", "must be a multiple of 2, but it is 3"),
    ("memory", "--output LICENSE/memory.png", "LICENSE is a file"),
    ("mlp", "--no-such-thing 1", "shardlab.demos.mlp has no option --no-such-thing"),
])
def test_a_wrong_option_gets_a_sentence(ranks, capsys, name, options, said):
    """Nothing is printed besides."""
    assert said in ranks.run(3, refusal, show, name, options)[0]
    assert capsys.readouterr().out == ""


def test_the_program():
    """Started as the README says it kills no rank, and prints nothing on stderr."""
    done = launch(2, "-m", "shardlab.demos.deadlock")
    assert (done.returncode, done.stderr) == (0, "") and f"\n{CHECKED}" in done.stdout


def test_the_list_has_every_demo(capsys):
    """Each demo has a line of its own, and no other module has one."""
    listing.main([])
    lines = capsys.readouterr().out.splitlines()
    named = dict(line.split(maxsplit=1) for line in lines[:lines.index("")])
    folder = Path(deadlock.__file__).parent
    assert {*named} == {path.stem for path in folder.glob("*.py") if "\ndef show(" in path.read_text()}
    assert named["mlp"] == "The transformer's MLP, sharded over all ranks" and all(named.values())


def test_the_list_starts_no_ranks():
    """It does not start MPI, either; for a word that is not a demo it names the closest demo."""
    done = command("-c", "import sys; from shardlab.demos.__main__ import main; main([]); print(*sys.modules)")
    assert done.returncode == 0 and "pipeline" in done.stdout and "mpi4py" not in done.stdout, done.stderr
    one = command("-m", "shardlab.demos", "deadlock")
    assert one.returncode == 0 and one.stdout.startswith(deadlock.__doc__.splitlines()[0])
    wrong = command("-m", "shardlab.demos", "deadlok")
    assert wrong.returncode == 2 and wrong.stdout == "" and "Did you mean deadlock?" in wrong.stderr
