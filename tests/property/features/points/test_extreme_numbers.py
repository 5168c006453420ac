"""Reports with numbers of any size: rows are added, and no pass raises."""

from typing import Any

from hypothesis import given

from ddp_operator.decide.hooks import Hooks
from ddp_operator.features.points import FEATURE
from tests.property.test_extreme_numbers import passes, run_passes
from tests.support.fuzzing import examples, tally


@examples(100)
@given(passes())
def test_extreme_numbers_end_no_row(case: tuple[Any, list[Any], list[str], list[float]]) -> None:
    run_passes(case, Hooks((FEATURE,)))
    tally("row with extreme numbers")
