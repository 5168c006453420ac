"""`ddp check` on the faults of public reports: the right check fails alone, for the right reason, at the right line."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Final

import pytest

from tests.check.faults import SCRIPTS
from tests.check.planted import OPEN, PLANTED
from tests.check.running import Judgement, judge_report, list_alarms, note_row, run_check
from tests.check.siblings import OPEN_SIBLINGS, SIBLINGS

pytestmark = pytest.mark.process


ALL: Final = MappingProxyType(PLANTED | SIBLINGS)


@pytest.mark.parametrize("name", ALL)
def test_planted_fault_is_reported_with_reason_and_line(
    name: str, tmp_path: Path, request: pytest.FixtureRequest, record_property: Callable[[str, object], None]
) -> None:
    fault = ALL[name]
    reason = (OPEN | OPEN_SIBLINGS).get(name)
    if reason:
        request.applymarker(pytest.mark.xfail(reason=reason, strict=False))
    folder = Path(shutil.copytree(SCRIPTS, tmp_path / "work", ignore=shutil.ignore_patterns("__*__*")))
    (folder / fault.script).write_text(fault.write())
    shape = () if fault.pods > 1 else ("--nodes=1", "--procs=2")
    began = time.monotonic()

    verdicts = run_check(folder, fault.script, *shape)

    judgement = judge_report(fault, verdicts)
    note_row(record_property, name, f"{fault.check} {fault.state}", verdicts, began, judgement)
    assert judgement == Judgement(state=True, reason=True, line=True, alone=True), (list_alarms(verdicts), fault)
