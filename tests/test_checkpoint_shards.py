"""Large states: several ranks write them, each a shard; any number of ranks reads them."""

import json
import os
import random
from collections import Counter
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import forked_jobs
import instep
from instep.errors import CheckpointError, DamagedCheckpointError
from instep.process.procfs import pid_space
from instep.training.checkpoint.on_disk import state_shards, storage
from pool import run

pytestmark = pytest.mark.slow

TINY = 64
"""Bytes from which these tests take a state for a large one."""
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


class Training:
    """A model with buffers that differ between ranks, and its optimizer."""

    def __init__(self, folder, **options):
        # Random states that are equal on all ranks are stored once, and shards depend on sizes.
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(3 + instep.rank)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        self.model = instep.replicate(self.model, batch_statistics="rank")
        self.optimizer = torch.optim.Adam(self.model.parameters(), 0.01)
        self.checkpoint = instep.Checkpoint(
            folder, model=self.model, optimizer=self.optimizer, shard_bytes=TINY, **options
        )

    def step(self):
        self.optimizer.zero_grad()
        x = instep.shard(torch.rand(12, 4, generator=torch.Generator().manual_seed(1)))
        self.model(x).pow(2).mean().backward()
        self.optimizer.step()
        self.checkpoint.step()

    def state(self):
        moments = [v for s in self.optimizer.state.values() for v in s.values()]
        return [v.clone() for v in (*self.model.state_dict().values(), *moments)]


def save(folder, steps=2):
    training = Training(folder, every=1)
    opened = Counter()

    def count(path, tensors, original=storage.write_tensors):
        opened[path.name] += 1
        return original(path, tensors)

    with patch.object(storage, "write_tensors", count):
        for _ in range(steps):
            training.step()
        training.checkpoint.close()
    return training.state(), opened


def resume(folder):
    training = Training(folder)
    assert training.checkpoint.resume()
    training.checkpoint.close()
    return training.state()


def test_each_rank_writes_a_shard_and_any_number_reads_them(tmp_path):
    (first, by_0), (second, by_1) = run(2, save, str(tmp_path))
    path = storage.latest(tmp_path)
    assert path.name == "step-00000002"
    assert not by_0.keys() & by_1.keys()
    assert {*by_0, *by_1, "state.json"} | {
        f"{entry}.safetensors.index.json" for entry in ("model", "optimizer", "training")
    } == set(os.listdir(path))
    # A buffer that is another on each rank is rank 0's, as in small states.
    assert not all(map(torch.equal, first, second))
    for size in (3, 1, 2):
        for state in run(size, resume, str(tmp_path)):
            assert all(map(torch.equal, state, first))
            assert len(state) == len(first)


def test_shards_load_in_plain_pytorch(tmp_path):
    """As docs/long-runs.md has it, and by the index that Hugging Face's libraries read."""
    library = pytest.importorskip("safetensors.torch")
    [(saved, _), _] = run(2, save, str(tmp_path))
    path = tmp_path / "step-00000002"
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    files = path.glob("model[.-]*safetensors")
    model.load_state_dict({k: v for f in files for k, v in library.load_file(f).items()})
    assert all(map(torch.equal, model.state_dict().values(), saved))
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(v.nbytes for v in model.state_dict().values())
    assert set(index["weight_map"].values()) == set(SHARDS)
    for name, value in model.state_dict().items():
        shard = library.load_file(path / index["weight_map"][name])
        assert torch.equal(shard[name], value)


def test_damage_in_any_file_of_a_sharded_one_is_seen(tmp_path):
    run(2, save, str(tmp_path), 1)
    path = tmp_path / "step-00000001"
    for file in path.iterdir():
        content = file.read_bytes()
        for damaged in (content[:-1], content[:20] + b"?" + content[21:]):
            file.write_bytes(damaged)
            for use in (storage.read, storage.verify):
                with pytest.raises(DamagedCheckpointError, match=file.name):
                    use(path)
        file.unlink()
        with pytest.raises(DamagedCheckpointError, match=file.name):
            storage.read(path)
        file.write_bytes(content)
    storage.read(path)


