"""`ddp render`: report what `kubectl apply` would refuse, else print exactly what the operator would create."""

import argparse
import json
import sys

from ddp_operator.cli.io import CommandError, ExitCode
from ddp_operator.cli.workdir import add_workdir_arguments, check_workdir, read_workdir


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("file", metavar="FILE", help="the YAML with the DDPTrainingJob; - reads standard input")
    parser.add_argument("-o", "--output", choices=("yaml", "json"), default="yaml", help="default: yaml")
    parser.add_argument("--check", action="store_true", help="print errors only")
    add_workdir_arguments(parser)
    parser.epilog = "Owner references have a UID of zeros, since only an API server assigns one."


def run(arguments: argparse.Namespace) -> int:
    """Print the objects. Raises: CommandError and InvalidManifest."""
    from ddp_operator.cli.io import read_file
    from ddp_operator.validation import check_manifest

    if arguments.extra:
        raise CommandError("unexpected arguments after --; they are for `ddp run`")
    code = read_workdir(arguments)
    manifest = check_manifest(read_file(arguments.file), code.spec if code else None)
    if code is not None:
        check_workdir(code, manifest.job, in_cluster=True)
        print(code.describe(), file=sys.stderr)
    children = manifest.children
    if arguments.check:
        return ExitCode.OK
    if arguments.output == "json":
        objects = {"apiVersion": "v1", "kind": "List", "items": list(children)}
        print(json.dumps(objects, indent=2))
    else:
        import yaml

        print(yaml.safe_dump_all(children, sort_keys=False, width=120, allow_unicode=True), end="")
    return ExitCode.OK
