"""DistributedOptimizer: what Horovod's rules say, to the bit; and one process' numbers where
instep divides the batches."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import instep
import instep.compat.apex.parallel as apex
import instep.compat.horovod as hvd
from horovod_ranks import initialized
from instep.errors import MixedBatchesError
from instep.training.losses import divisors
from pool import ranks, run

pytestmark = pytest.mark.slow

ROWS, BATCH, EPOCHS = 46, 12, 2


def data(rows=ROWS):
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(rows, 6, generator=generator)
    return TensorDataset(inputs, (inputs.sum(1) > 0).long())


def net(norm=None, seed=0):
    torch.manual_seed(seed)
    layers = [nn.Linear(6, 8), norm(8) if norm else nn.Tanh(), nn.ReLU(), nn.Linear(8, 2)]
    return nn.Sequential(*layers)


def same(tensors, others):
    return all(torch.equal(a, b) for a, b in zip(tensors, others, strict=True))


# ----------------------------------------------------------------------------- the classic script


def classic(compression, **options):
    """What Horovod's examples do; returns the parameters and the averaged losses."""
    dataset = data()
    sampler = DistributedSampler(dataset, hvd.size(), hvd.rank())
    loader = DataLoader(dataset, 4, sampler=sampler)
    model = net(seed=hvd.rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * hvd.size(), momentum=0.9)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer, model.named_parameters(), compression=compression, **options
    )
    losses = []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
        losses.append(hvd.allreduce(loss.detach(), name="loss").item())
    return [p.detach() for p in model.parameters()], losses


def by_the_rules(size, half):
    """The same in this process: every rank's gradient, summed (in float16), over their number."""
    dataset, model = data(), net(seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * size, momentum=0.9)
    losses = []
    for epoch in range(EPOCHS):
        samplers = [DistributedSampler(dataset, size, rank) for rank in range(size)]
        for sampler in samplers:
            sampler.set_epoch(epoch)
        for batches in zip(*(DataLoader(dataset, 4, sampler=s) for s in samplers), strict=True):
            gradients, of_ranks = [], []
            for inputs, targets in batches:
                loss = nn.functional.cross_entropy(model(inputs), targets)
                of_ranks.append(loss.detach())
                gradients.append(torch.autograd.grad(loss, list(model.parameters())))
            for parameter, *parts in zip(model.parameters(), *gradients, strict=True):
                if half:
                    rounded = torch.stack([part.half().float() for part in parts])
                    parameter.grad = (rounded.sum(0).half() / size).float()
                else:
                    parameter.grad = sum(parts[1:], parts[0]) / size
            optimizer.step()
        losses.append((sum(of_ranks[1:], of_ranks[0]) / size).item())
    return [p.detach() for p in model.parameters()], losses


@pytest.mark.parametrize("half", [False, True])
@ranks(1, 2)
def test_a_classic_script_is_horovods_to_the_bit(half):
    with initialized():
        compression = hvd.Compression.fp16 if half else hvd.Compression.none
        parameters, losses = classic(compression)
        expected, expected_losses = by_the_rules(hvd.size(), half and hvd.size() > 1)
        assert same(parameters, expected)
        assert losses == expected_losses


@ranks(3)
def test_at_three_ranks_it_is_horovods_up_to_the_order_of_a_sum():
    with initialized():
        parameters, _ = classic(hvd.Compression.none)
        for mine, expected in zip(parameters, by_the_rules(3, False)[0], strict=True):
            assert torch.allclose(mine, expected, rtol=0, atol=1e-5)


class Doubled(hvd.Compression.none):
    """A compressor of the user's own, which sees one gradient at a time."""

    @staticmethod
    def compress(tensor):
        assert tensor.dim() in (1, 2)
        return tensor * 2, None

    @staticmethod
    def decompress(tensor, ctx):
        return tensor / 2


@pytest.mark.parametrize(
    "options",
    [
        {"groups": 2},
        {"num_groups": 3},
        {"gradient_predivide_factor": 2.0},
        {"compression": Doubled},
    ],
)
@ranks(2)
def test_how_gradients_travel_does_not_change_them(options):
    options = {"compression": hvd.Compression.none, **options}
    with initialized():
        parameters, _ = classic(**options)
        assert same(parameters, by_the_rules(2, False)[0])


# ----------------------------------------------------------- the same script, divided by instep


