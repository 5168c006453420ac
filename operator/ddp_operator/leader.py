"""Leadership: of several operators one works, the others stand by. A Lease in the operator's own namespace says which.

The rules are those of client-go: the leader renews the Lease, and a candidate takes it over once it has not seen it
change for as long as the Lease says, by its own clock, so that no two clocks need to agree. Two things are stricter.

**Fence.** A leader writes nothing after the time for which its last renewal is good, counted from before that call was
sent; ``remaining`` says how long that still is, and the client asks it before every write. A leader that was frozen for
a minute and wakes up is thus silent before it knows that another one leads.

**An API server that is away costs no restart.** While nobody can be asked, the leader is fenced and goes on asking.
If its Lease then still names it, nobody else can have led meanwhile, and it goes on. If it names anybody else,
leadership is lost, and the process must end at once: what it remembers belongs to a past that is over.
"""

import asyncio
import logging
import random
import socket
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from ddp_operator.cluster import ClusterError
from ddp_operator.kube.client import ApiClient, ApiError, StartupError
from ddp_operator.kube.resources import path, plural
from ddp_operator.settings import PREFIX

logger = logging.getLogger(__name__)

LEASE: Final = "Lease"
RETRY_SHARE: Final = 2 / 15
"""Share of the duration between two renewals, and between two looks of a candidate: 2 of 15 seconds, as client-go."""
CALL_SHARE: Final = 1 / 3
FENCE_SHARE: Final = 2 / 3
"""Share of the duration after which a leader that was not renewed begins no more write. The rest is for its last one
to arrive, which is given no more time than that, not even by the kernel (``ApiClient.unheard``)."""

Body = Mapping[str, Any]


