"""The launcher that the jobs of a namespace share: its owner, and other objects with its name."""

import asyncio
from typing import Any

import pytest

from ddp_operator.api import child_names, constants
from ddp_operator.api.cluster import ClusterError, Object, owner_uids
from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.api.parse import parse_resource
from ddp_operator.decide.state import Refusal
from ddp_operator.manifests.children import build_launcher_config_map, load_launcher
from ddp_operator.reconcile.executor import WAIT_FOR_COLLECTOR, Launchers
from tests.support.builders import job, resource
from tests.support.fake_cluster import FakeCluster, SteppedClock

NAME = child_names.launcher_config_map_name(load_launcher().digest)


class Namespace:
    """A cluster with jobs in one namespace, and an operator's actions for each."""

    def __init__(self) -> None:
        self.cluster = FakeCluster(SteppedClock())
        self.launchers = Launchers(self.cluster)

    def submit(self, name: str, **labels: str) -> DDPTrainingJob:
        return parse_resource(self.cluster.add(resource(name, labels=labels)))

    def delete(self, kind: str, name: str) -> None:
        self.cluster.store.delete(self.get(name, kind))

    def get(self, name: str, kind: str = "ConfigMap") -> Object:
        result = self.cluster.store.get(kind, "default", name)
        assert result is not None
        return result

    def config_maps(self) -> list[str]:
        return [item["metadata"]["name"] for item in self.cluster.store.list("ConfigMap")]

    async def calls_for(self, typed: DDPTrainingJob, *, seen: bool = True) -> list[str]:
        self.cluster.calls.clear()
        assert await self.launchers.ensure(typed, seen=seen) is None
        return self.cluster.calls


async def test_jobs_with_other_labels_share_launcher() -> None:
    space = Namespace()
    assert await space.launchers.ensure(space.submit("first", team="a"), seen=False) is None
    space.launchers = Launchers(space.cluster)  # an operator that has not verified the launcher
    assert await space.launchers.ensure(space.submit("second", team="b"), seen=False) is None
    assert {space.get(name)["metadata"]["labels"]["team"] for name in (NAME, constants.LAUNCHER_USERS)} == {"a"}


async def test_second_job_of_namespace_needs_one_patch() -> None:
    space = Namespace()
    first = space.submit("first")
    second = space.submit("second")
    assert await space.calls_for(first, seen=False) == ["create ConfigMap", "create ConfigMap"]
    launcher = space.get(NAME)
    assert (launcher["immutable"], launcher["data"]) == (True, {"launcher.py": load_launcher().bootstrap})
    assert await space.calls_for(second) == [f"own {constants.LAUNCHER_USERS}"]
    assert owner_uids(space.get(constants.LAUNCHER_USERS)) == {first.uid, second.uid}
    assert space.get(NAME) is launcher


async def test_launcher_is_deleted_with_last_job_and_recreated_with_next() -> None:
    space = Namespace()
    for name in ("first", "second"):
        await space.calls_for(space.submit(name))
    space.delete(constants.KIND, "first")
    assert space.config_maps() == [constants.LAUNCHER_USERS, NAME]
    space.delete(constants.KIND, "second")
    assert space.config_maps() == []
    third = space.submit("third")
    await space.calls_for(third)
    assert owner_uids(space.get(constants.LAUNCHER_USERS)) == {third.uid}
    assert space.config_maps() == [constants.LAUNCHER_USERS, NAME]


async def test_concurrent_jobs_need_one_patch_and_failure_is_isolated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    space = Namespace()
    await space.calls_for(space.submit("first"))
    more = [space.submit(f"job-{number}") for number in range(5)]
    space.cluster.calls.clear()
    answers: list[Exception | None] = [ClusterError("timeout"), None, None]
    add_owners = space.cluster.add_owners

    async def slow(*args: Any) -> Object | None:
        answer = answers.pop(0)
        await asyncio.sleep(0)  # the other jobs start
        if answer is not None:
            raise answer
        return await add_owners(*args)

    monkeypatch.setattr(space.cluster, "add_owners", slow)
    outcomes = await asyncio.gather(*(space.launchers.ensure(item, seen=True) for item in more), return_exceptions=True)
    assert [str(outcome) for outcome in outcomes] == ["timeout", *["None"] * 4]
    assert space.cluster.calls == [f"own {constants.LAUNCHER_USERS}"]
    assert {item.uid for item in more} <= owner_uids(space.get(constants.LAUNCHER_USERS))


