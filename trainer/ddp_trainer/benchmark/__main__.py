"""``python -m ddp_trainer.benchmark``."""

import sys

from ddp_trainer.benchmark.cli import main

if __name__ == "__main__":
    sys.exit(main())
