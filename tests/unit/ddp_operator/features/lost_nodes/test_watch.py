"""The service: when it asks the witnesses, what it concludes, and that it neither hurries nor repeats itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import datetime, timedelta
from typing import Any

import pytest
from msgspec.structs import replace

from ddp_operator.api.cluster import Key, Snapshot
from ddp_operator.api.constants import KIND
from ddp_operator.api.status import Status
from ddp_operator.decide.hooks import Hooks
from ddp_operator.features.lost_nodes.contacts import Contact
from ddp_operator.features.lost_nodes.evidence import LeaseAge
from ddp_operator.features.lost_nodes.leases import LeaseReading
from ddp_operator.features.lost_nodes.nodes import NodeReading
from ddp_operator.features.lost_nodes.readmission import STABLE
from ddp_operator.features.lost_nodes.returns import DELETED, LONGEST_ABSENCE
from ddp_operator.features.lost_nodes.watch import (
    MOST_NODES_AT_ONCE,
    MOST_SILENT,
    NodeWatch,
    _Followed,
    choose_listeners,
    view_group,
)
from ddp_operator.kube.cache import ObjectCache
from ddp_pod.contract.peers import PeerContact, PeerReport, choose_peer_steps
from tests.support.builders import NOW, Json, child_job, child_pod, job_manifest

TRAIN = Key("default", "train")
RUNNING = Status(phase="Running", attempt=1)
FRESH = LeaseReading(LeaseAge(4.0, 10.0))
LATE = LeaseReading(LeaseAge(14.0, 10.0))


def pod(index: int) -> Json:
    return child_pod(index, node=f"node-{index}", status={"podIP": f"10.0.0.{index}"})


class World:
    """Pods that answer or do not, and their nodes' Leases."""

    def __init__(self, pods: int = 2) -> None:
        self.now = NOW
        self.silent: dict[int, float] = {}
        """Seconds for which the peers have had no answer from a pod."""
        self.hints: tuple[int, ...] = ()
        self.tells_by_hints_only = False
        self.leases: dict[str, LeaseReading] = {}
        self.reads: list[str] = []
        self.boots: dict[str, str] = {}
        self.not_ready: set[str] = set()
        self.requests = 0
        self.frozen: set[int] = set()
        self.waits: list[int] = []
        self.is_old = False
        self.ended: set[int] = set()
        self.changes: list[Key] = []
        self.store = ObjectCache()
        resource = job_manifest("train", nodes=pods)
        resource["metadata"] |= {"uid": "uid-1", "resourceVersion": "1", "namespace": "default"}
        resource["status"] = {"attempt": 1}
        self.resource = resource
        self.store.apply(KIND, resource)
        for index, (kind, child) in enumerate([("Job", child_job()), *(("Pod", pod(index)) for index in range(pods))]):
            child["metadata"]["resourceVersion"] = str(index + 2)
            self.store.apply(kind, child)
        self.pods = pods
        self.watch = NodeWatch(
            self.store, self.changes.append, self.fetch, self.read, self.read_node, clock=self.clock, pause=0.0
        )
        self.watch.look_seconds = 0.0

    def clock(self) -> datetime:
        return self.now

    async def fetch(self, address: str, port: int, wait: int) -> Contact:
        await asyncio.sleep(0)
        self.requests += 1
        self.waits.append(wait)
        if self.is_old:
            return Contact("Answers")
        index = int(address.rpartition(".")[2])
        if index in self.ended:
            return Contact("Refused")
        if index in self.silent:
            return Contact("Silent")
        if index in self.frozen:
            return Contact("Frozen")
        peers = {(index + step) % self.pods for step in choose_peer_steps(self.pods)}
        contacts = tuple(PeerContact(pod=peer, silent_seconds=self.silent.get(peer)) for peer in sorted(peers))
        if wait and self.tells_by_hints_only and index not in (0, self.pods - 1):
            await asyncio.sleep(3600)
        return Contact("Answers", PeerReport(pod=index, contacts=contacts, hints=self.hints))

    async def read(self, node: str) -> LeaseReading:
        self.reads.append(node)
        return self.leases.get(node, FRESH)

    async def read_node(self, node: str) -> NodeReading:
        return NodeReading(self.boots.get(node, ""), node not in self.not_ready)

    def follow(self, status: Status = RUNNING) -> None:
        self.watch.note_status(Snapshot(self.resource), Status(), status, self.now)

    async def until(self, probe: Any) -> None:
        for _ in range(2000):
            if probe():
                return
            await asyncio.sleep(0.005)
        raise AssertionError("never happened")

    @property
    def lost(self) -> list[str]:
        found = self.watch.list_suspicions(TRAIN)
        return sorted(uid for uid, suspicion in found.items() if suspicion.is_lost)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World()
    world.follow()
    await asyncio.sleep(0.05)
    yield world
    await world.watch.close()


