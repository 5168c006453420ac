"""The page of `ddp report` in a headless browser: it is drawn, it fetches nothing, and it has two themes."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from PIL import Image

from ddp_cli.client.job import Job
from ddp_cli.client.local import LocalBackend
from ddp_cli.features.ui.pages import build_job_report
from tests.unit.ddp_cli.features.ui.test_run import write_run

pytestmark = pytest.mark.chromium


def browse(profile: Path, *words: str) -> subprocess.CompletedProcess[str]:
    chromium = shutil.which("chromium")
    assert chromium is not None
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}"]
    return subprocess.run([chromium, *flags, *words], capture_output=True, text=True, timeout=500, check=True)


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / "report.html"
    run = Job(LocalBackend(tmp_path), str(write_run(tmp_path)), {})
    path.write_text(build_job_report(run, None, None), encoding="utf-8")
    return path


def test_page_renders_in_both_themes_without_requests(page: Path, tmp_path: Path) -> None:
    means = {}
    for theme, flags in {"light": [], "dark": ["--blink-settings=preferredColorScheme=0"]}.items():
        shot = tmp_path / f"{theme}.png"
        done = browse(
            tmp_path / "profile", *flags, "--enable-logging=stderr", "--window-size=1200,1400", f"--screenshot={shot}",
            page.as_uri(),
        )  # fmt: skip
        assert "CONSOLE" not in done.stderr  # it would contain a refused fetch or a broken style
        picture = Image.open(shot).convert("RGB")
        colors = picture.getcolors(1 << 24)
        assert colors is not None
        assert len(colors) > 50
        means[theme] = sum(picture.resize((1, 1)).tobytes()) / 3
    assert means["light"] > 200
    assert means["dark"] < 70


def test_browser_renders_charts_and_text(page: Path, tmp_path: Path) -> None:
    seen = browse(tmp_path / "profile", "--dump-dom", page.as_uri()).stdout
    assert seen.count("<canvas") == 3
    assert "ValueError: &lt;script&gt;" in seen
    assert "Jan 1, 1970, 12:16:50" in seen, "with seconds"
    assert " ago</time>" not in seen, "a saved page is read on another day"
