"""`instep k8s` on the command line."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from instep.errors import CommandLineError
from instep.launch.job import parse_count
from instep.launch.kubernetes.manifests import MANIFESTS, KubernetesJob, format_yaml
from instep.process import python_command

K8S = """\
Print the manifest of a job for Kubernetes, for Kubeflow's operators.

    instep k8s --image registry/train:1 --nodes 2 --gpus-per-node 4 train.py | kubectl apply -f -

Each pod runs `instep run` (with an MPIJob, mpirun starts the ranks), so that the ranks of a pod end
together and the first traceback is printed last. The script's name is its path in the image.
"""
KIND_HELP = """\
PyTorchJob (the default): for the Training Operator.
TrainJob: for Kubeflow Trainer, with its runtime torch-distributed
MPIJob: for the MPI Operator; the image also holds Open MPI and an SSH server"""

RESOURCE_HELP = """\
other accelerators of each pod, by the name that their plugin
gives them, as in huawei.com/Ascend910:8; one rank for each"""


def add_command(commands: Any) -> None:
    """Add it to the subparsers of `instep`."""
    parser = commands.add_parser(
        "k8s",
        help="print the manifest of a job for Kubernetes",
        description=K8S,
        usage="instep k8s --image IMAGE [--nodes N] (--gpus-per-node G | --resource NAME:G | "
        "--tasks-per-node T) [options] (script.py | -m module) [args ...]",
    )
    add = parser.add_argument
    add("--image", metavar="IMAGE", help="the container's image, which holds instep and the script")
    add("--kind", choices=tuple(MANIFESTS), default="PyTorchJob", help=KIND_HELP)
    add("--nodes", type=parse_count, default=1, metavar="N", help="pods (default: 1)")
    per_node = parser.add_mutually_exclusive_group()
    per_node.add_argument(
        "--gpus-per-node",
        type=parse_count,
        metavar="G",
        help="GPUs of each pod (nvidia.com/gpu); one rank for each GPU",
    )
    per_node.add_argument("--resource", type=_resource, metavar="NAME:G", help=RESOURCE_HELP)
    per_node.add_argument(
        "--tasks-per-node",
        type=parse_count,
        metavar="T",
        help="ranks in each pod if there are no accelerators",
    )
    add("--cpus-per-task", type=parse_count, metavar="C", help="cores of each rank")
    add("--memory", metavar="SIZE", help="memory of each pod, as in 64Gi")
    add("--name", type=_label, metavar="NAME", help="the job's name (default: the script's)")
    add("--namespace", type=_label, metavar="NAME", help="the namespace (default: that of kubectl)")


def run(asked: argparse.Namespace, program: Sequence[str]) -> int:
    """Print the manifest. Raises CommandLineError."""
    if not program or tuple(program) == ("-m",):
        raise CommandLineError("nothing to run: name a script.py, or -m and a module.")
    line = shlex.join(program)
    if asked.image is None:
        raise CommandLineError(
            f"name an image that holds instep and the script: instep k8s --image IMAGE {line}"
        )
    device, _, count = (asked.resource or "").rpartition(":")
    ranks = asked.gpus_per_node or asked.tasks_per_node or (int(count) if count else None)
    if ranks is None:
        raise CommandLineError(
            f"say how many ranks each pod has: instep k8s --image {asked.image} --gpus-per-node 4 "
            f"{line}; with other accelerators, --resource huawei.com/Ascend910:8; without any, "
            "--tasks-per-node 16."
        )
    script = program[1] if program[0] == "-m" else Path(program[0]).stem
    job = KubernetesJob(
        asked.name or _dns_label(script),
        asked.image,
        tuple(program),
        nodes=asked.nodes,
        tasks=ranks,
        device=device or ("nvidia.com/gpu" if asked.gpus_per_node else None),
        cpus=asked.cpus_per_task,
        memory=asked.memory,
        namespace=asked.namespace,
        python_options=tuple(python_command()[1:]),
    )
    print(format_yaml(MANIFESTS[asked.kind](job)), end="")
    return 0


def _resource(value: str) -> str:
    name, _, count = value.rpartition(":")
    if not name:
        raise argparse.ArgumentTypeError(
            f"takes a name and a number, as in huawei.com/Ascend910:8, not {value!r}"
        )
    parse_count(count)
    return value


def _label(value: str) -> str:
    if len(value) > 63 or not re.fullmatch("[a-z0-9]([-a-z0-9]*[a-z0-9])?", value):
        raise argparse.ArgumentTypeError(
            f"takes small letters, digits and hyphens, 63 at most, not {value!r}"
        )
    return value


def _dns_label(name: str) -> str:
    """Kubernetes takes small letters, digits and hyphens, 63 in all; pods' names add to it."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40].strip("-") or "train"
