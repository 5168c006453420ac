"""`ddp render`: report what `kubectl apply` would refuse, else print exactly what the operator would create."""

import argparse
import json

from ddp_operator.cli.io import CommandError, ExitCode


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("file", metavar="FILE", help="the YAML with the DDPTrainingJob; - reads standard input")
    parser.add_argument("-o", "--output", choices=("yaml", "json"), default="yaml", help="default: yaml")
    parser.add_argument("--check", action="store_true", help="print errors only")
    parser.epilog = "Owner references have a UID of zeros, since only an API server assigns one."


def run(arguments: argparse.Namespace) -> int:
    """Print the objects. Raises: CommandError and InvalidManifest."""
    from ddp_operator.cli.io import read_file
    from ddp_operator.validation import check_manifest

    if arguments.extra:
        raise CommandError("unexpected arguments after --; they are for `ddp run`")
    children = check_manifest(read_file(arguments.file)).children
    if arguments.check:
        return ExitCode.OK
    if arguments.output == "json":
        objects = {"apiVersion": "v1", "kind": "List", "items": list(children)}
        print(json.dumps(objects, indent=2))
    else:
        import yaml

        print(yaml.safe_dump_all(children, sort_keys=False, width=120, allow_unicode=True), end="")
    return ExitCode.OK
