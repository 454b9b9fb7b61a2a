"""Metrics count every sample once, whoever holds it."""

import itertools
import math
import re
import sysconfig
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import instep
import instep.compat.apex.parallel as apex
import instep.compat.horovod as hvd
from horovod_ranks import initialized
from instep.compat import jittor as jt
from instep.errors import InstepWarning, TrainingError, UnknownBatchError
from pool import ranks, run


@ranks(1)
def test_accuracy_takes_one_k_too_and_more_than_there_are_classes() -> None:
    assert instep.Accuracy(5).topk == (5,)
    accuracy = instep.Accuracy(topk=(1, 2, 5))
    accuracy.update(torch.tensor([[3.0, 2.0, 1.0]] * 4), torch.tensor([0, 0, 1, 2]))
    assert accuracy.compute() == (0.5, 0.75, 1.0)


@pytest.mark.parametrize(("scores", "target"), [((4,), (4,)), ((4, 3), (4, 1)), ((4, 3), (3,))])
def test_scores_are_rows_of_classes_and_targets_one_number_each(scores, target) -> None:
    accuracy = instep.Accuracy()
    said = rf"targets \(n,\); got {re.escape(f'{scores} and {target}')}"
    with pytest.raises(ValueError, match=said):
        accuracy.update(torch.zeros(scores), torch.zeros(target, dtype=torch.long))


def evaluate(n, batch_size, has_gradients=True):
    generator = torch.Generator().manual_seed(3)
    scores, target = torch.randn(n, 7, generator=generator), torch.arange(n) % 7
    accuracy, mean = instep.Accuracy(topk=(1, 5)), instep.Mean()
    predicted = []
    with torch.set_grad_enabled(has_gradients):
        for s, t in instep.shard(DataLoader(TensorDataset(scores, target), batch_size)):
            accuracy.update(s, t)
            mean.update(s.sum(1))
            predicted += instep.gather_rows(s.argmax(1)).tolist()
    assert predicted == scores.argmax(1).tolist()
    return (*accuracy.compute(), mean.compute())


@pytest.mark.parametrize("n", [1, 2, 5, 23])
def test_evaluation_is_that_of_one_process(n):
    (whole,) = run(1, evaluate, n, 4)
    for size in (2, 3, 4):
        for theirs in run(size, evaluate, n, 4):
            assert theirs == pytest.approx(whole, rel=1e-12)


@pytest.mark.parametrize("n", [5, 9, 23])
def test_evaluation_without_gradients_gathers_a_last_batch_smaller_than_the_world(n):
    (whole,) = run(1, evaluate, n, 4)
    for size in (2, 3, 4):
        for theirs in run(size, evaluate, n, 4, False):
            assert theirs == pytest.approx(whole, rel=1e-12)


@ranks(2)
def test_a_loop_whose_only_batch_some_ranks_skip_cannot_gather():
    rows = DataLoader(TensorDataset(torch.randn(1, 3)), 4)
    with torch.no_grad():
        for (x,) in instep.shard(rows):
            with pytest.raises(TrainingError, match="fewer rows than there are ranks"):
                instep.gather_rows(x)
    for (x,) in instep.shard(rows):
        with torch.no_grad():
            assert len(instep.gather_rows(x)) == 1


@ranks(1)
def test_a_metric_of_ones_own_takes_as_many_totals_as_it_has_and_a_tensor_of_the_batch():
    class Range(instep.Metric):
        def update(self, totals, samples):
            self.add(totals, samples)

        def compute(self):
            return self.all_reduce().tolist()

    metric, batch = Range(2), torch.rand(4)
    with pytest.raises(ValueError, match=r"a Range adds a tensor of 2 totals, .* got \(\)"):
        metric.update(batch.sum(), batch)  # one number would be added to both
    with pytest.raises(TypeError, match="not int"):
        metric.update(torch.ones(2), 4)
    with pytest.raises(TypeError, match="not float"):
        metric.update(1.5, batch)
    metric.update(torch.ones(2), batch)
    assert metric.compute() == [1, 1]


@ranks(1, 2)
def test_rows_are_gathered_without_gradient_and_a_scalar_has_none() -> None:
    rows = torch.full((1 + instep.rank, 2), float(instep.rank), requires_grad=True)
    gathered = instep.gather_rows(rows)
    assert gathered.tolist() == [[0.0, 0.0], [1.0, 1.0], [1.0, 1.0]][: len(gathered)]
    assert len(gathered) == (3 if instep.world_size == 2 else 1)
    assert not gathered.requires_grad
    with pytest.raises(ValueError, match="one row for each sample; got a scalar"):
        instep.gather_rows(rows.sum())
    with pytest.raises(TypeError, match="for each sample, not list: call it for each"):
        instep.gather_rows([rows])


