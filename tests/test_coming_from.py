"""docs/coming-from.md: every row is run, and its right side does what the left side promised."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from io import StringIO
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

import instep
from launching import Launch
from pool import run
from test_apex import fresh_amp

PAGES = [
    Path(__file__).parents[1] / "docs" / name for name in ("coming-from.md", "coming-from.zh.md")
]
ROWS, COLUMNS = 10, 6
"""Of the batch in the tests."""


def tables(page: Path) -> list[list[tuple[str, str]]]:
    """Of each section: (their line, ours), where ours is "" for nothing."""
    sections = re.split(r"^## ", page.read_text(), flags=re.MULTILINE)[1:]
    return [list(rows_of(section)) for section in sections]


def rows_of(section: str) -> Iterator[tuple[str, str]]:
    for line in section.splitlines():
        if line.startswith("| `"):
            theirs, ours = line.strip("| ").split(" | ", 1)
            first = re.match(r"`([^`]+)`", ours)
            assert first or ours.startswith("*"), line
            yield theirs.strip("`"), first[1] if first else ""


def test_both_languages_hold_the_same_rows() -> None:
    english, chinese = map(tables, PAGES)
    assert len(english) == 6
    assert english == chinese


# --------------------------------------------------------------------------- what a row is about


class Scene(SimpleNamespace):
    """What a script has at hand: every rank builds the same, but the models differ."""

    def __init__(self, folder: str) -> None:
        generator = torch.Generator().manual_seed(0)
        whole = torch.randn(ROWS, COLUMNS, generator=generator)
        dataset = TensorDataset(whole, torch.arange(ROWS) % 3)
        torch.manual_seed(instep.rank)
        model = nn.Sequential(nn.Linear(COLUMNS, COLUMNS), nn.BatchNorm1d(COLUMNS), nn.Linear(6, 3))
        super().__init__(
            instep=instep,
            torch=torch,
            nn=nn,
            SGD=SGD,
            DataLoader=DataLoader,
            clip_grad_norm_=clip_grad_norm_,
            dataset=dataset,
            loader=DataLoader(dataset, 4),
            model=model,
            optimizer=SGD(model.parameters(), 0.1),
            path=f"{folder}/rank{instep.rank}",
            config={"rank": instep.rank},
            array=numpy.full(3, instep.rank),
            writer=Writer(),
            prepare_data=lambda: (instep.world_size, instep.rank),
            correct_nums=torch.ones(1),
            value=None,
            said=StringIO(),
        )

    def batch(self) -> None:
        """This rank's rows of a batch, and what a script computes of them."""
        self.x, self.y = instep.shard(self.dataset.tensors)
        self.output = self.model(self.x)
        self.loss = cross_entropy(self.output, self.y)

    def run(self, code: str) -> None:
        """Run the code of a row."""
        if code.startswith("@"):
            code += "\ndef value(): return instep.world_size, instep.rank"
        self.before = copy.deepcopy([p.grad for p in self.model.parameters()])
        with redirect_stdout(self.said):
            try:
                program = compile(code, "<row>", "eval")
            except SyntaxError:
                exec(code, vars(self))
            else:
                self.value = eval(program, vars(self))

    def expected_gradients(self, times: float = 1.0) -> None:
        """`.grad` has grown by `times` the gradient of the whole batch in one process."""
        model = nn.Sequential(nn.Linear(COLUMNS, COLUMNS), nn.BatchNorm1d(COLUMNS), nn.Linear(6, 3))
        model.load_state_dict(self.model.state_dict())
        x, y = self.dataset.tensors
        cross_entropy(model(x), y).backward()
        for ours, before, theirs in zip(
            self.model.parameters(), self.before, model.parameters(), strict=True
        ):
            grown = ours.grad if before is None else ours.grad - before
            torch.testing.assert_close(grown, times * theirs.grad, rtol=1e-4, atol=1e-6)


class Writer(list):
    def add_scalar(self, name: str, value: float) -> None:
        self.append((name, value))


Check = Callable[[Scene], None]


def gives(expected: Callable[[Scene], Any]) -> Check:
    def check(scene: Scene) -> None:
        torch.testing.assert_close(scene.value, expected(scene))

    return check


def has(name: str, expected: Callable[[Scene], Any]) -> Check:
    def check(scene: Scene) -> None:
        torch.testing.assert_close(getattr(scene, name), expected(scene))

    return check


