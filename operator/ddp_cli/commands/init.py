"""`ddp init`: write a commented YAML that runs a script in a cluster. `ddp run train.py` runs the same YAML."""

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any, Final

from ddp_cli.client.program import IMAGE, job_name
from ddp_cli.client.workdir import Workdir
from ddp_cli.commands.io import CommandError, ExitCode, integer, read_file
from ddp_cli.view.terminal import print_manifest, print_text
from ddp_operator.api.kubeobjects import parse_quantity
from ddp_operator.api.spec import MAX_RESTARTS
from ddp_operator.api.yaml_writer import format_list, format_text

SCRIPT_SUFFIXES: Final = (".py", ".sh")
"""Of files that a command runs as a script; any other file is a job's YAML."""
_PYTHON: Final = "python3"
_CPUS_PER_GPU: Final = 2  # so that the smallest GPU machines of the clouds have room
_MEMORY_GIB_PER_GPU: Final = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_script(parser, "the training script")
    add_job_options(parser, parser)
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="a file that does not exist yet; default: standard output"
    )
    parser.epilog = "Arguments after -- are the script's."


def run(arguments: argparse.Namespace) -> int:
    """Write the YAML. Raises: CommandError and InvalidManifest."""
    from ddp_cli.client.validation import check_manifest

    script = find_script(arguments.file, arguments.module)
    if script is None:
        raise CommandError(f"{arguments.file}: not a script (.py, .sh); name one, or a module with -m MODULE")
    text = write_manifest(script, arguments.extra, **read_job_options(arguments))
    check_manifest(text)
    if arguments.output is None:
        print_manifest(text)
        return ExitCode.OK
    try:
        with arguments.output.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise CommandError(f"{arguments.output}: the file exists; name another file, or remove it") from None
    except OSError as error:
        raise CommandError(f"{arguments.output}: {error.strerror}; name another file") from None
    print_text(
        f"wrote {arguments.output}\n"
        f"next:  ddp run {arguments.output} (--cpu without a GPU)   ddp submit {arguments.output} --workdir ."
    )
    return ExitCode.OK


def add_script(parser: argparse.ArgumentParser, help_text: str) -> None:
    """Declare the file, and the module as its alternative."""
    parser.add_argument("file", nargs="?", metavar="FILE", help=help_text)
    parser.add_argument("-m", dest="module", metavar="MODULE", help="run MODULE as python -m does, instead of a file")


def add_job_options(parser: argparse.ArgumentParser, sizes: argparse._ActionsContainer) -> None:
    """Declare the fields of the YAML that a command writes for a script. ``sizes``: where --nodes and --procs belong.

    An option that is not given is None, so that a command can refuse it for a YAML file.
    """
    group = parser.add_argument_group("if FILE is a script", "Fields of the YAML that `ddp init` would write.")
    sizes.add_argument("--nodes", type=integer(1), metavar="N", help="number of pods; default: 1")
    sizes.add_argument("--procs", type=integer(1), metavar="N", help="ranks in each pod; default: one for each GPU")
    group.add_argument("--gpus", type=integer(0), metavar="N", help="GPUs of each pod; default: 1")
    group.add_argument(
        "--cpus", type=_parse_quantity, metavar="N", help=f"CPUs of each pod; default: {_CPUS_PER_GPU} per GPU, else 1"
    )
    group.add_argument(
        "--memory",
        type=_parse_quantity,
        metavar="SIZE",
        help=f"memory that each pod requests, such as 64Gi; default: {_MEMORY_GIB_PER_GPU}Gi per GPU, else 2Gi",
    )
    group.add_argument("--image", help=f"an image with Python and PyTorch; default: {IMAGE}")
    group.add_argument(
        "--env",
        type=_parse_variable,
        action="append",
        metavar="NAME=VALUE",
        help="an environment variable of the ranks; repeatable",
    )


