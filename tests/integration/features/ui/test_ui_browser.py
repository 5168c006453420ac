"""`ddp ui` in real browsers: list, job, log, comparison, a live run with a killed rank, keyboard, themes, axe-core."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.support.browser import PROGRAMS, Browser, explain_missing
from tests.unit.ddp_cli.features.ui.test_run import write_run

ROOT = Path(__file__).resolve().parents[4]
AXE = "axe-core@4.14.1"
DDP = [sys.executable, "-P", "-m", "ddp_cli"]
pytestmark = [pytest.mark.chromium, pytest.mark.timeout(500)]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    runs = tmp_path / "ddp-runs"
    for name in ("one", "two"):
        run = write_run(runs)
        (run / "logs" / "attempt-2-pod-0.log").write_text(f"[rank0]: {name} <b>bold</b> \x1b[31m\n" * 20)
    return runs


@pytest.fixture
def address(runs: Path, tmp_path: Path) -> Iterator[str]:
    """The address of a `ddp ui` in a process of its own."""
    command = [*DDP, "ui", "--local", "--no-browser", "--runs-dir", str(runs)]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    yield process.stdout.readline().strip()
    process.terminate()
    assert process.wait() == 0
    process.stdout.close()


@pytest.fixture(params=sorted(PROGRAMS))
async def browser(request: pytest.FixtureRequest, tmp_path: Path, address: str) -> AsyncIterator[Browser]:
    """A browser that has opened the list."""
    missing = explain_missing(request.param)
    if missing:
        pytest.skip(missing)
    async with Browser(request.param, tmp_path) as browser:
        await browser.resize(1280, 900)
        await browser.go(address)
        await browser.until("document.querySelectorAll('#rows tr').length === 2")
        await browser.until("document.querySelector('#live.on') !== null")  # its scripts have started
        yield browser
        assert browser.errors == []
        assert {url.split("/")[2] for url in browser.requests if url.startswith("http")} == {address.split("/")[2]}


async def open_job(browser: Browser) -> None:
    """Open the first job by the keyboard alone."""
    await browser.press("j")
    await browser.until("document.activeElement.closest('tr') !== null")
    await browser.press("Enter")
    await browser.until("document.querySelectorAll('#charts canvas').length === 3")
    await browser.until("document.querySelectorAll('#lines .line').length === 20")


async def test_job_is_opened_by_keyboard_and_shows_curves_log_and_reason(browser: Browser) -> None:
    await open_job(browser)
    assert "ValueError" in await browser.evaluate("document.querySelector('#part-now').textContent")
    line = await browser.evaluate("document.querySelector('#lines .text').innerHTML")
    assert line.endswith("&lt;b&gt;bold&lt;/b&gt; ")
    await browser.evaluate("document.querySelector('[name=log]').click()")
    await browser.evaluate("document.querySelector('[name=axis][value=s]').click()")
    await browser.evaluate("document.querySelector('.plot').focus()")
    assert await browser.until("document.querySelectorAll('#charts canvas').length >= 2")
    await browser.evaluate(
        "(i => { i.value = 'two'; i.dispatchEvent(new Event('input')) })(document.querySelector('#log-search'))"
    )
    await browser.until("document.querySelectorAll('#lines .line').length", lambda count: count in (0, 20))
    assert await browser.evaluate("window.violations ?? []") == []


async def test_list_filters_searches_and_compares(browser: Browser) -> None:
    await browser.press("/")
    for letter in "nothing":
        await browser.press(letter)
    await browser.until("document.querySelectorAll('#rows tr:not([hidden])').length === 0")
    await browser.evaluate(
        "(i => { i.value = ''; i.dispatchEvent(new Event('input')); i.blur() })(document.querySelector('#search'))"
    )
    chips = await browser.evaluate("[...document.querySelectorAll('[data-filter]')].map(chip => chip.textContent)")
    assert [chip for chip in chips if not chip.endswith(" 0")] == ["All 2", "Needs you 2", "Ended 2"]
    place = "getComputedStyle(document.querySelector('.job small')).display"
    assert await browser.evaluate(place) == "none", "all jobs are at one place"
    compare = "document.querySelector('#compare')"
    assert await browser.evaluate(f"[{compare}.textContent, {compare}.disabled]") == [
        "Compare: select 2 to 8 jobs",
        True,
    ]
    for box in (0, 1):
        await browser.evaluate(f"document.querySelectorAll('#rows input')[{box}].click()")
    await browser.evaluate("document.querySelector('#compare').click()")
    await browser.until("document.querySelectorAll('#charts canvas').length === 2")
    lines = await browser.evaluate("document.querySelectorAll('figure:first-child .u-legend tr + tr').length")
    assert lines == 2
    verdict = await browser.evaluate("document.querySelector('.findings').textContent")
    assert "equal within 2%" in verdict
    assert await browser.evaluate("window.violations ?? []") == []


@pytest.mark.parametrize("width", [320, 3840])
async def test_pages_fit_their_width_in_the_dark_theme(browser: Browser, width: int) -> None:
    await browser.resize(width, 900)
    await open_job(browser)
    assert await browser.evaluate("document.documentElement.scrollWidth") <= width
    assert await browser.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
    color = await browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert color == "rgb(11, 11, 13)"


async def test_axe_finds_nothing_serious(browser: Browser, tmp_path: Path) -> None:
    script = read_axe(tmp_path)
    for page in ("list", "job", "comparison"):
        if page == "job":
            await open_job(browser)
        elif page == "comparison":
            await browser.evaluate(
                "(key => { location = `/compare?${key}&${key}` })(`job=${location.pathname.slice(1)}`)"
            )
            await browser.until("document.querySelectorAll('#h-results').length === 1")
            await browser.until("document.readyState === 'complete'")  # with its colours
        await browser.evaluate(f"(() => {{ {script}; }})()")
        found = await browser.evaluate("axe.run().then(result => result.violations)")
        serious = [
            (item["id"], item["nodes"][0]["html"][:200]) for item in found if item["impact"] in ("serious", "critical")
        ]
        assert serious == []


def read_axe(folder: Path) -> str:
    """Return the script of axe-core from the npm registry."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not installed; axe-core comes from its registry")
    packed = subprocess.run([npm, "pack", AXE, "--silent"], cwd=folder, capture_output=True, text=True, timeout=120)
    if packed.returncode:
        pytest.skip(f"the npm registry cannot be read: {packed.stderr.strip()[-200:]}")
    subprocess.run(["tar", "xzf", packed.stdout.strip()], cwd=folder, check=True)
    return (folder / "package" / "axe.min.js").read_text(encoding="utf-8")


