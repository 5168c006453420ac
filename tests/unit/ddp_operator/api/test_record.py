"""A record fits into an argument of a container, and a forged one costs its reader little."""

from __future__ import annotations

import gzip
import random
from base64 import b64decode

import msgspec
import pytest

from ddp_operator.api.errors import InvalidManifest
from ddp_operator.api.parse import parse_status
from ddp_operator.api.record import (
    MAX_ARGUMENT,
    MAX_STORED,
    PodLog,
    Record,
    build_pattern,
    decode_record,
    encode_record,
)
from ddp_operator.api.status import Status
from tests.support.builders import Json, resource


def pod_log(text: str) -> PodLog:
    return PodLog(pod="train-1-0-abcde", attempt=1, node=0, nproc=2, text=text)


def ended() -> Json:
    raw = resource() | {"status": {"phase": "Succeeded"}}
    raw["metadata"]["uid"] = "1a2b3c4d-0000"
    return raw


def test_small_record_round_trips_unchanged() -> None:
    record = Record(resource=ended(), events=({"reason": "Failed"},), logs=(pod_log("a\nb"),))
    assert decode_record(b64decode(encode_record(record))) == record


def test_large_logs_lose_their_first_lines_and_the_record_states_it() -> None:
    text = "\n".join(random.Random(number).randbytes(64).hex() for number in range(4000))
    encoded = encode_record(Record(resource=ended(), logs=(pod_log(text), pod_log("short"))))
    assert len(encoded) <= MAX_ARGUMENT
    record = decode_record(b64decode(encoded))
    assert text.endswith(record.logs[0].text)
    assert len(record.logs[0].text) > MAX_ARGUMENT // 4
    assert record.logs[1].text == "short"
    assert "room" in record.note


def test_spec_without_room_is_refused() -> None:
    raw = ended()
    raw["spec"]["template"]["spec"]["containers"][0]["args"] = [random.Random(4).randbytes(150_000).hex()]
    with pytest.raises(InvalidManifest, match="too large"):
        encode_record(Record(resource=raw, logs=(pod_log("a"),)))


WRONG_NAME = {"metadata": {"name": "a/b", "namespace": "c"}, "spec": {"template": {"spec": {}}}}
FORGED = {
    "empty": b"",
    "no gzip": b"no gzip",
    "no JSON": gzip.compress(b"[1"),
    "no resource": gzip.compress(b"{}"),
    "no members": gzip.compress(msgspec.json.encode({"resource": {}})),
    "wrong name": gzip.compress(msgspec.json.encode({"resource": WRONG_NAME})),
    "wrong log": gzip.compress(msgspec.json.encode({"resource": ended(), "logs": [{"pod": 1}]})),
    "bomb": gzip.compress(b" " * (17 * MAX_STORED)),
    "large": random.Random(5).randbytes(MAX_STORED + 1),
}


@pytest.mark.parametrize("case", FORGED)
def test_forged_record_is_refused(case: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        decode_record(FORGED[case])


def test_record_with_an_odd_status_is_read() -> None:
    raw = ended() | {"status": {"attempt": "x", "phase": "Failed"}}
    record = decode_record(gzip.compress(msgspec.json.encode({"resource": raw})))
    assert parse_status(record.resource) == Status(phase="Failed")


@pytest.mark.parametrize(("namespace", "name"), [("a", "*"), ("a", "../b"), ("*", "b"), ("a", "B")])
def test_pattern_of_no_name_is_refused(namespace: str, name: str) -> None:
    with pytest.raises(ValueError, match="not the name of a job"):
        build_pattern(namespace, name)
