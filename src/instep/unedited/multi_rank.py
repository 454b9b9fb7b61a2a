"""Several ranks that look like one process: join the job, install everything, and restore it."""

from __future__ import annotations

import atexit
import os
import pickle
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta
from time import monotonic
from types import TracebackType
from typing import NoReturn

import torch.distributed as dist

from instep.distributed.communication import rank_local
from instep.distributed.communication.collectives import barrier
from instep.distributed.communication.local_transport import LocalTransport
from instep.distributed.communication.transport import get_transport, use_transport
from instep.distributed.errors import AuthenticationError, DisagreementError
from instep.distributed.identity import launchers
from instep.distributed.identity.world import World
from instep.distributed.rendezvous import bootstrap
from instep.distributed.watchdog import client
from instep.distributed.watchdog.call_stack import wait_at_exit
from instep.distributed.watchdog.signals.rank_signals import rank_signals
from instep.process import pending_writes, print_line, settings
from instep.process.import_hooks import after_import
from instep.process.torch_private import allow_repeated_backward
from instep.process.tracebacks import format_error, root_cause
from instep.training.draws import kernels
from instep.training.drift import non_finite
from instep.training.drift.whole_gradients import StepCheck, note_backward
from instep.unedited import launcher_env, opt_out, patch_table, seeds, std_streams
from instep.unedited.data import loaders
from instep.unedited.files import os_functions, write_access
from instep.unedited.files.layer_directories import LayerDirectories, SharedDirectory
from instep.unedited.processes import children, own_end
from instep.unedited.processes.command_files import GenerationChange
from instep.unedited.rank0_relay import Relay
from instep.unedited.sharded_call.counting import call_counts
from instep.unedited.sharded_call.one_process.cores import (
    Cores,
    can_use_one_process,
    threads_of_one_process,
)
from instep.unedited.sharded_call.one_process.fallback import (
    Fallback,
    leave_others,
    may_interrupt,
    set_fallback,
)
from instep.unedited.sharded_call.plan import plan_cache
from instep.unedited.sharded_call.run import backward, region
from instep.unedited.sharded_call.run.sharded_output import has_sharded_outputs

PATIENCE = 1.5
"""Seconds. If all ranks fail in the same way, rank 0 has reported it by then, unless it is behind:
it alone writes files and prints."""
LONGEST_PATIENCE = 30.0
"""Seconds, for a rank 0 that waits for nobody: it may be writing to a slow disk or pipe."""
_POLL = 0.5
"""Seconds between two looks of each rank at rank 0's store."""
LONG_RUN = 20.0
"""Seconds. After a shorter run nothing is printed about what was gained."""
_NO_CALLS = (
    "every rank computed all of this script: it called no torch.nn.Module with parameters in a way "
    "that instep sees. (Calls of a class that defines __call__ itself, and those inside of a "
    "function that torch.compile compiles are not seen.) [INS712]"
)
_INFO, _FAILED, _DONE, _NEVER = "info", "failed", "done", "never"


@dataclass(frozen=True)
class SessionInfo:
    """What rank 0 sends to the other ranks at the start."""

    seed: int
    terminal: std_streams.Terminal
    directory: SharedDirectory


