"""Children that features add to a job: created before the pods, compared, created again, and replaced."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import yaml

from ddp_operator.api import constants
from ddp_operator.api.errors import InvalidManifest
from ddp_operator.api.faults import FAULTS
from ddp_operator.api.parse import parse_resource
from ddp_operator.api.parts import ChildBody, OwnChild, PodAddition
from ddp_operator.api.schema import OwnFields
from ddp_operator.api.spec import SpecFields
from ddp_operator.decide import conditions as c
from ddp_operator.decide.hooks import Feature, Hooks, build_schema
from ddp_operator.manifests.children import build_children
from tests.support.builders import Json, resource
from tests.support.fake_cluster import ReconcilerHarness


class WallFields(SpecFields, frozen=True, kw_only=True):
    """The part of the feature in the spec."""

    wall: int | None = None


def wants(job: Any) -> bool:
    return WALL.read(job.spec).wall is not None


def build_wall(job: Any, nodes: int) -> ChildBody:
    part = {"height": WALL.read(job.spec).wall}
    return ChildBody("example.com/v1", {"left": part, "right": part})


def build_flag(job: Any, nodes: int) -> ChildBody:
    return ChildBody("example.com/v1", {"nodes": nodes})


def add(job: Any, template: Any, attempt: int) -> PodAddition:
    name = f"flag-{attempt}"
    return PodAddition(labels={"flag": name}, annotations={"flag": name}, fields={"flag": name, "schedulerName": "own"})


FLAG = OwnChild("Flag", wants, build_flag)
SHARED = OwnChild("Wall", wants, build_wall, is_shared=True)
WALL = OwnFields("wall", WallFields, pod=add, children=(FLAG, SHARED))


def hooks_of(part: OwnFields[Any] = WALL) -> Hooks:
    return Hooks((Feature("wall", maturity="experimental", page="x.md", fields=part),))


def start(part: OwnFields[Any] = WALL, **spec: Any) -> ReconcilerHarness:
    """Return a job with the children of the feature."""
    harness = ReconcilerHarness(hooks=hooks_of(part), **{"wall": 3, **spec})
    harness.cluster.shared_kinds = frozenset({"Wall"})
    return harness


def build(part: OwnFields[Any] = WALL, *, attempt: int = 1, **spec: Any) -> list[Json]:
    raw = resource(**{"nodes": 2, "wall": 3, **spec})
    raw["metadata"] |= {"uid": "u"}
    return build_children(parse_resource(raw, build_schema(tuple(hooks_of(part).features))), attempt=attempt, nodes=2)


def test_children_precede_job_the_shared_ones_first() -> None:
    *_, wall, flag, job = build(attempt=3)
    assert [child["kind"] for child in (wall, flag, job)] == ["Wall", "Flag", "Job"]
    assert (wall["metadata"]["name"], flag["metadata"]["name"]) == ("train", "train-3")
    assert constants.LABEL_ATTEMPT not in wall["metadata"]["labels"]
    assert flag["metadata"]["labels"][constants.LABEL_ATTEMPT] == "3"
    assert (
        wall["metadata"]["ownerReferences"] == flag["metadata"]["ownerReferences"] == job["metadata"]["ownerReferences"]
    )
    assert (wall["apiVersion"], flag["spec"]) == ("example.com/v1", {"nodes": 2})
    assert "&" not in yaml.safe_dump(wall), "`ddp render` writes no references"
    assert [child["kind"] for child in build(wall=None)][-2:] == ["ConfigMap", "Job"]


def test_pods_of_attempt_get_labels_and_unset_fields() -> None:
    pod = build(attempt=3)[-1]["spec"]["template"]
    assert (pod["metadata"]["labels"]["flag"], pod["metadata"]["annotations"]["flag"]) == ("flag-3", "flag-3")
    assert (pod["spec"]["flag"], pod["spec"]["schedulerName"]) == ("flag-3", "own")
    written = resource()["spec"]["template"]
    written["spec"] |= {"schedulerName": "mine", "flag": ""}
    pod = build(template=written)[-1]["spec"]["template"]
    assert (pod["spec"]["flag"], pod["spec"]["schedulerName"]) == ("flag-1", "mine")


def fail(*_: Any) -> Any:
    raise ZeroDivisionError("a bug")


def answer(value: Any) -> Callable[..., Any]:
    return lambda *_: value


@pytest.mark.parametrize(
    "part",
    [
        replace(WALL, children=(replace(FLAG, wants=fail),)),
        replace(WALL, children=(replace(FLAG, wants=answer(None)),)),
        replace(WALL, children=(replace(FLAG, wants=answer("yes")),)),
        replace(WALL, children=(replace(FLAG, build=fail),)),
        replace(WALL, children=(replace(FLAG, build=answer(None)),)),
        replace(WALL, children=(replace(FLAG, build=answer(("v1", {}))),)),
        replace(WALL, children=(replace(FLAG, build=answer(ChildBody("v1", 7))),)),  # type: ignore[arg-type]
        replace(WALL, children=(replace(FLAG, build=answer(ChildBody("v1", {"a": object()}))),)),
        replace(WALL, pod=fail),
        replace(WALL, pod=answer({"labels": {}})),
        replace(WALL, plan=answer(None)),
    ],
)
async def test_fault_of_hook_makes_job_wait_without_pods(part: OwnFields[Any]) -> None:
    before = FAULTS.counts["feature wall"]
    with pytest.raises(InvalidManifest, match=r"^spec\.wall: the feature wall does not work"):
        build(part)
    assert FAULTS.counts["feature wall"] == before + 1
    harness = await start(part).settle()
    assert harness.jobs() == []
    assert harness.state(c.ACCEPTED) == ("False", c.INVALID_SPEC)
    harness.hooks = hooks_of()
    harness.restart_operator()
    await harness.settle()
    assert harness.jobs() == ["train-1"]


async def test_children_are_tried_before_first_pod() -> None:
    harness = start()
    await harness.reconcile()
    calls = harness.cluster.calls
    assert [call for call in calls if call.startswith("dry-run")] == [
        *("dry-run Job", "dry-run Flag", "dry-run Wall", "dry-run Service"),
    ]
    assert calls[-4:] == ["create Wall", "create Flag", "create Job", "status"]


async def test_fault_that_begins_later_makes_next_attempt_wait() -> None:
    answers: list[Any] = []

    def build_or_fail(job: Any, nodes: int) -> ChildBody:
        if answers:
            raise ZeroDivisionError("a bug")
        return build_flag(job, nodes)

    harness = await start(replace(WALL, children=(replace(FLAG, build=build_or_fail),))).train()
    answers.append("broken")
    harness.end_pod(0, constants.EXIT_RETRYABLE)
    await harness.settle()
    assert harness.status.attempt == 2
    assert "train-2" not in harness.jobs()
    assert "the feature wall does not work" in harness.condition(c.ACCEPTED).message
    answers.clear()
    harness.restart_operator()
    await harness.train()
    assert "train-2" in harness.jobs()


async def test_child_of_former_attempt_is_deleted_and_shared_one_stays() -> None:
    harness = await start().train()
    [wall] = harness.cluster.store.list("Wall")
    harness.end_pod(0, constants.EXIT_RETRYABLE)
    await harness.train()
    assert harness.status.attempt == 2
    assert [flag["metadata"]["name"] for flag in harness.cluster.store.list("Flag")] == ["train-2"]
    assert [shared["metadata"]["uid"] for shared in harness.cluster.store.list("Wall")] == [wall["metadata"]["uid"]]


async def test_deleted_shared_child_is_created_again_while_pods_run() -> None:
    harness = await start().train()
    [wall] = harness.cluster.store.list("Wall")
    harness.cluster.store.delete(wall)
    await harness.settle()
    [again] = harness.cluster.store.list("Wall")
    assert again["metadata"]["uid"] != wall["metadata"]["uid"]
    assert (again["spec"], harness.status.attempt) == (wall["spec"], 1)


@pytest.mark.parametrize("spec", [{"left": {"height": 3}, "right": {"height": 3}}, {"left": {"height": 0}}])
async def test_shared_child_that_was_there_is_compared(spec: Json) -> None:
    harness = start(suspend=True)
    await harness.settle()
    assert harness.raw is not None
    made = next(child for child in build() if child["kind"] == "Wall")
    made = json.loads(json.dumps(made).replace('"u"', json.dumps(harness.raw["metadata"]["uid"]))) | {"spec": spec}
    harness.cluster.store.add(made)
    harness.edit(suspend=False)
    await harness.settle()
    if "right" in spec:
        assert harness.jobs() == ["train-1"]
        return
    assert harness.jobs() == []
    assert harness.state(c.ACCEPTED) == ("False", c.NAME_CONFLICT)
    assert "Wall train" in harness.condition(c.ACCEPTED).message


@pytest.mark.parametrize(
    "part",
    [
        replace(WALL, children=(replace(SHARED, wants=fail),)),
        replace(WALL, pod=fail),
        replace(WALL, plan=fail),
        replace(WALL, check=fail),
    ],
)
async def test_fault_of_hook_leaves_job_alone_that_asks_for_nothing_of_feature(part: OwnFields[Any]) -> None:
    before = FAULTS.counts["feature wall"]
    harness = await start(part, wall=None).train()
    assert (harness.status.phase, harness.jobs()) == ("Running", ["train-1"])
    assert FAULTS.counts["feature wall"] > before
