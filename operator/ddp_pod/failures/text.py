"""Texts of failures for users: the line that describes a failure, and its remedy.

``kinds`` and ``code_remedies`` have those of exceptions, features their own. The default remedy of a category is in
``failure_table``, which docs/troubleshooting.md prints.
"""

import errno
import os
import re
import signal
import sys
from typing import Final

from ..base.exceptions import PLACE, ExceptionFacts
from ..base.pod import Pod
from ..contract.failure_record import RankEnd
from ..contract.failure_table import CATEGORIES, EXIT_CODES, HANG, KILLED, NODE_FAULT, UNKNOWN, USER_ERROR
from ..contract.failure_text import BROKEN_PYTHON, BROKEN_PYTHON_REMEDY, SENDER_REMEDY, UNRESOLVED
from ..contract.names import ENV_LOCAL_POD
from ..contract.plan import CodeConfig
from ..rank.end_notes import OwnEnd
from .code_remedies import advise_on_code, advise_on_names, complete_remedy, name_code
from .crashes import SIGNALS
from .kinds import HELPER, UNFIT_TENSORS, UNKNOWN_KIND
from .rules import Judgement, WorkerEnd, complete_facts, find_kind, is_unrunnable

REFUSED: Final = "nothing listens there yet"
"""Problems of a connection to pod 0."""
_TIME_LIMIT: Final = 124  # timeout(1)
_SIGNALS_END: Final = 160  # shells report 128 + the number of a signal
_MISSING_MODULE: Final = re.compile(r"No module named '?([\w.]+)")
# Messages of shell commands and installers that run at the same time.
_COLLISION: Final = re.compile(
    r"File exists|already exists and is not an empty directory|Directory not empty|Text file busy|Could not get lock"
    r"|[Uu]nable to (?:create|acquire|lock) .*lock|could not lock config file|Waiting for cache lock"
)
# The usage that argparse prints before it exits with code 2, and the exceptions of click and typer.
_USAGE: Final = re.compile(r"^usage: .*^(?P<line>[^\n]*: error: [^\n]*)", re.I | re.M | re.S)
_WRONG_ARGUMENTS: Final = re.compile(r"SystemExit: (\S+: error: |click\.exceptions\.\w+: )")

