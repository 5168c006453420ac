"""The command line: flags made from the configuration, and exit codes that say what kind of end it was."""

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

from ddp_trainer import contract
from ddp_trainer.config.options import merge, options
from ddp_trainer.config.presets import PRESETS
from ddp_trainer.config.run import RunConfig, read_file, resolve
from ddp_trainer.config.unread import refuse_unread
from ddp_trainer.distributed import RankEnv
from ddp_trainer.errors import DataError, Preempted, Superseded, UserError, warn
from ddp_trainer.files import write_atomically


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        # argparse would print its usage on every rank and exit with 2.
        raise UserError("command line", message, "see python -m ddp_trainer --help")


def build_parser() -> argparse.ArgumentParser:
    """The parser: --preset, --config, --as-published and one flag a setting."""
    width = max(map(len, PRESETS)) + 2
    presets = "\n".join(f"  {preset.name:<{width}}{preset.summary}" for preset in PRESETS.values())
    parser = _Parser(
        prog="python -m ddp_trainer",
        usage="python -m ddp_trainer --preset NAME [--config FILE] [flags]",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Train on one process, or on many: torchrun -m ddp_trainer --preset NAME ...",
        epilog=f"presets:\n{presets}\n\nA flag wins over --config, which wins over the preset.",
    )
    parser.add_argument("--preset", help="start from this configuration, listed below")
    parser.add_argument("--config", help="YAML or JSON file with settings, nested by group: {data: {batch_size: 64}}")
    parser.add_argument(
        "--as-published", action="store_true", help="the preset as its document wrote it, mistakes included"
    )
    # Given by python -m torch.distributed.launch, which sets LOCAL_RANK as well.
    parser.add_argument("--local-rank", "--local_rank", type=int, help=argparse.SUPPRESS)
    groups: dict[str, Any] = {"": parser.add_argument_group("run")}
    for one in options(RunConfig):
        name = one.path[0] if len(one.path) > 1 else ""
        if name not in groups:
            groups[name] = parser.add_argument_group(name)
        extra: dict[str, Any] = {"nargs": "?", "const": "true"} if one.type is bool else {}
        choices = f" ({', '.join(one.choices)})" if one.choices else ""
        groups[name].add_argument(
            one.flag,
            dest=one.key,
            default=argparse.SUPPRESS,
            metavar={int: "N", float: "X", bool: "BOOL", str: "NAME"}.get(one.type, "A,B"),
            help=(one.help + choices).replace("%", "%%"),
            **extra,
        )
    return parser


def parse(arguments: Sequence[str]) -> RunConfig:
    """The configuration that the command line asks for; raises :class:`UserError` where it is not valid."""
    parser = build_parser()
    known, unknown = parser.parse_known_args(arguments)
    if unknown:
        raise UserError("command line", f"unrecognized arguments: {' '.join(unknown)}", suggest_flag(unknown))
    given = vars(known)
    flags: dict[str, Any] = {}
    for one in options(RunConfig):
        if one.key in given:
            value = one.parse(given[one.key])
            for name in reversed(one.path):
                value = {name: value}
            flags = merge(flags, value)
    file = read_file(given["config"]) if given["config"] else None
    if given["preset"] is None and "preset" not in (file or {}) and "data.name" not in given:
        raise UserError("preset", "neither a preset nor data is given", f"give --preset, one of {', '.join(PRESETS)}")
    config = resolve(given["preset"], file, flags, as_published=given["as_published"])
    folder = config.checkpoint.dir or os.environ.get(contract.ENV_CHECKPOINT_DIR) or None
    config = replace(config, checkpoint=replace(config.checkpoint, dir=folder))
    refuse_unread(config, given.keys())
    return config


def suggest_flag(unknown: Sequence[str]) -> str:
    """The remedy for arguments that are no flags: the flag that is nearest to the first of them, if any is near."""
    flags = {name: name for name in ("--preset", "--config", "--as-published")}
    flags["--learning-rate"] = "--lr"
    for one in options(RunConfig):
        field = one.path[-1].replace("_", "-")
        # By the name in a file, too: --width is --model-width.
        flags.setdefault(f"--{field}", one.flag)
        flags["--" + "-".join(one.path).replace("_", "-")] = one.flag
        flags[one.flag] = one.flag
    first = next((word for word in unknown if word.startswith("-")), unknown[0])
    typed = first.partition("=")[0].replace("_", "-")
    near = difflib.get_close_matches(typed, flags, n=1, cutoff=0.7)
    if not near:
        return "see python -m ddp_trainer --help"
    return f"did you mean {flags[near[0]]}? See python -m ddp_trainer --help"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the trainer; returns its exit code, see :func:`exit_code`."""
    given = sys.argv[1:] if arguments is None else arguments

    def train() -> None:
        env = RankEnv.from_environ()
        if env.rank != 0 and ("--help" in given or "-h" in given):
            return
        config = parse(given)
        # torch is first imported here: a bad flag has been answered by now.
        from ddp_trainer.api import Trainer
        from ddp_trainer.distributed.stop import StopSignal

        # The handlers stay until exit_code sets its own: torchrun's SIGTERM may come in between.
        Trainer(config, env=env).fit(StopSignal())

    return exit_code(train)


def exit_code(program: Callable[[], object]) -> int:
    """Run ``program``, which trains; returns the code to exit with. Failures that have none of their own raise.

    0 is success, 81 the user's error, 85 preemption, 86 that a later attempt has taken the checkpoint folder over. What
    there is to say about it is printed on rank 0, and written where the launcher looks for it.
    """
    env = RankEnv()
    try:
        env = RankEnv.from_environ()
        program()
    except UserError as error:
        return _report_error(error, contract.EXIT_USER_ERROR, env)
    except Superseded as error:
        return _report_error(error, contract.EXIT_PEER_LOST, env)
    except Preempted as end:
        _ignore_sigterm()
        if env.rank == 0:
            where = "the checkpoint is saved" if end.saved else "nothing is saved: there is no --checkpoint-dir"
            print(f"preempted: {end}; {where}", flush=True)
        return contract.EXIT_PREEMPTED
    signal.signal(signal.SIGTERM, lambda *_: None)  # what is done is done
    return contract.EXIT_OK


def _report_error(error: UserError | Superseded, code: int, env: RankEnv) -> int:
    """Say what is wrong, once on rank 0 and in every rank's record for the launcher; returns ``code``.

    An error that one rank alone has is printed by that rank.
    """
    _ignore_sigterm()
    if env.rank == 0 or isinstance(error, DataError):
        print(f"ddp_trainer: error: {error}", file=sys.stderr, flush=True)
    runtime_dir = os.environ.get(contract.ENV_RUNTIME_DIR)
    if runtime_dir:
        # The launcher makes the termination message of it; there is no traceback to take it from.
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
    """Let no second SIGTERM disturb an orderly end; torchrun sends one to all ranks when the first has ended."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
