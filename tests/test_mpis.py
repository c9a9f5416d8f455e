"""Facts about each MPI are found by its name, and what the installed one can do, or not, by trying."""
import subprocess
from unittest.mock import patch

import pytest
from hypothesis import given, strategies as st

from mpi_impl.comm import abilities
from mpi_impl.comm.transports import shared_memory
from mpi_impl.launch.trial import LACKING
from mpi_impl.runtime.mpis import KNOWN, MPICH, implementation
from shardlab import doctor
from tests.launching import ROOT, launch, write_script


@given(st.sampled_from(KNOWN), st.from_regex(r"( [0-9]+(\.[0-9]+)*)?", fullmatch=True))
def test_an_mpi_is_known_by_its_name_whatever_its_version(mpi, version):
    assert implementation(mpi.name + version) == mpi


def test_an_mpi_that_nobody_knows_is_taken_for_one_made_from_mpich():
    """Any launcher fits it."""
    mpi = implementation("Cray MPI")
    assert (mpi.mark, mpi.srun, mpi.slots, mpi.rank_and_size) == ("", MPICH.srun, MPICH.slots, MPICH.rank_and_size)


def test_one_file_knows_the_mpis():
    """The others ask it. (What a package is called belongs to the locks.)"""
    names = "|".join(mpi.name for mpi in KNOWN)
    found = subprocess.run(["git", "grep", "-lE", names, "--", "mpi_impl"], cwd=ROOT, capture_output=True, text=True)
    assert found.stdout == "mpi_impl/runtime/mpis.py\n"


@given(n=st.integers(2, 8))
def test_this_mpi_passes_the_trials_that_a_machine_without_a_gpu_can_make(ranks, n):
    assert ranks.run(n, try_them) == [(True, True)] * n


def try_them(group):
    return abilities.threads(group), abilities.shared_memory(group)


BROKEN = {"Query_thread": (abilities.MPI, lambda: abilities.MPI.THREAD_SERIALIZED, abilities.threads),
          "shared_memory_left": (shared_memory, lambda: 0, abilities.shared_memory),
          "sum_in_rank_order": (shared_memory, lambda *_: None, abilities.shared_memory)}


@pytest.mark.parametrize("name", BROKEN)
def test_an_mpi_that_lacks_it_fails_the_trial(ranks, name):
    assert ranks.run(2, try_broken, name) == [False] * 2


def try_broken(group, name):
    place, replacement, trial = BROKEN[name]
    fresh = group.split(0, "which has opened no memory yet")
    with patch.object(place, name, replacement):
        worked = trial(fresh)
    fresh.free()
    return worked


# ---- what the doctor says of it -------------------------------------------------------------------------------------


def test_the_doctor_names_every_trial():
    assert doctor.ABILITIES.keys() == abilities.TRIALS.keys()


@given(st.fixed_dictionaries(dict.fromkeys(doctor.ABILITIES, st.sampled_from([0, 3, 1, -11, None]))))
def test_the_doctor_tells_what_an_mpi_lacks_however_it_fails(statuses):
    """By a sentence, a crash, or by never coming to an end."""
    with patch.object(doctor, "ask", lambda command, *_: doctor.Reply(statuses[command[-1]], "")):
        found = doctor.abilities()
    assert (found.state == "ok") == (set(statuses.values()) == {0}) and found.state != "FAULT"
    for name, status in statuses.items():
        assert (doctor.ABILITIES[name] in found.advice) == (status != 0)
        assert (name.replace("_", " ") in found.sentence) == (status == 0)


def test_a_trial_that_fails_ends_quietly_with_its_status(ranks):
    """The trial of a GPU's memory fails with the MPIs that pip installs."""
    (works,) = ranks.run(1, abilities.device_memory)
    done = launch(2, "-m", "mpi_impl.launch.trial", "device_memory")
    assert (done.returncode, done.stdout, done.stderr) == (0 if works else LACKING, "", "")


def test_the_doctor_takes_an_mpi_that_complains_and_adds_up(monkeypatch):
    """If it does not, the doctor advises to install that one again. Open MPI writes a zero byte after its complaint."""
    assert doctor.ask(["/bin/sh", "-c", r"printf 'too little\n\0001 + 2 = 3\n'"]).text == "too little\n1 + 2 = 3\n"
    monkeypatch.setattr(doctor, "ask", lambda *_: doctor.Reply(0, "too little\n1 + 2 = 3\n"))
    assert doctor.two_ranks().state == "ok"
    monkeypatch.setattr(doctor, "ask", lambda *_: doctor.Reply(0, "Open MPI 5.0.11"))
    assert doctor.two_ranks().advice.endswith("--force-reinstall mpi4py openmpi.")


LIST = "MPI plugin types are...\n\tnone\n\tpmi2\nspecific pmix plugin versions available: pmix_v4"


@pytest.mark.parametrize("mpi, script, state, text", [
    ("MPICH 5.0.2", f"echo '{LIST}'", "ok", "srun can start this MPI's ranks (--mpi=pmi2)"),
    ("Open MPI 5.0.11", f"echo '{LIST}'", "no", "this Slurm lacks pmix"),
    ("Open MPI 4.1.4", f"echo '{LIST}'; echo '\tpmix'", "ok", "(--mpi=pmix)"),
    ("Open MPI 4.1.4", "echo srun: MPI types are...; echo srun: pmix", "ok", "(--mpi=pmix)"),   # of an older Slurm
    ("MPICH 4.0.2", "echo srun: fatal: no configuration source >&2; exit 1", "no", "no cluster: srun: fatal: no conf")])
def test_the_doctor_knows_whether_srun_starts_ranks(tmp_path, monkeypatch, mpi, script, state, text):
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setattr(doctor, "ask_python", lambda *_: doctor.Reply(0, mpi + "\n"))
    write_script(tmp_path / "bin" / "srun", script)
    (found,) = doctor.slurm()
    assert found.state == state and text in found.sentence
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not list(doctor.slurm())
