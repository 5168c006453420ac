"""Run tests on mutations, each in a process forked from one that has finished the imports."""

from __future__ import annotations

import ast
import contextlib
import gc
import importlib.abc
import importlib.util
import os
import pickle
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType, ModuleType

import coverage
import pytest

from tests.support import ROOT

from .mutations import Mutation, mutate
from .nearest import RUNNABLE, choose

PATIENCE = 5
"""The time limit of tests with a mutation, in multiples of their normal time: an endless test has detected it."""


@dataclass(frozen=True)
class Try:
    """The mutation of this number in a module, and its lines."""

    module: str
    number: int
    lines: range

    def mutate(self) -> tuple[ast.Module, Mutation]:
        """Return the module with the mutation applied."""
        return mutate((ROOT / self.module).read_text(encoding="utf-8"), self.number)


@dataclass
class Tests:
    """Coverage and times of the tests without a mutation."""

    runs: dict[str, dict[int, set[str]]] = field(default_factory=dict)
    """By module and line: the tests that run it; the empty name stands for their import."""
    seconds: dict[str, float] = field(default_factory=dict)
    """CPU seconds."""
    failed: list[str] = field(default_factory=list)

    def imported(self, tried: Try) -> bool:
        """Whether the lines run when tests are imported."""
        return any("" in self.runs[tried.module].get(line, ()) for line in tried.lines)

    def of(self, tried: Try) -> list[str]:
        """Return the tests that must detect a mutation: all of the module's if it is in a line that runs at import."""
        lines = self.runs[tried.module]
        tests = set().union(*(lines.get(line, set()) for line in (lines if self.imported(tried) else tried.lines)))
        return choose(tried.module, {test: self.seconds[test] for test in tests - {""}})

    def judge(self, tries: Sequence[Try], run: Callable[[Try], int], jobs: int) -> dict[Try, bool]:
        """Return which mutations the tests detect, and print each undetected one."""
        noticed = {}
        chosen = [self.of(tried) for tried in tries]
        limits = [10 + PATIENCE * sum(self.seconds[test] for test in tests) for tests in chosen]
        children = [Child(partial(run, tried), limit) for tried, limit in zip(tries, limits, strict=True)]
        for place, code in fork(children, jobs):
            tried = tries[place]
            noticed[tried] = code not in (0, pytest.ExitCode.NO_TESTS_COLLECTED)
            if not noticed[tried]:
                mutation = tried.mutate()[1]
                print(
                    f"survived {len(chosen[place])} tests: {tried.module}:{mutation.line}: {mutation.what}", flush=True
                )
        return noticed


class Mutated(importlib.abc.MetaPathFinder, importlib.abc.SourceLoader):
    """Loads one module from another tree than its file's."""

    def __init__(self, module: str, tree: ast.Module) -> None:
        self.path = str(ROOT / module)
        self.tree = tree
        self.name = ".".join(module.removesuffix(".py").split("/")[1:])

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> object:
        """Handle only the one module."""
        return importlib.util.spec_from_file_location(name, self.path, loader=self) if name == self.name else None

    def get_code(self, fullname: str) -> CodeType:
        """Return the mutated code."""
        return compile(self.tree, self.path, "exec", dont_inherit=True)

    def get_filename(self, fullname: str) -> str:
        """Return the file, for tracebacks."""
        return self.path

    def get_data(self, path: str) -> bytes:
        """Return the unchanged file."""
        return Path(path).read_bytes()

    def swap(self, functions: Iterable[FunctionType]) -> None:
        """Replace the code of the module's functions by the mutated code."""
        new = {(code.co_qualname, code.co_firstlineno): code for code in _codes(self.get_code(self.name))}
        for function in functions:
            if function.__code__.co_filename == self.path:
                code = new.get((function.__code__.co_qualname, function.__code__.co_firstlineno))
                if code is not None and len(code.co_freevars) == len(function.__code__.co_freevars):
                    function.__code__ = code


