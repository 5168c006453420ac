"""Which tests are nearest to a module: those that have to notice a mutation of it, without a cluster or real ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import PurePosixPath

from tests.support import ROOT


@dataclass(frozen=True)
class Nearest:
    """Modules (a pattern of paths below the repository) and the patterns of their tests, the nearest first.

    A pattern is one below the package's folder of tests/unit, or below the repository if it begins with ``tests/``;
    ``{name}`` is the module's name. A module belongs to the first row that it matches.
    """

    modules: str
    tests: tuple[str, ...]
    must: bool = True
    """A decision or input and output: nine of ten mutations have to be noticed."""


# What is decided of a job is decided together: its tests are those of all modules that take part.
DECISIONS = (
    "**/test_{name}*", "status/test_decide*", "status/*", "reconcile/*", "failures/*", "kube/test_event_*", "test_why*",
    "report/*", "manifests/test_children*",
)  # fmt: skip
# What the launcher decides; what it does with processes is shown by the process tier.
LAUNCHER = ("failure", "hints", "log_patterns", "metrics", "restarts", "stacks", "stall", "termination", "tracebacks")
TABLE = (
    Nearest("operator/ddp_operator/status/*.py", DECISIONS),
    Nearest("operator/ddp_operator/reconcile*", DECISIONS),
    Nearest("operator/ddp_operator/failures*", ("**/test_{name}*", "test_why*", "report/*", *DECISIONS)),
    Nearest("operator/ddp_operator/progress.py", DECISIONS),
    Nearest(
        "operator/ddp_operator/kube/cluster.py",
        ("kube/test_cluster.py", "tests/contract/test_cluster_contract.py", "tests/integration/test_operator_kube.py"),
    ),
    *(
        Nearest(f"operator/ddp_operator/launcher/{name}.py", ("launcher/test_{name}*", "launcher/*"))
        for name in LAUNCHER
    ),
    Nearest(
        "trainer/ddp_trainer/checkpoint/*.py",
        ("checkpoint/*", "test_resume*", "tests/property/test_checkpoint_files.py"),
    ),
    Nearest("trainer/ddp_trainer/*exporter.py", ("test_exporter*", "observability/test_reporter*")),
    Nearest("trainer/ddp_trainer/data/sampling.py", ("data/test_loader*", "test_resume*")),
)


def find_modules() -> Iterator[tuple[str, Nearest]]:
    """Yield the modules that the table names, with their rows."""
    for path in sorted([*ROOT.glob("operator/**/*.py"), *ROOT.glob("trainer/**/*.py")]):
        name = path.relative_to(ROOT).as_posix()
        row = next((row for row in TABLE if fnmatch(name, row.modules)), None)
        if row is not None and not name.endswith("/__init__.py"):
            yield name, row


def find_tests(module: str, row: Nearest) -> list[str]:
    """Return the test files nearest to a module, the nearest first."""
    package = f"tests/unit/{module.split('/')[1]}"
    found: dict[str, None] = {}
    for pattern in row.tests:
        named = pattern.replace("{name}", PurePosixPath(module).stem)
        for path in sorted(ROOT.glob(named if named.startswith("tests/") else f"{package}/{named}")):
            if path.name.startswith("test_") and path.suffix == ".py":
                found[path.relative_to(ROOT).as_posix()] = None
    return list(found)
