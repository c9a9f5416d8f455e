"""The demos that train, or deadlock: on any number of ranks their output is right, and their checks detect faults."""
import re
from importlib import import_module
from pathlib import Path
from unittest import mock

import pytest

from mpi_impl import demos
from mpi_impl.demos import __main__ as listing, deadlock, train, zero
from mpi_impl.demos.tiny_gpt import POSITIONS, tiny_gpt
from mpi_impl.launching.pool import RankAssertion, RankFailure
from reference.costs.parameters import parameters
from reference.schedules.actions import from_csv
from reference.schedules.generators import SCHEDULES, make
from reference.schedules.simulate import activations_in_flight
from tests.launching import command, launch
from tests.planted import Bug, planted_run

CHECKED = "The check against reference/, which computes everything whole, in one process: "
SOON = 0.2      # seconds until a deadlock is looked at


def show(group, name, argv=()):
    """Run a demo. It looks at a deadlock sooner than a person would like."""
    with mock.patch.object(deadlock, "PATIENCE", SOON):
        import_module(f"mpi_impl.demos.{name}").show(group, list(argv))


def output_of(ranks, capsys, n, name, *argv) -> str:
    """Return the output of a demo on n ranks, in which all ranks' lines are in order; no line is too long for a screen,
    except the last one, which is the check's.
    """
    ranks.run(n, show, name, argv)
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert not [line for line in lines if len(line) > 120]
    check = next(at for at, line in enumerate(lines) if line.startswith("The check against"))
    lines, last = lines[:check], " ".join(lines[check:])
    who = [int(match[1]) for line in lines if (match := re.match(r"  rank (\d+): ", line))]
    assert who == list(range(n)) * (len(who) // n) and who
    assert last.startswith(CHECKED) and f"are the same on {n} rank" in last
    return text


def of_ranks(text, pattern):
    """Return the groups of a pattern in the ranks' lines, for each line in which it is found."""
    said = re.findall(r"^  rank \d+: +(.*)$", text, re.MULTILINE)
    return [match.groups() for one in said if (match := re.search(pattern, one))]


def number(text):
    return int(text.replace(",", ""))


# ---- pipeline -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [1, pytest.param(2, marks=pytest.mark.deep), 3, pytest.param(8, marks=pytest.mark.deep)])
def test_a_pipeline(ranks, capsys, p):
    """Layers and parameters tile the model; the order is the schedule; 1F1B's memory and bubble are the papers'."""
    m = min(p + 2, 8)
    text = output_of(ranks, capsys, p, "pipeline")
    assert of_ranks(text, r"layer (\d+)") == [(str(rank),) for rank in range(p)]
    held = [number(found) for found, in of_ranks(text, r"([\d,]+) parameters")]
    assert sum(held) == parameters(tiny_gpt(p))
    done = [found for found, in of_ranks(text, r"^((?:\d+[FB]\d+ ?)+)$")]
    assert from_csv("\n".join(",".join(row.split()) for row in done)) == make("1f1b", p, m)
    assert of_ranks(text, r"kept (\d+) \(predicted: (\d+)\)") == [(str(min(p - r, m)),) * 2 for r in range(p)]
    sends = of_ranks(text, r"(\d+|no) activations(?: to rank (\d+))?  +(\d+|no) gradients(?: to rank (\d+))?")
    assert sends == [(*((str(m), str(r + 1)) if r < p - 1 else ("no", None)),
                      *((str(m), str(r - 1)) if r > 0 else ("no", None))) for r in range(p)]
    assert f"every time b s h = {2 * POSITIONS * 8} numbers, {2 * POSITIONS * 8 * 8} bytes" in text
    assert f"idle / ideal time is {(p - 1) / m:.3g}. The formula: (p-1)/m = {(p - 1) / m:.3g}." in text


def test_what_scatter_and_gather_save(ranks, capsys):
    """Two stages of 2 ranks, m = 4: a stage sends 4 activations or gradients, of b s h numbers or of half of them on
    each rank; and each rank sends the half that it has received to its one neighbour.
    """
    text, whole = output_of(ranks, capsys, 4, "pipeline"), 4 * 2 * POSITIONS * 8 * 8
    found = of_ranks(text, r"whole: ([\d,]+) bytes to other stages +scattered: ([\d,]+) bytes .*, +([\d,]+) inside")
    assert [tuple(map(number, one)) for one in found] == [(whole, whole // 2, whole // 2)] * 4


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "forward-only"])
def test_any_schedule(ranks, capsys, name):
    """The ranks follow the schedule, and the picture shows every action of it once, and dots where none is."""
    p, m = 3, 6
    text = output_of(ranks, capsys, p, "pipeline", "--schedule", name, "--microbatches", str(m))
    schedule = make(name, p, m, 2 if name == "interleaved" else None)
    done = [found.split() for found, in of_ranks(text, r"^((?:\d+[FBIW]\d+ *)+(?:\.\.\.)?)$")]
    for row, actions in zip(done, schedule.ranks, strict=True):
        named = list(map(str, actions))
        assert row == named or row[-1] == "..." and row[:-1] == named[:len(row) - 1]
    assert of_ranks(text, r"kept (\d+) ") == [(str(most),) for most in activations_in_flight(schedule)]
    drawn = of_ranks(text, r"^((?:[FBIWfbiw]\d[ =]*|\. *)+)$")
    works, lasts = re.search(r"works for (\d+) units of (\d+):", text).groups()
    for (row,), actions in zip(drawn, schedule.ranks, strict=True):
        assert re.findall(r"[A-Z]\d", row.upper()) == [f"{kind}{i}" for _, kind, i in actions]
        assert row.count(".") == int(lasts) - int(works)
        upper = min(stage for stage, _, _ in actions)
        assert [letter.isupper() for letter in re.findall(r"[A-Za-z]", row)] == [a.stage == upper for a in actions]


# ---- ZeRO -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, pytest.param(2, marks=pytest.mark.deep), 3, pytest.param(8, marks=pytest.mark.deep)])
def test_zero(ranks, capsys, n):
    """At every stage the ranks' own pieces tile the buffer; bytes and messages are the paper's formulas."""
    m = 3
    text = output_of(ranks, capsys, n, "zero", "--microbatches", str(m))
    lines = of_ranks(text, r"owns ((?:\d+-\d+ ?)+) +holds ([\d,]+) \+ ([\d,]+) \+ ([\d,]+) = ([\d,]+)$")
    rows = [line.split() for line in text.splitlines() if re.match(r" +\d  +[\d,]+  ", line)]
    assert len(lines) == 4 * n and [row[0] for row in rows] == ["0", "1", "2", "3"]
    least, table = parameters(tiny_gpt(zero.LAYERS)), (12 + POSITIONS) * 8
    for stage, row in enumerate(rows):
        here, psi = lines[stage * n:][:n], number(row[1])
        assert least <= psi < least + 6 * n
        parts = [[tuple(map(int, part.split("-"))) for part in own.split()] for own, *_ in here]
        owned = [i for own in (parts if stage else parts[:1]) for first, last in own for i in range(first, last + 1)]
        assert sorted(owned) == list(range(psi))
        cut = [1 if stage < 3 else n, 1 if stage < 2 else n, 1 if stage < 1 else n]
        held = [8 * psi // cut[0], 8 * psi // cut[1], 16 * psi // cut[2]]
        assert [list(map(number, line[1:])) for line in here] == [[*held, sum(held)]] * n
        assert number(row[2]) == sum(held)
        padded = sum(-(-size // n) * n for size in (12 * 8, POSITIONS * 8)) if stage == 3 else table
        sent = [2 * psi, 2 * psi, (m + 1) * psi, 3 * m * psi - m * padded][stage] * (n - 1) / n
        found = [number(cell) for before, cell in zip(row, row[1:]) if before == "="]
        assert found == [sum(held), round(sent)] and "NOT" not in row


# ---- a deadlock -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3, 8])
def test_a_deadlock(ranks, capsys, n):
    """Every rank's stack ends in a wait; the cycle has all ranks, and is the textbook's."""
    text = output_of(ranks, capsys, n, "deadlock")
    stands = re.findall(r"line (\d+), in play: (.*)\n +waits for rank (\d+): receive (\d+)F0\n", text)
    assert [(int(whom), int(layer)) for _, _, whom, layer in stands] == [((r - 1) % n, (r - 1) % n) for r in range(n)]
    source = Path(deadlock.__file__).read_text().splitlines()
    assert all(source[int(line) - 1].strip() == code and code.endswith(".wait()") for line, code, _, _ in stands)
    words = " ".join(text.split())
    circle = [0, *range(n - 1, -1, -1)]
    assert f"rank 0 waits for {', which waits for '.join(f'rank {rank}' for rank in circle[1:])}." in words
    assert "; ".join(f"rank {r} waits for {(r - 1) % n}F0 of rank {(r - 1) % n}" for r in circle[:-1]) in words
    assert text.index("They start") < text.index("in play") < text.index("All came to the end")
    lists = of_ranks(text, r"^((?:\d+F0(?:[<>]\d+)? ?)+)$")
    assert len(lists) == 2 * n and lists[0] != lists[n] and lists[1:n] == lists[n + 1:]


def test_one_rank_has_nobody_to_wait_for(ranks, capsys):
    ranks.run(1, show, "deadlock")
    assert "A single rank has nobody to wait for" in capsys.readouterr().out


def test_a_deadlock_ends_well():
    """Started as in the README, it kills no rank, and prints nothing on stderr."""
    done = launch(4, "-m", "mpi_impl.demos.deadlock")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"\n{CHECKED}" in done.stdout


@pytest.mark.parametrize("waits_for, circle", [([1, 2, 0], [0, 1, 2]), ([2, 0, 1], [0, 2, 1]), ([1, 2, 1], [1, 2])])
def test_a_cycle_of_waits(waits_for, circle):
    """Following the waits leads to it, also from outside."""
    assert deadlock.circle_of(waits_for) == circle


# ---- training -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n, argv, sizes", [
    (1, "", (1, 1, 1)), (3, "", (3, 1, 1)), (8, "", (2, 2, 2)),
    *(pytest.param(*more, marks=pytest.mark.deep) for more in [
        (2, "", (2, 1, 1)), (8, "--pipeline-model-parallel-size 4", (2, 4, 1)),
        (3, "--tensor-model-parallel-size 1", (1, 3, 1)),
        (2, "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1", (1, 1, 2)),
    ]),
])
def test_training(ranks, capsys, n, argv, sizes):
    """Places, layers, heads and samples tile the whole; ranks and textbook have the same losses, which fall."""
    t, p, d = sizes
    text = output_of(ranks, capsys, n, "train", *argv.split())
    assert f"= t x p x d = {t} x {p} x {d}." in text
    found = of_ranks(text, r"t (\d+), p (\d+), d (\d+): .*?layers? (\d+)(?: to (\d+))?.*? heads? (\d+)(?: to (\d+))?"
                           r" .*samples ([\d ]+?)  +[\d,]+ parameters")
    held = {}
    for row in found:
        place = tuple(map(int, row[:3]))
        layers, heads = (range(int(first), int(last or first) + 1) for first, last in (row[3:5], row[5:7]))
        held[place] = {(layer, head, sample) for layer in layers for head in heads for sample in row[7].split()}
    assert [*held] == [(r % t, r // (t * d), r // t % d) for r in range(n)]      # Megatron's order
    whole = set.union(*held.values())
    assert sum(map(len, held.values())) == len(whole)
    assert {sample for _, _, sample in whole} == {str(i) for i in range(4 * d)}
    assert {layer for layer, _, _ in whole} == set(range(-(-4 // p) * p))
    losses = re.findall(r"^ +(\d+) +(\d\.\d{10}) +(\d\.\d{10}) +\de[+-]\d\d$", text, re.MULTILINE)
    assert [step for step, _, _ in losses] == [str(i + 1) for i in range(10)]
    assert all(ours == theirs for _, ours, theirs in losses) and float(losses[-1][1]) < float(losses[0][1]) - 1
    rows = [line for line in text.splitlines() if re.match(r"(t|p|d|t x p) ranks  ", line)]
    assert len(rows) >= 4 and all("= " in row and "NOT" not in row for row in rows)


def test_sizes_are_as_equal_as_fits():
    """They are the given ones, where those fit."""
    for n, sizes in {1: (1, 1), 4: (2, 2), 6: (3, 2), 7: (7, 1), 12: (3, 2), 16: (4, 2)}.items():
        assert train.sizes(n, None, None) == sizes
    assert train.sizes(8, 1, None) == (1, 4) and train.sizes(8, None, 1) == (4, 1) and train.sizes(8, 8, None) == (8, 1)
    assert train.sizes(8, 3, None) == (3, 1)


def test_training_ends_well():
    """Started as the README says."""
    done = launch(4, "-m", "mpi_impl.demos.train", "--train-iters", "2")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"\n{CHECKED}" in done.stdout


# ---- what is wrong --------------------------------------------------------------------------------------------------

BACKWARD = Bug("mpi_impl.parallel.sinks", "accumulate(grad, x, dy)", "accumulate(grad, x, 2 * dy)")
KEPT = Bug("mpi_impl.parallel.passes", "self.caches.pop((action.stage, action.microbatch))",
           "self.caches[action.stage, action.microbatch]")
CIRCLE = Bug("mpi_impl.demos.deadlock", "return seen[seen.index(rank):]", "return seen[:-1]")
SUM = Bug("mpi_impl.parallel.data_parallel",
          "post_all_reduce(flat, reason_of(bucket))", 'post_all_reduce(flat.copy(), "gradients")')
OFFSET = Bug("mpi_impl.parallel.zero", "def post(self, bucket: Bucket, flat) -> Pending:\n"
             "        own = self.own.load(self.layout.owned_piece(bucket, self.group.rank))",
             "def post(self, bucket: Bucket, flat) -> Pending:\n"
             "        own = self.own.load(self.layout.owned_piece(bucket, 0))")
G = Bug("mpi_impl.comm.mappings", "return self.group.all_reduce(partial, reason)", "return partial")


@pytest.mark.parametrize("name, bug, sentence", [
    ("pipeline", BACKWARD, "norm of the gradient differs"),
    ("pipeline", KEPT, "activations kept differs"),
    ("zero", SUM, "norm of the gradient differs"),
    ("zero", OFFSET, "loss differs|norm of the gradient differs|every weight differs"),
    ("zero", Bug("mpi_impl.demos.zero", "zero_stage=stage", "zero_stage=max(stage - 1, 0)"), "bytes held differs"),
    ("zero", Bug("mpi_impl.demos.zero", '("gradients", "parameters")', '("gradients",)'), "numbers sent differs"),
    ("train", G, "every loss differs"),
    ("train", Bug("mpi_impl.demos.tiny_gpt", "samples_of(replica, k", "samples_of(0, k"), "every loss differs"),
    ("deadlock", CIRCLE, "the cycle has shape"),
    ("deadlock", Bug("mpi_impl.demos.deadlock", "group.post_send(x, to", "group.post_send(2 * x, to"), "loss differs"),
])
def test_the_check_can_fail(ranks, name, bug, sentence):
    """A fault on the ranks raises AssertionError, and no line says that all is right."""
    options = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 1".split() if name == "train" else []
    with pytest.raises(RankAssertion, match=sentence) as failed:
        ranks.run(4, planted_run, bug, show, name, options)
    assert CHECKED not in str(failed.value)


@pytest.mark.parametrize("name, argv, sentence", [
    ("pipeline", "--schedule forward-only", "invalid choice: 'forward-only'"),
    ("pipeline", "--schedule 1f2b", "Did you mean 1f1b"),
    ("pipeline", "--microbatches 1000000", "forwards, but may have at most 250,000"),
    ("zero", "--microbatches 1000000", "forwards, but may have at most 250,000"),
    ("train", "--train-iters 1000000000", "--train-iters is 1,000,000,000, but must be at most 100,000,000"),
    ("pipeline", "--microbatches 0", "--microbatches is 0, but must be at least 1"),
    ("pipeline", "--schedule interleaved --microbatches 3", "m = 3 is no multiple of 2"),
    ("zero", "--microbatches 0", "--microbatches is 0, but must be at least 1"),
    ("deadlock", "--patience 3", "has no option --patience"),
    ("train", "--tensor-model-parallel-size 3", "the number of ranks must be a multiple of 3, but it is 2"),
    ("train", "--pipeline-model-parallel-size 0", "--pipeline-model-parallel-size is 0, but must be at least 1"),
    ("train", "--train-iters 0", "--train-iters is 0, but must be at least 1"),
])
def test_a_wrong_option_gets_a_sentence(ranks, capsys, name, argv, sentence):
    """Nothing is printed besides."""
    with pytest.raises(RankFailure, match=f"UserError: .*{re.escape(sentence)}"):
        ranks.run(2, show, name, argv.split())
    assert capsys.readouterr().out == ""


# ---- the list -------------------------------------------------------------------------------------------------------


def test_the_list_has_every_demo(capsys):
    """Each demo has a line of its own, and no other module has one."""
    listing.main([])
    lines = capsys.readouterr().out.splitlines()
    named = dict(line.split(maxsplit=1) for line in lines[:lines.index("")])
    folder = Path(demos.__file__).parent
    assert {*named} == {path.stem for path in folder.glob("*.py") if "\ndef show(" in path.read_text()}
    assert named["mlp"] == "The transformer's MLP, sharded over all ranks" and all(named.values())
    assert not [title for title in named.values() if "`" in title or title.endswith(".")]


def test_the_list_starts_no_ranks():
    """It does not start MPI, either; for a word that is no demo it names the closest demo."""
    done = command("-c", "import sys; from mpi_impl.demos.__main__ import main; main([]); print(*sys.modules)")
    assert done.returncode == 0 and "pipeline" in done.stdout and "mpi4py" not in done.stdout, done.stderr
    one = command("-m", "mpi_impl.demos", "deadlock")
    assert one.returncode == 0 and one.stdout.startswith((deadlock.__doc__ or "").splitlines()[0])
    wrong = command("-m", "mpi_impl.demos", "deadlok")
    assert wrong.returncode == 2 and wrong.stdout == "" and "Did you mean deadlock?" in wrong.stderr
