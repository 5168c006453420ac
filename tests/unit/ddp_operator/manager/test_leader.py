"""Leader election: by a Lease and each candidate's own clock, fenced by the remaining time of the last renewal."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest

from ddp_operator.api.cluster_errors import ClusterError
from ddp_operator.kube.client import ResponseError, StartupError
from ddp_operator.manager.leader import FENCE_SHARE, Leader, LeaseObservation, may_take

DURATION = 15
RENEWAL = DURATION * 2 / 15 * 1.2
"""Seconds during which a renewal is tried."""


class LeaseServer:
    """One Lease on a server, and a clock that only tests move."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self.version = 0
        self.now = 1000.0
        self.away = False
        self.lose_answer = False
        self.slow = 0.0
        self.writes: list[str] = []
        self._sleepers: list[tuple[float, asyncio.Future[None]]] = []

    async def request(self, method: str, path: str, *, body: Any = None, kind: str, urgent: bool) -> Any:
        assert (kind, urgent) == ("leases", True)
        self.now += self.slow
        if self.away:
            raise ClusterError("nobody there")
        if method == "GET":
            if self.lease is None:
                raise ResponseError(404)
            return copy.deepcopy(self.lease)
        if method == "POST" and self.lease is not None:
            raise ResponseError(409, {"reason": "AlreadyExists"})
        if method == "PUT":
            if self.lease is None:
                raise ResponseError(404)
            if body["metadata"]["resourceVersion"] != self.lease["metadata"]["resourceVersion"]:
                raise ResponseError(409, {"reason": "Conflict"})
        self.put(body)
        if self.lose_answer:
            self.lose_answer = False
            raise ClusterError("cut")
        return copy.deepcopy(self.lease)

    def put(self, body: Any) -> None:
        self.version += 1
        self.lease = copy.deepcopy(body)
        self.lease["metadata"]["resourceVersion"] = str(self.version)
        self.writes.append(self.holder)

    @property
    def holder(self) -> str:
        return str(self.lease and self.lease["spec"]["holderIdentity"])

    async def sleep(self, seconds: float) -> None:
        future = asyncio.get_running_loop().create_future()
        self._sleepers.append((self.now + seconds, future))
        await future

    async def advance(self, seconds: float) -> None:
        """Advance the time, and wake all sleepers that are due."""
        end = self.now + seconds
        while True:
            await settle()
            self._sleepers = [entry for entry in self._sleepers if not entry[1].done()]
            due = sorted((entry for entry in self._sleepers if entry[0] <= end), key=lambda entry: entry[0])
            if not due:
                break
            self.now = max(self.now, due[0][0])
            due[0][1].set_result(None)
        self.now = max(self.now, end)


async def settle() -> None:
    for _ in range(30):
        await asyncio.sleep(0)


class Candidate:
    """A Leader and whether it was asked to stop."""

    def __init__(self, place: LeaseServer, name: str) -> None:
        self.lost = 0
        self.leader = Leader(
            client=place,  # type: ignore[arg-type]
            namespace="home", name="ddp-operator", identity=name, duration=DURATION,
            on_lost=self._lose, clock=lambda: place.now, sleep=place.sleep,
        )  # fmt: skip
        self.task: asyncio.Task[None] | None = None

    def _lose(self) -> None:
        self.lost += 1

    def run(self) -> Candidate:
        self.task = asyncio.create_task(self.leader.acquire())
        return self

    async def end(self) -> None:
        if self.task is not None:
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)
        await self.leader.release()


@pytest.fixture
def place() -> LeaseServer:
    return LeaseServer()


def lease(version: str, holder: str | None, duration: int | None = DURATION) -> dict[str, Any]:
    return {
        "metadata": {"resourceVersion": version},
        "spec": {"holderIdentity": holder, "leaseDurationSeconds": duration},
    }


class TestObservedLease:
    @pytest.mark.parametrize(
        ("holder", "age", "free"),
        [("", 0, True), ("me", 0, True), ("other", 0, False), ("other", 14.9, False), ("other", 15, True)],
    )
    def test_lease_is_free_without_holder_or_without_renewal(self, holder: str, age: float, free: bool) -> None:
        assert may_take(LeaseObservation("1", holder, 15.0, 100.0), "me", 100.0 + age) is free


