"""``python -m ddp_operator.cli``: run the command `ddp` without an installed entry point."""

import sys

from ddp_operator.cli import main

sys.exit(main())
