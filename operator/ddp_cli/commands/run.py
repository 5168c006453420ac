"""`ddp run`: arguments, checks, and the exit code. ``local.runner`` runs the job."""

import argparse
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from ddp_cli.commands.arguments import (
    ELSEWHERE_ON_THIS_MACHINE,
    Elsewhere,
    add_runs_argument,
    add_workdir_arguments,
    read_workdir,
)
from ddp_cli.commands.init import (
    SCRIPT_SUFFIXES,
    add_job_options,
    add_script,
    find_script,
    place_script,
    read_job_options,
    write_manifest,
)
from ddp_cli.commands.io import CommandError, ExitCode, integer, print_note, read_file
from ddp_cli.commands.profiles import add_profiles_argument, read_profiles
from ddp_cli.commands.render import omit_data
from ddp_operator.api.spec import LOCAL_MAX_RESTARTS
from ddp_pod.contract.names import CHECK_VARIABLE
from ddp_pod.contract.numbers import parse_count

ELSEWHERE: Final[Elsewhere] = ELSEWHERE_ON_THIS_MACHINE
_SCRIPT = re.compile(r"\A#!|^(import|from) \w", re.MULTILINE)  # neither begins a line of YAML


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_script(parser, "a job's YAML (- reads standard input) or a training script (train.py)")
    add_job_options(parser, parser)
    add_machine_arguments(parser)
    add_profiles_argument(parser)
    add_run_arguments(parser, logs="0")
    add_runs_argument(parser)
    parser.add_argument(
        "--name",
        type=_parse_folder_name,
        metavar="NAME",
        help="prefix of the run folder's name; default: the job's name",
    )
    add_workdir_arguments(parser)
    parser.epilog = "Arguments after -- are the script's, after those of the YAML."


def add_run_arguments(parser: argparse._ActionsContainer, *, logs: str) -> None:
    """Declare what a run on this machine does and shows. ``logs``: the rank whose output it shows by default."""
    parser.add_argument(
        "--max-restarts",
        type=integer(0),
        metavar="N",
        help="restart all pods up to N times after a failure; default: spec.recovery.maxRestarts of the file, else "
        f"{LOCAL_MAX_RESTARTS}",
    )
    parser.add_argument(
        "--metrics-port",
        type=integer(1024, 65535),
        metavar="BASE",
        help="port of pod 0's /metrics; pod 1 uses BASE+1, and so on; default: free ports",
    )
    parser.add_argument(
        "--logs",
        type=_parse_ranks,
        default=logs,
        metavar="RANK",
        help=f"show the output of this rank, all or none; default: {logs}",
    )
    parser.add_argument(
        "--plain", action="store_true", help="print lines instead of a progress bar, also on a terminal"
    )
    parser.add_argument("--quiet", action="store_true", help="print only the summary")


def add_machine_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what of this machine runs the pods."""
    parser.add_argument("--cpu", action="store_true", help="use no GPUs; one worker per pod unless --procs is set")
    parser.add_argument(
        "--python",
        metavar="FILE",
        help="the Python that runs the pods; default: the first with PyTorch of: the active environment (VIRTUAL_ENV, "
        "CONDA_PREFIX), .venv of the project, that of ddp, PATH",
    )


def run(arguments: argparse.Namespace) -> int:
    """Check the file, run it, and return 0 only if the job succeeded. Raises: CommandError and InvalidManifest."""
    return run_manifest(read_manifest(arguments), arguments)


def run_manifest(text: str, arguments: argparse.Namespace) -> int:
    """Run a job's YAML. Returns 0 only if the job succeeded. Raises: CommandError and InvalidManifest."""
    from ddp_cli.local.adapt import Unsuitable

    if arguments.python is not None:
        select_python(arguments.python)
    try:
        plan = _prepare(text, arguments)
    except Unsuitable as error:
        raise CommandError(f"refused\n{error}") from None
    from ddp_cli.local.runner import CannotStart, run_job

    try:
        outcome = run_job(plan)
    except CannotStart as error:
        raise CommandError(str(error)) from None
    if outcome.broken:
        return ExitCode.BROKEN
    if outcome.signal is not None:
        return 128 + outcome.signal
    return {"Succeeded": ExitCode.OK, "Rejected": ExitCode.BAD_INPUT}.get(outcome.phase, ExitCode.FAILED)


def select_python(path: str) -> None:
    """Have this process, and those that it starts, run the pods with a Python. Raises: CommandError."""
    from ddp_cli.local.machine import ENV_PYTHON

    program = shutil.which(path)
    if program is None:
        raise CommandError(f"--python: {path} is not an executable program; name a Python, such as /venv/bin/python")
    os.environ[ENV_PYTHON] = os.path.abspath(program)


