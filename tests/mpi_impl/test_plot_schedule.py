"""The command draws the schedules of its options, and prints the simulator's results."""
import re
import subprocess
import sys

import pytest

from mpi_impl.plot_schedule import TimeOptions, main, times
from mpi_impl.reports.timelines import gantt
from mpi_impl.reports.timelines.timelines import slices_of
from reference.errors import UserError
from reference.schedules.actions import Action, to_csv
from reference.schedules.generators import SCHEDULES, make
from reference.schedules.simulate import Times, activations_in_flight, simulate

LINE = re.compile(r"(.*): makespan (\S+), bubble (\S+) \(idle / ideal time\), stages' activations in flight (.*)")


@pytest.fixture
def plot(monkeypatch, tmp_path, capsys):
    """Return a function that runs the command, and returns the fields of its lines, and its panels."""
    def run(*arguments):
        panels = []
        monkeypatch.setattr(gantt, "draw_timelines", lambda path, drawn, seconds: panels.extend(drawn))
        main([*arguments, "--output", "picture.png"])
        *lines, last = capsys.readouterr().out.splitlines()
        assert last == "schedules drawn in picture.png"
        return [LINE.fullmatch(line).groups() for line in lines], panels
    monkeypatch.chdir(tmp_path)
    return run


def test_the_printed_numbers_are_the_simulators(plot):
    """By hand: each of a rank's v stages takes 1/v of the rank's time; the panels show those timelines."""
    lines, panels = plot(*"--schedule 1f1b --schedule interleaved -p 3 -m 6 -v 2".split(),
                         *"--forward 4 --input-gradient 5 --weight-gradient 3 --communication 0.25".split())
    for line, panel, name, schedule, t in zip(
            lines, panels, ("1f1b, p = 3, m = 6", "interleaved, p = 3, m = 6, v = 2"),
            (make("1f1b", 3, 6), make("interleaved", 3, 6, 2)), (Times(4, 5, 3, 0.25), Times(2, 2.5, 1.5, 0.25)),
            strict=True):
        timeline = simulate(schedule, t)
        assert line == (name, f"{timeline.makespan:.4g}", f"{timeline.bubble_fraction:.4g}",
                        " ".join(map(str, activations_in_flight(schedule))))
        assert panel == (name, slices_of(timeline))


@pytest.mark.parametrize("name", SCHEDULES)
def test_all_ranks_take_the_time_of_their_layers(name):
    """For any placement a microbatch takes F + I + W on each rank; F alone where there is no backward."""
    schedule = make(name, 4, 8, 2 if name == "interleaved" else None)
    t = times(schedule, TimeOptions(forward=2.0, input_gradient=3.0, weight_gradient=5.0, communication=0.5))
    for actions in schedule.ranks:
        whole = 10 if any(action.kind != "F" for action in actions) else 2
        assert sum(map(t.of, actions)) == pytest.approx(8 * whole)
    assert t.communication == 0.5


def test_the_default_is_1f1b_with_unit_times(plot):
    lines, _ = plot()
    assert lines == [("1f1b, p = 4, m = 8", "33", "0.375", "4 3 2 1")]      # (m + p - 1)(F + I + W), (p - 1) / m


def test_v_goes_to_those_that_take_it(plot):
    lines, panels = plot("--schedule", "gpipe", "--schedule", "forward-only", "--schedule", "interleaved", "-v", "3")
    assert [line[0] for line in lines] == [panel.name for panel in panels] == [
        "gpipe, p = 4, m = 8", "forward-only, p = 4, m = 8, v = 3", "interleaved, p = 4, m = 8, v = 3"]


def test_a_schedule_from_csv_is_the_schedule(plot, tmp_path):
    """It is drawn below the named ones, identical to the same schedule by name; an empty last line is no rank."""
    (tmp_path / "mine.csv").write_text(to_csv(make("zb-h1", 3, 5)) + "\n\n")
    (named, mine), panels = plot("--schedule", "zb-h1", "-p", "3", "-m", "5", "--csv", "mine.csv")
    assert mine == ("mine.csv, p = 3, m = 5", *named[1:])
    assert panels[0].ranks == panels[1].ranks
    alone, _ = plot("--csv", "mine.csv")
    assert alone == [mine]