_LOCAL_RANK: Final = re.compile(r"unrecognized arguments: [^\n]{0,200}--local[-_]rank|No such option: --local[-_]rank")
_LOCAL_RANK_REQUIRED: Final = re.compile(r"\brequired: [^\n]{0,200}--local[-_]rank|Missing option '--local[-_]rank")
# The last message of a shell about its script; bash adds the line. Other commands may follow earlier ones.
_SHELL_SYNTAX: Final = re.compile(
    r"^\S+: (?:line )?\d+: (?:(?:[Ss]yntax error|unexpected EOF while)\b[^\n]*(?:\n[^\n]*)?"
    r"|(?:\[\[|declare|popd|pushd|shopt|source): not found)"
    r"\s*\Z",
    re.M,
)
_PYTHON_VARIABLE: Final = re.compile(r"\bPYTHON[A-Z]+\b")
_UNSET: Final = re.compile(r"^\S+: (?:line )?\d+: \S+: (?:unbound variable|parameter not set)\s*\Z", re.M)
SHELL_REMEDY: Final = (
    "correct the script's line, or run it by the shell for which it is written: bash has commands that sh lacks"
)
SHELL_END_REMEDY: Final = "see what this command of the script printed before, and why the script reaches it"
LOCAL_RANK_REMEDY: Final = (
    "torch.distributed.launch passes --local-rank: accept both spellings, add_argument('--local-rank', '--local_rank', "
    "type=int), or run without it and read LOCAL_RANK from the environment"
)
LOCAL_RANK_REQUIRED_REMEDY: Final = "torchrun passes no --local_rank: read LOCAL_RANK from the environment"
ARGUMENTS_REMEDY: Final = (
    "correct the script's arguments: args in spec.template, or those after -- on the command line; its --help lists "
    "them"
)
STORE_REMEDY: Final = (
    "check that the pods can reach checkpoint.url, and that the credentials of secretRef allow reads and writes"
)
UPLOAD_REMEDY: Final = "find out why the store does not respond; the next attempt resumes from its newest snapshot"
SUPERSEDED_REMEDY: Final = "no action needed: a later attempt of the job trains"
JOIN_REMEDY: Final = "check that all pods of the job are scheduled and running"
TORCH_REMEDY: Final = "use an image that has PyTorch for this Python"
FLAGS_REMEDY: Final = "correct the flags of torchrun in the command"
_CHECK_COMMAND: Final = "check command and args in spec.template"
_IGNORED_FILES: Final = (
    "if it is a file of the packed folder, .gitignore or .ddpignore may exclude it (--include PATH packs it)"
)
REPEATED_COMMAND_REMEDY: Final = (
    "each of the pod's {ranks} ranks runs the container's command, so commands in it that create or install files "
    "collide: move them to the image or an init container, or let them accept what exists (mkdir -p)"
)
TIME_LIMIT_REMEDY: Final = "the command timeout ends a program with 124 at its limit: raise it"
EARLY_EXIT_REMEDY: Final = (
    "ranks step together: no rank may leave the loop before its peers (as with data of unequal length), an "
    "error that it only prints must end it with another exit code, and all should end with dist.barrier() and "
    "dist.destroy_process_group()"
)
OWN_LIMIT_REMEDY: Final = (
    "find out why the rank, or a peer for which it waits, does not leave its line; if it is slow by design, raise the "
    "limit, or call faulthandler.cancel_dump_traceback_later() in time"
)
TIMER_REMEDY: Final = (
    "a signal without a handler ends the process when the script's own timer runs out: install a handler "
    "(signal.signal), cancel the timer in time, or raise its limit"
)
SILENT_REMEDY: Final = "the script ended itself: see its last lines in the log"


def find_advice(text: str) -> str:
    """Return the remedy for an error by its text, as Python prints it; empty if none is known."""
    exception_type, _, message = text.partition(": ")
    judgement = find_kind([complete_facts(ExceptionFacts((exception_type,), message))])
    return complete_remedy(judgement.kind.remedy, WorkerEnd(1)) if judgement is not None else ""


def advise_on_module(name: str, code: CodeConfig | None) -> str:
    """Return the remedy for a missing Python module. ``code``: the packed folder that the pod runs, if any."""
    package, _, module = name.rpartition(".")
    if package:  # Python imports a package before its modules, so the package exists
        remedy = advise_on_names(f"{package} has no module {module}", package)
        return f"{remedy}; {_IGNORED_FILES}" if code is not None else remedy
    if code is not None and code.requirements:
        return f"add the package of {name} to {code.requirements}, or correct the name; {_IGNORED_FILES}"
    if code is not None:
        return f"list the package of {name} in requirements.txt of the packed folder and add --pip; {_IGNORED_FILES}"
    if ENV_LOCAL_POD in os.environ:
        return f"install the package of {name} for {sys.executable}, or correct the name or PYTHONPATH"
    return (
        f"the image lacks {name}: install it in the image, or correct the name or PYTHONPATH; "
        "`ddp submit --workdir DIR` packs your own modules, and with --pip installs the folder's requirements.txt"
    )


def advise_on_program(code: CodeConfig | None) -> str:
    """Return the remedy for a missing training script. ``code``: the packed folder that the pod runs, if any."""
    if code is not None:
        return f"{_CHECK_COMMAND}; {_IGNORED_FILES}"
    if ENV_LOCAL_POD in os.environ:
        return f"{_CHECK_COMMAND}, or run ddp in the folder that has it"
    return f"{_CHECK_COMMAND}, or submit the folder that has it with `ddp submit job.yaml --workdir DIR`"


def is_usage(text: str, exit_code: int) -> bool:
    """Return whether a program's last lines are its usage, after wrong arguments."""
    return bool(find_usage_error(text, exit_code))


