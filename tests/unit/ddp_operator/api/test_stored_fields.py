"""A stored field that cannot be read is left out and named; the others are kept."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from ddp_operator.api.spec import Spec
from ddp_operator.api.status import Progress, Status
from ddp_operator.api.stored_fields import describe_left_out, read_fields, read_status
from tests.support.builders import resource
from tests.support.full_status import TIME, build_full_status, list_paths, spoil

FULL = build_full_status()


def test_readable_status_is_read_whole() -> None:
    stored = read_status({"status": FULL})
    assert stored.stored is FULL
    assert stored.left_out == ()
    assert stored.status == msgspec.convert(FULL, Status)
    assert len(list(list_paths(FULL))) > 150


OPAQUE = ("status.profile.job", "status.operatorState")


@pytest.mark.parametrize("path", [path for path in list_paths(FULL) if not path.startswith(OPAQUE)])
def test_field_of_wrong_type_is_named_and_the_others_are_kept(path: str) -> None:
    stored = read_status({"status": spoil(FULL, path)})
    assert stored.left_out == (path,)
    top = path.split(".")[1].partition("[")[0]
    others = {name: value for name, value in FULL.items() if name != top}
    assert {name: value for name, value in stored.stored.items() if name != top} == others
    assert msgspec.convert(stored.stored, Status) == stored.status


def test_members_beside_a_lost_one_are_kept() -> None:
    progress = {"step": 7, "loss": ["0.1"], "learningRate": 12, "lastStepTime": "soon", "newer": {"a": 1}}
    stored = read_status({"status": {"progress": progress, "stragglers": [{"rank": 1}, 5]}})
    assert stored.status.progress == Progress(step=7)
    assert stored.status.stragglers == ()
    left_out = ("loss", "learningRate", "lastStepTime")
    assert stored.left_out == (
        *(f"status.progress.{name}" for name in left_out), "status.stragglers[0]", "status.stragglers[1]",
    )  # fmt: skip


@pytest.mark.parametrize("number", [5e-05, 1e-05, 1e-06, 0.1])
def test_fraction_that_was_stored_without_quotes_is_its_text(number: float) -> None:
    stored = read_status({"status": {"progress": {"learningRate": number}}})
    assert stored.status.progress == Progress(learning_rate=repr(number))
    assert stored.left_out == ()


def test_whole_number_instead_of_text_is_left_out() -> None:
    """12e7 is read as 120000000, from which nothing can tell what was stored."""
    stored = read_status({"status": {"lastFailure": {"attempt": 1, "category": "OOM", "pod": 120000000}}})
    assert stored.left_out == ("status.lastFailure.pod",)


@pytest.mark.parametrize("raw", [[], "x", 5, [1], {"a": 1, "phase": 5, "conditions": [5]}])
def test_status_without_readable_phase_lacks_it(raw: Any) -> None:
    stored = read_status({"status": raw})
    assert stored.status == Status()
    assert stored.lacks_phase is bool(raw)


def test_outcome_of_a_condition_replaces_a_phase_that_cannot_be_read() -> None:
    for outcome in ("Succeeded", "Failed"):
        condition = {"type": outcome, "status": "True", "reason": "A", "lastTransitionTime": TIME}
        stored = read_status({"status": {"phase": "Frozen", "conditions": [condition]}})
        assert (stored.status.phase, stored.lacks_phase) == (outcome, False)
        assert stored.left_out == ("status.phase",)


def test_field_of_a_newer_version_in_a_spec_is_left_out() -> None:
    raw = resource()["spec"] | {"newer": 1, "nodes": 3}
    reading = read_fields(raw, Spec, "spec")
    assert reading.left_out == ("spec.newer",)
    assert msgspec.convert(reading.value, Spec).nodes == 3
    assert read_fields({"nodes": 3}, Spec, "spec").value is msgspec.UNSET


def test_text_of_a_mapping_is_kept_beside_a_number() -> None:
    reading = read_fields({"a": "b", "c": 12}, dict[str, str], "metadata.labels")
    assert (reading.value, reading.left_out) == ({"a": "b"}, ("metadata.labels.c",))


def test_description_names_some_fields() -> None:
    assert describe_left_out(("status.a",)) == "status.a cannot be read and is left out"
    assert describe_left_out(tuple("abcdefg")) == "a, b, c, d, e and 2 more cannot be read and are left out"
