"""`ddp run` whose pods are evicted on request: a file ``evict-<index>`` in the working directory evicts that pod."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from ddp_cli import __main__ as cli
from ddp_cli.local import runner
from ddp_cli.local.job_controller import completion_index
from ddp_cli.local.runner import LocalRunPlan, Run, RunOutcome

PROGRAM = str(Path(__file__))
REASON = "EvictionByEvictionAPI"
MESSAGE = "Eviction API: evicting"


class EvictedRun(Run):
    """A run whose pods are evicted."""

    async def run(self) -> RunOutcome:
        """Run, and evict pods meanwhile."""
        evictions = asyncio.create_task(self._evict_pods())
        try:
            return await super().run()
        finally:
            evictions.cancel()

    async def _evict_pods(self) -> None:
        while True:
            for request in Path().glob("evict-*"):
                index = int(request.name.removeprefix("evict-"))
                for pod in self._cluster.store.list("Pod"):
                    if completion_index(pod) == index and "deletionTimestamp" not in pod["metadata"]:
                        await self._cluster.disrupt_pod(pod, REASON, MESSAGE, lost=False)
                request.unlink()
            await asyncio.sleep(0.05)


def run_job(plan: LocalRunPlan) -> RunOutcome:
    """Replace the function of this name in ``local.runner``."""
    return asyncio.run(EvictedRun(plan).run())


if __name__ == "__main__":
    runner.run_job = run_job
    sys.exit(cli.main())
