"""`ddp render`: say what `kubectl apply` would refuse, else print exactly what the operator would create."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Final

BAD_INPUT: Final = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("file", metavar="FILE", help="the YAML with the DDPTrainingJob; - for standard input")
    parser.add_argument("-o", "--output", choices=("yaml", "json"), default="yaml", help="default: yaml")
    parser.add_argument("--check", action="store_true", help="print nothing but what is wrong")
    parser.epilog = "Owner references hold a UID of zeros, since only an API server gives one."


def run(arguments: argparse.Namespace) -> int:
    """Print the objects and return 0, or what is wrong and return 2."""
    from ddp_operator.api.errors import InvalidManifest
    from ddp_operator.offline import check_manifest

    if arguments.extra:
        print("ddp render: takes no arguments after --; they are for `ddp run`", file=sys.stderr)
        return BAD_INPUT
    try:
        text = sys.stdin.read() if arguments.file == "-" else Path(arguments.file).read_text(encoding="utf-8")
        children = check_manifest(text).children
    except InvalidManifest as error:
        print(f"ddp render: refused\n{error}", file=sys.stderr)
        return BAD_INPUT
    except OSError as error:
        print(f"ddp render: {arguments.file}: {error.strerror}; give the path of a job's YAML", file=sys.stderr)
        return BAD_INPUT
    except UnicodeDecodeError:
        print(f"ddp render: {arguments.file}: is not UTF-8 text; give the path of a job's YAML", file=sys.stderr)
        return BAD_INPUT
    if arguments.check:
        return 0
    if arguments.output == "json":
        objects = {"apiVersion": "v1", "kind": "List", "items": list(children)}
        print(json.dumps(objects, indent=2))
    else:
        import yaml

        print(yaml.safe_dump_all(children, sort_keys=False, width=120, allow_unicode=True), end="")
    return 0