def find_usage_error(text: str, exit_code: int) -> str:
    """Return the line that refuses the arguments, after a program's usage: others of ``make`` may follow."""
    usage = _USAGE.search(text) if exit_code == 2 else None
    return usage["line"] if usage is not None else ""


def is_native_crash(exit_code: int) -> bool:
    """Return whether a process ended by a signal that it raised itself, as native code does."""
    kind = SIGNALS.get(find_signal(exit_code))
    return kind is not None and kind.is_crash


def advise_on_output(text: str, exit_code: int, ranks: int = 1) -> str:
    """Return the remedy for a program without an exception by its last lines; empty if none is known.

    ``ranks``: those of the pod, each of which runs the program.
    """
    if is_usage(text, exit_code):
        return _advise_on_arguments(text)
    refused = BROKEN_PYTHON.search(text)
    if refused is not None:
        variable = _PYTHON_VARIABLE.search(refused[0])
        return f"correct or remove {variable[0]} in the environment" if variable is not None else BROKEN_PYTHON_REMEDY
    if exit_code == _TIME_LIMIT:
        return TIME_LIMIT_REMEDY
    if ranks > 1 and _COLLISION.search(text):
        return REPEATED_COMMAND_REMEDY.format(ranks=ranks)
    if _SHELL_SYNTAX.search(text):
        return SHELL_REMEDY
    is_silent = exit_code not in EXIT_CODES and not find_signal(exit_code)
    advice = find_advice(text) if is_silent else ""
    last = text.strip().rpartition("\n")[2]
    if advice or not is_silent or not last.endswith(f": {os.strerror(errno.ENOENT)}"):
        return advice
    judgement = find_kind([ExceptionFacts(("OSError",), last, errno.ENOENT)])
    return judgement.kind.remedy if judgement is not None else ""


def find_refusal(text: str, exit_code: int) -> str:
    """Return the line of a program's output by which it, or its Python, refuses to start; empty without one."""
    refused = BROKEN_PYTHON.search(text)
    return find_usage_error(text, exit_code) or (refused[0] if refused is not None else "")


def _advise_on_arguments(text: str) -> str:
    if _LOCAL_RANK_REQUIRED.search(text):
        return LOCAL_RANK_REQUIRED_REMEDY
    return LOCAL_RANK_REMEDY if _LOCAL_RANK.search(text) else ARGUMENTS_REMEDY


def is_setup_mistake(text: str) -> bool:
    """Return whether a shell has ended by a mistake in its script or variables, or because its Python cannot start."""
    return bool(_SHELL_SYNTAX.search(text) or _UNSET.search(text) or BROKEN_PYTHON.search(text))


def advise(
    judgement: Judgement, end: WorkerEnd, *, only_exit_code: bool = False, code: CodeConfig | None = None
) -> str:
    """Return the remedy for a worker's failure.

    ``only_exit_code``: the worker left no other reason. ``code``: the packed folder that the pod runs, if any.
    """
    category = judgement.outcome.category
    module = _MISSING_MODULE.search(end.text)
    if judgement.kind is HELPER and end.child is not None and end.child.number in SIGNALS:
        return SIGNALS[end.child.number].remedy
    is_known = module or any(map(is_unrunnable, end.chain[:1]))
    is_vague = category == USER_ERROR.name and judgement.kind in (UNKNOWN_KIND, UNFIT_TENSORS) and not is_known
    on_code = advise_on_code(end, judgement.kind) if is_vague else ""
    if on_code or judgement.kind.remedy:
        return on_code or complete_remedy(judgement.kind.remedy, end)
    if is_known:
        return advise_on_module(module[1], code) if module else advise_on_program(code)
    if end.exit_code == 2 and _WRONG_ARGUMENTS.match(end.text):
        return _advise_on_arguments(end.text)
    kind = SIGNALS.get(find_signal(end.exit_code))
    if category in (UNKNOWN.name, NODE_FAULT.name, KILLED.name) and kind is not None:
        return kind.remedy
    if category == KILLED.name and find_signal(end.exit_code) != signal.SIGKILL:
        return SENDER_REMEDY
    if only_exit_code or category == UNKNOWN.name:
        return TIME_LIMIT_REMEDY if end.exit_code == _TIME_LIMIT else SILENT_REMEDY
    return (
        f"fix this line of the script: {name_code(end)}" if is_vague and name_code(end) else CATEGORIES[category].remedy
    )


