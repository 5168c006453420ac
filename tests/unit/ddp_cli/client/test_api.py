"""The calls to an API server."""

from __future__ import annotations

import re
from typing import Any

import pytest
from kubernetes import client

from ddp_cli.client.api import Api, is_about, open_exec
from ddp_cli.client.errors import ApiError


@pytest.mark.parametrize(
    ("thing", "ours"),
    [
        ({"kind": "DDPTrainingJob", "name": "x", "uid": "u"}, True),
        ({"kind": "DDPTrainingJob", "name": "x", "uid": "former"}, False),
        ({"kind": "Job", "name": "x-1"}, True),
        ({"kind": "Pod", "name": "x-12-3-abcde"}, True),
        ({"kind": "Pod", "name": "x-other-1-0-abcde"}, False),
        ({"kind": "Service", "name": "x"}, False),
    ],
)
def test_events_of_other_jobs_are_excluded(thing: dict[str, Any], ours: bool) -> None:
    assert is_about({"involvedObject": thing}, {"name": "x", "uid": "u"}) is ours


@pytest.mark.parametrize(
    ("time", "ours"), [("2026-11-30T11:59:59Z", False), ("2026-11-30T12:00:00Z", True), ("2026-11-30T12:07:00Z", True)]
)
def test_events_of_a_former_job_of_the_same_name_are_excluded(time: str, ours: bool) -> None:
    event = {"involvedObject": {"kind": "Pod", "name": "x-1-0-abcde"}, "lastTimestamp": time}
    assert is_about(event, {"name": "x", "uid": "u", "creationTimestamp": "2026-11-30T12:00:00Z"}) is ours


@pytest.mark.parametrize(
    ("error_status", "reason", "status", "fact"),
    [
        (0, "Handshake status 403 Forbidden -+-+- {} -+-+- {}", 403, "permission pods/exec in namespace ml"),
        (401, "Unauthorized", 401, "permission pods/exec"),
        (0, "Handshake status 500 Internal Server Error -+-+- {'a': 1} -+-+- x", 500, "pod-0: Handshake status 500"),
        (0, "[Errno 111] Connection refused", None, "Connection refused"),
    ],
)
def test_failed_exec_has_status_and_names_missing_permission(
    error_status: int, reason: str, status: int | None, fact: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*words: object, **options: object) -> None:
        raise client.ApiException(status=error_status, reason=reason)

    monkeypatch.setattr("kubernetes.stream.ws_client.websocket_call", fail)
    api = Api(client.ApiClient(client.Configuration(host="http://x")), "ml")
    with pytest.raises(ApiError, match=re.escape(fact)) as raised:
        open_exec(api, "pod-0", ["true"])
    assert raised.value.status == status
    assert "-+-+-" not in str(raised.value)
