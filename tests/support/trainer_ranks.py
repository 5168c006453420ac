"""Run the trainer's ranks as real processes, without torch's import in each of them.

Ranks are forked from a server process that has imported everything once. They communicate over gloo as under torchrun,
and tests can read each rank's exit code and output, which torchrun hides.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ddp_sdk.rank_env import RankEnv
from ddp_trainer.distributed import DistributedConfig
from ddp_trainer.distributed.world import World
from tests.support import PATIENCE
from tests.support.ports import HeldPort
from tests.support.warm import CONTEXT, start_server

# The rank's program as text: a function would have to be importable by name in the server.
_BEGINNING = """
import os, sys
os.environ.update(environ)
sys.path[:0] = filter(None, environ.get('PYTHONPATH', '').split(os.pathsep))
out = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
os.dup2(out, 1)
os.dup2(out, 2)
import warnings
warnings.simplefilter("error")
if hold is not None:
    import time
    class Held:
        def __init__(self, stream):
            self.stream = stream
        def __getattr__(self, name):
            return getattr(self.stream, name)
        def write(self, text):
            written = self.stream.write(text)
            if hold in text:
                self.stream.flush()
                while not os.path.exists(output + ".go"):
                    time.sleep(0.01)
            return written
    sys.stdout = Held(sys.stdout)
"""
_TRAINER = """
import torch
# The server has read its own OMP_NUM_THREADS already, and two ranks of two threads each are many times slower.
torch.set_num_threads(int(environ["OMP_NUM_THREADS"]))
from ddp_trainer.cli import main
sys.exit(main(arguments))
"""
# A script of the test: a process group and nothing else.
_SCRIPT = """
import torch
import torch.distributed as dist
from ddp_trainer.distributed import DistributedConfig
from ddp_sdk.rank_env import RankEnv
from ddp_trainer.distributed.world import World
world = World.start(DistributedConfig(device="cpu", timeout_seconds=300), RankEnv.from_environ())
exec(compile(script, "script", "exec"))
world.close()
"""


class StartedRanks:
    """The processes of one run and their output."""

    def __init__(self, folder: Path, processes: Sequence[BaseProcess]) -> None:
        self._folder = folder
        self.processes = list(processes)

    def output(self, rank: int) -> str:
        """The output of ``rank`` so far, both streams."""
        path = self._folder / f"rank-{rank}.txt"
        return path.read_text() if path.exists() else ""

    def pid(self, rank: int) -> int:
        """Process number of ``rank``."""
        pid = self.processes[rank].pid
        assert pid is not None
        return pid

    def wait_for(self, text: str, rank: int = 0) -> None:
        """Wait until ``rank`` has written ``text``."""
        deadline = time.monotonic() + PATIENCE
        while True:
            ended = self.processes[rank].exitcode is not None  # read first: it may write and end meanwhile
            if text in self.output(rank):
                return
            assert not ended, f"ended without {text!r}: {self.output(rank)}"
            assert time.monotonic() < deadline, f"no {text!r} in: {self.output(rank)}"
            time.sleep(0.01)

    def release(self, rank: int = 0) -> None:
        """Resume a rank that was held after it wrote a text."""
        (self._folder / f"rank-{rank}.txt.go").touch()

    def kill(self) -> None:
        """SIGKILL every rank, as when a machine fails."""
        for process in self.processes:
            os.kill(process.pid or 0, signal.SIGKILL)

    def codes(self) -> list[int | None]:
        """Wait for the end of all ranks and return their exit codes; a signal's is negative."""
        deadline = time.monotonic() + PATIENCE
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        codes = [process.exitcode for process in self.processes]
        assert None not in codes, "still running: " + "".join(self.output(rank) for rank in range(len(codes)))
        return codes


@contextlib.contextmanager
def start(
    folder: Path,
    arguments: Sequence[str],
    world_size: int = 1,
    environ: Mapping[str, str] | None = None,
    *,
    script: str | None = None,
    hold: str | None = None,
    port: HeldPort | None = None,
    without: int | None = None,
) -> Iterator[StartedRanks]:
    """Start the trainer with ``arguments`` on ``world_size`` ranks of one thread; none of them outlives the block.

    A rank that has written the text ``hold`` waits until it is released, so that a test acts at this point of the run
    also on a busy machine. The other ranks wait for it in a collective.
    ``script`` replaces the trainer: Python code with ``torch``, ``dist``, ``world`` and ``arguments`` as names.
    ``without``: the rank that the caller is.
    """
    folder.mkdir(parents=True, exist_ok=True)
    held = port or HeldPort()
    processes = []
    start_server()
    for rank in range(world_size):
        if rank == without:
            continue
        own = {"OMP_NUM_THREADS": "1", "DDP_METRICS_PORT": "0", **(environ or {})}
        own |= _describe(rank, world_size, held) if world_size > 1 else {}
        names = {"environ": own, "arguments": list(arguments), "output": str(folder / f"rank-{rank}.txt")}
        names["hold"] = hold
        program = _BEGINNING + (_TRAINER if script is None else _SCRIPT)
        process = CONTEXT.Process(target=exec, args=(program, names | {"script": script or ""}))
        process.start()
        processes.append(process)
    ranks = StartedRanks(folder, processes)
    try:
        yield ranks
    finally:
        for process in processes:
            if process.exitcode is None:
                process.kill()
            process.join()
        held.stop()


def _describe(rank: int, world_size: int, port: HeldPort) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port.number),
    }


def run_as_rank(own: int, folder: Path, script: str, world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run ``script`` as :func:`run_script`; the calling process is rank ``own``, so that its coverage is measured."""
    port = HeldPort()
    with start(folder, [str(folder)], world_size, script=script, port=port, without=own) as ranks:
        for name, value in (_describe(own, world_size, port) | {"OMP_NUM_THREADS": "1"}).items():
            monkeypatch.setenv(name, value)
        world = World.start(DistributedConfig(device="cpu", timeout_seconds=60), RankEnv.from_environ())
        try:
            names = {"torch": torch, "dist": dist, "world": world, "arguments": [str(folder)]}
            exec(compile(script, "script", "exec"), names)
            assert ranks.codes() == [0] * (world_size - 1)
        except BaseException:
            print("".join(ranks.output(rank) for rank in range(world_size)))
            raise
        finally:
            world.close()


def run_script(folder: Path, script: str, world_size: int, *, arguments: Sequence[str] = ()) -> StartedRanks:
    """Run ``script`` on ``world_size`` ranks to the end, by default with ``folder`` as argument. Check its success."""
    with start(folder, arguments or [str(folder)], world_size, script=script) as ranks:
        codes = ranks.codes()
    assert codes == [0] * world_size, "".join(ranks.output(rank) for rank in range(world_size))
    return ranks


def train(
    folder: Path, arguments: Sequence[str], world_size: int = 1, environ: Mapping[str, str] | None = None
) -> StartedRanks:
    """Run to the end and check its success."""
    with start(folder, arguments, world_size, environ) as ranks:
        codes = ranks.codes()
    assert codes == [0] * world_size, ranks.output(0)
    return ranks
