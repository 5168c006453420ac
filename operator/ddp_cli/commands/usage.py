"""`ddp usage`: sum up the GPU time of jobs by purpose, per job, namespace or profile, from ``status.usage``."""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from ddp_cli.commands.arguments import (
    add_cluster_arguments,
    add_local_arguments,
    add_output_argument,
    is_local,
    open_client,
)
from ddp_cli.commands.io import ExitCode
from ddp_cli.commands.list_jobs import align
from ddp_cli.view.terminal import print_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("-A", "--all-namespaces", action="store_true", help="sum up the jobs of each namespace")
    parser.add_argument("--by-profile", action="store_true", help="sum up the jobs of each profile")
    add_output_argument(parser)
    add_cluster_arguments(parser)
    add_local_arguments(parser, named=False)
    parser.epilog = "Counts jobs that still exist; the metric ddp_operator_gpu_seconds_total also deleted ones."


def run(arguments: argparse.Namespace) -> int:
    """Print a table, or the sums as JSON."""
    backend = open_client(arguments, local=is_local(arguments)).backend
    group = choose_group(by_profile=arguments.by_profile, all_namespaces=arguments.all_namespaces)
    sums = sum_up(backend.list(everywhere=arguments.all_namespaces)["items"], group)
    if arguments.output == "json":
        print_text(json.dumps(sums, indent=2))
        return ExitCode.OK
    if not sums:
        print_text("no job has used a GPU", file=sys.stderr)
        return ExitCode.OK
    for line in format_usage(sums, group):
        print_text(line)
    return ExitCode.OK


def format_usage(sums: Mapping[str, Mapping[str, int]], group: str) -> list[str]:
    """Return the table of GPU-seconds by purpose, with a total of several rows."""
    rows = [[group.upper(), "GPU-HOURS", "PRODUCTIVE", "WAITING", "LOST", "LOST TO"]]
    rows += [_build_row(name, seconds) for name, seconds in sorted(sums.items())]
    if len(sums) > 1:
        total: Counter[str] = Counter()
        for seconds in sums.values():
            total.update(seconds)
        rows.append(_build_row("total", total))
    return align(rows)


def choose_group(*, by_profile: bool, all_namespaces: bool) -> str:
    """Return the group of a row of the table: a profile, a namespace or a job."""
    if by_profile:
        return "profile"
    return "namespace" if all_namespaces else "name"


def _build_row(name: str, seconds: Mapping[str, int]) -> list[str]:
    """Return a row of the table from GPU-seconds by purpose."""
    from ddp_operator.decide.purposes import PRODUCTIVE, WAITING

    total = sum(seconds.values())
    productive = seconds.get(PRODUCTIVE, 0)
    waiting = seconds.get(WAITING, 0)
    lost = total - productive - waiting
    shares = [f"{100 * part / total if total else 0:.1f}%" for part in (productive, waiting, lost)]
    causes = sorted((value, cause) for cause, value in seconds.items() if cause not in (PRODUCTIVE, WAITING))
    largest = ", ".join(f"{cause} {value / 3600:.1f} h" for value, cause in reversed(causes[-3:]))
    return [name, f"{total / 3600:.1f}", *shares, largest or "-"]


def sum_up(items: Iterable[Mapping[str, Any]], group: str) -> dict[str, dict[str, int]]:
    """Return GPU-seconds by purpose for each name, namespace or profile, without jobs that used no GPU."""
    from ddp_operator.api.parse import parse_status
    from ddp_operator.decide.purposes import list_purposes

    sums: dict[str, Counter[str]] = {}
    for item in items:
        status = parse_status(item)
        if status.usage is None:
            continue
        name = item["metadata"][group] if group != "profile" else status.profile.name if status.profile else "-"
        sums.setdefault(name, Counter()).update(list_purposes(status.usage))
    return {name: dict(row) for name, row in sums.items()}