async def test_healthy_job_costs_no_read_of_a_lease(world: World) -> None:
    await asyncio.sleep(0.05)
    assert (world.reads, world.changes, world.watch.list_suspicions(TRAIN)) == ([], [], {})


async def test_launcher_of_older_release_is_not_asked_without_pause() -> None:
    world = World()
    world.is_old = True
    world.follow()
    await asyncio.sleep(0.2)
    assert world.waits == [0, 0, 3, 3]
    await world.watch.close()


async def test_pod_that_freezes_before_it_has_waited_for_a_reader_is_suspected() -> None:
    world = World()
    world.follow()
    await world.until(lambda: world.requests >= 4)
    assert world.waits[:4] == [0, 0, 3, 3]
    world.frozen.add(1)
    await world.until(lambda: "uid-train-1-1-abcde" in world.watch.list_suspicions(TRAIN))
    await world.watch.close()


async def test_many_jobs_are_asked_more_rarely() -> None:
    world = World()
    waits = []
    for jobs in (1, 100, 2000):
        world.watch._jobs = {Key("default", f"job-{number}"): _Followed(9400) for number in range(jobs)}
        waits.append(world.watch._wait)
    assert waits == [3, 5, 8]


async def test_silent_pod_is_suspected_and_then_lost(world: World) -> None:
    world.silent[1] = 2.0
    await world.until(lambda: world.watch.list_suspicions(TRAIN))
    assert world.lost == []
    assert set(world.reads) == {"node-0", "node-1"}
    world.leases["node-1"] = LATE
    world.silent[1] = 7.0
    await world.until(lambda: world.lost)
    assert world.lost == ["uid-train-1-1-abcde"]
    assert world.changes == [TRAIN, TRAIN], "one pass for each new conclusion"


@pytest.mark.parametrize(("boot", "text"), [("second", "has restarted"), (DELETED, "was deleted")])
async def test_silent_pod_of_a_node_that_has_ended_is_lost_although_its_lease_is_renewed(
    world: World, boot: str, text: str
) -> None:
    world.boots["node-1"] = "first"
    world.silent[1] = 9.0
    await world.until(lambda: world.watch.list_suspicions(TRAIN))
    assert not world.lost
    world.boots["node-1"] = ""  # the API server cannot be reached
    await asyncio.sleep(0.05)
    assert not world.lost
    world.boots["node-1"] = boot
    await world.until(lambda: world.lost)
    [suspicion] = world.watch.list_suspicions(TRAIN).values()
    assert f"its node {text}" in suspicion.message


async def test_pod_is_lost_once_its_node_is_back_before_that_was_concluded(world: World) -> None:
    world.boots["node-1"] = "first"
    world.silent[1] = 5.0
    await world.until(lambda: world.watch.list_suspicions(TRAIN))
    world.silent.clear()
    world.ended.add(1)  # its machine refuses the connections of all peers
    await world.until(lambda: not world.watch.list_suspicions(TRAIN))
    assert not world.lost
    world.boots["node-1"] = "second"
    await world.until(lambda: world.lost)
    [suspicion] = world.watch.list_suspicions(TRAIN).values()
    assert suspicion.message == "its machine answers, but its launcher has ended: its node has restarted"


async def test_pod_whose_launcher_has_ended_on_a_node_of_the_same_boot_is_not_lost(world: World) -> None:
    world.boots["node-1"] = "first"
    world.silent[1] = 5.0
    await world.until(lambda: world.watch.list_suspicions(TRAIN))
    world.silent.clear()
    world.ended.add(1)
    requests = world.requests
    await world.until(lambda: world.requests > requests + 50)
    assert not world.watch.list_suspicions(TRAIN)


async def test_return_of_a_lost_node_is_noted_under_the_name_of_its_pod(world: World) -> None:
    world.boots["node-1"] = "first"
    world.silent[1] = 9.0
    world.leases["node-1"] = LATE
    await world.until(lambda: world.lost)
    world.silent.clear()
    await world.until(lambda: not world.watch.list_suspicions(TRAIN))
    changes = len(world.changes)
    world.boots["node-1"] = "second"
    await world.until(lambda: world.watch.list_suspicions(TRAIN))
    assert len(world.changes) == changes + 1
    [(name, suspicion)] = world.watch.list_suspicions(TRAIN).items()
    assert (name, suspicion.message, suspicion.is_lost) == (
        pod(1)["metadata"]["name"],
        "node node-1 has restarted",
        False,
    )


