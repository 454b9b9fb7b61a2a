"""Python imports this file as it starts: see what a script trains, without a change of the script.

The optimizers' hooks keep the parameters and the time of each step. At the exit, after whatever the
script and instep do there, the final parameters are written to OBSERVER_FOLDER. If OBSERVER_MOVE
is set, the parameters are multiplied by 1 plus or minus it before the first step: the distance to
an unmoved run is the script's own noise. If OBSERVER_ROWS is set, the rows that go through each
module with gradients are counted, by whether its calls are divided among the ranks.
"""

import atexit
import os
import sys
import time
from importlib.machinery import PathFinder

FOLDER = os.environ.get("OBSERVER_FOLDER")
RANK = os.environ.get("RANK", "0")
MOVE = float(os.environ.get("OBSERVER_MOVE", "0"))
DOUBLE = os.environ.get("OBSERVER_DOUBLE")
ROWS = os.environ.get("OBSERVER_ROWS")
RANKS = int(os.environ.get("WORLD_SIZE", "1"))
KERAS = "keras.src.optimizers.base_optimizer"
CALLS = "instep.unedited.sharded_call.modules"
MODULES = ("torch.optim.optimizer", "fastai.optimizer", KERAS, "torch", CALLS)
PROCESS = os.getpid()
optimizers = {}
times = []
calls = {}
rows = {}  # of each module: those of divided calls, and those of whole ones


class Finder:
    """Attaches the hooks as soon as torch's optimizers are imported."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        spec = PathFinder.find_spec(name, path) if name in MODULES else None
        if spec is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            attach(name, module)

        spec.loader.exec_module = exec_module
        return spec


def attach(name, module):
    if name == "fastai.optimizer":
        observe(module.Optimizer, "step")
    elif name == KERAS:
        observe(module.BaseOptimizer, "apply")
    elif name == CALLS:
        if ROWS:
            count_rows(module)
    elif name == "torch":
        if DOUBLE:
            module.set_default_dtype(module.float64)
    else:
        module.register_optimizer_step_pre_hook(before_step)
        module.register_optimizer_step_post_hook(after_step)


def observe(cls, name):
    """Attach the hooks to an optimizer that is none of torch's."""
    step = getattr(cls, name)

    def observed(self, *args, **kwargs):
        before_step(self, args, kwargs)
        result = step(self, *args, **kwargs)
        after_step(self, args, kwargs)
        return result

    setattr(cls, name, observed)


def before_step(optimizer, args, kwargs):
    if os.getpid() != PROCESS:
        return
    optimizers[id(optimizer)] = optimizer
    if not times:
        times.append(time.perf_counter())
    if MOVE:
        import torch

        generator = torch.Generator().manual_seed(len(times))
        for p in parameters(optimizer):
            sign = torch.randint(0, 2, p.shape, generator=generator) * 2 - 1
            p.data.mul_((1 + MOVE * sign.to(p.device)).to(p.dtype))


def after_step(optimizer, args, kwargs):
    times.append(time.perf_counter())
    modules = sys.modules.get(CALLS)
    if modules:
        calls.update(vars(modules.call_counts))


def count_rows(modules):
    """Count in the functions of instep by which it counts its own calls."""
    from instep.unedited.sharded_call.plan.division import max_rows

    counts, known = type(modules.call_counts), modules._run_known_whole
    sharded, whole = counts.add_sharded, counts.add_whole

    def add_sharded(self, call, plan, group):
        sharded(self, call, plan, group)
        add_rows(call.module, plan.division.count_rows(call.leaves), 0)

    def add_whole(self, call):
        whole(self, call)
        add_rows(call.module, 0, max_rows(call.leaves))

    def run_known_whole(known_call, original, module, args, kwargs):
        leaves = modules.BoundCall.of(original, [module], args, kwargs).leaves
        add_rows(module, 0, max_rows(leaves))
        return known(known_call, original, module, args, kwargs)

    counts.add_sharded, counts.add_whole = add_sharded, add_whole
    modules._run_known_whole = run_known_whole


def add_rows(module, divided, whole):
    import torch

    before = rows.setdefault(module, (0, 0))
    if torch.is_grad_enabled() and divided + whole >= RANKS:  # fewer rows cannot be divided
        rows[module] = before[0] + divided, before[1] + whole


def work():
    """Parameters times rows: of divided calls, and of whole ones.

    What is whole counts where its parts are not counted themselves.
    """
    total = [0, 0]
    for module, counts in rows.items():
        inner = [part for part in module.modules() if part is not module and part in rows]
        covered = {id(p) for part in inner for p in part.parameters()}
        own = list(module.parameters())
        total[0] += counts[0] * sum(p.numel() for p in own)
        total[1] += counts[1] * sum(p.numel() for p in own if id(p) not in covered)
    return total


def parameters(optimizer):
    if hasattr(optimizer, "all_params"):
        return [p for p, *_ in optimizer.all_params()]
    if hasattr(optimizer, "_trainable_variables"):
        return [variable.value for variable in optimizer._trainable_variables]
    return [p for group in optimizer.param_groups for p in group["params"]]


def write():
    if not optimizers or os.getpid() != PROCESS:
        return
    import pickle

    found = [
        [p.detach().to_dense().double().cpu().numpy() for p in parameters(optimizer)]
        for optimizer in optimizers.values()
    ]
    with open(os.path.join(FOLDER, f"rank{RANK}.pickle"), "wb") as file:
        seen = {"parameters": found, "times": times, "calls": calls, "work": work()}
        pickle.dump(seen, file)


if FOLDER:
    for name in MODULES:
        if name in sys.modules:
            attach(name, sys.modules[name])
    sys.meta_path.insert(0, Finder)
    atexit.register(write)
