"""Which batch a forward belongs to: by the tensors, by the order of requests, by the rows."""

import threading
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import instep
from instep.errors import InstepWarning, UnknownBatchError
from instep.training import random_streams
from instep.training.batches import registry
from instep.training.batches.candidates import BatchCandidates
from instep.training.batches.registry import find_candidates, register
from instep.training.batches.trackers import BatchTracker
from instep.training.blocks import Block
from pool import ranks


class Loop:
    """Stands for an iterator: a tracker holds it weakly."""


@pytest.fixture(autouse=True)
def _nothing_delivered():
    registry.reset()
    yield
    registry.reset()


@settings(deadline=None)
@given(totals=st.lists(st.integers(2, 9), min_size=1, max_size=9), ahead=st.integers(0, 3))
def test_a_loop_that_loads_ahead_may_work_on_the_right_batch_whatever_it_hands_over(totals, ahead):
    registry.reset()
    loop = Loop()
    tracker, source = BatchTracker(loop), iter(totals)

    def request():
        total = next(source, None)
        if total is None:
            registry.register_end(tracker)
        else:
            register((), Block(0, 2, total), tracker)
        return total

    loaded = [request() for _ in range(ahead + 1)]
    while (total := loaded.pop(0)) is not None:
        copy = torch.ones(Block(0, 2, total).count, 3)
        assert Block(0, 2, total) in find_candidates(copy).blocks
        if ahead == 0:
            assert len(find_candidates(copy).blocks) == 1
        loaded.append(request())
        if None in loaded[: ahead + 1] and len(totals) <= ahead:
            return


@settings(deadline=None)
@given(totals=st.lists(st.integers(2, 9), min_size=3, max_size=9), ahead=st.integers(0, 2))
def test_a_loop_whose_first_model_got_the_batch_itself_is_known_for_good(totals, ahead):
    registry.reset()
    loop = Loop()
    tracker = BatchTracker(loop)
    loaded = []
    for k, total in enumerate(totals):
        loaded.append(torch.ones(4, 3))
        register(loaded[-1], Block(0, 2, total), tracker)
        if k == ahead:
            assert find_candidates(loaded[0]).resolve() == Block(0, 2, totals[0])
        if k >= ahead:
            assert find_candidates(torch.ones(1)).resolve() == Block(0, 2, totals[k - ahead])


def test_the_batchs_own_tensors_and_what_shares_their_memory_are_recognised():
    loop = Loop()
    tracker = BatchTracker(loop)
    first, second = torch.ones(4, 3), torch.ones(5, 3)
    register({"x": first}, Block(0, 2, 8), tracker)
    register([second], Block(0, 2, 11), tracker)
    for same in (
        first,
        first.view(12),
        first.detach(),
        first[1:].T,
        torch.from_numpy(first.numpy()),
    ):
        assert find_candidates((same,)).blocks == (Block(0, 2, 8),)
    assert find_candidates({"input": second}).blocks == (Block(0, 2, 11),)


def test_parts_of_one_data_set_in_memory_are_told_apart():
    data = torch.ones(20, 3)
    loop = Loop()
    tracker = BatchTracker(loop)
    first, second = data[0:4], data[8:13]
    register(first, Block(0, 2, 8), tracker)
    register(second, Block(0, 2, 11), tracker)
    assert find_candidates(first.flatten()).resolve() == Block(0, 2, 8)
    assert find_candidates(second[1:].unsqueeze(0)).resolve() == Block(0, 2, 11)
    assert len(find_candidates(data).blocks) == 2, "the whole data set is no batch"


def test_a_batch_that_is_used_again_and_again_makes_the_order_uncertain():
    loop = Loop()
    tracker = BatchTracker(loop)
    first = torch.ones(4, 3)
    register(first, Block(0, 2, 8), tracker)
    for total in (10, 12, 9):
        assert Block(0, 2, 8) in find_candidates(first).blocks
        register((), Block(0, 2, total), tracker)
    find_candidates(first)
    register((), Block(0, 2, 6), tracker)
    assert (
        len(find_candidates(torch.ones(1)).blocks) == 4
    )  # one that is in work, or up to three before


def test_tensors_without_bytes_are_recognised_as_themselves_only():
    loop = Loop()
    tracker = BatchTracker(loop)
    sparse, empty, dense = torch.eye(4).to_sparse(), torch.ones(0, 3), torch.ones(4, 3)
    register([sparse, empty, dense], Block(0, 2, 8), tracker)
    register((), Block(0, 2, 5), tracker)
    assert find_candidates(sparse).blocks == find_candidates(empty).blocks == (Block(0, 2, 8),)
    assert len(find_candidates(torch.eye(4).to_sparse()).blocks) == 2
    assert len(find_candidates(dense[:0]).blocks) == 2


