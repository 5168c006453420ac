"""Shared by all test folders: the report of tiers, golden files, and the guard against leaked processes."""

from __future__ import annotations

import difflib
import gc
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from .support import ROOT, fuzzing
from .support.processes import ProcessGuard
from .support.tiers import TIERS, TierReport

if TYPE_CHECKING:
    from .support.control_plane import ControlPlane

LONGEST = (
    "test_launcher_hangs.py", "test_lost_calls.py", "test_launcher_warm_start.py",
    "test_launcher_training.py", "test_launcher_elastic.py",
    "test_whole_lives.py", "test_launcher_ends.py", "test_operator_faults.py", "test_operator_leader.py",
    "test_manifests.py", "test_run_digits.py", "test_tutorial.py",
)  # fmt: skip
GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of this repository."""
    parser.addoption("--update-golden", action="store_true", help="write the golden files instead of comparing them")
    parser.addoption(
        "--record-traces", action="store_true", help="write what a real control plane does (apiserver tier)"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the tiers' markers and their report, and limit computation to one thread.

    Small networks gain nothing from more threads, and on a busy machine threads wait for each other.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # its worker processes would count as leaked
    os.environ["KUBECONFIG"] = "no-cluster-but-a-tests-own"  # read when the client is imported
    for number in (signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)  # what nohup ignores stays ignored in what the tests start
    signal.signal(signal.SIGINT, signal.default_int_handler)
    fuzzing.load_profile()
    gc.disable()  # until all is imported, and kept
    for tier in TIERS:
        if tier.marker is not None:
            config.addinivalue_line("markers", f"{tier.marker}: {tier.about}")
    config.pluginmanager.register(TierReport(), "ddp-tiers")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest tests first: at the end, idle workers would wait for them.

    pytest-xdist cuts the list into one part for each of its workers; the longest are distributed over the parts.
    """
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    peers = [item for item in items if item.path.name not in LONGEST]
    dealt: list[pytest.Item] = []
    for worker in range(workers):
        dealt += [item for name in LONGEST[worker::workers] for item in items if item.path.name == name]
        room = max(0, len(items) * (worker + 1) // workers - len(dealt))
        dealt += peers[:room]
        del peers[:room]
    items[:] = dealt + peers


def pytest_collection_finish() -> None:
    """Freeze imported objects: the garbage collector would spend a third of the time on PyTorch's."""
    gc.freeze()
    gc.enable()


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    """Whether golden files are to be written rather than compared."""
    return bool(request.config.getoption("--update-golden"))


@pytest.fixture
def golden(update_golden: bool) -> Callable[[str, str], None]:
    """Compare a text with the file of that name in tests/golden, or write it there under --update-golden."""

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        if update_golden:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            return
        if not path.exists():
            pytest.fail(f"no golden file {name}: write it with --update-golden and read it", pytrace=False)
        kept = path.read_text(encoding="utf-8")
        if kept != text:
            diff = difflib.unified_diff(kept.splitlines(), text.splitlines(), f"golden/{name}", "now", lineterm="")
            pytest.fail("\n".join(["differs (accept with --update-golden):", *diff]), pytrace=False)

    return compare


@pytest.fixture(autouse=True, scope="module")
def _no_open_end_left() -> Iterator[None]:
    """Report the unclosed resources of a module's tests in that module, not in a later test that collects garbage."""
    yield
    gc.collect()


@pytest.fixture(autouse=True)
def _signals_as_before() -> Iterator[None]:
    """Restore the signal handlers that a test has changed: processes of later tests would inherit them."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def _no_process_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test of the process tier that leaves a process behind, and end that process."""
    if request.node.get_closest_marker("process") is None:
        yield
        return
    with ProcessGuard() as guard:
        yield
    if guard.leaked:
        pytest.fail("left running:\n" + "\n".join(guard.leaked), pytrace=False)


@pytest.fixture(scope="session")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A real control plane with the CRD and the operator's account, for tests marked ``apiserver``."""
    from .support.control_plane import ControlPlane

    with ControlPlane(tmp_path_factory.mktemp("control-plane")) as control_plane:
        control_plane.kubectl("apply", "--server-side", "-f", str(ROOT / "deploy" / "crds" / "ddptrainingjobs.yaml"))
        for name in ("namespace.yaml", "rbac.yaml"):
            control_plane.kubectl("apply", "-f", str(ROOT / "deploy" / "manifests" / name))
        control_plane.kubectl("wait", "--for=condition=Established", "crd/ddptrainingjobs.ddp-operator.dev")
        yield control_plane