async def test_node_that_does_not_return_is_forgotten(world: World) -> None:
    world.silent[1] = 9.0
    world.leases["node-1"] = LATE
    await world.until(lambda: world.lost)
    world.silent.clear()
    world.now += LONGEST_ABSENCE + timedelta(seconds=1)
    await world.until(lambda: not world.watch._jobs[TRAIN].lost)
    assert not world.watch.list_suspicions(TRAIN)


AVOIDING = replace(RUNNING, failed_nodes=("node-1", "node-9")).remember(lost_nodes=("node-1",))


@pytest.fixture
async def avoiding(world: World) -> AsyncIterator[World]:
    """Return a world in which the job avoids node-1, which it has lost, and node-9 for another reason."""
    world.follow(AVOIDING)
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(world.watch.run())
        yield world
        task.cancel()


async def pass_time(world: World, seconds: float, step: float = 15.0) -> None:
    for _ in range(round(seconds / step)):
        world.now += timedelta(seconds=step)
        reads = len(world.reads)
        await world.until(lambda reads=reads: len(world.reads) >= reads + 2)  # the second one began after the change


async def test_lost_node_that_is_ready_for_a_while_has_returned(avoiding: World) -> None:
    await pass_time(avoiding, 0, 1)
    await avoiding.until(lambda: avoiding.reads)
    await pass_time(avoiding, STABLE.total_seconds() - 15)
    assert (avoiding.watch.list_returned_nodes(), avoiding.changes) == (frozenset(), [])
    await pass_time(avoiding, 30)
    assert avoiding.watch.list_returned_nodes() == {"node-1"}
    assert avoiding.changes == [TRAIN]
    assert set(avoiding.reads) == {"node-1"}, "no other node is read"


@pytest.mark.parametrize("obstacle", ["lease", "unreadable", "node"])
async def test_node_that_is_silent_in_between_is_awaited_anew(avoiding: World, obstacle: str) -> None:
    await pass_time(avoiding, 45)
    if obstacle == "node":
        avoiding.not_ready.add("node-1")
    else:
        avoiding.leases["node-1"] = LATE if obstacle == "lease" else LeaseReading(None, "no right")
    await pass_time(avoiding, 15)
    avoiding.not_ready.clear()
    avoiding.leases.clear()
    await pass_time(avoiding, STABLE.total_seconds() - 15)
    assert avoiding.watch.list_returned_nodes() == frozenset()
    await pass_time(avoiding, 30)
    assert avoiding.watch.list_returned_nodes() == {"node-1"}


async def test_returned_node_that_is_lost_again_is_no_longer_ready(avoiding: World) -> None:
    await pass_time(avoiding, 90)
    assert avoiding.watch.list_returned_nodes() == {"node-1"}
    avoiding.watch.look_seconds = 3600.0  # the loss is known before the next reading
    avoiding.boots["node-1"] = "first"
    avoiding.silent[1] = 9.0
    await avoiding.until(lambda: avoiding.watch.list_suspicions(TRAIN))
    avoiding.boots["node-1"] = "second"
    await avoiding.until(lambda: avoiding.lost)
    assert avoiding.watch.list_returned_nodes() == frozenset()


async def test_nodes_that_no_job_avoids_are_not_read(avoiding: World) -> None:
    await pass_time(avoiding, 90)
    avoiding.follow(RUNNING)
    await avoiding.until(lambda: not avoiding.watch.list_returned_nodes())
    reads = len(avoiding.reads)
    await asyncio.sleep(0.05)
    assert len(avoiding.reads) == reads


async def test_suspicion_ends_when_the_pod_answers(world: World) -> None:
    world.silent[1] = 2.0
    await world.until(lambda: world.watch.list_suspicions(TRAIN))
    world.silent.clear()
    await world.until(lambda: not world.watch.list_suspicions(TRAIN))
    assert world.changes == [TRAIN, TRAIN]


async def test_pod_0_is_found_by_its_witness(world: World) -> None:
    world.silent[0] = 7.0
    world.leases["node-0"] = LATE
    await world.until(lambda: world.lost)
    assert world.lost == ["uid-train-1-0-abcde"]


async def test_outage_of_api_server_makes_no_pod_lost(world: World) -> None:
    world.leases |= {"node-0": LATE, "node-1": LATE}
    world.silent[1] = 9.0
    await world.until(lambda: world.watch.list_suspicions(TRAIN))
    await asyncio.sleep(0.05)
    assert world.lost == []


