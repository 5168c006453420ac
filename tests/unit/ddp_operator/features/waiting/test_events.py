"""What Events report about objects that wait."""

from datetime import timedelta
from typing import Any

import pytest

from ddp_operator.api.kubeobjects import format_time
from ddp_operator.decide.state import Problem
from ddp_operator.features.waiting.events import find_claim_problem, find_latest_warning, list_claims, name_volume
from tests.support.builders import NOW


def event(reason: str, message: str, *, kind: str = "Warning", at: float = 0, **changes: Any) -> dict[str, Any]:
    moment = format_time(NOW + timedelta(seconds=at))
    return {"type": kind, "reason": reason, "message": message, "lastTimestamp": moment} | changes


class TestSchedulingEvents:
    def test_latest_known_warning_counts(self) -> None:
        text = [
            event("FailedMount", "new", at=9),
            event("FailedAttachVolume", "old", at=1),
            event("Scheduled", "fine", kind="Normal", at=20),
            event("BackOff", "nothing of ours", at=20),
        ]
        for order in (text, text[::-1]):
            assert find_latest_warning(order) == Problem("FailedMount", "new")

    @pytest.mark.parametrize("events", [[], [{}], [{"type": "Warning", "reason": "FailedMount"}]])
    def test_malformed_events_are_ignored(self, events: Any) -> None:
        assert find_latest_warning(events) in (None, Problem("FailedMount", ""))


POD = {
    "volumes": [
        {"name": "cfg", "configMap": {"name": "settings"}},
        {"name": "key", "secret": {"secretName": "s3"}},
        {"name": "data", "persistentVolumeClaim": {"claimName": "corpus"}},
        {"name": "again", "persistentVolumeClaim": {"claimName": "corpus"}},
        {"name": "share", "nfs": {"server": "10.0.0.9", "path": "/x"}},
        {"name": "token", "projected": {"sources": []}},
        {"name": "odd", "fc": None},
        {"name": "bare"},
    ]
}


@pytest.mark.parametrize(
    ("message", "source"),
    [
        (
            'MountVolume.SetUp failed for volume "cfg" : references non-existent config key: a',
            "cfg is ConfigMap settings",
        ),
        ('MountVolume.SetUp failed for volume "key" : x', "key is Secret s3"),
        ("Unable to attach or mount volumes: unmounted volumes=[data share], timed out", "data is claim corpus"),
        ('MountVolume.SetUp failed for volume "share" : mount failed', "share is NFS server 10.0.0.9"),
        ('MountVolume.SetUp failed for volume "token" : x', "token is projected"),
        ('MountVolume.SetUp failed for volume "odd" : x', "odd is fc"),
        ('MountVolume.SetUp failed for volume "bare" : x', "bare is emptyDir"),
        ('Multi-Attach error for volume "pvc-12"', ""),
        ("no volume", ""),
    ],
)
def test_object_behind_volume_is_named(message: str, source: str) -> None:
    named = name_volume(Problem("FailedMount", message), POD)
    assert named.message == (f"{message} (volume {source})" if source else message)


def claim_event(reason: str, kind: str = "Normal", at: str = "1") -> dict[str, Any]:
    return {"type": kind, "reason": reason, "message": f"{reason} text", "lastTimestamp": at}


@pytest.mark.parametrize(
    ("events", "told"),
    [
        (
            [claim_event("ProvisioningFailed", "Warning"), claim_event("FailedBinding", at="2")],
            "ProvisioningFailed",
        ),
        (
            [claim_event("FailedBinding"), claim_event("ExternalProvisioning", at="2")],
            "ExternalProvisioning",
        ),
        ([claim_event("WaitForFirstConsumer"), claim_event("Provisioning")], ""),
        ([{}], ""),
    ],
)
def test_latest_event_that_explains_claim_is_told(events: list[Any], told: str) -> None:
    problem = find_claim_problem("corpus", events)
    assert problem == (Problem("VolumeNotReady", f"claim corpus: {told}: {told} text") if told else None)


def test_each_claim_is_listed_once() -> None:
    assert list_claims(POD) == ["corpus"]
    assert list_claims({}) == []
