"""``spec.history``: its rules, and the place of the records."""

from typing import Any

import pytest

from ddp_operator.api.errors import InvalidManifest
from ddp_operator.features.history import FEATURE
from ddp_operator.manifests.template import resolve_template
from tests.support.builders import job, template, trainer
from tests.support.fields import check_fields, list_fixed


def test_url_is_that_of_folder() -> None:
    secret = {"name": "bucket"}
    good = {"spec.history": ({}, {"url": "s3://bucket/prefix", "secretRef": secret})}
    bad = {"spec.history.url": ("bucket/prefix", "https://x/y"), "spec.history.secretRef": (secret,)}
    check_fields(FEATURE, good, bad)


def test_running_job_may_change_it() -> None:
    assert list_fixed(FEATURE, "spec.history", {}, {"url": "s3://a/b"}) == [False, True]


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"history": {}}, "spec.history"),
        ({"history": {}, "checkpoint": {"path": "/ckpt"}}, "spec.history"),
        (
            {
                "history": {},
                "checkpoint": {"path": "/data"},
                "template": template(
                    trainer(volumeMounts=[{"name": "data", "mountPath": "/data"}]),
                    volumes=[{"name": "data", "emptyDir": {}}],
                ),
            },
            "spec.history",
        ),
        ({"history": {"url": "s3://key:secret@team/history"}}, "spec.history.url"),
    ],
)
def test_place_that_cannot_keep_records_is_refused(spec: Any, field: str) -> None:
    with pytest.raises(InvalidManifest) as error:
        resolve_template(job(**spec))
    assert [problem.path for problem in error.value.errors] == [field]
    assert "secret@" not in str(error.value)