def divided(norm, replicated):
    """The classic script with `instep.shard` for the sampler; its parameters and buffers."""
    with initialized():
        torch.manual_seed(7)
        model = net(norm)
        if replicated:
            model = instep.replicate(model)
        loader = instep.shard(DataLoader(data(), BATCH, shuffle=True))
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        for _ in range(EPOCHS):
            for inputs, targets in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(inputs), targets).backward()
                optimizer.step()
        return {name: tensor.tolist() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(
    ("norm", "replicated"),
    [
        (None, False),
        (hvd.SyncBatchNorm, False),
        (nn.SyncBatchNorm, False),
        (nn.SyncBatchNorm, True),
        (nn.BatchNorm1d, True),
    ],
)
def test_with_instep_dividing_the_batches_it_is_one_process(norm, replicated):
    """46 samples in batches of 12: the last has 10, so ranks hold different shares; of the other
    two batches of a world of 3, none."""
    (one,) = run(1, divided, norm, replicated)
    for size in (2, 3):
        for mine in run(size, divided, norm, replicated):
            assert mine.keys() == one.keys()
            for name in one:
                expected = torch.tensor(one[name], dtype=torch.float64)
                found = torch.tensor(mine[name], dtype=torch.float64)
                assert torch.allclose(found, expected, rtol=0, atol=2e-5), name


def ghosted():
    """One batch of two rows for three ranks; a ghost whose numbers are not finite."""
    with initialized():
        model = nn.Linear(6, 2)
        nn.init.ones_(model.weight)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for inputs, targets in instep.shard(DataLoader(data(2), 2)):
            empty = hvd.size() == 3 and hvd.rank() == 0
            loss = nn.functional.cross_entropy(model(inputs / 0 if empty else inputs), targets)
            loss.backward()
            optimizer.step()
        return model.weight.tolist()


def test_a_rank_without_rows_leaves_no_trace():
    (one,) = run(1, ghosted)
    for found in run(3, ghosted):
        assert torch.allclose(torch.tensor(found), torch.tensor(one), atol=1e-6)


LABELS = torch.tensor([0, 1, -1, 1, -1, -1, 0, 1, 1, 0, 0])
LOSSES = {
    "mean": lambda out, y: (out.square().mean(), None),
    "sum of outputs": lambda out, y: (out[:, :1].sum(), "a sum"),
    "sum over a number": lambda out, y: (out.square().sum() / 16, "a sum"),
    "sum of rows": lambda out, y: (out.square().sum(1).sum(0), "a sum"),
    "sum over rows": lambda out, y: (out.square().sum() / len(out), None),
    "kept rows": lambda out, y: (kept(out, y), (y != -1).sum()),
}


def kept(out, y):
    return nn.functional.cross_entropy(out, y, ignore_index=-1)


def gradients_of(name, average, is_stated):
    """The gradients of batches of 4, 4 and 3 rows, and whether a warning says that a divisor is
    not stated."""
    torch.manual_seed(3)
    divisors._warned.clear()  # of other cases, in the same line
    inner = nn.Linear(6, 2)
    model, synchronize = average(inner)
    gradients = []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for inputs, labels in instep.shard(DataLoader(TensorDataset(data(11)[:][0], LABELS), 4)):
            inner.zero_grad()
            loss, divisor = LOSSES[name](model(inputs), labels)
            if is_stated and divisor is not None:
                instep.weight(None if divisor == "a sum" else divisor)
            loss.backward()
            synchronize()
            gradients.append(inner.weight.grad.clone())
    return gradients, any("INS716" in str(each.message) for each in told)


def by_horovod(model):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return model, hvd.DistributedOptimizer(optimizer, model.named_parameters()).synchronize


def by_apex(model):
    return apex.DistributedDataParallel(model), lambda: None


def averaged(name, average, is_stated):
    with initialized():
        return gradients_of(name, average, is_stated)


@pytest.mark.parametrize(
    ("name", "average"),
    [*((name, by_horovod) for name in LOSSES), ("mean", by_apex), ("kept rows", by_apex)],
)
def test_an_average_has_the_weight_of_what_its_loss_divides_by(name, average):
    """A sum has none unless it is stated: its average is an N-th of one process's, as without
    instep. Where the divisors are others than the rows, a warning says so."""
    (one,) = run(1, averaged, name, average, False)
    for size in (2, 3):
        unstated, stated = (run(size, averaged, name, average, each)[0] for each in (False, True))
        divisor = size if name in ("sum of outputs", "sum over a number", "sum of rows") else 1
        for k, expected in enumerate(one[0]):
            assert torch.allclose(stated[0][k], expected, atol=1e-6), k
            if name != "kept rows":
                assert torch.allclose(unstated[0][k], expected / divisor, atol=1e-6), k
        assert unstated[1] == (name == "kept rows")
        assert not stated[1]


def aside():
    """The gradient of something that is not averaged, on one rank only, where it is not certain
    which batch the script is at."""
    with initialized():
        averaged_model = apex.DistributedDataParallel(nn.Linear(6, 2))
        replica = instep.replicate(nn.Linear(6, 2))
        loader = instep.shard(DataLoader(TensorDataset(torch.ones(7, 6)), 4))
        loaded = [inputs.clone() for (inputs,) in loader]
        replica(loaded[1]).mean().backward()
        own = torch.ones(2, requires_grad=True)
        if instep.rank == 0:
            own.square().sum().backward()
        instep.barrier()
        del averaged_model
        return None if own.grad is None else own.grad.tolist()


def test_a_gradient_that_is_not_averaged_is_left_alone():
    assert run(2, aside) == [[2.0, 2.0], None]


def of_two_loaders():
    """Apex's average of a loss of one forward, of batches of two loaders, where one is ahead."""
    with initialized():
        torch.manual_seed(3)
        model = apex.DistributedDataParallel(nn.Linear(6, 2))
        gradients = []
        loaders = [instep.shard(DataLoader(data(11), size)) for size in (4, 2)]
        ahead = iter(loaders[1])
        waiting = next(ahead)
        for inputs, targets in loaders[0]:
            model.zero_grad()
            outputs = model(inputs)
            waiting = next(ahead, waiting)
            nn.functional.cross_entropy(outputs, targets).backward()
            gradients.append(model.module.weight.grad.clone())
        return gradients


def test_an_average_has_the_rows_of_its_forward_where_two_loaders_are_in_use():
    (one,) = run(1, of_two_loaders)
    for found in run(3, of_two_loaders):
        assert all(torch.allclose(*pair, atol=1e-6) for pair in zip(found, one, strict=True))


def with_a_last_row():
    """Gradients of a sum over a constant, in batches of 8 and 1."""
    with initialized():
        model = nn.Linear(6, 2)
        nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        gradients = []
        for inputs, _ in instep.shard(DataLoader(data(17), 8)):
            optimizer.zero_grad()
            (model(inputs).square().sum() / 10).backward()
            optimizer.synchronize()
            gradients.append(model.weight.grad.clone())
        return gradients


def test_a_sum_over_a_constant_has_no_weight_where_one_rank_has_all_rows():
    (one,) = run(1, with_a_last_row)
    for found in run(2, with_a_last_row):
        last = found[-1] * 2  # an average over two ranks
        assert torch.allclose(last, one[-1], atol=1e-5)


def zipped(copied):
    """A loss of one of two loaders that run side by side; their last batches have other sizes."""
    with initialized():
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(6, 4), hvd.SyncBatchNorm(4), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        loaders = (instep.shard(DataLoader(data(count), 8)) for count in (15, 9))
        mean = instep.Mean()
        for (inputs, targets), _ in zip(*loaders, strict=True):
            if copied:
                inputs, targets = inputs.clone(), targets.clone()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            mean.update(loss.detach(), len(inputs))
        return [*model[0].weight.flatten().tolist(), mean.compute()]


@pytest.mark.parametrize("copied", [False, True])
def test_an_average_has_the_rows_of_the_batch_that_its_graph_has_saved(copied):
    (one,) = run(1, zipped, copied)
    for size in (2, 3):
        for found in run(size, zipped, copied):
            assert torch.allclose(torch.tensor(found), torch.tensor(one), atol=1e-5)


def of_two_batches():
    with initialized():
        model = nn.Linear(6, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        hvd.DistributedOptimizer(optimizer, model.named_parameters())
        loaders = (instep.shard(DataLoader(data(count), 4)) for count in (3, 1))
        ((first, _), (second, _)) = next(zip(*loaders, strict=True))
        with pytest.raises(MixedBatchesError, match="fractions"):
            (model(first).mean() + model(second).mean()).backward()


def test_an_average_of_two_batches_that_are_divided_otherwise_is_an_error():
    run(2, of_two_batches)


def divided_by_hand():
    """Batches of 7 and 2 that the script divides itself, twice."""
    with initialized():
        torch.manual_seed(3)
        model = nn.Linear(6, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        for inputs, targets in list(DataLoader(data(9), 7)) * 2:
            copies = (each.clone() for each in instep.shard((inputs, targets)))
            inputs, targets = copies
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.weight.tolist()


def test_a_batch_of_a_step_before_is_not_that_of_an_average():
    (one,) = run(1, divided_by_hand)
    for found in run(2, divided_by_hand):
        assert torch.allclose(torch.tensor(found), torch.tensor(one), atol=1e-6)


@ranks(1, 2)
def test_an_average_may_state_a_weight_on_any_number_of_ranks():
    with initialized():
        model = nn.Linear(6, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        for inputs, _ in instep.shard(DataLoader(data(4), 4)):
            loss = model(inputs).sum()
            instep.weight(None)
            loss.backward()
            optimizer.step()


# -------------------------------------------------------------------------- the optimizer's life


@ranks(2, 3)
def test_what_one_rank_does_not_reach_is_zero_there():
    with initialized():
        model = nn.ModuleDict({"a": nn.Linear(3, 1), "b": nn.Linear(3, 1)})
        hvd.broadcast_parameters(model.state_dict(), 0)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), 0.1), model.named_parameters()
        )
        for step in range(2):
            optimizer.zero_grad()
            model["a" if hvd.rank() == 0 else "b"](torch.ones(3)).sum().backward()
            if hvd.rank() == 0:
                hvd.allreduce_async(torch.ones(1), name=f"in between {step}")
            optimizer.synchronize()
            if hvd.rank() > 0:
                hvd.allreduce_async(torch.ones(1), name=f"in between {step}")
            n = hvd.size()
            assert torch.allclose(model["a"].weight.grad, torch.full((1, 3), 1 / n))
            assert torch.allclose(model["b"].weight.grad, torch.full((1, 3), (n - 1) / n))
            with optimizer.skip_synchronize():
                optimizer.step()


@ranks(2)
def test_several_backwards_before_a_step():
    with initialized():
        model = nn.Linear(2, 1, bias=False)
        hvd.broadcast_parameters(model.state_dict(), 0)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), 1.0),
            model.named_parameters(),
            backward_passes_per_step=2,
        )
        x = torch.tensor([1.0, 10.0]) * (hvd.rank() + 1)
        model(x).sum().backward()
        assert torch.equal(model.weight.grad[0], x)  # nothing is sent yet
        model(x).sum().backward()
        optimizer.synchronize()
        assert model.weight.grad.tolist() == [[3.0, 30.0]]
        with optimizer.skip_synchronize():
            optimizer.step()
        for _ in range(2):
            model(x).sum().backward()
        with pytest.raises(AssertionError, match=r"of weight was computed more than .*=2 times"):
            model(x).sum().backward()
        optimizer.synchronize()
        assert (optimizer.backward_passes_per_step, optimizer.op) == (2, hvd.Average)
        optimizer.set_backward_passes_per_step(1)
        assert optimizer.backward_passes_per_step == 1
        assert optimizer.process_set is hvd.global_process_set
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.zero_grad()
        model(x).sum().backward()
        with pytest.raises(
            AssertionError, match=r"zero_grad\(\) between backward\(\) and step\(\)"
        ):
            optimizer.zero_grad()
        optimizer.step()
        assert model.weight.grad.tolist() == [[1.5, 15.0]]
        optimizer.zero_grad()


