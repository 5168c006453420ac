"""The signs of an absent operator, read from a real API server: the time of its last status, and its Lease."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest
import yaml

from ddp_cli.client.api import connect, find_lease_renewal, get_job
from ddp_cli.view.why import explain_why
from ddp_operator.api.constants import MANAGED_BY
from ddp_operator.api.kubeobjects import format_time, utc_now
from tests.support.builders import resource
from tests.support.control_plane import ControlPlane

pytestmark = [pytest.mark.apiserver, pytest.mark.timeout(300)]
RENEWED = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)
NAME = "unattended"


def test_old_status_of_a_stored_job_is_recognized(plane: ControlPlane) -> None:
    plane.kubectl("create", "-f", "-", stdin=yaml.safe_dump(resource(NAME)))
    training = {
        "type": "Progressing",
        "status": "True",
        "reason": "Training",
        "lastTransitionTime": format_time(RENEWED),
    }
    status = {"phase": "Running", "progress": {"step": 7}, "conditions": [training]}
    options = ("--subresource=status", "--type=merge", f"--field-manager={MANAGED_BY}")
    plane.kubectl("patch", "ddp", NAME, *options, "-p", json.dumps({"status": status}))

    job = get_job(connect(kubeconfig=str(plane.admin)), NAME)
    assert explain_why(job, (), utc_now()).reason == ""
    assert explain_why(job, (), utc_now() + timedelta(minutes=10)).reason == "NoOperator"


def test_lease_is_found_in_any_namespace(plane: ControlPlane) -> None:
    lease = {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": MANAGED_BY, "namespace": "kube-system"},
        "spec": {"holderIdentity": "a", "leaseDurationSeconds": 15, "renewTime": "2026-11-20T12:00:00.000000Z"},
    }
    plane.kubectl("create", "-f", "-", stdin=yaml.safe_dump(lease))
    try:
        renewed = find_lease_renewal(connect(kubeconfig=str(plane.admin)))
    finally:
        plane.kubectl("delete", "lease", MANAGED_BY, "-n", "kube-system")
    assert renewed is not None
    assert renewed >= (RENEWED, timedelta(seconds=15))
