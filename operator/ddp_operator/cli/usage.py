"""`ddp usage`: what GPUs were held for, by job, by namespace or by profile, from ``status.usage``."""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from ddp_operator.cli.arguments import (
    add_cluster_arguments,
    add_local_arguments,
    add_output_argument,
    is_local,
    open_client,
)
from ddp_operator.cli.io import ExitCode
from ddp_operator.cli.list_jobs import align
from ddp_operator.terminal import print_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("-A", "--all-namespaces", action="store_true", help="sum up the jobs of each namespace")
    parser.add_argument("--by-profile", action="store_true", help="sum up the jobs of each profile")
    add_output_argument(parser)
    add_cluster_arguments(parser)
    add_local_arguments(parser, named=False)
    parser.epilog = (
        "Of jobs that are still in the cluster; those that were deleted are in the operator's series "
        "ddp_operator_gpu_seconds_total."
    )


def run(arguments: argparse.Namespace) -> int:
    """Print a table, or the sums as JSON."""
    from ddp_operator.status.usage import PRODUCTIVE, WAITING

    every = arguments.all_namespaces
    backend = open_client(arguments, local=is_local(arguments)).backend
    by = "profile" if arguments.by_profile else "namespace" if every else "name"
    sums = sum_up(backend.list(everywhere=every)["items"], by)
    if arguments.output == "json":
        print_text(json.dumps(sums, indent=2))
        return ExitCode.OK
    if not sums:
        print_text("no job here has held a GPU", file=sys.stderr)
        return ExitCode.OK
    total: Counter[str] = Counter()
    for row in sums.values():
        total.update(row)
    rows = [[by.upper(), "GPU-HOURS", "PRODUCTIVE", "WAITING", "LOST", "LOST TO"]]
    for name, row in [*sorted(sums.items()), *([("total", total)] if len(sums) > 1 else [])]:
        held, kept, waited = sum(row.values()), row.get(PRODUCTIVE, 0), row.get(WAITING, 0)
        causes = sorted(((seconds, cause) for cause, seconds in row.items() if cause not in (PRODUCTIVE, WAITING)))
        shares = [f"{100 * part / held if held else 0:.1f}%" for part in (kept, waited, held - kept - waited)]
        lost = ", ".join(f"{cause} {seconds / 3600:.1f} h" for seconds, cause in reversed(causes[-3:]))
        rows.append([name, f"{held / 3600:.1f}", *shares, lost or "-"])
    for line in align(rows):
        print_text(line)
    return ExitCode.OK


def sum_up(items: Iterable[Mapping[str, Any]], by: str) -> dict[str, dict[str, int]]:
    """Return GPU-seconds by purpose of all jobs with the same name, namespace or profile; those that held none not."""
    import msgspec

    from ddp_operator.api.status import Usage
    from ddp_operator.status.usage import purposes

    sums: dict[str, Counter[str]] = {}
    for item in items:
        status = item.get("status") or {}
        if usage := status.get("usage"):
            name = status.get("profile", {}).get("name", "-") if by == "profile" else item["metadata"][by]
            sums.setdefault(name, Counter()).update(purposes(msgspec.convert(usage, Usage)))
    return {name: dict(row) for name, row in sums.items()}
