"""``python -m ddp_operator.cli``: the command `ddp` where only the sources are at hand."""

import sys

from ddp_operator.cli import main

sys.exit(main())
