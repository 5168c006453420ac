"""``spec.tracking``: its rules, its check, and the run in the status."""

from __future__ import annotations

from typing import Any

import pytest

from ddp_operator.api.errors import InvalidManifest
from ddp_operator.api.status import TrackingStatus
from ddp_operator.decide.hooks import Hooks
from ddp_operator.features.tracking import FEATURE, list_links
from ddp_operator.manifests.template import resolve_template
from tests.support.builders import UID, decode, job, page
from tests.support.decisions import RUNNING, run_pass
from tests.support.fields import check_fields, list_fixed

PATH = "spec.tracking"
MLFLOW = {"mlflow": {"trackingUri": "http://m"}}


def test_tracker_and_valid_identity_are_required() -> None:
    bad = {
        PATH: ({}, {"runName": "x"}),
        f"{PATH}.runId": ("", "a b", "a" * 65, "a/b"),
        f"{PATH}.tensorboardPath": ("tb", ""),
    }
    check_fields(FEATURE, {PATH: ({"wandb": {}}, {"runId": "a-1", **MLFLOW})}, bad)


def test_it_is_fixed_once_pod_has_run() -> None:
    assert list_fixed(FEATURE, PATH, {"wandb": {}}, {"wandb": {"project": "p"}}) == [True, True]


@pytest.mark.parametrize(
    ("tracking", "field"),
    [
        ({"mlflow": {"trackingUri": "https://me:secret@host"}}, "mlflow.trackingUri"),
        ({"wandb": {"baseUrl": "https://me:secret@host"}}, "wandb.baseUrl"),
    ],
)
def test_url_with_password_is_refused(tracking: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidManifest) as error:
        resolve_template(job(tracking=tracking))
    assert [problem.path for problem in error.value.errors] == [f"{PATH}.{field}"]
    assert "secret@" not in str(error.value)


def test_status_has_run_and_its_links() -> None:
    text = page(phase="Running", step=3, runs=[{"tracker": "W&B", "url": "https://w/run"}])
    tracked = run_pass(*RUNNING, text=text, hooks=Hooks((FEATURE,)), tracking={"wandb": {}}).status.tracking
    assert isinstance(tracked, TrackingStatus)
    assert (tracked.run_id, tracked.links) == (f"train-{UID[:8]}", ("https://w/run",))
    assert run_pass(*RUNNING, text=text, hooks=Hooks((FEATURE,))).status.tracking is None


def test_links_are_bounded_and_without_passwords() -> None:
    runs = [{"url": f"https://u:secret@host/{number}"} for number in range(9)] + [{"url": "file:/runs"}]
    links = list_links(decode(page(runs=runs)))
    assert len(links) == 4
    assert not any("secret" in link for link in links)
