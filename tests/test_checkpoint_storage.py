"""Checkpoints on disk: what is written is read, and what was damaged is never loaded."""

import json
import os
import resource
import shutil
import signal
from collections import Counter
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import nn

from instep.errors import CannotSaveError, DamagedCheckpointError, InstepWarning, NewerFormatError
from instep.training.checkpoint.on_disk import storage
from instep.training.checkpoint.on_disk.state_trees import decode, encode
from instep.training.checkpoint.on_disk.tensor_files import read_tensors, write_tensors


def same(a, b):
    """Whether two trees have the same types and the same bits."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return repr(a) == repr(b)


def bits(tensor):
    return (
        tensor.resolve_conj().contiguous().view(-1).view(torch.uint8).tolist()
        if tensor.numel()
        else []
    )


DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.complex64, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.bool,
]  # fmt: skip

STATE = {
    "numbers": [0, -1, 2**80, 0.1, -0.0, float("inf"), float("nan"), True, None, "text \n\u2028 $"],
    "keys": {0: "a", "0": "b", (1, "x"): torch.ones(2), None: 3, "$tensor": 4, "a.b": 5},
    "same name": {"a": {"b": torch.zeros(1)}, "a.b": torch.ones(1), "__metadata__": torch.ones(2)},
    "types": (1, [2, (3,)], Counter("aab"), b"\0\xff", torch.float16, torch.device("cpu")),
    "tensors": {str(d): torch.tensor([[0, 1], [2, 3]]).to(d) for d in DTYPES},
    "shapes": [torch.tensor(1.5), torch.zeros(0, 3), torch.arange(6).view(2, 3).t()],
    "complex": [torch.tensor([1 + 2j], dtype=torch.complex128), torch.tensor([1 + 2j]).conj()],
    "arrays": [np.arange(4, dtype=np.uint32), np.float32(1.5), np.int64(7), np.array([True])],
}


def test_what_is_written_is_read(tmp_path):
    path = storage.write(tmp_path / "new" / "folder", 100, STATE)
    assert path == tmp_path / "new" / "folder" / "step-00000100"
    read = storage.read(path)
    for name, value in STATE.items():
        assert same(read[name], value), name
    assert sorted(os.listdir(path.parent)) == ["step-00000100"]


@pytest.mark.parametrize("later", [torch.tensor([1 / 3]).double() / 3, torch.ones(2)])
def test_memory_of_an_earlier_copy_serves_for_tensors_of_its_kind_only(later):
    """Copied into float32, the later tensor would lose half of its digits."""
    earlier = storage.EncodedState.encode({"model": {"weight": torch.ones(1)}}).copy()
    state = storage.EncodedState.encode({"model": {"weight": later}}).copy(earlier)
    (copied,) = state.tensors["model"].values()
    assert same(copied, later)


def test_a_training_that_was_saved_is_the_same(tmp_path):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 5])
    for _ in range(3):
        model(torch.randn(8, 3)).sum().backward()
        optimizer.step()
        scheduler.step()
    states = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "random": torch.get_rng_state(),
    }
    read = storage.read(storage.write(tmp_path, 3, states))
    assert same(read["model"], dict(states["model"]))
    assert same(read["optimizer"], states["optimizer"])
    assert read["scheduler"]["milestones"] == Counter([1, 5])
    assert torch.equal(read["random"], states["random"])


def test_the_library_of_the_format_reads_it_in_three_lines(tmp_path):
    library = pytest.importorskip("safetensors.torch")
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    path = storage.write(tmp_path, 1, {"model": model.state_dict()})
    other = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    other.load_state_dict(library.load_file(path / "model.safetensors"))
    assert same(dict(other.state_dict()), dict(model.state_dict()))
    # And ours reads what the library writes.
    tensors = {str(k): v for k, v in enumerate(STATE["tensors"].values())}
    library.save_file(tensors, tmp_path / "theirs")
    import hashlib

    sha256 = hashlib.sha256((tmp_path / "theirs").read_bytes()).hexdigest()
    read = read_tensors(tmp_path / "theirs", sha256)
    assert same({k: read[k] for k in tensors}, tensors)


def test_the_format_is_that_of_safetensors(tmp_path):
    """By the format's own rules: a length, a header of names, and bytes without gaps."""
    tensors = {"flag": torch.tensor(True), "weight": torch.arange(3.0)}
    write_tensors(tmp_path / "file", tensors)
    content = (tmp_path / "file").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    assert length % 8 == 0
    assert header == {
        "__metadata__": {"format": "pt"},
        "weight": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]},
        "flag": {"dtype": "BOOL", "shape": [], "data_offsets": [12, 13]},
    }
    assert content[8 + length :] == torch.arange(3.0).numpy().tobytes() + b"\1"


