"""Arguments that several commands share, and the client that they select."""

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from ddp_cli.client.client import Client
from ddp_cli.client.errors import ApiError, NotFound
from ddp_cli.client.job import Job
from ddp_cli.client.records import READER_IMAGE, open_record
from ddp_cli.client.workdir import Workdir
from ddp_cli.commands.io import CommandError
from ddp_cli.view.terminal import print_text


def add_cluster_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of every command that talks to a cluster."""
    group = parser.add_argument_group("cluster")
    group.add_argument(
        "-n", "--namespace", metavar="NAME", help='default: the namespace of the context, else "default"'
    )
    group.add_argument("--context", metavar="NAME", help="context of the kubeconfig; default: the current one")
    group.add_argument(
        "--kubeconfig",
        metavar="FILE",
        help="default: $KUBECONFIG, else ~/.kube/config, else the service account of the pod",
    )


def add_output_argument(parser: argparse.ArgumentParser) -> None:
    """Declare ``--output json``."""
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text", help="default: text")


def add_local_arguments(parser: argparse.ArgumentParser, *, named: bool = True) -> None:
    """Declare the arguments; ``named``: also the job's name, which is optional for a run on this machine."""
    if named:
        parser.add_argument(
            "name", metavar="NAME", nargs="?", help="a job, or a run on this machine; default: the newest run"
        )
    group = parser.add_argument_group("this machine")
    group.add_argument(
        "--local", action="store_true", help="use the runs on this machine; default if no cluster is configured"
    )
    add_runs_argument(group)


def add_runs_argument(parser: argparse._ActionsContainer) -> None:
    """Declare the folder that holds all runs."""
    parser.add_argument(
        "--runs-dir", type=Path, default=Path("ddp-runs"), metavar="DIR", help="folder of all runs; default: ./ddp-runs"
    )


def is_run_folder(name: str | None) -> bool:
    """Return whether a job's name is the path of a run's folder."""
    return name is not None and Path(name, "status.yaml").is_file()


def is_local(arguments: argparse.Namespace) -> bool:
    """Return whether the arguments select the runs on this machine; report it on stderr if they do so by default."""
    name = getattr(arguments, "name", None)
    if arguments.local or is_run_folder(name):
        return True
    if not has_cluster(arguments):
        print_text(f"no cluster is configured; using the runs on this machine in {arguments.runs_dir}", file=sys.stderr)
        return True
    return False


def add_history_argument(parser: argparse.ArgumentParser) -> None:
    """Declare the argument of the commands that read records of deleted jobs."""
    parser.add_argument(
        "--history",
        metavar="PLACE",
        default=os.environ.get("DDP_HISTORY"),
        help="if the job was deleted, read its newest record: a URL or folder (that of spec.history), or "
        "claim/NAME[/PATH]; default: $DDP_HISTORY",
    )
    parser.add_argument(
        "--history-image",
        metavar="IMAGE",
        default=READER_IMAGE,
        help=f"of the temporary pod that reads a claim of --history (needs sh, head, base64); default: {READER_IMAGE}",
    )


def open_job(arguments: argparse.Namespace) -> Job:
    """Return the job or run that a reading command names, or the record of a deleted one. Raises: ClientError."""
    try:
        return _open_existing(arguments)
    except (NotFound, ApiError) as error:
        is_unknown = isinstance(error, NotFound) or error.status in (None, 404)
        if not is_unknown or not hasattr(arguments, "history") or arguments.name is None:
            raise
        missing = error
    if not arguments.history:
        if has_cluster(arguments):
            missing.args = (f"{missing}; if the job was deleted, name the place of its record with --history",)
        raise missing
    from ddp_cli.client.api import connect

    image = arguments.history_image
    login = {name: getattr(arguments, name) for name in ("namespace", "context", "kubeconfig")}
    namespace = arguments.namespace or ""
    with suppress(ApiError):  # no cluster is configured: any namespace
        namespace = connect(**login).namespace
    job = open_record(arguments.history, arguments.name, namespace, partial(connect, **login), image=image)
    print_text(f"the job does not exist any more; this is its record at {arguments.history}", file=sys.stderr)
    return job


