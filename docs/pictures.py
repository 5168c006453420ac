"""The pictures of README.md, from the program's own output.

``python -m docs.pictures watch`` prints the SVG of what `ddp watch` shows; ``make verify`` compares it.
``python -m docs.pictures runs FOLDER`` makes runs there and takes pictures of their reports with a headless Chromium
(`make pictures`); ``reports FOLDER`` takes them of the same runs again.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ddp_operator.cli.watch import rows_of
from ddp_operator.display import build_table

DOCS = Path(__file__).resolve().parent
DARK = "--blink-settings=preferredColorScheme=0"
RUNS = {
    "digits": ("checkpoint.yaml", "--", "--epochs", "60"),
    "restarts": ("standin.yaml", "--", "--fail", "60:kill", "130:data", "190:data", "230:data"),
    "ranks": (
        *("standin.yaml", "--nodes", "4", "--procs", "16"),
        *("--", "--steps", "60", "--seconds", "1", "--slow", "11", "37"),
    ),
}
"""Run and what `ddp run` is told."""
SHOTS = {
    "report": ("digits", 1240, 1150),
    "report-dark": ("digits", 1240, 1150, DARK),
    "report-restarts": ("restarts", 1240, 1610),
    "report-narrow": ("restarts", 500, 2600, DARK),
    "report-ranks": ("ranks", 1240, 1640),
}
"""Picture, its run and its size in pixels."""
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


def make_runs(folder: Path) -> None:
    """Make the runs that the pictures are of, in about five minutes: one trains, the others only wait."""
    for name, words in RUNS.items():
        shutil.rmtree(folder / name, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix="train-") as work:
            for file in ("standin.py", "standin.yaml", "../deploy/samples/checkpoint.yaml"):
                shutil.copy(DOCS / file, work)
            command = [sys.executable, "-m", "ddp_operator.cli", "run", *words[:1], "--runs-dir", str(folder / name)]
            subprocess.run([*command, "--name", name, "--quiet", *words[1:]], cwd=work, check=name == "digits")


def draw_reports(folder: Path) -> None:
    """Take the pictures of the runs' reports."""
    from PIL import Image

    from ddp_operator.report import build_page, read_run

    for picture, (name, width, height, *flags) in SHOTS.items():
        (run,) = folder.glob(f"{name}/{name}-*")
        with tempfile.TemporaryDirectory() as scratch:
            page, shot = Path(scratch, "report.html"), Path(scratch, "shot.png")
            page.write_text(build_page(read_run(run), datetime.now(UTC)), encoding="utf-8")
            command = ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", *flags]
            command += [f"--user-data-dir={scratch}/profile", f"--window-size={width},{height}", f"--screenshot={shot}"]
            subprocess.run([*command, page.as_uri()], check=True, capture_output=True)
            # A page of few colours: a palette makes a tenth of it.
            Image.open(shot).convert("RGB").quantize(64).save(DOCS / "images" / f"{picture}.png", optimize=True)


def main(argv: list[str]) -> None:
    """Draw what is asked for."""
    if argv[0] == "watch":
        sys.stdout.write(draw_watch())
    else:
        folder = Path(argv[1]).resolve()
        if argv[0] == "runs":
            make_runs(folder)
        draw_reports(folder)


if __name__ == "__main__":
    main(sys.argv[1:])
