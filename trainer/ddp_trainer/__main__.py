"""``python -m ddp_trainer``."""

import sys

from ddp_trainer.cli import main

if __name__ == "__main__":
    sys.exit(main())
