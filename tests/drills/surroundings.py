"""Assumptions of a job about its environment: the wall clock, and names that resolve."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import time
from pathlib import Path

from tests.drills.core import DrillOutcome, NotHere, Perished, check_blamed, drill
from tests.drills.driven import PROGRAM
from tests.drills.scene import Scene, check_lost, kill

_HOUR = 3600


class SceneClock:
    """The wall clock of all processes of a scene."""

    def __init__(self, scene: Scene) -> None:
        compiler = shutil.which("cc")
        if compiler is None:
            raise NotHere("needs a C compiler, for a clock to preload")
        library = scene.folder / "clock.so"
        self._file = scene.folder / "clock"
        self.set(0)
        source = Path(__file__).with_name("clock.c")
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source)], check=True)
        scene.env |= {"LD_PRELOAD": str(library), "DRILL_CLOCK": str(self._file)}

    def set(self, seconds: int) -> None:
        """Shift the clock of all processes by an offset from now on."""
        with open(self._file, "r+b" if self._file.exists() else "wb") as file:
            file.write(struct.pack("=q", seconds))


def _jump(scene: Scene, seconds: int) -> DrillOutcome:
    clock = SceneClock(scene)
    run = scene.start(pendingDeadlineSeconds=1800)
    scene.until_step(run)
    tree = run.tree()
    clock.set(seconds)
    struck = kill([tree.launchers[1]])
    status = run.succeed(restarts=1)
    shown = time.mktime(time.strptime(status["completionTime"], "%Y-%m-%dT%H:%M:%SZ")) - time.timezone
    if abs(shown - seconds - time.time()) > 600:
        raise Perished("the clock of the run did not jump")
    cost = status["lastRestart"].get("recoverySeconds", 0)
    if not 0 <= cost < 600:
        raise Perished(f"the jump is taken for {cost} s of recovery")
    check_blamed(status, 1)
    scene.check_state()
    return check_lost(scene.recovery(struck, floor="agents"))


@drill("clock-forward", "all clocks jump an hour ahead, and a pod is killed at that moment")
def forward(scene: Scene) -> DrillOutcome:
    return _jump(scene, _HOUR)


@drill("clock-back", "all clocks jump an hour back, and a pod is killed at that moment")
def back(scene: Scene) -> DrillOutcome:
    return _jump(scene, -_HOUR)


@drill("dns-late", "the name of pod 0 resolves only after 60 s: the pods wait and say for what")
def late_names(scene: Scene) -> DrillOutcome:
    seconds = 8.0 if scene.fast else 60.0
    hosts = scene.folder / "hosts"
    hosts.write_text(Path("/etc/hosts").read_text())
    unshare = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-Urm"]
    within = [*unshare, "sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"', str(hosts)]
    if not shutil.which("unshare") or subprocess.run([*within, "true"], capture_output=True).returncode:
        raise NotHere("needs a mount namespace, for a hosts file of its own")
    scene.env["DRILL_NAMES"] = "1"
    run = scene.start(program=PROGRAM, within=within)
    scene.until(lambda: run.said("waiting for master"), "pods that wait", alive=run)
    struck = run.began
    scene.until(lambda: time.monotonic() - struck >= seconds, "the names", alive=run)
    with hosts.open("a") as file:
        file.write("127.0.0.1 drill-1-0.drill drill-1-1.drill\n")
    run.succeed(restarts=0, in_place=0)
    if not run.said("name does not resolve yet"):
        raise Perished(f"nobody said what was waited for\n{run.output}")
    scene.check_state()
    return scene.recovery(struck, floor="agents", waits=seconds, note="floor with the wait for the name")
