"""Hooks about objects of features that fail: the object is refused, or a remedy is left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ddp_operator.api.cluster_errors import Refused
from ddp_operator.api.faults import FAULTS
from ddp_operator.api.posting import Posting
from ddp_operator.decide.hooks import Feature
from ddp_operator.kube.postings import Postings
from tests.unit.ddp_operator.decide.test_hooks import GARBAGE, fail

GROUP = {"apiVersion": "a.b/v1", "kind": "Group", "metadata": {"name": "g"}}


def posting(**hooks: Any) -> Postings:
    """Return a feature with these hooks of its kind, which raise what is an exception."""

    def build(answer: Any) -> Callable[..., Any]:
        return fail if isinstance(answer, Exception) else lambda *_: answer

    given: dict[str, Any] = {"explain_absence": "none", **hooks}
    odd = Posting("Group", **{name: build(answer) for name, answer in given.items()})
    good = Posting("Other", build("no other"), explain_refusal=lambda _, message: f"{message}; add a role")
    features = (("odd", odd), ("good", good))
    return Postings([Feature(name, maturity="experimental", page="x.md", posting=hook) for name, hook in features])


def test_other_kinds_are_posted_as_they_are() -> None:
    hooks = posting(list_versions=ZeroDivisionError(), explain_loss=ZeroDivisionError())
    pod = GROUP | {"kind": "Pod"}
    assert (hooks.list_versions(pod), hooks.explain_loss(pod, {})) == ([pod], "")
    assert hooks.explain_absence(pod) == "the cluster does not serve Pod of a.b/v1"


@pytest.mark.parametrize("answer", [*GARBAGE, [], [7], ZeroDivisionError()])
def test_object_whose_versions_are_unknown_is_refused(answer: Any) -> None:
    before = FAULTS.counts["feature odd"]
    with pytest.raises(Refused, match="the feature odd does not work"):
        posting(list_versions=answer).list_versions(GROUP)
    assert FAULTS.counts["feature odd"] == before + 1


@pytest.mark.parametrize("answer", [None, 7, {}, ZeroDivisionError()])
def test_object_that_cannot_be_compared_is_refused(answer: Any) -> None:
    assert "the feature odd does not work" in posting(explain_loss=answer).explain_loss(GROUP, GROUP)


@pytest.mark.parametrize("answer", [None, 7, {}, ZeroDivisionError()])
def test_refusal_without_explanation_is_that_of_api_server(answer: Any) -> None:
    before = FAULTS.counts["feature odd"]
    hooks = posting(explain_absence=answer, explain_refusal=answer)
    assert hooks.explain_absence(GROUP) == "the cluster does not serve Group of a.b/v1"
    assert hooks.explain_refusal(GROUP, "no") == "no; add a role"
    assert FAULTS.counts["feature odd"] == before + 2
