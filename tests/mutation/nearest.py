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

    A pattern without a folder is one below the module's folder of tests/unit; ``{name}`` is the module's name. A module
    belongs to the first row that it matches.
    """

    modules: str
    tests: tuple[str, ...]
    must: bool = True
    """A decision or input and output: nine of ten mutations have to be noticed."""


# What is decided of a job is decided together: its tests are those of all modules that take part.
DECISIONS = (
    "test_{name}*", "test_decide*", "test_diagnosis*", "test_truth*", "test_lifecycle*", "test_conditions*",
    "test_recovery.py", "test_queue*", "test_elastic*", "test_*scheduling*", "test_lost_*", "test_failure*",
    "test_termination*", "test_event*", "test_reconcile*", "test_claims*", "test_c*", "test_why*", "test_report*",
)  # fmt: skip
# What the launcher decides; what it does with processes is shown by the process tier.
LAUNCHER = ("failure", "hints", "log_patterns", "metrics", "restarts", "stacks", "stall", "termination", "tracebacks")
CONTRACT = "contract/test_cluster_contract.py"
TABLE = (
    Nearest("operator/ddp_operator/status/*.py", DECISIONS),
    Nearest("operator/ddp_operator/reconcile*", DECISIONS),
    Nearest("operator/ddp_operator/failures*", ("test_{name}*", "test_why*", "test_report*", *DECISIONS)),
    Nearest("operator/ddp_operator/progress.py", ("test_progress*", *DECISIONS)),
    Nearest(
        "operator/ddp_operator/kube/cluster.py", ("test_kube_cluster.py", CONTRACT, "integration/test_operator_kube.py")
    ),
    *(
        Nearest(f"operator/ddp_operator/launcher/{name}.py", ("test_launcher_{name}*", "test_launcher*"))
        for name in LAUNCHER
    ),
    Nearest(
        "trainer/ddp_trainer/checkpoint/*.py",
        ("test_checkpoint*", "test_fence*", "test_resume*", "property/test_checkpoint_files.py"),
    ),
    Nearest("trainer/ddp_trainer/*exporter.py", ("test_exporter*", "test_report*")),
    Nearest("trainer/ddp_trainer/data/sampling.py", ("test_sampling*", "test_data*", "test_resume*")),
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
    unit = f"unit/{module.split('/')[1]}/**"
    found: dict[str, None] = {}
    for pattern in row.tests:
        named = pattern.replace("{name}", PurePosixPath(module).stem)
        for path in sorted((ROOT / "tests").glob(named if "/" in named else f"{unit}/{named}")):
            if path.name.startswith("test_") and path.suffix == ".py":
                found[path.relative_to(ROOT).as_posix()] = None
    return list(found)
