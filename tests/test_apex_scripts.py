"""Apex's scripts, unedited, where no Apex is installed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launching import Launch

pytestmark = pytest.mark.launch

TRAINING = """\
    import argparse
    import torch
    import torch.distributed as dist
    from apex import amp
    from apex.parallel import DistributedDataParallel
    from torch.nn.functional import cross_entropy

    parser = argparse.ArgumentParser()
    parser.add_argument('--local_rank', default=-1, type=int)
    args = parser.parse_args()
    dist.init_process_group(backend='gloo')
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(48, 6, generator=generator)
    train_dataset = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())
    train_sampler = torch.utils.data.distributed.DistributedSampler(train_dataset)
    train_loader = torch.utils.data.DataLoader(train_dataset, batch_size=6, sampler=train_sampler)
    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    model, optimizer = amp.initialize(model, optimizer)
    model = DistributedDataParallel(model, device_ids=[args.local_rank])
    losses = []
    for epoch in range(10):
        for images, target in train_loader:
            output = model(images)
            loss = cross_entropy(output, target)
            optimizer.zero_grad()
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
            losses.append(loss.item())
    tell(rank, str(output.dtype), losses[0], losses[-1],
         sum(p.double().sum().item() for p in model.parameters()))
"""


ONE_PROCESS = """\
    import torch
    from torch import nn
    from torch.nn.functional import cross_entropy
    from torch.utils.data import DataLoader, TensorDataset
    from apex import amp

    def train(opt_level):
        torch.manual_seed(0)
        x = torch.randn(48, 6)
        data = TensorDataset(x, (x.sum(1) > 0).long())
        model = nn.Sequential(
            nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        model, optimizer = amp.initialize(model, optimizer, opt_level=opt_level)
        for epoch in range(4):
            for images, target in DataLoader(data, 8, shuffle=True):
                loss = cross_entropy(model(images), target)
                optimizer.zero_grad()
                with amp.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
                optimizer.step()
        return [loss.item(), *(p.double().norm().item() for p in model.parameters())]

    tell(rank, [train(opt_level) for opt_level in ("O0", "O1", "O2")])
"""


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    launch = Launch(tmp_path)
    # torch makes a folder for its compiler, which stays.
    launch.environ["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path / "inductor")
    yield launch
    launch.close()


def test_the_script_of_the_article_runs_as_it_is(launch: Launch) -> None:
    done = launch.run_forked("-n", 2, launch.script(TRAINING))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("amp: Options(opt_level='O1'") == 1
    assert "no device_ids and no output_device; they are ignored" in done.stderr
    (_, dtype, first, last, parameters), other = launch.events(2)
    assert dtype == "torch.bfloat16"
    assert done.stderr.count("amp computes in bfloat16 here") == 1
    assert last < first / 2
    assert other[-1] == parameters


def test_a_script_for_one_process_has_its_numbers_on_two(launch: Launch) -> None:
    script = launch.script(ONE_PROCESS)
    assert launch.run_forked("-n", 1, script).returncode == 0
    ((_, expected),) = launch.events(1)
    done = launch.run_forked("-n", 2, script)
    assert done.returncode == 0, done.stderr
    assert "runs this script as it is" not in done.stderr
    for _, seen in launch.events(2):
        for ours, theirs, rounding in zip(seen, expected, (1e-5, 3e-2, 3e-2), strict=True):
            assert ours == pytest.approx(theirs, rel=rounding)


def test_an_installed_apex_comes_first(launch: Launch) -> None:
    package = launch.folder / "apex"
    package.mkdir()
    (package / "__init__.py").write_text("amp = 'their own'")
    done = launch.run("-n", 1, launch.script("from apex import amp; tell(amp)"))
    assert done.returncode == 0, done.stderr
    assert launch.event() == ["their own"]


def test_every_name_of_apexs_is_one_module_of_ours(launch: Launch) -> None:
    script = launch.script(
        """
        import apex.parallel.distributed
        from apex import amp
        from apex.amp._amp_state import _amp_state, maybe_print
        from apex.parallel.LARC import LARC
        from apex.parallel.optimized_sync_batchnorm import SyncBatchNorm
        import apex.parallel.sync_batchnorm as sync_batchnorm
        import instep.compat.apex as ours
        from apex.normalization import FusedLayerNorm
        from apex.optimizers.fused_adam import FusedAdam
        from apex.fp16_utils import *
        from importlib.util import find_spec
        import apex.contrib
        try:
            from apex.contrib.xentropy import SoftmaxCrossEntropyLoss
        except ImportError as error:
            said = str(error)
        tell(apex is ours, amp is ours.amp, apex.parallel.distributed.DistributedDataParallel
             is ours.parallel.DistributedDataParallel, LARC.__name__, find_spec("apex.rnn"),
             FusedAdam is ours.optimizers.FusedAdam, network_to_half.__module__, said,
             amp._amp_state is _amp_state, SyncBatchNorm is sync_batchnorm.SyncBatchNorm
             is ours.parallel.SyncBatchNorm)
        """
    )
    assert launch.run_forked("-n", 1, script).returncode == 0
    said = (
        "apex.contrib.xentropy needs an installed Apex. In its place: "
        "torch.nn.CrossEntropyLoss(label_smoothing=...)."
    )
    fp16 = "instep.compat.apex.fp16_utils"
    assert launch.event() == [True, True, True, "LARC", None, True, fp16, said, True, True]


@pytest.mark.nightly
def test_multiproc_starts_one_process_for_each_rank_with_its_arguments(launch: Launch) -> None:
    script = launch.script("tell(rank, sys.argv[1:], __name__)")
    module = "instep.compat.apex.parallel.multiproc"
    done = subprocess.run(
        [sys.executable, "-m", module, script, "--lr", "0.1", "--world-size", "2"],
        env=launch.environ,
        cwd=launch.folder,
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
    for rank, (told, arguments, name) in enumerate(launch.events(2)):
        expected = ["--lr", "0.1", "--world-size", "2", "--rank", str(rank)]
        assert (told, arguments, name) == (rank, expected, "__main__")
