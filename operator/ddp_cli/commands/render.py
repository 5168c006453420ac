"""`ddp render`: check a job as the API server and the operator would, and print what the operator would create."""

import argparse
import json
from collections.abc import Mapping
from typing import Any

from ddp_cli.commands.arguments import add_workdir_arguments, read_workdir
from ddp_cli.commands.io import CommandError, ExitCode, print_note, read_file
from ddp_cli.commands.profiles import add_profiles_argument, read_profiles
from ddp_cli.view.terminal import print_manifest
from ddp_operator.api.yaml_writer import format_documents


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("file", metavar="FILE", help="the YAML with the DDPTrainingJob; - reads standard input")
    parser.add_argument("-o", "--output", choices=("yaml", "json"), default="yaml", help="default: yaml")
    parser.add_argument("--check", action="store_true", help="only check the job; print errors")
    add_workdir_arguments(parser)
    parser.add_argument("--whole", action="store_true", help="print the job itself, completed by its profile")
    parser.add_argument("--launcher", action="store_true", help="also print the contents of the launcher's ConfigMap")
    add_profiles_argument(parser)
    parser.epilog = (
        "For review: apply the job's YAML itself, and the operator creates these objects. Owner references have a UID "
        "of zeros."
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the objects. Raises: CommandError and InvalidManifest."""
    from ddp_cli.client.workdir import check_job

    if arguments.extra:
        raise CommandError("unexpected arguments after --; only `ddp run` passes them to the script")
    if arguments.file.endswith(".py"):
        raise CommandError(
            f"{arguments.file}: not a job's YAML; write one with `ddp init {arguments.file} -o job.yaml`"
        )
    text = read_file(arguments.file)
    workdir = read_workdir(arguments)
    profiles = read_profiles(arguments.profiles)
    manifest, _ = check_job(text, workdir, in_cluster=True, note=print_note, profiles=profiles)
    if arguments.check:
        return ExitCode.OK
    children = manifest.children if arguments.launcher else tuple(map(omit_data, manifest.children))
    if arguments.whole:
        children = ({**manifest.written, "spec": manifest.completed},)
    if arguments.output == "json":
        objects = {"apiVersion": "v1", "kind": "List", "items": list(children)}
        print_manifest(json.dumps(objects, indent=2) + "\n")
    else:
        print_manifest(format_documents(children))
    return ExitCode.OK


def omit_data(resource: Mapping[str, Any]) -> dict[str, Any]:
    """Return a rendered object with the sizes of a ConfigMap's values instead of the values."""
    shown = dict(resource)
    for field in ("data", "binaryData"):
        if field in shown:
            shown[field] = {key: f"({len(value)} characters)" for key, value in shown[field].items()}
    return shown
