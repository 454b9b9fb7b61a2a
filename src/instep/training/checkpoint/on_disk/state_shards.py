"""Large entries of a state are written by several ranks, each its shard, while training goes on.

The ranks have the same state, so each can write a part of it. They agree on the parts by
collectives, before the training goes on. The writes end at different times: each rank reports its
own in the store of the process group, and rank 0 waits for the reports in the thread that writes.
"""

from __future__ import annotations

import heapq
import json
import secrets
import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from instep.distributed.communication.transport import get_transport
from instep.distributed.rendezvous import bootstrap
from instep.distributed.rendezvous.verified_store import poll_interval
from instep.process.procfs import ProcessHandle, process_address
from instep.training.checkpoint.errors import CheckpointError
from instep.training.checkpoint.on_disk import storage
from instep.training.checkpoint.on_disk.storage import EncodedState, FileRecord
from instep.training.drift.bit_sums import bit_sums, is_comparable

_TOKEN = ".token"
Key = tuple[str, str]
"""An entry of the state, and the name of one of its tensors."""


@dataclass(frozen=True)
class ShardedDraft:
    """Rank 0's proposal to write large entries together."""

    draft: Path
    step: int
    token: str
    """In a file of the draft: a rank that reads it there sees the same folder."""
    tensors: dict[Key, tuple[torch.dtype, torch.Size]]
    """Of the large entries."""

    @classmethod
    def make(
        cls, folder: Path, step: int, state: EncodedState, shard_bytes: int
    ) -> ShardedDraft | None:
        """None if no entry has `shard_bytes` or more. Raises OSError."""
        large = {
            (entry, name): (tensor.dtype, tensor.shape)
            for entry, tensors in state.tensors.items()
            if sum(tensor.nbytes for tensor in tensors.values()) >= shard_bytes
            for name, tensor in tensors.items()
        }
        if not large:
            return None
        proposed = cls(storage.make_draft(folder, step), step, secrets.token_hex(8), large)
        try:
            (proposed.draft / _TOKEN).write_text(proposed.token)
        except OSError:
            storage.remove_draft(proposed.draft)
            raise
        return proposed

    def share(self, state: EncodedState) -> ShardedWrite:
        """Agree on which rank writes which tensors of `state`. Collective.

        Ranks that do not see the folder write nothing. A tensor that is not the same on its rank
        as on rank 0 is written by rank 0.
        """
        transport = get_transport()
        ranks = transport.all_gather_object((self._is_seen(), process_address()))
        if transport.rank == 0:
            (self.draft / _TOKEN).unlink(missing_ok=True)
        owners = self._divide([rank for rank, (seen, _) in enumerate(ranks) if seen or rank == 0])
        own = {
            key: tensor
            for key, tensor in self._tensors(state).items()
            if owners[key] != 0 and transport.rank in (0, owners[key])
        }
        mine = dict(zip(own, bit_sums(own.values()).tolist(), strict=True))
        of_rank_0 = transport.broadcast_object(mine, 0)
        # Of all ranks' values each takes as many bytes as the longest: those of rank 0 are apart.
        sums = transport.all_gather_object(mine if transport.rank else {})
        for key, owner in owners.items():
            if owner and (key not in sums[owner] or sums[owner][key] != of_rank_0.get(key)):
                owners[key] = 0
        addresses = {owner: ranks[owner][1] for owner in set(owners.values()) if owner}
        return ShardedWrite(self, owners, addresses, bootstrap.store())

    def _is_seen(self) -> bool:
        try:
            return (self.draft / _TOKEN).read_text() == self.token
        except OSError:
            return False

    def _divide(self, ranks: list[int]) -> dict[Key, int]:
        """The rank that writes each tensor: the largest first, each to the one with the least."""
        sizes = {
            key: dtype.itemsize * shape.numel() for key, (dtype, shape) in self.tensors.items()
        }
        least = [(0, rank) for rank in ranks]  # a heap: bytes so far, and the rank
        owners = {}
        for key in sorted(sizes, key=lambda key: -sizes[key]):
            taken, owners[key] = least[0]
            heapq.heapreplace(least, (taken + sizes[key], owners[key]))
        return {key: owners[key] for key in self.tensors}

    def _tensors(self, state: EncodedState) -> dict[Key, Tensor]:
        """The tensors of the large entries whose dtype and shape are those on rank 0."""
        return {
            (entry, name): tensor
            for entry, tensors in state.tensors.items()
            for name, tensor in tensors.items()
            if self.tensors.get((entry, name)) == (tensor.dtype, tensor.shape)
            and is_comparable(tensor)
        }


