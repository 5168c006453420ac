"""The program of the drills, and in the nightly tier the fast ones; `make drills` and `make soak` run all of them."""

from __future__ import annotations

import re
from pathlib import Path

import psutil
import pytest

from ddp_operator.reconcile.fair_turns import FairTurns
from tests.drills import __main__ as drills
from tests.drills.core import Drill, DrillOutcome, DrillRow, NotHere, Perished, build_table
from tests.drills.scene import Session
from tests.drills.soak import Samples, soak_local
from tests.support import ROOT

pytestmark = [pytest.mark.process, pytest.mark.timeout(1200)]


@pytest.mark.nightly
def test_fast_drills_survive(capsys: pytest.CaptureFixture[str]) -> None:
    assert drills.main(["--fast", "--no-floors"]) == 0, "".join(capsys.readouterr())
    assert "DRILLS 2/2" in capsys.readouterr().out


@pytest.mark.nightly
async def test_small_soak_ends_without_leftovers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[FairTurns] = []
    run = FairTurns.run
    monkeypatch.setattr(FairTurns, "run", lambda self, *args, **more: turns.append(self) or run(self, *args, **more))
    sequence, at_once = await soak_local(tmp_path, in_sequence=2, at_once=4, with_launcher=False)
    assert (sequence.jobs, at_once.jobs) == ([1, 2], [4, 8, 12, 16])
    assert turns, "the operator's own turns were measured"
    for samples in (sequence, at_once):
        for name in ("processes", "temporary files", "objects kept"):
            assert set(samples.figures[name]) == {0}


def test_every_drill_is_in_page_about_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert drills.main(["--list"]) == 0
    names = {line.split()[0] for line in capsys.readouterr().out.splitlines()}
    page = (ROOT / "docs" / "drills.md").read_text(encoding="utf-8")
    _, _, section = page.partition("The drills, and the fault of each:\n\n")
    entries = section.partition("\n\n")[0].split("\n- ")
    assert sorted(re.findall(r"`([a-z-]+)`", "\n".join(entry.partition(": ")[0] for entry in entries))) == sorted(names)


def test_drill_that_is_not_survived_fails_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def perish(scene: object) -> DrillOutcome:
        raise Perished("the state differs\nand more")

    def lack(scene: object) -> DrillOutcome:
        raise NotHere("needs wings")

    chosen = [Drill("good", "", lambda scene: DrillOutcome(3, 4.0, "ranks"), trains=False)]
    chosen += [Drill("bad", "", perish, trains=False), Drill("absent", "", lack, trains=False)]
    assert drills.run_all(chosen, Session(tmp_path), runs=2, fast=True, floors=False) == 1
    report = capsys.readouterr()
    assert "DRILLS 2/4" in report.out
    assert "absent  0     -" in report.out
    assert "not run here: needs wings" in report.out
    assert "bad: Perished: the state differs" in report.err


def test_table_compares_recoveries_with_floors() -> None:
    drill = Drill("one", "", lambda scene: DrillOutcome())
    waited = [
        DrillOutcome(2, 6.0, "ranks", waits=1.0, by_hand=3.0),
        DrillOutcome(5, 8.0, "ranks", waits=1.0, by_hand=5.0),
    ]
    _, line, _, last = build_table([DrillRow(drill, waited)]).splitlines()
    assert line.split() == ["one", "2", "2", "2-5", "7.0", "s", "5.0", "s", "1.40"]
    assert last == "DRILLS 2/2"


def test_slope_is_for_each_thousand_jobs() -> None:
    samples = Samples("x")
    for jobs in (100, 200, 300, 400):
        samples.take(jobs, psutil.Process(), leak=jobs / 2)
    assert "leak                   100 ->        200      +500.00 for each 1,000 jobs" in samples.table()