class MultiRankSession:
    """What is installed in a world of several ranks, until `end`."""

    _is_alone = False
    """Whether rank 0 goes on alone."""

    def __init__(self, on_opt_out: opt_out.OnOptOut) -> None:
        """Join the other ranks and install everything. Collective. Raises LaunchError."""
        self._installed = False
        self._has_failed = False
        self._alone = ExitStack()
        """Of rank 0, once it goes on alone."""
        self._process = os.getpid()
        atexit.register(self.end)  # runs after what rendezvous and the script register
        self.world = _join()
        self._excepthook_before = sys.excepthook
        atexit.register(self._wait_for_all_ranks)
        self._store = dist.PrefixStore("instep", bootstrap.store())
        info = _exchange_info(self._store, self.world)
        self.seed = info.seed
        self._directories = LayerDirectories(info.directory, self.world)
        pending_writes.set_marker(self._directories.marker())
        if launchers.FAILURE_FILE in os.environ:
            write_access.allow(os.path.dirname(os.environ[launchers.FAILURE_FILE]))
        write_access.allow(*self._directories.writable())
        self._threads = threads_of_one_process(self.world)
        self._started = monotonic()
        self.has_begun = False
        """Whether the ranks share work already, so that the script cannot opt out any more."""
        self._relay = Relay(self._store, self.world.rank, self.world.size)
        self._streams = std_streams.StdStreams(self.world.rank, info.terminal, self._relay)
        show_step = self._streams.print_error_line if self.world.rank == 0 else _show_nothing
        self._step_check = StepCheck(show_step)
        barrier()  # without it, a rank whose script ends at once would leave the others above
        self._installed = True
        launcher_env.mask()
        seeds.seed_everything(self.seed)
        files = self._directories.files()
        os_functions.set_files(files)
        change = GenerationChange(files, self._directories.shared, self._directories.generations)
        children.install(self._relay, change, patch_table.install_files)
        own_end.set_ranks(self)
        seeds.take_from_rank0(self._relay)
        opt_out.set_handler(on_opt_out)
        rank_local.register_rank()
        backward.on_first_work(self._begin)
        patch_table.install()
        # The comparison of a call runs its backward before the script does.
        after_import("torch._dynamo", lambda _: allow_repeated_backward())
        self._streams.install()
        non_finite.show_with(self._streams.print_error_line)
        sys.excepthook = self._excepthook
        if can_use_one_process(self.world):
            set_fallback(Fallback(self._threads, self))
            self._relay.before_waiting = leave_others
            rank_signals.listener = may_interrupt

    def _begin(self) -> None:
        """The script cannot opt out any more, so the ranks other than 0 can be restricted."""
        self.has_begun = True
        if self.world.rank != 0:
            write_access.restrict()

    def add_notes(self, error: BaseException) -> None:
        """Note on an exception of the script what instep knows of its cause."""
        write_access.add_notes(error, self.world.rank)
        launcher_env.add_note(error, self.world)

    def end(self) -> None:
        """Restore everything, except that the ranks stay connected."""
        if not self._installed or os.getpid() != self._process:
            return
        self._installed = False
        patch_table.remove()
        self._stop_sharing()
        self._step_check.end()
        non_finite.show_with(None)
        self._streams.restore()
        launcher_env.restore()
        sys.excepthook = self._excepthook_before
        self._directories.delete()

    def _stop_sharing(self) -> None:
        """From now on this rank does everything by itself."""
        set_fallback(None)
        backward.on_first_work(None)
        rank_local.unregister_rank()
        opt_out.set_handler(None)
        children.uninstall()
        own_end.set_ranks(None)
        seeds.take_from_rank0(None)
        os_functions.set_files(None)

    def has_outputs(self) -> bool:
        """As ScriptRanks has it."""
        return region.has_regions() or has_sharded_outputs()

    def is_loading_shared(self) -> bool:
        """As ScriptRanks has it."""
        return loaders.is_loading_shared()

    def tell(self, verdict: Callable[[], str]) -> str:
        """As ScriptRanks has it."""
        channel = self._relay.channel("one process")
        channel.is_patient = True
        try:
            return channel.run_on_rank0("steps of rank 0", verdict)
        except RuntimeError:  # rank 0, which keeps the store, has ended: by os._exit, say
            if self.world.rank == 0:
                raise
            self._end_now()

    def leave_to_rank0(self, cores: Cores, why: str) -> None:
        """Rank 0 goes on as the only process of the job, with these cores. The other ranks end,
        without what the script has registered for its end. Collective."""
        self._is_alone = True
        self.leave_job()
        if self.world.rank != 0:
            self._end_now()
        self._stop_sharing()
        # To look for one in the environment takes longer than many a batch to load.
        self._alone.enter_context(use_transport(LocalTransport()))
        patch_table.install_for_one_rank()
        loaders.stop_sharing()
        kernels.release()
        note_backward(is_summed=False)
        rank_signals.disconnect()
        launcher_env.unset_threads()
        cores.apply()
        threads = "1 thread" if cores.threads == 1 else f"{cores.threads} threads"
        if why:
            print_line(
                f"rank 0 goes on alone, with {threads}, {why}. The other ranks have ended. [INS717]"
            )

    def wait_to_exit(self, code: int) -> None:
        """As EndingRanks has it: as at the end of the script, or after an exception."""
        if code:
            self.reports_failure(f"exit code {code}")
        else:
            self._wait_for_all_ranks()
            client.announce_end()

    def leave_to_successor(self) -> None:
        """As EndingRanks has it."""
        leave_others("")
        if not self._is_alone:
            cores = Cores.of_all(self._threads, get_transport())
            self.leave_to_rank0(cores, "since the script becomes another program by os.exec")

    def _end_now(self) -> NoReturn:
        """End this rank, of which nothing is needed any more."""
        own_end.set_ranks(None)
        client.announce_exit()
        children.end_processes()
        self._directories.delete()
        client.announce_end()
        os._exit(0)

    def leave_job(self) -> None:
        """Disconnect the ranks, which can then meet again. Collective.

        They meet at the same store, under other keys: `stores.reopen`.
        """
        barrier()
        del self._store
        self._relay.close()
        bootstrap.leave()

    def reports_failure(self, message: str, error: BaseException | None = None) -> bool:
        """Called when the script fails, by an exception or not: whether this rank is to report it.

        If all ranks fail in the same way, rank 0 reports it when it comes to it, and the others
        wait for its end. Another rank reports its failure if rank 0 fails in another way, ends, or
        does neither in PATIENCE seconds and waits for other ranks, or in `_longest_wait`.
        """
        if self._has_failed or self._is_alone or not self._installed:
            return True
        self._has_failed = True
        failed = message.encode(errors="surrogatepass")  # of a file name that is not UTF-8, say
        try:
            if self.world.rank == 0:
                self._store.set(_FAILED, failed)  # type: ignore[arg-type]  # the stub says str
                return True
            has_failed = self._has_rank_0_failed(_longest_wait(error))
            if not has_failed or self._store.get(_FAILED) != failed:
                return True
        except RuntimeError:  # rank 0, which keeps the store, may have ended
            return True
        with suppress(RuntimeError):
            self._store.wait([_NEVER], settings.timeout())
        return False

    def _has_rank_0_failed(self, longest: float) -> bool:
        """Whether rank 0 has failed or come to its end, for which this rank waits while rank 0
        waits for nobody. Raises RuntimeError where it is gone, with the store."""
        with suppress(dist.DistStoreError):  # it has taken too long
            self._store.wait([_FAILED], timedelta(seconds=PATIENCE))
            return True
        rank_0_waits = client.announce_failure()
        deadline = monotonic() + longest
        while not self._store.check([_FAILED]):
            if rank_0_waits is None or rank_0_waits.wait(_POLL) or monotonic() > deadline:
                return False
        return True

    def _wait_for_all_ranks(self) -> None:
        """At the script's end: rank 0 keeps the store, and it may be the last rank to come here."""
        if self._has_failed or not self._installed or os.getpid() != self._process:
            return
        leave_others("")
        if self._is_alone:
            client.announce_exit()
            return
        if self.world.rank == 0:
            self._store.set(_FAILED, "")
        self._store.set(f"{_DONE}{self.world.rank}", "")
        all_done = [f"{_DONE}{rank}" for rank in range(self.world.size)]
        self._print_gain()
        client.announce_exit()
        with suppress(RuntimeError):  # rank 0 has ended: it waited for all ranks
            wait_at_exit(lambda: self._store.wait(all_done, settings.timeout()))

    def _print_gain(self) -> None:
        """Print on rank 0 what several ranks have gained, unless the run was short; or that
        nothing could be divided."""
        if self.world.rank != 0:
            return
        seconds = monotonic() - self._started
        line = ""
        if self.has_begun and not (call_counts.sharded or call_counts.whole):
            line = _NO_CALLS
        elif seconds >= LONG_RUN:
            line = plan_cache.gain.format(self.world.size, seconds)
        if line:
            print_line(line)

    def _excepthook(
        self, type_: type[BaseException], error: BaseException, frames: TracebackType | None
    ) -> None:
        """For sys.excepthook: if all ranks raise the same exception, only rank 0 prints it."""
        reports = self.reports_failure(format_error(error), error)
        self.add_notes(error)
        if reports and self.world.rank != 0:
            self._streams.restore()
        if reports:
            self._excepthook_before(type_, error, frames)


def _longest_wait(error: BaseException | None) -> float:
    """Seconds for which a rank that fails with this waits for a rank 0 that waits for nobody: none
    if rank 0 raises it at the same time or never."""
    differs = error and isinstance(root_cause(error), DisagreementError | AuthenticationError)
    return 0.0 if differs else LONGEST_PATIENCE


def _show_nothing(line: str) -> None:
    """Rank 0 shows what is the same on all ranks."""


def _join() -> World:
    """Use keys of instep's own, which a process group of the script does not find."""
    hook = sys.excepthook
    world = bootstrap.init_with_prefix("unedited")
    # Not torch's hook, which prints the rank before each line of a traceback.
    sys.excepthook = client.excepthook() or hook
    return world


def _exchange_info(store: dist.Store, world: World) -> SessionInfo:
    if world.rank == 0:
        terminal = std_streams.Terminal.detect()
        info = SessionInfo(seeds.choose_seed(), terminal, SharedDirectory.make(world))
        store.set(_INFO, pickle.dumps(info))  # type: ignore[arg-type]  # the stub says str
        return info
    received: SessionInfo = pickle.loads(store.get(_INFO))  # verified: rank 0 has written it
    return received
