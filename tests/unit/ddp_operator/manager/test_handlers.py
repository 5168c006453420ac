"""The set-up of Kopf: it only watches."""

import asyncio
import itertools
from typing import Any

import kopf
import pytest

from ddp_operator.manager import handlers


@pytest.fixture
def configured() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    handlers.configure(settings)
    return settings


def test_kopf_never_posts_peers_or_scans(configured: kopf.OperatorSettings) -> None:
    assert not configured.posting.enabled
    assert configured.peering.standalone
    assert configured.scanning.disabled


def test_kopf_retries_unreachable_api_server(configured: kopf.OperatorSettings) -> None:
    delays = list(itertools.islice(configured.networking.error_backoffs, 1000))  # type: ignore[arg-type]
    assert len(delays) == 1000
    assert max(delays) <= 10
    assert list(itertools.islice(configured.networking.error_backoffs, 3)) == delays[:3]  # type: ignore[arg-type]


def test_raw_event_handlers_leave_no_mark_on_objects() -> None:
    registry = kopf.get_default_registry()
    own = [handler for handler in registry._watching.get_all_handlers() if handler.fn.__module__ == handlers.__name__]
    assert len(own) == 1
    marking: list[Any] = [*registry._changing.get_all_handlers(), *registry._spawning.get_all_handlers()]
    assert [handler for handler in marking if handler.fn.__module__ == handlers.__name__] == []


async def test_leftover_kopf_tasks_do_not_delay_exit() -> None:
    task = asyncio.create_task(asyncio.sleep(3600), name="pause-waiter for pods.v1")
    second = asyncio.create_task(asyncio.sleep(3600), name="somebody else's")
    await handlers.stop(memo=kopf.Memo())
    await asyncio.sleep(0)
    assert (task.cancelled(), second.cancelled()) == (True, False)
    second.cancel()
