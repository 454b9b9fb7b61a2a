"""The table of patches: what each row replaces, and the patches that concern no files."""

from __future__ import annotations

import functools
import importlib
import inspect
import io
import multiprocessing
import os
import pty
import signal
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import library_stand_ins
from instep.distributed.identity import torch_devices
from instep.errors import UneditedError
from instep.process.patching import Patch
from instep.unedited import opt_out, patch_table
from instep.unedited.devices import DEVICE_PATCHES
from instep.unedited.files.layers.layer import Layer
from instep.unedited.files.overlay import OverlayFiles
from instep.unedited.files.rank0_files import Rank0Files
from instep.unedited.opt_out import BatchEffect
from instep.unedited.processes import children
from library_stand_ins import CALLS
from ranks_in_turn import all_patches, story


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    library_stand_ins.install(monkeypatch)


def owner_of(patch: Patch) -> Any:
    if not isinstance(patch.owner, str):
        return patch.owner
    module, _, path = patch.owner.partition(":")
    return functools.reduce(
        getattr, path.split(".") if path else (), importlib.import_module(module)
    )


def held(owner: Any, name: str) -> object:
    """What the owner itself holds by a name; a static method is made anew at each look."""
    found = vars(owner).get(name)
    return found.__func__ if isinstance(found, staticmethod) else found


NOT_EVERYWHERE = {("tarfile", "bltn_open"), ("bz2", "_builtin_open"), ("lzma", "_builtin_open")}
"""What some versions of Python do not have."""


@pytest.mark.usefixtures("stand_ins")
def test_every_row_names_what_there_is_and_is_put_in_and_taken_out() -> None:
    rows = [(owner_of(patch), patch.name) for patch in patch_table.PATCHES]
    patch_table.install()
    during = [held(owner, name) for owner, name in rows]
    patch_table.remove()
    after = [held(owner, name) for owner, name in rows]
    patch_table.install()
    patch_table.install()
    patch_table.remove()
    assert [held(owner, name) for owner, name in rows] == after
    for patch, (owner, name), patched, plain in zip(
        patch_table.PATCHES, rows, during, after, strict=True
    ):
        assert callable(patch.replacement)
        there = hasattr(owner, name)
        assert there or (patch.owner, name) in NOT_EVERYWHERE, (owner, name)
        assert (patched is plain) is not there, (owner, name)
        if inspect.isfunction(plain) and not patch.factory:
            assert inspect.unwrap(patched) is inspect.unwrap(plain), (owner, name)


POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
KEYWORD = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def is_taken(theirs: inspect.Signature, ours: inspect.Signature) -> bool:
    """Whether a call by all positions, and one by as many keywords as there can be, mean the same
    to both."""
    wanted = list(theirs.parameters.values())
    ways = [
        ([each.name for each in wanted if each.kind in POSITIONAL], {}),
        (
            [each.name for each in wanted if each.kind is inspect.Parameter.POSITIONAL_ONLY],
            {each.name: each.name for each in wanted if each.kind in KEYWORD},
        ),
    ]
    for args, kwargs in ways:
        try:
            bound = ours.bind(*args, **kwargs)
        except TypeError:
            return False
        known = [name for name in bound.arguments if isinstance(bound.arguments[name], str)]
        if any(bound.arguments[name] != name for name in known if name in theirs.parameters):
            return False
    return True


@pytest.mark.usefixtures("stand_ins")
def test_every_replacement_takes_what_it_replaces_takes() -> None:
    """torch.autograd.grad's once refused `only_inputs`."""
    compared, refused = 0, []
    for patch in patch_table.PATCHES:
        original = getattr(owner_of(patch), patch.name, None)
        if patch.factory or original is None:
            continue
        try:
            theirs = [*inspect.signature(original).parameters.values()]
        except ValueError:  # some built-in functions have none
            continue
        _, *ours = inspect.signature(patch.replacement).parameters.values()
        if isinstance(owner_of(patch), type) and ours[0].kind in POSITIONAL:  # self
            theirs, ours = theirs[1:], ours[1:]
        compared += 1
        if not is_taken(inspect.Signature(theirs), inspect.Signature(ours)):
            refused.append((patch.owner, patch.name))
    assert not refused, f"{refused}"
    assert compared > 100


CLAIMS = {
    "horovod.torch:init": "it uses Horovod",
    "apex.parallel:DistributedDataParallel": "it uses Apex",
    "deepspeed:initialize": "it uses DeepSpeed",
    "deepspeed:init_distributed": "it uses DeepSpeed",
}


