"""INS603, INS604, INS606, INS607: checkpoints that cannot be loaded, or are incomplete."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from instep.check.finding import Hit, Severity, rule
from instep.check.script import constant, keyword
from instep.check.script_info import RuleScope, ScriptInfo
from instep.distributed.identity.accelerators import KINDS


@rule(
    "INS603",
    Severity.WARNING,
    "Every process loads a checkpoint onto the device it was saved from.",
)
def _load_without_map_location(info: ScriptInfo) -> Iterator[Hit]:
    """`torch.load` puts tensors back where they were saved: on device 0, which rank 0 saved
    from. From N = 2 on all processes of a node fill the memory of device 0, and on a
    machine with fewer devices the load fails.

    ## Bad
    ```python
    import torch
    import torch.distributed as dist

    state = torch.load("checkpoint.pt")
    net.load_state_dict(state)
    ```

    ## Good
    ```python
    import torch
    import torch.distributed as dist

    state = torch.load("checkpoint.pt", map_location="cpu")
    net.load_state_dict(state)
    ```
    """
    for call in info.script.calls_of("torch.load"):
        if keyword(call, "map_location", 1) is not None or any(
            k.arg is None for k in call.keywords
        ):
            continue
        if not _is_loaded_as_state(info, call) or not info.processes.runs_on_ranks(call):
            continue
        if info.guards.effective_guard(call) or _other_branch_maps(info, call):
            continue
        text = info.script.source(call)
        yield Hit(
            call,
            "the tensors go back to the device that they were saved from",
            "from N = 2 on, every process of a node fills device 0",
            f'{text[:-1]}, map_location="cpu")',
        )


def _is_loaded_as_state(info: ScriptInfo, call: ast.Call) -> bool:
    for load in info.script.calls_named("load_state_dict"):
        if "scaler" in info.script.source(load.func):
            continue  # a loss scale is a number, on no device
        for argument in load.args:
            inner = argument
            while isinstance(inner, ast.Subscript | ast.Attribute):
                inner = inner.value
            if any(origin is call for origin in info.origins.of(inner)) or any(
                info.script.is_inside(call, origin) for origin in info.origins.of(argument)
            ):
                return True
    return False


def _other_branch_maps(info: ScriptInfo, call: ast.Call) -> bool:
    return any(
        keyword(other, "map_location", 1) is not None and info.script.are_exclusive(other, call)
        for other in info.script.calls_of("torch.load")
    )


@rule(
    "INS604",
    Severity.WARNING,
    "The state dict of the wrapper is saved: every key begins with `module.`.",
)
def _wrapped_state_dict(info: ScriptInfo) -> Iterator[Hit]:
    """DistributedDataParallel holds the model as `module`, so each key of its state dict has
    that prefix. The file does not load into the plain model: "Unexpected key(s)
    module.conv1.weight". It concerns every N, also N = 1.

    ## Bad
    ```python
    import torch
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(net)
    if rank == 0:
        torch.save(model.state_dict(), "checkpoint.pt")
    ```

    ## Good
    ```python
    import torch
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(net)
    if rank == 0:
        torch.save(model.module.state_dict(), "checkpoint.pt")
    ```
    """
    if any("module." in text for text in info.script.strings):
        return  # the script knows the prefix
    for call in info.script.calls_named("state_dict"):
        owner = info.script.owner(call)
        wrap = info.ddp_call_of(owner)
        if wrap is None or owner is None or not _is_saved(info, call):
            continue
        name = info.script.source(owner)
        if wrap.lineno > call.lineno and info.script.are_in_one_function(wrap, call):
            continue
        yield Hit(
            call,
            f"{name} is the wrapper: its keys begin with `module.`",
            "at any N, the file does not load into the model itself",
            f"{name}.module.state_dict()",
        )


def _is_saved(info: ScriptInfo, node: ast.AST) -> bool:
    """Whether a value goes into a call that saves, directly or by a name."""
    for above in info.script.ancestors(node):
        if isinstance(above, ast.Call) and "save" in info.script.call_name(above):
            return True
        if isinstance(above, ast.Assign):
            names = {info.script.dotted_name(target) for target in above.targets}
            function = info.script.function_of(above)
            return any(
                "save" in info.script.call_name(call)
                and info.script.function_of(call) is function
                and names & {info.script.dotted_name(a) for a in call.args}
                for call in info.script.all(ast.Call)
            )
        if isinstance(above, ast.stmt):
            return False
    return False


@rule(
    "INS606",
    Severity.WARNING,
    "A checkpoint with an epoch does not contain the optimizer.",
    RuleScope.PARALLEL,
)
def _checkpoint_without_optimizer(info: ScriptInfo) -> Iterator[Hit]:
    """A checkpoint with an epoch number is made for going on. Without the optimizer (its
    momentum, its step count, the learning rate) a resumed training is another one than an
    uninterrupted one, at any N.

    ## Bad
    ```python
    import torch
    import torch.distributed as dist

    if rank == 0:
        torch.save({"epoch": epoch, "model": net.state_dict()}, "checkpoint.pt")
    ```

    ## Good
    ```python
    import torch
    import torch.distributed as dist

    state = {"epoch": epoch, "model": net.state_dict(), "optimizer": optimizer.state_dict()}
    if rank == 0:
        torch.save(state, "checkpoint.pt")
    ```
    """
    if (
        _state_is_saved(info, "opt")
        or any(info.script.calls_named("save_state"))
        or any(name.startswith("deepspeed") for name in info.script.imported_modules)
    ):
        return
    for saved, text in _checkpoints(info):
        if "opt" not in text.lower():
            yield Hit(
                saved,
                "this checkpoint has an epoch and a model, but no optimizer",
                "at any N, a resumed training goes on without momentum and schedule",
                '"optimizer": optimizer.state_dict(),',
            )


def _state_is_saved(info: ScriptInfo, *words: str) -> bool:
    """Whether `x.state_dict()` is called anywhere, for an x with one of these words."""
    return any(
        word in info.script.source(call.func).lower()
        for call in info.script.calls_named("state_dict")
        for word in words
    )


def _checkpoints(info: ScriptInfo) -> Iterator[tuple[ast.Dict, str]]:
    """Dictionaries with an epoch and a state, literally given to a call that saves; their texts."""
    for node in info.script.all(ast.Dict):
        has_epoch = None not in node.keys and "epoch" in map(constant, node.keys)
        text = info.script.source(node) if has_epoch else ""
        if ".state_dict" in text and _is_saved(info, node):
            yield node, text


@rule(
    "INS607",
    Severity.WARNING,
    "A checkpoint of mixed-precision training does not contain the loss scale.",
    RuleScope.PARALLEL,
)
def _checkpoint_without_scaler(info: ScriptInfo) -> Iterator[Hit]:
    """The loss scale of `apex.amp` or of a GradScaler is part of the training's state.
    Without it a resumed training begins again at 65536 and skips its first steps, at any N.

    ## Bad
    ```python
    import torch
    import torch.distributed as dist

    scaler = torch.cuda.amp.GradScaler()
    state = {"epoch": 1, "model": net.state_dict(), "optimizer": optimizer.state_dict()}
    if rank == 0:
        torch.save(state, "checkpoint.pt")
    ```

    ## Good
    ```python
    import torch
    import torch.distributed as dist

    scaler = torch.cuda.amp.GradScaler()
    state = {"epoch": 1, "model": net.state_dict(), "optimizer": optimizer.state_dict(),
             "scaler": scaler.state_dict()}
    if rank == 0:
        torch.save(state, "checkpoint.pt")
    ```
    """
    if _state_is_saved(info, "scaler", "amp"):
        return
    of_kinds = [f"torch.{kind}.amp.GradScaler" for kind in KINDS]
    scalers = list(info.script.calls_of("apex.amp.initialize", "torch.amp.GradScaler", *of_kinds))
    for saved, text in _checkpoints(info) if scalers else []:
        if not ("scaler" in text.lower() or "amp" in text):
            apex = info.script.full_name(scalers[0]).startswith("apex")
            owner = "amp" if apex else info.target_names(scalers[0]) or "scaler"
            yield Hit(
                saved,
                "this checkpoint does not hold the state of the loss scaling",
                "at any N, a resumed training starts with the first scale and skips steps",
                f'"{owner}": {owner}.state_dict(),',
            )
