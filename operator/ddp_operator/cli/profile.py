"""`ddp profile`: the profiles of a cluster or of a file; what one sets, what it locks, and what the fields mean."""

import argparse
import json
import textwrap
from collections.abc import Iterable
from typing import Any, Final

from ddp_operator.api.crd import build_schema
from ddp_operator.api.parse import FindProfile, find_among, load_documents
from ddp_operator.api.profile import describe_values, read_profile
from ddp_operator.api.spec import Spec
from ddp_operator.cli.arguments import add_cluster_arguments
from ddp_operator.cli.io import CommandError, ExitCode, read_file
from ddp_operator.cli.list_jobs import align
from ddp_operator.constants import CLUSTER_PROFILE_KIND, PROFILE_KIND
from ddp_operator.terminal import print_text

_KINDS: Final = (PROFILE_KIND, CLUSTER_PROFILE_KIND)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("action", choices=("list", "show"), help="list all, or show one")
    parser.add_argument("name", metavar="NAME", nargs="?", help="the profile to show; its namespace's own come first")
    add_profiles_argument(parser)
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text", help="default: text")
    add_cluster_arguments(parser)


def add_profiles_argument(parser: argparse.ArgumentParser) -> None:
    """Declare ``--profiles``."""
    parser.add_argument("--profiles", metavar="FILE", help="a YAML with profiles, instead of those of a cluster")


def read_profiles(file: str | None) -> FindProfile:
    """Return what finds the profiles of a file. Raises: CommandError, InvalidManifest."""
    return find_among(_read(file) if file else ())


def run(arguments: argparse.Namespace) -> int:
    """Print the table, or one profile. Raises: CommandError, InvalidManifest."""
    if (arguments.action == "show") != bool(arguments.name):
        raise CommandError("name one profile: ddp profile show NAME; ddp profile list lists them")
    found = _read(arguments.profiles) if arguments.profiles else _fetch(arguments)
    if arguments.name:
        found = [one for one in found if one["metadata"]["name"] == arguments.name][:1]
        if not found:
            words = f"there is no profile {arguments.name}; `ddp profile list` lists them"
            raise CommandError(words, ExitCode.NOT_FOUND)
    if arguments.output == "json":
        print_text(json.dumps(found[0] if arguments.name else {"kind": "List", "items": found}, indent=2))
    elif arguments.name:
        print_text("\n".join(_show(found[0])))
    else:
        print_text("\n".join(_list(found)))
    return ExitCode.OK


def _read(file: str) -> list[dict[str, Any]]:
    documents = load_documents(read_file(file, "a YAML with profiles"))
    found = [one for one in documents if one.get("kind") in _KINDS and (one.get("metadata") or {}).get("name")]
    if not found:
        raise CommandError(f"{file}: has no {' or '.join(_KINDS)}; give the path of a YAML with profiles")
    return found


def _fetch(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the profiles of the namespace, then those for all. Raises: ClientError."""
    from ddp_operator.client.api import connect, profile_path

    api = connect(namespace=arguments.namespace, context=arguments.context, kubeconfig=arguments.kubeconfig)
    found = []
    for kind in _KINDS:
        items = api.request("GET", profile_path(kind, api.namespace))["items"]
        found += [{"kind": kind, **item} for item in items]
    return found


def _list(profiles: Iterable[dict[str, Any]]) -> list[str]:
    rows = [["NAME", "KIND", "SETS", "LOCKED"]]
    for raw in profiles:
        profile = read_profile(raw)
        rows.append([profile.name, profile.kind, ", ".join(profile.job) or "nothing", str(len(profile.locked))])
    return align(rows)


def _show(raw: dict[str, Any]) -> list[str]:
    """Return every value with its lock, and in words what a field is for."""
    profile, schema = read_profile(raw), build_schema(Spec)
    values = dict(describe_values(profile.job))

    def covers(lock: str, path: str) -> bool:
        return f"{path}.".startswith((f"{lock}.", f"{lock}["))

    lines = [f"{profile.kind} {profile.name}, digest {profile.digest}", ""]
    for path, value in values.items():
        locked = "   (locked)" if any(covers(lock, path) for lock in profile.locked) else ""
        lines += [f"{path}: {json.dumps(value)}{locked}", *_explain(schema, path)]
    without = [lock for lock in profile.locked if not any(covers(lock, path) for path in values)]
    if without:
        lines += ["", "Locked without a value, so that a job may not set them:", *(f"  {path}" for path in without)]
    return lines


def _explain(schema: dict[str, Any], path: str) -> list[str]:
    for name in path.split("."):
        schema = schema.get("properties", {}).get(name, {})
    words = schema.get("description", "")
    return textwrap.wrap(words, 100, initial_indent="    ", subsequent_indent="    ")
