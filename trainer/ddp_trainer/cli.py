"""The command line: flags generated from the configuration, and the exit codes of a run."""

import argparse
import difflib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from ddp_sdk import contract
from ddp_sdk.errors import UserError
from ddp_sdk.files import write_atomically
from ddp_sdk.rank_env import RankEnv
from ddp_trainer.config.presets import PRESETS
from ddp_trainer.config.run import RunConfig, read_file, refuse_unread, resolve
from ddp_trainer.errors import DataError, Preempted, Superseded, warn
from ddp_trainer.options import merge, options


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        # argparse would print the usage on every rank and exit with 2.
        raise UserError("command line", message, "see python -m ddp_trainer --help")


def build_parser() -> argparse.ArgumentParser:
    """Build the parser: --preset, --config, --as-published and one flag per setting."""
    width = max(map(len, PRESETS)) + 2
    presets = "\n".join(f"  {preset.name:<{width}}{preset.summary}" for preset in PRESETS.values())
    parser = _Parser(
        prog="python -m ddp_trainer",
        usage="python -m ddp_trainer --preset NAME [--config FILE] [flags]",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Train on one process, or on many: torchrun -m ddp_trainer --preset NAME ...",
        epilog=f"presets:\n{presets}\n\nA flag overrides --config, which overrides the preset.",
    )
    parser.add_argument("--preset", help="start from this configuration, listed below")
    parser.add_argument("--config", help="YAML or JSON file with settings, nested by group: {data: {batch_size: 64}}")
    parser.add_argument(
        "--as-published",
        action="store_true",
        help="use the values of the preset's document with its errors",
    )
    # python -m torch.distributed.launch passes it, and sets LOCAL_RANK as well.
    parser.add_argument("--local-rank", "--local_rank", type=int, help=argparse.SUPPRESS)
    groups: dict[str, Any] = {"": parser.add_argument_group("run")}
    for option in options(RunConfig):
        name = option.path[0] if len(option.path) > 1 else ""
        if name not in groups:
            groups[name] = parser.add_argument_group(name)
        extra: dict[str, Any] = {"nargs": "?", "const": "true"} if option.type is bool else {}
        choices = f" ({', '.join(option.choices)})" if option.choices else ""
        groups[name].add_argument(
            option.flag,
            dest=option.key,
            default=argparse.SUPPRESS,
            metavar={int: "N", float: "X", bool: "BOOL", str: "NAME"}.get(option.type, "A,B"),
            help=(option.help + choices).replace("%", "%%"),
            **extra,
        )
    return parser


def parse(arguments: Sequence[str]) -> RunConfig:
    """Parse the command line into a configuration; raises :class:`UserError` if it is not valid."""
    parser = build_parser()
    known, unknown = parser.parse_known_args(arguments)
    if unknown:
        raise UserError("command line", f"unrecognized arguments: {' '.join(unknown)}", suggest_flag(unknown))
    values = vars(known)
    flags: dict[str, Any] = {}
    for option in options(RunConfig):
        if option.key in values:
            value = option.parse(values[option.key])
            for name in reversed(option.path):
                value = {name: value}
            flags = merge(flags, value)
    file = read_file(values["config"]) if values["config"] else None
    if values["preset"] is None and "preset" not in (file or {}) and "data.name" not in values:
        raise UserError("preset", "neither a preset nor data is named", f"give --preset, one of {', '.join(PRESETS)}")
    config = resolve(values["preset"], file, flags, as_published=values["as_published"])
    folder = config.checkpoint.dir or os.environ.get(contract.ENV_CHECKPOINT_DIR) or None
    config = replace(config, checkpoint=replace(config.checkpoint, dir=folder))
    refuse_unread(config, values.keys())
    return config


def suggest_flag(unknown: Sequence[str]) -> str:
    """Return the remedy for unknown arguments: the flag most similar to the first one, if any is similar."""
    flags = {name: name for name in ("--preset", "--config", "--as-published")}
    flags["--learning-rate"] = "--lr"
    for option in options(RunConfig):
        field = option.path[-1].replace("_", "-")
        # The name of a setting counts too: --width suggests --model-width.
        flags.setdefault(f"--{field}", option.flag)
        flags["--" + "-".join(option.path).replace("_", "-")] = option.flag
        flags[option.flag] = option.flag
    first = next((argument for argument in unknown if argument.startswith("-")), unknown[0])
    typed = first.partition("=")[0].replace("_", "-")
    matches = difflib.get_close_matches(typed, flags, n=1, cutoff=0.7)
    if not matches:
        return "see python -m ddp_trainer --help"
    return f"did you mean {flags[matches[0]]}? See python -m ddp_trainer --help"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the trainer; return its exit code, see :func:`exit_code`."""
    arguments = sys.argv[1:] if arguments is None else arguments

    def train() -> None:
        env = RankEnv.from_environ()
        if env.rank != 0 and ("--help" in arguments or "-h" in arguments):
            return
        config = parse(arguments)
        # Imports torch: a wrong flag is reported before.
        from ddp_trainer.api import Trainer
        from ddp_trainer.distributed.stop import StopSignal

        # The handlers remain until exit_code sets its own: torchrun may send SIGTERM in between.
        Trainer(config, env=env).fit(StopSignal())

    return exit_code(train)


def exit_code(program: Callable[[], object]) -> int:
    """Run ``program``, which trains, and return the process's exit code. Other exceptions are not caught.

    0 is success, 81 a user error, 85 preemption, 86 that a later attempt holds the checkpoint folder. Rank 0 prints the
    reason, and every rank writes an error record for the launcher.
    """
    env = RankEnv()
    try:
        env = RankEnv.from_environ()
        program()
    except UserError as error:
        return _report_error(error, contract.EXIT_USER_ERROR, env)
    except Superseded as error:
        return _report_error(error, contract.EXIT_PEER_LOST, env)
    except Preempted as preempted:
        _ignore_sigterm()
        if env.rank == 0:
            checkpoint = "checkpoint saved" if preempted.saved else "nothing saved: no --checkpoint-dir is set"
            print(f"preempted: {preempted}; {checkpoint}", flush=True)
        return contract.EXIT_PREEMPTED
    signal.signal(signal.SIGTERM, lambda *_: None)  # the run is complete: a late signal must not change the exit code
    return contract.EXIT_OK


def _report_error(error: UserError | Superseded, code: int, env: RankEnv) -> int:
    """Print the error on rank 0, write every rank's error record for the launcher, and return ``code``.

    A :class:`DataError` occurs on one rank only, which prints it.
    """
    _ignore_sigterm()
    if env.rank == 0 or isinstance(error, DataError):
        print(f"ddp_trainer: error: {error}", file=sys.stderr, flush=True)
    runtime_dir = os.environ.get(contract.ENV_RUNTIME_DIR)
    if runtime_dir:
        # The launcher builds the termination message from this record: there is no traceback.
        record = {
            "type": type(error).__name__,
            "message": str(error),
            "traceback": "",
            "exitCode": code,
            "rank": env.rank,
            "localRank": env.local_rank,
            "restart": env.restart,
            "time": time.time(),
        }
        try:
            path = Path(runtime_dir) / contract.RUNTIME_ERROR_FILE.format(local_rank=env.local_rank)
            write_atomically(path, json.dumps(record).encode())
        except OSError as failure:
            warn(f"rank {env.rank}: {failure}")
    return code


def _ignore_sigterm() -> None:
    """Ignore further SIGTERMs while the process exits: torchrun sends one to all ranks when the first exits."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
