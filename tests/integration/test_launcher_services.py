"""A feature of a real pod whose every hook fails: the pod trains on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddp_pod.contract.plan import PreflightConfig
from tests.support.launcher_folder import lay_out
from tests.support.launcher_pods import LauncherPods

pytestmark = pytest.mark.process

SERVICE = """
from ...base.launcher_part import LauncherPart
from ...base.service import Service

class Broken(Service):
    name = "preflight"

def fail(self, *arguments):
    {body}

for hook in {hooks}:
    setattr(Broken, hook, fail)

PART = LauncherPart(create=lambda pod, reader: (Broken(),))
"""
AGENT = """
from ...torchrun.part import AgentPart

class Broken(AgentPart):
    name = "preflight"

    def prepare_round(self, pod, current):
        raise RuntimeError("a bug before a round")

    def join_round(self, pod, store, pods):
        raise RuntimeError("a bug in a round")

    def prepare_stop(self, pod):
        raise RuntimeError("a bug before a stop")

PART = Broken()
"""
HOOKS = (
    "start", "run", "list_watched", "find_timeout", "follow", "is_ready", "note", "answer", "explain", "find_awaited",
    "log_state", "forget", "list_processes", "note_end", "finish", "is_finished", "report", "read_page", "conclude",
)  # fmt: skip
FAILS_ONCE = """
import os, sys, time
if os.environ["RANK"] == "0" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    sys.exit(3)
while os.environ["TORCHELASTIC_RESTART_COUNT"] == "1" and not os.path.exists("enough"):
    time.sleep(0.05)
"""


@pytest.mark.parametrize(
    "body", ["raise RuntimeError('a bug')", "return [{1: object}, 2.5]"], ids=["raises", "garbage"]
)
def test_pod_trains_on_if_each_hook_of_a_feature_fails(tmp_path: Path, body: str) -> None:
    replaced = {
        "features/preflight/launcher.py": SERVICE.format(body=body, hooks=HOOKS),
        "features/preflight/agent.py": AGENT,
    }
    (tmp_path / "train.py").write_text(FAILS_ONCE)
    job = LauncherPods(
        tmp_path,
        ["train.py"],
        nodes=1,
        nproc=2,
        max_restarts=1,
        config={"preflight": PreflightConfig(False, ("dns",), 0)},
        launcher=lay_out(tmp_path / "mount", replaced),
        warm=False,
    )
    try:
        job.start()
        job.until(lambda: json.loads(job.page(path="report")).get("restarts") == 1, "the ranks restart")
        report = json.loads(job.page(path="report"))
        (tmp_path / "enough").touch()
        ended = job.wait(0)
    finally:
        job.stop()
    assert ended.code == 0, ended.log
    assert report["faults"] > 5
    for hook in ("start", "follow", "note_end", "forget", "report", "explain"):
        assert ended.log.count(f"internal error of the launcher in preflight.{hook};") == 1, hook
    assert "internal error of the launcher in preflight; training continues without it" in ended.log


def test_fault_of_the_mirror_ends_the_pod(tmp_path: Path) -> None:
    """Without it, the ranks might start with other checkpoints than those of the store."""
    mirror = SERVICE.format(body="raise RuntimeError('a bug')", hooks=("is_ready",)).replace(
        'name = "preflight"', 'name = "mirror"; is_vital = True'
    )
    (tmp_path / "train.py").write_text("open('started', 'w')\n")
    job = LauncherPods(
        tmp_path,
        ["train.py"],
        nodes=1,
        config={"preflight": PreflightConfig(False, ("dns",), 0)},
        launcher=lay_out(tmp_path / "mount", {"features/preflight/launcher.py": mirror}),
        warm=False,
    )
    try:
        (ended,) = job.run()
    finally:
        job.stop()
    assert ended.code == 82, ended.log
    assert ended.message["message"] == "internal error of the launcher: RuntimeError: a bug"
    assert not (tmp_path / "started").exists()
