"""INS50x: the device of each rank, and the number of devices."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from instep.check.finding import Hit, Severity, rule
from instep.check.rank_expressions import read_variable
from instep.check.script import constant, keyword
from instep.check.script_info import RuleScope, ScriptInfo
from instep.distributed.identity.accelerators import ACCELERATORS, KINDS

SIZE_NAMES = re.compile(
    r"^(world_?size|n_?procs?|num_?procs?|num_?processes|num_?replicas|nprocs)$", re.IGNORECASE
)

_MODULES = tuple(f"torch.{name}." for name in (*KINDS, "accelerator"))
_VARIABLES = frozenset(name for row in ACCELERATORS for name in row.variables)


@rule("INS501", Severity.ERROR, "The number of processes is taken from torch.cuda.device_count().")
def _world_size_from_devices(info: ScriptInfo) -> Iterator[Hit]:
    """A launcher decides how many processes there are, `device_count()` says how many devices
    this one sees. They differ with fewer processes than devices, with several nodes, and
    where each task sees one device; means and batch sizes are then wrong by that factor.

    ## Bad
    ```python
    import torch
    import torch.distributed as dist

    dist.init_process_group("nccl")
    world_size = torch.cuda.device_count()
    ```

    ## Good
    ```python
    import torch
    import torch.distributed as dist

    dist.init_process_group("nccl")
    world_size = dist.get_world_size()
    ```
    """
    starters = ("notebook_launcher", "Popen", "elastic_launch", "check_call")
    if info.processes.spawn is not None or any(info.script.calls_named(*starters)):
        return  # a script that starts one process per device knows what it does
    for plain in info.script.all(ast.Assign):
        for target in plain.targets:
            name = info.script.dotted_name(target)
            if SIZE_NAMES.match(name.split(".")[-1]) and info.is_device_count(plain.value):
                yield _hit(info, plain.value, name)
    for call in info.script.all(ast.Call):
        for name in ("world_size", "num_replicas"):
            value = keyword(call, name)
            if isinstance(value, ast.Call) and info.is_device_count(value):
                yield _hit(info, value, name)


def _hit(info: ScriptInfo, value: ast.expr, name: str) -> Hit:
    return Hit(
        value,
        f"{name} is the number of devices that this process sees, not of processes",
        "wrong whenever N differs: fewer processes than devices, or more than one node",
        info.ranks.world_size,
    )


@rule("INS502", Severity.ERROR, "The global rank is used as a device index.")
def _rank_as_device(info: ScriptInfo) -> Iterator[Hit]:
    """Ranks count through all nodes, devices start from 0 on each. On the second node of 8
    devices the first process is rank 8: "invalid device ordinal". On one node it works.

    ## Bad
    ```python
    import torch
    import torch.distributed as dist

    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    ```

    ## Good
    ```python
    import os
    import torch
    import torch.distributed as dist

    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    ```
    """
    if info.processes.spawn is not None:
        return
    for call in info.script.all(ast.Call):
        for value in _device_arguments(info, call):
            if _from_whole_job(info, value):
                text = info.script.source(value)
                yield Hit(
                    value,
                    f"{text} counts the ranks of all nodes; {info.script.source(call.func)} "
                    "wants a device of this node",
                    "from the second node on: invalid device ordinal",
                    'int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()',
                )


def _device_arguments(info: ScriptInfo, call: ast.Call) -> Iterator[ast.expr]:
    word = info.script.call_name(call)
    if word in {"to", "set_device", "set_device_index", *KINDS} and call.args:
        yield from _device_index(call.args[0])
    if info.script.full_name(call) == "torch.device":
        yield from call.args[1:2] or (x for a in call.args[:1] for x in _device_index(a))
    ids = keyword(call, "device_ids")
    if isinstance(ids, ast.List):
        yield from ids.elts


def _device_index(node: ast.expr) -> Iterator[ast.expr]:
    """The index in `rank`, `f"cuda:{rank}"` and `"npu:%d" % rank`."""
    if isinstance(node, ast.JoinedStr):
        first = node.values[0]
        if isinstance(first, ast.Constant) and str(first.value).startswith(KINDS):
            yield from (v.value for v in node.values if isinstance(v, ast.FormattedValue))
    elif isinstance(node, ast.BinOp) and isinstance(constant(node.left), str):
        yield node.right
    else:
        yield node


def _from_whole_job(info: ScriptInfo, node: ast.expr) -> bool:
    origins = info.origins.of(node)
    return bool(origins) and all(
        info.ranks.rank_type(origin) == "rank"
        and (not isinstance(origin, ast.Name | ast.Attribute))
        for origin in origins
    )


@rule("INS503", Severity.ERROR, "CUDA_VISIBLE_DEVICES is set after CUDA was used.", RuleScope.ANY)
def _devices_hidden_too_late(info: ScriptInfo) -> Iterator[Hit]:
    """CUDA reads CUDA_VISIBLE_DEVICES once, when it is first used. Set later it changes
    nothing: every process keeps all devices, and from N = 2 on they may meet on device 0.
    So do other accelerators with their variables, such as ASCEND_RT_VISIBLE_DEVICES.

    ## Bad
    ```python
    import os
    import torch

    torch.cuda.set_device(0)
    os.environ["CUDA_VISIBLE_DEVICES"] = "1"
    ```

    ## Good
    ```python
    import os

    os.environ["CUDA_VISIBLE_DEVICES"] = "1"
    import torch

    torch.cuda.set_device(0)
    ```
    """
    for plain in info.script.all(ast.Assign):
        if read_variable(info.script, plain.targets[0]) not in _VARIABLES:
            continue
        for call in info.script.all(ast.Call):
            early = call.lineno < plain.lineno and info.script.are_in_one_function(call, plain)
            if early and _uses_device(info, call) and not info.script.are_exclusive(call, plain):
                yield Hit(
                    plain,
                    f"the device was used in line {call.lineno}; this has no effect any more",
                    "from N = 2 on, processes may share a device",
                    f"{info.script.source(plain)}  # before the first use of a device",
                )
                break


def _uses_device(info: ScriptInfo, call: ast.Call) -> bool:
    full = info.script.full_name(call)
    if full.startswith(_MODULES):
        return full.split(".")[-1] in {
            "set_device", "set_device_index", "current_device", "init", "synchronize",
            "get_device_properties", "get_device_name", "mem_get_info", "empty_cache",
            "memory_allocated",
        }  # fmt: skip
    if isinstance(call.func, ast.Attribute) and call.func.attr in KINDS:
        return True
    first = constant(call.args[0]) if call.args else None
    return info.script.call_name(call) == "to" and str(first).startswith(KINDS)


@rule(
    "INS504",
    Severity.ERROR,
    "An environment variable is compared where it was meant to be set.",
    RuleScope.ANY,
)
def _compared_not_assigned(info: ScriptInfo) -> Iterator[Hit]:
    """`os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"` as a statement compares and discards
    the result. The variable keeps its value (or the line raises KeyError), at any N.

    ## Bad
    ```python
    import os

    os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"
    ```

    ## Good
    ```python
    import os

    os.environ["CUDA_VISIBLE_DEVICES"] = "0,1"
    ```
    """
    for statement in info.script.all(ast.Expr):
        test = statement.value
        if not isinstance(test, ast.Compare) or not isinstance(test.ops[0], ast.Eq):
            continue
        variable = test.left
        if isinstance(variable, ast.Subscript) and (
            info.script.full_name(variable.value) == "os.environ"
        ):
            left, right = info.script.source(variable), info.script.source(test.comparators[0])
            yield Hit(
                test,
                f"{left} is compared with {right} and the answer is thrown away",
                "at any N, the variable is not set",
                f"{left} = {right}",
            )


@rule("INS505", Severity.WARNING, "The list of devices is written into the script.", RuleScope.ANY)
def _fixed_devices(info: ScriptInfo) -> Iterator[Hit]:
    """`device_ids=[0, 1, 2, 3]` needs exactly these four devices: with fewer it raises, with
    more they idle, and the effective batch per device is another on each machine.

    ## Bad
    ```python
    import torch

    model = torch.nn.DataParallel(net, device_ids=[0, 1, 2, 3])
    ```

    ## Good
    ```python
    import torch

    model = torch.nn.DataParallel(net)
    ```
    """
    for call in info.script.calls_of("torch.nn.DataParallel"):
        for origin in info.origins.of(keyword(call, "device_ids", 1)):
            numbers = [constant(e) for e in origin.elts] if isinstance(origin, ast.List) else []
            if len(numbers) > 1 and all(isinstance(number, int) for number in numbers):
                yield Hit(
                    call,
                    f"the devices {info.script.source(origin)} are fixed",
                    f"raises with fewer than {len(numbers)} devices, leaves others idle",
                    "list(range(torch.cuda.device_count()))",
                )
