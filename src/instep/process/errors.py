"""Errors about what this process finds in its environment."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from instep.errors import LaunchError


class LaunchVariablesError(LaunchError):
    """The environment variables of this process contradict each other, or are not what they must
    be."""

    @classmethod
    def incomplete(
        cls, source: str, present: Mapping[str, str], missing: Iterable[str]
    ) -> LaunchVariablesError:
        found = ", ".join(f"{name}={value}" for name, value in present.items())
        return cls(
            f"half of what {source} sets is missing: found {found} but not {', '.join(missing)}. "
            "Set all of them, or none (then this process is a world of one)."
        )

    @classmethod
    def inconsistent(cls, source: str, what: str) -> LaunchVariablesError:
        return cls(
            f"{source} describes an impossible world: {what}. "
            "Check who sets these variables; two launchers inside each other are the usual cause."
        )

    @classmethod
    def without_folder(cls, cache: str) -> LaunchVariablesError:
        return cls(
            "this job needs a folder for temporary files, and none of TMPDIR, /tmp, /var/tmp and "
            f"{cache} can be written. Let TMPDIR name one that can."
        )

    @classmethod
    def cannot_write(cls, name: str, path: str, error: OSError) -> LaunchVariablesError:
        return cls(f"cannot write {path} ({name}): {error.strerror}. Choose another path.")
