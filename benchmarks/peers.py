"""The time of one training step with instep and with its peers.

    make .venv-peers/ready && .venv-peers/bin/python benchmarks/peers.py --json peers.json

Each contender has a set of processes of its own, which stand still while another's turn lasts
(SIGSTOP: Horovod's ranks talk to each other in every millisecond, with work or without). In each
round all have a block of steps, in shuffled order; what counts is the ratio to `none` of the same
round: the same step, each rank for itself. The peers talk over Gloo, as they do on the CPU, and
leave batch statistics to each rank's rows; instep is measured with those of the global batch and
without. Each is what its users get: instep's ranks keep freed memory, the others do not. With Adam,
those that divide the optimizer's step (ZeRO) are compared, too: `instep.shard(optimizer)`, torch's
ZeroRedundancyOptimizer and FSDP2, DeepSpeed's stage 1.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import multiprocessing
import os
import random
import signal
import socket
import statistics
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from machine import machine, ratios, shown
from models import workload

Backward = Callable[[Tensor], None]
Built = tuple[nn.Module, torch.optim.Optimizer, Backward]
Peer = Callable[[nn.Module, torch.optim.Optimizer], Built]


def none(model: nn.Module, optimizer: torch.optim.Optimizer) -> Built:
    return model, optimizer, Tensor.backward


def ddp(model: nn.Module, optimizer: torch.optim.Optimizer) -> Built:
    dist.init_process_group("gloo")
    return nn.parallel.DistributedDataParallel(model), optimizer, Tensor.backward


def ddp_view(model: nn.Module, optimizer: torch.optim.Optimizer) -> Built:
    dist.init_process_group("gloo")
    options: dict[str, Any] = {"gradient_as_bucket_view": True, "static_graph": True}
    return nn.parallel.DistributedDataParallel(model, **options), optimizer, Tensor.backward


def accelerate(model: nn.Module, optimizer: torch.optim.Optimizer) -> Built:
    accelerator = importlib.import_module("accelerate").Accelerator(cpu=True)
    return *accelerator.prepare(model, optimizer), accelerator.backward


def fabric(model: nn.Module, optimizer: torch.optim.Optimizer) -> Built:
    module = importlib.import_module("lightning_fabric")
    fabric = module.Fabric(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy="ddp")
    fabric.launch()
    return *fabric.setup(model, optimizer), fabric.backward


def ignite(model: nn.Module, optimizer: torch.optim.Optimizer) -> Built:
    idist = importlib.import_module("ignite.distributed")
    idist.initialize("gloo")
    return idist.auto_model(model), idist.auto_optim(optimizer), Tensor.backward


def zero_redundancy(model: nn.Module, optimizer: torch.optim.Optimizer) -> Built:
    dist.init_process_group("gloo")
    module = importlib.import_module("torch.distributed.optim")
    options = {"optimizer_class": type(optimizer), **optimizer.defaults}
    divided = module.ZeroRedundancyOptimizer(model.parameters(), **options)
    return nn.parallel.DistributedDataParallel(model), divided, Tensor.backward


def fsdp2(model: nn.Module, optimizer: torch.optim.Optimizer) -> Built:
    dist.init_process_group("gloo")
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    importlib.import_module("torch.distributed.fsdp").fully_shard(model, mesh=mesh)
    optimizer = type(optimizer)(model.parameters(), **optimizer.defaults)
    return model, optimizer, Tensor.backward


def deepspeed(model: nn.Module, optimizer: torch.optim.Optimizer) -> Built:
    return _deepspeed(model, optimizer, {})


def deepspeed_zero1(model: nn.Module, optimizer: torch.optim.Optimizer) -> Built:
    config = {"zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}
    return _deepspeed(model, optimizer, config)


def _deepspeed(
    model: nn.Module, optimizer: torch.optim.Optimizer, options: dict[str, Any]
) -> Built:
    module = importlib.import_module("deepspeed")
    module.init_distributed(dist_backend="gloo", verbose=False)
    config = {"train_micro_batch_size_per_gpu": 8, "gradient_clipping": 0.0, **options}
    engine, *_ = module.initialize(model=model, optimizer=optimizer, config=config)

    class Optimizer:
        def zero_grad(self) -> None:
            """The engine does it."""

        step = staticmethod(engine.step)

    return engine, Optimizer(), engine.backward  # type: ignore[return-value]


def horovod(model: nn.Module, optimizer: torch.optim.Optimizer) -> Built:
    hvd = importlib.import_module("horovod.torch")
    address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    store = dist.TCPStore(*address, is_master=os.environ["RANK"] == "0")
    os.environ.update(_as_horovodrun_says(store))
    hvd.init()
    names = model.named_parameters()
    return model, hvd.DistributedOptimizer(optimizer, named_parameters=names), Tensor.backward


def _as_horovodrun_says(store: dist.Store) -> dict[str, str]:
    """The variables of `horovodrun --gloo`. Its server runs on rank 0."""
    rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    if rank == "0":
        hosts = importlib.import_module("horovod.runner.common.util.hosts")
        server = importlib.import_module("horovod.runner.http.http_server").RendezvousServer()
        port = server.start()
        server.init(hosts.get_host_assignments(hosts.parse_hosts(f"localhost:{size}"), int(size)))
        store.set("port", str(port))
    said = {"RANK": rank, "SIZE": size, "LOCAL_RANK": rank, "LOCAL_SIZE": size}
    said |= {"CROSS_RANK": "0", "CROSS_SIZE": "1", "HOSTNAME": "localhost"}
    said |= {"CONTROLLER": "gloo", "CPU_OPERATIONS": "gloo", "GLOO_IFACE": "lo"}
    said |= {"GLOO_RENDEZVOUS_ADDR": "127.0.0.1"}
    said |= {"GLOO_RENDEZVOUS_PORT": store.get("port").decode()}
    said |= {"GLOO_TIMEOUT_SECONDS": "600"}  # a rank may be stopped while it waits for another
    return {f"HOROVOD_{name}": value for name, value in said.items()}


def instep(model: nn.Module, optimizer: torch.optim.Optimizer) -> Built:
    return importlib.import_module("instep").replicate(model), optimizer, Tensor.backward


def instep_local_bn(model: nn.Module, optimizer: torch.optim.Optimizer) -> Built:
    replicate = importlib.import_module("instep").replicate
    return replicate(model, batch_statistics="rank"), optimizer, Tensor.backward


def instep_sharded(model: nn.Module, optimizer: torch.optim.Optimizer) -> Built:
    built = instep_local_bn(model, optimizer)
    importlib.import_module("instep").shard(optimizer)
    return built


_DIVIDED = (instep_sharded, zero_redundancy, fsdp2, deepspeed_zero1)
"""Those with Adam only, whose step is worth dividing."""
PEERS: dict[str, Peer] = {
    peer.__name__: peer
    for peer in (
        *(none, instep, instep_local_bn, ddp, ddp_view),
        *(accelerate, fabric, ignite, deepspeed, horovod),
        *_DIVIDED,
    )
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.01, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, 1e-3),
}


class Case(NamedTuple):
    """What is trained."""

    model: str
    optimizer: str


# ------------------------------------------------------------------------------------ one rank


def serve(pipe: Connection, peer: str, case: Case, environ: dict[str, str]) -> None:
    """Build the contender, then answer each number of steps with the seconds for one."""
    os.environ.update(environ)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        load = workload(case.model)
        plain = OPTIMIZERS[case.optimizer](load.model.parameters())
        model, optimizer, backward = PEERS[peer](load.model, plain)
    except Exception as error:  # a peer that does not run here is left out, and named
        pipe.send(f"{type(error).__name__}: {error}")
        return
    pipe.send("")
    while (count := pipe.recv()) is not None:
        start = perf_counter()
        for _ in range(count):
            optimizer.zero_grad()
            backward(nn.functional.cross_entropy(model(load.inputs), load.targets))
            optimizer.step()
        pipe.send((perf_counter() - start) / count)
    os._exit(0)  # without the peers' goodbyes, which may wait for each other


class Contender:
    """The ranks of one strategy."""

    def __init__(self, peer: str, case: Case, ranks: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        shared |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        # What Fabric and accelerate take for torchrun.
        shared |= {"TORCHELASTIC_RUN_ID": peer, "GROUP_RANK": "0", "OMP_NUM_THREADS": "1"}
        shared |= {"GLOO_SOCKET_IFNAME": "lo", "DS_ACCELERATOR": "cpu"}
        self.pipes, self.processes = [], []
        for rank in range(ranks):
            ours, theirs = spawn.Pipe()
            environ = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = spawn.Process(target=serve, args=(theirs, peer, case, environ), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        self.problem = max(_heard(pipe) for pipe in self.pipes)

    def seconds(self, count: int) -> float:
        """For each of `count` steps; the slowest rank counts."""
        self._signal(signal.SIGCONT)
        for pipe in self.pipes:
            pipe.send(count)
        slowest = max(pipe.recv() for pipe in self.pipes)
        self._signal(signal.SIGSTOP)
        return float(slowest)

    def _signal(self, number: int) -> None:
        for process in self.processes:
            os.kill(process.pid, number)

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def _heard(pipe: Connection) -> str:
    try:
        return str(pipe.recv())
    except EOFError:
        return "it died"


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


# ---------------------------------------------------------------------------------- all of them


def measure(case: Case, peers: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds for each step, by contender and round; why a contender is missing."""
    contenders = {peer: Contender(peer, case, args.ranks) for peer in peers}
    missing = {peer: c.problem for peer, c in contenders.items() if c.problem}
    running = [peer for peer in peers if peer not in missing]
    try:
        for peer in running:
            contenders[peer].seconds(2)
        count = max(2, int(args.seconds / contenders["none"].seconds(3)))
        times: dict[str, list[float]] = {peer: [] for peer in running}
        shuffler = random.Random(0)
        for _ in range(args.blocks):
            for peer in shuffler.sample(running, len(running)):
                times[peer].append(contenders[peer].seconds(count) * 1e3)
    finally:
        for contender in contenders.values():
            contender.stop()
    rows = {
        peer: {"median_ms": statistics.median(taken), "over_none": ratios(taken, times["none"])}
        for peer, taken in times.items()
    }
    return {"rows": rows, "missing": missing, "milliseconds": times}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--models", nargs="+", default=["mlp", "resnet18"])
    parser.add_argument("--optimizers", nargs="+", default=list(OPTIMIZERS), choices=OPTIMIZERS)
    parser.add_argument("--peers", nargs="+", default=list(PEERS), choices=PEERS)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=31, help="timed blocks of each contender")
    parser.add_argument("--seconds", type=float, default=0.4, help="for each block, about")
    args = parser.parse_args()
    peers = ["none", *(peer for peer in args.peers if peer != "none")]
    undivided = [peer for peer in peers if PEERS[peer] not in _DIVIDED]
    result: dict[str, Any] = {"machine": machine(), "ranks": args.ranks, "models": {}}
    for model, optimizer in itertools.product(args.models, args.optimizers):
        case = Case(model, optimizer)
        measured = measure(case, peers if optimizer == "adam" else undivided, args)
        result["models"][", ".join(case)] = measured
        print(f"\n{', '.join(case):16} {'ms/step':>9} {'over none':>22}")
        for peer, row in measured["rows"].items():
            print(f"{peer:16} {row['median_ms']:9.2f} {shown(row['over_none']):>22}")
        for peer, problem in measured["missing"].items():
            print(f"{peer:16} did not run: {problem.splitlines()[0][:80]}")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
