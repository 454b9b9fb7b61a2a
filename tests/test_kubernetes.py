"""`instep k8s`: the manifests, and that their command runs with what the operators set in pods."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import components
from instep import cli
from instep.launch.kubernetes.manifests import HOSTFILE, MANIFESTS, PORT, KubernetesJob, format_yaml
from launching import free_port
from test_rendezvous import clean_environ

JOB = KubernetesJob("mnist", "registry/train:1", ("train.py", "--lr", "0.1"), nodes=3, tasks=4)
PET = ("PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT")
VARIABLES = {"PyTorchJob": ("RANK", "MASTER_ADDR", "MASTER_PORT"), "TrainJob": PET}
"""What each operator sets: the pod's number, and the address and port of pod 0."""


TELLING = """
import instep, sys, torch
instep.init()
total = int(instep.all_reduce(torch.tensor(1 + instep.rank), 'sum'))
print(instep.rank, instep.world_size, total, sys.argv[1:], flush=True)
"""


def command_of(manifest):
    """The command of a manifest's pods."""
    spec = manifest["spec"]
    if manifest["kind"] == "TrainJob":
        return spec["trainer"]["command"]
    commands = [
        replica["template"]["spec"]["containers"][0]["command"]
        for replica in spec["pytorchReplicaSpecs"].values()
    ]
    assert commands == [commands[0]] * len(commands)
    return commands[0]


def in_pod(word, variables):
    """The word as Kubernetes gives it to the container."""
    return re.sub(
        r"\$(\$?)\((\w+)\)", lambda m: f"$({m[2]})" if m[1] else str(variables[m[2]]), word
    )


@pytest.mark.parametrize("kind", MANIFESTS)
def test_the_ranks_have_the_options_that_python_had_here(kind):
    command = [sys.executable, "-O", "-W", "error", "-m", "instep", "k8s", "--kind", kind]
    words = ["--image", "a", "--tasks-per-node", "2", "c.py"]
    written = subprocess.check_output([*command, *words], text=True, timeout=20)
    assert re.search(r"-O\W+-W\W+error\W+-m\W+instep", written)


def test_a_pytorch_job_has_a_master_and_the_other_pods_as_workers():
    replicas = MANIFESTS["PyTorchJob"](JOB)["spec"]["pytorchReplicaSpecs"]
    assert {name: replica["replicas"] for name, replica in replicas.items()} == {
        "Master": 1,
        "Worker": 2,
    }
    alone = MANIFESTS["PyTorchJob"](KubernetesJob("a", "b", ("c.py",), tasks=2))["spec"]
    assert [*alone["pytorchReplicaSpecs"]] == ["Master"]


@pytest.mark.parametrize("kind", MANIFESTS)
def test_resources_are_those_of_all_ranks_of_a_pod(kind):
    job = KubernetesJob(
        "a", "b", ("c.py",), tasks=4, device="nvidia.com/gpu", cpus=8, memory="64Gi"
    )
    text = format_yaml(MANIFESTS[kind](job))
    for line in ('nvidia.com/gpu: "4"', 'cpu: "32"', 'memory: "64Gi"'):
        assert line in text
    assert "limits" not in format_yaml(MANIFESTS[kind](JOB))


def test_the_yaml_of_mappings_in_lists_in_mappings():
    value = {"a": [{"b": '$(X): "1"', "c": [1, "2"]}, {"d": {"e": True}}], "f": "y"}
    assert format_yaml(value) == (
        "a:\n"
        '  - b: "$(X): \\"1\\""\n'
        "    c:\n"
        "      - 1\n"
        '      - "2"\n'
        "  - d:\n"
        "      e: true\n"
        'f: "y"\n'
    )