def test_what_is_remembered_of_an_endless_loop_is_bounded():
    loop = Loop()
    tracker = BatchTracker(loop)
    data = torch.ones(8, 3)
    for _ in range(3000):
        register(data[:4], Block(0, 2, 8), tracker)
        register(torch.ones(4), Block(0, 2, 8), tracker)
    assert len(tracker.candidates()) == 1024
    assert sum(len(parts) for _, parts in registry._parts.values()) < 5


def test_a_script_may_keep_every_batch_and_no_request_looks_at_all_of_them(monkeypatch):
    looks = []

    class Storage(registry.StorageWeakRef):
        def expired(self):
            looks.append(self)
            return super().expired()

    monkeypatch.setattr(registry, "StorageWeakRef", Storage)
    loop = Loop()
    tracker = BatchTracker(loop)
    kept = []
    for k in range(500):
        kept.append([torch.ones(4, 3), torch.ones(4)])
        register(kept[-1], Block(k % 3, 4, 9), tracker)
    assert all(registry.find_block(x[1:]) == Block(k % 3, 4, 9) for k, (x, _) in enumerate(kept))
    assert not looks
    addresses = [x.untyped_storage()._cdata for x, _ in kept]
    del kept[:490]
    register((), Block(0, 4, 9), tracker)
    assert len(looks) == 980
    assert not registry._parts.keys() & set(addresses[:490])
    assert registry._parts.keys() >= set(addresses[490:])


def test_a_finished_loop_inside_another_is_no_candidate():
    training, evaluation = Loop(), Loop()
    outer, inner = BatchTracker(training), BatchTracker(evaluation)
    register((), Block(0, 2, 64), outer)
    find_candidates(torch.ones(32))
    register((), Block(0, 2, 100), inner)
    assert set(find_candidates(torch.ones(50)).blocks) == {Block(0, 2, 64), Block(0, 2, 100)}
    assert find_candidates(torch.ones(50)).resolve() == Block(0, 2, 100)
    assert find_candidates(torch.ones(32)).resolve() == Block(0, 2, 64)
    registry.register_end(inner)
    del evaluation
    register((), Block(0, 2, 20), outer)
    assert find_candidates(torch.ones(7)).blocks == (Block(0, 2, 20),)


def test_of_two_loaders_the_rows_decide_and_where_they_cannot_it_is_an_error():
    loops = Loop(), Loop()
    labelled, unlabelled = (BatchTracker(loop) for loop in loops)
    register((), Block(1, 3, 9), labelled)
    register((), Block(1, 3, 20), unlabelled)
    assert find_candidates(torch.ones(3, 4)).resolve() == Block(1, 3, 9)
    assert find_candidates(torch.ones(7, 4)).resolve() == Block(1, 3, 20)
    with pytest.raises(
        UnknownBatchError, match=r"9 samples \(3 here\), one of 20 samples \(7 here\)"
    ):
        find_candidates(torch.ones(5, 4)).resolve()


def test_batches_that_every_rank_divides_alike_need_not_be_told_apart():
    loops = Loop(), Loop()
    for loop, total in zip(loops, (64, 448), strict=True):
        register((), Block(0, 2, total), BatchTracker(loop))
    assert find_candidates(torch.ones(5, 4)).resolve().fraction == 0.5


def test_a_model_that_is_called_before_any_batch_belongs_to_none():
    assert find_candidates(torch.ones(3)).resolve() is None


def linear_gradient(rows, weight):
    """The gradient of (x @ w).square().mean() by one process."""
    w = weight.clone().requires_grad_()
    (rows @ w.T).square().mean().backward()
    return w.grad


def check_gradient(model, rows, mine):
    model.zero_grad()
    model(mine).square().mean().backward()
    expected = linear_gradient(rows, model.weight.detach())
    torch.testing.assert_close(model.weight.grad, expected)


def line(rows):
    return torch.arange(float(rows * 2)).view(rows, 2).sin()


@ranks(2, 3)
def test_a_model_that_is_first_called_on_a_later_ragged_batch_gets_that_batchs_gradient():
    data = line(15)
    early = instep.replicate(nn.Linear(2, 1, bias=False))
    late = instep.replicate(nn.Linear(2, 1, bias=False))
    loader = instep.shard(DataLoader(TensorDataset(data), 4))
    for step, (x,) in enumerate(loader):
        whole = data[4 * step : 4 * step + 4]
        check_gradient(early, whole, x)
        if step == 3:
            check_gradient(late, whole, x.clone())