rank = gives(lambda s: torch.distributed.get_rank())
size = gives(lambda s: torch.distributed.get_world_size())
local_rank = gives(lambda s: instep.world.local_rank)


def shares(scene: Scene) -> Iterator[torch.Tensor]:
    """Every rank's rows of the batch."""
    return iter(scene.dataset.tensors[0].chunk(instep.world_size))


def divided(scene: Scene) -> None:
    """The loader gives every sample to one rank, the batches are the job's."""
    with torch.no_grad():
        seen = [row.tolist() for x, _ in scene.loader for row in x]
    everybody = list(chain(*instep.all_gather_object(seen)))
    assert sorted(everybody) == sorted(scene.dataset.tensors[0].tolist())
    assert len(scene.loader) == -(-ROWS // scene.loader.batch_size)


def another_order(scene: Scene) -> None:
    with torch.no_grad():
        orders = [[y.tolist() for _, y in scene.loader] for _ in range(4)]
    assert any(order != orders[0] for order in orders)


def in_step(scene: Scene) -> None:
    """Parameters are equal on all ranks, and the gradient is that of the whole batch."""
    equal(scene)
    scene.model.zero_grad()
    scene.batch()
    scene.before = [None] * 6
    scene.loss.backward()
    scene.expected_gradients()
    scene.model.zero_grad()


def batch_statistics(scene: Scene) -> None:
    first, norm = scene.model[0], scene.model[1]
    norm.reset_running_stats()
    scene.batch()
    values = first(scene.dataset.tensors[0].to(first.weight.dtype)).float()
    torch.testing.assert_close(norm.running_mean, 0.1 * values.mean(0), rtol=1e-3, atol=1e-3)


def saved(scene: Scene) -> None:
    """By one rank, each of which has a path of its own; without a prefix."""
    path = Path(scene.path)
    assert path.exists() is (instep.rank == 0)
    if path.exists():
        nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).load_state_dict(
            torch.load(path)
        )
        path.unlink()


def state(scene: Scene) -> None:
    assert list(scene.state) == [*dict.fromkeys(name for name in scene.model.state_dict())]
    assert not any(name.startswith("module.") for name in scene.state)


def mean_loss(scene: Scene) -> None:
    with torch.no_grad():
        x, y = scene.dataset.tensors
        norm = copy.deepcopy(scene.model[1])
        whole = cross_entropy(scene.model[2](norm.train()(scene.model[0](x))), y)
    assert scene.mean.compute() == pytest.approx(whole.item(), rel=1e-4)


def accuracies(scene: Scene) -> None:
    with torch.no_grad():
        x, y = scene.dataset.tensors
        norm = copy.deepcopy(scene.model[1])
        best = scene.model[2](norm.train()(scene.model[0](x))).topk(2).indices == y[:, None]
    assert (scene.acc1, scene.acc5) == (
        best[:, 0].double().mean().item(),
        best.any(1).double().mean().item(),
    )


def waits(scene: Scene) -> None:
    """A barrier, or nothing to be done: the ranks go on together."""
    assert instep.all_gather_object(instep.rank) == list(range(instep.world_size))


def seeded(scene: Scene) -> None:
    assert torch.initial_seed() == 3


def stepped(scene: Scene) -> None:
    for parameter in scene.model.parameters():
        assert torch.equal(parameter, instep.broadcast(parameter.detach()))
        assert parameter.grad is not None


def steps_with_a_loss(scene: Scene) -> None:
    scene.batch()
    before = copy.deepcopy(scene.model[0].weight)
    scene.optimizer.step(scene.loss)
    equal_parameters = [instep.broadcast(p.detach()) for p in scene.model.parameters()]
    assert all(map(torch.equal, scene.model.parameters(), equal_parameters))
    assert not torch.equal(before, scene.model[0].weight)
    scene.batch()


def nothing_sent(scene: Scene) -> None:
    """Every rank has its own part, and the next backward sends the sum of both."""
    weight = scene.model[0].weight.grad
    assert not torch.equal(*instep.all_gather(weight)[:2])
    scene.batch()
    scene.loss.backward()
    scene.expected_gradients(times=2.0)


def written_once(scene: Scene) -> None:
    assert scene.writer == [("loss", scene.loss.item())] * (instep.rank == 0)