def claims(call: Callable[..., object], *args: Any, **kwargs: Any) -> list[str]:
    """What a script is left alone for that makes this call, once: outside of a job nothing is."""
    claimed: list[str] = []
    opt_out.set_handler(lambda reason, numbers: claimed.append(f"{reason}. {numbers}"))
    with all_patches(None):
        try:
            call(*args, **kwargs)
        finally:
            opt_out.set_handler(None)
    assert [given[1:] for given in CALLS] == [(args, kwargs)]
    reasons = [*claimed]
    call(*args, **kwargs)
    assert claimed == reasons
    return claimed


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("name", CLAIMS)
def test_a_distributed_library_is_told_by_its_first_call(name: str) -> None:
    module, _, call = name.partition(":")
    told = claims(lambda *a, **k: getattr(sys.modules[module], call)(*a, **k), 1, two=2)
    assert told == [f"{CLAIMS[name]}. {BatchEffect.UNKNOWN}"]


LIGHTNING = (
    "lightning.fabric.fabric:Fabric",
    "lightning.pytorch.trainer.trainer:Trainer",
    "lightning_fabric.fabric:Fabric",
    "pytorch_lightning.trainer.trainer:Trainer",
)
ParallelStrategy = type("ParallelStrategy", (), {})
OWN_STRATEGY = type("OwnStrategy", (ParallelStrategy,), {})()
SINGLE_STRATEGY = type("SingleDeviceStrategy", (), {})()
SEVERAL: list[tuple[dict[str, Any], str]] = [
    ({}, ""),
    ({"devices": "auto", "strategy": "auto", "num_nodes": 1}, ""),
    *(({"devices": devices}, "") for devices in (1, "1", -1, "-1", [3], "0,", None)),
    *(
        ({"devices": devices}, f"devices={devices!r}")
        for devices in (4, "4", [0, 1], (0, 1), "0,1", "0, 1,")
    ),
    ({"num_nodes": 2}, "num_nodes=2"),
    ({"gpus": 2}, "gpus=2"),
    ({"strategy": "ddp", "devices": 1}, "strategy='ddp'"),
    ({"strategy": "Deepspeed_stage_2"}, "strategy='Deepspeed_stage_2'"),
    ({"strategy": "single_device"}, ""),
    ({"strategy": SINGLE_STRATEGY}, ""),
    ({"strategy": OWN_STRATEGY}, "strategy=OwnStrategy()"),
]


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(("given", "asked"), SEVERAL)
def test_lightning_is_divided_unless_it_is_asked_for_several_processes(
    given: dict[str, Any], asked: str
) -> None:
    for module, _, name in (each.partition(":") for each in LIGHTNING):
        CALLS.clear()
        owner = sys.modules[module]
        told = claims(lambda **k: getattr(owner, name)(**k), max_epochs=2, **given)  # noqa: B023
        assert told == [f"it asks Lightning for {asked}. {BatchEffect.PER_RANK}"] * bool(asked)


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(
    ("given", "variables", "asked"),
    [
        ({}, {}, None),
        ({"cpu": True}, {"ACCELERATE_USE_CPU": "true", "ACCELERATE_USE_FSDP": "false"}, None),
        ({"fsdp_plugin": None}, {}, None),
        ({"fsdp_plugin": 3}, {}, "FSDP"),
        ({"deepspeed_plugin": 3}, {}, "DeepSpeed"),
        ({}, {"ACCELERATE_USE_DEEPSPEED": "True"}, "DeepSpeed"),
        ({}, {"ACCELERATE_USE_FSDP": "true"}, "FSDP"),
    ],
)
def test_accelerate_is_divided_unless_it_is_asked_to_shard_over_processes(
    monkeypatch: pytest.MonkeyPatch,
    given: dict[str, Any],
    variables: dict[str, str],
    asked: str | None,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    def call(**kwargs: Any) -> None:
        sys.modules["accelerate.accelerator"].Accelerator(**kwargs)
        CALLS.pop()
        sys.modules["accelerate.state"].PartialState(**kwargs)

    expected = [] if asked is None else [f"it asks Accelerate for {asked}. {BatchEffect.PER_RANK}"]
    assert claims(call, **given) == expected


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(("fsdp", "asked"), [(None, []), ("", []), ([], []), ("full_shard", [1])])
def test_transformers_trainer_is_divided_unless_it_is_asked_to_shard(
    fsdp: object, asked: list[int]
) -> None:
    arguments = sys.modules["transformers.training_args"].TrainingArguments()
    CALLS.clear()
    arguments.fsdp = fsdp
    told = claims(lambda: arguments.__post_init__())
    assert told == [f"it asks the Trainer for fsdp. {BatchEffect.PER_RANK}" for _ in asked]


@pytest.mark.parametrize(
    ("size", "said"),
    [
        (1, f"it starts a process group of one process. {BatchEffect.IDENTICAL}"),
        (2, f"it starts a process group of its own. {BatchEffect.UNKNOWN}"),
    ],
)
def test_a_group_of_one_process_makes_identical_runs(
    monkeypatch: pytest.MonkeyPatch, size: int, said: str
) -> None:
    def starts(backend: str, init_method: str | None = None, world_size: int = -1) -> None:
        CALLS.append(("", (backend,), {"world_size": world_size}))

    monkeypatch.setattr(torch.distributed, "init_process_group", starts)
    CALLS.clear()
    told = claims(
        lambda *a, **k: torch.distributed.init_process_group(*a, **k), "gloo", world_size=size
    )
    assert told == [said]


@pytest.mark.usefixtures("stand_ins")
def test_one_run_is_logged_by_rank_0(tmp_path: Path) -> None:
    import wandb  # type: ignore[import-not-found]

    before = Layer(str(tmp_path / "before"))
    own = Layer(str(tmp_path / "rank1"))
    for files in (None, Rank0Files(before), OverlayFiles(own, before)):
        with all_patches(files):
            assert wandb.init("project", mode="online") == "wandb"
    assert [(args, kwargs["mode"]) for _, args, kwargs in CALLS] == [
        *[(("project",), "online")] * 2,
        (("project",), "disabled"),
    ]


DEVICES = {
    (nn.DataParallel, "__init__"): {"device_ids": [0], "output_device": 0},
    (nn.parallel, "data_parallel"): {"device_ids": [0], "output_device": 0},
    (nn.parallel, "replicate"): {"devices": [0]},
    (nn.parallel, "scatter"): {"target_gpus": [0]},
    (nn.parallel, "parallel_apply"): {"devices": [0]},
    (nn.parallel, "gather"): {"target_device": 0},
}


@pytest.mark.parametrize("has_gpus", [True, False])
def test_functions_for_several_devices_get_the_ranks_own(
    monkeypatch: pytest.MonkeyPatch, has_gpus: bool
) -> None:
    """What else they are given stays as it is, by position and by name."""
    kind = "cuda" if has_gpus else None
    monkeypatch.setattr(torch_devices, "accelerator_type", lambda: kind)
    rows = {(patch.owner, patch.name): patch for patch in DEVICE_PATCHES}
    assert rows.keys() == DEVICES.keys()
    for (owner, name), own in DEVICES.items():
        signature = inspect.signature(getattr(owner, name))

        def original(*args: Any, **kwargs: Any) -> dict[str, Any]:
            return dict(signature.bind(*args, **kwargs).arguments)  # noqa: B023

        original.__signature__ = signature  # type: ignore[attr-defined]
        given: dict[str, Any] = {
            key: [3, 1] if isinstance(own.get(key), list) else 5
            for key, parameter in signature.parameters.items()
            if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        }
        expected = given | own if has_gpus else given
        answer = rows[owner, name].replacement
        assert answer(original, **given) == expected
        assert answer(original, *given.values()) == expected


def test_outside_of_a_job_signals_streams_and_commands_are_what_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outside of a divided script, as in a process that it has forked."""
    monkeypatch.chdir(tmp_path)

    def stories() -> Iterator[Callable[[], object]]:
        yield lambda: os.system(command="exit 3")
        yield lambda: os.waitstatus_to_exitcode(os.system("exit 3"))
        yield lambda: subprocess.run(args=["sh", "-c", "echo a; exit 2"], capture_output=True)
        yield lambda: subprocess.call(["sh", "-c", "exit 4"])
        yield lambda: subprocess.check_output(["echo", "b"], text=True)
        yield lambda: os.spawnv(os.P_WAIT, "/bin/sh", ["sh", "-c", "exit 5"])
        yield lambda: os.spawnve(os.P_WAIT, "/bin/sh", ["sh", "-c", "exit $A"], {"A": "6"})
        yield lambda: os.spawnve(mode=os.P_WAIT, file="/bin/sh", args=["sh", "-c", "exit $A"],
                                 env={"A": "6"})  # fmt: skip
        yield lambda: os.spawnlp(os.P_WAIT, "sh", "sh", "-c", "exit 5")
        yield lambda: os.spawnvpe(os.P_WAIT, "sh", ["sh", "-c", "exit $A"], {"A": "6"})
        yield lambda: awaited(os.spawnv(os.P_NOWAIT, "/bin/sh", ["sh", "-c", "exit 7"]))
        yield lambda: awaited(os.posix_spawn("/bin/sh", ["sh", "-c", "exit $A"], {"A": "8"}))
        yield lambda: awaited(os.posix_spawnp("sh", ["sh", "-c", "exit 9"], os.environ))
        yield lambda: awaited(os.posix_spawnp("sh", ["sh"], {}, file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0)]))  # fmt: skip
        yield lambda: os.waitstatus_to_exitcode(pty.spawn(["sh", "-c", "exit 3"]))
        yield killed
        yield popen
        yield popen_that_is_stopped
        yield lambda: through(b"abc", 2)
        yield lambda: os.isatty(0)
        yield (
            lambda: (
                signal.getsignal(signal.SIGUSR1)
                is signal.signal(signal.SIGUSR1, signal.getsignal(signal.SIGUSR1))
            )
        )

    alone = story(tmp_path / "alone", stories)
    with all_patches(None):
        assert repr(story(tmp_path / "shared", stories)) == repr(alone)


def awaited(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def killed() -> int:
    pid = os.spawnvp(os.P_NOWAIT, "cat", ["cat", "/dev/zero"])
    os.kill(pid, signal.SIGKILL)
    return awaited(pid)


def popen() -> object:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as it:
        return it.communicate(input="in", timeout=None), it.poll(), it.wait(timeout=5)


def popen_that_is_stopped() -> object:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as it:
        it.send_signal(signal.SIGTERM)
        return it.wait(5), it.returncode


def through(text: bytes, count: int) -> bytes:
    reading, writing = os.pipe()
    try:
        os.write(writing, text)
        return os.read(reading, count)
    finally:
        os.close(reading)
        os.close(writing)


def test_training_processes_of_the_scripts_own_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only a model in shared memory tells them from a loader's workers and what else there is."""
    monkeypatch.setattr(children, "_shares_modules", [])
    started: list[object] = []

    def start(target: object) -> object:
        return children.start(started.append, types.SimpleNamespace(_target=target))

    loads = torch.utils.data._utils.worker._worker_loop
    with all_patches(None):
        start(loads)
        start(print)
        start(None)
        model = nn.Linear(1, 1)
        assert model.share_memory() is model
        assert model.weight.is_shared()
        start(loads)
        for target in (print, None):
            with pytest.raises(UneditedError, match="a model in shared memory"):
                start(target)
        with pytest.raises(UneditedError, match="multiprocessing"):
            multiprocessing.get_context("fork").Process(target=print).start()
        for spawn in (torch.multiprocessing.spawn, torch.multiprocessing.start_processes):
            with pytest.raises(UneditedError, match=r"torch\.multiprocessing\.spawn") as raised:
                spawn(print)
            assert "Run it with one rank (-n 1), or let" in str(raised.value)  # not with --plain
    assert len(started) == 4


@pytest.mark.usefixtures("stand_ins")
def test_launchers_of_training_processes_are_refused() -> None:
    from torch.distributed.launcher import api

    launch = sys.modules["accelerate.utils.launch"]
    with all_patches(None):
        for kind in ("simple_launcher_cmd_env", "multi_gpu_env", "deepspeed_cmd_env"):
            with pytest.raises(UneditedError, match="accelerate launch starts training processes"):
                getattr(launch, f"prepare_{kind}")("args")
        with pytest.raises(UneditedError, match="torchrun starts training processes"):
            api.launch_agent(None, None, [])  # type: ignore[arg-type]


def test_classes_in_place_of_others_keep_their_relations() -> None:
    class Before(io.FileIO):
        """A class that the script derives before anything is put in."""

    plain = io.FileIO
    with all_patches(None):
        assert io.FileIO is not plain

        class After(io.FileIO):
            """And one that it derives after."""

        with plain(os.devnull) as first, Before(os.devnull) as second, After(os.devnull) as third:
            assert [isinstance(file, io.FileIO) for file in (first, second, third)] == [True] * 3
            assert [isinstance(file, After) for file in (first, second, third)] == [
                *(False, False),
                True,
            ]
        kinds = (plain, Before, After, io.FileIO)
        assert all(issubclass(kind, io.FileIO) for kind in kinds)
        assert [issubclass(kind, After) for kind in kinds] == [False, False, True, False]
        assert not issubclass(io.BytesIO, io.FileIO)
        assert not isinstance(io.BytesIO(), io.FileIO)
        names = (io.FileIO.__module__, io.FileIO.__qualname__, io.FileIO.__doc__)
        assert names == (plain.__module__, plain.__qualname__, plain.__doc__)
    assert io.FileIO is plain