@ranks(2)
def test_clipping_between_synchronize_and_step():
    with initialized():
        model = nn.Linear(1, 1)
        hvd.broadcast_parameters(model.state_dict(), 0)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), op=hvd.Sum)
        model(torch.full((1,), 3.0)).sum().backward()
        optimizer.synchronize()
        assert model.weight.grad.item() == 6
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        clipped = model.weight.grad.clone()
        with pytest.warns(UserWarning, match=r"step\(\) called without optimizer.skip_synchronize"):
            optimizer.step()
        assert torch.equal(model.weight.grad, clipped), "summed once"


@ranks(2)
def test_a_closure_gets_averages_too():
    with initialized():
        model = nn.Linear(4, 1)
        hvd.broadcast_parameters(model.state_dict(), 0)
        alone = copy.deepcopy(model)
        everything = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0))

        def train(model, optimizer, rows):
            def closure():
                optimizer.zero_grad()
                loss = (model(rows).square() - 1).square().mean()
                loss.backward()
                return loss

            optimizer.step(closure)

        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
        train(model, hvd.DistributedOptimizer(optimizer), everything[hvd.rank()])
        train(
            alone, torch.optim.LBFGS(alone.parameters(), 0.1, max_iter=4), everything.flatten(0, 1)
        )
        assert torch.allclose(model.weight, alone.weight, atol=1e-5)