def fail_on(folder, rank, failing_step):
    training = Training(folder, every=1)
    messages = []

    def fail(path, tensors, original=storage.write_tensors):
        if f"step-{failing_step:08d}" in str(path):
            raise OSError("No space left on device")
        return original(path, tensors)

    with patch.object(
        storage, "write_tensors", fail if instep.rank == rank else storage.write_tensors
    ):
        for step in range(1, 4):
            try:
                training.step()
                training.checkpoint._writer.wait()
            except CheckpointError as error:
                messages.append((step, str(error)))
        training.checkpoint.close()
    return messages


@pytest.mark.parametrize("rank", [0, 1])
def test_a_write_that_fails_on_one_rank_is_raised_on_all(tmp_path, rank):
    for messages in run(2, fail_on, str(tmp_path), rank, 2):
        assert [step for step, _ in messages] == [3]
        assert "Older checkpoints are as they were" in messages[0][1]
        who = "rank 1 could not write its part: " if rank == 1 else ""
        assert f"step-00000002 could not be written: {who}OSError: No space" in messages[0][1]
    steps = [storage.step_of(path) for path in storage.list_checkpoints(tmp_path)]
    assert 2 not in steps
    assert 1 in steps
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".draft")]
    for path in storage.list_checkpoints(tmp_path):
        storage.verify(path)


def test_the_part_of_a_rank_that_died_is_not_waited_for():
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    proposed = state_shards.ShardedDraft(None, 1, "token", {})
    dead = f"{pid_space()} {child}"
    write = state_shards.ShardedWrite(proposed, {}, {1: dead}, dist.HashStore())
    assert write._wait_for(1) == {"error": "its process has ended"}


SCRIPT = """
import sys, torch, instep
from torch import distributed as dist, nn
from instep.training.checkpoint.on_disk import storage

def write(path, tensors, original=storage.write_tensors):
    while is_slow and dist.is_initialized():
        pass  # until the script has ended
    return original(path, tensors)

storage.write_tensors = write
model = instep.replicate(nn.Linear(8, 8))
is_slow = instep.rank == 1
instep.Checkpoint(sys.argv[1], model=model, shard_bytes=64).save()
dist.destroy_process_group()
"""


def test_a_script_that_ends_lets_all_ranks_write_their_shards(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    done = forked_jobs.run("run", "-n", "2", "script.py", "saved", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Exception" not in done.stderr
    assert "could not be written" not in done.stderr
    assert set(storage.read(tmp_path / "saved" / "step-00000000")["model"]) == {"weight", "bias"}


def save_unseen(folder):
    training = Training(folder, every=1)
    with patch.object(state_shards.ShardedDraft, "_is_seen", lambda _: instep.rank == 0):
        training.step()
    training.checkpoint.close()
    return training.state()


def test_a_rank_that_does_not_see_the_folder_writes_nothing(tmp_path):
    first, _ = run(2, save_unseen, str(tmp_path))
    path = tmp_path / "step-00000001"
    assert sorted(os.listdir(path)) == [
        "model.safetensors", "optimizer.safetensors", "state.json", "training.safetensors",
    ]  # fmt: skip
    assert all(map(torch.equal, run(1, resume, str(tmp_path))[0], first))


def test_a_folder_is_seen_by_its_token_and_not_by_its_name(tmp_path):
    state = storage.EncodedState.encode({"model": {"w": torch.zeros(100)}})
    proposed = state_shards.ShardedDraft.make(tmp_path, 1, state, TINY)
    assert proposed._is_seen()
    (proposed.draft / ".token").write_text("of another host's disk")
    assert not proposed._is_seen()
    storage.remove_draft(proposed.draft)
    assert not proposed._is_seen()


def test_small_states_are_rank_0s_alone(tmp_path):
    state = storage.EncodedState.encode({"model": {"w": torch.zeros(100)}})
    assert state_shards.ShardedDraft.make(tmp_path, 1, state, 401) is None
    assert os.listdir(tmp_path) == []
