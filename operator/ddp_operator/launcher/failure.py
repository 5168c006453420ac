"""Why a worker failed: its category, the launcher's exit code for it, and which failure explains the others."""

import math
import os
import re
import signal
import sys
import time
from typing import Any, Iterable, Sequence

from .contract import EXIT_HANG, EXIT_OOM, EXIT_PEER_LOST, EXIT_RETRYABLE, EXIT_USER_ERROR
from .failure_table import CATEGORIES, CUDA, EXIT_CODES, HANG, NCCL, NETWORK, OOM, USER_ERROR, Outcome, judge_exit_code
from .files import read_json
from .hints import ARGUMENTS_REMEDY, EARLY_END_REMEDY, MISMATCH, NO_DEVICES, NO_GPU, advise, find_advice, is_usage
from .output import read_last_lines
from .pod import Pod
from .processes import count_oom_kills, has_gpu
from .rendezvous import PortTakenError, describe_absence
from .tracebacks import LIBRARY, PLACE, find_exceptions

_OOM = re.compile(
    r"out of memory|OutOfMemoryError|MemoryError|can't allocate memory|not enough memory|STATUS_ALLOC_FAILED", re.I
)
_PEERS = re.compile(r"Dist(Backend|Network|Store)Error|gloo|nccl|ProcessGroup|TCPStore|c10d|rendezvous", re.I)
_LOST = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|socket closed|timed? ?out|remote p(eer|rocess)"
    r"|connectFullMesh|nccl(Remote|System|Internal)Error|unhandled system error|recvValue|Dist(Network|Store)Error",
    re.I,
)
# Not the device that a script's own mistake names: tensors on cuda:0 and cpu, a torch.cuda.FloatTensor, 'cuda'.
_CUDA = re.compile(r"(?<!['\"])\bCUDA\b(?![:.]?\w|['\"])|cudnn|cublas|AcceleratorError|\bNVML\b|\bHIP error", re.I)
# Faults of GPU and network come as one of these, or of torch's own types; what a script asserts of them is its own.
_FAULT = re.compile(r"(SystemExit: )?(RuntimeError|OSError|TimeoutError|(\w+\.)+\w+): ")
_CALL = re.compile(
    r"Rank (\d+) is running collective: CollectiveFingerPrint\(.*?OpType=(\w+)(?:, TensorShape=(\[[^\]]*\]))?"
)
AT_START = ("SyntaxError", "IndentationError", "TabError", "ImportError", "ModuleNotFoundError")
STORE_ERRORS = ("RendezvousConnectionError", "DistNetworkError", "DistStoreError")
# How the launcher ends its agent for the sake of checkpoint.url.
SUPERSEDED, UNUSABLE, UNREACHABLE = "CheckpointSuperseded", "CheckpointStoreUnusable", "CheckpointStoreUnreachable"
STORE_PROBLEMS = (SUPERSEDED, UNUSABLE, UNREACHABLE)
_FABRIC_REMEDY = (
    "check that the node offers the network's devices, that the pod asks for them, and that the image has a plugin "
    "of NCCL for it (docs/fabric.md); without spec.network.require the job trains by what there is"
)
_STORE_REMEDY = (
    "see that checkpoint.url can be reached from the pods, and that secretRef's credentials may read and write"
)
_HANDED_ON = re.compile(
    r"Caught \S+ in (?P<helper>.*?)\.?\nOriginal Traceback"
    r"|-- (?P<process>Process \d+) terminated with the following error:\nTraceback"
)
# Signals by which a process ends itself; the others come from outside, and SIGABRT from NCCL when a peer is lost.
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
_TRACE_BEGINS = "Traceback (most recent call last):"
_SIGNATURE_LIMIT = 200


