"""The limits of a spec's size, and the cost of all checks at these limits."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from ddp_operator.api.errors import InvalidManifest
from ddp_operator.api.job_file import parse_manifest
from ddp_operator.api.parse import parse_resource
from ddp_operator.api.size import MAX_BYTES, MAX_DEPTH, MAX_VALUES, OversizeSpec, refuse_oversize
from ddp_operator.features import SCHEMA
from ddp_operator.manifests.children import build_children
from tests.support.builders import job, resource, template, trainer
from tests.support.limit_specs import list_lines, list_specs

LONG = "echo x\n" * (MAX_BYTES // 8)
NESTED: Any = "x"
for _ in range(MAX_DEPTH):
    NESTED = [NESTED]


@pytest.mark.parametrize(
    ("spec", "facts"),
    [
        (
            {"template": template(trainer(command=["bash", "-c", LONG]))},
            ("spec.template.spec.containers[0].command[2]: ", "257 KiB", "the limit is 256 KiB", "spec.code"),
        ),
        (
            {"template": template(trainer(env=[{"name": "A", "value": "é" * MAX_BYTES}]))},
            ("spec.template.spec.containers[0].env[0].value: ", "the limit is 256 KiB"),
        ),
        (
            {"template": template(trainer(args=["x"] * MAX_VALUES))},
            ("spec.template.spec.containers[0].args: ", "spec has more than 10000 values", "10000 of them here"),
        ),
        ({"template": template(x=[[] for _ in range(MAX_VALUES)])}, ("spec.template.spec.x: ",)),
        ({"template": template(x=NESTED)}, ("spec: has more than 64 levels",)),
    ],
)
def test_oversize_spec_is_refused_by_every_reader(spec: Any, facts: tuple[str, ...]) -> None:
    readers: list[Callable[[], Any]] = [
        lambda: parse_resource(resource(**spec), SCHEMA),
        lambda: parse_manifest(json.dumps(resource(**spec)), SCHEMA),
    ]
    for read in readers:
        with pytest.raises(OversizeSpec) as raised:
            read()
        assert all(fact in str(raised.value) for fact in facts), str(raised.value)


@pytest.mark.parametrize("spec", [None, [], "x", {"a": "é" * 100_000}, {"a": ["x"] * (MAX_VALUES - 1)}])
def test_spec_within_limits_is_accepted(spec: Any) -> None:
    refuse_oversize(spec)


def check(spec: Any) -> None:
    try:
        build_children(job(**spec), attempt=1, nodes=2)
    except InvalidManifest:
        pass


def test_commands_at_limits_are_parsed_in_linear_time() -> None:
    """Quadratic time would exceed the timeout of the test."""
    for _, spec in list_lines():
        check(spec)


@pytest.mark.nightly
def test_specs_at_limits_are_checked_in_linear_time() -> None:
    for _, spec in list_specs():
        check(spec)
