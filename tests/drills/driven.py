"""`ddp run` with what a drill puts around its pods.

``DRILL_PREFIX_<index>`` (lines) is put before the command of the pods of an index. ``DRILL_NAMES``: pods find each
other by their names. ``DRILL_NETWORK``: by the addresses (NETWORK.10 and so on) that they have in network namespaces.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ddp_cli import __main__ as cli
from ddp_cli.local import pods, processes, runner
from ddp_cli.local.job_controller import completion_index
from ddp_cli.local.runner import LocalRunPlan, Run, RunOutcome
from ddp_operator.api import constants
from ddp_operator.kube.scrape import fetch_report

PROGRAM = str(Path(__file__))


class Driven(Run):
    """A run whose pods may be in network namespaces."""

    async def run(self) -> RunOutcome:
        """Run, and read the pages of these pods."""
        cluster = self._cluster
        if "DRILL_NETWORK" in os.environ:

            async def read_report(pod: Any, port: int) -> bytes | None:
                local_port = cluster.kubelet.port_of(pod)
                if local_port is None:
                    return None
                return await fetch_report(_address(completion_index(pod) or 0), local_port)

            cluster.read_report = read_report  # type: ignore[method-assign]
        return await super().run()


def run_job(plan: LocalRunPlan) -> RunOutcome:
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


def _address(index: int | str) -> str:
    """Return the address of a pod; for ``{}`` the pattern of all addresses, as the launcher's plan has it for names."""
    return f"{os.environ['DRILL_NETWORK']}.1{index}"


def _rewrite_hosts(text: str, job: str, subdomain: str, inner: Any = pods.rewrite_hosts) -> str:
    return str(inner(text.replace(f"{job}-{{}}.{subdomain}", _address("{}")), job, subdomain))


if __name__ == "__main__":
    runner.run_job = run_job
    processes.start = _start
    if "DRILL_NAMES" in os.environ:
        vars(pods)["rewrite_hosts"] = lambda text, job, subdomain: text
    if "DRILL_NETWORK" in os.environ:
        vars(pods)["loopback_address"] = _address
        vars(pods)["rewrite_hosts"] = _rewrite_hosts
    sys.exit(cli.main())