def start_run(words: list[str], folder: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([*DDP, *words], cwd=folder)


@pytest.mark.process
async def test_run_with_a_killed_rank_appears_and_changes_without_reload(
    browser: Browser, runs: Path, tmp_path: Path
) -> None:
    for name in ("standin.py", "standin.yaml"):
        shutil.copy(ROOT / "docs" / name, tmp_path)
    words = ["run", "standin.yaml", "--runs-dir", str(runs), "--name", "live", "--nodes", "1", "--quiet"]
    process = start_run([*words, "--", "--steps", "60", "--fail", "30:kill"], tmp_path)
    try:
        row = "document.querySelector('#rows [data-name^=live]')"
        await browser.evaluate("window.isSame = true")
        await browser.until(f"{row} !== null")
        await browser.until(f"Number({row}.dataset.restarts) >= 1")
        await browser.evaluate(f"{row}.querySelector('a').click()")
        await browser.until("document.querySelector('#part-timeline .k-restart') !== null")
        await browser.until("document.querySelector('#part-head .pill').textContent === 'Succeeded'")
        marks = await browser.until("document.querySelector('#part-timeline').textContent")
        assert "Killed" in marks
        assert await browser.evaluate("window.violations ?? []") == []
    finally:
        process.wait()


async def test_reason_why_a_job_cannot_be_read_stays_until_it_can(browser: Browser, runs: Path) -> None:
    await open_job(browser)
    name = await browser.evaluate("document.querySelector('h1').textContent")
    status = runs / name / "status.yaml"
    text = status.read_text()
    status.write_text("{{{")
    problems = "document.querySelector('#problems').textContent"
    assert "status.yaml: invalid" in await browser.until(problems)
    live = "document.querySelector('#live').textContent"
    await browser.until(live, lambda text: text == "not connected")
    assert "status.yaml: invalid" in await browser.evaluate(problems)
    status.write_text(text)
    await browser.until(live, lambda text: text == "live")
    assert await browser.evaluate(problems) == ""
