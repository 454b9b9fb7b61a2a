"""The supervisor of one host, as `remote_job` starts it: `python -m instep.launch.remote.agent`.

It reads one line of JSON from stdin: an AgentRequest. Each further byte is the number of a signal
for the job. The end of stdin means that nobody waits for the job any more.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from dataclasses import asdict, dataclass

from instep.distributed.identity import endpoints
from instep.errors import LaunchError
from instep.launch.job import Job
from instep.launch.multi_node.hosts import NodeConfig
from instep.launch.restarts.attempts import run_attempts
from instep.launch.restarts.policy import RestartPolicy
from instep.process import print_line

STARTED = b"instep agent\n"
"""Tells that a login has led to an agent."""


@dataclass(frozen=True)
class AgentRequest:
    """What one host has to run."""

    folder: str
    """The working directory."""
    environ: dict[str, str]
    command: list[str]
    size: int
    """The number of ranks of this host."""
    output: str
    plain: bool
    variables: dict[str, dict[str, str]]
    """Additional environment variables, by the rank."""
    node: int
    nodes: int
    master: str
    port: int
    """The endpoint of the hosts' rendezvous."""
    announces: bool
    """Whether it writes STARTED to stdout first."""
    max_restarts: int = 0
    min_ranks: int | None = None

    def encode(self) -> bytes:
        """This message as one line of JSON."""
        return json.dumps(asdict(self)).encode() + b"\n"

    def run(self) -> int:
        """Run the job and return its exit code. Raises LaunchError."""
        job = Job(
            self.size,
            tuple(self.command),
            self.output,
            self.plain,
            variables=lambda rank: self.variables.get(str(rank), {}),
            hosts=NodeConfig(
                self.node,
                self.nodes,
                endpoints.Address(self.master, self.port, ""),
                has_own_terminal=False,
            ),
        )
        policy = RestartPolicy(self.max_restarts, self.min_ranks)
        return run_attempts(job, policy, started=lambda: None).print_report()


def main() -> int:
    """Run what is asked for, and return the exit code."""
    control = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    with open(control, "rb", buffering=0) as stdin:
        request = AgentRequest(**json.loads(stdin.readline()))
        if request.announces:
            os.write(1, STARTED)
        threading.Thread(target=_forward_signals, args=(os.dup(control),), daemon=True).start()
    os.environ.clear()
    os.environ.update(request.environ)
    try:
        os.chdir(request.folder)
        return request.run()
    except OSError as error:
        text = f"cannot work in {request.folder} ({error.strerror}). All hosts need the folder."
    except LaunchError as error:
        text = str(error)
    except KeyboardInterrupt:  # while it waited for other hosts
        return 128 + signal.SIGINT
    print_line(f"on {os.uname().nodename}: {text}")
    return 1


def _forward_signals(control: int) -> None:
    while number := os.read(control, 1):
        os.kill(os.getpid(), number[0])
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
