"""The tier of each test, whether that tier can run here, and the report of the tiers at the end.

A marker decides the tier, otherwise the first folder under ``tests/``. A tier that cannot run here skips its tests
with the reason; a tier without tests is reported.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import pytest

from .core import is_core
from .kubernetes_binaries import find_binary


def _runs_anywhere() -> str | None:
    return None


def _apiserver() -> str | None:
    assets = os.environ.get("KUBEBUILDER_ASSETS")
    if not assets:
        return "KUBEBUILDER_ASSETS is not set (a folder with etcd and kube-apiserver, as setup-envtest makes it)"
    lacking = [name for name in ("etcd", "kube-apiserver") if find_binary(name) is None]
    return f"KUBEBUILDER_ASSETS={assets} lacks {' and '.join(lacking)}" if lacking else None


def _e2e() -> str | None:
    kubeconfig = os.environ.get("DDP_E2E_KUBECONFIG")
    if not kubeconfig:
        return "DDP_E2E_KUBECONFIG is not set (the kubeconfig of a cluster that may be used)"
    return None if os.path.isfile(kubeconfig) else f"DDP_E2E_KUBECONFIG={kubeconfig} is not a file"


def _gpu() -> str | None:
    if not any(os.path.exists(path) for path in ("/dev/nvidiactl", "/dev/kfd")):
        return "no GPU on this machine (neither /dev/nvidiactl nor /dev/kfd is there)"
    import torch

    return None if torch.cuda.is_available() else f"torch {torch.__version__} sees no GPU"


def _nightly() -> str | None:
    return None if os.environ.get("DDP_TEST_NIGHTLY") == "1" else "too long for every run; `make nightly` makes it"


def _more() -> str | None:
    chosen = any(os.environ.get(name) == "1" for name in ("DDP_TEST_ALL", "DDP_TEST_NIGHTLY"))
    return None if chosen else "its mechanism has another test in every run; `make test-all` runs it"


_SUBJECTS = (".ci", ".dockerignore", ".github", "Makefile", "charts", "deploy", "images", "pyproject.toml",
             "tests/bench", "tests/gpu", "tests/mutation", "tests/repository")  # fmt: skip
"""What the tests of the repository tier read."""


def _repository() -> str | None:
    changed = _changed_files()
    if _more() is None or changed is None or any(name.startswith(_SUBJECTS) for name in changed):
        return None
    return "none of the files that it reads has changed; `make test-all` runs it"


def _changed_files() -> list[str] | None:
    """Return the files that differ from the upstream branch, or else from the commit before; None if unknown."""
    changed = None
    for since in ("@{upstream}", "HEAD~1"):
        command = ["git", "diff", "--name-only", since]
        ran = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
        if ran.returncode == 0:
            changed = ran.stdout.splitlines()
        if changed:
            break
    return changed


def _tool(*names: str) -> Callable[[], str | None]:
    def missing() -> str | None:
        lacking = [name for name in names if shutil.which(name) is None]
        return f"{' and '.join(lacking)} not found (`make tools` installs what tests need)" if lacking else None

    return missing


@dataclass(frozen=True)
class Tier:
    """One kind of test: ``missing`` returns why it cannot run here, or None."""

    name: str
    about: str
    missing: Callable[[], str | None] = _runs_anywhere
    folder: str | None = None
    marker: str | None = None


# In the order of the report. Markers win over folders, earlier markers over later ones.
TIERS = (
    Tier("unit", "one module, no I/O beyond a temporary folder", folder="unit"),
    Tier("repository", "releases, images and scripts; runs if their files changed", _repository, folder="repository"),
    Tier("golden", "manifests and pages against files kept in the repository", folder="golden"),
    Tier("property", "what must hold for every input (hypothesis)", folder="property"),
    Tier("contract", "one suite for each implementation of an interface", folder="contract"),
    Tier("operator-in-the-loop", "real Kopf against the stand-in API server", folder="integration"),
    Tier("nightly", "what is too long for every run", _nightly, marker="nightly"),
    Tier("gpu", "what a CPU cannot show", _gpu, folder="gpu", marker="gpu"),
    Tier("e2e", "any whole cluster", _e2e, folder="e2e", marker="e2e"),
    Tier("apiserver", "a real kube-apiserver and etcd", _apiserver, marker="apiserver"),
    Tier("prometheus", "a real Prometheus", _tool("prometheus", "promtool"), marker="prometheus"),
    Tier("chromium", "pages in a headless browser", _tool("chromium"), marker="chromium"),
    Tier("buildah", "image builds", _tool("buildah"), marker="buildah"),
    Tier("lua", "Argo CD's health of jobs", _tool("lua5.4"), marker="lua"),
    Tier("more", "further tests with real processes", _more, marker="more"),
    Tier("process", "real torchrun and gloo processes, one test for each mechanism", marker="process"),
    Tier("benchmarks", "the measuring code itself", folder="bench"),
)


def tier_of(path: str, markers: Iterable[str]) -> str:
    """Return the name of the tier of a test in ``path`` (below the repository, with slashes) with these markers."""
    present = set(markers)
    for tier in TIERS:
        if tier.marker in present:
            return tier.name
    parts = PurePosixPath(path).parts
    for tier in TIERS:
        if tier.folder is not None and parts[:2] == ("tests", tier.folder):
            return tier.name
    raise pytest.UsageError(f"{path}: not in the folder of a tier (see tests/support/tiers.py)")


@dataclass
class TierCount:
    """The results of one tier's tests."""

    collected: int = 0
    selected: int = 0
    outcomes: dict[str, str] = field(default_factory=dict)  # node id -> worst outcome so far
    seconds: float = 0.0

    def add(self, nodeid: str, outcome: str, seconds: float) -> None:
        """Record one phase (set-up, call, tear-down) of a test; a failed phase decides."""
        self.seconds += seconds
        rank = ("passed", "skipped", "failed")
        before = self.outcomes.get(nodeid, "passed")
        self.outcomes[nodeid] = max(before, outcome, key=rank.index)

    def line(self, missing: str | None) -> str:
        """Return the tier's line in the report, without its name."""
        by_outcome = {name: list(self.outcomes.values()).count(name) for name in ("passed", "failed", "skipped")}
        ran = by_outcome["passed"] + by_outcome["failed"]
        if ran:
            parts = [f"{count} {name}" for name, count in by_outcome.items() if count]
            return f"ran {_tests(ran)} in {self.seconds:.1f} s ({', '.join(parts)})"
        if missing:
            return f"NOT RUN: {missing}" + (f": {_tests(self.collected)}" if self.collected else "")
        if not self.collected:
            return "NOT RUN: it has no tests among those asked for"
        if not self.selected:
            return f"NOT RUN: its {_tests(self.collected)} {'was' if self.collected == 1 else 'were'} deselected"
        return f"NOT RUN: its {_tests(self.selected)}: skipped or not reached (the reasons are above)"


