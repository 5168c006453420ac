"""The pictures of README.md, from the program's own output.

``python -m docs.pictures watch`` prints the SVG of what `ddp watch` shows; ``make verify`` compares it.
``python -m docs.pictures report RUN`` takes a picture of a run's report with a headless Chromium (`make pictures`).
"""

from __future__ import annotations

import io
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ddp_operator.cli.watch import rows_of
from ddp_operator.display import build_table

FOLDER = Path(__file__).resolve().parent / "images"
SIZE = (1240, 860)
# Rich's own, but without its fonts from elsewhere: a reader's browser has one.
FORMAT = """<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: {char_height}px; line-height: {line_height}px; font-variant-east-asian: full-width; }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/></clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g></g>
</svg>
"""


def job(name: str, phase: str, ready: int, nodes: int, **status: Any) -> dict[str, Any]:
    """Return a resource as an API server has it."""
    counts = {"desired": nodes, "succeeded" if phase == "Succeeded" else "ready": ready}
    return {
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"nodes": nodes},
        "status": {"phase": phase, "attempt": 1, "nodes": counts, **status},
    }


JOBS = [
    job("cifar10", "Running", 4, 4, progress={
        "epoch": 12, "epochs": 30, "step": 4839, "totalSteps": 11730, "percent": "41.3%", "eta": "18m40s",
        "etaSeconds": 1120, "loss": "0.612", "samplesPerSecond": "10240",
    }),
    job("digits", "Succeeded", 2, 2, progress={
        "epoch": 6, "epochs": 6, "step": 270, "totalSteps": 270, "percent": "100.0%", "loss": "0.021",
        "valAccuracy": "0.9861",
    }),
    job("llm-probe", "Running", 16, 16, attempt=2, restarts={"all": 1}, progress={
        "step": 18250, "totalSteps": 25000, "percent": "73.0%", "eta": "1h27m", "etaSeconds": 5240, "loss": "2.417",
        "samplesPerSecond": "1536",
    }),
    job("voc", "Pending", 0, 4, reason="Unschedulable"),
]  # fmt: skip


def draw_watch() -> str:
    """Return the SVG of `ddp watch`."""
    from rich.console import Console
    from rich.terminal_theme import MONOKAI

    console = Console(record=True, width=150, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(build_table(rows_of({("default", found["metadata"]["name"]): found for found in JOBS})))
    svg = console.export_svg(title="ddp watch", code_format=FORMAT, theme=MONOKAI)
    return "\n".join(line.rstrip() for line in svg.splitlines()) + "\n"


def draw_report(run: Path) -> Path:
    """Take the picture of a run's report; return its path."""
    from PIL import Image

    from ddp_operator.report import build_page, read_run

    target = FOLDER / "report.png"
    with tempfile.TemporaryDirectory() as name:
        page, shot = Path(name, "report.html"), Path(name, "shot.png")
        page.write_text(build_page(read_run(run), datetime.now(UTC)), encoding="utf-8")
        flags = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            f"--user-data-dir={name}/profile",
        ]
        size = f"--window-size={SIZE[0]},{SIZE[1]}"
        subprocess.run(
            ["chromium", *flags, size, f"--screenshot={shot}", page.as_uri()], check=True, capture_output=True
        )
        # A page of few colours: a palette makes a tenth of it.
        Image.open(shot).convert("RGB").quantize(64).save(target, optimize=True)
    return target


def main(argv: list[str]) -> None:
    """Draw what is asked for."""
    if argv[0] == "watch":
        sys.stdout.write(draw_watch())
    else:
        print(draw_report(Path(argv[1])))


if __name__ == "__main__":
    main(sys.argv[1:])
