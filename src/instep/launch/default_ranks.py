"""How many ranks `instep run` starts where nobody says it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from instep.errors import CommandLineError
from instep.launch.ranks.rank_variables import count_cores
from instep.process import print_line, settings

RANKS = ("-n", "-np", "--nproc", "--nproc-per-node", "--nproc_per_node")
"""The option for the number of ranks, in the spellings of other launchers too."""
_OF_OTHER_LAUNCHERS = {
    "The number of ranks is -n.": ("-N", "--devices", "--gpus", "--np", "--num-processes"),
    "The number of hosts is --nnodes.": ("--num-machines",),
    "The number of this host is --node-rank.": ("--machine-rank",),
    "The address of host 0 is --master HOST:PORT.": (
        *("--master-addr", "--master-port", "--rdzv-endpoint"),
        *("--main-process-ip", "--main-process-port"),
    ),
    "Leave it out: without --nnodes a job has one host.": ("--standalone",),
    "Leave it out: each rank takes a GPU of its own where there are GPUs.": ("--multi-gpu",),
    "For ranks on the CPU set INSTEP_DEVICE=cpu.": ("--cpu",),
}
"""What `instep run` has in place of options of torchrun, accelerate launch and others."""
_MOST_ON_CPUS = 8
"""More ranks divide a usual batch into parts that are too small to keep a core busy."""


def find_in_other_launchers(option: str) -> str | None:
    """What to do instead, where another launcher has this option, with - or _ between its words."""
    name = option.replace("_", "-")
    found = (advice for advice, names in _OF_OTHER_LAUNCHERS.items() if name in names)
    return next(found, None)


def choose_number_of_ranks(
    program: Sequence[str], *, is_one_host: bool, shards: int | None = None
) -> int:
    """One rank for each GPU of this host; without one, a rank for each core, up to 8.

    `program`: the script and its arguments. `shards`: of --bitwise, a multiple of the number.
    Prints the number and its reason to stderr. Raises
    CommandLineError if -n stands behind the script, or if the job has other hosts, which must have
    the same number.
    """
    check_program(program)
    # Not at the top: a job with -n must start fast, and needs none of it.
    from instep.distributed.identity.accelerators import find_on_host

    found = find_on_host() if str(settings.DEVICE) == "auto" else None
    cores = count_cores()
    ranks = min(cores, _MOST_ON_CPUS) if found is None else len(found[1])
    if not is_one_host:
        line = shlex.join([*program]) or "train.py"
        raise CommandLineError(f"say how many ranks each host has: instep run -n {ranks} … {line}")
    fitting = max(n for n in range(1, ranks + 1) if not (shards and shards % n))
    each = "one for each" if ranks > 1 else "for the one"
    if fitting < ranks:
        ranks, why = fitting, f"as many as --bitwise {shards} allows here"
    elif found is not None:
        why = f"{each} {found[0].title} of this host"
    elif ranks == cores:
        why = f"{each} core here, as there is no GPU"
    else:
        why = f"each with {cores // ranks} of the {cores} cores here, as there is no GPU"
    number = f"{ranks} rank{'s' * (ranks != 1)}"
    print_line(f"{number}, {why} (-n for another number)")
    return ranks


def check_program(program: Sequence[str], command: str = "run") -> None:
    """Raise CommandLineError if -n stands behind the script's name, where it is the script's.

    `command`: that of `instep`, which has no -n before the script. One number, or several with
    commas between them, as `instep verify` takes them.
    """
    rest = list(program)
    for at, word in enumerate(rest[1:], start=1):
        name, equals, value = word.partition("=")
        if name in RANKS:
            number = value if equals else "".join(rest[at + 1 : at + 2])
            if re.fullmatch(r"\d+(,\d+)*", number):
                del rest[at : at + 1 + (not equals)]
                line = shlex.join(["instep", command, "-n", number, *rest])
                raise CommandLineError(f"{name} comes before the script: {line}")
