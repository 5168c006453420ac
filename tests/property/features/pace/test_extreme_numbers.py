"""Reports with numbers of any size: the pace is measured, and no pass raises."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from hypothesis import given

from ddp_operator.decide.hooks import Hooks
from ddp_operator.decide.pace import RateMeter
from ddp_operator.decide.report import Page
from ddp_operator.features import pace
from ddp_operator.features.pace import PaceReading
from tests.property.test_extreme_numbers import passes, run_passes
from tests.support.fuzzing import examples, tally


@examples(100)
@given(passes())
def test_extreme_numbers_end_no_measurement(case: tuple[Any, list[Any], list[str], list[float]]) -> None:
    meter = RateMeter()

    def read(page: Page, now: datetime) -> dict[str, object]:
        return {"pace": PaceReading(meter, meter.measure("process", page.progress, now.timestamp()))}

    run_passes(case, Hooks((pace.FEATURE,)), read)
    tally("pace with extreme numbers")
