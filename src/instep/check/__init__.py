"""`instep check`: read a training script and name what will go wrong in parallel; runs nothing.

It leans on `errors` and on the table of accelerators, and starts without PyTorch. Begin with
`script` (a parsed file) and `script_info` (what the rules ask of it), then read one rule in
`rules`; `checker` applies them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from instep.check.checker import check_files, severe_findings
    from instep.check.finding import Finding, Severity

__all__ = ["Finding", "Severity", "check_files", "severe_findings"]


def __getattr__(name: str) -> Any:
    """Import the rules at first use: `instep run` needs only `script`."""
    if name in __all__:
        module = "finding" if name[0].isupper() else "checker"
        return getattr(import_module(f"instep.check.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