class Warm:
    """A plugin that, once pytest has imported and collected the tests, runs them on each mutation of a function."""

    def __init__(self, tries: Sequence[Try], jobs: int, file: Path) -> None:
        self.tries = tries
        self.jobs = jobs
        self.file = file
        modules = {tried.module for tried in tries}
        self.coverage = coverage.Coverage(data_file=None, config_file=False, include=[str(ROOT / m) for m in modules])
        self.coverage.start()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run all tests once without a mutation, then for each mutation those that run its lines."""
        self.coverage.stop()
        if not session.testsfailed:
            # Wherever modules have imported them.
            gc.unfreeze()  # otherwise the imported modules are not found
            functions = [item for item in gc.get_objects() if type(item) is FunctionType]
            session.config.pluginmanager.unregister(name="terminalreporter")  # it has its own terminal
            gc.freeze()  # a test file's tests end with a collection
            list(fork([Child(lambda: self._watch(session.items), 3600)], 1))
            tests: Tests = pickle.loads(self.file.read_bytes())
            items = {item.nodeid: item for item in session.items}

            def run(tried: Try) -> int:
                mutated = Mutated(tried.module, tried.mutate()[0])
                mutated.swap(functions)
                sys.meta_path.insert(0, mutated)  # a test may be the first to import it
                return run_items([items[test] for test in tests.of(tried)])

            quick = [tried for tried in self.tries if not tests.imported(tried)]
            self.file.write_bytes(pickle.dumps((tests, tests.judge(quick, run, self.jobs))))
        return True

    def _watch(self, items: Sequence[pytest.Item]) -> int:
        tests = Tests()
        self.coverage.start()
        for item, after in zip(items, [*items[1:], None], strict=True):
            since = time.process_time()
            failed = item.session.testsfailed
            self.coverage.switch_context(item.nodeid)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
            tests.seconds[item.nodeid] = time.process_time() - since
            if item.session.testsfailed > failed:
                tests.failed.append(item.nodeid)
        self.coverage.stop()
        data = self.coverage.get_data()
        for module in {tried.module for tried in self.tries}:
            lines = data.contexts_by_lineno(str(ROOT / module))
            tests.runs[module] = {line: set(contexts).difference(tests.failed) for line, contexts in lines.items()}
        self.file.write_bytes(pickle.dumps(tests))
        return 0


class Chosen:
    """A plugin that has certain tests run, in this order."""

    def __init__(self, tests: Sequence[str]) -> None:
        self.order = {test: place for place, test in enumerate(tests)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Drop unselected tests."""
        items[:] = sorted(
            (item for item in items if item.nodeid in self.order), key=lambda item: self.order[item.nodeid]
        )


def run_mutations(tries: Sequence[Try], paths: Sequence[str], jobs: int) -> tuple[Tests, dict[Try, bool]]:
    """Return what was seen of the tests in these paths without a mutation, and which mutations they have noticed.

    Raises:
        RuntimeError: if the tests cannot be run.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "warm")
        ((_, code),) = fork([Child(lambda: int(run_pytest(paths, Warm(tries, jobs, file))), 86400, loud=True)], 1)
        if code != 0:
            raise RuntimeError("the tests cannot be run without a mutation")
        tests, noticed = pickle.loads(file.read_bytes())
    slow = [tried for tried in tries if tried not in noticed]

    def run(tried: Try) -> int:
        chosen = tests.of(tried)
        sys.meta_path.insert(0, Mutated(tried.module, tried.mutate()[0]))
        return int(run_pytest(sorted({test.split("::")[0] for test in chosen}), Chosen(chosen)))

    return tests, noticed | tests.judge(slow, run, jobs)


def run_pytest(paths: Sequence[str], plugin: object) -> int:
    """Run pytest with a plugin, and stop at the first failure."""
    options = ["-x", "-qq", "--no-summary", "-p", "no:cacheprovider", "-m", RUNNABLE]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of plugins: they are imported before
    return int(pytest.main([*options, *paths], plugins=[plugin]))


def run_items(items: Sequence[pytest.Item]) -> int:
    """Run tests that are collected until one fails, and return 1 then."""
    for item, after in zip(items, [*items[1:], None], strict=True):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
        if item.session.testsfailed:
            return 1
    return 0


@dataclass(frozen=True)
class Child:
    """What a process is forked for, and after how many seconds of a processor it is killed, or ten times as many."""

    run: Callable[[], int]
    limit: float
    loud: bool = False
    """Whether its output is shown."""


def fork(children: Sequence[Child], jobs: int) -> Iterator[tuple[int, int]]:
    """Run so many children at the same time, and yield the place and the exit code of each that ends; -9: killed."""
    waiting = list(enumerate(children))[::-1]
    running: dict[int, tuple[int, float, tempfile.TemporaryDirectory[str]]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                place, child = waiting.pop()
                folder = tempfile.TemporaryDirectory(prefix="m")
                sys.stdout.flush()
                if (pid := os.fork()) == 0:
                    _run(child, folder.name)
                running[pid] = place, time.monotonic() + 10 * child.limit, folder
            time.sleep(0.01)
            for pid, (place, until, folder) in list(running.items()):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if not ended and time.monotonic() < until:
                    continue
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)  # and what its tests have left
                if not ended:
                    os.waitpid(pid, 0)
                del running[pid]
                with contextlib.suppress(OSError):
                    folder.cleanup()
                yield place, os.waitstatus_to_exitcode(status) if ended else -signal.SIGKILL
    finally:
        for pid in running:
            os.kill(pid, signal.SIGTERM)


def _run(child: Child, folder: str) -> None:
    try:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (int(child.limit) + 1, int(child.limit) + 2))
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        if not child.loud:
            for descriptor in (1, 2):
                os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        os._exit(child.run())
    except BaseException:
        traceback.print_exc()
        os._exit(3)


def _codes(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes(constant)
