"""What to do about a failure."""

from __future__ import annotations

import re
import signal
from typing import Any

from .contract import (
    CATEGORY_CUDA,
    CATEGORY_HANG,
    CATEGORY_NCCL,
    CATEGORY_NETWORK,
    CATEGORY_OOM,
    CATEGORY_PREEMPTED,
    CATEGORY_UNKNOWN,
    CATEGORY_USER_ERROR,
)
from .failure import ENDED_EARLY, EXITED_WITH_CODE, MISMATCH, NO_DEVICES, NO_GPU, Verdict

_PEER_HINT = "another rank went away first, or the network did; look for the earliest failure of the other pods"
_HINTS = {
    CATEGORY_USER_ERROR: "fix the line of the script that the traceback points to",
    CATEGORY_OOM: "lower the batch size, or raise the memory limit of the trainer container",
    CATEGORY_CUDA: "look at the node's GPU (nvidia-smi, dmesg); CUDA_LAUNCH_BLOCKING=1 shows the failing call",
    CATEGORY_HANG: "the log has the stacks of all ranks; a phase that is long by nature needs a longer budget in "
    "spec.watchdog, or calls of exporter.heartbeat()",
    CATEGORY_NCCL: _PEER_HINT,
    CATEGORY_NETWORK: _PEER_HINT,
    CATEGORY_PREEMPTED: "",
}
# What a message says of the remedy better than its category does.
_ADVICE = (
    (
        re.compile(r"(CUDA|HIP)( error:)? out of memory|STATUS_ALLOC_FAILED", re.I),
        "the GPU's memory is full, which no limit of the container changes: a smaller batch, gradient accumulation, or "
        "a narrower number format",
    ),
    (
        re.compile(rf"{NO_GPU.pattern}|{NO_DEVICES.pattern}", re.I),
        "the pod has no GPU: ask for one in the trainer's resources.limits (nvidia.com/gpu), or train on CPUs, with "
        "the backend gloo",
    ),
    (
        re.compile(r"device_ids and output_device arguments only work"),
        "the model is on the CPU: leave device_ids out there, or move it to the GPU of LOCAL_RANK first",
    ),
    (
        re.compile("invalid device ordinal", re.I),
        "a rank wants a GPU that its pod does not have: let it take the one of LOCAL_RANK, and let procPerNode be gpu",
    ),
    (
        re.compile(r"Bus error|shared memory|\(shm\)"),
        "/dev/shm is full: raise spec.shm.sizeLimit and the memory limit, or use fewer DataLoader workers",
    ),
    (
        re.compile(r"DataLoader worker .* (killed by signal: Killed|exited unexpectedly)"),
        "a DataLoader worker was killed, mostly for memory: raise the memory limit, or use fewer or leaner workers",
    ),
    (
        re.compile("cannot serve the rendezvous on port"),
        "another process of that node has the port, as with hostNetwork: delete the job and create it again with "
        "another spec.rendezvous.port",
    ),
    (
        re.compile(r"No module named|cannot open shared object file"),
        "the Python that runs the script lacks it: install it in the image (under ddp run in the active environment), "
        "or mend the name or PYTHONPATH",
    ),
    (
        re.compile("EADDRINUSE|address already in use", re.I),
        "another process has that port: let the script use MASTER_ADDR and MASTER_PORT as they are, and no fixed port",
    ),
    (
        MISMATCH,
        "all ranks must call the same collectives, in the same order and with tensors of the same shape: look for a "
        "call under a condition such as `if rank == 0`, and for data of unequal length; TORCH_DISTRIBUTED_DEBUG=DETAIL "
        "names the calls of two ranks that differ",
    ),
    (
        re.compile(r"PermissionError: \[Errno 13\]"),
        "let the process's user or one of its groups use that path: for a volume set "
        "template.spec.securityContext.fsGroup, for files of the image runAsUser to their owner",
    ),
)
_HINT_LEFT = (
    "ranks of one job step together: none may leave the loop before the others (as with data of unequal length), and "
    "all should end with dist.barrier() and dist.destroy_process_group()"
)
_SILENT = "the script ended itself: its last lines in the log say why"
_CRASHED = "it crashed in native code, a library's or a kernel's; the log has the stack of a Python script then"
_HINTS_OF_EXIT_CODES = {
    **dict.fromkeys((128 + signal.SIGSEGV, 128 + signal.SIGABRT, 128 + signal.SIGBUS, 128 + signal.SIGFPE), _CRASHED),
    128
    + signal.SIGKILL: "it was killed from outside, mostly by the kernel for memory: kubectl describe pod, and dmesg "
    "on the node",
}


def advise(verdict: Verdict, report: dict[str, Any]) -> str:
    """Return what to do about a failure; empty where nothing is."""
    if ENDED_EARLY in report["message"]:
        return _HINT_LEFT
    for pattern, words in _ADVICE:
        if pattern.search(report["message"]):
            return words
    if verdict.category == CATEGORY_UNKNOWN and report["rank"] is not None:
        return _HINTS_OF_EXIT_CODES.get(report["exitCode"], _SILENT)
    if EXITED_WITH_CODE.match(report["message"]):
        return _SILENT
    if verdict.category == CATEGORY_USER_ERROR and not report["traceback"]:
        return ""  # the launcher's own words, which say what to do
    return _HINTS.get(verdict.category, "")
