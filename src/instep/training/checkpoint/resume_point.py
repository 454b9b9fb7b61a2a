"""The checkpoint from which a job would go on, noted where its supervisor finds it.

Standard library only: the supervisor imports it, and starts without torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from instep.distributed.identity.launchers import FAILURE_FILE


@dataclass(frozen=True)
class ResumePoint:
    """A checkpoint that is complete."""

    step: int
    path: str

    def note(self, environ: Mapping[str, str] = os.environ) -> None:
        """Note it for the supervisor of this rank, if its launcher's variables name one."""
        if failure_file := environ.get(FAILURE_FILE):
            noted = _noted(Path(failure_file))
            draft = noted.with_suffix(".draft-checkpoint")
            draft.write_text(json.dumps(asdict(self)))
            draft.replace(noted)

    @classmethod
    def read(cls, failure_file: Path) -> ResumePoint | None:
        """What the rank with this failure file has noted; None if nothing."""
        try:
            return cls(**json.loads(_noted(failure_file).read_text()))
        except FileNotFoundError:
            return None


def _noted(failure_file: Path) -> Path:
    return failure_file.with_suffix(".checkpoint")