def _find_number(exit_code: int) -> int:
    return -exit_code if exit_code < 0 else exit_code - 128


def find_signal(exit_code: int) -> int:
    """Return the number of the signal that killed a process; 0 if none did."""
    killed = exit_code < 0 or 128 < exit_code < _SIGNALS_END
    return _find_number(exit_code) if killed else 0


def describe_exit(exit_code: int) -> str:
    """Return the text of an exit code, such as ``killed by SIGKILL``."""
    number = find_signal(exit_code)
    if not number:
        return f"exited with code {exit_code}"
    try:
        return f"killed by {signal.Signals(number).name}"
    except ValueError:
        return f"killed by signal {number}"


def describe_worker_failure(exit_code: int, exception_type: str, message: str, traceback: str) -> str:
    """Return the text of a worker's failure, such as ``KeyError: 10``."""
    if exception_type == HANG.name:
        return message
    if exception_type in ("", "SystemExit"):
        exit_text = f"worker {describe_exit(exit_code)}"
        return exit_text if message in ("", str(exit_code)) else f"{exit_text}: {message}"

    name = exception_type.rpartition(".")[2]
    if message:
        return f"{name}: {message}"
    places = PLACE.findall(traceback)  # a bare assert has no message
    if not places:
        return name
    path, line = places[-1]
    return f"{name} ({os.path.basename(path)}, line {line})"


def describe_early_exit(end: RankEnd, count: int, victim: str) -> str:
    """Return the text about a rank that ended although a peer needed it. ``victim``: that peer, as ``rank 3``.

    ``count``: of all ranks, or of all pods, that had ended.
    """
    text = f"rank {end.rank} had already ended, with exit code 0"
    if end.step is not None:
        text += f" after step {end.step:g}"
    if end.line:
        text += f" and the last line {end.line!r}"
    others = f" (and {count - 1} more)" if count > 1 else ""
    return f"{text}{others}, when {victim} still needed it"


def describe_own_end(end: OwnEnd) -> str:
    """Return the text about a call by which the script has ended a process."""
    return f"by a timer that {end.place} set with {end.call}" if end.is_timer else f"by {end.call} at {end.place}"


def advise_on_own_end(end: OwnEnd) -> str:
    """Return the remedy for a process that the script has ended by a call, or by a timer."""
    return TIMER_REMEDY if end.is_timer else f"the script ended itself: find out why {end.place} calls {end.call}"


def describe_absence(pod: Pod, problem: str) -> tuple[str, str]:
    """Return the message and the remedy for a pod 0 that was not reached. ``problem``: of the last attempt."""
    master = f"{pod.master}:{pod.port}"
    after = f"{pod.join_timeout_seconds:g} s"
    if problem == UNRESOLVED:
        return (
            f"DNS has not resolved the name of pod 0, {pod.master}, within {after}",
            "check the cluster's DNS (kubectl -n kube-system get pods -l k8s-app=kube-dns), dnsPolicy and dnsConfig in "
            "spec.template, that the job's headless Service exists, and that no NetworkPolicy keeps the pods from DNS",
        )
    if problem.startswith(REFUSED):
        return f"pod 0 has not served the rendezvous at {master} within {after}: {problem}", "check the log of pod 0"
    return (
        f"pod 0 was not reached at {master} within {after}: {problem}",
        "check that it runs, that its name resolves to its address, and that no NetworkPolicy, firewall or service "
        "mesh closes the port",
    )
