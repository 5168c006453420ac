"""``python -m ddp_cli``: run the command `ddp` without an installed entry point."""

import sys

from ddp_cli.commands import main

sys.exit(main())
