"""`ddp init`: the YAML that would run a script in a cluster, with comments; asks nothing."""

import argparse
from pathlib import Path

from ddp_operator.cli.io import CommandError, ExitCode, integer, read_file
from ddp_operator.scaffold import IMAGE, Script, read_module, read_script, write_manifest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_script(parser, "the training script")
    parser.add_argument("--nodes", type=integer(1), default=1, metavar="N", help="number of pods; default: 1")
    parser.add_argument("--gpus", type=integer(0), default=1, metavar="N", help="GPUs of each pod; default: 1")
    parser.add_argument("--image", default=IMAGE, help=f"default: {IMAGE}, without your script in it")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="a file that is not there yet; default: standard output"
    )
    parser.epilog = "Arguments after -- become those of the training script."


def run(arguments: argparse.Namespace) -> int:
    """Write the YAML. Raises: CommandError and InvalidManifest."""
    from ddp_operator.validation import check_manifest

    script = find_script(arguments.file, arguments.module)
    if script is None:
        raise CommandError(f"{arguments.file}: not a Python script (.py); -m MODULE names a module")
    options = {"nodes": arguments.nodes, "gpus": arguments.gpus, "image": arguments.image}
    text = write_manifest(script, arguments.extra, **options)
    check_manifest(text)
    if arguments.output is None:
        print(text, end="")
        return ExitCode.OK
    try:
        with arguments.output.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise CommandError(f"{arguments.output}: is there already; name another file, or remove it") from None
    except OSError as error:
        raise CommandError(f"{arguments.output}: {error.strerror}") from None
    print(f"{arguments.output} is written; on this machine: ddp run {arguments.output} (--cpu if it has no GPU)")
    return ExitCode.OK


def add_script(parser: argparse.ArgumentParser, what: str) -> None:
    """Declare the file, or the module in its place."""
    parser.add_argument("file", nargs="?", metavar="FILE", help=what)
    parser.add_argument("-m", dest="module", metavar="MODULE", help="run MODULE as python -m does, in place of a file")


def find_script(file: str | None, module: str | None) -> Script | None:
    """Return the script or module that the arguments name, or None for another file. Raises: CommandError."""
    if module is not None and file is not None:
        raise CommandError(f"both a file ({file}) and -m {module}; arguments of the script go after --")
    if module is not None:
        return read_module(module)
    if file is None:
        raise CommandError("nothing to run; name a job's YAML or a script (train.py), or a module with -m")
    return read_script(file, read_file(file, "a training script")) if file.endswith(".py") else None
