"""The one module that knows torchrun's argv and environment, and how a user may write a training command.

Pure functions on plain values. What only a running pod knows (its index, its address, the worker command) is added by
the launcher, so that the same argv is right in every pod of a Job.
"""

import getopt
import posixpath
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ddp_operator import constants
from ddp_operator.api.job import JobSize
from ddp_operator.launcher.command_line import split_python_line

DEFAULT_INTERPRETER: Final = "python3"
# An agent that misses this many heartbeats is dead; a pod that takes its place is let in only afterwards.
_HEARTBEAT_SECONDS: Final = 2
_HEARTBEATS_MISSED: Final = 5
# An elastic job's other pods wait that long for a pod that has died silently. Each beat rewrites the state of all.
_ELASTIC_HEARTBEAT_SECONDS: Final = 1
_FEW_NODES: Final = 64
# Under an elastic size: how long a complete rendezvous waits for more nodes (torchrun's default is 30).
_LAST_CALL_SECONDS: Final = 3

_INTERPRETER = re.compile(r"python(\d+(\.\d+)?)?")
_SHELLS: Final = ("sh", "bash", "dash", "zsh", "ash")
# A launcher where a command of a shell begins, and what follows it until the command ends.
_NESTED: Final = re.compile(
    r"(?:^|[;&|(\n]|\b(?:exec|time|nohup|then|do|else)\s)\s*(?:\w+=\S*\s+)*(?:\S*/)?"
    r"(?P<launcher>torchrun|accelerate\s+launch|deepspeed|mpirun|mpiexec|horovodrun"
    r"|python[\d.]*\s+(?:-\w+\s+)*-m\s+(?:torch\.distributed\.(?:run|launch)|accelerate\.commands\.launch))"
    r"(?P<flags>(?:\s[^;&|\n]*)?)(?=$|[;&|)\n])"
)
_ONE_NODE: Final = re.compile(r"--(?:nnodes|num[_-]machines|num_nodes)[= ]1(?=\s|$)")
_MANY_NODES: Final = re.compile(
    r"(?:^|\s)(?:--?(?:nnodes|num[_-]machines|machine[_-]rank|num_nodes|node[_-]rank|master[_-]addr|rdzv\S*|hostfile"
    r"|machinefile|hosts?|H|f|config_file|config)(?=[= ]|$)|[\"']?\$)"
)
TORCHRUN_MODULES: Final = ("torch.distributed.run", "torch.distributed.launch")
_COMMAND_LINE: Final = "write the script itself as the command: [python, train.py] or [-m, package.module]"
# torchrun's flags that the operator sets itself, each with what the user should write instead.
OWNED_FLAGS: Final = {
    "nnodes": "set spec.nodes instead",
    "nproc-per-node": "set spec.procPerNode instead",
    "rdzv-backend": "set spec.rendezvous.backend instead",
    "rdzv-endpoint": "set spec.rendezvous.port instead; the address is pod 0's",
    "rdzv-id": "remove it; the operator gives every attempt an id of its own",
    "rdzv-conf": "set spec.rendezvous.joinTimeoutSeconds instead",
    "standalone": "set spec.nodes to 1 instead",
    "max-restarts": "set spec.recovery.inPlaceRestarts instead",
    "node-rank": "remove it; the completion index of the pod is its node rank",
    "master-addr": "remove it; it is pod 0's address",
    "master-port": "set spec.rendezvous.port instead",
    "local-addr": "remove it; it is the pod's own address",
    "no-python": "write the program itself as the command instead",
    "run-path": _COMMAND_LINE,
    "shutdown-timeout": "set spec.checkpoint.graceSeconds instead",
    "signals-to-handle": "remove it; SIGTERM reaches the script, with spec.checkpoint.graceSeconds to obey it",
}
OWNED_SWITCHES: Final = ("standalone", "no-python", "run-path")  # those of them that take no value
# Flags that are the user's own, and whether each takes a value.
_WITH_VALUES: Final = (
    *("monitor-interval", "start-method", "event-log-handler", "role", "log-dir", "redirects", "tee", "logs-specs"),
    *("local-ranks-filter", "duplicate-stdout-filters", "duplicate-stderr-filters", "numa-binding"),
)
_PASSED: Final = dict.fromkeys(_WITH_VALUES, True) | {"virtual-local-rank": False}
_FORM: Final = {"module": False, "use-env": False, "help": False}
_SHORT: Final = {"r": "redirects", "t": "tee", "m": "module", "h": "help"}
TORCHRUN_FLAGS: Final = {
    **dict.fromkeys(OWNED_FLAGS, True),
    **dict.fromkeys(OWNED_SWITCHES, False),
    **_PASSED,
    "module": False,
    "m": False,
    "r": True,
    "t": True,
}
"""Flags of torchrun with dashes, and whether each takes a value."""


