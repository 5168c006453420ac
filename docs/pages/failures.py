"""Tables of failures in docs/api.md and docs/troubleshooting.md, from ``failure_table`` and the launcher's texts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from ddp_operator.api.constants import EXIT_USER_ERROR
from ddp_pod.contract.failure_table import CATEGORIES, EXIT_CODES, PREEMPTED, UNKNOWN
from ddp_pod.contract.failure_text import DISK_REMEDY, EARLY_EXIT_REMEDY, EMPTY_DIR_REMEDY, PROBE_REMEDY, SENDER_REMEDY
from ddp_pod.failures.kinds import KINDS
from ddp_pod.failures.text import (
    ARGUMENTS_REMEDY,
    CRASH_REMEDY,
    FABRIC_REMEDY,
    PORT_REMEDY,
    SILENT_REMEDY,
    STORE_REMEDY,
)

# Categories whose remedy depends on the failure, or that need none.
_REMEDIES: Final = {
    PREEMPTED.name: "no action needed: the job restarts, not counted against `maxRestarts`",
    UNKNOWN.name: f"after a signal: {CRASH_REMEDY}; else {SILENT_REMEDY}",
}
_SITUATIONS: Final = (
    ("Ranks of a peer had already ended", EARLY_EXIT_REMEDY),
    ("The script refuses its arguments", ARGUMENTS_REMEDY),
    ("The preflight finds another transport than spec.network requires", FABRIC_REMEDY),
    ("Checkpoints cannot be read from or written to checkpoint.url", STORE_REMEDY),
    ("The rendezvous port is in use", PORT_REMEDY),
    ("The kubelet evicts the pod for its own use of the disk", DISK_REMEDY),
    (
        "The kubelet kills the training container for a probe or a hook",
        PROBE_REMEDY.format(field="NAME", container="NAME"),
    ),
    ("A process gets SIGTERM, SIGINT or SIGHUP from an unknown sender", SENDER_REMEDY),
    ("An emptyDir exceeds its limit", EMPTY_DIR_REMEDY.format(volume="NAME", limit="LIMIT")),
)


def list_categories() -> Iterator[str]:
    """Yield the table of categories for docs/api.md."""
    yield from ("| category | what failed | kind |", "|---|---|---|")
    for category in CATEGORIES.values():
        kind = ""
        if category.symptom:
            kind = "symptom"
        elif category.own:
            kind = "script"
        yield f"| `{category.name}` | {category.meaning} | {kind} |"


def list_causes() -> Iterator[str]:
    """Yield the table of categories for docs/troubleshooting.md."""
    yield from ("| category | what failed | what to do |", "|---|---|---|")
    for category in CATEGORIES.values():
        yield f"| `{category.name}` | {category.meaning} | {_REMEDIES.get(category.name, category.remedy)} |"


def list_exit_codes() -> Iterator[str]:
    """Yield the table of the launcher's exit codes."""
    yield from ("| exit code | category, if no other reason is known | another attempt |", "|---|---|---|")
    for outcome in EXIT_CODES.values():
        follows = "no" if outcome.exit_code == EXIT_USER_ERROR else "yes"
        secondary = ", secondary" if outcome.secondary else ""
        yield f"| {outcome.exit_code} | `{outcome.category}`{secondary} | {follows} |"


def list_remedies() -> Iterator[str]:
    """Yield the table of remedies for failures that the launcher recognizes more precisely than by their category."""
    yield from ("| failure | what to do |", "|---|---|")
    for kind in KINDS:
        yield f"| {kind.symptom} | {kind.remedy} |"
    for situation, remedy in _SITUATIONS:
        yield f"| {situation} | {remedy} |"
