"""`ddp list`: list the jobs of a namespace, or the runs on this machine, with the columns of ``kubectl get ddp``."""

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from ddp_cli.client.cluster_backend import ClusterBackend
from ddp_cli.commands.arguments import add_cluster_arguments, add_local_arguments, is_local, open_client
from ddp_cli.commands.io import ExitCode
from ddp_cli.view.terminal import print_text
from ddp_operator.api.display_texts import format_duration
from ddp_operator.api.kubeobjects import parse_time, utc_now

if TYPE_CHECKING:
    from ddp_cli.client.job import Backend


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("-A", "--all-namespaces", action="store_true", help="list the jobs of all namespaces")
    parser.add_argument(
        "-o", "--output", choices=("text", "wide", "json"), default="text", help="default: text; wide: more columns"
    )
    add_cluster_arguments(parser)
    add_local_arguments(parser, named=False)


def run(arguments: argparse.Namespace) -> int:
    """Print the table, or the list as the API server returns it."""
    backend = open_client(arguments, local=is_local(arguments)).backend
    listing = backend.list(everywhere=arguments.all_namespaces)
    if arguments.output == "json":
        print_text(json.dumps(listing, indent=2))
        return ExitCode.OK
    items = listing["items"]
    if not items:
        print_text(_explain_empty(backend, arguments), file=sys.stderr)
        return ExitCode.OK
    wide = arguments.output == "wide"
    for line in format_table(items, utc_now(), namespaces=arguments.all_namespaces, wide=wide):
        print_text(line)
    more = (listing.get("metadata") or {}).get("remainingItemCount")
    if more:
        print_text(f"and {more} more", file=sys.stderr)
    return ExitCode.OK


def _explain_empty(backend: "Backend", arguments: argparse.Namespace) -> str:
    """Return the message for an empty list, and how to create a job."""
    if not isinstance(backend, ClusterBackend):
        return f"no runs in {arguments.runs_dir}; start one with `ddp run job.yaml`"
    if arguments.all_namespaces:
        where = "any namespace"
        submit = "ddp submit job.yaml"
    else:
        where = f'namespace "{backend.api.namespace}"'
        submit = f"ddp submit job.yaml{backend.api.option}"
    return f"no jobs in {where}; create one with `{submit}`, or list the runs on this machine with `ddp list --local`"


def format_table(
    items: Iterable[Mapping[str, Any]], now: datetime, *, namespaces: bool = False, wide: bool = False
) -> list[str]:
    """Return the header and the rows. The columns are the CRD's printer columns."""
    from ddp_operator.api.crd import build_columns
    from ddp_operator.features import SCHEMA

    columns = build_columns(SCHEMA)
    shown = [column for column in columns if wide or not column.get("priority")]
    header = [*(["NAMESPACE"] if namespaces else []), "NAME", *(column["name"].upper() for column in shown)]
    rows = [header]
    for item in items:
        metadata = item["metadata"]
        cells = [metadata.get("namespace", "")] if namespaces else []
        rows.append([*cells, metadata["name"], *(_format_cell(item, column, now) for column in shown)])
    return align(rows)


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _format_cell(item: Mapping[str, Any], column: Mapping[str, Any], now: datetime) -> str:
    from ddp_operator.api.columns import read_column

    value = read_column(item, column["jsonPath"])
    if value is None:
        return "-"
    if column["type"] != "date":
        return str(value)
    since = parse_time(value)
    return format_duration((now - since).total_seconds()) if since else "-"
