"""Leader election with a Lease in the operator's own namespace. All operators but the leader are on standby.

The rules are those of client-go: the leader renews the Lease. A candidate takes it over after it has not observed a
change for the duration of the Lease, by its own clock, so clocks need not be synchronized. Two rules are stricter.

**Fence.** A leader starts no write after its last renewal has expired, counted from before that call was sent. The
client reads the remaining time from ``remaining`` before every write. A leader that was frozen for a minute therefore
writes nothing, even before it knows that another operator leads.

**No restart while the API server is unavailable.** The leader is fenced and keeps trying to renew. If its Lease still
names it afterwards, no other operator has led meanwhile, and it continues. If the Lease names another holder, the
process exits at once, because its cached state is outdated.
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

from ddp_operator.api.cluster_errors import ClusterError
from ddp_operator.api.display_texts import format_micro_time
from ddp_operator.kube.client import ApiClient, ResponseError, StartupError
from ddp_operator.kube.resources import path, plural
from ddp_operator.manager.settings import PREFIX

logger = logging.getLogger(__name__)

LEASE: Final = "Lease"
RETRY_SHARE: Final = 2 / 15
"""Interval between two renewals, or two reads of a candidate, as share of the duration: 2 of 15 s, as in client-go."""
CALL_SHARE: Final = 1 / 3
FENCE_SHARE: Final = 2 / 3
"""Share of the duration after which a leader without a renewal starts no write. The remaining share is the time limit
of the last write; the kernel enforces it too (``ApiClient.unheard``)."""

Body = Mapping[str, Any]


def monotonic() -> float:
    """Return a monotonic time in seconds that includes sleep of the machine, if the system provides it."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)


def new_identity() -> str:
    """Return a unique name for this process."""
    return f"{socket.gethostname()}_{uuid.uuid4().hex[:8]}"


@dataclass(frozen=True, slots=True)
class LeaseObservation:
    """An observed version of the Lease. ``since``: its first observation, by this process's clock."""

    version: str
    holder: str
    duration: float
    since: float


def observe_lease(lease: Body, last: LeaseObservation | None, now: float) -> LeaseObservation:
    """Return the observation of a Lease: ``last`` if the version is unchanged."""
    version = str(lease["metadata"].get("resourceVersion", ""))
    if last is not None and last.version == version:
        return last
    spec = lease.get("spec") or {}
    return LeaseObservation(
        version=version,
        holder=str(spec.get("holderIdentity") or ""),
        duration=float(spec.get("leaseDurationSeconds") or 0),
        since=now,
    )


def may_take(lease: LeaseObservation, identity: str, now: float) -> bool:
    """Return whether a candidate may take the Lease: it is unowned, its own, or has expired."""
    return lease.holder in ("", identity) or now >= lease.since + lease.duration