@ranks(2)
def test_parameters_are_freed_with_their_model_and_optimizer():
    with initialized():
        model = nn.Linear(3, 3)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        weight = weakref.ref(model.weight)
        del model, optimizer
        gc.collect()
        assert weight() is None


@ranks(2)
def test_frozen_and_thawed_and_two_optimizers_without_names():
    with initialized():
        first, second = nn.Linear(3, 3), nn.Linear(3, 3)
        for model in (first, second):
            hvd.broadcast_parameters(model.state_dict(), 0)
        second.requires_grad_(False)
        optimizers = [
            hvd.DistributedOptimizer(torch.optim.SGD(m.parameters(), 0.1)) for m in (first, second)
        ]
        x = torch.full((3,), float(hvd.rank() + 1))
        second(first(x)).sum().backward()
        optimizers[0].step()
        assert second.weight.grad is None
        second.requires_grad_()
        for model, optimizer in zip((first, second), optimizers, strict=True):
            model.zero_grad()
            optimizer.zero_grad()
        second(first(x)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
        for model in (first, second):
            every = hvd.allgather_object(model.weight.grad)
            assert torch.equal(every[0], every[1])
            assert hvd.allgather_object(model.weight.sum().item())[0] == model.weight.sum().item()


@ranks(2)
def test_a_later_optimizer_takes_the_parameters_over():
    with initialized():
        model = nn.Linear(1, 1, bias=False)
        hvd.broadcast_parameters(model.state_dict(), 0)
        optimizers = [
            hvd.DistributedOptimizer(kind(model.parameters(), 0.1), model.named_parameters())
            for kind in (torch.optim.Adam, torch.optim.SGD)
        ]
        for _ in range(2):
            optimizers[1].zero_grad()
            model(torch.full((1,), float(hvd.rank()))).sum().backward()
            optimizers[1].step()
            assert model.weight.grad.item() == 0.5


@pytest.mark.parametrize("dense", [False, True])
@ranks(2)
def test_sparse_gradients(dense):
    with initialized():
        embedding = nn.Embedding(6, 2, sparse=True)
        hvd.broadcast_parameters(embedding.state_dict(), 0)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SparseAdam(list(embedding.parameters()), 0.1), sparse_as_dense=dense
        )
        for _ in range(2):
            optimizer.zero_grad()
            embedding(torch.tensor([1, 2 + hvd.rank()])).sum().backward()
            optimizer.step()
            assert embedding.weight.grad.is_sparse
            grad = embedding.weight.grad.to_dense()
            assert grad[:, 0].tolist() == [0, 1, 0.5, 0.5, 0, 0]
        assert len(set(hvd.allgather_object(embedding.weight.sum().item()))) == 1