@pytest.mark.parametrize(
    ("state", "name"),
    [
        ({"optimizer": {"state": {0: {"foo": object()}}}}, r"optimizer\.state\[0\]\.foo"),
        ({"others": [1, {2, 3}, lambda: 0]}, r"others\[2\] is a builtins\.function"),
        ({"model": {"w": torch.eye(2).to_sparse()}}, r"model\.w .*sparse"),
        ({"a": np.array(["x"])}, r"^a "),
        ({"a": {object(): 1}}, "a key of a"),
    ],
)
def test_a_value_that_has_no_place_is_named(tmp_path, state, name):
    with pytest.raises(CannotSaveError, match=name):
        storage.write(tmp_path, 1, state)
    assert os.listdir(tmp_path) == []


def test_numbers_are_read_from_json_as_they_were():
    for value in STATE["numbers"]:
        assert same(decode(json.loads(json.dumps(encode(value, "x", {}))), {}), value)


# --------------------------------------------------------------------------- whole or absent


def small_state():
    return {"model": {"w": torch.arange(3.0)}, "position": {"step": 7, "epoch": 1}}


def test_every_flipped_byte_and_every_cut_is_seen(tmp_path):
    path = storage.write(tmp_path, 7, small_state())
    tried = 0
    for file in sorted(path.iterdir()):
        content = file.read_bytes()
        for at in range(len(content)):
            for damaged in (
                content[:at] + bytes([content[at] ^ (1 << at % 8)]) + content[at + 1 :],
                content[:at],
            ):
                file.write_bytes(damaged)
                for use in (storage.read, storage.verify):
                    with pytest.raises(DamagedCheckpointError, match=file.name):
                        use(path)
                tried += 1
        file.write_bytes(content + b"\n")
        for use in (storage.read, storage.verify):
            with pytest.raises(DamagedCheckpointError, match=file.name):
                use(path)
        file.write_bytes(content)
    assert tried > 900
    assert same(storage.read(path), small_state())


def test_a_damaged_one_is_left_out_and_named(tmp_path):
    older = storage.write(tmp_path, 7, small_state())
    newer = storage.write(tmp_path, 8, small_state())
    (newer / "model.safetensors").unlink()
    with pytest.warns(InstepWarning, match=r"step-00000008/model\.safetensors is damaged.*missing"):
        assert storage.latest(tmp_path) == older
    shutil.rmtree(older)
    with pytest.warns(InstepWarning):
        assert storage.latest(tmp_path) is None
    (newer / "state.json").unlink()
    with pytest.warns(InstepWarning, match="state.json"):
        assert storage.latest(tmp_path) is None


def test_a_file_without_tensors_is_verified_too(tmp_path):
    draft = storage.make_draft(tmp_path, 1)
    record = storage.write_weight_map(draft / "model.json", {"weight": "a.safetensors"}, 4)
    path = storage.publish(draft, 1, {"epoch": 3}, {"model.json": record})
    assert storage.read(path) == {"epoch": 3}
    (path / "model.json").write_bytes(b" " * record["bytes"])
    with pytest.raises(DamagedCheckpointError, match=r"model\.json"):
        storage.read(path)


def changed_header(old, new):
    """What replaces a piece of a header, which stays as long, and leaves the tensors."""

    def change(content):
        assert content.count(old) == 1
        return content.replace(old, new)

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (changed_header(b'"shape":[3]', b'"shape":[2]'), "its header is not one .w has 8 bytes"),
        (changed_header(b'"F32"', b'"X99"'), "its header is not one .'X99'"),
        (changed_header(b"[3]", b"[a]"), "its header is not one "),
        (lambda content: b"\xff" * 8 + content[8:], "its header is not one "),
        (lambda content: content[:-1] + b"\xff", "its checksum is not that"),
        (
            lambda content: len(content[8:]).to_bytes(8, "little") + content[8:],
            "its header is not one ",
        ),
    ],
)
def test_of_a_damaged_file_nothing_is_believed(tmp_path, change, said):
    older = storage.write(tmp_path, 1, small_state())
    newer = storage.write(tmp_path, 2, {"model": {"w": torch.ones(3)}})
    file = newer / "model.safetensors"
    file.write_bytes(change(file.read_bytes()))
    with pytest.warns(InstepWarning, match=said):
        found = storage.read_latest(tmp_path)
    assert found[0] == older
    assert same(found[1], small_state())