def monotonic() -> float:
    """Return seconds that also count while the machine sleeps, where the system can tell."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)


def new_identity() -> str:
    """Return a name for this process that no other one has."""
    return f"{socket.gethostname()}_{uuid.uuid4().hex[:8]}"


@dataclass(frozen=True, slots=True)
class Sighting:
    """A Lease as it was seen, and since when it looks like that (by this process's clock)."""

    version: str
    holder: str
    duration: float
    since: float


def observe_lease(lease: Body, before: Sighting | None, now: float) -> Sighting:
    """Return what a Lease says. One that looks as it did before has been so since then."""
    spec = lease.get("spec") or {}
    seen = Sighting(
        version=str(lease["metadata"].get("resourceVersion", "")),
        holder=str(spec.get("holderIdentity") or ""),
        duration=float(spec.get("leaseDurationSeconds") or 0),
        since=now,
    )
    if before is not None and before.version == seen.version:
        return before
    return seen


def may_take(seen: Sighting, identity: str, now: float) -> bool:
    """Say whether a candidate may take the Lease: nobody's, its own, or not renewed for as long as it holds."""
    return seen.holder in ("", identity) or now >= seen.since + seen.duration


@dataclass(eq=False, kw_only=True)
class Leader:
    """One candidate. ``acquire`` it, ask ``remaining`` before each write, ``release`` it after the last one."""

    client: ApiClient
    namespace: str
    name: str
    identity: str
    duration: int
    on_lost: Callable[[], None]
    clock: Callable[[], float] = monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    follows: str = ""
    """Who leads, while this process stands by."""
    _lease: Body = field(default_factory=dict)
    """The Lease as our last renewal left it."""
    _good_until: float = float("-inf")
    _task: asyncio.Task[None] | None = None

    def remaining(self) -> float:
        """Return for how many seconds a write that begins now may take; 0 where none may begin."""
        left = self._good_until - self.clock()
        return left if left > self.duration * (1 - FENCE_SHARE) else 0.0

    @property
    def leads(self) -> bool:
        """Whether this process may write."""
        return self.remaining() > 0

    async def acquire(self) -> None:
        """Wait until this process leads, then keep the Lease renewed. Raises: StartupError."""
        seen: Sighting | None = None
        while True:
            try:
                seen = await self._try(seen)
            except ClusterError as exc:
                logger.warning("cannot read or take the lease: %s", exc)
            if self.leads:
                break
            if seen is not None and seen.holder != self.follows:
                self.follows = seen.holder
                logger.info(
                    "standing by: %s leads by the Lease %s/%s; "
                    "an operator for other namespaces needs a Lease of its own: set %sLEASE_NAME",
                    self.follows or "nobody",
                    self.namespace,
                    self.name,
                    PREFIX,
                )
            await self.sleep(self._pause())
        self.follows = ""
        logger.info("leading as %s", self.identity)
        self._task = asyncio.create_task(self._keep(), name="lease")

    async def release(self) -> None:
        """Give the Lease up, so that another one need not wait for its end. Call it after the last write."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        if not self.leads:
            return
        self._good_until = float("-inf")
        spec = {**self._lease["spec"], "holderIdentity": "", "leaseDurationSeconds": 1, "renewTime": _now()}
        try:
            await self._call("PUT", {**self._lease, "spec": spec})
        except (ClusterError, ApiError) as exc:
            logger.info("the lease could not be released: %s", exc)

    async def _try(self, before: Sighting | None) -> Sighting | None:
        """Look at the Lease once and take it if that is allowed. Returns what was seen; None where a race was lost."""
        try:
            lease = await self._read()
            if lease is None:
                await self._hold("POST", self._build())
                return None
            seen = observe_lease(lease, before, self.clock())
            if may_take(seen, self.identity, self.clock()):
                await self._hold("PUT", self._taken(lease, seen))
        except ApiError as exc:
            if exc.status == 409:
                return None  # another candidate was quicker
            raise StartupError(
                f"the lease {self.namespace}/{self.name} cannot be taken: {exc} (HTTP {exc.status})"
            ) from exc
        return seen

    async def _keep(self) -> None:
        while True:
            await self.sleep(self._pause())
            led = self.leads
            try:
                kept = await self._renew()
            except (ClusterError, ApiError) as exc:
                then = "trying again" if self.leads else "nothing is written until it is"
                logger.warning("the lease cannot be renewed; %s: %s", then, exc)
                continue
            if not kept:
                self._good_until = float("-inf")
                logger.error("leadership is lost: ending at once, so that another operator can work")
                self.on_lost()
                return
            if not led:
                logger.warning("the lease is renewed, and nobody else has held it: going on")

    async def _renew(self) -> bool:
        """Renew once. Returns False where the Lease is not ours any more. Raises: ClusterError, ApiError."""
        try:
            await self._hold("PUT", _renewed(self._lease))
            return True
        except ApiError as exc:
            if exc.status not in (404, 409):
                raise
        # Changed by another, or by a renewal of our own whose answer was lost.
        lease = await self._read()
        if lease is None or (lease.get("spec") or {}).get("holderIdentity") != self.identity:
            return False
        await self._hold("PUT", _renewed(lease))
        return True

    async def _read(self) -> Body | None:
        try:
            return await self._call("GET")
        except ApiError as exc:
            if exc.status == 404:
                return None
            raise

    async def _call(self, method: str, body: Body | None = None) -> Body:
        name = None if method == "POST" else self.name
        seconds = self.duration * CALL_SHARE
        try:
            async with asyncio.timeout(seconds):
                answer: Body = await self.client.request(
                    method, path(LEASE, self.namespace, name), body=body, kind=plural(LEASE), urgent=True
                )
        except TimeoutError:
            raise ClusterError(f"{method} of the lease: no answer within {seconds:.3g} s") from None
        return answer

    async def _hold(self, method: str, lease: Body) -> None:
        """Write a Lease that names us. It is good from before the call: nobody can have seen it earlier."""
        begun = self.clock()
        self._lease = await self._call(method, lease)
        self._good_until = begun + self.duration

    def _build(self) -> Body:
        now = _now()
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": LEASE,
            "metadata": {"name": self.name, "namespace": self.namespace},
            "spec": {
                "holderIdentity": self.identity,
                "leaseDurationSeconds": self.duration,
                "acquireTime": now,
                "renewTime": now,
                "leaseTransitions": 0,
            },
        }

    def _taken(self, lease: Body, seen: Sighting) -> Body:
        spec: dict[str, Any] = {**(lease.get("spec") or {}), **self._build()["spec"]}
        transitions = int((lease.get("spec") or {}).get("leaseTransitions") or 0)
        spec["leaseTransitions"] = transitions + (seen.holder != self.identity)
        return {**lease, "spec": spec}

    def _pause(self) -> float:
        return self.duration * RETRY_SHARE * random.uniform(1.0, 1.2)


def _renewed(lease: Body) -> Body:
    return {**lease, "spec": {**lease["spec"], "renewTime": _now()}}


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
