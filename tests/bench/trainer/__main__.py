"""``python -m tests.bench.trainer``."""

import sys

from tests.bench.trainer.cli import main

if __name__ == "__main__":
    sys.exit(main())