@ranks(2)
def test_a_sparse_gradient_is_averaged_in_a_step_before_its_last_backward():
    with initialized():
        table, plain = nn.Embedding(4, 1, sparse=True), nn.Linear(1, 1)
        parameters = [*table.parameters(), *plain.parameters()]
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(parameters, 0.0), backward_passes_per_step=2
        )
        for backwards in (2, 1):  # an epoch's last step has one
            optimizer.zero_grad()
            for _ in range(backwards):
                plain(table(torch.tensor([hvd.rank()]))).sum().backward()
            optimizer.step()
            expected = backwards * plain.weight.item() / 2
            found = table.weight.grad.to_dense().flatten()
            assert torch.allclose(found, torch.tensor([expected, expected, 0, 0]))
        optimizer.zero_grad()
        plain(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        assert not table.weight.grad.to_dense().any()


@ranks(2)
def test_a_new_rank_need_not_know_which_gradients_were_sparse():
    """As in an elastic job, in which the others have trained before."""
    table, plain = nn.Embedding(4, 1, sparse=True), nn.Linear(1, 1)
    for parameter in (model := nn.Sequential(table, plain)).parameters():
        nn.init.ones_(parameter)

    def optimizer():
        sgd = torch.optim.SGD(model.parameters(), 0.0)
        return hvd.DistributedOptimizer(sgd, model.named_parameters())

    with initialized():
        early = optimizer()
        for _ in range(2):
            early.zero_grad()
            model(torch.tensor([hvd.rank()])).sum().backward()
            early.step()
    with initialized():
        late = early if hvd.rank() == 0 else optimizer()
        for _ in range(2):
            late.zero_grad()
            model(torch.tensor([hvd.rank()])).sum().backward()
            late.step()
            assert table.weight.grad.to_dense().flatten().tolist() == [0.5, 0.5, 0, 0]
            assert plain.bias.grad.item() == 1


@ranks(3)
def test_each_gradient_is_summed_once_where_what_is_trained_changes_in_a_step():
    with initialized():
        table, first, last = nn.Embedding(4, 1, sparse=True), nn.Linear(1, 1), nn.Linear(1, 1)
        model = nn.Sequential(table, first, last)
        for parameter in model.parameters():
            nn.init.ones_(parameter)
        first.requires_grad_(False)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), 0.0), model.named_parameters(), op=hvd.Sum
        )
        for step in range(4):
            first.requires_grad_(step > 1)
            optimizer.zero_grad()
            model(torch.tensor([1])).sum().backward()
            optimizer.step()
            assert table.weight.grad.to_dense().flatten().tolist() == [0, 3, 0, 0]
            assert (last.weight.grad.item(), last.bias.grad.item()) == (6, 3)
            if step > 1:
                assert (first.weight.grad.item(), first.bias.grad.item()) == (3, 3)


