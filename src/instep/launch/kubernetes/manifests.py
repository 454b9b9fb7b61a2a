"""The manifests of Kubeflow's PyTorchJob and TrainJob, as values and as YAML."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class KubernetesJob:
    """A job of `nodes` pods, each of which runs `instep run`."""

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


def pytorch_job(job: KubernetesJob) -> dict[str, Any]:
    """The PyTorchJob (kubeflow.org/v1) of the Training Operator."""
    container = {
        "name": "pytorch",  # the operator looks for this name
        "image": job.image,
        "command": _command(job, "RANK", "MASTER_ADDR", "MASTER_PORT"),
        **_resources(job, "resources"),
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    shm = {"name": "shm", "emptyDir": {"medium": "Memory"}}
    template = {"spec": {"containers": [container], "volumes": [shm]}}
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


MANIFESTS: Mapping[str, Callable[[KubernetesJob], dict[str, Any]]] = {
    "PyTorchJob": pytorch_job,
    "TrainJob": train_job,
}


def _command(job: KubernetesJob, rank: str, address: str, port: str) -> list[str]:
    """Kubernetes replaces $(NAME) by the variable that the operator sets in each pod."""
    hosts = ["--nnodes", str(job.nodes)]
    if job.nodes > 1:
        hosts += ["--node-rank", f"$({rank})", "--master", f"$({address}):$({port})"]
    program = [word.replace("$(", "$$(") for word in job.program]
    return ["python", "-m", "instep", "run", *hosts, "-n", str(job.tasks), *program]


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
