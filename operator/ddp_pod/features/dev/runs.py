"""The runs of this pod: its code, the launcher of the present run, and the one on standby for the next."""

import asyncio
import dataclasses
import os
import signal
import time
from collections.abc import Callable
from typing import Final

from ...base.files import log
from ...base.pod import Pod
from ...contract.names import EXIT_OK
from ...contract.plan import CodeConfig
from ...contract.pod_end import PodEnd
from ...contract.pod_start import PodServer
from ..code.unpack import check_archive
from .background import run_in_background
from .contract import RUN_ENDED, RUN_STARTS
from .processes import Launcher, RunEnd, end_processes, start_launcher, start_server
from .standby import RunStart

_SECONDS_TO_STANDBY: Final = 3.0  # of a run, whose own start has precedence


@dataclasses.dataclass(frozen=True)
class RunPlan:
    """What a run is. ``command``: what follows ``python``, or a program; ``digest``: of the code, empty for none."""

    run: int
    command: tuple[str, ...]
    digest: str = ""


class PodRuns:
    """The runs of this pod. ``plan``: of the newest run; ``end``: how it ended here, None while it runs.

    ``on_end``: called with the end of each run.
    """

    def __init__(self, pod: Pod, command: list[str], on_end: Callable[[RunEnd], None]) -> None:
        self._pod = pod
        self._command = command
        self._on_end = on_end
        self.plan = RunPlan(0, tuple(command), pod.code.digest if pod.code else "")
        self.is_spare = False  # of the newest run, which it has only noted
        self.started: float | None = None
        self.ended: float | None = None
        self.end: RunEnd | None = None
        self._launcher: Launcher | None = None
        self._standby: Launcher | None = None
        self._standby_run = 0
        self._server: PodServer | None = None  # that the launchers after the first one are forked from
        self._unpacked = ""  # the archive that the folder of the code has
        self._following: asyncio.Task[None] | None = None
        self._preparing = asyncio.Lock()
        self._is_closed = False

    @property
    def is_running(self) -> bool:
        """Whether a run has begun and not ended."""
        return self._launcher is not None

    @property
    def port(self) -> int | None:
        """The port of the run's report; None without one."""
        return self._launcher.port if self._launcher is not None else None

    # -- code

    def archive_of(self, digest: str) -> str:
        """Return the path of an archive that was received, or is to be."""
        return os.path.join(self._pod.runtime, f"code-{digest}")

    def has_code(self, digest: str) -> bool:
        """Return whether the pod has the code of a digest."""
        own = self._pod.code.digest if self._pod.code else ""
        return digest == own or os.path.exists(self.archive_of(digest))

    def keep_code(self, received: str, digest: str, *, checked: bool) -> None:
        """Keep an archive that was received in a file. Raises: PodSetupError, if it is damaged or another one."""
        if not checked and self._pod.code is not None:
            check_archive(self._configure(received, digest))
        os.replace(received, self.archive_of(digest))

    def _configure(self, archive: str, digest: str) -> CodeConfig:
        assert self._pod.code is not None
        return dataclasses.replace(self._pod.code, archive=archive, digest=digest)

    def _forget_code(self, kept: set[str]) -> None:
        for name in os.listdir(self._pod.runtime):
            path = os.path.join(self._pod.runtime, name)
            if name.startswith("code-") and path not in kept:
                os.unlink(path)

    # -- runs

    async def start(self, plan: RunPlan) -> None:
        """Start a run after the end of the one before."""
        launcher = await self._take_standby(plan.run)
        received = self.archive_of(plan.digest)
        archive = received if os.path.exists(received) else ""
        log(RUN_STARTS.format(plan.run))
        launcher.begin(RunStart(plan.command, archive, plan.digest, self._unpacked))
        self.plan = plan
        self.is_spare = False
        self.started = time.time()
        self.ended = None
        self.end = None
        self._launcher = launcher
        self._forget_code({archive, self._unpacked})
        self._unpacked = archive or (self._pod.code.archive if self._pod.code else "")
        self._following = asyncio.create_task(self._follow(launcher))

    def adopt(self, plan: RunPlan) -> None:
        """Take a run that has ended in the other pods as this pod's newest."""
        self.plan = plan
        self.is_spare = False

    def wait_as_spare(self, plan: RunPlan) -> None:
        """Note a run of other pods. This one ends as a spare does that waits at the rendezvous, unless it is called."""
        log(f"run {plan.run}: this pod is a spare")
        self.adopt(plan)
        self.is_spare = True
        self.end = RunEnd(EXIT_OK, PodEnd())

    async def stop(self) -> None:
        """End the present run, within the grace period of its ranks."""
        if self._launcher is not None and self._following is not None:
            self._launcher.signal(signal.SIGTERM)
            await self._following

    def signal(self, number: int) -> None:
        """Pass a signal on to the launcher of the present run."""
        if self._launcher is not None:
            self._launcher.signal(number)

    async def wait(self) -> None:
        """Wait for the end of the present run."""
        if self._following is not None:
            await self._following

    async def close(self) -> None:
        """End the launcher on standby."""
        async with self._preparing:
            self._is_closed = True
            if self._standby is not None:
                await self._standby.discard()
            if self._server is not None:
                self._server.end()

    async def _follow(self, launcher: Launcher) -> None:
        prepare = asyncio.get_running_loop().call_later(_SECONDS_TO_STANDBY, self._prepare_next)
        end = await launcher.wait(self._pod)
        prepare.cancel()
        async with self._preparing:  # a launcher that is being forked is not known yet
            await end_processes(self._list_kept)
        log(RUN_ENDED.format(self.plan.run))
        self.end = end
        self.ended = time.time()
        self._launcher = None
        self._prepare_next()
        self._on_end(end)

    def _list_kept(self) -> set[int]:
        """Return the processes that outlive a run."""
        return {process.pid for process in (self._standby, self._server) if process is not None}

    # -- standby

    def _prepare_next(self) -> None:
        if not self._is_closed:
            run_in_background(self.prepare(self.plan.run + 1))

    async def prepare(self, run: int) -> None:
        """Start a launcher that waits for a run, unless one does."""
        if run > 1:
            await self._wait_for_server()
        async with self._preparing:
            if self._standby is not None and self._standby_run == run:
                return
            if self._standby is not None:
                await self._standby.discard()
            self._standby = (
                None if self._is_closed else await start_launcher(self._pod, run, self._command, self._server)
            )
            self._standby_run = run

    async def _wait_for_server(self) -> None:
        """Start the server unless it lives, and wait for its import, during which a run may end.

        The launcher of the first run does not wait for it.
        """
        if self._is_closed:
            return
        if self._server is None or not self._server.is_alive:
            self._server = start_server(self._pod)
        if self._server is not None:
            await asyncio.to_thread(self._server.wait)

    async def _take_standby(self, run: int) -> Launcher:
        await self.prepare(run)
        async with self._preparing:
            launcher = self._standby
            self._standby = None
        return launcher or await start_launcher(self._pod, run, self._command, self._server)
