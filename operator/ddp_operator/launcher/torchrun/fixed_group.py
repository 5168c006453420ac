"""The rendezvous of a job whose size is fixed: every pod has a key of its own in the store, and pod 0 calls the roll.

torchrun's agents share one document with a line and a heartbeat of each. All rewrite it by compare-and-set until they
succeed, and all read it every second: n agents take some n² attempts at n lines. Here a round takes a few short
calls of each, and between rounds there is one.
"""

import json
import math
import time
from contextlib import suppress
from typing import Any, Callable

from ..pod import Pod

Call = Callable[..., Any]
"""Calls a method of the store by its name."""


class GroupClosed(Exception):
    """The other pods have ended, well or not: there is no further round."""


class FixedGroup:
    """One pod's part in all rounds. ``pause``: seconds between two looks at the store.

    Whoever joins the next round asks all others to. A pod that takes another's place, in this round or in a later one,
    has the same key. Nobody is dead: a pod that is gone is replaced or ends the attempt.
    """

    def __init__(self, pod: Pod, pause: float) -> None:
        self._pod = pod
        self._pause = pause
        self._round = -1
        self._looked = -math.inf

    def meet(self, call: Call, run: str, address: str, deadline: float) -> tuple[int, list[str]]:
        """Join the next round and wait for all others; return its number and the addresses by the pods' indices.

        ``run``: what the keys of the job begin with; ``deadline`` is of a monotonic clock. Raises: GroupClosed,
        TimeoutError, and what the store's calls raise.
        """
        number = int(call("add", f"{run}/rounds", 0))
        while call("check", [_members(run, number)]):  # pod 0 may have ended before it counted the round
            number += 1
        keys = [f"{run}/{number}/{index}" for index in range(self._pod.nodes)]
        call("set", keys[self._pod.node], address)
        call("set", _asked(run, number), "1")
        try:
            while not self._is_complete(call, run, number, keys):
                if call("check", [_closed(run)]):
                    raise GroupClosed
                if time.monotonic() > deadline:
                    raise TimeoutError
                time.sleep(self._pause)
        except BaseException:
            with suppress(Exception):  # the store may be what has gone
                call("delete_key", keys[self._pod.node])
            raise
        self._round = number
        return number, json.loads(call("get", _members(run, number)))

    def _is_complete(self, call: Call, run: str, number: int, keys: list[str]) -> bool:
        if self._pod.node:
            return bool(call("check", [_members(run, number)]))
        if not call("check", keys):
            return False
        call("set", _members(run, number), json.dumps([call("get", key).decode() for key in keys]))
        call("add", f"{run}/rounds", 1)
        return True

    def is_another_round_wanted(self, call: Call, run: str, now: float) -> bool:
        """Return whether a pod has joined the next round; asks once in ``pause``. ``now`` is of a monotonic clock."""
        if now - self._looked < self._pause:
            return False
        self._looked = now
        return bool(call("check", [_asked(run, self._round + 1)]))

    def close(self, call: Call, run: str) -> None:
        """Let nobody join another round."""
        call("set", _closed(run), "1")


def _members(run: str, number: int) -> str:
    return f"{run}/{number}/members"


def _asked(run: str, number: int) -> str:
    return f"{run}/{number}/asked"


def _closed(run: str) -> str:
    return f"{run}/closed"
