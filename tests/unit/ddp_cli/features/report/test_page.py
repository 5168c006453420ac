"""`ddp report`: from a run folder to a self-contained page."""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from ddp_cli.__main__ import main
from ddp_cli.features.report.charts import (
    Series,
    TimeAxis,
    line_chart,
    nice_ticks,
    stacked_chart,
    thin,
)
from ddp_cli.features.report.page import build_page, list_ranks
from ddp_cli.features.report.run import (
    LoggedEvent,
    Mark,
    RankTime,
    find_marks,
    list_rank_times,
    read_run,
    split_step_time,
)
from ddp_cli.local.folder import COLUMNS, RunFolder
from ddp_operator.decide.report import Page, Rates
from ddp_pod.contract.progress import RankProgress
from tests.support.builders import NOW, resource
from tests.support.builders import page as build_report

FAILURE = {
    "attempt": 1,
    "rank": 1,
    "pod": "train-1-1",
    "exitCode": 1,
    "category": "UserError",
    "message": "ValueError: <script>alert(1)</script>",
    "traceback": "Traceback …\nValueError",
    "remedy": "look at the data",
}
RANKS = [
    {"rank": 1, "steps": 10, "stepSeconds": 2.0, "dataSeconds": 0.5, "computeSeconds": 1.0},
    {"rank": 0, "steps": 10, "stepSeconds": "broken", "dataSeconds": 0},
]


