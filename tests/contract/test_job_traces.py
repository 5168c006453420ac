"""Whole lives of Jobs, recorded from a real Job controller: every cluster must behave equally."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import pytest_asyncio

from ddp_operator.api import constants
from ddp_operator.api.cluster import Object, Snapshot
from tests.support.cluster_drivers import ClusterDriver
from tests.support.cluster_drivers.base import index_of, living
from tests.support.traces import QUIET, Trace

from .conftest import CLUSTERS, open_cluster
from .test_cluster_contract import FATAL, JOB, KEY, REPLACED, job

COUNTS = ("active", "ready", "terminating", "succeeded", "failed")
BACKOFF = 15.0
"""Seconds, longer than a real Job controller's first back-off."""
Step = tuple[Any, ...]


class Scenario(NamedTuple):
    """A Job and its events."""

    steps: tuple[Step, ...]
    nodes: int = 2
    spec: Mapping[str, Any] = {}
    """Replacements in the operator's own spec; None removes a field."""

    @property
    def holds_pods(self) -> bool:
        """Whether pods need time to end, unlike the local cluster's processes."""
        return ("hold",) in self.steps


NO_POLICY = {"podFailurePolicy": None, "podReplacementPolicy": None}
SCENARIOS = {
    "success": Scenario((("finish", 0), ("finish", 1))),
    "success-policy": Scenario((("finish", 0),), spec={"successPolicy": {"rules": [{"succeededIndexes": "0"}]}}),
    "success-policy-with-pods-that-end-slowly": Scenario(
        (("hold",), ("finish", 0), ("free",)), spec={"successPolicy": {"rules": [{"succeededIndexes": "0"}]}}
    ),
    "fatal-exit-code": Scenario((("finish", 1, FATAL),), nodes=3),
    "fatal-exit-code-after-a-success": Scenario((("finish", 0), ("finish", 1, FATAL))),
    "fatal-exit-code-with-pods-that-end-slowly": Scenario((("hold",), ("finish", 1, FATAL), ("free",)), nodes=3),
    "replaceable-exit-code": Scenario((("finish", 1, REPLACED), ("wait",), ("finish", 0), ("finish", 1))),
    "exit-code-of-a-signal": Scenario((("finish", 0, 143), ("wait",))),
    "disruption": Scenario((("disrupt", 1), ("finish", 0), ("finish", 1))),
    "pod-deleted": Scenario((("delete", 1), ("finish", 0))),
    "pod-deleted-that-ends-slowly": Scenario((("hold",), ("delete", 1), ("free",), ("wait",))),
    "success-that-ends-the-back-off": Scenario((("finish", 1, REPLACED), ("finish", 0), ("finish", 1))),
    "suspended-and-resumed": Scenario((("suspend", True), ("suspend", False), ("finish", 0), ("finish", 1))),
    "suspended-with-pods-that-end-slowly": Scenario((("hold",), ("suspend", True), ("free",), ("suspend", False))),
    "suspended-after-a-success": Scenario((("finish", 0), ("suspend", True), ("suspend", False))),
    "created-suspended": Scenario((("suspend", False),), spec={"suspend": True}),
    "resized": Scenario((("resize", 3), ("resize", 1), ("finish", 0))),
    "resized-down-to-what-has-succeeded": Scenario((("finish", 0), ("resize", 1)), nodes=3),
    "resized-up-after-a-success": Scenario((("finish", 0), ("resize", 3))),
    "resized-with-pods-that-end-slowly": Scenario((("hold",), ("resize", 1), ("resize", 3), ("free",)), nodes=3),
    "backoff-limit": Scenario((("finish", 1, 1),), spec=NO_POLICY | {"backoffLimit": 0}),
}


