"""``spec.inputs``: when it may no longer change, and its part in the digest of a spec."""

from __future__ import annotations

from ddp_operator.features.inputs import FEATURE
from tests.support.builders import job
from tests.support.fields import list_fixed

PATH = "spec.inputs"
FIRST = {"url": "https://host/file", "mountPath": "/data", "claimName": "data"}


def test_inputs_are_fixed_from_attempt_1() -> None:
    assert list_fixed(FEATURE, PATH, [FIRST], [FIRST | {"mountPath": "/other"}]) == [True, True]


def test_change_of_inputs_replaces_job() -> None:
    assert job(inputs=[FIRST]).spec_digest != job(inputs=[FIRST | {"url": "https://host/more"}]).spec_digest


def test_empty_list_asks_for_no_preparation() -> None:
    without, empty, some = (job(**spec) for spec in ({}, {"inputs": []}, {"inputs": [FIRST]}))
    assert [typed.schema.find_preparing(typed.spec) is not None for typed in (without, empty, some)] == [
        False,
        False,
        True,
    ]
