"""``--profiles FILE``: complete a job by what a file has, as a cluster would."""

import argparse
from typing import Any

from ddp_cli.commands.io import CommandError, read_file
from ddp_operator.api.completion import find_completing
from ddp_operator.api.documents import load_documents
from ddp_operator.api.job_file import FindObject, find_among
from ddp_operator.features import SCHEMA


def add_profiles_argument(parser: argparse._ActionsContainer) -> None:
    """Declare ``--profiles``."""
    parser.add_argument("--profiles", metavar="FILE", help="read profiles from this YAML instead of a cluster")


def read_profiles(file: str | None) -> FindObject:
    """Return a function that finds the profiles of a file. Raises: CommandError, InvalidManifest."""
    return find_among(list_profiles(file) if file else ())


def list_profiles(file: str) -> list[dict[str, Any]]:
    """Return the profiles of a file. Raises: CommandError, InvalidManifest."""
    part = find_completing(SCHEMA)
    kinds = part.completion.kinds if part is not None and part.completion is not None else ()
    documents = load_documents(read_file(file, "a YAML with profiles"))
    profiles = [item for item in documents if item.get("kind") in kinds and (item.get("metadata") or {}).get("name")]
    if not profiles:
        raise CommandError(f"{file}: has no {' or '.join(kinds)}; name the path of a YAML with profiles")
    return profiles