def read_manifest(arguments: argparse.Namespace) -> str:
    """Return the YAML that the arguments name, or one for their script. Raises: CommandError."""
    script = find_script(arguments.file, arguments.module)
    options = read_job_options(arguments)
    for name in ("nodes", "procs"):
        options.pop(name, None)  # they change a YAML as well, in ``_prepare``
    if script is None:
        if options:
            raise CommandError(f"--{next(iter(options))}: only for a script; set the field in {arguments.file} instead")
        text = read_file(arguments.file, "a job's YAML or of a script (.py, .sh)")
        if _SCRIPT.search(text):
            raise CommandError(f"{arguments.file}: a script, not a job's YAML; give its name the ending .py or .sh")
        return text
    if arguments.workdir is not None:
        script = place_script(script, arguments.workdir)
    from ddp_cli.local.machine import find_gpus

    available = 0 if arguments.cpu else len(find_gpus(os.environ))
    # With more pods than GPUs, request one each: the job is then refused instead of training on CPUs.
    gpus = max(available // (arguments.nodes or 1), min(available, 1))
    return write_manifest(script, **{"gpus": min(gpus, arguments.procs or gpus), **options})


def _prepare(text: str, arguments: argparse.Namespace) -> Any:
    """Return the LocalRunPlan. Raises: CommandError, InvalidManifest, Unsuitable."""
    from ddp_cli.client.hooks import draws_reports
    from ddp_cli.client.workdir import check_job
    from ddp_cli.local import adapt
    from ddp_cli.local.folder import ENV_RUN_FOLDER
    from ddp_cli.local.machine import find_gpus, find_interpreter, has_torch
    from ddp_cli.local.ports import hold_free_port
    from ddp_cli.local.runner import LocalRunPlan
    from ddp_operator.api.cel import check_rules
    from ddp_operator.api.errors import InvalidManifest
    from ddp_operator.api.parse import parse_resource
    from ddp_operator.api.resources import count_pod_gpus
    from ddp_operator.features import SCHEMA
    from ddp_operator.manifests.children import build_children
    from ddp_operator.manifests.template import resolve_template

    profiles = read_profiles(arguments.profiles)
    manifest, code = check_job(text, read_workdir(arguments), in_cluster=False, note=print_note, profiles=profiles)
    interpreter = find_interpreter(resolve_template(manifest.job).command.interpreter, os.environ)
    if not has_torch(interpreter):
        raise CommandError(
            f"PyTorch is not installed for {interpreter}, which would run the pods; run `pip install torch` there, "
            "activate an environment with PyTorch, or name its Python with --python"
        )
    if (manifest.resource["spec"].get("preflight") or {}).get("require"):
        print_note(
            "spec.preflight.require: ignored on this machine, whose pods communicate over the loopback interface"
        )
    changes = adapt.Changes(arguments.nodes, arguments.procs, arguments.cpu, arguments.extra, arguments.max_restarts)
    cpus = adapt.count_cpus()
    port = hold_free_port()
    others = [*manifest.others, *([code.build_config_map(manifest.job.namespace)] if code else [])]
    adapt.check_code(manifest.resource, others)
    resource = adapt.adapt_resource(manifest.resource, changes, port, manifest.completed.get("recovery"))
    resource = adapt.use_own_credentials(resource, others)
    if CHECK_VARIABLE in os.environ:
        adapt.shorten_watchdog(resource)
        adapt.request_recorder(resource, os.environ[CHECK_VARIABLE])
        resource["spec"].setdefault("processGroupPolicy", "Warn")  # a check reports it together with its other findings
    errors = check_rules(resource, SCHEMA)  # --nodes and --procs may violate one
    if errors:
        raise InvalidManifest(errors)
    wants_gpus = bool(count_pod_gpus(resource["spec"]["template"]["spec"]))
    gpu_ids = find_gpus(os.environ) if wants_gpus else None
    findings = [*adapt.check_job(manifest.resource["spec"]), *adapt.check_suitable(resource, gpu_ids)]
    resource = adapt.share_cpus(resource, resolve_template(parse_resource(resource, SCHEMA)).nproc, cpus)
    job = parse_resource(resource, SCHEMA)
    nproc = resolve_template(job).nproc
    if not arguments.logs.isalpha() and int(arguments.logs) >= job.spec.nodes * nproc:
        raise CommandError(f"--logs: rank {arguments.logs} does not exist; the last is {job.spec.nodes * nproc - 1}")
    if arguments.metrics_port is not None:
        adapt.check_ports(arguments.metrics_port, job.size.pods)
    return LocalRunPlan(
        text=text,
        # A user of the Python API started the run; summaries name what to call again.
        command="client.train(…) or client.submit(…)" if ENV_RUN_FOLDER in os.environ else arguments.command_line,
        resource=_strip_server_fields(resource),
        others=others,
        children=[omit_data(child) for child in build_children(job, attempt=1, nodes=job.spec.nodes)],
        nproc=nproc,
        interpreter=interpreter,
        # `ddp run` wrote the YAML of a script itself, so its ignored fields are no news.
        findings=findings if arguments.file and not arguments.file.endswith(SCRIPT_SUFFIXES) else (),
        gpu_ids=gpu_ids,
        cpus=cpus,
        folder_name=arguments.name or job.name,
        runs_dir=arguments.runs_dir,
        metrics_base=arguments.metrics_port,
        logs=arguments.logs,
        plain=arguments.plain,
        quiet=arguments.quiet,
        build_report=_build_report if draws_reports() else None,
    )


def _build_report(folder: Path) -> str:
    """Return the page of a run's folder. It loads what draws pages at the end, where a fault of it only costs the page.

    Raises: any exception.
    """
    from ddp_cli.client.job import Job
    from ddp_cli.client.local import LocalBackend

    return Job(LocalBackend(folder.parent), str(folder), {}).report()


def _strip_server_fields(resource: Mapping[str, Any]) -> dict[str, Any]:
    """Return the resource without the fields that an API server adds."""
    kept = ("name", "namespace", "labels", "annotations")
    metadata = {key: resource["metadata"][key] for key in kept if resource["metadata"].get(key)}
    return {**{k: v for k, v in resource.items() if k != "status"}, "metadata": metadata}


def _parse_ranks(text: str) -> str:
    rank = parse_count(text)
    if text not in ("all", "none") and rank is None:
        raise argparse.ArgumentTypeError(f"{text!r}: must be all, none or the number of a rank")
    return text if rank is None else str(rank)


def _parse_folder_name(text: str) -> str:
    # The folder must be below --runs-dir, and its name must not be read as an option of a later command.
    if not re.fullmatch(r"\w[\w.-]*", text):
        raise argparse.ArgumentTypeError(
            f"{text!r}: must be letters, digits, _, . and -, and start with a letter or digit"
        )
    return text
