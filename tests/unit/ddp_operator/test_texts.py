"""Texts of values."""

import pytest

from ddp_operator.api.display_texts import format_duration
from ddp_operator.api.texts import format_more_pods


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (-3, "0s"), (59.4, "59s"), (60, "1m00s"), (312, "5m12s"), (3600, "1h00m"), (11040, "3h04m"),
     (90000, "1d01h"), (1e8, "1157d09h")],
)  # fmt: skip
def test_duration_has_two_greatest_units(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("number", "preposition", "text"),
    [(0, "", ""), (1, "", " (and 1 more pod)"), (2, "", " (and 2 more pods)"), (1, "of", " (and of 1 more pod)")],
)
def test_more_pods_are_counted_with_noun(number: int, preposition: str, text: str) -> None:
    assert format_more_pods(number, preposition=preposition) == text
