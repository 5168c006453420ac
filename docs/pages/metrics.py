"""Print docs/metrics.md with the table of series as it is now: ``python -m docs.pages.metrics``."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from ddp_trainer.observability.metrics_table import BUCKETS, METRICS

_GENERATED = re.compile(r"(?<=from here by `make generate`. -->\n).*(?=<!-- Generated to here)", re.DOTALL)


def render(page: str) -> str:
    """``page`` with its generated part written anew."""
    rows = "".join(f"| `{m.name}` | {m.kind} | {m.help} | {m.formula} |\n" for m in METRICS)
    buckets = "".join(
        f"Buckets of `{name}`, seconds: {', '.join(f'{edge:g}' for edge in edges)}.\n\n"
        for name, edges in BUCKETS.items()
    )
    table = f"\n| name | type | meaning | formula |\n|---|---|---|---|\n{rows}\n{buckets}"
    return _GENERATED.sub(lambda _: table, page)


if __name__ == "__main__":
    sys.stdout.write(render(Path("docs/metrics.md").read_text(encoding="utf-8")))
