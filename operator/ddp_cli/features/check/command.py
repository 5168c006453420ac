"""`ddp check`: arguments, the runs, and a line for each check."""

import argparse
import json
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, NamedTuple

from ddp_cli.client.workdir import Workdir, default_folder
from ddp_cli.commands.arguments import ELSEWHERE_ON_THIS_MACHINE, Elsewhere
from ddp_cli.commands.init import add_job_options, add_script, find_script, read_job_options
from ddp_cli.commands.io import CommandError, ExitCode, integer, print_note, read_file
from ddp_cli.commands.run import add_machine_arguments, select_python
from ddp_cli.features.check.judge import judge
from ddp_cli.features.check.runs import CheckedRun, Request, Runs
from ddp_cli.features.check.verdict import FAILED, NOT_APPLICABLE, PASSED, WARNING, CheckVerdict
from ddp_cli.local.adapt import count_cpus
from ddp_cli.local.machine import find_gpus
from ddp_cli.local.screen import count
from ddp_cli.view.display import can_redraw
from ddp_cli.view.terminal import build_console, print_text
from ddp_operator.api.documents import load_documents
from ddp_operator.api.errors import InvalidManifest
from ddp_pod.contract.processes import STOP_SIGNALS
from ddp_pod.features.check.contract import MOST_STEPS

ELSEWHERE: Final[Elsewhere] = (
    *ELSEWHERE_ON_THIS_MACHINE,
    ("--quiet --logs --runs-dir --name", "it prints verdicts only: --keep keeps logs and records"),
    ("--include --pip", "its runs have a copy of the whole folder, and the packages of --python"),
    ("--max-restarts --metrics-port", "it chooses it for each of its runs: leave it out"),
    ("--profiles", "name a script, or a YAML that `ddp render --profiles FILE` prints"),
)
_STEPS: Final = 20
_TIMEOUT: Final = 1800
_LEAST_RANKS: Final = 4
_RANKS_PER_CPU: Final = 2
_LEAST_STEPS: Final = 6  # fewer leave nothing to compare after a resume
_LINE_LIMIT: Final = 300  # of a line of the script's log
_COLORS: Final = {PASSED: "green", FAILED: "red", WARNING: "yellow"}
_OF_FOLDER: Final = ("run folder:", "files:", "report:", "next:", "log:")  # lines on files that are removed
_NO_STEP: Final = (
    "the script ended with exit code 0 and without an optimizer step that ddp can see. If a finished training is the "
    "cause, name its files in .ddpignore; docs/check.md lists what ddp cannot see"
)