def one_process(scene: Scene) -> None:
    assert scene.value() == (1, 0)


def clipped(scene: Scene) -> None:
    assert torch.stack([g.norm() for g in grads_of(scene.optimizer)]).norm() <= 0.1001


def rate(scene: Scene) -> None:
    assert [group["lr"] for group in scene.optimizer.param_groups] == [0.1]
    scene.optimizer.param_groups[0]["note"] = instep.rank  # for `one_state` to find


def one_state(scene: Scene) -> None:
    first, *others = instep.all_gather_object(scene.optimizer.state_dict())
    assert all(other == first for other in others)


def equal(scene: Scene) -> None:
    for tensor in scene.model.state_dict().values():
        assert torch.equal(tensor, instep.broadcast(tensor))


def own_block(rows: torch.Tensor) -> torch.Tensor:
    n, world = len(rows), instep.world_size
    return rows[instep.rank * n // world : (instep.rank + 1) * n // world]


def grads_of(optimizer: Any) -> Iterator[torch.Tensor]:
    return (p.grad for group in optimizer.param_groups for p in group["params"])


def halves(scene: Scene) -> None:
    assert {p.dtype for p in scene.model.parameters()} == {torch.bfloat16, torch.float32}


def scaled_back(scene: Scene) -> None:
    """Half precision throughout, so that this is rough."""
    reference = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    reference.load_state_dict(scene.model.state_dict())
    x, y = scene.dataset.tensors
    cross_entropy(reference(x), y).backward()
    for ours, theirs in zip(grads_of(scene.optimizer), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs.grad, rtol=0.05, atol=5e-3)


def masters_stepped(scene: Scene) -> None:
    masters = [p for group in scene.optimizer.param_groups for p in group["params"]]
    for parameter, master in zip(scene.model.parameters(), masters, strict=True):
        assert torch.equal(parameter, master.to(parameter.dtype))
        assert torch.equal(master, instep.broadcast(master.detach()))


def prepared(scene: Scene) -> None:
    divided(scene)
    in_step(scene)


def printed(scene: Scene) -> None:
    assert scene.said.getvalue() == "done\n" * (instep.rank == 0)


def same_model(scene: Scene) -> None:
    assert type(scene.value) is nn.Sequential


def by_launching(scene: Scene) -> None:
    """Run by the test of commands."""


def imported(name: str) -> Check:
    def check(scene: Scene) -> None:
        found = getattr(scene, name)
        assert getattr(found, "__module__", found.__name__).startswith("instep.compat")

    return check


def classes_imported(scene: Scene) -> None:
    assert scene.DistributedDataParallel.__module__.startswith("instep.compat.apex")
    assert scene.LARC(scene.optimizer).optim is scene.optimizer


def sum_over_ranks(scene: Scene) -> Any:
    """Of x, whose shape must be the same on all ranks."""
    return sum(shares(scene))


_JITTOR: dict[str, Check] = {
    "mpirun -np 2 python train.py": by_launching,
    "import jittor as jt": imported("jt"),
    "from jittor import mpi": imported("mpi"),
    "jt.in_mpi": gives(lambda s: True),
    "jt.rank": rank,
    "jt.world_size": size,
    "mpi.world_rank()": rank,
    "mpi.local_rank()": local_rank,
    "jt.set_global_seed(3)": seeded,
    "dataset = MyDataset().set_attrs(batch_size=8)": divided,
    "from jittor.dataset import Dataset": imported("Dataset"),
    "dataset.total_len": gives(lambda s: ROWS),
    "model = Model()": in_step,
    "model.mpi_param_broadcast()": in_step,
    "nn.BatchNorm(6)": batch_statistics,
    "optimizer.step(loss)": stepped,
    "optimizer = nn.SGD(model.parameters(), 0.1)": steps_with_a_loss,
    'if jt.rank == 0: writer.add_scalar("loss", loss.item())': written_once,
    "x.mpi_all_reduce()": gives(sum_over_ranks),
    'x.mpi_all_reduce("mean")': gives(lambda s: sum_over_ranks(s) / instep.world_size),
    "x.mpi_reduce(root=1)": gives(lambda s: sum_over_ranks(s) * (instep.rank == 1)),
    "x.mpi_broadcast(1)": gives(lambda s: list(shares(s))[1]),
    "mpi.broadcast(array, 0)": has("array", lambda s: numpy.zeros(3, dtype=int)),
    "mpi.mpi_barrier()": waits,
    "if jt.in_mpi: correct_nums = correct_nums.mpi_all_reduce()": has(
        "correct_nums", lambda s: torch.full((1,), float(instep.world_size))
    ),
    "jt.sync_all()": waits,
    "jt.compile_extern.inside_mpi()": gives(lambda s: True),
    "@jt.single_process_scope()": one_process,
}
_HOROVOD: dict[str, Check] = {
    "horovodrun -np 2 python train.py": by_launching,
    "horovod.run(main, np=2)": by_launching,
    "hvd.init()": waits,
    "torch.cuda.set_device(hvd.local_rank())": waits,
    "hvd.rank()": rank,
    "hvd.size()": size,
    "hvd.local_rank()": local_rank,
    "sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())": divided,
    "optimizer = SGD(model.parameters(), 0.1 * hvd.size())": rate,
    "optimizer = hvd.DistributedOptimizer(optimizer, "
    "named_parameters=model.named_parameters())": in_step,
    "hvd.broadcast_parameters(model.state_dict(), root_rank=0)": in_step,
    "hvd.broadcast_optimizer_state(optimizer, root_rank=0)": one_state,
    "hvd.allreduce(x)": gives(lambda s: sum_over_ranks(s) / instep.world_size),
    "hvd.allreduce(x, op=hvd.Sum)": gives(sum_over_ranks),
    "hvd.allgather(x)": gives(lambda s: s.dataset.tensors[0]),
    "hvd.broadcast(x, root_rank=0)": gives(lambda s: next(shares(s))),
    "hvd.alltoall(x)": gives(lambda s: torch.cat([own_block(part) for part in shares(s)])),
    "hvd.reducescatter(x, op=hvd.Sum)": gives(lambda s: own_block(sum_over_ranks(s))),
    "hvd.broadcast_object(config, root_rank=0)": gives(lambda s: {"rank": 0}),
    "hvd.allgather_object(config)": gives(
        lambda s: [{"rank": r} for r in range(instep.world_size)]
    ),
    "from horovod.common.util import gloo_built": imported("gloo_built"),
    "hvd.barrier()": waits,
    "hvd.join()": divided,
}
_APEX: dict[str, Check] = {
    "python -m apex.parallel.multiproc train.py": by_launching,
    "from apex import amp": imported("amp"),
    "amp_handle = amp.init()": waits,
    'model, optimizer = amp.initialize(model, optimizer, opt_level="O2")': halves,
    "from apex.parallel import DistributedDataParallel, LARC": classes_imported,
    "from apex.parallel.optimized_sync_batchnorm import SyncBatchNorm": imported("SyncBatchNorm"),
    "model = convert_syncbn_model(model)": waits,
    "model = DistributedDataParallel(model)": equal,
    "with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()": scaled_back,
    "clip_grad_norm_(amp.master_params(optimizer), 0.1)": clipped,
    "optimizer.step()": masters_stepped,
    "scale = amp._amp_state.loss_scalers[0].loss_scale()": has("scale", lambda s: 2.0**16),
    'checkpoint = {"model": model.state_dict(), "amp": amp.state_dict()}': has(
        "checkpoint",
        lambda s: {
            "model": s.model.state_dict(),
            "amp": {"loss_scaler0": {"loss_scale": 2.0**16, "unskipped": 1}},
        },
    ),
    'amp.load_state_dict(checkpoint["amp"])': lambda s: has(
        "checkpoint", lambda s: s.checkpoint | {"amp": s.amp.state_dict()}
    )(s),
    "reducer = Reducer(model)": batch_statistics,
}
_DDP: dict[str, Check] = {
    "torchrun --nproc-per-node 2 train.py": by_launching,
    "mp.spawn(main, args=(2,), nprocs=2)": by_launching,
    'dist.init_process_group("nccl")': waits,
    "torch.cuda.set_device(local_rank)": waits,
    "dist.get_rank()": rank,
    "dist.get_world_size()": size,
    "sampler = DistributedSampler(dataset)": divided,
    "sampler.set_epoch(epoch)": another_order,
    "model = nn.SyncBatchNorm.convert_sync_batchnorm(model)": waits,
    "model = DistributedDataParallel(model, device_ids=[local_rank])": in_step,
    "with model.no_sync(): loss.backward()": nothing_sent,
    "loss.backward()": Scene.expected_gradients,
    "state = model.module.state_dict()": state,
    "if dist.get_rank() == 0: torch.save(state, path)": saved,
    "dist.all_reduce(x)": has("x", sum_over_ranks),
    "dist.all_gather(parts, x)": has("parts", lambda s: list(shares(s))),
    "dist.broadcast(x, 0)": has("x", lambda s: next(shares(s))),
    "dist.broadcast_object_list(box)": has("config", lambda s: {"rank": 0}),
    "reduced_loss = reduce_mean(loss, world_size)": mean_loss,
    "acc1, acc5 = [reduce_mean(a, world_size) for a in accuracy(output, y, topk=(1, 2))]": (
        accuracies
    ),
    "dist.barrier()": waits,
    "dist.destroy_process_group()": waits,
}
_DP: dict[str, Check] = {
    "python train.py": by_launching,
    "loader = DataLoader(dataset, batch_size=8)": divided,
    "model = nn.DataParallel(model, device_ids=[0, 1])": in_step,
    "output = model(x)": has("output", lambda s: s.model(s.x)),
    "loss.mean().backward()": Scene.expected_gradients,
    "state = model.module.state_dict()": state,
    "torch.save(state, path)": saved,
    "total_loss += loss.item() * len(x)": mean_loss,
}
_ACCELERATE: dict[str, Check] = {
    "accelerate launch --num_processes 2 train.py": by_launching,
    "accelerator = Accelerator()": waits,
    "set_seed(3)": seeded,
    "model, optimizer, loader, schedule = "
    "accelerator.prepare(model, optimizer, loader, schedule)": prepared,
    "with accelerator.accumulate(model): accelerator.backward(loss)": has(
        "is_last", lambda s: True
    ),
    "accelerator.backward(loss)": Scene.expected_gradients,
    "accelerator.clip_grad_norm_(model.parameters(), 0.1)": clipped,
    "accelerator.process_index": rank,
    "accelerator.num_processes": size,
    "accelerator.is_main_process": gives(lambda s: instep.rank == 0),
    'accelerator.print("done")': printed,
    "accelerator.wait_for_everyone()": waits,
    'accelerator.reduce(x, "sum")': gives(sum_over_ranks),
    "accelerator.gather_for_metrics(output)": gives(
        lambda s: torch.cat(instep.all_gather_object(s.output.detach()))
    ),
    "accelerator.unwrap_model(model)": same_model,
    "accelerator.save(model.state_dict(), path)": saved,
    "with accelerator.main_process_first(): data = prepare_data()": has("data", lambda s: (1, 0)),
}
CHECKS = {
    "Jittor": _JITTOR,
    "Horovod": _HOROVOD,
    "Apex": _APEX,
    "DistributedDataParallel": _DDP,
    "DataParallel": _DP,
    "Accelerate": _ACCELERATE,
}


def play(section: int, folder: str) -> None:
    """Run the rows of a section, from top to bottom."""
    checks = [*CHECKS.values()][section]
    scene = Scene(folder)
    with fresh_amp():
        for theirs, ours in tables(PAGES[0])[section]:
            scene.batch()
            if checks[theirs] is not by_launching:
                scene.run(ours)
            checks[theirs](scene)


@pytest.mark.slow
@pytest.mark.parametrize("section", range(6), ids=[*CHECKS])
def test_every_row_does_what_it_takes_the_place_of(section: int, tmp_path: Path) -> None:
    run(2, play, section, str(tmp_path))


def test_every_row_has_a_check() -> None:
    for rows, checks in zip(tables(PAGES[0]), CHECKS.values(), strict=True):
        assert [theirs for theirs, _ in rows] == [*checks]


@pytest.mark.launch
def test_the_command_starts_a_script(tmp_path: Path) -> None:
    commands = {
        ours
        for rows, checks in zip(tables(PAGES[0]), CHECKS.values(), strict=True)
        for theirs, ours in rows
        if checks[theirs] is by_launching
    }
    assert commands == {"instep run -n 2 train.py"}
    launch = Launch(tmp_path)
    launch.script("tell(rank, size)")
    assert launch.run("-n", 2, "train.py").returncode == 0
    assert launch.events(2) == [[0, 2], [1, 2]]
    launch.close()
