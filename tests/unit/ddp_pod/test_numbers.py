"""Numbers in untrusted text."""

from __future__ import annotations

from typing import Any

import pytest

from ddp_pod.contract.numbers import parse_count
from ddp_pod.progress.line_steps import find_total

HUGE = "9" * 5000
"""More digits than Python converts."""


@pytest.mark.parametrize(("text", "number"), [("0", 0), ("007", 7), (12, 12), ("9" * 18, 10**18 - 1)])
def test_digits_are_a_number(text: Any, number: int) -> None:
    assert parse_count(text) == number


@pytest.mark.parametrize("text", ["", "-1", "+1", "1.0", "1_0", " 1", "²", "٣", None, True, "9" * 19, HUGE])
def test_other_text_is_no_number(text: Any) -> None:
    assert parse_count(text) is None


def test_total_beyond_all_limits_is_ignored() -> None:
    assert find_total(["train.py", "--epochs", HUGE], epochs=True) is None
    assert find_total(["train.py", f"--epochs={HUGE}", "--epochs=3"], epochs=True) == 3