class TestAcquire:
    async def test_second_candidate_is_on_standby_while_leader_renews(self, place: LeaseServer) -> None:
        first = Candidate(place, "a").run()
        await settle()
        second = Candidate(place, "b").run()
        await place.advance(10 * DURATION)
        assert (first.leader.leads, second.leader.leads, second.leader.follows) == (True, False, "a")
        assert set(place.writes) == {"a"}
        await first.end()
        await second.end()

    async def test_released_lease_is_taken_at_next_check(self, place: LeaseServer) -> None:
        first = Candidate(place, "a").run()
        await settle()
        second = Candidate(place, "b").run()
        await place.advance(1)
        await first.end()
        assert place.holder == ""
        await place.advance(RENEWAL)
        assert (second.leader.leads, second.leader.follows) == (True, "")
        assert place.lease is not None
        assert place.lease["spec"]["leaseTransitions"] == 1
        await second.end()

    async def test_silent_leader_is_replaced_when_its_lease_expires_and_not_before(self, place: LeaseServer) -> None:
        place.put({"metadata": {}, "spec": {"holderIdentity": "gone", "leaseDurationSeconds": DURATION}})
        second = Candidate(place, "b").run()
        await place.advance(DURATION - 0.1)
        assert not second.leader.leads
        await place.advance(RENEWAL + 0.1)
        assert second.leader.leads
        await second.end()

    async def test_pod_of_holder_owns_lease(self, place: LeaseServer) -> None:
        """Kubernetes deletes the Lease with the pod, also if the operator may no longer release it."""
        place.put({"metadata": {"ownerReferences": [{"uid": "old"}]}, "spec": {"holderIdentity": ""}})
        first = Candidate(place, "a")
        first.leader.pod_uid = "u1"
        first.run()
        await settle()
        assert place.lease is not None
        owner = {"apiVersion": "v1", "kind": "Pod", "name": "a", "uid": "u1"}
        assert place.lease["metadata"]["ownerReferences"] == [owner]
        await first.end()

    async def test_lease_deleted_with_pod_of_holder_is_created_only_after_its_time(self, place: LeaseServer) -> None:
        place.put({"metadata": {}, "spec": {"holderIdentity": "gone", "leaseDurationSeconds": DURATION}})
        second = Candidate(place, "b").run()
        await settle()
        place.lease = None
        await place.advance(DURATION - 0.1)
        assert not second.leader.leads
        await place.advance(RENEWAL + 0.1)
        assert second.leader.leads
        await second.end()

    async def test_refusal_is_reported_in_one_line(self, place: LeaseServer, monkeypatch: pytest.MonkeyPatch) -> None:
        async def refuse(*args: Any, **kwargs: Any) -> Any:
            raise ResponseError(403, {"message": "leases is forbidden"})

        monkeypatch.setattr(place, "request", refuse)
        with pytest.raises(
            StartupError, match=r"cannot acquire lease home/ddp-operator: leases is forbidden \(HTTP 403\)"
        ):
            await Candidate(place, "a").leader.acquire()

    async def test_one_of_two_candidates_acquires_free_lease(self, place: LeaseServer) -> None:
        place.put({"metadata": {}, "spec": {"holderIdentity": ""}})
        both = [Candidate(place, "a").run(), Candidate(place, "b").run()]
        await settle()
        assert [candidate.leader.leads for candidate in both].count(True) == 1
        for candidate in both:
            await candidate.end()


class TestWriteFence:
    async def test_remaining_time_counts_from_before_renewing_call(self, place: LeaseServer) -> None:
        place.slow = 1.5  # GET, then POST: the second one counts
        first = Candidate(place, "a")
        await first.leader.acquire()
        assert first.leader.remaining() == DURATION - 1.5
        await first.end()

    async def test_no_write_starts_in_last_third(self, place: LeaseServer) -> None:
        first = Candidate(place, "a")
        await first.leader.acquire()
        place.now += DURATION * FENCE_SHARE - 0.01
        assert first.leader.remaining() > DURATION / 3
        place.now += 0.02
        assert first.leader.remaining() == 0
        await first.end()

    async def test_fence_closes_before_successor_can_start(self, place: LeaseServer) -> None:
        """The leader is frozen at the worst moment: right after a renewal that the other candidate has read."""
        first = Candidate(place, "a").run()
        await settle()
        frozen_at = place.now
        assert first.leader._task is not None
        first.leader._task.cancel()
        second = Candidate(place, "b").run()
        while not second.leader.leads:
            still = first.leader.remaining()
            await place.advance(0.05)
            assert not (second.leader.leads and still > 0)
        assert place.now - frozen_at >= DURATION
        await second.end()


class TestKeep:
    async def test_another_holder_ends_leader_at_once_without_write(self, place: LeaseServer) -> None:
        first = Candidate(place, "a").run()
        await settle()
        place.put({"metadata": {}, "spec": {"holderIdentity": "b", "leaseDurationSeconds": DURATION}})
        await place.advance(RENEWAL)
        assert (first.lost, first.leader.leads, place.holder) == (1, False, "b")
        await first.end()
        assert place.writes[-1] == "b"

    async def test_deleted_lease_ends_leader(self, place: LeaseServer) -> None:
        first = Candidate(place, "a").run()
        await settle()
        place.lease = None
        await place.advance(RENEWAL)
        assert (first.lost, first.leader.leads) == (1, False)
        await first.end()
        assert place.lease is None

    async def test_renewal_with_lost_response_keeps_leadership(self, place: LeaseServer) -> None:
        first = Candidate(place, "a").run()
        await settle()
        place.lose_answer = True
        await place.advance(2 * RENEWAL)
        assert (first.lost, first.leader.leads) == (0, True)
        await first.end()

    async def test_leader_continues_after_outage_without_other_leader(self, place: LeaseServer) -> None:
        first = Candidate(place, "a").run()
        await settle()
        place.away = True
        await place.advance(10 * DURATION)
        assert (first.lost, first.leader.leads) == (0, False)
        place.away = False
        await place.advance(RENEWAL)
        assert (first.lost, first.leader.leads) == (0, True)
        await first.end()

    async def test_failed_release_raises_nothing(self, place: LeaseServer) -> None:
        first = Candidate(place, "a").run()
        await settle()
        place.away = True
        await first.end()
        assert not first.leader.leads
