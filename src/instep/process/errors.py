"""What this process was told that cannot be: variables of the environment."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from instep.errors import LaunchError


class LaunchVariablesError(LaunchError):
    """The environment of this process says something impossible about its rank."""

    @classmethod
    def half_set(
        cls, source: str, present: Mapping[str, str], missing: Iterable[str]
    ) -> LaunchVariablesError:
        """Some of the variables that belong together are missing."""
        seen = ", ".join(f"{name}={value}" for name, value in present.items())
        return cls(
            f"half of what {source} sets is missing: found {seen} but not {', '.join(missing)}. "
            "Set all of them, or none (then this process is a world of one)."
        )

    @classmethod
    def not_a_number(cls, name: str, value: str) -> LaunchVariablesError:
        """A variable that must be an integer is not."""
        return cls(f"{name}={value!r} is not a whole number. Set it to one, or unset it.")

    @classmethod
    def unsuitable(cls, name: str, value: str, takes: str, meaning: str) -> LaunchVariablesError:
        """A variable has a value that it does not take."""
        return cls(f"{name} takes {takes}, not {value!r}. {meaning}")

    @classmethod
    def unknown(cls, name: str, near: str | None) -> LaunchVariablesError:
        """A variable in instep's name that it does not know."""
        advice = f"Did you mean {near}?" if near else "docs/variables.md lists what there is."
        return cls(f"instep has no variable {name}. {advice}")

    @classmethod
    def impossible(cls, source: str, what: str) -> LaunchVariablesError:
        """The numbers contradict each other."""
        return cls(
            f"{source} describes an impossible world: {what}. "
            "Check who sets these variables; two launchers inside each other are the usual cause."
        )

    @classmethod
    def short_secret(cls, where: str, shortest: int) -> LaunchVariablesError:
        """A secret that could be guessed."""
        return cls(
            f"the secret in {where} is too short: it takes {shortest} characters or more. "
            "`openssl rand -hex 32` makes a good one."
        )

    @classmethod
    def secret_file(cls, path: str, why: str) -> LaunchVariablesError:
        """A secret that is none."""
        return cls(f"the secret in {path} cannot be used: {why}. chmod 600 keeps it yours.")

    @classmethod
    def node_list(cls, text: str) -> LaunchVariablesError:
        """Hosts in a notation that is not Slurm's."""
        return cls(
            f"SLURM_STEP_NODELIST={text!r} is not a list of hosts such as node[1-3],login. "
            "Export MASTER_ADDR and MASTER_PORT (an address of rank 0's host) instead."
        )

    @classmethod
    def task_list(cls, text: str) -> LaunchVariablesError:
        """Numbers of tasks in a notation that is not Slurm's, or for too few hosts."""
        return cls(
            f"SLURM_STEP_TASKS_PER_NODE={text!r} does not say how many tasks this host has; "
            "it should read like 2(x3),1, with a number for each host of the step."
        )
