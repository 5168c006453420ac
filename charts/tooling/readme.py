"""Print the chart's README: the text of ``README.md.in`` with the tables of values in the place of ``@VALUES@``.

``python -m charts.tooling.readme`` prints it; ``make generate`` writes it.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

from charts.tooling.values import Value, read_values

TEXT = Path(__file__).resolve().parent / "README.md.in"


def render_tables(values: list[Value]) -> str:
    """Return a heading and a table for each section."""
    leaves = [value for value in values if not value.is_group]
    parts = []
    for section, members in itertools.groupby(leaves, key=lambda value: value.section):
        rows = [f"| `{'.'.join(value.path)}` | `{_default(value)}` | {_meaning(value)} |" for value in members]
        parts.append("\n".join([f"### {section}", "", "| value | default | meaning |", "|---|---|---|", *rows]))
    return "\n\n".join(parts)


def render_readme() -> str:
    """Return the file."""
    return TEXT.read_text(encoding="utf-8").replace("@VALUES@", render_tables(read_values()))


def _default(value: Value) -> str:
    return json.dumps(value.default, ensure_ascii=False).replace("|", "\\|")


def _meaning(value: Value) -> str:
    choices = value.keywords.get("enum")
    text = value.text.replace("|", "\\|")
    return f"{text} One of {', '.join(f'`{choice}`' for choice in choices)}." if choices else text


if __name__ == "__main__":
    sys.stdout.write(render_readme())