@pytest.mark.parametrize("phase", ["Succeeded", "Failed", "Pending", "Suspended"])
async def test_job_that_does_not_train_is_followed_no_longer(world: World, phase: Any) -> None:
    world.silent[1] = 2.0
    await world.until(lambda: world.watch.list_suspicions(TRAIN))
    world.follow(Status(phase=phase, attempt=1))
    assert world.watch.list_suspicions(TRAIN) == {}


async def test_deleted_job_is_followed_no_longer(world: World) -> None:
    hooks = Hooks(services={"lost-nodes": world.watch})
    assert TRAIN in world.watch._jobs
    hooks.forget(TRAIN)
    await asyncio.sleep(0.05)  # requests that have begun are cancelled
    requests = world.requests
    await asyncio.sleep(0.05)
    assert (world.watch._jobs, world.requests) == ({}, requests)


@pytest.mark.parametrize("phase", ["Running", "Pending"])
async def test_running_job_is_followed_from_the_first_pass_of_an_operator_without_a_change(phase: Any) -> None:
    world = World()
    status = {"attempt": 1, "phase": phase, "failedNodes": ["a"], "operatorState": {"version": 1, "lostNodes": ["a"]}}
    world.resource |= {"status": status, "metadata": world.resource["metadata"] | {"resourceVersion": "9"}}
    world.store.apply(KIND, world.resource)
    assert world.watch.list_suspicions(TRAIN) == {}
    assert [followed.awaited for followed in world.watch._jobs.values()] == [{"a"}] * (phase == "Running")
    await world.watch.close()


async def test_number_of_nodes_lost_in_a_minute_is_limited() -> None:
    world = World(pods=24)
    world.follow()
    await asyncio.sleep(0.1)
    lost = range(1, MOST_NODES_AT_ONCE + 3)
    world.leases |= {f"node-{index}": LATE for index in lost}
    world.silent |= dict.fromkeys(lost, 9.0)
    await world.until(lambda: len(world.lost) == MOST_NODES_AT_ONCE)
    await world.until(lambda: any("waits" in item.message for item in world.watch.list_suspicions(TRAIN).values()))
    assert len(world.lost) == MOST_NODES_AT_ONCE
    world.now += timedelta(seconds=61)
    await world.until(lambda: len(world.watch._declared) <= MOST_NODES_AT_ONCE)
    await world.watch.close()


async def test_pods_beyond_those_examined_count_among_the_silent() -> None:
    world = World(pods=40)
    world.follow()
    await asyncio.sleep(0.1)
    lost = range(20, 20 + MOST_SILENT + 6)
    world.leases |= {f"node-{index % 40}": LATE for index in lost}
    world.silent |= {index % 40: 9.0 for index in lost}
    suspicions = world.watch.list_suspicions
    await world.until(lambda: any("22/40 nodes" in item.message for item in suspicions(TRAIN).values()))
    assert world.lost == []
    await world.watch.close()


async def test_pods_that_end_or_have_no_address_are_no_members() -> None:
    world = World(pods=4)
    ended = child_pod(3, "Succeeded")
    ended["metadata"]["resourceVersion"] = "99"
    world.store.apply("Pod", ended)
    group = view_group(world.store.snapshot(TRAIN), 9400)
    assert sorted(group.pods) == [0, 1, 2]
    assert [list(choose_listeners(group, turn)) for turn in range(3)] == [[0, 2], [0, 2, 1], [0, 2]]
    assert view_group(None, 9400).pods == {}


async def test_hint_lets_operator_ask_the_witnesses_of_a_pod_that_it_does_not_hear_of() -> None:
    world = World(pods=64)
    world.tells_by_hints_only = True
    world.hints = (40, 99)
    world.silent[40] = 7.0
    world.leases["node-40"] = LATE
    world.follow()
    await world.until(lambda: world.lost)
    assert world.lost == ["uid-train-1-40-abcde"]
    await world.watch.close()


async def test_hint_about_a_living_pod_is_followed_once(world: World) -> None:
    world.hints = (1,)
    await asyncio.sleep(0.2)
    assert len(world.reads) == 2, "of the pod's node and of another one"
    assert world.watch.list_suspicions(TRAIN) == {}


async def test_hints_about_pods_that_the_job_does_not_have_are_not_kept(world: World) -> None:
    world.hints = (1, 7, 10**9)
    await world.until(lambda: world.reads)
    assert set(world.watch._jobs[TRAIN].hinted) == {1}
