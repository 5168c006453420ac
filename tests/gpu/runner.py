"""Run every check that needs a GPU within 480 s: ``tests/gpu/run``. It needs PyTorch, torchvision, Pillow and pytest.

On a machine that is lent for minutes, from the checkout, with a limit of 540 s for the whole command:

    set -o pipefail; nvidia-smi; bash tests/gpu/run 2>&1 | tee "$OUT/output.txt"

Nothing is installed or downloaded. The folder ``$OUT`` (default: build/gpu) receives the results after every stage:
summary.json (card, versions, the end of each step), tests.json, seeds.json, costs.json, floor.json and log.txt (the end
of each step's output). ``--only NAME,NAME --seconds 150`` repeats steps; ``--list`` prints their names.

Steps run in order of value, each in a separate process whose processes are killed at its limit. A failed step does not
end the run. Steps of one stage run at the same time: the tests, and compilations, whose results torch.compile finds in
its cache when the later stages measure. The exit code is 1 if a step failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

from tests.gpu.plan import PRECISIONS, SYSTEMS, is_compiled_before
from tests.gpu.table import build_table
from tests.support import ROOT

ENV_MARK = "DDP_GPU_RUN"
"""The variable by which processes of a step are found: its value is RUN/STEP/."""
_SECONDS = 480.0
_LEAST_SECONDS = 1.0  # no step starts with less
_BESIDE_OTHERS = ("env", "OMP_NUM_THREADS=1")  # for steps that run at the same time
_LOG_BYTES = 200_000  # of each step's output in log.txt


class Step(NamedTuple):
    """One process. It may run for ``limit`` seconds. An optional step's failure is not the run's failure."""

    name: str
    command: Sequence[str]
    limit: float
    optional: bool = False


class StepEnd(NamedTuple):
    """How a step ended: ``passed``, ``failed``, ``timeout`` or ``not started``, and why."""

    name: str
    state: str
    seconds: float
    limit: float
    problem: str
    optional: bool


class Runner:
    """Runs stages one after the other, and the steps of a stage at the same time, at most ``workers`` of them.

    ``seconds``: the limit of the whole run. ``folder`` receives a log per step, NAME.log.
    """

    def __init__(self, folder: Path, seconds: float, workers: int) -> None:
        self.ends: list[StepEnd] = []
        self._folder = folder
        self._workers = workers
        self._started = time.monotonic()
        self._deadline = self._started + seconds
        self._run = uuid.uuid4().hex
        self._lock = threading.Lock()
        self._is_stopped = False

    def run(self, stages: Sequence[Sequence[Step]], report: Callable[[], object]) -> None:
        """Run all stages. ``report`` is called after each."""
        for stage in stages:
            # A step that waits for a free worker has only what is left of the stage's time.
            deadline = min(self._deadline, time.monotonic() + max(step.limit for step in stage))
            with ThreadPoolExecutor(self._workers) as pool:
                list(pool.map(self._run_step, stage, [deadline] * len(stage)))
            report()

    def stop(self, *_: object) -> None:
        """End all processes; no further step starts."""
        self._is_stopped = True
        end_processes(f"{ENV_MARK}={self._run}/")

    def _run_step(self, step: Step, deadline: float) -> None:
        began = time.monotonic()
        limit = max(0.0, min(step.limit, deadline - began))
        state = "not started"
        problem = "no time is left"
        if not self._is_stopped and limit >= _LEAST_SECONDS:
            state, problem = self._run_process(step, limit)
        now = time.monotonic()
        with self._lock:
            self.ends.append(StepEnd(step.name, state, now - began, limit, problem, step.optional))
            print(
                f"[{now - self._started:4.0f} s] {step.name}: {state} after {now - began:.1f} s {problem}", flush=True
            )

    def _run_process(self, step: Step, limit: float) -> tuple[str, str]:
        """Return the state at the end of the process, and its problem."""
        log = self._folder / f"{step.name}.log"
        mark = f"{self._run}/{step.name}/"
        state = "timeout"
        with log.open("wb") as output:
            process = subprocess.Popen(
                step.command,
                cwd=ROOT,
                env={**os.environ, ENV_MARK: mark},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            with contextlib.suppress(subprocess.TimeoutExpired):
                state = "failed" if process.wait(limit) else "passed"
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            end_processes(f"{ENV_MARK}={mark}")  # those in other sessions, such as a pod's
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)  # a process in the driver may not end
        lines = log.read_text(errors="replace").strip().splitlines()
        problem = f"exit code {process.returncode}: {' '.join(lines[-1:])[:200]}"
        return state, "" if state == "passed" else problem


def end_processes(mark: str) -> None:
    """Kill all processes whose environment contains ``mark``, whatever their session and parent."""
    for file in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark.encode() in file.read_bytes():
                os.kill(int(file.parent.name), signal.SIGKILL)


def plan_stages(device: str, quick: bool, work: Path, scale: float = 1.0) -> list[list[Step]]:
    """Return the stages in order of value. ``scale`` multiplies the limits; ``work`` receives the results."""

    def measure(name: str, limit: float, *arguments: str, beside_others: bool = False) -> Step:
        command = [sys.executable, "-m", "tests.gpu.measure", *(arguments or [name]), "--device", device]
        command += ["--data", str(work / "data"), "--result", str(work / f"{name}.json"), *(["--quick"] * quick)]
        return Step(name, [*_BESIDE_OTHERS * beside_others, *command], limit * scale, beside_others)

    compilations = [
        measure(f"compile-{precision}-{system.name}", 140, "compile", system.name, precision, beside_others=True)
        for precision in PRECISIONS
        for system in SYSTEMS
        if is_compiled_before(system, precision, device)
    ]
    options = ["-c", os.devnull, "--rootdir", str(ROOT), "--noconftest", "--import-mode=importlib", "-v", "--tb=short"]
    pytest = [*_BESIDE_OTHERS, sys.executable, "-m", "pytest", *options, "-p", "no:cacheprovider", "-p", "no:logging"]
    tests = [
        Step(path.stem, [*pytest, f"--junitxml={work / path.stem}.xml", str(path)], 140 * scale)
        for path in sorted(Path(__file__).parent.glob("test_*.py"))
    ]
    systems = [measure(system.name, 90, "system", system.name) for system in SYSTEMS]
    return [
        [measure("card", 60), measure("data", 60)],
        [*compilations[:1], *tests, *compilations[1:]],  # the first one is needed first
        systems[:1],
        [measure("floor", 45)],
        [measure("costs", 60)],
        *([step] for step in systems[1:]),
    ]


def collect_results(work: Path) -> dict[str, Any]:
    """Return the results so far by the names of their files."""

    def read(name: str) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):  # the step was killed, or has not run
            return dict(json.loads((work / f"{name}.json").read_text()))
        return {}

    tests = []
    for file in sorted(work.glob("*.xml")):
        with contextlib.suppress(ElementTree.ParseError):  # killed while it wrote
            for case in ElementTree.parse(file).iter("testcase"):
                end = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
                outcome = {"test": f"{file.stem}::{case.get('name')}", "seconds": float(case.get("time") or 0)}
                reason = {} if end is None else {"message": end.get("message"), "details": end.text}
                tests.append({**outcome, "outcome": "passed" if end is None else end.tag, **reason})
    seeds = {system.name: result for system in SYSTEMS if (result := read(system.name))}
    return {"card": read("card"), "tests": tests, "seeds": seeds, "floor": read("floor"), "costs": read("costs")}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the steps and print the table. Returns 1 if a step that is not optional did not pass."""
    parser = argparse.ArgumentParser(prog="tests/gpu/run", description="Run every check that needs a GPU.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="small batches and few rounds, for a CPU")
    parser.add_argument("--only", metavar="A,B", help="only these steps, and card and data")
    parser.add_argument("--seconds", type=float, default=_SECONDS, metavar="X", help="limit of the run; default: 480; "
                        "a longer one raises the limits of all steps")  # fmt: skip
    parser.add_argument("--list", action="store_true", help="print the names of the steps")
    flags = parser.parse_args(arguments)
    out = Path(os.environ.get("OUT") or ROOT / "build" / "gpu")
    cpus = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="ddp-gpu-", ignore_cleanup_errors=True) as folder:
        work = Path(folder)
        stages = plan_stages(flags.device, flags.quick, work, max(1.0, flags.seconds / _SECONDS))
        names = [step.name for stage in stages for step in stage]
        if flags.list:
            print("\n".join(names))
            return 0
        selected = {"card", "data", *flags.only.split(",")} if flags.only else set(names)
        if not selected <= set(names):
            parser.error(f"argument --only: unknown steps {', '.join(selected - set(names))}; --list prints the names")
        stages = [[step for step in stage if step.name in selected] for stage in stages]

        os.environ["DDP_TEST_DEVICE"] = flags.device
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # those of the machine's other packages
        if flags.device == "cpu":
            os.environ["OMP_NUM_THREADS"] = "1"  # on a busy machine threads wait for each other
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(1, cpus // 2)))
        out.mkdir(parents=True, exist_ok=True)
        runner = Runner(work, flags.seconds, workers=max(3, cpus * 3 // 4))
        about = {"device": flags.device, "quick": flags.quick, "cpus": cpus}

        def write() -> dict[str, Any]:
            results = collect_results(work)
            summary = {**about, "card": results.pop("card"), "steps": [end._asdict() for end in runner.ends]}
            for name, content in {"summary": summary, **results}.items():
                (out / f"{name}.json").write_text(json.dumps(content, indent=1))
            with (out / "log.txt").open("wb") as file:
                for log in sorted(work.glob("*.log"), key=lambda path: path.stat().st_mtime):
                    file.write(f"\n===== {log.stem}\n".encode() + log.read_bytes()[-_LOG_BYTES:])
            return {"summary": summary, **results}

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, runner.stop)  # the results so far are written and printed
        runner.run([stage for stage in stages if stage], write)
        print("\n".join(build_table(**write())), f"details: {out}", sep="\n", flush=True)
    return int(any(end.state != "passed" and not end.optional for end in runner.ends))


if __name__ == "__main__":
    sys.exit(main())
