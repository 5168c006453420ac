"""The pictures of README.md, from the program's own output.

``python -m docs.pictures watch`` prints the SVG of docs/images/watch.txt, which `kubectl get ddp -w` printed in a real
cluster; ``make verify`` compares it.
``python -m docs.pictures screens`` takes pictures of a terminal in which `ddp` runs or checks the tutorial's script;
``screens check`` takes one of them.
``python -m docs.pictures runs FOLDER`` makes runs there and takes pictures of their reports with a headless Chromium
(`make pictures`); ``reports FOLDER`` takes them of the same runs again.
``python -m docs.pictures pages`` takes pictures of `ddp ui` with the jobs of docs/example_jobs.py.
"""

from __future__ import annotations

import asyncio
import fcntl
import io
import os
import pty
import re
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
from contextlib import suppress
from pathlib import Path

DOCS = Path(__file__).resolve().parent
WIDTH = 100
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
    "report-dark": ("digits", 1240, 1150, DARK),
    "report-restarts": ("restarts", 1240, 1610),
    "report-narrow": ("restarts", 500, 2600, DARK),
    "report-ranks": ("ranks", 1240, 1640),
}
"""Picture, its run and its size in pixels."""
PAGES = {
    "ui-list": ("/", 810, "document.querySelectorAll('#rows tr').length > 5"),
    "ui-job": (
        "/job/vision/detr-large",
        1560,
        "document.querySelectorAll('.ranks tbody tr').length > 10 && document.querySelector('#charts canvas') !== null",
    ),
    "ui-compare": (
        "/compare?job=job/vision/resnet50-lr3&job=job/vision/resnet50-lr1",
        1130,
        "document.querySelectorAll('#charts canvas').length > 0",
    ),
}
"""Picture of `ddp ui`, its page, its height in pixels and when it is complete."""
SCREENS = {
    "run": ("epoch 20/60", "run", "train.py", "--nodes", "2", "--", "--epochs", "60"),
    "run-failed": ("in a browser", "run", "train.py", "--procs", "2"),
    "check": ("--seed 1", "check", "train.py", "--seed", "1"),
}
"""Picture of the terminal, the words that it is to show, and the arguments of `ddp`."""
MISTAKES = {
    "run-failed": ("optimizer.zero_grad", "optimiser.zero_grad"),
    "check": ("    sampler.set_epoch(epoch)\n", ""),
}
"""Text of the tutorial's script that a picture's script has otherwise."""
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


def draw_watch() -> str:
    """Return the SVG of a recording of `kubectl get ddp -w` in a real cluster."""
    from rich.console import Console
    from rich.terminal_theme import MONOKAI
    from rich.text import Text

    recording = (DOCS / "images" / "watch.txt").read_text(encoding="utf-8")
    width = max(map(len, recording.splitlines()))
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text(recording.rstrip()))
    svg = console.export_svg(title="kubectl get ddp -w", code_format=FORMAT, theme=MONOKAI)
    return "\n".join(line.rstrip() for line in svg.splitlines()) + "\n"


def draw_screens(*names: str) -> None:
    """Take the pictures of the terminal: all, or those named."""
    from rich.console import Console
    from rich.terminal_theme import MONOKAI
    from rich.text import Text

    script = add_exporter((DOCS / "tutorial.md").read_text(encoding="utf-8").split("```python\n")[1].split("```")[0])
    for picture, (until, *words) in SCREENS.items():
        if names and picture not in names:
            continue
        with tempfile.TemporaryDirectory(prefix="train-") as work:
            Path(work, "train.py").write_text(script.replace(*MISTAKES.get(picture, ("", ""))))
            shown = film([sys.executable, "-m", "ddp_cli", *words], work, until)
        # The line at the bottom is erased and drawn again: its last state counts.
        shown = re.sub(r"[^\n]*(\n(\x1b\[\?25h)?\r?\x1b\[1A)?\x1b\[2K|\x1b\[\?25[hl]", "", shown).replace(
            f"{work}/", ""
        )
        console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor")
        console.print(Text.from_ansi(f"$ {shlex.join(['ddp', *words])}\n{shown}"))
        svg = console.export_svg(title=f"ddp {words[0]}", code_format=FORMAT, theme=MONOKAI)
        (DOCS / "images" / f"{picture}.svg").write_text("\n".join(map(str.rstrip, svg.splitlines())) + "\n")