class CommandError(ValueError):
    """A training command that cannot be run; the text names the flag and the remedy."""


@dataclass(frozen=True, slots=True)
class UserCommand:
    """What the user wants every rank to run.

    ``argv`` is what would follow ``python`` on its own command line (``["-O", "train.py", "--lr", "1"]``), or a whole
    program's command line where ``program`` is true.
    """

    interpreter: str
    argv: tuple[str, ...]
    program: bool = False
    torchrun_flags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """One attempt's torchrun nodes. ``local_addr`` may hold ``$(JOB_COMPLETION_INDEX)``, which Kubernetes expands.

    c10d gives ranks in the lexical order of the nodes' ``local_addr``; ``<job>-<index>.<service>`` puts pod 0 first.
    With ``max_nodes`` the job is elastic and ``nodes`` is its least size. Of the pods ``spares`` take no part.
    """

    nodes: int
    nproc_per_node: int
    backend: str
    master_addr: str
    master_port: int
    local_addr: str
    run_id: str
    join_timeout_seconds: int = 600
    max_nodes: int | None = None
    spares: int = 0

    @property
    def elastic(self) -> bool:
        """Whether the number of nodes may change while the job trains."""
        return self.max_nodes not in (None, self.nodes)


def split_user_command(command: Sequence[str], args: Sequence[str]) -> UserCommand:
    """Understand a container's ``command`` and ``args``. Raises: CommandError."""
    line = [*command, *args]
    if not line:
        raise CommandError(
            "neither command nor args: an image's entrypoint cannot be known; write the training command, "
            "for example [python, train.py]"
        )
    if not line[0].strip():
        raise CommandError("the first word is empty; write the training command, for example [python, train.py]")
    first, rest = line[0], line[1:]
    name = posixpath.basename(first)
    if _INTERPRETER.fullmatch(name):
        return _split_python(first, rest)
    if name == "torchrun":
        folder = posixpath.dirname(first)
        return _split_torchrun(posixpath.join(folder, DEFAULT_INTERPRETER) if folder else DEFAULT_INTERPRETER, rest)
    if name.endswith(".py") or first == "-m" or (first.startswith("-m") and not first.startswith("--")):
        return _split_python(DEFAULT_INTERPRETER, line)
    if first.startswith("-"):
        raise CommandError(f"begins with the flag {first}, not with a program; {_COMMAND_LINE}")
    return UserCommand(DEFAULT_INTERPRETER, tuple(line), program=True)


def find_nested_launcher(command: UserCommand) -> str | None:
    """Return the launcher in a program's command line that starts ranks of its own in its pod alone; None: none does.

    One that is told of other machines, or gets flags from a variable, may know what it does.
    """
    if not command.program:
        return None
    words = list(command.argv)
    text = shlex.join(words)
    if posixpath.basename(words[0]) in _SHELLS:
        place = next((i for i, word in enumerate(words) if i and re.fullmatch(r"-[a-z]*c[a-z]*", word)), None)
        if place is None or place + 1 >= len(words):
            return None
        text = words[place + 1]
    for found in _NESTED.finditer(text.replace("\\\n", " ")):
        flags = _ONE_NODE.sub(" ", found["flags"])
        if not _MANY_NODES.search(flags):
            return " ".join(found["launcher"].split())
    return None


def build_torchrun_args(plan: Plan, command: UserCommand) -> list[str]:
    """Return what stands between ``launcher.py run`` and ``--``: torchrun's flags, the same in every pod.

    The launcher adds the endpoint (from MASTER_ADDR and MASTER_PORT), the node rank and the worker command.
    """
    size = f"{plan.nodes}:{plan.max_nodes}" if plan.elastic else str(plan.nodes)
    if plan.backend == "static":
        conf = [f"timeout={plan.join_timeout_seconds}"]
    else:
        most = plan.max_nodes or JobSize(plan.nodes, plan.spares).pods
        few = (plan.elastic or plan.spares) and most <= _FEW_NODES
        # The store has a process of its own on pod 0, so that no agent hosts it; a lone pod's agent hosts its own.
        conf = [
            f"is_host={int(size == '1')}",
            f"join_timeout={plan.join_timeout_seconds}",
            f"last_call_timeout={_LAST_CALL_SECONDS}",
            f"keep_alive_interval={_ELASTIC_HEARTBEAT_SECONDS if few else _HEARTBEAT_SECONDS}",
            f"keep_alive_max_attempt={_HEARTBEATS_MISSED}",
        ]
    return [
        f"--nnodes={size}",
        f"--nproc-per-node={plan.nproc_per_node}",
        f"--rdzv-backend={plan.backend}",
        f"--rdzv-id={plan.run_id}",
        f"--rdzv-conf={','.join(conf)}",
        f"--local-addr={plan.local_addr}",
        *command.torchrun_flags,
        *(["--no-python"] if command.program else []),
    ]


