"""`ddp profile`: list the profiles of a cluster or a file, or show what one sets."""

import argparse
import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from ddp_cli.commands.arguments import add_cluster_arguments
from ddp_cli.commands.io import CommandError, ExitCode
from ddp_cli.commands.list_jobs import align
from ddp_cli.commands.profiles import add_profiles_argument, list_profiles
from ddp_cli.view.terminal import print_text
from ddp_operator.api.other_kinds import CLUSTER_PROFILE_KIND, PROFILE_KIND
from ddp_operator.api.structural import document_of
from ddp_operator.features import SCHEMA
from ddp_operator.features.profiles.merge import MERGE_KEYS
from ddp_operator.features.profiles.values import read_profile

_KINDS: Final = (PROFILE_KIND, CLUSTER_PROFILE_KIND)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("action", choices=("list", "show"), help="list all, or show one")
    parser.add_argument(
        "name",
        metavar="NAME",
        nargs="?",
        help="the profile to show; one of the namespace takes precedence over one of the cluster",
    )
    add_profiles_argument(parser)
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text", help="default: text")
    add_cluster_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the table, or one profile. Raises: CommandError, InvalidManifest."""
    if (arguments.action == "show") != bool(arguments.name):
        raise CommandError("use `ddp profile show NAME` for one profile, `ddp profile list` for all")
    profiles = list_profiles(arguments.profiles) if arguments.profiles else _fetch(arguments)
    if arguments.action == "list":
        lines = [json.dumps({"kind": "List", "items": profiles}, indent=2)]
        if arguments.output == "text":
            lines = _format_table(profiles)
    else:
        profile = next((profile for profile in profiles if profile["metadata"]["name"] == arguments.name), None)
        if profile is None:
            raise CommandError(
                f"profile {arguments.name} does not exist; `ddp profile list` lists all", ExitCode.NOT_FOUND
            )
        lines = _describe(profile) if arguments.output == "text" else [json.dumps(profile, indent=2)]
    print_text("\n".join(lines))
    return ExitCode.OK


def _fetch(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the profiles of the namespace, then those of the cluster. Raises: ClientError."""
    from ddp_cli.client.api import connect, profile_path

    api = connect(namespace=arguments.namespace, context=arguments.context, kubeconfig=arguments.kubeconfig)
    profiles = []
    for kind in _KINDS:
        items = api.request("GET", profile_path(kind, api.namespace))["items"]
        profiles += [{"kind": kind, **item} for item in items]
    return profiles


def _format_table(profiles: Iterable[dict[str, Any]]) -> list[str]:
    rows = [["NAME", "KIND", "SETS"]]
    for raw in profiles:
        profile = read_profile(raw)
        rows.append([profile.name, profile.kind, ", ".join(profile.job) or "nothing"])
    return align(rows)


def _describe(raw: dict[str, Any]) -> list[str]:
    """Return every value of a profile, and the field's description."""
    profile = read_profile(raw)
    schema = document_of(SCHEMA.spec)
    lines = [f"{profile.kind} {profile.name}, digest {profile.digest}", ""]
    for path, value in list_values(profile.job):
        lines += [f"{path}: {json.dumps(value)}", *_explain(schema, path)]
    return lines


def list_values(value: Any, path: str = "", field: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every nested value with its path."""
    key = MERGE_KEYS.get(field)
    if isinstance(value, Mapping) and value:
        for name, member in value.items():
            step = name if re.fullmatch(r"\w+", name) else f"[{name}]"
            yield from list_values(member, f"{path}.{step}" if path and step == name else f"{path}{step}", name)
    elif isinstance(value, list) and key and all(isinstance(item, Mapping) and key in item for item in value):
        for item in value:
            rest = {name: member for name, member in item.items() if name != key}
            yield from list_values(rest, f"{path}[{item[key]}]")
    else:
        yield path, value


def _explain(schema: dict[str, Any], path: str) -> list[str]:
    for name in path.split("."):
        schema = schema.get("properties", {}).get(name, {})
    description = schema.get("description", "")
    return textwrap.wrap(description, 100, initial_indent="    ", subsequent_indent="    ")