@ranks(2, 3)
def test_a_loop_that_loads_ahead_and_copies_gets_each_batchs_gradient():
    data = line(11)
    model = instep.replicate(nn.Linear(2, 1, bias=False))
    iterator = iter(instep.shard(DataLoader(TensorDataset(data), 4)))
    following = next(iterator)[0].clone()
    for step in range(3):
        x, following = following, next(iterator, (None,))[0]
        following = None if following is None else following.clone()
        check_gradient(model, data[4 * step : 4 * step + 4], x)


@ranks(2, 3)
def test_batches_of_which_some_rank_has_the_same_number_of_rows_are_told_apart_by_all():
    data = line(7)  # batches of 4 and 3: on 2 ranks one of them has 2 rows of both
    model = instep.replicate(nn.Linear(2, 1, bias=False))
    loaded = [x.clone() for (x,) in instep.shard(DataLoader(TensorDataset(data), 4))]
    check_gradient(model, data[4:], loaded[1])
    check_gradient(model, data[:4], loaded[0])


@ranks(2, 3)
def test_a_copy_of_an_earlier_batch_has_the_gradient_of_that_batch():
    data, kept = line(11), None
    model = instep.replicate(nn.Linear(2, 1, bias=False))
    for _ in range(2):
        for step, (x,) in enumerate(instep.shard(DataLoader(TensorDataset(data), 4))):
            whole = data[4 * step : 4 * step + 4]
            if kept is not None:
                check_gradient(model, *kept)
            check_gradient(model, whole, x.clone())
            # As many rows as a rank of two has of an earlier batch, in a dimension that is time.
            check_gradient(model, whole, torch.stack([x, x]))
            kept = whole, x.clone()


@ranks(2)
def test_a_generator_first_and_a_discriminator_after_share_the_batch():
    data = line(10)
    generator, discriminator = (instep.replicate(nn.Linear(2, 2, bias=False)) for _ in range(2))
    for (x,) in instep.shard(DataLoader(TensorDataset(data), 4)):
        noise = line(2 * len(x))  # as many rows as the whole batch
        generator.zero_grad()
        discriminator(generator(instep.shard(noise).clone())).square().mean().backward()
        weight = generator.weight.detach().clone().requires_grad_()
        (noise @ weight.T @ discriminator.weight.detach().T).square().mean().backward()
        torch.testing.assert_close(generator.weight.grad, weight.grad)


@ranks(2)
def test_two_batches_cut_by_hand_are_told_apart_where_both_are_copied():
    model = instep.replicate(nn.Linear(2, 1, bias=False))
    for _ in range(2):
        large, small = line(9), line(5)
        mine = [instep.shard(large).clone(), instep.shard(small).clone()]
        check_gradient(model, small, mine[1])
        check_gradient(model, large, mine[0])


@ranks(2)
def test_a_forward_after_the_data_have_ended_belongs_to_the_last_batch_or_to_none():
    data = line(7)
    model = instep.replicate(nn.Linear(2, 1, bias=False))
    for (x,) in instep.shard(DataLoader(TensorDataset(data), 4)):
        check_gradient(model, data[:4] if len(x) == 2 and x[0, 0] in data[:4] else data[4:], x)
    check_gradient(model, data[4:], x.clone())
    other = torch.arange(10.0).view(5, 2)
    check_gradient(model, other, other)  # of no batch: each rank has all of it, and counts alike


@ranks(2)
def test_batches_that_a_thread_requests_are_told_apart_by_their_rows():
    data = line(13)
    model = instep.replicate(nn.Linear(2, 1, bias=False))
    loaded = []

    def load():
        loaded.extend(x.clone() for (x,) in instep.shard(DataLoader(TensorDataset(data), 5)))

    thread = threading.Thread(target=load)
    thread.start()
    thread.join()
    for step in (2, 0, 1):
        check_gradient(model, data[5 * step : 5 * step + 5], loaded[step])


@ranks(2)
def test_a_forward_whose_batch_cannot_be_known_is_an_error_at_its_backward():
    model = instep.replicate(nn.Linear(2, 1, bias=False))
    loaded = [x.clone() for (x,) in instep.shard(DataLoader(TensorDataset(line(13)), 5))]
    output = model(torch.ones(9, 2))  # an evaluation of something else, say, is no error
    assert len(loaded) == 3
    with pytest.raises(UnknownBatchError, match="9 rows on this rank"):
        output.mean().backward()


def test_candidates_of_one_batch_need_no_rows():
    assert BatchCandidates((Block(0, 2, 3),)).resolve() == Block(0, 2, 3)