def rows(count: int = 12) -> list[dict[str, float]]:
    """A run whose workers are restarted in the same pods halfway, and whose last row is of attempt 2."""
    made = [
        {
            "time": 1000.0 + n, "attempt": 1.0, "epoch": 1.0, "step": float(n), "loss": 2.0 / (n + 1),
            "samples_per_second": 100.0 + n, "checkpoint_step": n // 4 * 4.0,
            "steps": float(n if n < count // 2 else n - count // 2),
        }
        for n in range(count)
    ]  # fmt: skip
    for row in made:
        row |= {"step_seconds": row["steps"], "data_seconds": row["steps"] / 4, "compute_seconds": row["steps"] / 2}
    made[-1]["attempt"] = 2.0
    return made


def write_run(folder: Path, *, phase: str = "Failed", figures: bool = True, **status: Any) -> Path:
    run = RunFolder.create(folder, "train", NOW)
    state = {"phase": phase, "attempt": 2, "nodes": {"desired": 2}, "lastFailure": FAILURE} | status
    run.write_status(resource() | {"status": state})
    run.write_event(datetime.fromtimestamp(1010.6, UTC), "Warning", "FailureUserError", "attempt 1: <b>boom</b>")
    run.write_facts({"commit": "abc1234 Fix <it>", "versions": "torch 2.9.0"})
    run.write(run.reports / "attempt-2-pod-0.json", build_report(ranks=RANKS))
    run.write(run.reports / "attempt-1-pod-0.json", build_report(ranks=[RANKS[0] | {"steps": 99}]))
    if figures:
        for row in rows():
            progress = RankProgress()
            progress.update({field: row[name] for name, field in COLUMNS.items() if field and name in row})
            figures_of = Page(ranks=(progress,), rates=Rates(samples=row["samples_per_second"]))
            run.write_row(datetime.fromtimestamp(row["time"], UTC), int(row["attempt"]), figures_of)
    return run.path


class Links(HTMLParser):
    """Collects the resources that a page would fetch, and the tags that are open at its end."""

    VOID = ("meta", "link", "br", "polyline")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [str(value) for name, value in attrs if name in ("src", "href", "xlink:href", "action")]
        self.found += [tag] * (tag in ("script", "iframe", "object", "embed"))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in (*self.VOID, "line")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


class TestReportPage:
    def test_page_is_self_contained_and_well_formed(self, tmp_path: Path) -> None:
        page = build_page(read_run(write_run(tmp_path)), NOW)
        links = Links(page)
        assert links.found == ["data:,"]
        assert links.open == []
        assert "default-src 'none'" in page
        assert not re.search(r"url\(|@import|https?://", page)

    def test_page_of_killed_run_explains_how_to_resume(self, tmp_path: Path) -> None:
        path = write_run(tmp_path, phase="Running")
        page = build_page(read_run(path), NOW)
        assert '<span class="phase Interrupted">Interrupted</span>' in page
        assert "spec.checkpoint is not set, so only the script knows whether it saved a checkpoint." in page
        assert "Start it with: ddp run FILE" in page
        run = RunFolder(path)
        run.write_manifest("", [], {}, "ddp run job.yaml --cpu -- '<b>'")
        claim = resource(checkpoint={"path": "/ckpt", "claimName": "c"})
        run.write_status(claim | {"status": {"phase": "Running", "attempt": 1}})
        assert ">Running</span>" in build_page(read_run(path), NOW)
        del run  # the lock goes with it
        page = build_page(read_run(path), NOW)
        assert (
            "was killed while the job was Running. No checkpoint was reported. The job resumes from claim c if" in page
        )
        assert "job.yaml --cpu -- &#x27;&lt;b&gt;&#x27;" in page

    def test_each_chart_has_interruptions_with_their_causes_and_no_line_over_them(self, tmp_path: Path) -> None:
        page = build_page(read_run(write_run(tmp_path)), NOW)
        charts = page.split("<figure>")[1:]
        assert len(charts) == 3
        for chart in charts:
            assert ">1 restart</text>" in chart
            assert chart.count('class="mark"') == 4, "two lines, and what they are"
        throughput, _, split_of_step = charts
        assert throughput.count("<polyline") == 3
        assert split_of_step.count("<polygon") == 6
        assert "attempt 1: &lt;b&gt;boom" in page.partition("<h2>Interruptions")[2].partition("</table>")[0]

    @pytest.mark.parametrize(("phase", "first"), [("Failed", "Last failure"), ("Succeeded", "Over time")])
    def test_survived_failure_is_listed_last(self, tmp_path: Path, phase: str, first: str) -> None:
        heads = re.findall("<h2>(.*?)</h2>", build_page(read_run(write_run(tmp_path, phase=phase)), NOW))
        assert heads[0] == first
        assert "Last failure" in heads

    def test_output_of_training_script_is_escaped(self, tmp_path: Path) -> None:
        page = build_page(read_run(write_run(tmp_path)), NOW)
        assert "<script>" not in page
        assert "&lt;script&gt;alert(1)" in page
        assert "<b>boom</b>" not in page


class TestRun:
    def test_restart_is_matched_with_late_event(self) -> None:
        events = [
            LoggedEvent(1000.0, "Normal", "Started", "attempt 1"),
            LoggedEvent(1009.0, "Warning", "FailureUnknown", "killed"),  # in place: reported by the next page
            LoggedEvent(1010.5, "Warning", "FailureOOM", "memory"),
            LoggedEvent(1010.5, "Normal", "Disrupted", "attempt 2"),
            LoggedEvent(1020.0, "Warning", "FailureOOM", "again"),  # no step followed it
        ]
        assert find_marks(rows(), events, 1000.0) == [
            Mark(5.0, "restart", "killed"),
            Mark(10.5, "OOM", "memory"),
            Mark(20.0, "OOM", "again"),
        ]

    def test_step_time_is_split_between_rows_of_one_process(self) -> None:
        parts = split_step_time(rows())
        assert [len(part) for part in parts] == [5, 4, 0]  # twelve rows, without the steps over the restarts
        assert parts[0][0] == (1001.0, 0.25, 0.5, 0.25)

    def test_ranks_are_of_last_attempt_and_malformed_rows_are_ignored(self, tmp_path: Path) -> None:
        (first, second) = read_run(write_run(tmp_path)).ranks
        assert (first.rank, first.steps, first.step) == (0, 10, 0.0)
        assert (second.rank, second.step, second.data, second.compute) == (1, 0.2, 0.05, 0.1)
        assert second.wait == pytest.approx(0.05)
        assert list_rank_times([Page(ranks=(RankProgress(step=3.0), RankProgress(1, steps=0.0)))]) == []

    def test_broken_folders_are_refused_in_one_sentence(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"status\.yaml is missing"):
            read_run(tmp_path)
        for text in ("- 1", "{status: {attempt: two}}", "{"):
            (tmp_path / "status.yaml").write_text(text)
            with pytest.raises(ValueError, match=r"status\.yaml: invalid"):
                read_run(tmp_path)


class TestRanks:
    def ranks(self, count: int, late: int) -> list[RankTime]:
        return [RankTime(n, 9, 0.2, 0.01, 0.1 if n != late else 0.15) for n in range(count)]

    def test_slowest_is_first_and_marked(self) -> None:
        table = list_ranks(self.ranks(4, late=2))
        rows = re.findall(r'<tr class="(\w*)"><td class="number">(\d+)<', table)
        assert rows == [("late", "2"), ("", "0"), ("", "1"), ("", "3")]
        assert ">1.45<" in table

    def test_many_are_folded(self) -> None:
        shown, _, folded = list_ranks(self.ranks(64, late=40)).partition("<details><summary>48 more ranks")
        assert [part.count("<tr class") for part in (shown, folded)] == [16, 48]
        assert "<details" not in list_ranks(self.ranks(16, late=3))


class TestCharts:
    def test_nan_and_infinity_are_not_drawn(self) -> None:
        chart = line_chart("Loss", [Series("l", [[(0, 1.0), (1, math.nan), (2, math.inf), (3, 2.0)]])], TimeAxis(3))
        assert "nan" not in chart
        assert "inf" not in chart
        assert chart.count("<circle") == 2

    @pytest.mark.parametrize("stretches", [[], [[]], [[(0.0, 5.0)]]])
    def test_empty_series_gives_no_chart(self, stretches: list[list[tuple[float, float]]]) -> None:
        assert line_chart("Loss", [Series("l", stretches)], TimeAxis(1)) == ""
        assert stacked_chart("Time", ["a"], stretches, TimeAxis(1)) == ""

    def test_labels_do_not_overlap(self) -> None:
        marks = [Mark(time, "UserError") for time in (1, 50, 51, 90, 100)]
        chart = line_chart("x", [Series("s", [[(0, 1), (100, 2)]])], TimeAxis(100, marks))
        assert re.findall(r'<text class="mark".*?>(.*?)<', chart) == ["1 UserError", "2", "4", "5"]
        assert chart.count('<line class="mark"') == 5

    def test_long_series_are_thinned_and_keep_their_extremes(self) -> None:
        points = [(float(n), math.sin(n)) for n in range(10_000)] + [(10_000.0, 50.0)]
        kept = thin(points)
        assert len(kept) <= 400
        assert (10_000.0, 50.0) in kept
        assert kept == sorted(kept)

    @pytest.mark.parametrize(("low", "high"), [(0, 1), (0.1, 0.9), (3, 1234), (-5, 5), (1e-6, 2e-6), (2, 2), (0, 0)])
    def test_ticks_span_values_with_round_numbers(self, low: float, high: float) -> None:
        ticks = nice_ticks(low, high)
        assert ticks[0] <= low
        assert ticks[-1] >= high
        assert 2 <= len(ticks) <= 9


class TestReportCommand:
    def test_newest_run_is_taken(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = write_run(tmp_path)
        assert main(["report", "--runs-dir", str(tmp_path)]) == 0
        assert capsys.readouterr().out.strip() == str(path / "report.html")
        assert (path / "report.html").read_text().startswith("<!DOCTYPE html>")