def test_the_name_is_made_of_the_script(capsys):
    words = ["k8s", "--image", "i", "--tasks-per-node", "2", "-m", "My_pkg.train"]
    assert cli.main(words) == 0
    assert '\n  name: "my-pkg-train"\n' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "limit"),
    [
        (["--gpus-per-node", "4"], 'nvidia.com/gpu: "4"'),
        (["--resource", "huawei.com/Ascend910:4"], 'huawei.com/Ascend910: "4"'),
    ],
)
def test_each_rank_has_an_accelerator_of_the_kind_that_is_named(capsys, words, limit):
    assert cli.main(["k8s", "--image", "i", *words, "train.py"]) == 0
    printed = capsys.readouterr().out
    assert limit in printed
    assert '"-n"' in printed
    assert printed.count('- "4"') == 1


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ([], "nothing to run: name a script.py"),
        (["train.py"], "instep k8s --image IMAGE train.py"),
        (["--image", "i", "train.py"], "instep k8s --image i --gpus-per-node 4 train.py"),
        (["--image", "i", "--kind", "Job", "train.py"], "invalid choice: 'Job'"),
        (["--image", "i", "--resource", "8", "train.py"], "takes a name and a number, as in"),
    ],
)
def test_wrong_lines_are_answered(capsys, words, answer):
    assert cli.main(["k8s", *words]) == 2
    assert answer in capsys.readouterr().err


def launcher_command(job):
    """The shell command of the launcher's pod of an MPIJob, as the container gets it."""
    replicas = MANIFESTS["MPIJob"](job)["spec"]["mpiReplicaSpecs"]
    (container,) = replicas["Launcher"]["template"]["spec"]["containers"]
    shell, option, command = (in_pod(word, {}) for word in container["command"])
    assert (shell, option) == ("sh", "-c")
    return command.replace("$$(", "$(")


def test_the_launcher_of_an_mpi_job_starts_all_ranks_and_names_the_first_worker(tmp_path):
    job = KubernetesJob("a", "b", ("train.py", "it's $(RANK)"), nodes=3, tasks=4)
    assert MANIFESTS["MPIJob"](job)["spec"]["slotsPerWorker"] == 4
    (tmp_path / "mpirun").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "mpirun").chmod(0o755)
    for line in ("a-worker-0.a.ns.svc slots=4", "a-worker-0.a.ns.svc:4"):
        (tmp_path / "hosts").write_text(f"{line}\na-worker-1.a.ns.svc slots=4\n")
        command = launcher_command(job).replace(HOSTFILE, str(tmp_path / "hosts"))
        path = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
        words = subprocess.check_output(["sh", "-c", command], env=path, text=True).splitlines()
        assert words[:2] == ["-n", "12"]
        assert "MASTER_ADDR=a-worker-0.a.ns.svc" in words
        assert words[-5:] == ["python", "-m", "instep", "train.py", "it's $(RANK)"]


@pytest.mark.nightly
@pytest.mark.launch
@components.needs("Open MPI")
def test_the_launcher_of_an_mpi_job_runs_a_script(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(TELLING)
    (tmp_path / "hosts").write_text("127.0.0.1 slots=2\n")
    command = launcher_command(KubernetesJob("a", "b", (str(script), "$(RANK)"), tasks=2))
    command = command.replace(HOSTFILE, str(tmp_path / "hosts")).replace(
        str(PORT), str(free_port())
    )
    environ = clean_environ()
    environ["PATH"] = f"{Path(sys.executable).parent}:{environ['PATH']}"
    shell = ["sh", "-c", command.replace("mpirun ", "mpirun.openmpi --oversubscribe ")]
    said = subprocess.check_output(shell, env=environ, text=True, stderr=subprocess.STDOUT)
    assert "0 2 3 ['$(RANK)']" in said
    assert "1 2 3 ['$(RANK)']" in said


@pytest.mark.launch
@pytest.mark.parametrize(
    "kind", ["PyTorchJob", pytest.param("TrainJob", marks=pytest.mark.nightly)]
)
def test_the_command_runs_with_what_the_operator_sets(kind, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(TELLING)
    job = KubernetesJob("a", "b", (str(script), "$(RANK)"), nodes=2, tasks=1)
    command = command_of(MANIFESTS[kind](job))
    port = free_port()
    pods = []
    for pod in range(2):
        place = (pod, "127.0.0.1", port)
        variables = dict(zip(VARIABLES[kind], place, strict=True))
        operator = {"WORLD_SIZE": 2, **variables} if kind == "PyTorchJob" else variables
        pods.append(
            subprocess.Popen(
                [sys.executable, *(in_pod(word, variables) for word in command[1:])],
                env=clean_environ(**operator),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    said = [pod.communicate()[0] for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0], said
    assert "0 2 3 ['$(RANK)']" in said[0]
    assert "1 2 3 ['$(RANK)']" in said[1]