class Shape(NamedTuple):
    """The pods of each run, and the ranks of each pod."""

    pods: int
    ranks: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_script(parser, "a training script (train.py), or a job's YAML (- reads standard input)")
    add_job_options(parser, parser)
    add_machine_arguments(parser)
    parser.add_argument(
        "--workdir",
        type=Path,
        metavar="DIR",
        help="the folder of which each run gets a copy; default: the current one, or the script's if that is elsewhere",
    )
    parser.add_argument(
        "--steps",
        type=integer(_LEAST_STEPS, MOST_STEPS),
        default=_STEPS,
        metavar="N",
        help=f"optimizer steps of the reference; default: {_STEPS}",
    )
    parser.add_argument(
        "--seed", type=integer(0), metavar="N", help="repeat a check: interrupt the runs at the steps of this seed"
    )
    parser.add_argument(
        "--timeout",
        type=integer(1),
        default=_TIMEOUT,
        metavar="SECONDS",
        help=f"time for all runs; what they have shown until then is reported; default: {_TIMEOUT}",
    )
    parser.add_argument(
        "--strict", action="store_true", help="fail also for a warning, and for a check that is not applicable"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--plain", action="store_true", help="print a line for each run, also on a terminal")
    parser.add_argument("--keep", action="store_true", help="keep copies, logs and records of the runs")
    parser.epilog = "Arguments after -- are the script's, after those of the YAML."


def run(arguments: argparse.Namespace) -> int:
    """Run the script three times, and return 0 only if no check failed. Raises: ClientError."""
    request = build_request(arguments)
    if arguments.python is not None:
        select_python(arguments.python)
    for number in {signal.SIGTERM, signal.SIGHUP} & {*STOP_SIGNALS}:
        signal.signal(number, _raise_interrupt)

    progress = RunProgress(is_plain=arguments.plain)
    with Runs(request, progress.show) as runs:
        try:
            finished = runs.run_all()
        finally:
            progress.close()
            if request.keep:
                print_note(f"copies, logs and records: {runs.scratch}")
        problems = [text for text in map(describe_problem, finished) if text]
        if not finished[0].steps:
            is_refused = finished[0].code == ExitCode.BAD_INPUT
            message = "\n".join(problems) or describe_no_step(finished[0])
            raise CommandError(message, ExitCode.BAD_INPUT if is_refused else ExitCode.FAILED)
        verdicts = judge(finished)

    for note in [*problems, describe_left_out(runs.left_out), describe_cut(finished[0])]:
        if note:
            print_note(note)
    if arguments.json:
        print_text(json.dumps(build_document(verdicts, finished, request.seed), indent=2))
    else:
        print_verdicts(verdicts)
        print_text(summarize(verdicts, finished, request.seed))
    accepted = (PASSED,) if arguments.strict else (PASSED, WARNING, NOT_APPLICABLE)
    failed = bool(problems) or any(verdict.state not in accepted for verdict in verdicts)
    return ExitCode.FAILED if failed else ExitCode.OK


def build_request(arguments: argparse.Namespace) -> Request:
    """Return what the arguments order. Raises: CommandError."""
    script = find_script(arguments.file, arguments.module)
    path = script.path if script is not None else None
    folder = arguments.workdir or default_folder(path)
    if not folder.is_dir():
        raise CommandError(f"--workdir {folder}: no such folder; name the folder of the script")

    text = ""
    if path is not None:
        words = [Workdir(folder).place(path)]
    elif script is not None:
        words = ["-m", arguments.module]
    else:
        text = read_file(arguments.file, "a job's YAML or of a script (.py, .sh)")
        words = ["-"]
    shape = find_shape(arguments, text)
    limit_ranks(shape)
    print_note(describe_shape(shape))
    return Request(
        folder=folder,
        options=[*words, *list_options(arguments, shape, is_script=script is not None)],
        arguments=arguments.extra,
        text=text,
        steps=arguments.steps,
        seed=random.randrange(10**6) if arguments.seed is None else arguments.seed,
        timeout=arguments.timeout,
        pods=shape.pods,
        keep=arguments.keep,
    )


def find_shape(arguments: argparse.Namespace, text: str) -> Shape:
    """Return the number of pods and of ranks in each. ``text``: a job's YAML; empty for a script."""
    spec: dict[str, Any] = {}
    with suppress(InvalidManifest):  # `ddp run` reports it
        documents = load_documents(text)
        spec = next((document["spec"] for document in documents if isinstance(document.get("spec"), dict)), {})
    procs = arguments.procs or spec.get("procPerNode")
    procs = procs if isinstance(procs, int) else 1
    nodes = arguments.nodes or spec.get("nodes")
    default = 2 if not text and procs == 1 else 1
    return Shape(nodes if isinstance(nodes, int) else default, procs)


def limit_ranks(shape: Shape) -> None:
    """Refuse more ranks than this machine can run. Raises: CommandError."""
    ranks = shape.pods * shape.ranks
    most = max(_LEAST_RANKS, _RANKS_PER_CPU * count_cpus())
    if ranks > most:
        raise CommandError(
            f"--nodes and --procs: {ranks} ranks, but a check runs at most {most} on {count_cpus()} CPUs. Two show the "
            "same mistakes: use --nodes 2 --procs 1"
        )


def describe_shape(shape: Shape) -> str:
    """Return what each run consists of, and which mistakes that hides."""
    text = f"checking {count(shape.pods, 'pod')} of {count(shape.ranks, 'rank')}"
    if shape.pods > 1:
        return f"{text} (--nodes); --procs sets the ranks of a pod, which share a hash seed and so the order of sets"
    if shape.ranks > 1:
        return f"{text} (--procs), which share a hash seed and so the order of sets; --nodes 2 --procs 1 compares pods"
    return f"{text}; most checks compare ranks: use --nodes 2"


def list_options(arguments: argparse.Namespace, shape: Shape, *, is_script: bool) -> list[str]:
    """Return the options of `ddp run`: those that are given, and for a script at least two pods or ranks."""
    options = read_job_options(arguments)
    variables = options.pop("env", ())
    cpu = arguments.cpu
    if is_script and "nodes" not in options and shape.pods > 1:
        options["nodes"] = shape.pods
        if not cpu and len(find_gpus(os.environ)) == 1:
            print_note("this machine has 1 GPU; the 2 ranks of the check train on CPUs")
            cpu = True
    words = [f"--{name}={value}" for name, value in options.items()]
    words += [f"--env={name}={value}" for name, value in variables]
    return [*words, "--cpu"] if cpu else words


def describe_problem(run: CheckedRun) -> str:
    """Return why a run did not end as ordered, with the output of `ddp run`; empty if it did."""
    if run.succeeded:
        return ""
    if run.problem:
        return f"{run.name}: ended early: {run.problem}"
    output = run.output.replace(f"{run.order.folder}/", "")
    lines = [line for line in output.strip().splitlines() if not line.strip().startswith(_OF_FOLDER)]
    return "\n".join([f"{run.name}: `ddp run` ended with exit code {run.code}", *lines])


def describe_no_step(run: CheckedRun) -> str:
    """Return why there is nothing to check, with what the script has written last."""
    lines = [f"  {line[:_LINE_LIMIT]}" for line in run.last_lines]
    return "\n".join([_NO_STEP, "its last lines:", *lines] if lines else [_NO_STEP])


def describe_left_out(entries: Sequence[str]) -> str:
    """Return what earlier trainings have left in the folder, with which the script makes no step, or very few."""
    if not entries:
        return ""
    return f"{', '.join(entries)}: of an earlier training that leaves no steps; left out of the copies"


def describe_cut(reference: CheckedRun) -> str:
    """Return how shorter epochs change what ``--steps`` reaches; empty if they do not."""
    order = reference.order
    if not reference.succeeded or reference.steps >= order.steps:
        return ""
    return (
        f"the script ended after {reference.steps} of {order.steps} steps: a check cuts epochs to {order.batches} "
        "batches; more epochs reach more steps"
    )


class RunProgress:
    """A line on stderr for each run, redrawn on a terminal."""

    def __init__(self, *, is_plain: bool = False) -> None:
        self._redraws = not is_plain and can_redraw(sys.stderr)
        self._shown = ""

    def show(self, run: str, text: str) -> None:
        """Show the progress of a run; ``text`` of a finished one ends with a line feed."""
        line = f"{run}: {text}"
        if line == self._shown or not (self._redraws or line.endswith("\n")):
            return
        self._shown = line
        sys.stderr.write(f"\r\x1b[2K{line}" if self._redraws else line)
        sys.stderr.flush()

    def close(self) -> None:
        """End a line that is not finished."""
        if self._redraws and self._shown and not self._shown.endswith("\n"):
            sys.stderr.write("\n")


def print_verdicts(verdicts: Sequence[CheckVerdict]) -> None:
    """Print a line for each check: its state, name and reason; below it the line to change and the remedy."""
    rows = [(verdict, [text for text in (verdict.reason, describe_remedy(verdict)) if text]) for verdict in verdicts]
    if not sys.stdout.isatty():
        width = max((len(verdict.check) for verdict in verdicts), default=0)
        for verdict, texts in rows:
            head = f"{verdict.state:14}  {verdict.check:{width}}  "
            print_text((head + f"\n{' ' * len(head)}".join(texts)).rstrip())
        return
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column()
    for verdict, texts in rows:
        table.add_row(
            Text(verdict.state, _COLORS.get(verdict.state, "bright_black")), Text(verdict.check), Text("\n".join(texts))
        )
    build_console(sys.stdout).print(table)


def describe_remedy(verdict: CheckVerdict) -> str:
    """Return the line to change and how; empty if the check has neither."""
    return ": ".join(text for text in (verdict.place, verdict.remedy) if text)


def summarize(verdicts: Sequence[CheckVerdict], runs: Sequence[CheckedRun], seed: int) -> str:
    """Return the last line: the numbers of checks by state, the time and the seed."""
    counts = Counter(verdict.state for verdict in verdicts)
    states = ", ".join(
        f"{counts[state]} {state}" for state in (PASSED, FAILED, WARNING, NOT_APPLICABLE) if counts[state]
    )
    return f"{states}; {count(len(runs), 'run')} in {sum(run.seconds for run in runs):.0f} s; repeat with --seed {seed}"


def build_document(verdicts: Sequence[CheckVerdict], runs: Sequence[CheckedRun], seed: int) -> dict[str, object]:
    """Return the object of ``--json``."""
    return {
        "checks": [asdict(verdict) for verdict in verdicts],
        "seed": seed,
        "runs": [
            {
                "name": run.name,
                "steps": run.steps,
                "seconds": round(run.seconds, 1),
                "exitCode": run.code,
                "problem": describe_problem(run),
            }
            for run in runs
        ],
    }


def _raise_interrupt(number: int, frame: object) -> None:
    """End the runs and remove the copies before this process ends."""
    raise KeyboardInterrupt
