"""`shardlab` starts what `python -m` starts, says what it does not know, completes at a key, and finds out what is
missing on any machine, however broken.
"""
import importlib
import os
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from mpi_impl.launch import launcher, mps
from mpi_impl.launch.option_fields import declared
from mpi_impl.runtime.advice import typed
from mpi_impl.runtime.mpis import MPICH
from reference.config import option
from shardlab import command as front_door, doctor
from shardlab.command import COMMANDS, PROGRAMS, Module, program_of
from shardlab.completion import parser_of
from shardlab.demos import DEMOS
from shardlab.evaluate import tasks as evaluation
from shardlab.generate.options import GenerationOptions
from shardlab.programs.settings import parse
from shardlab.prove.options import KINDS
from tests.base_install import BLOCKER, base_environment
from tests.deep import one_fast_of
from tests.launching import MPI, ROOT, SOON, command, environment, write_program, write_script

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def without(folder: Path, *modules: str) -> dict[str, str]:
    """Return the environment variables of a Python that lacks these modules."""
    (folder / "sitecustomize.py").write_text(BLOCKER.format(blocked=set(modules)))
    return {"PYTHONPATH": f"{folder}:{ROOT}"}


# ---- commands -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("line, n, module", [
    ("run -n 8 pretrain_gpt --bf16 -n 7", 8, "mpi_impl.pretrain_gpt --bf16 -n 7"),
    ("run -n 2 -m shardlab.demos.mlp --timeout 0", 2, "shardlab.demos.mlp --timeout 0"),
    ("demos mlp -n 3 --hidden-size 12", 3, "shardlab.demos.mlp --hidden-size 12"),
    ("generate --load F --greedy", 1, "shardlab.generate --load F --greedy"),
    ("evaluate --task race -n 2 --load F", 2, "shardlab.evaluate --task race --load F"),
    ("microshard -n 8 --t 2", 8, "microshard --t 2"),
])
def test_a_command_starts_a_program_on_ranks(line, n, module):
    program = program_of(line.split())
    assert (program.n, program.module, program.script) == (n, module.split(), [])


@pytest.mark.parametrize("line, name", [("plan --num-gpus 8", "shardlab.plan"), ("labs", "course.grading.release"),
                                        ("demos", "shardlab.demos")])
def test_a_command_runs_a_program_of_one_process(line, name):
    assert program_of(line.split()) == Module(name, line.split()[1:])
    assert importlib.util.find_spec(name) is not None


@pytest.mark.parametrize("line, name, words", [
    ("evaluate -n 2 --task race --help", "shardlab.evaluate", "--task race --help"),
    ("run -n 8 pretrain_gpt -h", "mpi_impl.pretrain_gpt", "-h")])
def test_the_help_of_a_program_starts_no_ranks(line, name, words):
    assert program_of(line.split()) == Module(name, words.split())