def read_job_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options of ``add_job_options`` that are given, as arguments of ``write_manifest``."""
    names = ("nodes", "procs", "gpus", "cpus", "memory", "image", "env")
    values = {name: getattr(arguments, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def _parse_quantity(text: str) -> str:
    if (parse_quantity(text) or 0) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a quantity of Kubernetes, such as 8, 0.5, 500m or 64Gi")
    return text


def _parse_variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text!r}: must be NAME=VALUE")
    return name, value


def find_script(file: str | None, module: str | None) -> "Script | None":
    """Return the script or module that the arguments name, or None for a YAML file. Raises: CommandError."""
    if module is not None and file is not None:
        raise CommandError(f"both a file ({file}) and -m {module}; name one, and put arguments of the script after --")
    if module is not None:
        parts = [part for part in module.split(".") if part != "__main__"]
        return Script((_PYTHON, "-m", module), job_name(parts[-1] if parts else module))
    if file is None:
        raise CommandError("no file named; name a job's YAML or a script (train.py), or a module with -m MODULE")
    if file.endswith(".sh"):
        read_file(file, "a script")
        return Script(("bash", file), job_name(PurePath(file).stem))
    if not file.endswith(".py"):
        return None
    read_file(file, "a training script")
    return Script((_PYTHON, file), job_name(PurePath(file).stem))


@dataclass(frozen=True, slots=True)
class Script:
    """A script or module: its command line, and the job's name."""

    command: Sequence[str]
    name: str

    @property
    def path(self) -> str | None:
        """The path of the script; None for a module."""
        return None if "-m" in self.command else self.command[-1]


def place_script(script: Script, workdir: Path) -> Script:
    """Return the script with its path relative to ``workdir``, where a pod starts. Raises: ClientError."""
    if script.path is None:
        return script
    return replace(script, command=(*script.command[:-1], Workdir(workdir).place(script.path)))


def write_manifest(
    script: Script,
    args: Sequence[str] = (),
    *,
    nodes: int = 1,
    procs: int | str = "auto",
    gpus: int = 1,
    cpus: str = "",
    memory: str = "",
    image: str = IMAGE,
    env: Sequence[tuple[str, str]] = (),
) -> str:
    """Return the YAML of a job that runs a script, with comments for a first-time reader.

    ``gpus``, ``cpus``, ``memory``: of each pod; ``env``: names and values.
    """
    # Without requests, a busy node gives a pod next to no CPU time.
    cpus = cpus or str(_CPUS_PER_GPU * gpus or 1)
    memory = memory or f"{_MEMORY_GIB_PER_GPU * gpus or 2}Gi"
    variables = ", ".join(f"{{name: {format_text(name)}, value: {format_text(value)}}}" for name, value in env)
    program = format_text(script.command[-1])
    lines = [
        "apiVersion: ddp-operator.dev/v1alpha1",
        "kind: DDPTrainingJob",
        "metadata:",
        f"  name: {format_text(script.name)}",
        "spec:",
        f"  nodes: {nodes}  # pods, each one torchrun node",
        f"  procPerNode: {procs}  # ranks in each pod; auto: one for each GPU of its limits, or 1 without GPUs",
        "  template:  # an ordinary pod template",
        "    spec:",
        "      containers:",
        "        - name: trainer",
        f"          # An image with Python and PyTorch. It contains {program}, or --workdir adds it.",
        f"          image: {format_text(image)}",
        f"          command: {format_list(script.command)}",
        f"          args: {format_list(args)}",
        *([f"          env: [{variables}]"] if variables else []),
        "          resources:",
        f"            requests: {{cpu: {format_text(cpus)}, memory: {format_text(memory)}}}",
        f'            {"" if gpus else "# "}limits: {{nvidia.com/gpu: "{gpus or 1}"}}'
        f"{'' if gpus else '  # without GPUs, ranks train on CPUs'}",
        f"  # recovery: {{maxRestarts: {MAX_RESTARTS}}}  # new attempts after failures that a restart may fix",
        "  # checkpoint:  # a volume that outlives the pods, for a script that saves and resumes",
        "  #   claimName: my-claim  # DDP_CHECKPOINT_DIR is its path in the pods",
        "  # metrics:  # read progress from log lines, for a script that does not export it (docs/your-script.md)",
        "  #   logPatterns: ['^step (?P<step>\\d+)/(?P<totalSteps>\\d+) loss (?P<loss>\\S+)']",
    ]
    return "\n".join(lines) + "\n"
