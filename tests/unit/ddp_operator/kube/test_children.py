"""Which objects are children, and the small part of a hostile one that is kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from ddp_operator.api import constants
from ddp_operator.api.cluster import Key
from ddp_operator.decide.losses import _awaits_peers
from ddp_operator.kube.cache import ObjectCache
from ddp_operator.kube.children import key_of, trim_metadata, trim_object
from ddp_operator.kube.client import OBJECT_BYTES, PAGE_BYTES, AnswerTooLarge, pages
from ddp_operator.manifests.children import build_children
from ddp_operator.reading.objects import view_job, view_pod
from tests.support.builders import Json, child_job, child_pod, job

KEY = Key("default", "train")
MEGABYTE = "x" * 2**20


def without_owner(item: Json) -> None:
    del item["metadata"]["ownerReferences"]


def without_label(item: Json) -> None:
    del item["metadata"]["labels"][constants.LABEL_JOB_NAME]


def of_no_controller(item: Json) -> None:
    item["metadata"]["ownerReferences"][0]["controller"] = False


def of_other_kind(item: Json) -> None:
    item["metadata"]["ownerReferences"][0]["kind"] = "CronJob"


def of_other_name(item: Json) -> None:
    item["metadata"]["ownerReferences"][0]["name"] = "other-1"


@pytest.mark.parametrize("build", [child_job, child_pod])
@pytest.mark.parametrize("change", [without_owner, without_label, of_no_controller, of_other_kind, of_other_name])
def test_labelled_object_without_controller_is_no_child(
    build: Callable[[], Json], change: Callable[[Json], None]
) -> None:
    kind = "Job" if build is child_job else "Pod"
    item = build()
    assert key_of(kind, item["metadata"]) == KEY
    change(item)
    store = ObjectCache()
    assert store.apply(kind, item) is None
    assert len(store) == 0


def test_child_that_loses_its_controller_is_dropped_and_its_resource_is_reconciled() -> None:
    store = ObjectCache()
    item = child_job()
    item["metadata"]["resourceVersion"] = "5"
    assert store.apply("Job", item) == KEY
    del item["metadata"]["ownerReferences"]
    assert store.apply("Job", item) is None, "the same version"
    item["metadata"]["resourceVersion"] = "6"
    assert store.apply("Job", item) == KEY
    assert len(store) == 0


def fill(item: Json) -> Json:
    """Make every field of an object that a tenant may write a megabyte long."""
    meta = item["metadata"]
    meta["labels"] |= {f"a.example/{number}": "x" * 60 for number in range(10_000)}
    meta["labels"] |= {f"{constants.GROUP}/{number}": "x" * 60 for number in range(10_000)}
    meta.setdefault("annotations", {}).update({"a": MEGABYTE, f"{constants.KUEUE_DOMAIN}/a": MEGABYTE})
    meta["ownerReferences"] = [*({"uid": str(number)} for number in range(10_000)), *meta["ownerReferences"]]
    meta["managedFields"] = [MEGABYTE]
    pod = item["spec"].setdefault("template", {}).setdefault("spec", {}) if item["kind"] == "Job" else item["spec"]
    pod |= {
        "containers": [{"name": "trainer", "env": [{"name": constants.ENV_LAUNCHER_CONFIG, "value": MEGABYTE}]}],
        "initContainers": [{"name": str(number), "restartPolicy": "Always"} for number in range(10_000)],
        "schedulingGates": [{"name": str(number)} for number in range(10_000)],
        "tolerations": [{"key": MEGABYTE}],
        "volumes": [{"name": constants.LAUNCHER_VOLUME, "configMap": {"name": "l", "items": [MEGABYTE]}}],
        "affinity": {
            "podAffinity": MEGABYTE,
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [
                        {"matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": [MEGABYTE]}] * 99}
                    ]
                }
            },
        },
    }
    return item


@pytest.mark.parametrize("kind", ["Job", "Pod"])
def test_child_of_megabytes_is_kept_in_some_kilobytes_with_its_controller(kind: str) -> None:
    item = fill(child_job() if kind == "Job" else child_pod())
    trimmed = trim_object(kind, item)
    assert len(msgspec.json.encode(trimmed)) < 16_384
    assert key_of(kind, trimmed["metadata"]) == KEY


@pytest.mark.parametrize("kind", ["Service", "ConfigMap", "NetworkPolicy"])
def test_metadata_of_shared_children_of_megabytes_is_kept_in_some_kilobytes(kind: str) -> None:
    meta = fill(child_job())["metadata"]
    assert len(msgspec.json.encode(trim_metadata(kind, meta))) < 16_384


def test_view_of_trimmed_job_equals_view_of_whole_job() -> None:
    labels = {constants.KUEUE_QUEUE_LABEL: "q"}
    typed = job(nodes=2)
    [built] = [child for child in build_children(typed, attempt=1, nodes=2) if child["kind"] == "Job"]
    built = {**built, "status": {"active": 2, "startTime": "2026-11-20T12:00:00Z"}}
    built["metadata"] = built["metadata"] | {"uid": "u", "labels": built["metadata"]["labels"] | labels}
    built["spec"]["template"]["metadata"]["labels"][constants.KUEUE_PODSET_LABEL] = "main"
    built["spec"]["template"]["spec"]["schedulingGates"] = [{"name": constants.KUEUE_ELASTIC_GATE}]
    built["spec"]["template"]["spec"]["schedulingGroup"] = {"podGroupName": "train-1"}
    whole = view_job(built)
    trimmed = view_job(trim_object("Job", built))
    fields = [name for name in whole.__slots__ if name != "raw"]
    assert {name: getattr(trimmed, name) for name in fields} == {name: getattr(whole, name) for name in fields}
    assert (bool(whole.launcher), whole.ganged) == (True, True)
    assert _awaits_peers(trimmed) == _awaits_peers(whole) == True  # noqa: E712


def test_view_of_trimmed_pod_equals_view_of_whole_pod() -> None:
    avoid = {"key": "metadata.name", "operator": "NotIn", "values": ["n"]}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchFields": [avoid]}]}}
    spec = {
        "containers": [{"name": "proxy"}, {"name": "trainer"}],
        "initContainers": [{"name": "sidecar", "restartPolicy": "Always"}, {"name": "setup"}],
        "affinity": {"nodeAffinity": required},
    }
    item = child_pod(0, "Failed", code=1, message="words", spec=spec)
    whole = view_pod(item)
    trimmed = view_pod(trim_object("Pod", item))
    fields = [name for name in whole.__slots__ if name != "raw"]
    assert {name: getattr(trimmed, name) for name in fields} == {name: getattr(whole, name) for name in fields}
    assert trimmed.avoided_nodes == whole.avoided_nodes == ("n",)


class Lists:
    """An API server with objects of a certain size; it sends no more than the caller reads."""

    def __init__(self, *sizes: int) -> None:
        self.sizes = sizes
        self.limits: list[int] = []

    async def request(self, method: str, path: str, *, params: dict[str, str], max_bytes: int, **options: Any) -> Json:
        limit = int(params["limit"])
        first = int(params.get("continue", "0"))
        self.limits.append(limit)
        if sum(self.sizes[first : first + limit]) > max_bytes:
            raise AnswerTooLarge
        rest = {"continue": str(first + limit)} if first + limit < len(self.sizes) else {}
        return {"items": list(range(first, min(first + limit, len(self.sizes)))), "metadata": rest}


async def read(server: Lists, limit: int = 8) -> list[int]:
    items: list[int] = []
    async for page in pages(server, "Job", None, {"limit": str(limit)}):  # type: ignore[arg-type]
        items += page["items"]
    return items


async def test_page_of_large_objects_is_read_again_with_fewer_and_grows_after_them() -> None:
    large = PAGE_BYTES // 2
    server = Lists(*[large] * 4, *[1] * 20)
    assert await read(server) == list(range(24))
    assert server.limits == [8, 4, 2, 4, 2, 4, 8, 8]


async def test_object_larger_than_page_is_read_alone() -> None:
    server = Lists(1, PAGE_BYTES + 1, 1)
    assert await read(server) == [0, 1, 2]
    with pytest.raises(AnswerTooLarge):
        await read(Lists(OBJECT_BYTES + 1))
