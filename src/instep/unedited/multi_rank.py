"""Several ranks that look like one process: join the job, install everything, and restore it."""

from __future__ import annotations

import atexit
import os
import pickle
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from time import monotonic
from types import TracebackType
from typing import NoReturn, TypeVar

import torch.distributed as dist

from instep.distributed.communication import rank_local
from instep.distributed.communication.collectives import barrier
from instep.distributed.communication.local_transport import LocalTransport
from instep.distributed.communication.transport import get_transport, use_transport
from instep.distributed.identity import launchers
from instep.distributed.identity.world import World
from instep.distributed.rendezvous import bootstrap
from instep.distributed.watchdog import client
from instep.distributed.watchdog.call_stack import wait_at_exit
from instep.distributed.watchdog.signals.rank_signals import rank_signals
from instep.process import pending_writes, print_line, settings
from instep.process.failures.tracebacks import format_error
from instep.process.import_hooks import after_import
from instep.process.torch_private.compiler import allow_repeated_backward
from instep.training.draws import kernels
from instep.training.drift import non_finite, optimizers
from instep.training.drift.whole_gradients import StepCheck, note_backward
from instep.unedited import launcher_env, opt_out, patch_table, seeds, std_streams
from instep.unedited.data import loaders
from instep.unedited.files import os_functions
from instep.unedited.files.compiled_code import write_access
from instep.unedited.files.layer_directories import LayerDirectories, SharedDirectory
from instep.unedited.processes import children, own_end
from instep.unedited.processes.command_files import GenerationChange
from instep.unedited.processes.failure_reports import FailureReports
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
from instep.unedited.sharded_call.plan.call_tuner import gain
from instep.unedited.sharded_call.run import backward, region
from instep.unedited.sharded_call.run.sharded_output import has_sharded_outputs

LONG_RUN = 20.0
"""Seconds. After a shorter run nothing is printed about what was gained."""
_NO_CALLS = (
    "every rank computed all of this script: it called no torch.nn.Module with parameters in a way "
    "that instep sees. (Calls of a class that defines __call__ itself, in threads that the script "
    "starts, and inside of a function that torch.compile compiles are not seen.) [INS712]"
)
_INFO, _DONE = "info", "done"
T = TypeVar("T")


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
        self._at_end, self._sharing = ExitStack(), ExitStack()
        """What restores everything, and what ends that the ranks share their work."""
        self._alone = ExitStack()
        """Of rank 0, once it goes on alone."""
        self._process = os.getpid()
        atexit.register(self._end_at_exit)  # runs after what rendezvous and the script register
        self.world = _join()
        self._excepthook_before = sys.excepthook
        atexit.register(self._wait_for_all_ranks)
        self._store = dist.PrefixStore("instep", bootstrap.store())
        self._failures = FailureReports(self._store, self.world)
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
        barrier()  # without it, a rank whose script ends at once would leave the others above
        self._installed = True
        self._install(on_opt_out)

    def _install(self, on_opt_out: opt_out.OnOptOut) -> None:
        """Replace what the script is to see otherwise. Each line says how it is restored; the last
        one is restored first."""
        at_end = self._at_end
        at_end.callback(self._directories.delete)
        show_step = self._streams.print_error_line if self.world.rank == 0 else _show_nothing
        at_end.callback(StepCheck(show_step).end)
        launcher_env.mask()
        at_end.callback(launcher_env.restore)
        seeds.seed_everything(self.seed)
        at_end.enter_context(self._sharing)
        self._share(on_opt_out)
        patch_table.install()
        at_end.callback(patch_table.remove)
        # The comparison of a call runs its backward before the script does.
        after_import("torch._dynamo", lambda _: allow_repeated_backward())
        self._streams.install()
        at_end.callback(self._streams.restore)
        non_finite.show_with(self._streams.print_error_line)
        at_end.callback(non_finite.show_with, None)
        sys.excepthook = self._excepthook
        at_end.callback(setattr, sys, "excepthook", self._excepthook_before)
        if can_use_one_process(self.world):
            self._set(set_fallback, Fallback(self._threads, self))
            self._relay.before_waiting = leave_others
            rank_signals.listener = may_interrupt

    def _share(self, on_opt_out: opt_out.OnOptOut) -> None:
        """Let the ranks share the work of the script, and all but rank 0 leave files and commands
        to rank 0, until `_sharing` is closed."""
        files = self._directories.files()
        change = GenerationChange(files, self._directories.shared, self._directories.generations)
        rank_local.register_rank()
        self._sharing.callback(rank_local.unregister_rank)
        self._set(os_functions.set_files, files)
        self._set(
            children.set_sharing,
            children.SharedCommands(self._relay, change, patch_table.install_files),
        )
        self._set(own_end.set_ranks, self)
        self._set(seeds.take_from_rank0, self._relay)
        self._set(opt_out.set_handler, on_opt_out)
        self._set(backward.on_first_work, self._begin)

    def _set(self, setter: Callable[[T | None], object], value: T) -> None:
        """`setter(value)` now, and `setter(None)` when `_sharing` is closed."""
        setter(value)
        self._sharing.callback(setter, None)

    def _begin(self) -> None:
        """The script cannot opt out any more, so the ranks other than 0 can be restricted."""
        self.has_begun = True
        if self.world.rank != 0:
            write_access.restrict()

    def add_notes(self, error: BaseException) -> None:
        """Note on an exception of the script what instep knows of its cause."""
        write_access.add_notes(error, self.world.rank)
        launcher_env.add_note(error, self.world)

    def _end_at_exit(self) -> None:
        """As `end`. Objects that live until Python ends may print when it deletes them."""
        if self._installed and not self._failures.has_failed and os.getpid() == self._process:
            self._streams.discard_output()
        self.end()

    def end(self) -> None:
        """Restore everything, except that the ranks stay connected."""
        if not self._installed or os.getpid() != self._process:
            return
        self._installed = False
        self._at_end.close()

    def has_outputs(self) -> bool:
        """As ScriptRanks has it."""
        return region.has_regions() or has_sharded_outputs()

    def is_loading_shared(self) -> bool:
        """As ScriptRanks has it."""
        return loaders.is_loading_shared()

    def tell(self, verdict: Callable[[], str]) -> str:
        """As ScriptRanks has it."""
        channel = self._relay.channel("one process")
        channel.has_timeout = False
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
        client.announce_single_rank()
        self._sharing.close()
        # To look for one in the environment takes longer than many a batch to load.
        self._alone.enter_context(use_transport(LocalTransport()))
        patch_table.install_for_one_rank()
        loaders.stop_sharing()
        kernels.release()
        note_backward(is_summed=False)
        optimizers.stop_following()
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
        self._failures.close()
        self._relay.close()
        bootstrap.leave()

    def reports_failure(
        self,
        message: str,
        error: BaseException | None = None,
        alike: Callable[[], object] = lambda: None,
    ) -> bool:
        """As `FailureReports.is_to_report`; a rank whose script shares nothing reports its own."""
        if self._is_alone or not self._installed:
            return True
        return self._failures.is_to_report(message, error, alike)

    def _wait_for_all_ranks(self) -> None:
        """At the script's end: rank 0 keeps the store, and it may be the last rank to come here."""
        if self._failures.has_failed or not self._installed or os.getpid() != self._process:
            return
        leave_others("")
        if self._is_alone:
            client.announce_exit()
            return
        if self.world.rank == 0:
            self._failures.rank_0_is_done()
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
            line = gain.format(self.world.size, seconds)
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
