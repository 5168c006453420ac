"""A network between two pods in separate namespaces, connected by a link that drills cut and slow down."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from tests.drills.core import DrillOutcome, NotHere, drill
from tests.drills.driven import PROGRAM
from tests.drills.scene import Scene, check_lost, kill

_TIMEOUT = 6
"""Seconds that a collective may take in these drills."""


class Cable:
    """Two namespaces and the link between them."""

    def __init__(self, scene: Scene) -> None:
        if os.geteuid() != 0:
            raise NotHere("needs root, for network namespaces")
        if not shutil.which("ip") or not Path("/dev/net/tun").exists():
            raise NotHere("needs the command ip, and /dev/net/tun")
        number = random.randrange(1, 250)
        self.network = f"198.18.{number}"  # addresses reserved for tests of networks
        names = [f"ddp-drill-{os.getpid()}-{number}-{index}" for index in range(2)]
        for name in names:
            if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode:
                raise NotHere("network namespaces cannot be made")
            scene.on_leaving(partial(subprocess.run, ["ip", "netns", "delete", name], check=True))
        words = [sys.executable, str(Path(__file__).with_name("wire.py")), self.network, *names]
        self._wire = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        scene.on_leaving(self._close)
        assert self._wire.stdout is not None
        if self._wire.stdout.readline() != "ready\n":
            raise NotHere("TUN devices cannot be made")
        for index, name in enumerate(names):
            scene.env[f"DRILL_PREFIX_{index}"] = "\n".join(["ip", "netns", "exec", name])
        scene.env["DRILL_NETWORK"] = self.network

    def tell(self, words: str) -> float:
        """Change the link. Return the time just before."""
        assert self._wire.stdin is not None
        now = time.monotonic()
        self._wire.stdin.write(words + "\n")
        self._wire.stdin.flush()
        return now

    def _close(self) -> None:
        for stream in (self._wire.stdin, self._wire.stdout):
            assert stream is not None
            stream.close()
        self._wire.wait(10)


@drill("network-cut", "for 20 s no packet passes between the pods, with 6 s for a collective")
def cut(scene: Scene) -> DrillOutcome:
    cable = Cable(scene)
    seconds = 20.0
    arguments = ["--collective-timeout-seconds", str(_TIMEOUT)]
    run = scene.start(program=PROGRAM, arguments=arguments)
    scene.until_step(run)
    run.note_ports()
    struck = cable.tell("cut")
    scene.until(lambda: time.monotonic() - struck >= seconds, "the end of the cut", alive=run)
    cable.tell("mend")
    run.succeed()
    scene.check_state()
    return check_lost(scene.recovery(struck, floor="agents", waits=seconds, note="floor with the 20 s of the cut"))


@drill("network-blip", "for 3 s no packet passes between the pods: steps wait, nothing restarts")
def blip(scene: Scene) -> DrillOutcome:
    cable = Cable(scene)
    run = scene.start(program=PROGRAM)
    scene.until_step(run)
    run.note_ports()
    struck = cable.tell("cut")
    scene.until(lambda: time.monotonic() - struck >= 3, "the end of the cut", alive=run)
    cable.tell("mend")
    run.succeed(restarts=0, in_place=0)
    scene.check_state()
    return DrillOutcome(lost=0)


@drill("network-slow", "each packet takes 30 ms longer, also while a killed worker is started again")
def slow(scene: Scene) -> DrillOutcome:
    cable = Cable(scene)
    run = scene.start(program=PROGRAM)
    scene.until_step(run)
    cable.tell("slow 0.03")
    scene.until_step(run, 18)
    struck = kill([run.tree().workers[1]])
    run.succeed(restarts=0, in_place=1)
    scene.check_state()
    return check_lost(scene.recovery(struck, floor="ranks"))
