"""`ddp bench`: run ``python -m ddp_trainer.benchmark`` with the same flags. This process imports no torch."""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
from typing import Final

from ddp_operator.cli.errors import CommandError

# Name, metavar (None: a switch), help. The benchmark declares the same ones, which tests/contract checks.
FLAGS: Final = (
    ("--quick", None, "about a minute on two cores: small batches, few systems"),
    ("--device", "NAME", "auto, cpu or cuda; default: cuda if there is one"),
    ("--systems", "A,B", "for example cifar10-resnet50 (docs/benchmark.md); default: all, or a few with --quick"),
    ("--ranks", "N,M", "numbers of ranks to try with DDP; default: 1, 2 and all"),
    ("--variants", "A,B", "of preset, fp32, tf32, bf16, fp16, compile and others (docs/benchmark.md)"),
    ("--rounds", "N", "turns of each contender; default: 5, 2 with --quick"),
    ("--seconds", "X", "length of a turn; default: 3, 0.5 with --quick"),
    ("--data-dir", "DIR", "the real data sets; a missing one is replaced by noise"),
    ("--output-dir", "DIR", "folder for benchmark.json; default: bench-results"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    for name, metavar, help_text in FLAGS:
        if metavar is None:
            parser.add_argument(name, action="store_true", help=help_text)
        else:
            parser.add_argument(name, metavar=metavar, help=help_text)


def run(arguments: argparse.Namespace) -> int:
    """Return the benchmark's exit code. Raises: CommandError, if the trainer is not installed."""
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("ddp_trainer") is None:
        raise CommandError("the trainer is not installed; pip install 'ddp-operator[trainer]'")
    command = [sys.executable, "-m", "ddp_trainer.benchmark"]
    for name, metavar, _ in FLAGS:
        value = getattr(arguments, name.removeprefix("--").replace("-", "_"))
        if value:
            command += [name] if metavar is None else [name, value]
    return subprocess.run([*command, *arguments.extra], check=False).returncode
