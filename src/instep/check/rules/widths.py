"""INS406: losses that compare rows of two widths."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from instep.check.finding import Hit, Severity, rule
from instep.check.script import constant, keyword
from instep.check.script_info import RuleScope, ScriptInfo

_LOSSES = re.compile(r"^(MSE|L1|SmoothL1|Huber)Loss$|^(mse|l1|smooth_l1|huber)_loss$")
_FILLED = ("randn", "rand", "zeros", "ones", "empty")
_WRAPPERS = ("DistributedDataParallel", "DDP", "DataParallel", "replicate", "compile")
_SAME_SHAPE = ("to", "cuda", "cpu", "float", "double", "half", "requires_grad_", "train", "eval")


@rule(
    "INS406",
    Severity.ERROR,
    "A loss compares outputs and labels of different widths.",
    RuleScope.ANY,
)
def _unequal_widths(info: ScriptInfo) -> Iterator[Hit]:
    """The last layer of the model gives rows of one width, the labels that the script makes
    have another. A loss that compares element by element raises at the first step, at any N;
    a launcher then reports that a process has failed.

    ## Bad
    ```python
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    class Toy(nn.Module):
        def __init__(self):
            super().__init__()
            self.last = nn.Linear(10, 5)

        def forward(self, x):
            return self.last(x)

    model = DistributedDataParallel(Toy())
    outputs = model(torch.randn(3, 10))
    loss = nn.MSELoss()(outputs, torch.randn(3, 10))
    ```

    ## Good
    ```python
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    class Toy(nn.Module):
        def __init__(self):
            super().__init__()
            self.last = nn.Linear(10, 5)

        def forward(self, x):
            return self.last(x)

    model = DistributedDataParallel(Toy())
    outputs = model(torch.randn(3, 10))
    loss = nn.MSELoss()(outputs, torch.randn(3, 5))
    ```
    """
    for call in info.script.all(ast.Call):
        functions = {info.script.call_name(call)}
        functions |= {info.script.call_name(made) for made in info.origins.of(call.func)}
        if len(call.args) != 2 or not any(map(_LOSSES.match, functions)):
            continue
        outputs, labels = (_width(info, argument) for argument in call.args)
        if outputs and labels and outputs != labels and 1 not in (outputs, labels):
            yield Hit(
                call,
                f"rows of {outputs} numbers are compared with rows of {labels}",
                "at any N: RuntimeError at the first step",
                f"{info.script.source(call.args[1])}  # of {outputs} columns",
            )


def _width(info: ScriptInfo, node: ast.expr) -> int | None:
    """How long the rows of a tensor are, where the script says so."""
    made = _made_by(info, node)
    if made is None:
        return None
    if info.script.full_name(made).startswith("torch.") and _last(info, made) in _FILLED:
        sizes = [constant(size) for size in made.args]
        is_said = len(sizes) > 1 and all(isinstance(size, int) for size in sizes)
        return int(str(sizes[-1])) if is_said else None
    model = _made_by(info, made.func)
    seen: set[ast.Call] = set()
    while model is not None and model.args and _last(info, model) in _WRAPPERS:
        if model in seen:  # `model = DDP(model)` in a loop
            return None
        seen.add(model)
        model = _made_by(info, model.args[0])
    for layer in _last_layers(info, _last(info, model)) if model is not None else ():
        width = constant(keyword(layer, "out_features", 1))
        return width if isinstance(width, int) else None
    return None


def _made_by(info: ScriptInfo, node: ast.expr) -> ast.Call | None:
    """The one call that a value comes from, through calls that keep its shape."""
    seen: set[ast.Call] = set()
    while True:
        origins = info.origins.of(node)
        if len(origins) != 1 or not isinstance(made := origins[0], ast.Call) or made in seen:
            return None
        if not isinstance(made.func, ast.Attribute) or made.func.attr not in _SAME_SHAPE:
            return made
        seen.add(made)  # `x = x.to(device)` in a loop comes from itself
        node = made.func.value


def _last(info: ScriptInfo, call: ast.Call) -> str:
    return info.script.full_name(call).split(".")[-1] or info.script.call_name(call)


def _last_layers(info: ScriptInfo, name: str) -> Iterator[ast.Call]:
    """The Linear layer whose result the one `return` of a class's forward gives."""
    for found in info.script.all(ast.ClassDef):
        if found.name != name:
            continue
        results = [
            each.value
            for each in info.script.all(ast.Return)
            if info.script.is_inside(each, found)
            and getattr(info.script.function_of(each), "name", "") == "forward"
        ]
        if len(results) != 1 or not isinstance(results[0], ast.Call):
            continue
        attribute = info.script.source(results[0].func)
        for made in info.script.all(ast.Assign):
            is_this = attribute in map(info.script.source, made.targets)
            is_linear = info.script.call_name(made.value) == "Linear"
            if is_this and is_linear and info.script.is_inside(made, found):
                assert isinstance(made.value, ast.Call)
                yield made.value
