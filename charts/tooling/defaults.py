"""Print the default of every value by its path, for templates, which cannot read ``values.yaml``.

Where a user writes ``null``, Helm takes the default away, and an upgrade with ``--reuse-values`` knows only the older
release's values: templates put back what is missing. A map that users fill is then empty, as ``null`` is meant there. A
value whose type allows ``null`` is left out.

``python -m charts.tooling.defaults`` prints it; ``make generate`` writes it.
"""

from __future__ import annotations

import json
import sys

from charts.tooling.values import read_values

HEADER = "# Generated from values.yaml by `make generate`. Do not edit.\n"


def render_defaults() -> str:
    """Return the file: a line a value."""
    rows = []
    for value in read_values():
        may_be_null = "null" in value.keywords.get("type", ())
        if not value.is_group and not may_be_null:
            emptied = isinstance(value.default, dict) and not value.keywords.get("minProperties")
            rows.append(f"{'.'.join(value.path)}: {json.dumps({} if emptied else value.default)}\n")
    return HEADER + "".join(rows)


if __name__ == "__main__":
    sys.stdout.write(render_defaults())