def add_up(n, how):
    generator = torch.Generator().manual_seed(3)
    data = TensorDataset(torch.randn(n, 7, generator=generator), torch.arange(n) % 7)
    loader = instep.shard(DataLoader(data, 4))
    with torch.no_grad():
        return ADDING_UP[how](loader)


def by_hand(loader):
    hits = total = loss = 0.0
    for x, y in loader:
        hits += (x.argmax(1) == y).sum().item()
        loss += torch.nn.functional.cross_entropy(x, y).item() * len(y)
        total += len(y)
    hits, loss, total = instep.all_reduce(torch.tensor([hits, loss, total]).double()).tolist()
    return hits / total, loss / total, total


def by_torchmetrics(loader):
    import torchmetrics  # slow: each rank imports this file

    metric = torchmetrics.classification.MulticlassAccuracy(7, average="micro")
    for x, y in loader:
        metric.update(x, y)
    return (metric.compute().item(),)


ADDING_UP = {"by hand": by_hand, "by torchmetrics": by_torchmetrics}


@pytest.mark.filterwarnings("ignore:The ``compute`` method")
@pytest.mark.parametrize(
    "how", ["by hand", pytest.param("by torchmetrics", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("n", [9, 22])
def test_without_gradients_whatever_a_script_adds_up_counts_once(how, n):
    (whole,) = run(1, add_up, n, how)
    for size in (2, 3) if how == "by hand" else (2,):  # torchmetrics takes long to import
        for theirs in run(size, add_up, n, how):
            assert theirs == pytest.approx(whole, rel=1e-6)


@ranks(1, 3)
def test_a_mean_of_means_is_weighted_by_its_counts():
    mean = instep.Mean()
    mean.update(torch.tensor(float(instep.rank)), instep.rank + 1)
    counts = range(1, instep.world_size + 1)
    assert mean.compute() == pytest.approx(sum(k * (k - 1) for k in counts) / sum(counts))


@ranks(1, 2)
def test_a_mean_over_nothing_counts_nothing():
    mean = instep.Mean()
    mean.update(torch.tensor(float("nan")), 0)
    mean.update(torch.tensor(3.0), instep.rank + 1)
    assert mean.compute() == pytest.approx(3.0)


@ranks(1, 2)
def test_metrics_merge_load_and_reset():
    one, other = instep.Mean(), instep.Mean()
    one.update(1.0, 1)
    other.update(4.0, 2)
    assert one.merge(other).compute() == pytest.approx(3.0)
    with pytest.raises(TypeError, match="merge takes a metric of its own class, not of Accuracy"):
        one.merge(instep.Accuracy())
    state = one.state_dict()
    one.reset()
    assert math.isnan(one.compute())
    for metric in (one, other):  # neither changes what was saved
        metric.load_state_dict(state)
        metric.update(6.0, 3)
        assert metric.compute() == pytest.approx(4.5)
    with pytest.raises(ValueError, match="4 totals, but there are 2"):
        one.load_state_dict(instep.Accuracy(topk=(1, 2, 5)).state_dict())


@ranks(1)
def test_shapes_and_ranks_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match=r"got \(3,\) and \(3,\)"):
        instep.Accuracy().update(torch.ones(3), torch.ones(3))
    with pytest.raises(ValueError, match=r"topk holds ranks from 1 on"):
        instep.Accuracy(topk=(0,))


@ranks(3)
def test_a_loss_of_a_kept_batch_counts_once():
    model = instep.replicate(torch.nn.Linear(1, 1))
    data = torch.arange(8.0).unsqueeze(1)
    loader = instep.shard(DataLoader(TensorDataset(data), 6))  # the last batch has two rows
    mean = instep.Mean()
    for count, (x,) in enumerate(itertools.islice(itertools.cycle(loader), 6)):
        model(x).mean().backward()
        mean.update(x.mean(), len(x))
        if count == 3:
            for (other,) in instep.shard(DataLoader(TensorDataset(data), 5)):
                model(other)
    assert mean.compute() == data.mean()


def evaluate_with_a_bar(n):
    values = torch.arange(float(n))
    mean = instep.Mean()
    with torch.no_grad():
        for (x,) in instep.shard(DataLoader(TensorDataset(values), 6)):
            mean.update(x)
            value = mean.compute()
    assert value == values.mean()


def test_a_metric_may_be_computed_after_every_batch():
    run(3, evaluate_with_a_bar, 14)  # the last batch has two rows


def evaluate_in_scopes():
    outer = iter(instep.shard(DataLoader(TensorDataset(torch.arange(8.0)), 6)))
    with torch.no_grad():
        next(outer)
        with instep.single_process_scope() as here:
            if here:
                mean = instep.Mean()
                mean.update(torch.ones(1))
                assert mean.compute() == 1
        return len([*outer])


def test_a_metric_of_one_rank_gives_the_others_no_placeholders():
    assert run(3, evaluate_in_scopes) == [0, 1, 1]


COLLECTIVES = {
    "all_reduce": lambda: instep.all_reduce(torch.ones(())),
    "all_gather": lambda: instep.all_gather(torch.ones(1)),
    "object": lambda: instep.broadcast_object(1),
    "barrier": lambda: instep.barrier(),
}


@ranks(2)
@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_that_ranks_without_rows_do_not_come_to_is_an_error(name):
    loader = instep.shard(DataLoader(TensorDataset(torch.arange(5.0)), 2))
    seen = 0
    with torch.no_grad():
        for (x,) in loader:
            if len(loader.dataset) - 2 * seen > 1:
                COLLECTIVES[name]()
            else:  # rank 0 is not here
                with pytest.raises(TrainingError, match="a batch of this loop has fewer rows"):
                    COLLECTIVES[name]()
            seen += len(x)
        iterator = iter(loader)
        assert len(list(iterator)) == 2 + instep.rank
    assert instep.all_reduce(torch.tensor(seen)).item() == 5, "after the loop all ranks come"


@ranks(1, 2)
def test_a_reduction_of_what_a_placeholder_gave_is_told_of():
    samples, mean = 0, instep.Mean()
    for (x,) in instep.shard(DataLoader(TensorDataset(torch.arange(5.0)), 2)):
        samples += len(x)
        mean.update(x)
        assert len(instep.gather_rows(x)) == min(2, 5 - 2 * (x.max() // 2))
        is_told = x.max() == 4 and instep.world_size > 1
        with pytest.warns(InstepWarning, match="INS709") if is_told else nullcontext():
            assert len(instep.all_gather(x)) == instep.world_size
    assert mean.compute() == 2
    told = pytest.warns(InstepWarning, match="This line takes .*INS709")
    with told if instep.world_size > 1 else nullcontext() as warned:
        assert instep.all_reduce(torch.tensor(samples)) == 4 + instep.world_size
    assert warned is None or warned[0].filename == __file__
    assert len(instep.all_gather(x)) == instep.world_size
    for (x,) in instep.shard(DataLoader(TensorDataset(torch.arange(4.0)), 2)):
        assert instep.all_reduce(torch.tensor(len(x))) == 2


@ranks(2)
def test_so_is_one_by_torch_distributed_itself():
    loader = instep.shard(DataLoader(TensorDataset(torch.arange(5.0)), 2))
    samples = torch.tensor(sum(len(x) for (x,) in loader))
    with pytest.warns(InstepWarning, match="This line takes .*INS709") as told:
        torch.distributed.all_reduce(samples)
    assert told[0].filename == __file__
    parts = [torch.empty_like(samples) for _ in range(2)]
    with pytest.warns(InstepWarning, match="INS709"):  # torchmetrics gathers
        torch.distributed.all_gather(parts, samples)
    with torch.no_grad():
        samples = torch.tensor(sum(len(x) for (x,) in loader))
    torch.distributed.all_reduce(samples)
    assert samples == 5


def count_in_each_batch(loader):
    for (x,) in loader:  # the last batch has one row, which is the last rank's
        yield torch.tensor(float(len(x)))


@ranks(2)
def test_its_warning_names_the_line_of_the_script_that_calls_an_installed_package():
    loader = instep.shard(DataLoader(TensorDataset(torch.arange(5.0)), 2))
    samples = torch.tensor(sum(len(x) for (x,) in loader))
    package = Path(sysconfig.get_path("purelib"), "metrics.py")
    names = {"dist": torch.distributed}
    exec(compile("def reduce(x):\n    dist.all_reduce(x)\n", str(package), "exec"), names)
    with pytest.warns(InstepWarning, match="INS709") as told:
        names["reduce"](samples)
    assert told[0].filename == __file__


REDUCTIONS = {
    "torch": lambda count: torch.distributed.all_reduce(count),
    "a barrier": lambda _: torch.distributed.barrier(),
    "Horovod": hvd.allreduce,
    "Jittor": jt.mpi_all_reduce,
}


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_a_collective_of_any_library_in_a_batch_that_some_ranks_skip_is_an_error(reduce):
    run(2, reduce_in_a_skipped_batch, reduce)


def reduce_in_a_skipped_batch(reduce):
    loader = instep.shard(DataLoader(TensorDataset(torch.randn(9, 3)), 4))
    with initialized() if reduce == "Horovod" else nullcontext(), torch.no_grad():
        for k, count in enumerate(count_in_each_batch(loader)):
            if k < 2:
                REDUCTIONS[reduce](count)
            else:
                assert instep.rank == 1
                with pytest.raises(TrainingError, match="a batch of this loop has fewer rows"):
                    REDUCTIONS[reduce](count)


@ranks(2)
def test_an_average_of_horovod_of_what_a_placeholder_gave_is_told_of():
    loader = instep.shard(DataLoader(TensorDataset(torch.arange(5.0)), 2))
    samples = torch.tensor(sum(float(len(x)) for (x,) in loader))
    with initialized(), pytest.warns(InstepWarning, match="This line takes .*INS709"):
        hvd.allreduce(samples)


def two_loaders(library, values):
    """The means of the losses of two loaders, of whose last batches one leaves a rank without rows
    and both have one row on the other."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with initialized() if library == "Horovod" else nullcontext():
        if library == "Horovod":
            optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        else:
            model = {"instep": instep.replicate, "Apex": apex.DistributedDataParallel}[library](
                model
            )
        return train_by_two_loaders(model, optimizer, VALUES[values])


VALUES = {
    "detached": lambda mean, loss, x: mean.update(loss.detach(), len(x)),
    "number": lambda mean, loss, x: mean.update(loss.item(), len(x)),
    "with graph": lambda mean, loss, x: mean.update(loss, len(x)),
    "named": lambda mean, loss, x: mean.update(2 * loss.item(), len(x), samples=x),
}


def train_by_two_loaders(model, optimizer, update):
    rows = torch.randn(18, 3, generator=torch.Generator().manual_seed(3))
    loaders = [instep.shard(DataLoader(TensorDataset(rows[:n]), 8)) for n in (18, 17)]
    means = [instep.Mean(), instep.Mean()]
    for batches in zip(*loaders, strict=True):
        losses = []
        for (x,) in batches:
            losses += [model(x).square().mean()]
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        for mean, loss, (x,) in zip(means, losses, batches, strict=True):
            update(mean, loss, x)
    return [mean.compute() for mean in means]


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("library", ["instep", "Horovod", "Apex"])
def test_a_mean_finds_the_batch_of_a_loss_where_two_loaders_are_in_use(library, values):
    (whole,) = run(1, two_loaders, library, values)
    for theirs in run(2, two_loaders, library, values):
        assert theirs == pytest.approx(whole, rel=1e-5)


ROW_VALUES = {
    "losses of the rows": lambda mean, losses: mean.update(losses),
    "their mean": lambda mean, losses: mean.update(losses.sum() / len(losses), len(losses)),
}


def means_of_rows(values):
    """The means of the rows' losses of two loaders. In the last batches one rank has several rows
    of the first and the others have one, and only one rank has a row of the second."""
    torch.manual_seed(0)
    model = instep.replicate(torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    rows = torch.randn(14, 3, generator=torch.Generator().manual_seed(3))
    loaders = [instep.shard(DataLoader(TensorDataset(rows[:n]), k)) for n, k in ((14, 7), (8, 7))]
    means = [instep.Mean(), instep.Mean()]
    for batches in zip(*loaders, strict=True):
        losses = [model(x).square().flatten() * 0.3 for (x,) in batches]
        for each in losses:
            each.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        for mean, each in zip(means, losses, strict=True):
            ROW_VALUES[values](mean, each.detach())
    return [mean.compute() for mean in means]


@pytest.mark.parametrize("values", ROW_VALUES)
def test_it_finds_the_batch_of_losses_of_rows_of_which_some_ranks_have_one(values):
    (whole,) = run(1, means_of_rows, values)
    for theirs in run(5, means_of_rows, values):
        assert theirs == pytest.approx(whole, rel=1e-5)


@ranks(2)
def test_a_value_of_one_of_two_batches_that_nothing_tells_is_an_error():
    model = instep.replicate(torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(UnknownBatchError, match=r"mean\.update\(value, len\(x\), samples=x\)"):
        train_by_two_loaders(model, optimizer, lambda m, loss, x: m.update(3 * loss.item(), len(x)))
