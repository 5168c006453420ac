"""The mutated modules, and the tests that may detect mutations without a cluster or real ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath

from tests.support import ROOT

MODULES = (
    "operator/ddp_operator/decide/*.py",
    "operator/ddp_operator/features/stalls/*.py",
    "operator/ddp_operator/reading/*.py",
    "operator/ddp_operator/reconcile/*.py",
    "operator/ddp_operator/kube/cluster.py",
    # Decisions of the launcher; the process tier covers its handling of processes.
    "operator/ddp_pod/contract/failure_record.py",
    "operator/ddp_pod/failures/*.py",
    *(
        f"operator/ddp_pod/{name}.py"
        for name in (
            "base/exceptions", "features/watchdog/stacks", "features/watchdog/stall", "progress/log_patterns",
            "progress/metrics", "rank/tracebacks", "torchrun/fork_client", "torchrun/fork_server",
        )
    ),
    "trainer/ddp_trainer/checkpoint/*.py",
    "trainer/ddp_sdk/exporter.py",
    "trainer/ddp_trainer/data/sampling.py",
)  # fmt: skip
"""Modules that decide, and modules that read and write: nine of ten mutations must be detected."""
TESTS = {
    "operator": (
        *(f"unit/ddp_operator/{name}" for name in ("decide", "features/stalls", "kube", "reading", "reconcile")),
        "unit/ddp_pod",
        "unit/ddp_cli/features/ui",
        "unit/ddp_cli/view",
        "contract/test_cluster_contract.py",
    ),
    "trainer": (
        *(f"unit/ddp_trainer/{name}" for name in ("checkpoint", "data/test_loader.py", "observability")),
        *(f"unit/ddp_trainer/test_{name}.py" for name in ("engine", "resume")),
        "unit/ddp_sdk",
        "property/test_checkpoint_files.py",
    ),
}
"""By the first folder of a module's path."""
RUNNABLE = "not process and not apiserver and not nightly"
SECONDS = 5.0
"""The CPU seconds that the tests of one mutation may need."""


def find_modules() -> list[str]:
    """Return the paths of the modules to mutate, below the repository."""
    return [path for pattern in MODULES for path in _expand(pattern) if not path.endswith("/__init__.py")]


def find_tests(package: str) -> list[str]:
    """Return the paths of the tests of a package (its folder's name), below the repository."""
    return [f"tests/{path}" for path in TESTS[package]]


def _expand(pattern: str) -> list[str]:
    return [path.relative_to(ROOT).as_posix() for path in sorted(ROOT.glob(pattern))]


def choose(module: str, running: Mapping[str, float]) -> list[str]:
    """Return the tests that run a line (test to seconds) and must detect its mutation, the nearest first.

    First the tests of the module, then those of its folder, then all others; within each the fastest first, as many as
    the time limit permits.
    """
    folder = PurePosixPath(module).parent.name
    name = PurePosixPath(module).stem
    chosen = []
    remaining = SECONDS

    def distance(test: str) -> tuple[bool, bool, float]:
        path = PurePosixPath(test.split("::")[0])
        return path.stem != f"test_{name}", path.parent.name != folder, running[test]

    for test in sorted(running, key=distance):
        remaining -= running[test]
        if chosen and remaining < 0:
            break
        chosen.append(test)
    return chosen
