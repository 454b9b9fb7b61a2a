"""INS404, INS408: the order in which apex.amp wraps models and optimizers."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from instep.check.finding import Hit, Severity, rule
from instep.check.script import keyword
from instep.check.script_info import ScriptInfo


@rule("INS404", Severity.ERROR, "apex.amp.initialize is called after DistributedDataParallel.")
def _amp_after_wrapping(info: ScriptInfo) -> Iterator[Hit]:
    """`amp.initialize` changes parameters and forward of the model. Apex refuses a model
    that is already in its DistributedDataParallel (RuntimeError); torch's wrapper has then
    registered its hooks on parameters that are no longer those. It concerns every N.

    ## Bad
    ```python
    from apex import amp
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(net)
    model, optimizer = amp.initialize(model, optimizer)
    ```

    ## Good
    ```python
    from apex import amp
    from torch.nn.parallel import DistributedDataParallel

    net, optimizer = amp.initialize(net, optimizer)
    model = DistributedDataParallel(net)
    ```
    """
    for call in info.script.calls_of("apex.amp.initialize"):
        model = keyword(call, "models", 0)
        for wrap in info.ddp_calls:
            same_function = info.script.are_in_one_function(wrap, call)
            name = info.target_names(wrap)
            if not same_function or model is None or info.script.are_exclusive(wrap, call):
                continue
            if wrap.lineno < call.lineno and name and name == info.script.source(model):
                yield Hit(
                    call,
                    f"{name} is wrapped in line {wrap.lineno}, before amp.initialize",
                    "at any N: RuntimeError, or hooks on parameters that are no longer in use",
                    f"{info.script.source(info.script.statement_of(call))}  # before "
                    "DistributedDataParallel",
                )
                break


@rule("INS408", Severity.ERROR, "An optimizer is made after apex.amp.initialize.")
def _optimizer_after_amp(info: ScriptInfo) -> Iterator[Hit]:
    """`amp.initialize` gives the optimizer its loss scale and the float32 copies of half-precision
    parameters. One that is made afterwards has neither: `amp.scale_loss` ends with an error, or the
    optimizer steps by scaled gradients. It concerns every N. Make the optimizer before, or call
    `amp.initialize` after all of them are made.

    ## Bad
    ```python
    import torch
    from apex import amp
    from apex.parallel import DistributedDataParallel

    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net, optimizer = amp.initialize(net, optimizer)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with amp.scale_loss(loss_function(model), optimizer) as loss:
        loss.backward()
    ```

    ## Good
    ```python
    import torch
    from apex import amp
    from apex.parallel import DistributedDataParallel

    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net, optimizer = amp.initialize(net, optimizer)
    model = DistributedDataParallel(net)
    with amp.scale_loss(loss_function(model), optimizer) as loss:
        loss.backward()
    ```
    """
    calls = [*info.script.calls_of("apex.amp.initialize")]
    if not any(info.script.calls_of("apex.amp.scale_loss")):
        return
    for assign in info.script.all(ast.Assign):
        made = info.script.full_name(assign.value)
        is_conditional = any(isinstance(a, ast.If) for a in info.script.ancestors(assign))
        if is_conditional or not re.match(r"(torch\.optim|apex\.optimizers)\.[A-Z]\w*$", made):
            continue
        name = info.script.source(assign.targets[0])
        here = [call for call in calls if info.script.are_in_one_function(call, assign)]
        given = [keyword(call, "optimizers", 1) for call in here if call.lineno < assign.lineno]
        sources = [info.script.source(each) for each in given if each is not None]
        if name in sources and len(given) == len(here):
            yield Hit(
                assign,
                f"{name} is made after amp.initialize, which prepared the one before",
                "at any N: amp.scale_loss ends with an error, or the steps are too large",
                f"{info.script.source(assign)}  # before amp.initialize",
            )
