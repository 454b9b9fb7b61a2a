"""Whether a job is started again after a failure, and with how many ranks. No communication."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from instep.launch.job_run import JobResult
from instep.launch.multi_node.hosts import NodeConfig
from instep.process.failures.record import Failure
from instep.training.checkpoint.resume_point import ResumePoint


@dataclass(frozen=True)
class Attempt:
    """The ranks of one attempt on the hosts that take part in it."""

    sizes: tuple[int, ...]
    """The number of ranks on each host."""
    nodes: tuple[int, ...]
    """The hosts, by their numbers in the first attempt."""


@dataclass(frozen=True)
class Decision:
    """What follows on an attempt."""

    next: Attempt | None
    """None: the job has ended."""
    message: str = ""
    """The line for the user."""


@dataclass(frozen=True)
class FailureCause:
    """What is equal in two failures of one cause."""

    code: int
    """The exit code; -n for signal n."""
    rank: tuple[int, int] | None
    """The host's number in the first attempt, and the local rank; None: of any rank."""
    text: str = ""
    """The line of code and the exception."""
    is_error: bool = False
    """Whether the script has ended by itself."""


@dataclass
class RestartPolicy:
    """Decides after each attempt. Every supervisor of a job comes to the same decision."""

    max_restarts: int
    min_ranks: int | None = None
    """With fewer ranks than at first the job goes on down to this number; None: never."""
    _restarts: int = 0
    _seen: set[FailureCause] = field(default_factory=set)
    """The causes of failures since the last new checkpoint."""
    _reached: ResumePoint | None = None

    def next_attempt(self, attempt: Attempt, result: JobResult) -> Decision:
        """Decide from how an attempt ended."""
        first = result.first
        was_told = result.requested_signal is not None or result.requests_requeue
        if result.code == 0 or first is None or was_told:
            return Decision(None)
        if self._advance(result.resume_point):
            self._seen.clear()
        cause = _cause_of(attempt, first)
        is_repeated = cause in self._seen
        self._seen.add(cause)
        if is_repeated and cause.is_error:
            return Decision(None, "the same error came twice without a new checkpoint in between")
        if self._restarts == self.max_restarts:
            return Decision(None, f"it was restarted {_times(self._restarts)} (--max-restarts)")
        following = self._shrink(attempt, result, is_repeated)
        if following is None:
            left = sum(attempt.sizes) - _lost_ranks(attempt, result.lost_nodes)
            return Decision(
                None, f"{left} ranks are left, and --min is {self.min_ranks or sum(attempt.sizes)}"
            )
        self._restarts += 1
        return Decision(following, self._describe(attempt, following))

    def _advance(self, point: ResumePoint | None) -> bool:
        """Whether this attempt has saved a checkpoint of a later step than all before."""
        if point is None or (self._reached is not None and point.step <= self._reached.step):
            return False
        self._reached = point
        return True

    def _shrink(self, attempt: Attempt, result: JobResult, is_repeated: bool) -> Attempt | None:
        """The next attempt: without the hosts that are lost, and after a repeated death with a
        rank less on the host where it was. None if too few ranks are left."""
        kept = [k for k in range(len(attempt.sizes)) if k not in result.lost_nodes]
        sizes = {k: attempt.sizes[k] for k in kept}
        assert result.first is not None
        if is_repeated and self.min_ranks is not None and not result.lost_nodes:
            node = _node_of(attempt.sizes, result.first.rank)
            if sizes[node] > 1 and sum(sizes.values()) > self.min_ranks:
                sizes[node] -= 1
        least = sum(attempt.sizes) if self.min_ranks is None else self.min_ranks
        if not sizes or sum(sizes.values()) < least or 0 in result.lost_nodes:
            return None
        return Attempt(tuple(sizes.values()), tuple(attempt.nodes[k] for k in kept))

    def _describe(self, attempt: Attempt, following: Attempt) -> str:
        size, fewer = sum(attempt.sizes), sum(following.sizes)
        where = (
            "script starts again (instep has no checkpoint of it)"
            if self._reached is None
            else f"job goes on from {self._reached.path}"
        )
        ranks = "" if fewer == size else f" with {fewer} of {size} ranks"
        return f"restart {self._restarts} of {self.max_restarts}{ranks}: the {where}"


def place_in(attempt: Attempt, first: NodeConfig) -> NodeConfig:
    """The place of a host in an attempt, from its place in the first one."""
    return replace(first, node=attempt.nodes.index(first.node), nodes=len(attempt.nodes))


def _cause_of(attempt: Attempt, failure: Failure) -> FailureCause:
    """The cause of a failure, as far as it can be told from others."""
    node = _node_of(attempt.sizes, failure.rank)
    rank = attempt.nodes[node], failure.rank - sum(attempt.sizes[:node])
    if failure.lost_host or failure.code < 0:
        return FailureCause(failure.code, rank)
    lines = [line.strip() for line in failure.text.splitlines() if line.strip()]
    places = [line for line in lines if line.startswith("File ")]
    text = "\n".join([*places[-1:], *lines[-1:]])
    return FailureCause(failure.code, None if text else rank, text, is_error=True)


def _node_of(sizes: Sequence[int], rank: int) -> int:
    """The host of a rank."""
    return next(k for k in range(len(sizes)) if rank < sum(sizes[: k + 1]))


def _lost_ranks(attempt: Attempt, lost_nodes: Sequence[int]) -> int:
    return sum(attempt.sizes[node] for node in lost_nodes)


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
