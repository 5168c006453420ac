"""A trace of some steps by torch.profiler, one per rank."""

import os
from collections.abc import Iterable
from pathlib import Path

import torch

from ddp_trainer import contract
from ddp_trainer.distributed.world import World
from ddp_trainer.errors import warn
from ddp_trainer.files import writable, write_atomically

# Steps of this process: skipped, then warm-up of the profiler, then traced.
_WAIT = 8
_WARM_UP = 2
TRACED = 5
LEFT_OUT = _WAIT + _WARM_UP
_END = object()


class Tracer:
    """Writes ``rank-<rank>.json.gz``, a Chrome trace of steps 11 to 15 of this process, into ``folder`` if it is set.

    Under the launcher it writes the file's path into the runtime directory for ``ddp run``. A failure to write the
    trace is a warning; raises :class:`UserError` on all ranks if a folder can't be created.
    """

    def __init__(self, folder: str | None, world: World) -> None:
        self._env = world.env
        self._steps = 0
        self._profile: torch.profiler.profile | None = None
        if folder is None:
            return
        self._path = Path(folder).absolute() / f"rank-{world.rank}.json.gz"
        with world.agreed(), writable(self._path.parent, "profile_dir"):
            self._path.parent.mkdir(parents=True, exist_ok=True)
        activities = [torch.profiler.ProfilerActivity.CPU]
        if world.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profile = torch.profiler.profile(
            activities=activities,
            schedule=torch.profiler.schedule(wait=_WAIT, warmup=_WARM_UP, active=TRACED, repeat=1),
            record_shapes=True,
        )

    def follow(self, steps: Iterable[None]) -> None:
        """Run all ``steps``, and trace those that are due."""
        steps = iter(steps)
        while self._profile is not None and next(steps, _END) is not _END:
            if not self._steps:
                self._profile.start()
            self._steps += 1
            self._profile.step()
            if self._steps == LEFT_OUT + TRACED:
                self._write(self._profile)
                self._profile = None
        for _ in steps:
            pass

    def close(self) -> None:
        """Warn on rank 0 if the run was too short for a trace."""
        if self._profile is None:
            return
        if self._steps:
            self._profile.stop()
        if self._steps and not self._env.rank:
            warn(
                f"no traces: the run took {self._steps} steps, but the traced ones are {LEFT_OUT + 1} to "
                f"{LEFT_OUT + TRACED}"
            )

    def _write(self, profile: torch.profiler.profile) -> None:
        profile.stop()
        try:
            profile.export_chrome_trace(str(self._path))
            if runtime_dir := os.environ.get(contract.ENV_RUNTIME_DIR):
                note = contract.RUNTIME_TRACE_FILE.format(local_rank=self._env.local_rank)
                write_atomically(Path(runtime_dir) / note, str(self._path).encode())
        except (OSError, RuntimeError) as error:
            warn(f"rank {self._env.rank}: cannot write to {self._path}: {error}")
            return
        if not self._env.rank:
            steps = f"{LEFT_OUT + 1} to {LEFT_OUT + TRACED}"
            print(f"traces of steps {steps} of each rank in {self._path.parent}", flush=True)
