"""This process and its host: settings, files of a job, exit statuses, tracebacks, patches.

It leans on the standard library and `instep.errors` only; PyTorch is not imported here. Begin with
`settings` (every INSTEP_* variable) and `patching` (how instep answers for functions of others).
"""

import os

PACKAGE_FOLDER = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
"""Where instep's own files are, with a separator at its end."""
