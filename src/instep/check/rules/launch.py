"""INS51x: the rendezvous of the ranks, and the launcher's variables."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from instep.check.finding import Hit, Severity, rule
from instep.check.rank_expressions import read_variable
from instep.check.script import constant, keyword
from instep.check.script_info import ScriptInfo

NODE_LISTS = {"SLURM_NODELIST", "SLURM_JOB_NODELIST", "SLURM_STEP_NODELIST"}
TASKS = {"SLURM_NPROCS", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS"}


@rule("INS511", Severity.WARNING, "The rendezvous port is fixed in the script.")
def _fixed_port(info: ScriptInfo) -> Iterator[Hit]:
    """Two jobs on one machine, or a job and the remains of the last one, want the same port:
    "address already in use", or the ranks of two jobs meet. It concerns every N > 1.

    ## Bad
    ```python
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:23456", rank=0, world_size=1)
    ```

    ## Good
    ```python
    import torch.distributed as dist

    dist.init_process_group("gloo")  # torchrun, srun or `instep run` choose the port
    ```
    """
    for plain in info.script.all(ast.Assign):
        port = constant(plain.value)
        if (
            read_variable(info.script, plain.targets[0]) == "MASTER_PORT"
            and isinstance(port, str)
            and port not in {"", "0"}
            and not _is_conditional_default(info, plain)
        ):
            yield _port(plain, port)
    for call in info.script.calls_named("init_process_group"):
        method = keyword(call, "init_method", 1)
        for origin in info.origins.of(method):
            text = info.script.source(origin)
            if "tcp://" not in text or info.script.call_name(origin) == "add_argument":
                continue
            at_end = re.search(r"tcp://.*:(\d{2,5})['\"]?\)?$", text)
            if found := at_end or re.search(r":(\d{4,5})\b", text):
                yield _port(call, found.group(1))
                break


def _port(place: ast.AST, port: str) -> Hit:
    return Hit(
        place,
        f"the ranks always meet at port {port}",
        "with N > 1, a second job on the machine fails or joins this one",
        'dist.init_process_group(backend)  # init_method "env://"; the launcher sets MASTER_PORT',
    )


def _is_conditional_default(info: ScriptInfo, plain: ast.Assign) -> bool:
    return any(
        (isinstance(above, ast.If) and "environ" in info.script.source(above.test))
        or isinstance(above, ast.ExceptHandler)
        for above in info.script.ancestors(plain)
    )


@rule("INS512", Severity.ERROR, "The local rank is read from the command line only.")
def _local_rank_argument(info: ScriptInfo) -> Iterator[Hit]:
    """`--local_rank` was given by `torch.distributed.launch` before PyTorch 2.0. torchrun,
    srun and mpirun give none (the default is then the local rank of *every* process: all
    meet on one device), and today's `torch.distributed.launch` spells it `--local-rank`,
    which argparse refuses. The variable LOCAL_RANK is set by all versions.

    ## Bad
    ```python
    import argparse
    import torch.distributed as dist

    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=0)
    args = parser.parse_args()
    device = f"cuda:{args.local_rank}"
    ```

    ## Good
    ```python
    import argparse
    import os
    import torch.distributed as dist

    parser = argparse.ArgumentParser()
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    parser.add_argument("--local_rank", "--local-rank", type=int, default=local_rank)
    args = parser.parse_args()
    device = f"cuda:{args.local_rank}"
    ```
    """
    reads = [*info.script.all(ast.Subscript), *info.script.all(ast.Call)]
    if "deepspeed" in info.script.imported_roots or "LOCAL_RANK" in info.script.strings:
        return
    if any("LOCAL" in read_variable(info.script, node) for node in reads):
        return
    if info.processes.spawn is not None or _set_elsewhere(info):
        return
    for call in info.script.calls_named("add_argument"):
        names = {constant(argument) for argument in call.args}
        if not names & {"--local_rank", "--local-rank"}:
            continue
        default = info.script.source(keyword(call, "default") or ast.Constant(None))
        refused = "--local-rank" not in names
        yield Hit(
            call,
            f"--local_rank is the only source of the local rank; its default is {default}",
            f"under torchrun with N > 1, every process has local rank {default}"
            + "; torch.distributed.launch passes --local-rank, which argparse refuses" * refused,
            'local_rank = int(os.environ["LOCAL_RANK"])',
        )


def _set_elsewhere(info: ScriptInfo) -> bool:
    """The option is never read, or a function of another file gets all options and sets it."""
    read = any(
        name.attr == "local_rank"
        and isinstance(name.ctx, ast.Load)
        and info.origins.option(name) is not None
        for name in info.script.all(ast.Attribute)
    )
    handed = any(
        "dist" in info.script.call_name(call)
        and info.script.full_name(call)
        and not info.script.full_name(call).startswith(("torch.", "horovod.", "apex."))
        for call in info.script.all(ast.Call)
        if any(isinstance(argument, ast.Name) for argument in call.args)
    )
    return not read or handed


@rule("INS513", Severity.ERROR, "The world size counts tasks, the rank counts devices.")
def _rank_beyond_world(info: ScriptInfo) -> Iterator[Hit]:
    """Slurm's number of tasks is the world size only if each task is one rank. A script that
    starts one process per device in each task, `rank = procid * devices + device`, has
    tasks x devices ranks: with more than one device per task, ranks reach beyond the world
    size and the rendezvous fails or waits for ever.

    ## Bad
    ```python
    import os
    import torch
    import torch.distributed as dist

    def main(gpu):
        world_size = int(os.environ["SLURM_NPROCS"])
        rank = int(os.environ["SLURM_PROCID"]) * torch.cuda.device_count() + gpu
        dist.init_process_group("nccl", world_size=world_size, rank=rank)
    ```

    ## Good
    ```python
    import os
    import torch
    import torch.distributed as dist

    def main(gpu):
        world_size = int(os.environ["SLURM_NPROCS"]) * torch.cuda.device_count()
        rank = int(os.environ["SLURM_PROCID"]) * torch.cuda.device_count() + gpu
        dist.init_process_group("nccl", world_size=world_size, rank=rank)
    ```
    """
    for call in info.script.calls_named("init_process_group"):
        size, rank = keyword(call, "world_size", 3), keyword(call, "rank", 4)
        if size is None or rank is None or not _tasks_only(info, size):
            continue
        if any(_procid_times_devices(info, origin) for origin in info.origins.of(rank)):
            yield Hit(
                call,
                f"world_size is the number of Slurm tasks, rank is {info.script.source(rank)} = "
                "task * devices + device",
                "with k > 1 devices per task, there are k times as many ranks as world_size says",
                f"world_size = {info.script.source(size)} * torch.cuda.device_count()",
            )


def _tasks_only(info: ScriptInfo, size: ast.expr) -> bool:
    """All values of the world size are a Slurm variable, with no factor."""
    origins = info.origins.of(size)
    plain = [
        o.args[0] if info.script.call_name(o) == "int" and isinstance(o, ast.Call) and o.args else o
        for o in origins
    ]
    return bool(plain) and all(
        read_variable(info.script, inner) in TASKS
        for outer in plain
        for inner in info.origins.of(outer)
    )


def _procid_times_devices(info: ScriptInfo, node: ast.expr) -> bool:
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Add):
        return False
    product = next((s for s in (node.left, node.right) if isinstance(s, ast.BinOp)), None)
    if product is None or not isinstance(product.op, ast.Mult):
        return False
    sides = (product.left, product.right)
    return any(
        info.is_device_count(side) or "gpu" in info.script.source(side).lower() for side in sides
    )


@rule(
    "INS514",
    Severity.ERROR,
    "The master's address is cut out of the Slurm node list by its digits.",
)
def _digits_of_node_list(info: ScriptInfo) -> Iterator[Hit]:
    """`SLURM_NODELIST` holds compressed host names: `node[01-04,7]`. Its digits are an
    address only where nodes are named by their IP address. On any other cluster the ranks
    look for each other at an address that does not exist, from two nodes on.

    ## Bad
    ```python
    import os
    import re
    import torch.distributed as dist

    parts = re.findall("[0-9]+", os.environ["SLURM_NODELIST"])
    ```

    ## Good
    ```python
    import os
    import subprocess
    import torch.distributed as dist

    command = ["scontrol", "show", "hostnames", os.environ["SLURM_NODELIST"]]
    master = subprocess.check_output(command, text=True).split()[0]
    ```
    """
    for call in info.script.all(ast.Call):
        if not info.script.full_name(call).startswith("re."):
            continue
        pattern = constant(call.args[0]) if call.args else None
        sources = [o for a in call.args[1:] for o in info.origins.of(a)]
        if not isinstance(pattern, str) or not re.search(r"\[0-9\]|\\d", pattern):
            continue
        if any(read_variable(info.script, source) in NODE_LISTS for source in sources):
            yield Hit(
                call,
                "the node list holds host names (node[01-04]), not the digits of an address",
                "from two nodes on, the ranks look for each other at a made-up address",
                'subprocess.check_output(["scontrol", "show", "hostnames", node_list], '
                "text=True).split()[0]",
            )


@rule("INS515", Severity.WARNING, "The file of a file:// rendezvous is never removed.")
def _leftover_rendezvous(info: ScriptInfo) -> Iterator[Hit]:
    """`init_method="file://…"` needs a file that does not exist yet. A job that is killed
    leaves it behind; the next job under that name (a requeued Slurm job has the same id)
    meets the dead one's entries, and with N > 1 fails or waits for ever.

    ## Bad
    ```python
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method="file:///shared/meet", rank=0, world_size=1)
    ```

    ## Good
    ```python
    import torch.distributed as dist

    dist.init_process_group("gloo")  # the launcher's store needs no file
    ```
    """
    if any(
        info.script.calls_named(
            "remove", "unlink", "mkstemp", "mkdtemp", "NamedTemporaryFile", "TemporaryDirectory"
        )
    ):
        return
    for call in info.script.calls_named("init_process_group"):
        method = keyword(call, "init_method", 1)
        text = " ".join(info.script.source(o) for o in info.origins.of(method))
        if "file://" in text and "tmp" not in text:
            yield Hit(
                call,
                "the rendezvous file is never removed",
                "with N > 1, a job that is started again meets the remains of the last one",
                "dist.init_process_group(backend)  # or remove the file before rank 0 begins",
            )
