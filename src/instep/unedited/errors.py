"""What an unedited script does that cannot be the same on several ranks."""

from __future__ import annotations

from instep.errors import LaunchError, TrainingError


class UneditedError(LaunchError):
    """This script cannot run unedited on several ranks."""

    @classmethod
    def own_processes(cls, how: str) -> UneditedError:
        """It starts processes that train."""
        return cls(
            f"this script starts training processes of its own ({how}); on several ranks each "
            "would start them all. Run it with one rank (-n 1), or with --plain."
        )

    @classmethod
    def cannot_tell(cls, what: str, kind: str, why: str) -> UneditedError:
        """What rank 0 has done for all does not pickle."""
        return cls(
            f"rank 0 did this for all ranks: {what}; but what came of it, a value of type {kind}, "
            f"cannot be sent to the others: {why}. Let it give text, bytes or plain values, or "
            "run this script with one rank (-n 1), or with --plain."
        )

    @classmethod
    def stream_of_command(cls, what: str) -> UneditedError:
        """It wants the file descriptor of a stream that only rank 0 has."""
        return cls(
            f"this script asks for {what}, but only rank 0 has the command, and tells the other "
            "ranks what it writes. Use read, readline, write or communicate; or run this script "
            "with one rank (-n 1), or with --plain."
        )

    @classmethod
    def pipe_to_command(cls, fd: int) -> UneditedError:
        """It gives a command a pipe or socket, of which only rank 0 would hear anything."""
        return cls(
            f"this script gives a command a pipe or a socket of its own (file descriptor {fd}); "
            "only rank 0 starts the command, and the other ranks would not hear from it. Use "
            "subprocess.PIPE or a file; or run this script with one rank (-n 1), or with --plain."
        )

    @classmethod
    def temporary_elsewhere(cls, path: str) -> UneditedError:
        """A command has changed a temporary file of rank 0's on another host."""
        return cls(
            f"a command has worked on the temporary file {path} of rank 0's host, which this "
            "rank's host does not see. Let it work in the script's own folder, or run this "
            "script on one host, or with --plain."
        )

    @classmethod
    def elsewhere(cls) -> UneditedError:
        """A command that the script started is used where the ranks do different work."""
        return cls(
            "only rank 0 has this command, and it is used where the ranks do different work (in "
            "a module's forward, a data loader or a forked process). Start it there, too; or run "
            "this script with one rank (-n 1), or with --plain."
        )

    @classmethod
    def asyncio_commands(cls) -> UneditedError:
        """asyncio watches a command by its process id and file descriptors."""
        return cls(
            "this script starts commands by asyncio, which several ranks cannot share. Use "
            "subprocess.run or Popen; or run this script with one rank (-n 1), or with --plain."
        )

    @classmethod
    def not_kept(cls, path: str, size: int) -> UneditedError:
        """It reads, on a rank other than 0, a large file that rank 0 has written over already."""
        return cls(
            f"this rank reads {path} ({size / 2**30:.1f} GiB) after rank 0 has written over it. "
            "Of that, rank 0 keeps at most 1 GiB for the others, less where TMPDIR is full, more "
            "only where it lies on the same file system and that shares blocks (btrfs, XFS). Write "
            "the new content under another name."
        )

    @classmethod
    def too_late(cls, reason: str) -> UneditedError:
        """It asks to be left alone after work was divided, or after the first backward."""
        return cls(
            f"this script's work was begun as one process's on all ranks, and now {reason}. "
            "Run it with --plain, as a script for several processes."
        )


class ShardedCallError(TrainingError):
    """A module's call cannot be sharded over the ranks."""


class LoadingError(TrainingError, RuntimeError):
    """A rank could not load its rows, and its exception does not get to the others as it is."""

    def __init__(self, rank: int, kind: str, trace: str) -> None:
        super().__init__(
            f"rank {rank} raised {kind} while it loaded its rows of a batch, an exception that "
            f"cannot be sent to the other ranks. Its traceback:\n\n{trace}"
        )
