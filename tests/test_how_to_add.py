"""CONTRIBUTING.md, "How to add", followed from outside of the package: a launcher and a metric."""

import json
import os
import subprocess
import sys

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import instep
from instep.distributed.identity import endpoints, launchers
from instep.distributed.identity.launchers import Launcher, detect, endpoint
from instep.distributed.identity.world import World
from launching import free_port
from pool import run
from test_launchers import SRUN, TORCHRUN, environment

# ------------------------------------------------------------------------------------ a launcher


def at_master_of_pods(environ, world):
    """The job's master pod, by the variables that Kubeflow sets for torchrun."""
    job = environ["HOSTNAME"].rpartition("-worker-")[0]
    return endpoints.Address(environ["PET_MASTER_ADDR"], int(environ["PET_MASTER_PORT"]), job)


KUBERNETES = Launcher(
    "Kubernetes",
    ("PET_NODE_RANK", "PET_NNODES"),
    rank="PET_NODE_RANK",
    size="PET_NNODES",
    endpoint=at_master_of_pods,
    starts_all=False,
)
"""One process in each pod, without a torchrun in between; all pods of the test are on one host."""


def variables_of_pod(rank, size, port=29400):
    return {
        "PET_NODE_RANK": str(rank),
        "PET_NNODES": str(size),
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": str(port),
        "HOSTNAME": f"digits-worker-{rank}",
    }


@pytest.fixture
def kubernetes(monkeypatch):
    monkeypatch.setattr(launchers, "LAUNCHERS", [*launchers.LAUNCHERS])
    launchers.register(KUBERNETES, before="srun")


@pytest.mark.usefixtures("kubernetes")
def test_an_added_row_says_who_this_process_is_and_where_the_ranks_meet():
    pod = variables_of_pod(1, 4)
    assert detect(pod) == World(1, 4, 1, 4, 0, 1, "Kubernetes")
    assert endpoint(detect(pod), pod) == endpoints.Address("127.0.0.1", 29400, "digits")


@pytest.mark.usefixtures("kubernetes")
def test_an_added_row_has_its_place_in_the_order():
    pod = variables_of_pod(1, 2)
    assert detect(pod | TORCHRUN).source == "torchrun"
    assert detect(pod | SRUN).source == "Kubernetes"


@pytest.mark.usefixtures("kubernetes")
def test_the_variables_of_an_added_row_are_hidden_from_unedited_scripts():
    assert launchers.is_launcher_variable("PET_NODE_RANK")
    assert not launchers.is_launcher_variable("HOSTNAME")


def test_a_row_before_one_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match=r"no launcher 'kubectl'; the table has .*srun"):
        launchers.register(KUBERNETES, before="kubectl")
    assert KUBERNETES not in launchers.LAUNCHERS


SCRIPT = """
import json, sys
sys.path.insert(0, sys.argv[1])
import torch
import instep
from instep.distributed.identity import launchers
from test_how_to_add import KUBERNETES
launchers.register(KUBERNETES, before="srun")
total = instep.all_reduce(torch.tensor(instep.rank + 1.0)).item()
print(json.dumps([instep.rank, instep.world_size, instep.world.source, total]))
"""


@pytest.mark.nightly
@pytest.mark.launch
def test_two_processes_that_an_added_launcher_starts_meet(tmp_path):
    port = free_port()
    (tmp_path / "script.py").write_text(SCRIPT)
    pods = [
        subprocess.Popen(
            [sys.executable, str(tmp_path / "script.py"), os.path.dirname(__file__)],
            env=environment() | variables_of_pod(rank, 2, port),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    reports = [json.loads(pod.communicate(timeout=50)[0]) for pod in pods]
    assert reports == [[rank, 2, "Kubernetes", 3.0] for rank in range(2)]


# -------------------------------------------------------------------------------------- a metric


class F1(instep.Metric):
    """The harmonic mean of precision and recall, of two classes."""

    def __init__(self):
        super().__init__(3)

    def update(self, predicted, target):
        hits = (predicted * target).sum()
        self.add(torch.stack([hits, predicted.sum(), target.sum()]), target)

    def compute(self):
        hits, predicted, target = self.all_reduce().tolist()
        return 2 * hits / (predicted + target)


def samples(n):
    generator = torch.Generator().manual_seed(n)
    return torch.randint(0, 2, (2, n), generator=generator).unbind()


def evaluated(n):
    """The F1 score of the data set, and that of two halves merged."""
    predicted, target = samples(n)
    whole, halves = F1(), [F1(), F1()]
    loader = instep.shard(DataLoader(TensorDataset(predicted, target), 4))
    for step, (p, t) in enumerate(loader):
        whole.update(p, t)
        halves[step % 2].update(p, t)
    first, second = halves
    return whole.compute(), first.merge(second).compute()


@pytest.mark.parametrize("n", [2, 9, 22])  # 9 and 22 leave a rank without rows at the end
def test_an_added_metric_is_that_of_the_whole_data_set(n):
    from sklearn.metrics import f1_score  # slow: each rank imports this file

    predicted, target = samples(n)
    expected = pytest.approx(f1_score(target, predicted), rel=1e-12)
    for size in (1, 2, 3):
        assert run(size, evaluated, n) == [(expected, expected)] * size


def test_a_metric_that_is_reset_has_counted_nothing():
    f1 = F1()
    f1.update(torch.tensor([1]), torch.tensor([1]))
    f1.reset()
    assert f1.totals.tolist() == [0, 0, 0]