def blame_early_ends(failure: dict[str, Any], ranks: list[int], pods: int) -> dict[str, Any]:
    """Return a failure, which is no network's where a rank lost peers that had ended by themselves."""
    if not failure["outcome"].secondary or not (ranks or pods):
        return failure
    if ranks:
        left = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    else:
        left = f"{pods} other pod{'s' if pods > 1 else ''}"
    return {**failure, "left": left, "outcome": _SCRIPTS, "remedy": EARLY_END_REMEDY}


_FATAL = Outcome(USER_ERROR.name, EXIT_USER_ERROR)
_SCRIPTS = Outcome(USER_ERROR.name, EXIT_RETRYABLE)
_OUT_OF_MEMORY = Outcome(OOM.name, EXIT_OOM)


def classify(code: int, kind: str, message: str, *, oom_killed: bool, non_retryable: Iterable[int] = ()) -> Outcome:
    """Return the class of one worker's end. ``kind`` is the exception's type, empty when none is known."""
    if kind == HANG.name:
        return EXIT_CODES[EXIT_HANG]
    if code in EXIT_CODES:
        return EXIT_CODES[code]
    if code in non_retryable:
        return _FATAL
    if code in (-signal.SIGKILL, 128 + signal.SIGKILL) and oom_killed:
        return _OUT_OF_MEMORY
    if not kind:
        return judge_exit_code(code)
    text = f"{kind}: {message}"
    if _OOM.search(text):
        return _OUT_OF_MEMORY
    if NO_GPU.search(text) or (NO_DEVICES.search(text) and not has_gpu()):
        return _FATAL  # the next pod has none either
    if MISMATCH.search(text):
        return _SCRIPTS
    if _PEERS.search(text) and _FAULT.match(text):
        category = NCCL if "nccl" in text.lower() else NETWORK
        lost = bool(_LOST.search(text)) and "in use" not in text and "EADDRINUSE" not in text
        return Outcome(category.name, EXIT_PEER_LOST if lost else EXIT_RETRYABLE, lost)
    if _CUDA.search(text) and _FAULT.match(text):
        return Outcome(CUDA.name, EXIT_RETRYABLE)
    if kind in AT_START or (kind == "SystemExit" and "No module named" in message):
        return _FATAL
    return _SCRIPTS


def unwrap(kind: str, message: str) -> tuple[str, str]:
    """Return type and message of what went wrong in a helper: torch hands on its whole traceback as the message."""
    found = _HANDED_ON.search(message)
    if found is None:
        return kind, message
    lines = message[found.end() :].rstrip().splitlines()
    frames = [number for number, line in enumerate(lines) if line.startswith("  File ")]
    words = lines[frames[-1] + 1 :] if frames else lines[-1:]
    while words and words[0].startswith("    "):
        words.pop(0)
    kind, _, message = "\n".join(words).partition(": ")
    return kind, f"{message} (in {found['helper'] or found['process']})".lstrip()


def name_mismatch(message: str) -> str:
    """Return a message of torch about ranks in different collectives with just those; any other message as it is."""
    calls = _CALL.findall(message)
    if not MISMATCH.search(message) or len(calls) < 2:
        return message
    named = [f"rank {rank} is in {call}" + (f" of shape {shape}" if shape else "") for rank, call, shape in calls]
    return f"mismatch between collectives: {', '.join(named)}"


