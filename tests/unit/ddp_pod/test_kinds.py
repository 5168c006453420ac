"""Texts that only resemble those of a kind of failures."""

from __future__ import annotations

import pytest

from ddp_pod.base.exceptions import ExceptionFacts
from ddp_pod.failures.rules import complete_facts, find_kind


@pytest.mark.parametrize(
    ("text", "line", "untrue"),
    [
        ("RuntimeError: probability tensor contains either `inf`, `nan` or element < 0", "", "compare shapes"),
        ("RuntimeError: Inplace update to inference tensor outside InferenceMode is not", "", "compare shapes"),
        ("ValueError: Input length 600 is too long, the text was truncated", "", "incomplete"),
        ("docker.errors.APIError: unexpected EOF", "", "incomplete"),
        ("requests.exceptions.MissingSchema: Invalid URL 'x': No scheme supplied.", "", "request to a service failed"),
        ("wandb.errors.errors.UsageError: No API key configured.", "", "request to a service failed"),
        ("BlockingIOError: [Errno 11] Resource temporarily unavailable", "data = os.read(pipe, 9)", "podPidsLimit"),
        ("BlockingIOError: [Errno 11] write could not complete without blocking", "", "podPidsLimit"),
        ("OSError: [Errno 107] Transport endpoint is not connected", "", "storage"),
    ],
)
def test_remedy_of_another_failure_is_not_given(text: str, line: str, untrue: str) -> None:
    kind, _, message = text.partition(": ")
    judgement = find_kind([complete_facts(ExceptionFacts((kind,), message, line=line))])
    assert judgement is None or untrue not in judgement.kind.remedy


def test_lost_mount_is_a_failed_volume() -> None:
    facts = ExceptionFacts(("OSError",), "[Errno 107] Transport endpoint is not connected: '/data/x'")
    judgement = find_kind([complete_facts(facts)])
    assert judgement is not None
    assert judgement.kind.symptom == "A failed volume"