@pytest.mark.parametrize("line, n", [("microshard.py --help", 1), ("-m a.b -h", 1), ("microshard.py --t 2", 8)])
def test_the_help_of_a_file_or_a_module_is_that_of_one_rank(line, n, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert program_of(["run", "-n", "8", *line.split()]).n == n


@pytest.mark.parametrize("line", ["-n 8 --timeout 5 --hostfile h --max-restarts 2 p.py -n 3", "-n 1 -m a.b -m c"])
def test_the_options_before_a_program_are_those_of_the_launcher(line):
    assert vars(program_of(["run", *line.split()])) == vars(launcher.parse_options(line.split()))


def test_no_program_has_an_option_of_the_launcher():
    """So that the launcher's may stand anywhere."""
    kinds = (*KINDS.values(), GenerationOptions, *(task.options for task in evaluation.TASKS.values()))
    names = {option(name) for kind in kinds for name in declared(kind)}
    names |= {name for demo in DEMOS for name in parser_of(f"shardlab.demos.{demo}")._option_string_actions}
    assert len(names) > 100 and not names & {"--timeout", "--hostfile", "--max-restarts"}


def test_the_demo_has_options_that_eight_ranks_take():
    program = program_of(["demo", "--train-iters", "7"])
    assert program.n == 8 and program.module[:1] == ["mpi_impl.pretrain_gpt"]
    assert parse(program.module[1:], program.n).args.train_iters == 7
    assert "--hidden-size" not in (ROOT / "run.sh").read_text(), "The demo's options have one place."


@pytest.mark.parametrize("options, saves, kept", [
    ("", True, False), ("", False, True), ("--load runs/demo", True, True), ("--nope 1", False, True)])
def test_a_demo_that_saves_nothing_keeps_the_last_ones_checkpoint(options, saves, kept, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    old, new = (Path(front_door.RESULTS, f"iter_0000{step}") for step in (500, 100))
    tracker = Path(front_door.RESULTS, front_door.TRACKER)

    def demo(work):
        assert old.exists() == ("--load" in options)
        if saves:
            new.mkdir(exist_ok="--load" in options)
            tracker.write_text("100")
        return 1 - saves

    monkeypatch.setattr(front_door, "run_guarded", demo)
    monkeypatch.setenv("SHARDLAB_COMMAND", "")      # which act sets, and would leave behind
    old.mkdir(parents=True)
    tracker.write_text("500")
    for _ in range(2):
        with pytest.raises(SystemExit):
            front_door.act(["demo", *options.split()])
    assert old.exists() == kept and new.exists() == saves and tracker.read_text() == ("100" if saves else "500")
    assert not (tmp_path / front_door.RESULTS / front_door.ASIDE).exists()


@pytest.mark.parametrize("line, name", [
    ("demos mlp --nope", "shardlab demos mlp"), ("generate -n x", "shardlab generate")])
def test_a_program_has_the_name_that_was_typed(line, name):
    done = command("-m", "shardlab", *line.split())
    assert done.returncode == 2 and f"error: {name} " in done.stderr and "mpi_impl" not in done.stderr


@pytest.mark.parametrize("folder, path", [("bin", ""), ("", "bin/"), ("elsewhere", "{tmp_path}/bin/")])
def test_a_command_that_is_advised_can_be_typed_as_it_stands(folder, path, machine, tmp_path, monkeypatch):
    """In whatever folder it is printed, and whether or not the environment is on PATH: as it is in the first case."""
    write_script(machine / "tool", "echo it runs")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / folder)
    if path:        # the shell finds another one
        write_script(tmp_path / "other" / "tool", "echo another runs")
        monkeypatch.setenv("PATH", f"{tmp_path / 'other'}:{os.defpath}")
    assert typed("tool") == f"{path.format(tmp_path=tmp_path)}tool"
    assert subprocess.run(typed("tool"), shell=True, capture_output=True, check=True).stdout == b"it runs\n"


def test_what_pip_makes_is_this_command():
    module, _, function = PROJECT["scripts"]["shardlab"].partition(":")
    assert getattr(importlib.import_module(module), function) is front_door.main


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> str:
    """Make the command as run.sh does, in an environment whose name has a space."""
    venv = tmp_path_factory.mktemp("an environment")
    write_script(venv / "bin" / "python", f'exec {shlex.quote(sys.executable)} "$@"')
    subprocess.run(["bash", "-c", 'source ./run.sh help >/dev/null; venv="$1"; make_command', "-", venv], cwd=ROOT,
                   check=True, timeout=SOON)
    return str(venv / "bin" / "shardlab")


def test_the_command_of_run_sh_starts_ranks_from_any_folder(installed, tmp_path):
    """And ends with their status."""
    program = write_program(tmp_path, "print(world().size, sys.argv[1:]); sys.exit(3)")
    done = subprocess.run([installed, "run", "-n", "2", program.name, "-n", "7"], cwd=tmp_path, env=environment(),
                          capture_output=True, text=True, timeout=SOON)
    assert (done.stdout, done.returncode) == ("2 ['-n', '7']\n" * 2, 3)


def test_a_package_that_is_missing_is_a_sentence(tmp_path):
    done = command("-m", "shardlab", "plan", "--help", env=without(tmp_path, "numpy"))
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "shardlab.plan needs the package numpy, which is not installed" in done.stderr


def test_ranks_without_mpi4py_are_a_sentence(tmp_path):
    done = command("-m", "shardlab", "demos", "mlp", env=without(tmp_path, "mpi4py"))
    assert done.returncode == 2 and "Traceback" not in done.stderr and "has no mpi4py: start" in done.stderr


# ---- completion -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def script() -> str:
    return command("-m", "shardlab", "completion", "bash").stdout


ASK = 'COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _shtab_shardlab; printf "%s\\n" "${COMPREPLY[@]}"'


@pytest.mark.parametrize("line, expected", [
    ("shardlab ", [*COMMANDS]), ("shardlab la", ["labs"]), ("shardlab run -n 8 ", [*PROGRAMS]),
    ("shardlab run -n 8 pretrain_gpt --bf16 --data-path a b --tensor", ["--tensor-model-parallel-size"]),
    ("shardlab demos memory -n 4 --host", ["--hostfile"]), ("shardlab microshard --st", ["--steps"]),
    ("shardlab prepare --strict --tok", ["--tokenizer-type", "--tokenizer-model"]),
    ("shardlab evaluate -n 2 --task race --tune-lr", ["--tune-lr"]),
    ("shardlab demo --pipeline-schedule zb", ["zb-h1", "zb-h2", "zb-v"]),
])
def test_bash_gets_completions(script, line, expected):
    done = subprocess.run(["bash", "-c", f"{script}\n{ASK}", "-", *line.split(" ")], capture_output=True, text=True)
    assert sorted(done.stdout.split()) == sorted(expected), done.stderr


SPOILED = "raise SystemExit('this is not ours')"


def test_ranks_are_of_this_clone_whatever_the_current_folder_holds(installed, tmp_path):
    """Another clone of it there, and files with the names of Python's own modules."""
    for name in ("mpi_impl/__init__", "shardlab/command", "reference/__init__", "microshard", "random", "numbers"):
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(SPOILED)
    for line in ["--version", "demos mlp -n 2", "microshard -n 2 --help", "run -n 2 -m mpi_impl.launch.first_sum"]:
        done = subprocess.run([installed, *line.split()], cwd=tmp_path, env=os.environ, capture_output=True, text=True,
                              timeout=SOON)
        assert done.returncode == 0 and "not ours" not in done.stderr, line


@pytest.mark.parametrize("program", [["reference.py"], ["-m", "reference"]])
def test_a_users_program_finds_what_python_lets_it_find(installed, tmp_path, program):
    """A module next to it has precedence over Python's and ours, as without the launcher."""
    (tmp_path / "random.py").write_text("mine = True")
    (tmp_path / "reference.py").write_text("""if True:
        import sys, random
        here = [random.mine, __name__, __file__, sys.argv[1:], vars(sys.modules["__main__"]) is globals()]
        sys.stdout.write(f"{here} {sys.path}\\n")
    """)
    alone = subprocess.run([sys.executable, *program, "-x"], cwd=tmp_path, capture_output=True, text=True, timeout=SOON)
    ranks = subprocess.run([installed, "run", "-n", "2", *program, "-x"], cwd=tmp_path, capture_output=True, text=True,
                           timeout=SOON)
    assert alone.stdout and (ranks.stdout, ranks.returncode) == (2 * alone.stdout, 0)


def test_the_options_of_training_come_without_numpy_and_mpi(tmp_path):
    """No rank waits for another, and no library is imported that only a run needs."""
    line = "-m shardlab run -n 8 pretrain_gpt --help"
    done = command(*line.split(), env=without(tmp_path, "numpy", "mpi4py", "tokenizers", "msgspec"))
    assert (done.returncode, done.stderr) == (0, "") and "--tensor-model-parallel-size" in done.stdout


@pytest.mark.parametrize("line, status, output, errors", one_fast_of(2, [
    ("--lr x --help", 2, 0, 1), ("--help", 0, 1, 0)]))
def test_help_on_ranks_is_printed_once_and_so_is_a_mistake_before_it(line, status, output, errors):
    done = command("-m", "mpi_impl.launch", "-n", 2, "-m", "mpi_impl.pretrain_gpt", *line.split())
    assert done.returncode == status
    assert (done.stdout.count("usage: "), done.stderr.count("--lr: invalid")) == (output, errors), done.stderr


# ---- doctor ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Make a folder of programs, the only one on PATH, in which Python seems to be, here and in what it starts."""
    python = tmp_path / "bin" / "python"
    write_script(python, f'exec {shlex.quote(sys.executable)} "$@"')
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.executable = {str(python)!r}\n")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    monkeypatch.setattr(sys, "executable", str(python))
    return tmp_path / "bin"


def test_a_base_install_can_train(tmp_path):
    done = subprocess.run([sys.executable, "-m", "shardlab", "doctor"], env=base_environment(tmp_path),
                          capture_output=True, text=True, timeout=4 * SOON)
    assert done.returncode == 0 and done.stderr == "", done.stdout
    text = " ".join(done.stdout.split())
    for fact in ("no matplotlib, for pictures.", "ok Two ranks were started and added up 1 + 2 = 3.",
                 "pip install jupyterlab jupytext.", "Training works here."):
        assert fact in text, fact


def test_an_mpi_library_that_does_not_load_is_a_fault(machine, monkeypatch, tmp_path):
    (tmp_path / "libmpi.so").write_text("no library")
    monkeypatch.setenv("MPI4PY_LIBMPI", str(tmp_path / "libmpi.so"))
    found = doctor.mpi_library()
    assert found.state == "FAULT" and found.sentence.startswith("There is no MPI to use: ")
    assert "libmpi.so: file too short" in found.sentence and "pip install mpi4py mpich" in found.advice


def test_ranks_that_never_come_up_are_a_fault_in_time(machine, monkeypatch):
    """Of a launcher that fits by its name, and waits forever."""
    write_script(machine / "mpiexec", f'[ "$1" = --version ] && echo "{MPI.mark}" || exec /bin/sleep 1000')
    monkeypatch.setattr(doctor, "SECONDS", 1)
    found = doctor.two_ranks()
    assert found.state == "FAULT" and "did not end within 1 s" in found.sentence


def test_a_question_has_a_time_limit_whatever_it_leaves_behind():
    """A child of it that keeps its output open is not waited for."""
    reply = doctor.ask(["/bin/sh", "-c", "echo first; setsid /bin/sleep 20 & /bin/sleep 1000"], 0.5)
    assert reply == (None, "first\n") and reply.problem == "it did not end in time"
    assert doctor.ask(["/no/such/program"]).problem == "/no/such/program cannot be started: No such file or directory"
    assert doctor.ask(["/bin/sh", "-c", "kill -11 $$"]).problem == "it ended with signal 11"


def in_shared_memory(options: str) -> list[str]:
    """Return what the doctor says of memory and ranks, in a namespace where /dev/shm is mounted with these options.

    MPICH cannot start without this memory; other MPIs do, and complain.
    """
    ask = ["unshare", "--mount", "/bin/sh", "-c"]
    inside = f"mount -t tmpfs -o {options} none /dev/shm && exec {shlex.quote(sys.executable)} -c "
    if doctor.ask([*ask, f"{inside} ''"]).status != 0:
        pytest.skip("This needs the right to mount.")
    program = "'from shardlab.doctor import *; print(shared_memory()); print(two_ranks())'"
    done = subprocess.run([*ask, inside + program], env=environment(), capture_output=True, text=True, timeout=120)
    return " ".join(done.stdout.split()).split(" FAULT " if MPI == MPICH else " ok ")


def test_ranks_in_a_small_shared_memory_are_a_fault_that_names_it():
    """A mebibyte of it."""
    small, ranks = in_shared_memory("size=1m")
    assert small.startswith("no Ranks on this machine share memory in /dev/shm, which has 1.05 MB")
    assert "docker run --shm-size" in small
    if MPI == MPICH:
        assert "did not add up" in ranks and "SIGBUS" in ranks and "/dev/shm" in ranks and "--shm-size" in ranks
    else:
        assert "added up 1 + 2 = 3" in ranks


def test_shared_memory_that_cannot_be_written_is_named():
    """By the doctor, and by the launcher when ranks have died of it."""
    own, ranks = in_shared_memory("ro")
    for said in (own, ranks) if MPI == MPICH else (own,):
        assert "/dev/shm" in said and ": Read-only file system." in said


CUPY = {"__init__": "__version__ = '14.2.0'\nis_available = lambda: True\nfrom cupy import cuda",
        "cuda": "from types import SimpleNamespace as S\nruntime, nccl = S(getDeviceCount=lambda: 2), S(\n"
                "    available={0}, get_version=lambda: {0})"}


def install_cupy(folder: Path, nccl: int) -> None:
    """Write a CuPy that finds two GPUs and this version of NCCL; 0: none."""
    (folder / "cupy").mkdir(exist_ok=True)
    for name, source in CUPY.items():
        (folder / "cupy" / f"{name}.py").write_text(source.format(nccl))


@pytest.mark.parametrize("nccl, state, text", [(22809, "ok", "can use GPUs (2 of them), and has NCCL"),
                                               (0, "no", "finds no NCCL")])
def test_gpus_cupy_and_nccl_are_found(machine, tmp_path, monkeypatch, nccl, state, text):
    install_cupy(tmp_path, nccl)
    monkeypatch.syspath_prepend(tmp_path)
    write_script(machine / "nvidia-smi", "echo 'NVIDIA H100, 81559 MiB'")
    assert doctor.gpu() == ("ok", "NVIDIA's driver finds NVIDIA H100, 81559 MiB.", "")
    found = doctor.cupy()
    assert found.state == state and text in found.sentence


@pytest.mark.parametrize("nccl, with_mps, state, texts", [
    (None, True, "no", ["cannot share a GPU with NCCL: that needs a GPU, CuPy"]),
    (0, True, "no", ["cannot share a GPU with NCCL: that needs a GPU, CuPy"]),
    (22907, True, "no", ["with NCCL 2.29: that needs 2.30", '-U "nvidia-nccl-cu13>=2.30", or nvidia-nccl-cu12']),
    (23003, False, "no", ["can share a GPU with NCCL 2.30, but take turns", f"{mps.PROGRAM} is not there. It comes"]),
    (23003, True, "ok", ["can share a GPU with NCCL 2.30", "run --mps -n 8", "--distributed-backend nccl`",
                         "\n             export CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=12; nvidia-cuda-mps-control -d\n",
                         "\n             echo quit | nvidia-cuda-mps-control"])])
def test_ranks_that_could_share_a_gpu_are_told_how(machine, tmp_path, monkeypatch, nccl, with_mps, state, texts):
    """CuPy may be missing (None), as may a new NCCL, or MPS."""
    monkeypatch.setattr(mps, "FOLDERS", ())
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(doctor, "is_installed", lambda module: nccl is not None)
    if nccl is not None:
        install_cupy(tmp_path, nccl)
    if with_mps:
        write_script(machine / mps.PROGRAM, "exit 0")
    fact = doctor.sharing()
    assert fact.state == state
    assert all(text in str(fact) or text in f"{fact.sentence} {fact.advice}" for text in texts), fact


def test_doctor_knows_what_training_imports_and_what_the_base_install_brings():
    names = {Requirement(one).name for one in PROJECT["dependencies"]}
    assert {*names, "matplotlib"} == {*doctor.NEEDED, *doctor.USEFUL}
    program = "import shardlab.programs.gpt, shardlab.command, sys; print(*sys.modules)"
    loaded = set(command("-c", program).stdout.split())
    assert loaded.issuperset(doctor.NEEDED.values()) and not loaded & set(doctor.USEFUL)
