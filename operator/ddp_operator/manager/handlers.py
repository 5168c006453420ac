"""Kopf's handlers: startup, cleanup, login, and raw watch events. They contain no decisions.

Kopf's other handlers, its daemons and its timers add a finalizer or annotations to the resource, and a finalizer
blocks deletion while the operator is down. Raw events (``on.event``) do not change the resource.
"""

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import kopf

from ddp_operator.api.constants import GROUP, KIND, PLURAL, VERSION
from ddp_operator.api.faults import contain, name_object
from ddp_operator.kube.client import StartupError
from ddp_operator.kube.incoming import open_kopf_session
from ddp_operator.kube.watch import SILENCE
from ddp_operator.manager.operator import Operator, end_at_once
from ddp_operator.manager.settings import SettingsError

logger = logging.getLogger(__name__)

WATCH_CONNECT_TIMEOUT = 10.0
RESOURCES_A_PAGE = 5
"""Objects in one page of a list: Kopf reads a page at once, and a resource may have a megabyte."""
KOPF_REQUEST_TIMEOUT = 30.0


class EndlessBackoff:
    """Infinite delays between Kopf's attempts: the operator keeps running while the API server is unavailable."""

    def __iter__(self) -> Iterator[float]:
        yield from (0.5, 1, 2, 3, 5)
        while True:
            yield 8


class NoTraceback(logging.Filter):
    """Removes tracebacks of Kopf's errors about API calls: the log line has the API server's message."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Remove the traceback, and keep every record."""
        if record.exc_info and type(record.exc_info[1]).__module__.startswith("kopf."):
            record.exc_info = None
            record.exc_text = None
        return True


class NoDiffBase(kopf.DiffBaseStorage):
    """Stores no last-handled state. Raw events do not need it, and the default copies the object for every event."""

    def fetch(self, *, body: kopf.Body) -> None:
        """Return None: no state is stored."""

    def build(self, *, body: kopf.Body, extra_fields: Any = None) -> kopf.BodyEssence:
        """Return an empty state."""
        return kopf.BodyEssence()

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None:
        """Store nothing."""


@kopf.on.startup(errors=kopf.ErrorsMode.PERMANENT)
async def start(memo: kopf.Memo, settings: kopf.OperatorSettings, **_: Any) -> None:
    """Configure Kopf, check the cluster and start the workers. On failure, log one line and exit."""
    configure(settings)
    try:
        memo.operator = Operator(memo.settings, memo.features, on_lost=memo.get("on_lost") or end_at_once)
        await memo.operator.start()
    except asyncio.CancelledError:
        await memo.operator.stop()  # on standby Kopf calls no cleanup handler
        raise
    except (SettingsError, StartupError) as exc:
        if "operator" in memo:
            await memo.operator.stop()
        logger.error("cannot start: %s", exc)
        await asyncio.sleep(0.01)  # Kopf's other tasks log an error if they are cancelled before they start
        # Kopf logs three tracebacks for any other exception.
        raise SystemExit(1) from None


@kopf.on.cleanup()
async def stop(memo: kopf.Memo, **_: Any) -> None:
    """Stop the workers."""
    if "operator" in memo:
        loss = await memo.operator.find_loss()
        await memo.operator.stop()
        if loss is not None:
            logger.error("exiting: %s", loss)
            raise SystemExit(1)  # Kopf logs three tracebacks for any other exception
    # A watch of Kopf 1.45 that is cancelled while it delivers an event does not cancel its task that waits for a
    # pause. Kopf would wait five seconds for that task.
    for task in asyncio.all_tasks():
        if task.get_name().startswith("pause-waiter for "):
            task.cancel()


@kopf.on.login()
async def login(memo: kopf.Memo, **_: Any) -> kopf.AiohttpSession:
    """Return a session with the credentials of the operator's own client to Kopf."""
    return open_kopf_session(await memo.operator.login())


@kopf.on.event(GROUP, VERSION, PLURAL)
async def on_event(memo: kopf.Memo, event: kopf.RawEvent, **_: Any) -> None:
    """Pass a watch event of a custom resource to the operator."""
    with contain(KIND, name_object(event["object"])):
        memo.operator.on_event(KIND, event["type"], event["object"])


def configure(settings: kopf.OperatorSettings) -> None:
    """Configure Kopf to watch resources only."""
    settings.peering.standalone = True
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.persistence.diffbase_storage = NoDiffBase()
    settings.watching.chunk_size = RESOURCES_A_PAGE
    settings.watching.connect_timeout = WATCH_CONNECT_TIMEOUT
    settings.watching.inactivity_timeout = SILENCE
    settings.networking.request_timeout = KOPF_REQUEST_TIMEOUT
    settings.networking.error_backoffs = EndlessBackoff()
    # An event takes microseconds, so Kopf need not keep a task for later events of the object.
    settings.queueing.idle_timeout = 0.1
    # Kopf logs for every event that its handler succeeded.
    logging.getLogger("kopf.objects").setLevel(logging.WARNING)
    for module in ("observation", "orchestration", "queueing", "running"):
        logging.getLogger(f"kopf._core.reactor.{module}").addFilter(NoTraceback())
