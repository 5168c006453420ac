"""Texts of values."""

import pytest

from ddp_cli.view.texts import format_estimate


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-9, "1m"), (20, "1m"), (2394, "40m"), (5900, "98m"), (24_000, "7h"), (4e5, "5d")],
)
def test_estimate_has_no_more_digits_than_it_is_worth(seconds: float, text: str) -> None:
    assert format_estimate(seconds) == text
