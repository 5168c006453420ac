"""A job whose spec a feature completes before it is parsed: it keeps a copy, and waits while that has a fault."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import pytest

from ddp_operator.api import constants
from ddp_operator.api.cel import check_rules
from ddp_operator.api.completion import complete_job, find_completing
from ddp_operator.api.crd import build_spec_schema
from ddp_operator.api.errors import FieldError, InvalidManifest
from ddp_operator.api.faults import FAULTS
from ddp_operator.api.job_file import find_among, parse_manifest
from ddp_operator.api.schema import KERNEL
from ddp_operator.api.status import Profile
from ddp_operator.decide import conditions as c
from ddp_operator.decide.hooks import Hooks, build_schema
from ddp_operator.decide.state import Refusal
from ddp_operator.kube.services import ServiceContext, start_services
from ddp_operator.reconcile import completing
from ddp_operator.reconcile.fair_turns import StepTooLong, run_limited
from tests.support.builders import resource
from tests.support.decisions import present
from tests.support.fake_cluster import ReconcilerHarness
from tests.support.fake_features import FakeService, complete_by

VALUES = Profile(kind="Menu", name="day", digest="1", job={"recovery": {"maxRestarts": 9}})
MENU = {"kind": "Menu", "metadata": {"name": "day"}, "name": "day", "job": VALUES.job}
GARBAGE: Any = [7, "text", {7: "text"}, object(), True, math.nan]


def fail(*_: Any) -> Any:
    raise ZeroDivisionError("a bug")


async def hang() -> Any:
    await asyncio.Event().wait()


def serve(answer: Any, **hooks: Callable[..., Any]) -> Hooks:
    return Hooks((complete_by(**hooks),), {"odd": FakeService(values=answer, completes=True)})


def of_kernel(hooks: Hooks, **spec: Any) -> ReconcilerHarness:
    """Return a job of kernel fields only, as the API server of the harness checks no others."""
    return ReconcilerHarness(hooks=hooks, **spec)


async def test_job_trains_by_its_copy() -> None:
    harness = await of_kernel(serve(VALUES)).settle()
    assert (harness.status.profile, harness.jobs()) == (VALUES, ["train-1"])
    assert harness.status.restarts.limit == 9
    calls = harness.cluster.calls
    assert calls.index("status") < calls.index("create Job"), "the copy is written first"


@pytest.mark.parametrize(
    "answer",
    [
        *GARBAGE,
        Profile(kind="Menu", name="day", digest="1", job=["text"]),
        Profile(kind="Menu", name=7, digest="1", job={}),  # type: ignore[arg-type]
        Refusal("Forbidden", 7),  # type: ignore[arg-type]
        ZeroDivisionError("a bug"),
        hang,
    ],
)
async def test_job_waits_for_service_that_fails(answer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completing, "SECONDS_TO_COMPLETE", 0.01)
    before = FAULTS.counts["feature odd"]
    harness = await of_kernel(serve(answer)).settle()
    assert harness.jobs() == []
    assert harness.state(c.ACCEPTED) == ("False", c.FEATURE_FAULT)
    assert "the feature odd does not work" in harness.condition(c.ACCEPTED).message
    assert FAULTS.counts["feature odd"] > before
    harness.hooks.services["odd"].values = VALUES  # type: ignore[attr-defined]
    await harness.settle()
    assert harness.jobs() == ["train-1"]


async def test_started_job_continues_beside_service_that_fails() -> None:
    harness = await of_kernel(serve(VALUES)).train()
    harness.hooks.services["odd"].values = ZeroDivisionError()  # type: ignore[attr-defined]
    harness.restart_operator()
    harness.end_pod(0, constants.EXIT_RETRYABLE)
    await harness.train()
    assert (harness.status.attempt, harness.state(c.ACCEPTED)) == (2, ("True", "Valid"))
    assert harness.status.restarts.limit == 9


async def test_refusal_of_service_is_reported() -> None:
    harness = await of_kernel(serve(Refusal("ProfileNotFound", "no menu"))).settle()
    assert (harness.status.phase, harness.condition(c.ACCEPTED).message) == ("Pending", "no menu")
    assert harness.jobs() == []


@pytest.mark.parametrize("merge", [fail, *(lambda *_, answer=answer: answer for answer in (None, *GARBAGE[:2]))])
async def test_job_waits_for_merge_that_fails(merge: Callable[..., Any]) -> None:
    harness = await of_kernel(serve(VALUES, merge=merge)).settle()
    assert harness.jobs() == []
    assert harness.state(c.ACCEPTED) == ("False", "InvalidSpec")
    assert "with Menu day: spec.menu: the feature odd does not work" in harness.condition(c.ACCEPTED).message
    harness.hooks = serve(VALUES)
    await harness.restart_operator().reconcile(harness.key)
    await harness.settle()
    assert harness.jobs() == ["train-1"]


def test_merge_without_end_is_ended() -> None:
    def merge(*_: Any) -> Any:
        while True:
            pass

    with pytest.raises(StepTooLong):
        run_limited(complete_job, resource(), VALUES, build_schema((complete_by(merge=merge),)))


async def test_job_waits_if_no_service_finds_what_it_names() -> None:
    harness = of_kernel(Hooks((complete_by(),)), menu="day")
    await harness.settle()
    assert harness.jobs() == []
    assert harness.state(c.ACCEPTED) == ("False", c.FEATURE_FAULT)


async def test_job_waits_for_feature_that_has_completed_it() -> None:
    harness = await of_kernel(serve(VALUES)).train()
    jobs = harness.cluster.store.list("Job")
    harness.hooks = Hooks()
    harness.restart_operator()
    await harness.settle()
    assert harness.cluster.store.list("Job") == jobs
    assert "no feature of this operator completes jobs" in harness.condition(c.ACCEPTED).message


def build_context(**more: Any) -> ServiceContext:
    return ServiceContext(None, None, (), lambda key: None, **more)  # type: ignore[arg-type]


async def test_jobs_wait_for_service_that_cannot_start() -> None:
    feature = complete_by()
    object.__setattr__(feature, "start", fail)
    harness = await of_kernel(Hooks((feature,), start_services((feature,), {}, build_context))).settle()
    assert harness.jobs() == []
    assert harness.state(c.ACCEPTED) == ("False", c.FEATURE_FAULT)


def test_operator_does_not_start_with_invalid_setting() -> None:
    def start(context: ServiceContext) -> Any:
        assert "menu" in str(context.schema.spec.__struct_fields__)
        raise InvalidManifest([FieldError("DDP_OPERATOR_MENU", "no such menu")])

    feature = complete_by()
    object.__setattr__(feature, "start", start)
    with pytest.raises(InvalidManifest, match=r"^DDP_OPERATOR_MENU: "):
        start_services((feature,), {}, build_context)


class TestFiles:
    def test_job_of_file_is_completed(self) -> None:
        schema = build_schema((complete_by(),))
        manifest = parse_manifest(str(resource(menu="day")), schema, profiles=find_among([MENU]))
        assert manifest.job.spec.recovery.max_restarts == 9
        assert manifest.profile == VALUES
        assert parse_manifest(str(resource()), schema, profiles=find_among([MENU])).profile is None

    def test_missing_object_is_refused(self) -> None:
        with pytest.raises(InvalidManifest, match=r"^spec\.menu: Menu day does not exist; create it"):
            parse_manifest(str(resource(menu="day")), build_schema((complete_by(),)))

    @pytest.mark.parametrize("hook", ["refer", "read", "merge"])
    @pytest.mark.parametrize("answer", [*GARBAGE, ZeroDivisionError("a bug")])
    def test_fault_refuses_job(self, hook: str, answer: Any) -> None:
        schema = build_schema((complete_by(**{hook: fail if isinstance(answer, Exception) else lambda *_: answer}),))
        if hook == "merge" and isinstance(answer, dict):
            return  # of the right type; the parser refuses it
        with pytest.raises(InvalidManifest, match=r"^spec\.menu: the feature odd does not work"):
            parse_manifest(str(resource(menu="day")), schema, profiles=find_among([MENU]))

    def test_errors_of_who_finds_objects_are_no_faults(self) -> None:
        with pytest.raises(ZeroDivisionError):
            parse_manifest(str(resource(menu="day")), build_schema((complete_by(),)), profiles=fail)


def test_fields_without_default_may_be_left_to_what_is_named() -> None:
    schema = build_schema((complete_by(),))
    (rule,) = build_spec_schema(schema)["x-kubernetes-validations"]
    assert rule["rule"].startswith("has(self.menu) || (")
    assert "add it, or name a menu that has it in spec.menu" in rule["messageExpression"]
    (own,) = build_spec_schema(KERNEL)["x-kubernetes-validations"]
    assert own["rule"] == rule["rule"].removeprefix("has(self.menu) || ")
    assert check_rules(resource(menu="day", template=None), schema) == []


def test_completing_fields_are_one_features_at_most() -> None:
    assert present(find_completing(build_schema((complete_by(),)))).feature == "odd"
    assert find_completing(KERNEL) is None
