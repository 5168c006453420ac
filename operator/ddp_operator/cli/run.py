"""`ddp run`: arguments, checks, and the exit code. What runs is in ``local.runner``."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from ddp_operator.cli.errors import CommandError, ExitCode


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("file", metavar="FILE", help="the YAML with the DDPTrainingJob; - for standard input")
    parser.add_argument("--nodes", type=_positive, metavar="N", help="pods instead of spec.nodes")
    parser.add_argument("--procs", type=_positive, metavar="N", help="worker processes a pod, for spec.procPerNode")
    parser.add_argument("--cpu", action="store_true", help="ask for no GPU; one worker a pod unless --procs says more")
    parser.add_argument(
        "--max-restarts",
        type=_count,
        metavar="N",
        help="start all pods anew up to N times after a failure, for spec.recovery.maxRestarts; default: what the file "
        "says, else 0",
    )
    parser.add_argument("--runs-dir", type=Path, default=Path("ddp-runs"), metavar="DIR", help="default: ./ddp-runs")
    parser.add_argument("--name", type=_folder, metavar="NAME", help="name of the run folder, for the job's name")
    parser.add_argument(
        "--metrics-port",
        type=_port,
        metavar="BASE",
        help="pod 0 serves /metrics here, pod 1 on the next; default: free",
    )
    parser.add_argument("--logs", action="store_true", help="show the lines of pod 0's log as they are written")
    parser.add_argument("--plain", action="store_true", help="lines instead of a progress bar, also on a terminal")
    parser.add_argument("--quiet", action="store_true", help="print only the summary")
    parser.epilog = "What follows -- is added to the arguments of the training script."


def run(arguments: argparse.Namespace) -> int:
    """Check the file, run it, and return 0 only if the job succeeded. Raises: CommandError and InvalidManifest."""
    from ddp_operator.cli.io import read_file
    from ddp_operator.local.adapt import Unsuitable

    try:
        plan = _prepare(read_file(arguments.file), arguments)
    except Unsuitable as error:
        raise CommandError(f"refused\n{error}") from None
    from ddp_operator.local.runner import CannotStart, run_job

    try:
        outcome = run_job(plan)
    except CannotStart as error:
        raise CommandError(str(error)) from None
    if outcome.broken:
        return ExitCode.BROKEN
    if outcome.signal is not None:
        return 128 + outcome.signal
    return {"Succeeded": ExitCode.OK, "Rejected": ExitCode.BAD_INPUT}.get(outcome.phase, ExitCode.FAILED)


def _prepare(text: str, arguments: argparse.Namespace) -> Any:
    """Return the RunPlan. Raises: InvalidManifest, Unsuitable."""
    from ddp_operator.api.cel import check_rules
    from ddp_operator.api.errors import InvalidManifest
    from ddp_operator.api.parse import parse_resource
    from ddp_operator.kubeobjects.containers import count_pod_gpus
    from ddp_operator.local import adapt
    from ddp_operator.local.gpus import find_gpus
    from ddp_operator.local.runner import RunPlan
    from ddp_operator.manifests.children import build_children
    from ddp_operator.manifests.template import resolve_template
    from ddp_operator.report import build_report
    from ddp_operator.validation import check_manifest

    manifest = check_manifest(text).manifest
    changes = adapt.Changes(arguments.nodes, arguments.procs, arguments.cpu, arguments.extra, arguments.max_restarts)
    machine = adapt.probe_machine()
    resource = adapt.adapt_resource(manifest.resource, changes, machine, manifest.written["spec"].get("recovery"))
    errors = check_rules(resource, None)  # --nodes and --procs may break one
    if errors:
        raise InvalidManifest(errors)
    resource = adapt.share_cpus(resource, resolve_template(parse_resource(resource)).nproc, machine)
    wants_gpus = bool(count_pod_gpus(resource["spec"]["template"]["spec"]))
    gpu_ids = find_gpus(os.environ) if wants_gpus else None
    findings = adapt.check_suitable(resource, gpu_ids)
    job = parse_resource(resource)
    if arguments.metrics_port is not None:
        adapt.check_ports(arguments.metrics_port, job.spec.nodes)
    return RunPlan(
        text=text,
        command=arguments.typed,
        resource=_as_new(resource),
        others=manifest.others,
        children=build_children(job, attempt=1, nodes=job.spec.nodes),
        nproc=resolve_template(job).nproc,
        findings=findings,
        gpu_ids=gpu_ids,
        cpus=machine.cpus,
        folder_name=arguments.name or job.name,
        runs_dir=arguments.runs_dir,
        metrics_base=arguments.metrics_port,
        logs=arguments.logs,
        plain=arguments.plain,
        quiet=arguments.quiet,
        build_report=build_report,
    )


def _as_new(resource: Mapping[str, Any]) -> dict[str, Any]:
    """Return the resource as a user would create it: what an API server wrote into a copied one is dropped."""
    kept = ("name", "namespace", "labels", "annotations")
    metadata = {key: resource["metadata"][key] for key in kept if resource["metadata"].get(key)}
    return {**{k: v for k, v in resource.items() if k != "status"}, "metadata": metadata}


def _positive(text: str) -> int:
    number = int(text) if text.isascii() and text.isdigit() else 0
    return number if number >= 1 else _complain(f"{text!r} is no number above 0")


def _count(text: str) -> int:
    number = int(text) if text.isascii() and text.isdigit() else -1
    return number if number >= 0 else _complain(f"{text!r} is no number from 0 up")


def _folder(text: str) -> str:
    # It stays below --runs-dir, and is not taken for an option by what is typed after it.
    fits = re.fullmatch(r"\w[\w.-]*", text)
    return text if fits else _complain(f"{text!r} is no name of letters, digits, _, . and -")


def _port(text: str) -> int:
    number = int(text) if text.isascii() and text.isdigit() else 0
    return number if 1024 <= number <= 65535 else _complain(f"{text!r} is no port from 1024 to 65535")


def _complain(message: str) -> NoReturn:
    raise argparse.ArgumentTypeError(message)