class TracedJob:
    """A Job on a cluster, and the actions on it."""

    def __init__(self, driver: ClusterDriver) -> None:
        self._driver = driver

    async def create(self, nodes: int, changes: Mapping[str, Any]) -> None:
        """Create the resource and its Job."""
        manifest = job(await self._driver.add_resource(KEY.name), nodes)
        manifest["spec"] = {key: value for key, value in (manifest["spec"] | changes).items() if value is not None}
        await self._driver.cluster.create(self._driver.dress(manifest))

    async def act(self, action: str, *details: Any) -> None:
        """Do one step of a scenario."""
        cluster = self._driver.cluster
        spec = {}
        if action in ("hold", "free"):
            await self._driver.let_pods_end(action == "free")
        elif action == "finish":
            await self._driver.finish_pod(JOB, details[0], code=(*details, 0)[1])
        elif action == "disrupt":
            await cluster.disrupt_pod(await self._pod(details[0]), "NodeLost", "the node is gone", lost=True)
        elif action == "delete":
            meta = (await self._pod(details[0]))["metadata"]
            await cluster.delete("Pod", KEY.namespace, meta["name"], uid=meta["uid"])
        elif action == "suspend":
            spec = {"suspend": details[0]}
        elif action == "resize":
            spec = {"completions": details[0], "parallelism": details[0]}
        if spec:
            await cluster.patch_job(KEY.namespace, JOB, {"spec": spec})

    async def state(self) -> dict[str, Any]:
        """Run every pod that can run, and return the state."""
        seen = await self._observe()
        for index, pod in living(seen).items():
            if pod["status"].get("phase") != "Running":
                with suppress(TimeoutError):  # it has gone meanwhile
                    async with asyncio.timeout(1):
                        await self._driver.run_pod(JOB, index)
        return state_of(seen)

    async def pod(self) -> dict[str, Any]:
        """Return the fields that the Job controller derived from the template in pod 0."""
        await self._pod(0)
        (pod,) = [pod for pod in await self._driver.list_whole_pods(KEY) if index_of(pod) == 0]
        meta = pod["metadata"]
        spec = pod["spec"]
        kept = {
            key: meta.get(key) for key in ("labels", "annotations", "finalizers", "ownerReferences", "generateName")
        }
        env = [item for item in spec["containers"][0]["env"] if item["name"] == constants.ENV_COMPLETION_INDEX]
        made = kept | {"hostname": spec["hostname"], "env": env}
        result: dict[str, Any] = json.loads(json.dumps(made).replace(meta["ownerReferences"][0]["uid"], "UID"))
        return result

    async def _observe(self) -> Snapshot:
        seen = await self._driver.cluster.observe(KEY)
        assert seen is not None
        return seen

    async def _pod(self, index: int) -> Object:
        seen = await self._driver.until(KEY, lambda seen: index in living(seen), f"a pod {index}")
        return living(seen)[index]


def state_of(seen: Snapshot) -> dict[str, Any]:
    """Return the state of a Job and its pods without names and times."""
    (result,) = seen.jobs
    status = result.get("status") or {}
    conditions = [
        [item["type"], item["status"], item.get("reason", ""), re.sub(rf"{JOB}-(\d+)-\w+", rf"{JOB}-\1-*", message)]
        for item in status.get("conditions") or ()
        for message in [item.get("message", "")]
    ]
    pods = [
        {
            "index": index_of(pod),
            "phase": pod["status"].get("phase"),
            "deleted": "deletionTimestamp" in pod["metadata"],
            "tracked": constants.JOB_TRACKING_FINALIZER in (pod["metadata"].get("finalizers") or ()),
        }
        for pod in seen.pods
    ]
    return {
        "conditions": conditions,
        **{name: status.get(name) or 0 for name in COUNTS},
        "completedIndexes": status.get("completedIndexes", ""),
        "started": "startTime" in status,
        "completed": "completionTime" in status,
        "pods": sorted(pods, key=lambda pod: tuple(map(str, pod.values()))),
    }


@pytest_asyncio.fixture(params=CLUSTERS)
async def driver(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[ClusterDriver]:
    """Each cluster, with a back-off that is long enough to be seen."""
    async with open_cluster(request, tmp_path, backoff=2.0) as opened:
        yield opened


@pytest.mark.parametrize("name", SCENARIOS)
async def test_job_matches_recording(driver: ClusterDriver, name: str, trace: Callable[[str], Trace]) -> None:
    scenario = SCENARIOS[name]
    if scenario.holds_pods and not driver.can_hold_pods:
        pytest.skip("this cluster's pods end at once")
    stage = TracedJob(driver)
    recorded = trace(f"jobs/{name}")
    await stage.create(scenario.nodes, scenario.spec)
    await recorded.step(f"create {scenario.nodes}", stage.state, view=driver.comparable)
    for step in scenario.steps:
        await stage.act(*step)
        words = " ".join(map(str, step))
        # Clusters differ in when such a pod and its backoff end.
        quiet = BACKOFF if step[0] in ("disrupt", "delete") and not scenario.holds_pods else QUIET
        waits = step == ("wait",)
        await recorded.step(words, stage.state, view=driver.comparable, changes=waits, quiet=quiet)


async def test_pod_matches_recorded_template(driver: ClusterDriver, trace: Callable[[str], Trace]) -> None:
    stage = TracedJob(driver)
    await stage.create(2, {})
    await trace("jobs/pod").step("create 2", stage.pod)
