"""Python imports this module at the start of each process under `horovodrun COMMAND`.

It makes the names of other libraries importable, and then imports the `sitecustomize` that Python
would have found without this folder.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path

with suppress(ImportError, SyntaxError):  # another Python, which has no instep or is too old
    from instep.compat import finder
    from instep.launch.worker import torch_import, torch_init

    finder.install()
    torch_import.defer_torch_compile()
    torch_init.install_patches()

_FOLDER = str(Path(__file__).parent)
if _FOLDER in sys.path:
    sys.path.remove(_FOLDER)
_this = sys.modules.pop("sitecustomize", None)
with suppress(ModuleNotFoundError):
    import_module("sitecustomize")
if _this is not None:
    sys.modules.setdefault("sitecustomize", _this)