class ShardedWrite:
    """A checkpoint that several ranks write; each calls `write` in its thread."""

    def __init__(
        self,
        proposed: ShardedDraft,
        owners: dict[Key, int],
        addresses: dict[int, str],
        store: dist.Store,
    ) -> None:
        self._draft, self._step = proposed.draft, proposed.step
        self._rank = get_transport().rank
        self._key = f"instep/checkpoint/{proposed.token}"
        self._addresses = addresses
        """Of the processes of the other ranks that write."""
        self._store = store
        names: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
        self._bytes: Counter[str] = Counter()
        """Of all tensors of an entry."""
        for (entry, name), owner in owners.items():
            dtype, shape = proposed.tensors[entry, name]
            names[entry][owner].append(name)
            self._bytes[entry] += dtype.itemsize * shape.numel()
        self._shards = {entry: _named_files(entry, ranks) for entry, ranks in names.items()}

    def own_part(self, state: EncodedState) -> EncodedState:
        """The tensors of `state` that this rank writes: on rank 0 the small entries, too."""
        own: dict[str, dict[str, Tensor]] = {}
        for entry, tensors in state.tensors.items():
            if entry in self._shards:
                own[entry] = {name: tensors[name] for name in self._own_shard(entry).names}
            elif self._rank == 0:
                own[entry] = tensors
        return EncodedState(state.trees, own)

    def write(self, part: EncodedState) -> Path | None:
        """Write this rank's part. Rank 0 waits for the others, and returns the checkpoint's path.

        On rank 0 raises OSError, and CheckpointError if another rank could not write its part.
        """
        if self._rank != 0:
            self._report(part)
            return None
        try:
            try:
                files = self._write_files(part)
            finally:  # before the draft is removed
                reports = {rank: self._wait_for(rank) for rank in self._addresses}
            for rank, report in reports.items():
                if "error" in report:
                    raise CheckpointError(
                        f"rank {rank} could not write its part: {report['error']}"
                    )
                files |= report["files"]
            several = {entry: each for entry, each in self._shards.items() if len(each) > 1}
            for entry, shards in several.items():
                file = f"{entry}.safetensors.index.json"
                names = {name: shard.file for shard in shards for name in shard.names}
                files[file] = storage.write_weight_map(
                    self._draft / file, names, self._bytes[entry]
                )
            shard_files = {entry: [each.file for each in several[entry]] for entry in several}
            return storage.publish(self._draft, self._step, part.trees, files, shard_files)
        finally:
            storage.remove_draft(self._draft)

    def _own_shard(self, entry: str) -> _ShardFile:
        own = [shard for shard in self._shards[entry] if shard.rank == self._rank]
        return own[0] if own else _ShardFile(self._rank, "", [])

    def _write_files(self, part: EncodedState) -> dict[str, FileRecord]:
        files = {}
        for entry, tensors in part.tensors.items():
            if tensors:
                sharded = entry in self._shards
                file = self._own_shard(entry).file if sharded else f"{entry}.safetensors"
                files[file] = storage.write_file(self._draft / file, tensors)
        return files

    def _report(self, part: EncodedState) -> None:
        """Write this rank's part, and tell rank 0."""
        report: dict[str, Any] = {}
        try:
            report["files"] = self._write_files(part)
        except BaseException as error:
            report["error"] = f"{type(error).__name__}: {error}"
        self._store.set(f"{self._key}/{self._rank}", json.dumps(report))

    def _wait_for(self, rank: int) -> dict[str, Any]:
        """The report of a rank; that of one that has died is an error."""
        key = f"{self._key}/{rank}"
        process = ProcessHandle(self._addresses[rank])
        began = time.monotonic()
        try:
            while not self._store.check([key]):
                # Read before the store: what an ended process has reported is there.
                if process.has_ended() and not self._store.check([key]):
                    return {"error": "its process has ended"}
                time.sleep(poll_interval(time.monotonic() - began))
            report: dict[str, Any] = json.loads(self._store.get(key))
            self._store.delete_key(key)
            return report
        except RuntimeError as error:
            return {"error": f"the store of the ranks does not answer ({error})"}
        finally:
            process.close()


@dataclass(frozen=True)
class _ShardFile:
    """A file with the tensors of an entry that one rank writes."""

    rank: int
    file: str
    names: list[str]


def _named_files(entry: str, names: dict[int, list[str]]) -> list[_ShardFile]:
    if len(names) == 1:
        return [_ShardFile(rank, f"{entry}.safetensors", each) for rank, each in names.items()]
    return [
        _ShardFile(rank, f"{entry}-{k:05d}-of-{len(names):05d}.safetensors", names[rank])
        for k, rank in enumerate(sorted(names), start=1)
    ]
