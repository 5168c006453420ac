"""The plan and the launcher of a job that holds its pods between runs."""

from typing import Any

import pytest

from ddp_operator.api.status import DevStatus, Status
from ddp_operator.manifests.children import load_launcher, load_launcher_of
from ddp_operator.manifests.pod import build_plan
from ddp_operator.manifests.template import resolve_template
from ddp_pod.contract.plan import DevConfig
from tests.support.builders import job


@pytest.mark.parametrize(
    ("spec", "dev", "expected"),
    [
        ({}, None, None),
        ({"dev": {}}, None, DevConfig(1800)),
        ({"dev": {"holdSeconds": 60}}, DevStatus(run=1), DevConfig(60)),
        ({"dev": {}}, DevStatus(run=1, result="Failed"), DevConfig(1800, 1)),
        ({"dev": {}}, DevStatus(run=4, last_run=3), DevConfig(1800, 4)),
        ({"dev": {}}, DevStatus(run=0, last_run=3), DevConfig(1800, 3)),
        ({"dev": {}}, DevStatus(run=1, last_run=3), DevConfig(1800, 3)),
    ],
    ids=["none", "first", "unfinished-first-run", "ended-first-run", "fourth", "held-without-code", "lower-number"],
)
def test_new_attempt_knows_number_of_lost_runs(spec: dict[str, Any], dev: DevStatus | None, expected: Any) -> None:
    typed = job(status=Status(attempt=2, dev=dev), **spec)
    assert build_plan(typed, resolve_template(typed), attempt=2, nodes=1).dev == expected


def test_launcher_has_code_of_runs() -> None:
    assert load_launcher_of(job(dev={})) == load_launcher(frozenset({"dev"}))
    assert load_launcher_of(job()) == load_launcher(frozenset())
