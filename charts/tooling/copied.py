"""Print a file of the repository: the chart can use only what lies inside it, so it holds copies.

``python -m charts.tooling.copied PATH`` prints it; ``make generate`` writes the copies.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

if __name__ == "__main__":
    sys.stdout.write((ROOT / sys.argv[1]).read_text(encoding="utf-8"))
