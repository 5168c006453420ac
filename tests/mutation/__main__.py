"""Make a sample of mutations in each module of the table, and print how many of them the nearest tests have noticed.

    python -m tests.mutation [--sample 20] [--seed 0] [--only status/decide] [--jobs 2]

Each mutation lives in a process forked from one that has imported what is not ours; nothing is written into the
checkout. Ends with 1 where a module's tests fail without any mutation, or too few of the decision and I/O modules'
mutations were noticed.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import ModuleType

from tests.support import ROOT

from .mutations import mutate, mutations
from .nearest import find_modules, find_tests

ENOUGH = 0.9
FOREIGN = (
    "pytest", "xdist", "pytest_asyncio", "pytest_timeout", "hypothesis", "msgspec", "yaml", "kopf", "aiohttp", "psutil",
    "prometheus_client", "numpy", "torch", "kubernetes_validate", "jsonschema", "cel_expr_python",
)  # fmt: skip
"""Imported once. Nothing of ours may be among them, and none may start a thread."""
SLOWEST = 5
"""So many times as long as without a mutation may tests take with one: then they have noticed it by not ending."""


class Mutated(importlib.abc.MetaPathFinder, importlib.abc.SourceLoader):
    """Gives one module from another tree than its file has."""

    def __init__(self, module: str, tree: ast.Module) -> None:
        self.path, self.tree = str(ROOT / module), tree
        parts = module.removesuffix(".py").split("/")[1:]
        self.name = ".".join(parts)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> object:
        """Answer for the one module."""
        return importlib.util.spec_from_file_location(name, self.path, loader=self) if name == self.name else None

    def get_code(self, fullname: str) -> object:
        """Return the mutated code."""
        return compile(self.tree, self.path, "exec", dont_inherit=True)

    def get_filename(self, fullname: str) -> str:
        """Return the file, for tracebacks."""
        return self.path

    def get_data(self, path: str) -> bytes:
        """Return the file as it is."""
        with open(path, "rb") as file:
            return file.read()


@dataclass(frozen=True)
class Tried:
    """One run of the nearest tests: with a mutation, or without one (``what`` is empty)."""

    code: int
    seconds: float
    line: int = 0
    what: str = ""


def run_tests(module: str, tests: Sequence[str], number: int | None, limit: float) -> Tried:
    """Run tests in a forked process, with the module's mutation of this number."""
    line, what = 0, ""
    tree = None
    if number is not None:
        tree, mutation = mutate((ROOT / module).read_text(encoding="utf-8"), number)
        line, what = mutation.line, mutation.what
    since = time.monotonic()
    pid = os.fork()
    if pid == 0:
        _child(module, tests, tree)
    code = _wait(pid, limit)
    return Tried(code, time.monotonic() - since, line, what)


def _child(module: str, tests: Sequence[str], tree: ast.Module | None) -> None:
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        terminal = os.dup(1)
        output = tempfile.TemporaryFile()  # noqa: SIM115 - until this process ends
        for descriptor in (1, 2):
            os.dup2(output.fileno(), descriptor)
        if tree is not None:
            sys.meta_path.insert(0, Mutated(module, tree))
        import pytest

        os.environ["HYPOTHESIS_EXAMPLES"] = "10"
        runnable = "not process and not apiserver and not nightly"
        options = ["-x", "-qq", "--no-summary", "-p", "no:cacheprovider", "-m", runnable]
        options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of plugins: they are imported before
        code = int(pytest.main([*options, *tests]))
        if code and tree is None:  # they fail without any mutation: say why
            output.seek(0)
            os.write(terminal, output.read())
        os._exit(code)
    except BaseException:
        traceback.print_exc()
        os._exit(3)


def _wait(pid: int, limit: float) -> int:
    """Return the exit code of a child; -9 for one that had to be killed."""
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # what its tests have left
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return -signal.SIGKILL


def sample(module: str, size: int, seed: str) -> list[int]:
    """Return the numbers of the mutations to try, by line."""
    total = len(list(mutations(ast.parse((ROOT / module).read_text(encoding="utf-8")))))
    return sorted(random.Random(f"{seed}:{module}").sample(range(total), min(size, total)))


def try_module(module: str, tests: Sequence[str], numbers: Sequence[int], jobs: int) -> Iterator[Tried]:
    """Yield a run without a mutation, and if that passes one for each of the mutations."""
    plain = run_tests(module, tests, None, 600)
    yield plain
    if plain.code == 0:
        limit = max(20.0, SLOWEST * plain.seconds)
        with ThreadPoolExecutor(jobs) as pool:
            yield from pool.map(lambda number: run_tests(module, tests, number, limit), numbers)


def main() -> int:
    """Try all that was asked for, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sample", type=int, default=20, help="mutations to try in each module")
    parser.add_argument("--seed", default="0", help="another one tries others")
    parser.add_argument("--only", default="", help="modules whose path has this in it")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="how many at the same time")
    options = parser.parse_args()
    for name in FOREIGN:
        importlib.import_module(name)
    killed = tried = needed = noticed = 0
    broken = []
    for module, row in find_modules():
        if options.only not in module or not (numbers := sample(module, options.sample, options.seed)):
            continue
        plain, *runs = try_module(module, find_tests(module, row), numbers, options.jobs)
        if plain.code != 0:
            broken.append(module)
            print(f"{module}: its tests end with {plain.code} without any mutation", flush=True)
            continue
        survived = [run for run in runs if run.code == 0]
        tried, killed = tried + len(runs), killed + len(runs) - len(survived)
        if row.must:
            needed, noticed = needed + len(runs), noticed + len(runs) - len(survived)
        print(f"{len(runs) - len(survived):>4}/{len(runs):<4} {module}  ({plain.seconds:.1f} s a run)", flush=True)
        for run in survived:
            print(f"          survived  {module}:{run.line}: {run.what}", flush=True)
    print(f"killed {killed} of {tried}, of decisions and I/O {noticed} of {needed} (seed {options.seed})")
    return 1 if broken or not tried or noticed < ENOUGH * needed else 0


if __name__ == "__main__":
    sys.exit(main())