def _tests(count: int) -> str:
    return f"{count} test" if count == 1 else f"{count} tests"


class TierReport:
    """Pytest plugin: skips what cannot run here and reports each tier."""

    def __init__(self) -> None:
        self.counts = {tier.name: TierCount() for tier in TIERS}
        self.tried: Counter[str] = Counter()
        """Number of generated inputs of each kind (their property ``tried``)."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Assign every test its tier, and skip those of a tier that cannot run here."""
        missing = {tier.name: tier.missing() for tier in TIERS}
        by_marker = {tier.marker: missing[tier.name] for tier in TIERS if tier.marker is not None}
        for item in items:
            path = item.nodeid.split("::", 1)[0]
            if item.get_closest_marker("process") is not None and not is_core(item.nodeid):
                item.add_marker(pytest.mark.more)
            markers = {mark.name for mark in item.iter_markers()}
            name = tier_of(path, markers)
            # Sent with the reports, also between the processes of pytest-xdist.
            item.user_properties.append(("tier", name))
            self.counts[name].collected += 1
            # A nightly test may also need a tool.
            reason = missing[name] or next((by_marker[marker] for marker in by_marker.keys() & markers), None)
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=reason))

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Count the tests that remain after -k, -m and --deselect."""
        for item in session.items:
            self.counts[dict(item.user_properties)["tier"]].selected += 1

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record one phase of one test."""
        properties = dict(report.user_properties)
        if report.when == "teardown":
            self.tried.update(properties.get("tried", {}))
        name = properties.get("tier")
        if name is not None:
            self.counts[str(name)].add(report.nodeid, report.outcome, report.duration)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print one line per tier (with -q: only tiers with tests here)."""
        terminalreporter.section("tiers")
        width = max(len(tier.name) for tier in TIERS)
        for tier in TIERS:
            count = self.counts[tier.name]
            if count.collected or count.outcomes or terminalreporter.verbosity >= 0:
                terminalreporter.line(f"{tier.name:{width}}  {count.line(tier.missing())}")
        for sort, tried in sorted(self.tried.items()):
            terminalreporter.line(f"tried  {tried:>7,}  {sort}")
