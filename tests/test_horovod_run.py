"""`horovod.run`, and the helpers of `horovod.common.util` and `horovod.runner` that scripts use."""

from __future__ import annotations

import inspect
import os
from pathlib import Path

import pytest
import torch

import instep
from instep.compat import horovod as hvd
from instep.compat.horovod import util
from instep.errors import CommandLineError, RankFailedError
from instep.launch.horovod_runner import run
from pool import ranks


def summed(factor, *, extra):
    import horovod.torch  # found without an installed Horovod

    assert horovod.torch is hvd
    hvd.init()
    if extra == "fail" and hvd.rank() == 1:
        raise ValueError("boo")
    total = hvd.allreduce(torch.tensor(factor * (hvd.rank() + 1.0)), op=hvd.Sum)
    return hvd.rank(), hvd.size(), total.item(), extra, util.get_env_rank_and_size()


@pytest.mark.nightly
@pytest.mark.launch
def test_a_function_runs_on_ranks_and_its_results_come_in_their_order(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("localhost slots=2\n\n127.0.0.1 slots=2\n")
    results = run(
        summed, (2,), {"extra": "x"}, num_proc=9, hostfile=str(file), np=3, use_gloo=True, verbose=2
    )
    assert results == [(r, 3, 12.0, "x", (r, 3)) for r in range(3)]


@pytest.mark.launch
@pytest.mark.nightly
def test_the_traceback_of_the_rank_that_failed_is_raised() -> None:
    with pytest.raises(RankFailedError, match="ValueError: boo") as raised:
        run(summed, args=(2,), kwargs={"extra": "fail"}, num_proc=2)
    assert raised.value.rank == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        *[
            ({name: 2}, f"does not take {name}: an elastic job is started by `instep horovodrun")
            for name in (
                *("min_num_proc", "max_num_proc", "min_np", "max_np", "slots", "reset_limit"),
                *("cooldown_range", "host_discovery_script"),
            )
        ],
        ({"executable": "/bin/false"}, "does not take executable"),
        ({"use_gloo": True, "use_mpi": True}, "use_gloo or use_mpi, not both"),
        ({"hosts": "localhost:2", "hostfile": "hosts"}, "hosts or hostfile, not both"),
        ({"hosts": "no-such-host:1"}, "on this host only, not on no-such-host"),
        ({"hosts": "localhost:1", "num_proc": 2}, "2 ranks, but the hosts have 1 slots"),
        ({"num_proc": 0}, "a whole number from 1 up"),
    ],
)
def test_what_cannot_be_done_as_asked_is_refused_by_name(options, said) -> None:
    with pytest.raises(CommandLineError, match=said):
        run(print, **options)


@ranks(2)
def test_ranks_do_not_start_ranks() -> None:
    with pytest.raises(CommandLineError, match="this process is one of several already"):
        run(print, num_proc=2)
    assert util.get_env_rank_and_size() == (instep.rank, 2)


def test_the_arguments_are_horovods_in_its_order() -> None:
    names = [*inspect.signature(run).parameters]
    assert names[:4] == ["func", "args", "kwargs", "num_proc"]
    assert names[-3:] == ["np", "min_np", "max_np"]
    assert len(names) == 27


# --------------------------------------------------------------------------------- the helpers


def test_torch_is_the_framework_that_is_built() -> None:
    assert [name for name in util.EXTENSIONS if util.extension_available(name)] == ["torch"]
    util.check_extension("horovod.torch", "HOROVOD_WITH_PYTORCH", __file__, "mpi_lib_v2")
    with pytest.raises(ImportError, match=r"no horovod.tensorflow; it has horovod.torch only"):
        util.check_extension("horovod.tensorflow", "HOROVOD_WITH_TENSORFLOW", __file__, "mpi_lib")
    assert util.gpu_available("torch") is torch.cuda.is_available()
    assert not util.gpu_available("mxnet")
    built = (util.mpi_built(), util.gloo_built(True), util.ddl_built(), util.ccl_built())
    assert built == (False, True, False, False)
    assert bool(util.nccl_built()) is torch.cuda.is_available()


def test_variables_are_set_inside_of_env_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIRST", "1")
    monkeypatch.delenv("SECOND", raising=False)
    with util.env(FIRST="2", SECOND="3", THIRD=None):
        assert (os.environ["FIRST"], os.environ["SECOND"]) == ("2", "3")
        assert "THIRD" not in os.environ
    assert os.environ["FIRST"] == "1"
    assert "SECOND" not in os.environ


def test_the_older_average_is_an_op() -> None:
    choose = util.get_average_backwards_compatibility_fun(hvd)
    assert (choose(hvd.Adasum, None), choose(None, None)) == (hvd.Adasum, hvd.Average)
    with pytest.warns(DeprecationWarning, match="`average` is now `op`"):
        assert (choose(None, True), choose(None, False)) == (hvd.Average, hvd.Sum)
    with pytest.raises(ValueError, match="give op or average, not both"):
        choose(hvd.Sum, True)


def test_numbers_lists_and_pickles() -> None:
    assert [n for n in range(-2, 10) if util.num_rank_is_power_2(n)] == [1, 2, 4, 8]
    assert util.split_list([*range(8)], 3) == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert util.split_list("ab", 3) == ["a", "b", ""]
    assert (util.is_iterable("a"), util.is_iterable(1)) == (True, False)
    for to_ascii, kind in ((True, str), (False, bytes)):
        encoded = util.dumps_base64(lambda x: x + 1, to_ascii)
        assert isinstance(encoded, kind)
        assert util.loads_base64(encoded)(2) == 3
