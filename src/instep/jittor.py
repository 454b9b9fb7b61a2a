"""`import instep.jittor as jt`: Jittor's names for scripts on several processes.

It is the module `instep.compat.jittor`.
"""

import sys

from instep.compat import jittor

sys.modules[__name__] = jittor
