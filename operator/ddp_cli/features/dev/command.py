"""`ddp dev`, `rerun` and `release`: pods that stay when their ranks end, and run again with changed code."""

import argparse
from pathlib import Path
from typing import Final

from ddp_cli.client.errors import ClientError, Conflict, NameInUse
from ddp_cli.client.job import Job
from ddp_cli.client.workdir import default_folder
from ddp_cli.commands import run as local_run
from ddp_cli.commands import submit
from ddp_cli.commands.arguments import (
    ELSEWHERE_OF_A_RUN,
    Elsewhere,
    add_cluster_arguments,
    add_local_arguments,
    add_runs_argument,
    open_client,
    open_job,
    read_workdir,
    refuse_options,
)
from ddp_cli.commands.init import find_script
from ddp_cli.commands.io import ExitCode, integer, print_note
from ddp_cli.commands.profiles import add_profiles_argument
from ddp_cli.features.dev.orders import OrderRefused, check_takes_orders, send_order
from ddp_cli.features.dev.session import Session
from ddp_cli.view.terminal import print_text
from ddp_operator.api.constants import KIND
from ddp_operator.api.documents import load_documents
from ddp_operator.api.status import ENDED_PHASES
from ddp_operator.api.yaml_writer import format_documents
from ddp_pod.features.dev.contract import Order

ELSEWHERE: Final[Elsewhere] = ELSEWHERE_OF_A_RUN
_LOCAL_OPTIONS: Final = ("python", "max_restarts", "metrics_port", "profiles", "quiet")
_CLUSTER_OPTIONS: Final = ("code_claim", "replace", "namespace", "context", "kubeconfig")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command that ``parser`` is for."""
    command = parser.prog.rpartition(" ")[2]
    if command == "dev":
        _add_dev_arguments(parser)
        return
    add_local_arguments(parser)
    add_cluster_arguments(parser)
    if command == "release":
        parser.add_argument("--no-wait", action="store_true", help="do not wait for the end of the job")
        parser.epilog = "The job ends as its last run did. `ddp delete` ends it without a result."
        return
    code = parser.add_argument_group("code")
    code.add_argument(
        "--workdir", type=Path, default=Path(), metavar="DIR", help="the folder to pack; default: the current one"
    )
    code.add_argument(
        "--include", action="append", default=[], metavar="PATH", help="as for ddp submit; name the same paths"
    )
    code.add_argument("--no-code", action="store_true", help="run the code again that the pods have")
    parser.add_argument("--watch", action="store_true", help="run again whenever a packed file is saved, until Ctrl-C")
    parser.epilog = "Arguments after -- replace those of the script. Ctrl-C ends the run; the pods are held."


def _add_dev_arguments(parser: argparse.ArgumentParser) -> None:
    submit.add_submit_arguments(parser)
    parser.add_argument(
        "--hold",
        type=integer(60, 86400),
        metavar="SECONDS",
        help="release the pods after this time without a run; default: spec.dev of the file, else 1800",
    )
    group = parser.add_argument_group("this machine")
    group.add_argument("--local", action="store_true", help="run the pods as `ddp run` does, while this process runs")
    local_run.add_machine_arguments(parser)
    local_run.add_run_arguments(group, logs="all")
    add_profiles_argument(group)
    add_runs_argument(group)
    add_cluster_arguments(parser)
    parser.set_defaults(dry_run=False)
    parser.epilog = "Ctrl-C ends the run; the pods are held. Arguments after -- are the script's."


def run(arguments: argparse.Namespace) -> int:
    """Start a job, run it again, or release its pods. Raises: ClientError."""
    if arguments.command == "dev":
        return _run_locally(arguments) if arguments.local else _start(arguments)
    job = open_job(arguments)
    dev = check_takes_orders(job).dev
    if arguments.command == "rerun":
        return Session(job, 1 + (dev.last_number if dev is not None else 0)).rerun(arguments)
    for event in send_order(job, Order("release")):
        if event.kind == "refused":
            raise OrderRefused(f"{event.message}; {event.remedy}")
    print_text(f"{job.name}: released", flush=True)
    if not arguments.no_wait:
        for _ in job.changes():
            pass
        print_text(job.why())
    return ExitCode.OK


def add_dev(text: str, hold: int | None) -> str:
    """Return a job's YAML with spec.dev; the file's own is kept. Raises: InvalidManifest."""
    documents = load_documents(text)
    for document in documents:
        spec = document.get("spec")
        if document.get("kind") == KIND and isinstance(spec, dict):
            spec["dev"] = (spec.get("dev") or {}) | ({} if hold is None else {"holdSeconds": hold})
    return format_documents(documents)


def _run_locally(arguments: argparse.Namespace) -> int:
    """Run the job in this process. A script's folder is packed, as it is for a cluster."""
    refuse_options(arguments, _CLUSTER_OPTIONS, "jobs in a cluster; leave out --local")
    script = find_script(arguments.file, arguments.module)
    if script is not None and arguments.workdir is None:
        arguments.workdir = default_folder(script.path)
    text = local_run.read_manifest(arguments)
    return local_run.run_manifest(add_dev(text, arguments.hold), arguments)


def _start(arguments: argparse.Namespace) -> int:
    """Create the job in a cluster, and show its first run."""
    refuse_options(arguments, _LOCAL_OPTIONS, "runs on this machine; add --local")
    text, folder = submit.read_manifest(arguments)
    workdir = read_workdir(arguments, folder)
    if workdir is None:
        print_note("the job runs the code of its image, so ddp rerun can only repeat it; --workdir DIR brings a folder")
    try:
        job = submit.create_job(add_dev(text, arguments.hold), workdir, arguments)
    except NameInUse as error:
        raise _explain_existing(arguments, error) from None
    print_text(f'{job.name}: submitted to namespace "{job.resource["metadata"]["namespace"]}"', flush=True)
    session = Session(job)
    try:
        has_pods = session.wait_for_pods()
    except KeyboardInterrupt:
        print_note(f"the job waits for its pods in the cluster; `ddp delete {job.backend.argument(job.name)}` ends it")
        raise
    if has_pods:
        return session.follow()
    print_text(job.why())
    return ExitCode.FAILED


def _explain_existing(arguments: argparse.Namespace, error: NameInUse) -> ClientError:
    """Return the error for a name in use, with the command that is meant if it is a job of `ddp dev`."""
    namespaced = argparse.Namespace(**{**vars(arguments), "namespace": error.namespace})
    job: Job = open_client(namespaced).get(error.name)
    if job.resource["spec"].get("dev") is None or job.phase in ENDED_PHASES:
        return error
    name = job.backend.argument(job.name)
    return Conflict(
        f"{job.name} is a job of `ddp dev` already: `ddp rerun {name}` brings this folder to its pods; --replace "
        "starts it anew, in new pods"
    )