def test_a_header_that_leaves_bytes_out_is_not_believed(tmp_path):
    newer = storage.write(tmp_path, 2, {"model": {"w": torch.ones(3)}})
    file = newer / "model.safetensors"
    content = file.read_bytes()
    short = content.replace(b'"shape":[3]', b'"shape":[2]').replace(b"[0,12]", b"[0,8] ")
    assert len(short) == len(content) != short.count(content)
    file.write_bytes(short)
    with pytest.raises(DamagedCheckpointError, match="the tensors have 8 bytes of 12"):
        storage.read(newer)


def test_a_file_that_becomes_shorter_while_it_is_read_is_damaged(tmp_path, monkeypatch):
    path = storage.write(tmp_path, 1, {"model": {"w": torch.ones(300)}})
    file, fstat = path / "model.safetensors", os.fstat

    def cut_off(descriptor):
        found = fstat(descriptor)
        if found.st_ino == file.stat().st_ino and found.st_size > 500:
            os.truncate(file, 500)
        return found

    monkeypatch.setattr(os, "fstat", cut_off)
    with pytest.raises(DamagedCheckpointError, match="became shorter while it was read"):
        storage.read(path)


def test_a_checkpoint_is_on_the_disk_before_and_after_it_gets_its_name(tmp_path, monkeypatch):
    """Or a power cut could leave a name without its files, or files without their name."""
    on_disk, fsync = [], os.fsync

    def note(descriptor):
        fsync(descriptor)
        on_disk.append((os.readlink(f"/proc/self/fd/{descriptor}"), os.listdir(tmp_path)))

    monkeypatch.setattr(os, "fsync", note)
    path = storage.write(tmp_path, 1, small_state())
    draft = next(name for _, names in on_disk for name in names)
    files = {f"{tmp_path}/{draft}/{name}" for name in os.listdir(path)}
    assert {what for what, names in on_disk if names == [draft]} == {*files, f"{tmp_path}/{draft}"}
    assert on_disk[-2] == (f"{tmp_path}/{draft}", [draft])
    assert on_disk[-1] == (str(tmp_path), [path.name])


def test_there_is_none_in_a_folder_that_does_not_exist(tmp_path):
    assert storage.latest(tmp_path / "none") is None


def test_order_is_by_step_and_not_by_time(tmp_path):
    """A clock that jumps back, or a copy of a folder, changes no order."""
    for step in (99_999_999, 5, 100_000_000, 9):
        os.utime(storage.write(tmp_path, step, small_state()), (0, 2**31 - step))
    steps = [storage.step_of(path) for path in storage.list_checkpoints(tmp_path)]
    assert steps == [100_000_000, 99_999_999, 9, 5]
    assert storage.step_of(storage.latest(tmp_path)) == 100_000_000


def test_a_later_format_is_an_error_and_not_left_out(tmp_path, monkeypatch):
    storage.write(tmp_path, 1, small_state())
    monkeypatch.setattr(storage, "FORMAT", 2)
    storage.write(tmp_path, 2, small_state())
    monkeypatch.undo()
    with pytest.raises(NewerFormatError, match=r"format 2.*reads formats up to 1"):
        storage.latest(tmp_path)


@contextmanager
def largest_file(size):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("size", [0, 100, 5000])
def test_a_disk_that_becomes_full_leaves_the_older_one(tmp_path, size):
    state = {"model": {"w": torch.arange(10_000.0)}}
    older = storage.write(tmp_path, 1, state)
    for step in (1, 2):
        with largest_file(size), pytest.raises(OSError, match="File too large"):
            storage.write(tmp_path, step, {"model": {"w": torch.zeros(10_000)}})
    assert os.listdir(tmp_path) == ["step-00000001"]
    assert same(storage.read(older), state)


@pytest.mark.parametrize("killed_at", ["fsync", "replace", "rmtree"])
def test_a_killed_writer_leaves_whole_ones_only(tmp_path, killed_at):
    """A process that dies at any of its calls to the system."""
    storage.write(tmp_path, 1, small_state())
    deaths = 0
    for call in range(20):
        child = os.fork()
        if not child:
            calls = iter(range(100))
            owner = shutil if killed_at == "rmtree" else os
            original = getattr(owner, killed_at)

            def die_or_call(*args, calls=calls, original=original, last=call, **kwargs):
                if next(calls) == last:
                    os.kill(os.getpid(), signal.SIGKILL)
                return original(*args, **kwargs)

            setattr(owner, killed_at, die_or_call)
            storage.write(tmp_path, 1, small_state())
            storage.write(tmp_path, 2, small_state())
            os._exit(0)
        _, status = os.waitpid(child, 0)
        deaths += os.WIFSIGNALED(status)
        found = storage.list_checkpoints(tmp_path)
        assert found
        for path in found:
            assert same(storage.read(path), small_state())
        if not os.WIFSIGNALED(status):
            break
    assert deaths
    storage.remove_drafts(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["step-00000001", "step-00000002"]