def examine(pod: Pod, failure: dict[str, Any]) -> dict[str, Any]:
    """Return the failure with what the rank's own error file says, its class, and what to do about it."""
    error = read_json(os.path.join(pod.runtime, "errors", f"{failure['localRank']}.json"))
    merged = dict(failure)
    merged.update((key, error[key]) for key in ("type", "message", "traceback") if isinstance(error.get(key), str))
    if isinstance(error.get("time"), (int, float)) and math.isfinite(error["time"]):
        merged["time"] = error["time"]
    if not merged["type"] and ": " in merged["message"]:  # from @record: "ValueError: text"
        merged["type"], _, merged["message"] = merged["message"].partition(": ")
    if merged["exitCode"] == -signal.SIGTERM and error.get("type") and isinstance(error.get("exitCode"), int):
        merged["exitCode"] = error["exitCode"]  # it had failed already when the agent ended it
    if merged["type"] == "SystemExit":
        merged["message"] = ": ".join(filter(None, unwrap("", merged["message"])))
    else:
        merged["type"], merged["message"] = unwrap(merged["type"], merged["message"])
    merged["message"] = name_mismatch(merged["message"])
    code, kind, text = merged["exitCode"], merged["type"], merged["message"]
    oom_killed = count_oom_kills() > pod.oom_kills
    outcome = classify(code, kind, text, oom_killed=oom_killed, non_retryable=pod.non_retryable_exit_codes)
    if outcome.category == HANG.name and pod.watchdog and pod.watchdog.action == "Fail":
        outcome = outcome._replace(exit_code=EXIT_USER_ERROR)  # which nothing follows
    if kind == HANG.name and error.get("secondary") is True:
        outcome = outcome._replace(secondary=True)
    merged["outcome"] = outcome
    merged["remedy"] = advise(merged, silent=ended_silently(merged), code=pod.code)
    return merged


def add_last_lines(pod: Pod, failure: dict[str, Any]) -> dict[str, Any]:
    """Return a failure that left no exception with the rank's last lines, and examined by the traceback in them: of a
    shell that runs Python it is all there is."""
    last = read_last_lines(pod, failure["localRank"])
    completed = {**failure, "traceback": last or failure["traceback"]}
    if is_usage(last, failure["exitCode"]):
        completed["remedy"] = ARGUMENTS_REMEDY
    found = find_exceptions(last)
    if not found or failure["type"] or failure["exitCode"] != 1:
        return completed
    examined = [examine(pod, {**completed, "type": kind, "message": message}) for kind, message in found]
    return min(examined, key=lambda one: bool(one["outcome"].secondary))


def build_signature(failure: dict[str, Any]) -> str:
    """Return what two failures of a script have in common when they are the same; empty for what is not its own.

    That is the exception and its innermost place in the script's own code, or the exit code where there is none.
    """
    outcome, code, kind = failure["outcome"], failure["exitCode"], failure["type"]
    if outcome.secondary or not CATEGORIES[outcome.category].own or code in EXIT_CODES:
        return ""  # an exit code of ours is the script's own word on what shall follow
    number = -code if code < 0 else code - 128
    if not kind and number > 0:
        return signal.Signals(number).name if number in _CRASHES else ""
    name = kind.rpartition(".")[2] if kind else f"exit code {code}"
    frames = PLACE.findall(failure["traceback"].rpartition(_TRACE_BEGINS)[2]) if kind else []
    own = [frame for frame in frames if not LIBRARY.search(frame[0])] or frames
    place = f" at {os.path.basename(own[-1][0])}:{own[-1][1]}" if own else ""
    return f"{name}{place}"[:_SIGNATURE_LIMIT]


def name_exit(code: int) -> str:
    """Return an exit code in words."""
    number = _signal_of(code)
    if number:
        try:
            return f"killed by {signal.Signals(number).name}"
        except ValueError:
            return f"killed by signal {number}"
    return f"exited with code {code}"


def _signal_of(code: int) -> int:
    return -code if code < 0 else code - 128 if 128 < code < 160 else 0


