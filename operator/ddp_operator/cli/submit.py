"""`ddp submit`: check a job as `ddp render` does, then create it with its code and other objects."""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

from ddp_operator.cli.arguments import add_cluster_arguments, add_output_argument, open_client
from ddp_operator.cli.init import add_script, find_script, write_manifest
from ddp_operator.cli.io import CommandError, ExitCode, integer, print_note, read_file
from ddp_operator.cli.workdir import add_workdir_arguments, place_script, read_workdir
from ddp_operator.client.job import Job
from ddp_operator.client.program import IMAGE
from ddp_operator.client.workdir import default_folder
from ddp_operator.terminal import print_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_script(parser, "the YAML with the DDPTrainingJob, - for standard input; or a training script, train.py")
    group = parser.add_argument_group("of a script", "What the YAML would say, as `ddp init` writes it.")
    group.add_argument("--nodes", type=integer(1), metavar="N", help="number of pods; default: 1")
    group.add_argument("--procs", type=integer(1), metavar="N", help="ranks in each pod; default: one for each GPU")
    group.add_argument("--gpus", type=integer(0), metavar="N", help="GPUs of each pod; default: 1")
    group.add_argument("--image", help=f"an image with Python and PyTorch; default: {IMAGE}")
    group.add_argument("--name", help="name of the job; default: that of the script")
    code = add_workdir_arguments(parser)
    code.add_argument(
        "--code-claim",
        metavar="NAME",
        help="put the packed folder on this claim, where it is too large for a ConfigMap",
    )
    code.add_argument(
        "--code-image",
        metavar="REPOSITORY[:TAG]",
        help="push the packed folder to this repository of a registry, for a cluster with image volumes",
    )
    parser.add_argument("--dry-run", action="store_true", help="let the API server check the job without storing it")
    parser.add_argument("-w", "--watch", action="store_true", help="then watch the job until it ends")
    add_output_argument(parser)
    add_cluster_arguments(parser)
    parser.epilog = (
        "Other objects in the file (ConfigMaps, Secrets, claims) are applied first. A script takes the current folder "
        "along, or its own where it is outside of that. Arguments after -- become those of the script."
    )


def run(arguments: argparse.Namespace) -> int:
    """Create the objects. With ``--watch`` the exit code is the job's."""
    if arguments.watch and arguments.output == "json":
        raise CommandError("--watch prints text; leave out --output json, or use `ddp watch -o json`")
    text, folder = _read_manifest(arguments)
    workdir, backend = read_workdir(arguments, folder), open_client(arguments).backend
    job = Job(*backend.create(text, workdir, dry_run=arguments.dry_run, note=print_note))
    if arguments.output == "json":
        print_text(json.dumps(job.resource, indent=2))
        return ExitCode.OK
    namespace = job.resource["metadata"]["namespace"]
    print_text(f'{job.name}: {"would be submitted" if arguments.dry_run else "submitted"} to namespace "{namespace}"')
    if arguments.dry_run:
        return ExitCode.OK
    if not arguments.watch:
        words = job.backend.argument(job.name)
        print_text(f"next:  ddp watch {words}   ddp logs {words} -f   ddp why {words}", file=sys.stderr)
        return ExitCode.OK
    from ddp_operator.cli.watch import watch_one

    return watch_one(job)


def _read_manifest(arguments: argparse.Namespace) -> tuple[str, Path | None]:
    """Return the YAML that is named, or one for the script that is with the folder that it takes along."""
    options = {name: getattr(arguments, name) for name in ("nodes", "procs", "gpus", "image")}
    given = {name: value for name, value in options.items() if value is not None}
    script = find_script(arguments.file, arguments.module)
    if script is None:
        of_script = [f"--{name}" for name in (*given, *(["name"] if arguments.name else []))]
        if of_script or arguments.extra:
            raise CommandError(f"{of_script[0] if of_script else '--'}: is for a script; write it in {arguments.file}")
        return read_file(arguments.file), None
    folder = arguments.workdir or default_folder(None if script.words[0] == "-m" else script.words[0])
    script = replace(place_script(script, folder), name=arguments.name or script.name)
    return write_manifest(script, arguments.extra, **given), folder
