"""Recordings of a real control plane, with which stand-ins are compared.

A test calls ``Trace.step`` for every action, with a function that reads the result. ``--record-traces`` records the
result of a real control plane; otherwise the result must equal the recording.
"""

from __future__ import annotations

import asyncio
import difflib
import json
from collections.abc import Awaitable, Callable
from typing import Any

from tests.support import ROOT

FOLDER = ROOT / "tests" / "contract" / "traces"
PATIENCE = 60.0
"""Seconds after which an expected event counts as missing; a real Job controller's first back-off is shorter."""
PATIENCE_HERE = 20.0
"""The same for events that only this machine's load delays."""
QUIET = 3.0
"""Seconds without a change after which a real control plane counts as settled; its Job controller batches for one."""
POLL = 0.02

Read = Callable[[], Awaitable[Any]]
View = Callable[[Any], Any]


class Trace:
    """One file of steps, each with its result."""

    def __init__(self, name: str, *, server: str | None = None, patience: float = PATIENCE) -> None:
        """Open the recording ``name``; with ``server``, the version of a real one, replace it."""
        self._patience = patience
        self._path = FOLDER / f"{name}.json"
        self._server = server
        self._steps: list[dict[str, Any]] = [] if server else json.loads(self._path.read_text())["steps"]
        self._next = 0

    def answer(self, does: str, result: Any, *, view: View = lambda result: result) -> None:
        """Record the result of a step at once, or compare it."""
        if self._server:
            self._steps.append({"do": does, "then": result})
        else:
            expected = view(self._recorded(does))
            assert view(result) == expected, difference(does, expected, view(result))

    async def step(
        self,
        does: str,
        read: Read,
        *,
        view: View = lambda result: result,
        changes: bool = False,
        quiet: float = QUIET,
    ) -> None:
        """Record the stable result of ``read`` after a step, or wait until it equals the recording.

        ``view`` selects from recording and result the parts that can be compared here. With ``changes`` the recording
        waits
        for a change before it waits for quiet, which is a number of seconds without another change.
        """
        if self._server:
            before = self._steps[-1]["then"] if changes else None
            self._steps.append({"do": does, "then": await _settled(read, before, quiet)})
            return
        expected = view(self._recorded(does))
        results = None
        try:
            async with asyncio.timeout(self._patience):
                while True:
                    if (results := view(await read())) == expected:
                        return
                    await asyncio.sleep(POLL)
        except TimeoutError:
            raise AssertionError(difference(does, expected, results)) from None

    def _recorded(self, does: str) -> Any:
        recorded = self._steps[self._next]
        self._next += 1
        assert recorded["do"] == does, "the scenario has changed: record it anew with --record-traces"
        return recorded["then"]

    def close(self) -> None:
        """Write the recording, or check that all its steps have happened."""
        if not self._server:
            assert self._next == len(self._steps), "the scenario has changed: record it anew with --record-traces"
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        lines = ",\n".join(f"  {json.dumps(step, sort_keys=True)}" for step in self._steps)
        self._path.write_text(f'{{"kubernetes": {json.dumps(self._server)}, "steps": [\n{lines}\n]}}\n')


def difference(does: str, recorded: Any, result: Any) -> str:
    """Return the lines in which a result differs from its recording."""
    old, new = (json.dumps(value, indent=1, sort_keys=True).splitlines() for value in (recorded, result))
    lines = difflib.unified_diff(old, new, "recorded", "found", lineterm="", n=1)
    return "\n".join((f"after: {does}", *lines))


async def _settled(read: Read, before: Any, quiet: float) -> Any:
    loop = asyncio.get_running_loop()
    last = before
    quiet_since = loop.time()
    async with asyncio.timeout(PATIENCE):
        while True:
            result = await read()
            if result != last:
                last = result
                quiet_since = loop.time()
            elif last != before and loop.time() - quiet_since > quiet:
                return last
            await asyncio.sleep(POLL)
