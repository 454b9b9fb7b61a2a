"""Read a training script and name what will go wrong in parallel. Runs nothing, needs no torch.

From the bottom up: `script` (a parsed file), `origins` (where values come from), `ranks`,
`guards` and `processes` (which code runs on which ranks), `facts` (models, loaders,
collectives), `rules`, `checker`, `report` and `pages`, `command`.
"""

from instep.check.checker import check_files, severe_findings
from instep.check.finding import Finding, Severity

__all__ = ["Finding", "Severity", "check_files", "severe_findings"]