def test_a_rank_with_more_stages_does_them_in_less_time_each(plot, tmp_path):
    """Three stages on two ranks, 0 and 2 on the first: each of those takes half of what stage 1 takes."""
    (tmp_path / "uneven.csv").write_text("0F0,2F0,2B0,0B0\n1F0,1B0\n")
    (line,), (panel,) = plot("--csv", "uneven.csv", "--forward", "2", "--input-gradient", "4", "--weight-gradient", "4")
    assert line == ("uneven.csv, p = 2, m = 1", "20", "1", "2 1")
    assert {s.name: s.end - s.start for slices in panel.ranks for s in slices} == {
        "0F0": 1, "1F0": 2, "2F0": 1, "2B0": 4, "1B0": 8, "0B0": 4}


@pytest.mark.parametrize("arguments, sentence", [
    ("--schedule 1f1b -v 2", r"-v is 2, but the number of stages on a rank is no choice with 1f1b"),
    ("--schedule interleaved", r"needs -v"),
    ("--schedule interleaved -v 2 -m 7", r"m = 7 is no multiple of 4"),
    ("-p 0", r"ranks p is 0"),
    ("--forward 0", r"--forward is 0, but must be a time from 1e-9"),
    ("--weight-gradient -1", r"--weight-gradient is -1, but must be"),
    ("--input-gradient nan", r"--input-gradient: nan is not a finite number"),
    ("--communication inf", r"--communication: inf is not a finite number"),
    ("--schedule 2f2b", r"invalid choice: '2f2b'"),
    ("--forwards 1", r"Did you mean --forward\?"),
    ("--csv none.csv", r"none.csv cannot be read: No such file"),
    ("--csv binary.csv", r"binary.csv is not UTF-8 text"),
    ("--csv long.csv", r"--csv long.csv holds no schedule. '0F9999.*' is not an action"),
    ("-p 100000 -m 8", r"pipeline ranks p is 100,000, but must be at most 1,000"),
    ("-m 100000", r"has p v m = 400,000 forwards, but may have at most 250,000"),
    ("--schedule interleaved -v 100000000000000", r"has p v m = 3,200,000,000,000,000 forwards"),
    ("--schedule interleaved -v 10000000000000000000", r"-v: 10000000000000000000 has more than 15 digits"),
    ("--output table.txt", r"--output is 'table.txt', but must be a file that ends in .png, .pdf, .svg"),
    ("--csv word.csv", r"--csv word.csv holds no schedule. 'forward' is not an action"),
    ("--csv empty.csv", r"--csv empty.csv has an empty line or none"),
    ("--csv gap.csv", r"--csv gap.csv has an empty line or none"),
    ("--csv circle.csv", r"(?s)--csv circle.csv holds a schedule that cannot run. 1B0 comes before.*>1B0< >1F0<"),
    ("--output no/picture.png", r"no/picture.png cannot be written: No such file"),
])
def test_a_wrong_option_gets_a_sentence(tmp_path, monkeypatch, capsys, arguments, sentence):
    """Nothing is printed or written besides."""
    monkeypatch.chdir(tmp_path)
    files = {"binary.csv": b"\xff\xfe\x00", "word.csv": b"0F0,forward\n", "empty.csv": b"\n",
             "long.csv": b"0F" + b"9" * 5000, "gap.csv": b"0F0,0B0\n\n1F0,1B0\n", "circle.csv": b"0F0,0B0\n1B0,1F0\n"}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError, match=sentence):
        main(arguments.split())
    assert capsys.readouterr().out == "" and {path.name for path in tmp_path.iterdir()} == set(files)


def test_the_program(tmp_path):
    """A process of its own, without MPI: a PNG and status 0, or a sentence and status 2."""
    def run(*arguments):
        code = ("import runpy, sys; sys.modules['mpi4py'] = None\n"
                "runpy.run_module('mpi_impl.plot_schedule', None, '__main__')")
        return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60)
    done = run("-p", "2", "-m", "2", "--output", str(tmp_path / "picture.png"))
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("1f1b, p = 2, m = 2: makespan 9,")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    wrong = run("-m", "0")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr == "error: microbatches m is 0, but must be at least 1.\n"


def test_a_stage_is_known_by_its_number():
    """Stages that stand in a V have their own times too: stage 7 of zb-v on 4 ranks is on rank 0."""
    t = times(make("zb-v", 4, 8), TimeOptions(forward=1.0, input_gradient=1.0, weight_gradient=2.0, communication=0.0))
    assert t.of(Action(7, "F", 0)) == 0.5 and t.of(Action(7, "W", 0)) == 1.0