@ranks(3)
def test_only_the_ranks_of_the_set_average():
    with initialized():
        pair = hvd.add_process_set([0, 2])
        model = nn.Linear(1, 1, bias=False)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(), process_set=pair
        )
        model(torch.full((1,), float(hvd.rank() + 1))).sum().backward()
        optimizer.step()
        assert model.weight.grad.item() == 2, "of 1 and 3; and rank 1 has 2 alone"


@ranks(1, 2)
def test_adasum_combines_whole_steps():
    with initialized():
        model = nn.Linear(2, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), 1.0), model.named_parameters(), op=hvd.Adasum
        )
        model(torch.eye(2)[hvd.rank()]).sum().backward()
        optimizer.step()
        assert model.weight.tolist() == [[-1, -1 if hvd.size() == 2 else 0]]
        if hvd.size() == 2:
            with pytest.raises(AssertionError, match="no meaning with Adasum"):
                optimizer.skip_synchronize()


@ranks(2)
def test_join_in_training_adds_zeros():
    with initialized():
        model = nn.Linear(1, 1, bias=False)
        hvd.broadcast_parameters(model.state_dict(), 0)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), 0.1), model.named_parameters()
        )
        for _ in range(2 + hvd.rank()):
            optimizer.zero_grad()
            model(torch.full((1,), 4.0)).sum().backward()
            optimizer.step()
        assert model.weight.grad.item() == (2 if hvd.rank() == 1 else 4)
        hvd.join()


@ranks(1, 2)
def test_the_wrapped_optimizer_is_an_optimizer_of_its_kind():
    with initialized():
        model = nn.Linear(2, 1)
        inner = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(inner, 1, gamma=0.5)
        optimizer = hvd.DistributedOptimizer(inner, model.named_parameters())
        assert isinstance(optimizer, torch.optim.SGD)
        assert type(optimizer).__name__ == "SGD"
        for group in optimizer.param_groups:
            assert group["momentum"] == 0.9
        model(torch.full((2,), hvd.rank() + 1.0)).sum().backward()
        optimizer.step()
        with warnings.catch_warnings(action="ignore"):  # the scheduler has seen no step of `inner`
            scheduler.step()
        assert optimizer.param_groups[0]["lr"] == 0.05
        assert model.weight.grad.tolist() == [[(hvd.size() + 1) / 2] * 2]
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