@dataclass(eq=False, kw_only=True)
class Leader:
    """A candidate. Call ``acquire``, read ``remaining`` before each write, call ``release`` after the last write."""

    client: ApiClient
    namespace: str
    name: str
    identity: str
    duration: int
    on_lost: Callable[[], None]
    pod_uid: str = ""
    """The UID of this process's pod, whose name is the identity. The pod then owns the Lease while it leads, so that an
    uninstallation leaves none: it revokes the permission to release it."""
    clock: Callable[[], float] = monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    follows: str = ""
    """The leader's identity, while this process is on standby."""
    _lease: Body = field(default_factory=dict)
    """The Lease after the last renewal by this process."""
    _good_until: float = float("-inf")
    _task: asyncio.Task[None] | None = None

    def remaining(self) -> float:
        """Return the maximum seconds for a write that starts now; 0 if no write may start."""
        seconds = self._good_until - self.clock()
        return seconds if seconds > self.duration * (1 - FENCE_SHARE) else 0.0

    @property
    def leads(self) -> bool:
        """Whether this process may write."""
        return self.remaining() > 0

    async def acquire(self) -> None:
        """Wait until this process leads, then keep the Lease renewed in the background. Raises: StartupError."""
        lease: LeaseObservation | None = None
        while True:
            try:
                lease = await self._try_to_take(lease)
            except ClusterError as exc:
                logger.warning("cannot acquire lease %s: %s; retrying", self._lease_path, exc)
            if self.leads:
                break
            if lease is not None and lease.holder != self.follows:
                self.follows = lease.holder
                logger.info(
                    "on standby: %s holds lease %s; "
                    "to run an operator for other namespaces beside it, set %sLEASE_NAME to another lease",
                    self.follows or "no operator",
                    self._lease_path,
                    PREFIX,
                )
            await self.sleep(self._compute_pause())
        self.follows = ""
        logger.info("became leader as %s", self.identity)
        self._task = asyncio.create_task(self._keep_renewed(), name="lease")

    async def release(self) -> None:
        """Release the Lease, so that a candidate need not wait until it expires. Call it after the last write."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        if not self.leads:
            return
        self._good_until = float("-inf")
        spec = {**self._lease["spec"], "holderIdentity": "", "leaseDurationSeconds": 1, "renewTime": _now()}
        try:
            await self._call("PUT", {**self._lease, "spec": spec})
        except (ClusterError, ResponseError) as exc:
            logger.info("cannot release lease %s: %s; candidates wait until it expires", self._lease_path, exc)

    @property
    def _lease_path(self) -> str:
        return f"{self.namespace}/{self.name}"

    async def _try_to_take(self, last: LeaseObservation | None) -> LeaseObservation | None:
        """Read the Lease once and take it if that is allowed. Returns its observation; None if a race was lost.

        Raises: ClusterError, StartupError.
        """
        try:
            raw = await self._read()
            if raw is None:
                if last is not None and not may_take(last, self.identity, self.clock()):
                    return last  # deleted with its holder's pod, whose process may still run
                await self._write_own("POST", self._build())
                return None
            lease = observe_lease(raw, last, self.clock())
            if may_take(lease, self.identity, self.clock()):
                await self._write_own("PUT", self._replace_holder(raw, lease.holder))
        except ResponseError as exc:
            if exc.status == 409:
                return None  # another candidate was faster
            raise StartupError(f"cannot acquire lease {self._lease_path}: {exc} (HTTP {exc.status})") from exc
        return lease

    async def _keep_renewed(self) -> None:
        while True:
            await self.sleep(self._compute_pause())
            was_leading = self.leads
            try:
                is_holder = await self._renew()
            except (ClusterError, ResponseError) as exc:
                state = "still leading" if self.leads else "writes are suspended until it is renewed"
                logger.warning("cannot renew lease %s: %s; retrying, %s", self._lease_path, exc, state)
                continue
            if not is_holder:
                self._good_until = float("-inf")
                logger.error("lost leadership: lease %s has another holder or was deleted; exiting", self._lease_path)
                self.on_lost()
                return
            if not was_leading:
                logger.warning("renewed lease %s, which no other operator has held; resuming", self._lease_path)

    async def _renew(self) -> bool:
        """Renew the Lease once. Returns False if it names another holder. Raises: ClusterError, ResponseError."""
        try:
            await self._write_own("PUT", _set_renew_time(self._lease))
            return True
        except ResponseError as exc:
            if exc.status not in (404, 409):
                raise
        # Another client changed the Lease, or the response to the last renewal was lost.
        lease = await self._read()
        if lease is None or (lease.get("spec") or {}).get("holderIdentity") != self.identity:
            return False
        await self._write_own("PUT", _set_renew_time(lease))
        return True

    async def _read(self) -> Body | None:
        """Return the Lease, or None if it does not exist. Raises: ClusterError, ResponseError."""
        try:
            return await self._call("GET")
        except ResponseError as exc:
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
            raise ClusterError(f"{method} of lease {self._lease_path} timed out after {seconds:.3g} s") from None
        return answer

    async def _write_own(self, method: str, lease: Body) -> None:
        """Write a Lease that names this process. It expires after its duration, counted from before the call."""
        started = self.clock()
        self._lease = await self._call(method, lease)
        self._good_until = started + self.duration

    def _build(self) -> Body:
        now = _now()
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": LEASE,
            "metadata": {"name": self.name, "namespace": self.namespace, **self._build_owner()},
            "spec": {
                "holderIdentity": self.identity,
                "leaseDurationSeconds": self.duration,
                "acquireTime": now,
                "renewTime": now,
                "leaseTransitions": 0,
            },
        }

    def _replace_holder(self, lease: Body, holder: str) -> Body:
        """Return the Lease with this process as its holder instead of ``holder``."""
        spec: dict[str, Any] = {**(lease.get("spec") or {}), **self._build()["spec"]}
        transitions = int((lease.get("spec") or {}).get("leaseTransitions") or 0)
        spec["leaseTransitions"] = transitions + (holder != self.identity)
        return {**lease, "metadata": {**lease["metadata"], **self._build_owner()}, "spec": spec}

    def _build_owner(self) -> Body:
        if not self.pod_uid:
            return {}
        pod = {"apiVersion": "v1", "kind": "Pod", "name": self.identity, "uid": self.pod_uid}
        return {"ownerReferences": [pod]}

    def _compute_pause(self) -> float:
        return self.duration * RETRY_SHARE * random.uniform(1.0, 1.2)


def _set_renew_time(lease: Body) -> Body:
    return {**lease, "spec": {**lease["spec"], "renewTime": _now()}}


def _now() -> str:
    return format_micro_time(datetime.now(UTC))
