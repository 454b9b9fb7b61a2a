"""Commands on a simulated accelerator that a package brings to torch, as those of vendors do."""

from __future__ import annotations

import os
import subprocess
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import components
from launching import Launch
from test_stalls import line_of, read_until

pytestmark = [pytest.mark.slow, pytest.mark.launch, components.needs("C++")]
TESTS = Path(__file__).parent
PLUGIN = """
import os

from instep.distributed.identity import accelerators

name = os.environ["SIM_NAME"]
accelerators.register(
    accelerators.Accelerator(name, "SIM", "simccl", (name.upper() + "_VISIBLE_DEVICES",))
)
"""
Begin = Callable[..., Launch]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    """`begin("run", visible="4,6")`: launches of `instep run` on these two of 8 devices."""
    (tmp_path / "sitecustomize.py").write_text(PLUGIN)
    package = tmp_path / "simulated-0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: simulated\nVersion: 0\n")
    (package / "entry_points.txt").write_text("[torch.backends]\nsim = simulated_group:autoload\n")
    begun: list[Launch] = []

    def begin(*command: str, visible: str = "4,6", name: str = "sim") -> Launch:
        launch = Launch(tmp_path, command)
        begun.append(launch)
        path = os.pathsep.join((str(tmp_path), str(TESTS), os.environ.get("PYTHONPATH", "")))
        launch.environ |= {"PYTHONPATH": path, "SIM_DEVICES": "8", "SIM_NAME": name}
        launch.environ[f"{name.upper()}_VISIBLE_DEVICES"] = visible
        return launch

    yield begin
    for launch in begun:
        launch.close()


def write(launch: Launch, text: str) -> str:
    """A script that does not ask which rank it is."""
    path = launch.folder / "train.py"
    path.write_text(textwrap.dedent(text))
    return str(path)


def numbers(ran: subprocess.CompletedProcess[str]) -> list[float]:
    """What the first line of a script says."""
    assert ran.returncode == 0, ran.stderr
    return [float(word) for word in ran.stdout.split("\n")[0].split()]


SCRIPT = """
    import torch
    from torch import nn

    device = torch.accelerator.current_accelerator()
    assert device.type == "sim"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).to("sim:0")
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    data = torch.utils.data.TensorDataset(torch.randn(40, 6), torch.randint(3, (40,)))
    for epoch in range(2):
        for x, y in torch.utils.data.DataLoader(data, 8, shuffle=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x.to(device)), y.to(device)).backward()
            optimizer.step()
    print(*(f"{p.double().sum().item():.9f}" for p in model.parameters()))
    found = torch.get_device_module().get_device_properties(0)
    print(torch.accelerator.device_count(), "on", found.uuid)
"""
OF_CUDA = """
    import os
    import torch
    from torch import nn

    assert torch.cuda.is_available()
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 3)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
    data = torch.utils.data.TensorDataset(torch.randn(40, 6), torch.randint(3, (40,)))
    for x, y in torch.utils.data.DataLoader(data, 8, shuffle=True, pin_memory=True):
        x, y = x.cuda(non_blocking=True), y.to("cuda:0", non_blocking=True)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    torch.cuda.synchronize()
    print(*(f"{p.double().sum().item():.9f}" for p in model.parameters()))
    print(torch.cuda.device_count(), "on", torch.cuda.get_device_properties(0).uuid)
"""


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "text"), [("sim", SCRIPT), ("cuda", OF_CUDA)])
def test_each_rank_of_an_unedited_script_has_one_device_and_the_numbers_of_one_process(
    begin: Begin, name: str, text: str
) -> None:
    launch = begin("run", name=name)
    script = write(launch, text)
    alone, both = launch.run("-n", 1, script), launch.run("-n", 2, script)
    assert numbers(both) == pytest.approx(numbers(alone), abs=1e-6)
    assert "2 on sim-4" in alone.stdout
    assert "1 on sim-4" in both.stdout
    assert "every rank" not in both.stderr


@pytest.mark.parametrize(
    ("ranks", "visible", "told"),
    [
        (3, "4,6", "3 ranks on this host, but only 2 SIMs visible"),
        (2, "4", "ranks 0, 1 share one SIM ("),
    ],
)
def test_two_ranks_on_one_device_are_refused(
    begin: Begin, ranks: int, visible: str, told: str
) -> None:
    launch = begin("run", visible=visible)
    ran = launch.run("-n", ranks, write(launch, SCRIPT))
    assert ran.returncode != 0
    assert told in ran.stderr


@pytest.mark.nightly
@pytest.mark.timeout(120)
def test_verify_finds_the_numbers_of_one_process(begin: Begin) -> None:
    launch = begin("verify")
    launch.environ["TORCHINDUCTOR_CACHE_DIR"] = str(launch.folder / "cache")
    ran = launch.run("-n", 2, write(launch, SCRIPT))
    assert (ran.returncode, ran.stdout.split("\n")[-2]) == (0, "SAME"), ran.stdout + ran.stderr


STANDING = """
    import os
    import torch
    from torch import nn

    model = nn.Linear(6, 3).to("sim")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for k, x in enumerate(torch.utils.data.DataLoader(torch.randn(40, 6), 8)):
        if k == 3 and os.environ["SIM_VISIBLE_DEVICES"] == "6":
            os.read(os.open(os.environ["MEETING"], os.O_RDONLY), 1)  # read
        optimizer.zero_grad()
        model(x.to("sim")).square().mean().backward()  # wait
        optimizer.step()
"""


@pytest.mark.nightly
def test_a_rank_that_stands_still_is_named_with_its_line(begin: Begin) -> None:
    """The other one waits for its device, in a collective on it."""
    launch = begin("run")
    script = write(launch, STANDING)
    with launch.start("-n", 2, script, environ={"INSTEP_STALL_SECONDS": "1"}) as process:
        read_until(
            process,
            rf"instep: rank 0 waits in .* at {line_of(script, 'wait')} for [\d.]+ s; rank 1 is in "
            rf"user code at {line_of(script, 'read')}, waiting for a file",
        )
        stacks = read_until(process, "the stacks of rank 1 are in (.*)").group(1)
        launch.call()
        assert launch.end_of(process).returncode == 0
    os.unlink(stacks)


@pytest.mark.nightly
@pytest.mark.timeout(90)
@pytest.mark.parametrize("name", ["sim", "cuda"])
def test_the_self_test_starts_a_rank_on_each_device(begin: Begin, name: str) -> None:
    ran = begin("env", "--selftest", name=name).run()
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "failure of a rank: ok" in ran.stdout
    assert all(f"{name}:{rank}" in ran.stdout for rank in (0, 1))