@ranks(2)
def test_a_batch_whose_rows_fit_on_one_rank_only_is_not_meant():
    """As an evaluation's rows may, by chance."""
    blocks = (Block(instep.rank, 2, 9), None)
    rows = frozenset({(3, 5)[instep.rank]})
    assert blocks[0].count == (4, 5)[instep.rank]
    assert BatchCandidates(blocks, rows).resolve() is None
    fits = frozenset({blocks[0].count})
    assert BatchCandidates(blocks, fits).resolve() is blocks[0]


@ranks(3)
def test_any_number_of_rows_is_not_that_of_a_batch_of_fewer_samples_than_ranks():
    """A training by Horovod's names after a loop with such a last batch had the weights of it."""
    blocks = (Block(instep.rank, 3, 2), None)
    assert BatchCandidates(blocks, frozenset({4})).resolve() is None
    assert BatchCandidates(blocks, frozenset({1})).resolve() is blocks[0]
    assert BatchCandidates((blocks[0], Block(instep.rank, 3, 9)), frozenset({2})).resolve()


@pytest.mark.parametrize("is_left", [False, True], ids=["in the loop", "after it was left"])
def test_a_loop_without_gradients_and_the_training_around_it_are_told_apart_by_the_gradients(
    is_left,
):
    training, evaluation = Loop(), Loop()
    register((), Block(0, 2, 64), BatchTracker(training))
    with torch.no_grad():
        register((), Block(0, 2, 7), BatchTracker(evaluation))
        if not is_left:
            assert find_candidates(torch.ones(9)).blocks == (Block(0, 2, 7),)
    if is_left:
        del evaluation
    assert find_candidates(torch.ones(9)).blocks == (Block(0, 2, 64),)


@ranks(2, 3)
def test_an_evaluation_inside_of_an_epoch_may_skip_a_batch_and_may_be_left():
    data, few = line(12), line(7)
    model = instep.replicate(nn.Linear(2, 1, bias=False))
    evaluation = instep.shard(DataLoader(TensorDataset(few), 6))  # the last batch has one row
    for step, (x,) in enumerate(instep.shard(DataLoader(TensorDataset(data), 4))):
        mean = instep.Mean()
        with torch.no_grad():
            for (mine,) in evaluation:
                mean.update(model(mine * 2))
                if step == 1:
                    break
            else:
                assert mean.compute() == pytest.approx(model(few * 2).mean().item(), abs=1e-6)
        check_gradient(model, data[4 * step : 4 * step + 4].repeat(2, 1), x.repeat(2, 1))


@ranks(2, 3)
def test_copies_of_batches_that_were_kept_beyond_the_end_of_the_data_are_known_by_their_rows():
    data, other = line(13), line(14)
    model = instep.replicate(nn.Linear(2, 1, bias=False))
    kept = [x for (x,) in instep.shard(DataLoader(TensorDataset(data), 5))]
    with torch.no_grad():
        for (x,) in instep.shard(DataLoader(TensorDataset(other), 7)):
            model(x)
    for step in (2, 0, 1):
        check_gradient(model, data[5 * step : 5 * step + 5], kept[step] * 1.0)
    check_gradient(model, torch.ones(9, 2), torch.ones(9, 2))  # of no batch


@ranks(3)
def test_two_views_of_a_batch_are_known_beside_another_loader():
    data = line(12)
    model = instep.replicate(nn.Linear(2, 1, bias=False))
    others = iter(instep.shard(DataLoader(TensorDataset(line(11)), 8)))
    for step, (x,) in enumerate(instep.shard(DataLoader(TensorDataset(data), 4))):
        if step < 2:
            next(others)
        whole = data[4 * step : 4 * step + 4].repeat(2, 1)
        check_gradient(model, whole, torch.cat([x, x * 1.0]))


class Noisy(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.rand(1)


@ranks(1, 2)
@pytest.mark.parametrize("draws", [False, True])
def test_a_thread_that_loads_draws_nothing_of_the_main_threads(draws):
    random_streams._warn_of_thread.cache_clear()
    rows = Noisy() if draws else TensorDataset(torch.arange(12))
    loader = instep.shard(DataLoader(rows, 4, shuffle=True))
    before = torch.get_rng_state()
    loaded = []
    thread = threading.Thread(target=lambda: loaded.extend(loader))
    told = pytest.warns(InstepWarning, match="This line iterates .*INS710")
    with told if draws else nullcontext() as warned:
        thread.start()
        thread.join()
    assert warned is None or warned[0].filename == __file__
    assert torch.equal(torch.get_rng_state(), before)
    assert len(loaded) == len(loader)
