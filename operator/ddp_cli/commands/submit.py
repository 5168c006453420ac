"""`ddp submit`: check a job as `ddp render` does, then create it with its code and the file's other objects."""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Final, NoReturn

from ddp_cli.client.errors import ApiError, NameInUse
from ddp_cli.client.job import Job
from ddp_cli.client.workdir import Workdir, check_job, default_folder
from ddp_cli.commands.arguments import (
    Elsewhere,
    add_cluster_arguments,
    add_output_argument,
    add_workdir_arguments,
    open_client,
    read_workdir,
)
from ddp_cli.commands.init import (
    add_job_options,
    add_script,
    find_script,
    place_script,
    read_job_options,
    write_manifest,
)
from ddp_cli.commands.io import CommandError, ExitCode, print_note, read_file
from ddp_cli.view.terminal import print_text

ELSEWHERE: Final[Elsewhere] = (
    ("--python", "the pods use the Python of their image: name one by --image or in the YAML's command"),
    ("--plain --quiet --logs", "it starts the job only: `ddp watch` and `ddp logs --rank` show it"),
    ("--max-restarts", "set spec.recovery.maxRestarts in the YAML"),
    ("--metrics-port", "set spec.metrics.port in the YAML"),
    ("--runs-dir --local", "it is for a cluster: `ddp run` runs the job on this machine"),
    ("--profiles", "the operator reads the profiles of the cluster"),
    ("--hold", "`ddp dev` holds the pods"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_submit_arguments(parser)
    parser.add_argument("--dry-run", action="store_true", help="create nothing; the API server only checks the job")
    parser.add_argument("-w", "--watch", action="store_true", help="watch the job until it ends")
    parser.add_argument("--cpu", action="store_true", help="request no GPUs, if FILE is a script (as --gpus 0)")
    add_output_argument(parser)
    add_cluster_arguments(parser)
    parser.epilog = (
        "Other objects in the file (ConfigMaps, Secrets, claims) are applied first. With a script, the current folder "
        "is packed, or the script's folder if that is elsewhere. Arguments after -- are the script's."
    )


def add_submit_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of every command that creates a job in a cluster."""
    add_script(parser, "a job's YAML (- reads standard input) or a training script (train.py)")
    add_job_options(parser, parser)
    parser.add_argument("--name", help="name of the job, if FILE is a script; default: the name of the script")
    code = add_workdir_arguments(parser)
    code.add_argument(
        "--code-claim",
        metavar="NAME",
        help="store the packed folder on this claim, for a folder too large for a ConfigMap",
    )
    parser.add_argument(
        "--replace", action="store_true", help="delete the job of that name first, and wait for the end of its pods"
    )


def run(arguments: argparse.Namespace) -> int:
    """Create the objects. With ``--watch`` the exit code is the job's."""
    if arguments.watch and arguments.output == "json":
        raise CommandError("--watch prints text; leave out --output json, or use `ddp watch -o json`")
    text, folder = read_manifest(arguments)
    workdir = read_workdir(arguments, folder)
    job = create_job(text, workdir, arguments)
    if arguments.output == "json":
        print_text(json.dumps(job.resource, indent=2))
        return ExitCode.OK
    namespace = job.resource["metadata"]["namespace"]
    print_text(f'{job.name}: {"would be submitted" if arguments.dry_run else "submitted"} to namespace "{namespace}"')
    if arguments.dry_run:
        return ExitCode.OK
    if not arguments.watch:
        name = job.backend.argument(job.name)
        print_text(f"next:  ddp watch {name}   ddp logs {name} -f   ddp why {name}", file=sys.stderr)
        return ExitCode.OK
    from ddp_cli.commands.watch import watch_one

    return watch_one(job)


def create_job(text: str, workdir: Workdir | None, arguments: argparse.Namespace) -> Job:
    """Create the job; with ``--replace`` after the deletion of the one that has its name. Raises: ClientError."""
    try:
        backend = open_client(arguments).backend
    except ApiError as error:
        _check_without_cluster(text, workdir, error)
        raise

    def create(*, dry_run: bool) -> Job:
        return Job(*backend.create(text, workdir, dry_run=dry_run, note=print_note))

    try:
        return create(dry_run=arguments.dry_run)
    except NameInUse as error:
        if not arguments.replace:
            raise
        former = open_client(argparse.Namespace(**{**vars(arguments), "namespace": error.namespace})).get(error.name)
    if arguments.dry_run:
        raise CommandError(f"{former.name} exists; without --dry-run it would be deleted first")
    print_note(f"{former.name}: deleting the job of this name, and waiting for the end of its pods")
    former.delete(wait=True)
    return create(dry_run=False)


def _check_without_cluster(text: str, workdir: Workdir | None, absence: ApiError) -> None:
    """Check the job although no cluster is configured: errors of the file come first. Raises: ClientError."""

    def find_profile(kind: str, namespace: str, name: str) -> NoReturn:
        raise absence

    check_job(text, workdir, in_cluster=True, note=print_note, profiles=find_profile)


def read_manifest(arguments: argparse.Namespace) -> tuple[str, Path | None]:
    """Return the YAML that the arguments name, or one for their script and the folder to pack."""
    options = read_job_options(arguments)
    script = find_script(arguments.file, arguments.module)
    if script is None:
        script_options = [f"--{name}" for name in options]
        if arguments.cpu:
            raise CommandError(f"--cpu: only for a script; remove the GPUs from {arguments.file} instead")
        if arguments.name:
            script_options.append("--name")
        if arguments.extra:
            script_options.append("--")
        if script_options:
            raise CommandError(f"{script_options[0]}: only for a script; set the field in {arguments.file} instead")
        return read_file(arguments.file), None
    if arguments.cpu:
        if options.get("gpus"):
            raise CommandError("--cpu requests no GPUs; leave out --gpus")
        options["gpus"] = 0
    folder = arguments.workdir or default_folder(script.path)
    script = replace(place_script(script, folder), name=arguments.name or script.name)
    return write_manifest(script, arguments.extra, **options), folder