async def test_second_operator_uses_existing_launcher_after_reading_it() -> None:
    space = Namespace()
    await space.calls_for(space.submit("first"))
    space.launchers = Launchers(space.cluster)
    again = [f"own {constants.LAUNCHER_USERS}", "create ConfigMap"]
    assert await space.calls_for(space.submit("second")) == ["create ConfigMap", *again]
    assert await space.calls_for(space.submit("third")) == again[:1]


async def test_missing_launcher_is_recreated() -> None:
    space = Namespace()
    first = space.submit("first")
    await space.calls_for(first)
    space.delete("ConfigMap", NAME)
    assert await space.calls_for(first, seen=False) == [f"own {constants.LAUNCHER_USERS}", "create ConfigMap"]
    assert space.config_maps() == [constants.LAUNCHER_USERS, NAME]


@pytest.mark.parametrize("kept", ["a former owner's", "being deleted"])
async def test_launcher_that_is_about_to_be_collected_is_waited_for(kept: str) -> None:
    space = Namespace()
    first = space.submit("first")
    await space.calls_for(first)
    launcher = space.get(NAME)
    users = space.get(constants.LAUNCHER_USERS)
    space.cluster.store.change(launcher, meta={"finalizers": ["example.org/hold"]})
    space.delete("ConfigMap", constants.LAUNCHER_USERS if kept == "a former owner's" else NAME)
    assert await space.launchers.ensure(first, seen=False) == WAIT_FOR_COLLECTOR
    space.cluster.store.change(launcher, meta={"finalizers": []})
    await space.calls_for(first, seen=False)
    assert space.get(NAME)["metadata"]["uid"] != launcher["metadata"]["uid"]
    same = space.get(constants.LAUNCHER_USERS)["metadata"]["uid"] == users["metadata"]["uid"]
    assert same is (kept == "being deleted")


async def test_terminating_users_list_is_waited_for() -> None:
    space = Namespace()
    await space.calls_for(space.submit("first"))
    users = space.get(constants.LAUNCHER_USERS)
    space.cluster.store.change(users, meta={"finalizers": ["example.org/hold"]})
    space.delete("ConfigMap", constants.LAUNCHER_USERS)
    assert await space.launchers.ensure(space.submit("second"), seen=True) == WAIT_FOR_COLLECTOR


OWN = child_names.child_labels("")


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        (constants.LAUNCHER_USERS, {"metadata": {"labels": {}}}),
        (constants.LAUNCHER_USERS, {"data": {"a": "somebody's"}}),
        (NAME, {"data": {"launcher.py": "print('somebody else')"}}),
        (NAME, {"immutable": False}),
        (NAME, {"metadata": {"labels": OWN, "ownerReferences": []}}),
    ],
    ids=["another's", "with data", "another launcher", "changeable", "left behind"],
)
async def test_foreign_object_is_neither_used_nor_owned(name: str, changes: dict[str, Any]) -> None:
    space = Namespace()
    made: dict[str, Any] = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"labels": OWN}}
    if name == NAME:
        made = build_launcher_config_map(job(), load_launcher(), "owner")
    made |= changes
    made["metadata"] = made["metadata"] | {"name": name, "namespace": "default"}
    stored = space.cluster.add(made)
    refusal = await space.launchers.ensure(space.submit("first"), seen=False)
    assert refusal == Refusal(
        "NameConflict",
        f"ConfigMap {name} in namespace default differs from the operator's; delete it, and the operator "
        f"creates its own: kubectl -n default delete configmap {name}",
    )
    assert space.get(name) is stored