def find_root_cause(failures: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the first failure that explains the others; what the agent itself ended afterwards explains nothing."""

    def order(failure: dict[str, Any]) -> tuple[bool, bool, float]:
        ended_by_agent = failure["exitCode"] == -signal.SIGTERM and not failure.get("type")
        return ended_by_agent, failure["outcome"].secondary, failure["time"]

    return min(failures, key=order)


def describe_failure(failure: dict[str, Any]) -> str:
    """Return in words how a worker failed."""
    early = f"{failure.get('left')} had already ended, with exit code 0, when this rank still needed it: "
    return (early if failure.get("left") else "") + _describe_end(failure)


def ended_silently(failure: dict[str, Any]) -> bool:
    """Tell whether a worker gave no other reason for its end than an exit code."""
    silent = failure["type"] in ("", "SystemExit") and failure["message"] in ("", str(failure["exitCode"]))
    return silent and not _signal_of(failure["exitCode"])


def _describe_end(failure: dict[str, Any]) -> str:
    if failure["type"] == HANG.name:
        return str(failure["message"])
    if failure["type"] in ("", "SystemExit"):
        said = failure["message"] if failure["message"] != str(failure["exitCode"]) else ""
        return f"worker {name_exit(failure['exitCode'])}" + (f": {said}" if said else "")
    name = failure["type"].rpartition(".")[2]
    if not failure["message"]:  # as of a bare assert: the place says more than nothing
        places = PLACE.findall(failure["traceback"])
        return f"{name} ({os.path.basename(places[-1][0])}, line {places[-1][1]})" if places else str(name)
    return f"{name}: {failure['message']}"


def read_errors(pod: Pod) -> list[dict[str, Any]]:
    """Return the failures of which the workers themselves have left a record."""
    folder = os.path.join(pod.runtime, "errors")
    failures: list[dict[str, Any]] = []
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    for error in (read_json(os.path.join(folder, name)) for name in names):
        if all(isinstance(error.get(key), int) for key in ("rank", "localRank", "exitCode")):
            about = {key: error[key] for key in ("rank", "localRank", "exitCode")}
            empty = {"type": "", "message": "", "traceback": "", "time": time.time()}
            failures.append(examine(pod, {**about, **empty}))
    return failures


def examine_agent(pod: Pod, result: dict[str, Any], status: int) -> tuple[Outcome, str, str]:
    """Return class, message and remedy of an end that no worker caused.

    ``result`` is the agent's own report, ``status`` how its process ended.
    """
    kind, text = result.get("type", ""), result.get("message", "")
    whole, master = f"{kind}: {text}", f"{pod.master}:{pod.port}"
    if kind == "MasterNotFound":
        return EXIT_CODES[EXIT_PEER_LOST], *describe_absence(pod, text)
    if kind == SUPERSEDED:
        return EXIT_CODES[EXIT_PEER_LOST], text, "none is needed: a later attempt of the job trains"
    if kind in STORE_PROBLEMS:
        found = _FATAL if kind == UNUSABLE else Outcome(NETWORK.name, EXIT_RETRYABLE)
        return found, text, _STORE_REMEDY
    if kind == "RendezvousTimeoutError":
        message = f"not all {pod.nodes} pods joined the rendezvous at {master} within {pod.join_timeout_seconds:g} s"
        return EXIT_CODES[EXIT_PEER_LOST], message, "check that all pods of the job are scheduled and running"
    if kind == PortTakenError.__name__:
        return EXIT_CODES[EXIT_RETRYABLE], text, PortTakenError.remedy
    if kind.startswith("Rendezvous") or (_PEERS.search(whole) and _LOST.search(whole)):
        return EXIT_CODES[EXIT_PEER_LOST], f"lost the rendezvous at {master}: {whole}", NETWORK.remedy
    if kind == "PreflightError":
        category = NCCL if "nccl" in text.lower() else NETWORK
        remedy = _FABRIC_REMEDY if "spec.network" in text else category.remedy
        return Outcome(category.name, EXIT_RETRYABLE), f"the preflight failed: {text}", remedy
    if kind == "ModuleNotFoundError":
        return _FATAL, f"{sys.executable} cannot run torchrun: {text}", "use an image that has PyTorch for this Python"
    if kind == "ArgumentError":
        return _FATAL, text, "the log has torchrun's own message: correct the flags"
    if kind:
        return EXIT_CODES[EXIT_RETRYABLE], f"torchrun failed: {whole}", find_advice(whole)
    found = classify(status, "", "", oom_killed=count_oom_kills() > pod.oom_kills)
    return found, f"torchrun's agent {name_exit(status)}", CATEGORIES[found.category].remedy