@ranks(2)
def test_everything_an_optimizer_knows_becomes_roots():
    with initialized():
        for kind in (torch.optim.Adam, torch.optim.SGD, torch.optim.RMSprop, torch.optim.LBFGS):
            model = nn.Linear(2, 1)
            optimizer = kind(model.parameters(), lr=0.1 * (hvd.rank() + 1))
            group = optimizer.param_groups[0]

            def closure(optimizer=optimizer, model=model):
                optimizer.zero_grad()
                loss = model(torch.full((2,), hvd.rank() + 1.0)).sum().square()
                loss.backward()
                return loss

            if hvd.rank() == 0:
                optimizer.step(closure)
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
            assert optimizer.param_groups[0] is group, "the one that schedulers know"
            assert group["lr"] == 0.1
            states = hvd.allgather_object(optimizer.state_dict())
            assert str(states[0]) == str(states[1])
            assert states[0]["state"] or kind is torch.optim.SGD


@ranks(1, 2)
def test_what_no_distributed_optimizer_can_be_made_of():
    with initialized():
        one, two = nn.Linear(2, 1), nn.Linear(2, 1)
        optimizer = torch.optim.SGD([*one.parameters(), *two.parameters()], 0.1)
        wrong = [
            ({"named_parameters": [*one.named_parameters()] * 2}, "more than once: weight, bias"),
            ({"named_parameters": one.named_parameters()}, r"those of shape \(1, 2\), \(1,\)"),
            ({"named_parameters": one.parameters()}, r"pairs \(name, parameter\)"),
            ({"backward_passes_per_step": 0}, "from 1 up, not 0"),
            ({"groups": [[one.weight], [one.weight]]}, "each parameter occurs once"),
            ({"groups": -1}, "number of groups from 1 up"),
            ({"op": hvd.Min}, "does not make Min; it makes Average, Sum, Adasum"),
            ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "leave op=Average"),
        ]
        for options, words in wrong:
            with pytest.raises(ValueError, match=words):
                hvd.DistributedOptimizer(optimizer, **options)


# --------------------------------------------------------------------------------- SyncBatchNorm


@ranks(2)
def test_rows_without_channels_cannot_be_normalised():
    with initialized():
        for layer in (hvd.SyncBatchNorm(4), hvd.SyncBatchNorm(4).eval()):
            with pytest.raises(ValueError, match=r"takes \(rows, channels, ...\), not 1D"):
                layer(torch.ones(4))


@ranks(1, 2, 3)
def test_batch_statistics_are_those_of_all_rows_however_they_are_divided():
    with initialized():
        n, r = hvd.size(), hvd.rank()
        whole = torch.randn(2 * n + 1, 4, 3, generator=torch.Generator().manual_seed(0))
        mine = whole[2 * r : 2 * r + 2 + (r == n - 1)].clone().requires_grad_()
        whole.requires_grad_()
        ours, theirs = hvd.SyncBatchNorm(4), nn.BatchNorm1d(4)
        for layer, rows in ((ours, mine), (theirs, whole)):
            layer(rows).square().mul(torch.arange(4.0)[:, None]).pow(2).sum().backward()
        assert torch.allclose(mine.grad, whole.grad[2 * r : 2 * r + len(mine)], atol=1e-4)
        for name in ("weight", "bias"):
            grad = hvd.allreduce(getattr(ours, name).grad, op=hvd.Sum)
            assert torch.allclose(grad, getattr(theirs, name).grad, atol=1e-3)
        for name, buffer in theirs.named_buffers():
            assert torch.allclose(dict(ours.named_buffers())[name], buffer, atol=1e-6)
        ours.eval()
        theirs.eval()
        assert torch.allclose(ours(mine), theirs(mine), atol=1e-6)


@ranks(2)
def test_batch_statistics_without_a_rank_that_joined_are_an_error():
    with initialized():
        if hvd.rank() == 0:
            with pytest.raises(hvd.HorovodInternalError, match=r"sync_batch_norm.*called join\(\)"):
                hvd.SyncBatchNorm(2)(torch.randn(3, 2))
        hvd.join()


@ranks(1, 2)
@pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum])
def test_hooks_of_steps_run_once_after_a_state_dict_was_loaded(op):
    with initialized():
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), op=op)
        optimizer.load_state_dict(optimizer.state_dict())
        seen = []
        optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
        optimizer.register_step_post_hook(lambda *_: seen.append("after"))
        model(data().tensors[0]).sum().backward()
        optimizer.step()
        assert seen == ["before", "after"]
