"""A private Slurm of two nodes on this host, in a folder of its own, on loopback only."""

from __future__ import annotations

import os
import random
import select
import signal
import socket
import subprocess
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from components import PATH

FIRST = "127.0.0.1"
"""The first node's name resolves, as names on a cluster do; it is where the ranks meet."""
CONFIGURATION = """\
ClusterName=lab
FirstJobId={first_job}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SchedulerParameters=sched_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
SlurmdTimeout=30
InactiveLimit=0
KillWait=5
NodeName={first} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2
NodeName=node2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """Running daemons, in the foreground of processes that this one holds."""

    def __init__(self, folder: Path) -> None:
        self._above = folder
        self._daemons: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Another program may take a port in between: then once more, with others."""
        for attempt in ("first", "second", "last"):
            self.folder = self._above / attempt
            self.folder.mkdir()
            self.environ = {"SLURM_CONF": str(self.folder / "slurm.conf")}
            try:
                self._start()
            except RuntimeError:
                self.stop()
                if attempt == "last":
                    raise
            else:
                return

    def _start(self) -> None:
        munge = self.folder / "munge"
        for name in ("munge", "state"):
            (self.folder / name).mkdir(mode=0o755)
        key = munge / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        (self.folder / "slurm.conf").write_text(
            CONFIGURATION.format(
                folder=self.folder,
                host=socket.gethostname(),
                ports=_free_ports(3),
                first=FIRST,
                # Jobs of one number, of two clusters on one host, would meet at the same port.
                first_job=random.randrange(1, 1_000_000),
            )
        )
        files = [f"--{what}-file={munge}/{what}" for what in ("key", "pid", "log", "seed")]
        self._daemon("munged", "-F", "--force", f"--socket={munge}/socket", *files)
        self._until(lambda: (munge / "socket").exists())
        self._daemon("slurmctld", "-D")
        for node in (FIRST, "node2"):
            self._daemon("slurmd", "-D", "-N", node)
        self._until(lambda: self._sinfo() == "2 idle")

    def stop(self) -> None:
        """End every job, then every daemon, the last first; returns when all have ended."""
        if all(daemon.poll() is None for daemon in self._daemons):
            self._ask(
                "scancel", f"--user={os.getuid()}"
            )  # without daemons its processes would wait for ever
            self._until(lambda: not self._ask("squeue", "--noheader"))
        for daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._daemons.clear()

    def start_again(self, job: str) -> None:
        """Wait until a job that is queued again runs for the second time; of itself it would wait
        for two minutes."""
        self._until(lambda: self._shows(job, "Restarts=1", "Reason=BeginTime"))
        # In the second in which it was ended, slurmd takes it for the one that it has ended.
        self._ask("scontrol", "update", f"jobid={job}", "StartTime=now+2")
        self._until(lambda: self._shows(job, "Restarts=1", "JobState=RUNNING"))

    def cancel_requeued(self, job: str, restarts: int) -> None:
        """Wait until a job is queued again after so many restarts, and cancel it."""
        self._until(lambda: self._shows(job, f"Restarts={restarts}", "Reason=BeginTime"))
        self._ask("scancel", job)

    def _shows(self, job: str, *words: str) -> bool:
        shown = self._shown(job)
        return all(word in shown for word in words)

    def _shown(self, job: str) -> str:
        return self._ask("scontrol", "show", "job", job)

    def _ask(self, *command: str) -> str:
        answer = subprocess.run(
            command, env=os.environ | self.environ, capture_output=True, text=True, timeout=20
        )
        return answer.stdout.strip()

    def _daemon(self, *command: str) -> None:
        with open(self.folder / "daemons.log", "ab") as log:
            self._daemons.append(
                subprocess.Popen(
                    command,
                    env=os.environ | self.environ | {"PATH": PATH},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            )

    def _sinfo(self) -> str:
        return self._ask("sinfo", "-h", "-o", "%D %T")

    def _until(self, ready) -> None:
        """Look again until it is so, or a daemon has ended, or 30 seconds are over."""
        deadline = time.monotonic() + 30
        with ExitStack() as stack:
            poll = select.poll()
            for daemon in self._daemons:
                handle = os.pidfd_open(daemon.pid)
                stack.callback(os.close, handle)
                poll.register(handle, select.POLLIN)
            while not ready():
                ended = poll.poll(50)
                if ended or time.monotonic() > deadline:
                    log = (self.folder / "daemons.log").read_text()
                    raise RuntimeError(f"Slurm did not start:\n{log[-3000:]}")


def _free_ports(count: int) -> list[int]:
    """Below those that the system gives to outgoing connections."""
    with ExitStack() as stack:
        ports: list[int] = []
        while len(ports) < count:
            port = random.randrange(10_000, 20_000)
            with suppress(OSError):
                stack.enter_context(socket.create_server(("", port)))
                ports.append(port)
        return ports
