"""Termination messages come from the user's pods: no input raises, all output can be stored."""

import json as stdlib_json
from datetime import UTC, datetime
from typing import Any

import jsonschema
import msgspec
from hypothesis import given
from hypothesis import strategies as st

from ddp_operator.api.crd import build_crd
from ddp_operator.api.status import Status
from ddp_operator.decide.diagnosis import diagnose
from ddp_operator.decide.report import build_checkpoint, build_progress
from ddp_operator.decide.state import Observation, State
from ddp_operator.features import SCHEMA
from ddp_operator.reading.objects import view_pod
from ddp_operator.reading.terminations import parse_termination
from ddp_pod.contract.failure_table import CATEGORIES
from ddp_pod.contract.progress import RankProgress
from ddp_pod.contract.series import SERIES
from tests.support.builders import NOW, child_pod, job
from tests.support.strategies import json

STATUS = jsonschema.Draft202012Validator(
    build_crd(SCHEMA)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]
)
progress = st.dictionaries(st.sampled_from([*SERIES, "totalSteps", "lastStepTime", "lostLossStep"]), st.floats())


def check_status(status: Status) -> None:
    """A status fits the CRD and JSON for any message of pods."""
    text = msgspec.json.encode(status)
    raw = msgspec.json.decode(text)
    assert STATUS.is_valid(raw), list(STATUS.iter_errors(raw))
    stdlib_json.dumps(raw, allow_nan=False)
    assert not any(abs(number) >= 2**63 for number in integers(raw))
    assert len(text) < 64_000


def integers(value: Any) -> Any:
    if isinstance(value, int):
        yield value
    elif isinstance(value, dict | list):
        for member in value.values() if isinstance(value, dict) else value:
            yield from integers(member)


MEMBERS = (
    "category",
    "exitCode",
    "rank",
    "podIndex",
    "message",
    "traceback",
    "remedy",
    "time",
    "restarts",
    "secondary",
    "localRank",
    "exceptionType",
    "evidence",
    "progress",
)
words = st.one_of(
    st.text(max_size=200),
    json.map(lambda value: stdlib_json.dumps(value)),
    st.dictionaries(
        st.sampled_from(MEMBERS),
        st.one_of(json, st.floats(), st.integers(), st.text(max_size=5000), progress),
    ).map(stdlib_json.dumps),
    st.fixed_dictionaries(
        {"version": st.just(2)},
        optional={
            "category": st.sampled_from(tuple(CATEGORIES)),
            "exitCode": st.integers(),
            "rank": st.integers(),
            "message": st.text(),
            "traceback": st.text(),
            "time": st.floats(),
            "restarts": st.integers(),
            "secondary": st.booleans(),
            "progress": progress,
        },
    ).map(stdlib_json.dumps),
)
moments = st.none() | st.datetimes(timezones=st.just(UTC))


@given(words, st.integers(0, 255), st.sampled_from(["", "Error", "OOMKilled", "Completed"]), moments)
def test_any_termination_message_gives_storable_cause(
    text: str, code: int, reason: str, finished: datetime | None
) -> None:
    end = parse_termination(code, reason, text, finished)
    assert end.category in CATEGORIES
    pod = child_pod(0, "Failed", code=code, reason=reason, message=text)
    state = State(job(status=Status(attempt=1)), Observation(pods=(view_pod(pod),)), NOW)
    diagnosis = diagnose(state)
    if diagnosis is not None and diagnosis.cause is not None:
        reached = end.progress or RankProgress()
        shown = build_progress(reached)
        check_status(Status(last_failure=diagnosis.cause, progress=shown, checkpoint=build_checkpoint(reached)))
