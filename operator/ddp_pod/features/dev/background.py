"""Work that nobody waits for."""

import asyncio
from collections.abc import Coroutine
from typing import Any

_tasks: set[asyncio.Task[None]] = set()  # the event loop itself keeps no reference


def run_in_background(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine to its end."""
    task = asyncio.create_task(work)
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)
