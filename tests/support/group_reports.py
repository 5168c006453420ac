"""Reports and ends of pods that state how the ranks train together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddp_operator.decide.state import Decision
from ddp_pod.contract.group_facts import GroupFacts
from ddp_pod.contract.records import to_json
from tests.support.builders import child_pod, last_words, page
from tests.support.decisions import read_condition


def succeed(index: int, **known: Any) -> Any:
    """Return a pod that has succeeded, with what its last report states."""
    return child_pod(index, "Succeeded", message=last_words(**known))


def groups(state: str, message: str = "how the ranks train", **values: Any) -> dict[str, Any]:
    """Return the record of the process groups of two ranks."""
    return {"groups": to_json(GroupFacts(state, 2, message, **values))}


def with_groups(facts: Mapping[str, Any]) -> str:
    """Return the page of a pod that makes steps, with a record of its process groups."""
    return page(step=3, phase="Running", groups=facts["groups"])


def read_texts(decision: Decision, kind: str) -> tuple[str, str, str]:
    """Return status, reason and message of a condition that the decision sets."""
    result = read_condition(decision, kind)
    return result.status, result.reason, result.message
