"""`python -m instep …` is `instep …`."""

import sys

from instep.cli import main

sys.exit(main())
