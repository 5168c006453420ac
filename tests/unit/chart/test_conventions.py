"""Values that users of Helm expect in every chart: mirrors, spreading, priority, labels."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.chart import CHART, of_kind, read_values, render, the

from .test_rendering import submitted

DIGEST = f"sha256:{'a' * 64}"


def pod_spec(values: dict[str, Any]) -> dict[str, Any]:
    """Return the spec of the operator's pod."""
    return the(render(values), "Deployment")["spec"]["template"]["spec"]


def list_images(values: dict[str, Any]) -> list[str]:
    """Return the images of the operator, of the test's pod, and of the job that the test submits."""
    objects = render(values)
    pods = [pod["spec"] for pod in of_kind(objects, "Pod")]
    job = json.loads(submitted(objects))
    pods += [pod_spec(values), job["spec"]["template"]["spec"]]
    return sorted({container["image"] for pod in pods for container in pod["containers"]})


def test_global_registry_replaces_the_registry_of_every_image() -> None:
    images = list_images({"global": {"imageRegistry": "mirror.example"}, "image": {"registry": "other.example"}})
    assert len(images) == 2
    assert all(image.startswith("mirror.example/ddp-operator/") for image in images)


def test_digests_take_precedence_over_tags() -> None:
    values = {"image": {"digest": DIGEST, "tag": "1"}, "tests": {"digest": DIGEST}}
    assert list_images(values) == [f"localhost/ddp-operator/{name}@{DIGEST}" for name in ("operator", "trainer")]


def test_test_image_by_name_is_not_changed_by_the_global_registry() -> None:
    values = {"global": {"imageRegistry": "mirror.example"}, "tests": {"image": "other.example/trainer:1"}}
    assert "other.example/trainer:1" in list_images(values)


def test_spread_constraint_without_selector_counts_the_operator_pods() -> None:
    constraint = {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}
    own = {**constraint, "labelSelector": {"matchLabels": {"mine": "yes"}}}
    objects = render({"topologySpreadConstraints": [constraint, own]})
    deployment = the(objects, "Deployment")["spec"]
    first, second = deployment["template"]["spec"]["topologySpreadConstraints"]
    assert first == {**constraint, "labelSelector": deployment["selector"]}
    assert second == own


@pytest.mark.parametrize("name", ["spread", "locked-down"])
def test_common_labels_are_on_every_object_and_every_pod(name: str) -> None:
    values = read_values(CHART / f"ci/{name}-values.yaml")
    labels = values["commonLabels"].items()
    objects = render(values)
    job = json.loads(submitted(objects))
    templates = [the(objects, "Deployment")["spec"]["template"], job["spec"]["template"]]
    for item in [*objects, job, *templates]:
        assert labels <= item["metadata"]["labels"].items()
