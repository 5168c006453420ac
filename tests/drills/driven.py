"""`ddp run` with commands from a drill, for actions that users and controllers perform in a cluster.

Commands are files in ``DRILL_COMMANDS``, ``<number>.json``; an executed one is renamed to ``<number>.done``.
``DRILL_PREFIX_<index>`` (lines) is put before the command of the pods of an index. ``DRILL_NAMES``: pods find each
other by their names. ``DRILL_NETWORK``: by the addresses (NETWORK.1 and so on) that they have in network namespaces.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import sys
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ddp_cli import commands as cli
from ddp_cli.local import pods, processes, runner
from ddp_cli.local.job_controller import completion_index
from ddp_cli.local.runner import Run, RunOutcome, RunPlan
from ddp_cli.local.store import grace_of
from ddp_operator.api import constants

PROGRAM = str(Path(__file__))


class Driven(Run):
    """A run that executes commands."""

    async def run(self) -> RunOutcome:
        """Run, and execute commands meanwhile."""
        cluster = self._cluster
        if "DRILL_NETWORK" in os.environ:

            async def scrape(pod: Any, port: int, take: Callable[[bytes], None]) -> bool:
                page = await _scrape(pod, cluster.kubelet.port_of(pod))
                take((page or "").encode())
                return page is not None

            cluster.scrape = scrape  # type: ignore[method-assign]
        listener = asyncio.create_task(self._listen(Path(os.environ["DRILL_COMMANDS"])))
        try:
            return await super().run()
        finally:
            listener.cancel()
            with suppress(asyncio.CancelledError):
                await listener

    async def _listen(self, folder: Path) -> None:
        while True:
            for path in sorted(folder.glob("*.json")):
                self._obey(json.loads(path.read_text()))
                path.rename(path.with_suffix(".done"))
            await asyncio.sleep(0.02)

    def _obey(self, command: Mapping[str, Any]) -> None:
        store = self._cluster.store
        resource = store.get(constants.KIND, self._key.namespace, self._key.name)
        assert resource is not None
        if command["do"] == "delete pod":
            (pod,) = (p for p in store.list("Pod") if completion_index(p) == command["index"])
            store.delete(pod, grace_seconds=grace_of(pod))
        elif command["do"] == "edit":
            store.change(resource, spec={**resource["spec"], **command["spec"]})
        elif command["do"] == "recreate":
            store.delete(resource)
            self._cluster.add(self._plan.resource)
        else:
            raise AssertionError(command)
        self._cluster._settle()


def run_job(plan: RunPlan) -> RunOutcome:
    """Replace the function of this name in ``local.runner``."""
    return asyncio.run(Driven(plan).run())


def _start(
    command: Sequence[str], environment: Mapping[str, str], *args: Any, inner: Any = processes.start, **kwargs: Any
) -> Any:
    index = int(environment[constants.ENV_COMPLETION_INDEX])
    prefix = os.environ.get(f"DRILL_PREFIX_{index}", "").split("\n")
    if "DRILL_NETWORK" in os.environ:
        # The store listens at that address, and gloo on that interface.
        environment = {**environment, constants.ENV_POD_IP: _address(index), "GLOO_SOCKET_IFNAME": "wire"}
    return inner([*filter(None, prefix), *command], environment, *args, **kwargs)


async def _scrape(pod: Mapping[str, Any], page_port: int | None) -> str | None:
    """Read the page of a pod in a network namespace."""
    if page_port is None:
        return None
    url = f"http://{_address(completion_index(pod) or 0)}:{page_port}/metrics"
    try:
        answer = await asyncio.to_thread(urllib.request.urlopen, url, timeout=2)
        return str(answer.read().decode())
    except (OSError, http.client.HTTPException):
        return None


def _address(index: int) -> str:
    return f"{os.environ['DRILL_NETWORK']}.{index + 1}"


if __name__ == "__main__":
    runner.run_job = run_job
    processes.start = _start
    if "DRILL_NAMES" in os.environ:
        vars(pods)["rewrite_hosts"] = lambda text, job, subdomain: text
    if "DRILL_NETWORK" in os.environ:
        vars(pods)["loopback_address"] = _address
    sys.exit(cli.main())