def add_exporter(script: str) -> str:
    """Return the tutorial's script with the exporter's lines, so that the picture shows samples a second as well."""
    replacements = {
        "from torch.nn.parallel": "from ddp_sdk import Exporter\nfrom torch.nn.parallel",
        "for epoch in range": "steps = epochs * len(loader)\n"
        "exporter = Exporter.start(model=model, epochs=epochs, total_steps=steps)\n"
        "for epoch in range",
        "        optimizer.step()\n": "        optimizer.step()\n"
        "        exporter.step(samples=len(batch), loss=loss, epoch=epoch + 1)\n",
    }
    for line, replacement in replacements.items():
        assert line in script
        script = script.replace(line, replacement)
    return script


def film(command: list[str], folder: str, until: str) -> str:
    """Return what a program has written to a terminal when these words are on it; then it is interrupted."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("4H", 40, WIDTH, 0, 0))
    env = os.environ | {"TERM": "xterm-256color"}
    shown = b""
    with subprocess.Popen(command, cwd=folder, env=env, stdout=follower, stderr=follower) as process:
        os.close(follower)
        while until.encode() not in shown:
            shown += os.read(leader, 65536)
        process.send_signal(signal.SIGINT)
        with suppress(OSError):  # the terminal's end
            while os.read(leader, 65536):
                pass
    os.close(leader)
    return shown.decode("utf-8", "replace").replace("\r\n", "\n")


def make_runs(folder: Path) -> None:
    """Make the runs that the pictures are of, in about five minutes: one trains, the others only wait."""
    for name, words in RUNS.items():
        shutil.rmtree(folder / name, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix="train-") as work:
            for file in ("standin.py", "standin.yaml", "../deploy/samples/checkpoint.yaml"):
                shutil.copy(DOCS / file, work)
            command = [sys.executable, "-m", "ddp_cli", "run", *words[:1]]
            subprocess.run([*command, "--name", name, "--quiet", *words[1:]], cwd=work, check=name == "digits")
            shutil.move(Path(work, "ddp-runs"), folder / name)  # the pages name no folder of this machine


def draw_reports(folder: Path) -> None:
    """Take the pictures of the runs' reports."""
    from ddp_cli.client.job import Job
    from ddp_cli.client.local import LocalBackend
    from ddp_cli.features.ui.pages import build_job_report

    for picture, (name, width, height, *flags) in SHOTS.items():
        (run,) = folder.glob(f"{name}/{name}-*")
        with tempfile.TemporaryDirectory() as scratch:
            page = Path(scratch, "report.html")
            shot = Path(scratch, "shot.png")
            job = Job(LocalBackend(run.parent), str(run), {})
            page.write_text(build_job_report(job, None, None), encoding="utf-8")
            command = ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", *flags]
            command += [f"--user-data-dir={scratch}/profile", f"--window-size={width},{height}", f"--screenshot={shot}"]
            subprocess.run([*command, page.as_uri()], check=True, capture_output=True)
            save_picture(shot, picture)


async def draw_pages() -> None:
    """Take the pictures of `ddp ui` in both themes."""
    from aiohttp import web

    from docs.example_jobs import open_server
    from tests.support.browser import Browser

    server = open_server()
    runner = web.AppRunner(server.build())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    base = f"http://127.0.0.1:{runner.addresses[0][1]}"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:  # a browser ends later
        async with Browser("chromium", Path(scratch)) as browser:
            await browser.go(f"{base}/?token={server.token}")
            await browser.until("document.querySelectorAll('#rows tr').length > 5")
            for picture, (path, height, ready) in PAGES.items():
                await browser.resize(1240, height)
                await browser.go(base + path)
                await browser.until(ready)
                for theme in ("light", "dark"):
                    await browser.choose_theme(theme)
                    await asyncio.sleep(0.5)  # the charts are drawn again
                    await browser.shoot(Path(scratch, "shot.png"))
                    name = picture if theme == "light" else f"{picture}-dark"
                    save_picture(Path(scratch, "shot.png"), name)
    await runner.cleanup()


def save_picture(shot: Path, name: str) -> None:
    """Store a picture of a page with few colours: a palette makes a tenth of it."""
    from PIL import Image

    Image.open(shot).convert("RGB").quantize(256, kmeans=2).save(DOCS / "images" / f"{name}.png", optimize=True)


def main(argv: list[str]) -> None:
    """Draw what is asked for."""
    if argv[0] == "watch":
        sys.stdout.write(draw_watch())
    elif argv[0] == "screens":
        draw_screens(*argv[1:])
    elif argv[0] == "pages":
        asyncio.run(draw_pages())
    else:
        folder = Path(argv[1]).resolve()
        if argv[0] == "runs":
            make_runs(folder)
        draw_reports(folder)


if __name__ == "__main__":
    main(sys.argv[1:])
