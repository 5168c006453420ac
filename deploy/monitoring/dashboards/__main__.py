"""Print one dashboard as JSON: a line a panel, so that a change is read at a glance."""

import json
import sys

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from .boards import BOARDS


def render_board(name: str) -> str:
    """Return the file of one dashboard."""
    content = json.loads(JSONEncoder(sort_keys=True).encode(BOARDS[name]().build()))
    rows = []
    for key, value in content.items():
        if key == "panels":
            panels = ",\n".join(json.dumps(panel, ensure_ascii=False) for panel in value)
            rows.append(f'"panels": [\n{panels}\n]')
        else:
            rows.append(f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}")
    return "{\n" + ",\n".join(rows) + "\n}\n"


if __name__ == "__main__":
    sys.stdout.write(render_board(sys.argv[1]))
