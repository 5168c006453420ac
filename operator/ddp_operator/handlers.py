"""What Kopf calls: two ends of a life, a login, and raw watch events. Nothing is decided here.

Raw events (``on.event``) alone leave the custom resource clean: Kopf's create, update and delete handlers, its daemons
and timers all put a finalizer or annotations on it, and a finalizer blocks deletion while the operator is down.

``python -m ddp_operator`` and ``kopf run -m ddp_operator.handlers`` both lead here.
"""

import asyncio
import logging
import os
from collections.abc import Iterator
from typing import Any

import kopf

from ddp_operator.constants import GROUP, KIND, PLURAL, VERSION
from ddp_operator.kube.client import StartupError
from ddp_operator.kube.watch import SILENCE
from ddp_operator.leader import new_identity
from ddp_operator.runtime import Operator, end_at_once
from ddp_operator.settings import Settings, SettingsError

logger = logging.getLogger(__name__)

WATCH_CONNECT_TIMEOUT = 10.0
RESOURCES_A_PAGE = 25
"""Kopf parses a page of a list at once, and a resource may have a megabyte."""
KOPF_REQUEST_TIMEOUT = 30.0

# `kopf run` takes no identity. Without this variable it reads the login name, and the user of a pod may have none.
os.environ.setdefault("POD_ID", new_identity())


class Forever:
    """Delays between Kopf's attempts, without an end: an API server that is away for an hour is no reason to exit."""

    def __iter__(self) -> Iterator[float]:
        yield from (0.5, 1, 2, 3, 5)
        while True:
            yield 8


class NoTraceback(logging.Filter):
    """Leaves out where in Kopf an answer of the API server was taken up: what the server said is in the line itself."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Let every record pass."""
        if record.exc_info and type(record.exc_info[1]).__module__.startswith("kopf."):
            record.exc_info, record.exc_text = None, None
        return True


class NoDiffBase(kopf.DiffBaseStorage):
    """Keeps no last-handled state: nothing asks for it, and the default copies the whole object for every event."""

    def fetch(self, *, body: kopf.Body) -> None:
        """Nothing was stored."""

    def build(self, *, body: kopf.Body, extra_fields: Any = None) -> kopf.BodyEssence:
        """Nothing is worth storing."""
        return kopf.BodyEssence()

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None:
        """Store nothing."""


@kopf.on.startup(errors=kopf.ErrorsMode.PERMANENT)
async def start(memo: kopf.Memo, settings: kopf.OperatorSettings, **_: Any) -> None:
    """Configure Kopf, check the cluster, and start the workers; one clear line if that is not possible."""
    configure(settings)
    try:
        own = memo.get("settings") or Settings.from_env()
        _check_namespaces(own, clusterwide=settings.peering.clusterwide)
        memo.operator = Operator(own, on_lost=memo.get("on_lost") or end_at_once)
        await memo.operator.start()
    except asyncio.CancelledError:
        await memo.operator.stop()  # told to end while it stood by: Kopf calls no cleanup then
        raise
    except (SettingsError, StartupError) as exc:
        if "operator" in memo:
            await memo.operator.stop()
        logger.error("cannot start: %s", exc)
        await asyncio.sleep(0.01)  # Kopf's other tasks complain if they end before they have begun
        # Kopf would turn any other exception into three tracebacks around this one line.
        raise SystemExit(1) from None


@kopf.on.cleanup()
async def stop(memo: kopf.Memo, **_: Any) -> None:
    """End the workers."""
    if "operator" in memo:
        loss = await memo.operator.find_loss()
        await memo.operator.stop()
        if loss is not None:
            logger.error("ending: %s", loss)
            raise SystemExit(1)  # as at the start: three tracebacks would say less than this line
    # Stopped in the midst of handing an event on, a watch of Kopf 1.45 leaves the task that waits for a pause behind,
    # and Kopf then waits five seconds for it.
    for task in asyncio.all_tasks():
        if task.get_name().startswith("pause-waiter for "):
            task.cancel()


@kopf.on.login()
async def login(memo: kopf.Memo, **_: Any) -> kopf.ConnectionInfo:
    """Give Kopf the same credentials as the own client's."""
    info: kopf.ConnectionInfo = await memo.operator.login()
    return info


@kopf.on.event(GROUP, VERSION, PLURAL)
async def on_event(memo: kopf.Memo, event: kopf.RawEvent, **_: Any) -> None:
    """Note a change of a custom resource."""
    memo.operator.on_event(KIND, event["type"], event["object"])


def configure(settings: kopf.OperatorSettings) -> None:
    """Set Kopf up so that it watches, and does nothing else."""
    settings.peering.standalone = True
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.persistence.diffbase_storage = NoDiffBase()
    settings.watching.chunk_size = RESOURCES_A_PAGE
    settings.watching.connect_timeout = WATCH_CONNECT_TIMEOUT
    settings.watching.inactivity_timeout = SILENCE
    settings.networking.request_timeout = KOPF_REQUEST_TIMEOUT
    settings.networking.error_backoffs = Forever()
    # An event is stored in microseconds, so that a task that waits for the next one of the same object is waste.
    settings.queueing.idle_timeout = 0.1
    # Kopf says for every event that its handler succeeded.
    logging.getLogger("kopf.objects").setLevel(logging.WARNING)
    for module in ("observation", "orchestration", "queueing", "running"):
        logging.getLogger(f"kopf._core.reactor.{module}").addFilter(NoTraceback())


def _check_namespaces(own: Settings, *, clusterwide: bool) -> None:
    """Hold `kopf run`'s flags against the settings: the own client must see what Kopf watches."""
    if clusterwide and own.namespaces:
        names = " ".join(f"-n {name}" for name in own.namespaces)
        raise SettingsError(
            f"DDP_OPERATOR_NAMESPACES names some namespaces, Kopf was told to serve all: start it with {names}"
        )
    if not clusterwide and not own.namespaces:
        raise SettingsError(
            "Kopf was told to serve some namespaces: set DDP_OPERATOR_NAMESPACES to the same ones, "
            "or start it with --all-namespaces"
        )