def _open_existing(arguments: argparse.Namespace) -> Job:
    """Return the job or run that a reading command names; without a name the newest run on this machine.

    A name is looked up in the cluster, if one is configured, then among the runs. Raises: ClientError.
    """
    name = arguments.name
    runs = open_client(arguments, local=True)
    if is_local(arguments):
        return runs.get(name)
    if name is None and _names_cluster(arguments):
        raise CommandError("NAME is missing; name a job, or use --local for the newest run on this machine")
    if name is None or (not _names_cluster(arguments) and (arguments.runs_dir / name).is_dir()):
        return runs.get(name)
    try:
        return open_client(arguments).get(name)
    except (NotFound, ApiError) as error:
        if _names_cluster(arguments) or (isinstance(error, ApiError) and error.status not in (None, 404)):
            raise
        try:
            job = runs.get(name)
        except NotFound:
            raise error from None
        print_text(f"not in the cluster ({error}); using the run on this machine", file=sys.stderr)
        return job


def _names_cluster(arguments: argparse.Namespace) -> bool:
    return bool(arguments.kubeconfig or arguments.context or arguments.namespace)


def has_cluster(arguments: argparse.Namespace) -> bool:
    """Return whether the arguments, the environment or a kubeconfig select a cluster."""
    if _names_cluster(arguments):
        return True
    if os.environ.get("KUBECONFIG") or os.environ.get("KUBERNETES_SERVICE_HOST"):
        return True
    return os.path.exists(os.path.expanduser("~/.kube/config"))


def open_client(arguments: argparse.Namespace, *, local: bool = False) -> Client:
    """Return the client for the cluster of the arguments, or for the runs on this machine."""
    if local:
        return Client(backend="local", runs_dir=arguments.runs_dir)
    return Client(namespace=arguments.namespace, context=arguments.context, kubeconfig=arguments.kubeconfig)


def add_workdir_arguments(parser: argparse.ArgumentParser) -> Any:
    """Declare the arguments of every command that packs a folder. Returns their group."""
    group = parser.add_argument_group("code")
    group.add_argument(
        "--workdir", type=Path, metavar="DIR", help="pack the files of this folder that git would add; pods start in it"
    )
    group.add_argument(
        "--include",
        action="append",
        default=[],
        metavar="PATH",
        help="also pack this file or folder of DIR, even if git ignores it or it may hold a secret; repeatable",
    )
    group.add_argument(
        "--pip", action="store_true", help="install DIR/requirements.txt in each pod before its ranks start"
    )
    return group


def read_workdir(arguments: argparse.Namespace, folder: Path | None = None) -> Workdir | None:
    """Return the folder that the arguments name, else ``folder``; None: no folder. Raises: CommandError."""
    names = ("include", "pip", "code_claim")
    options: dict[str, Any] = {name: getattr(arguments, name, None) for name in names}
    chosen = arguments.workdir or folder
    if chosen is not None:
        return Workdir(chosen, *options.values())
    for name, value in options.items():
        if value:
            raise CommandError(f"--{name.replace('_', '-')} needs --workdir DIR; add it")
    return None


Elsewhere = tuple[tuple[str, str], ...]
"""Options of other commands that a command does not have, and what to do instead. Its module has them as ELSEWHERE."""
ELSEWHERE_OF_A_RUN: Final[Elsewhere] = (
    ("--dry-run", "`ddp render` checks a job without starting it"),
    ("--watch -w", "it shows the run anyway: leave it out"),
)
ELSEWHERE_ON_THIS_MACHINE: Final[Elsewhere] = (
    *ELSEWHERE_OF_A_RUN,
    (
        "--code-claim --replace --namespace -n --context --kubeconfig",
        "it is for this machine: `ddp submit` is for a cluster",
    ),
    ("--local", "it is for this machine anyway: leave it out"),
    ("--hold", "`ddp dev` holds the pods"),
)


def explain_elsewhere(command: ModuleType, option: str) -> str:
    """Return what to do instead of an option that the command lacks and another has; empty for any other option."""
    rows: Elsewhere = getattr(command, "ELSEWHERE", ())
    return next((remedy for options, remedy in rows if option in options.split()), "")


def refuse_options(arguments: argparse.Namespace, names: Sequence[str], reason: str) -> None:
    """Refuse options that the command has for another place. ``reason``: that place, and how to choose it.

    Raises: CommandError.
    """
    for name in names:
        value = getattr(arguments, name)
        if value is not None and value is not False:
            raise CommandError(f"--{name.replace('_', '-')}: only for {reason}, or leave it out")