def build_env(plan: Plan) -> dict[str, str]:
    """Return the part of the environment that belongs to the rendezvous."""
    return {constants.ENV_MASTER_ADDR: plan.master_addr, constants.ENV_MASTER_PORT: str(plan.master_port)}


def _split_python(interpreter: str, words: Sequence[str]) -> UserCommand:
    try:
        line = split_python_line(words)
    except ValueError as error:
        raise CommandError(f"{posixpath.basename(interpreter)}: {error}; {_COMMAND_LINE}") from None
    if line.kind != "module" or line.target not in TORCHRUN_MODULES:
        return UserCommand(interpreter, tuple(words))
    legacy = line.target == "torch.distributed.launch"
    return _split_torchrun(interpreter, line.args, flags=line.flags, legacy=legacy)


def _split_torchrun(
    interpreter: str, words: Sequence[str], flags: Sequence[str] = (), legacy: bool = False
) -> UserCommand:
    """Split ``torchrun [flags] script …``. The ``legacy`` launch hands --local-rank to scripts unless --use-env."""
    options, rest = _read_flags(words, legacy)
    owned = [f"--{name}: {OWNED_FLAGS[name]}" for name, _ in options if name in OWNED_FLAGS]
    if owned:
        raise CommandError("; ".join(dict.fromkeys(owned)))
    names = {name for name, _ in options}
    if "help" in names:
        raise CommandError("--help: runs nothing; remove it")
    if not rest:
        raise CommandError("torchrun without a script; write for example [torchrun, train.py]")
    passed = tuple(f"--{name}={value}" if _PASSED[name] else f"--{name}" for name, value in options if name in _PASSED)
    script = ["-m", rest[0]] if "module" in names else [rest[0]]
    local_rank = ["--local-rank=${local_rank}"] if legacy and "use-env" not in names else []
    return UserCommand(interpreter, (*flags, *script, *local_rank, *rest[1:]), torchrun_flags=passed)


def _read_flags(words: Sequence[str], legacy: bool) -> tuple[list[tuple[str, str]], list[str]]:
    """Return torchrun's flags by their full names with dashes, with their values, and the words from the script on."""
    takes = dict.fromkeys(OWNED_FLAGS, True) | dict.fromkeys(OWNED_SWITCHES, False) | _PASSED | _FORM
    if not legacy:
        del takes["use-env"]
    dashed = [re.sub("^--[^=]+", lambda name: name[0].replace("_", "-"), word) for word in words]
    try:
        found, rest = getopt.getopt(dashed, "r:t:mh", [f"{name}=" if value else name for name, value in takes.items()])
    except getopt.GetoptError as error:
        name = error.opt
        matches = [name] if name in takes else [flag for flag in takes if len(name) > 1 and flag.startswith(name)]
        owned = next((flag for flag in matches if flag in OWNED_FLAGS), None)
        if owned:  # perhaps ambiguous, but the operator owns what it may mean
            raise CommandError(f"--{owned}: {OWNED_FLAGS[owned]}") from None
        if len(matches) == 1 or name in _SHORT:
            raise CommandError(f"--{_SHORT.get(name, *matches)}: {error.msg.split(maxsplit=2)[2]}") from None
        meant = ", ".join(f"--{flag}" for flag in matches)
        dash = "-" if len(name) == 1 else "--"
        raise CommandError(
            f"{dash}{name}: is ambiguous in torchrun: {meant}"
            if matches
            else f"{dash}{name}: is no flag of torchrun; the script's own flags come after the script"
        ) from None
    full = [(_SHORT.get(name.lstrip("-"), name.lstrip("-")), value) for name, value in found]
    return full, list(words[len(words) - len(rest) :])
