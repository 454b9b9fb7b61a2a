"""The manifests of Kubeflow's PyTorchJob, TrainJob and MPIJob, as values and as YAML."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

HOSTFILE = "/etc/mpi/hostfile"
"""Where the MPI Operator lists the workers, in the launcher's pod."""
PORT = 29500
"""At which rank 0 of an MPIJob listens, in its pod."""
_SHM = {"name": "shm", "emptyDir": {"medium": "Memory"}}
_SHM_MOUNT = {"name": "shm", "mountPath": "/dev/shm"}


@dataclass(frozen=True)
class KubernetesJob:
    """A job of `nodes` pods with `tasks` ranks each."""

    name: str
    image: str
    """The container's image; it holds Python, instep and the script."""
    program: tuple[str, ...]
    """`script.py args…` or `-m module args…`, as the image has it."""
    nodes: int = 1
    """Number of pods."""
    tasks: int = 1
    """Number of ranks in each pod."""
    device: str | None = None
    """What Kubernetes calls the accelerators, of which each rank has one: nvidia.com/gpu."""
    cpus: int | None = None
    """Cores of each rank; None: no limit."""
    memory: str | None = None
    """Memory of each pod, as Kubernetes writes it: 64Gi."""
    namespace: str | None = None
    python_options: tuple[str, ...] = ()
    """Those of every rank's interpreter: -O, -W error."""


def pytorch_job(job: KubernetesJob) -> dict[str, Any]:
    """The PyTorchJob (kubeflow.org/v1) of the Training Operator."""
    container = {
        "name": "pytorch",  # the operator looks for this name
        "image": job.image,
        "command": _command(job, "RANK", "MASTER_ADDR", "MASTER_PORT"),
        **_resources(job, "resources"),
        "volumeMounts": [_SHM_MOUNT],
    }
    template = {"spec": {"containers": [container], "volumes": [_SHM]}}
    replica = {"restartPolicy": "Never", "template": template}
    replicas: dict[str, Any] = {"Master": {"replicas": 1, **replica}}
    if job.nodes > 1:
        replicas["Worker"] = {"replicas": job.nodes - 1, **replica}
    return _manifest(job, "kubeflow.org/v1", "PyTorchJob", {"pytorchReplicaSpecs": replicas})


def train_job(job: KubernetesJob) -> dict[str, Any]:
    """The TrainJob (trainer.kubeflow.org/v1alpha1) of Kubeflow Trainer, for its torch runtime."""
    trainer = {
        "image": job.image,
        "command": _command(job, "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"),
        "numNodes": job.nodes,
        "numProcPerNode": job.tasks,
        **_resources(job, "resourcesPerNode"),
    }
    spec = {"runtimeRef": {"name": "torch-distributed"}, "trainer": trainer}
    return _manifest(job, "trainer.kubeflow.org/v1alpha1", "TrainJob", spec)


def mpi_job(job: KubernetesJob) -> dict[str, Any]:
    """The MPIJob (kubeflow.org/v2beta1) of the MPI Operator: Open MPI's mpirun in a pod of its own.

    The operator lists the workers in HOSTFILE there; rank 0 runs on the first. mpirun's own host,
    which Open MPI names to the ranks, has none.
    """
    words = [*_instep(job), *_escape(job.program)]
    start = (
        f"exec mpirun -n {job.nodes * job.tasks} --allow-run-as-root --bind-to none"
        f" -x MASTER_ADDR=$$(sed 's/[ :].*//;q' {HOSTFILE}) -x MASTER_PORT={PORT}"
    )
    launcher = {
        "name": "mpi-launcher",
        "image": job.image,
        "command": ["sh", "-c", f"{start} {shlex.join(words)}"],
    }
    container = {
        "name": "mpi-worker",
        "image": job.image,
        **_resources(job, "resources"),
        "volumeMounts": [_SHM_MOUNT],
    }
    replicas = {
        "Launcher": {"replicas": 1, "template": {"spec": {"containers": [launcher]}}},
        "Worker": {
            "replicas": job.nodes,
            "template": {"spec": {"containers": [container], "volumes": [_SHM]}},
        },
    }
    spec = {
        "slotsPerWorker": job.tasks,
        "runPolicy": {"cleanPodPolicy": "Running"},
        "mpiReplicaSpecs": replicas,
    }
    return _manifest(job, "kubeflow.org/v2beta1", "MPIJob", spec)


MANIFESTS: Mapping[str, Callable[[KubernetesJob], dict[str, Any]]] = {
    "PyTorchJob": pytorch_job,
    "TrainJob": train_job,
    "MPIJob": mpi_job,
}


def _command(job: KubernetesJob, rank: str, address: str, port: str) -> list[str]:
    """Kubernetes replaces $(NAME) by the variable that the operator sets in each pod."""
    hosts = ["--nnodes", str(job.nodes)]
    if job.nodes > 1:
        hosts += ["--node-rank", f"$({rank})", "--master", f"$({address}):$({port})"]
    return [*_instep(job), "run", *hosts, "-n", str(job.tasks), *_escape(job.program)]


def _instep(job: KubernetesJob) -> list[str]:
    return ["python", *_escape(job.python_options), "-m", "instep"]


def _escape(words: Sequence[str]) -> list[str]:
    return [word.replace("$(", "$$(") for word in words]


def _resources(job: KubernetesJob, name: str) -> dict[str, Any]:
    limits = {
        **({job.device: str(job.tasks)} if job.device else {}),
        **({"cpu": str(job.cpus * job.tasks)} if job.cpus else {}),
        **({"memory": job.memory} if job.memory else {}),
    }
    return {name: {"limits": limits}} if limits else {}


def _manifest(job: KubernetesJob, version: str, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    metadata = {"name": job.name} | ({"namespace": job.namespace} if job.namespace else {})
    return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}


def format_yaml(value: Mapping[str, Any]) -> str:
    """A mapping of strings, numbers, lists and mappings as YAML. Strings are in double quotes."""
    return "\n".join(_lines(value)) + "\n"


def _lines(value: Any) -> Iterator[str]:
    rows = value.items() if isinstance(value, Mapping) else ((None, item) for item in value)
    for name, item in rows:
        start = "-" if name is None else f"{name}:"
        if isinstance(item, (Mapping, list)):
            nested = [*_lines(item)]
            if name is None:
                yield f"- {nested[0]}"
                nested = nested[1:]
            else:
                yield start
            yield from (f"  {line}" for line in nested)
        else:
            yield f"{start} {json.dumps(item)}"
