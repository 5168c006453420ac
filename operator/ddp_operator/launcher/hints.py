"""What to do about a failure."""

import re
import signal
from typing import Any

from .failure_table import CATEGORIES, UNKNOWN

# The script wants a GPU in a pod without one: its backend is called nccl, but nobody's network is to blame.
NO_GPU = re.compile(
    r"no GPUs found|NCCL built in|not compiled with CUDA|Found no NVIDIA driver|CUDA-capable device is detected"
    r"|'torch\._C' has no attribute '_cuda_|requires CUDA support|dummy base class \w*(CUDA|Event|Stream)"
    r"|accelerator device when none is available|on a CUDA device but torch\.cuda\.is_available\(\) is False"
    r"|accelerator support: None|start of device string: None",
    re.I,
)
NO_DEVICES = re.compile(r"No CUDA GPUs are available")
# Ranks are in different collectives: TORCH_DISTRIBUTED_DEBUG=DETAIL says which, gloo notices no more than the sizes.
MISMATCH = re.compile(r"mismatch between collectives|op\.preamble\.length <= op\.nbytes")
# What a message says of the remedy better than its category does.
_ADVICE = {
    re.compile(r"(CUDA|HIP)( error:)? out of memory|STATUS_ALLOC_FAILED", re.I): (
        "the GPU's memory is full, which no limit of the container changes: a smaller batch, gradient accumulation, or "
        "a narrower number format"
    ),
    re.compile(rf"{NO_GPU.pattern}|{NO_DEVICES.pattern}", re.I): (
        "the pod has no GPU: ask for one in the trainer's resources.limits (nvidia.com/gpu), or train on CPUs, with "
        "the backend gloo"
    ),
    re.compile(r"device_ids and output_device arguments only work"): (
        "the model is on the CPU: leave device_ids out there, or move it to the GPU of LOCAL_RANK first"
    ),
    re.compile("invalid device ordinal", re.I): (
        "a rank wants a GPU that its pod does not have: let it take the one of LOCAL_RANK, and let procPerNode be gpu"
    ),
    re.compile(r"Bus error|shared memory|\(shm\)"): (
        "/dev/shm is full: raise spec.shm.sizeLimit and the memory limit, or use fewer DataLoader workers"
    ),
    re.compile(r"DataLoader worker .* (killed by signal: Killed|exited unexpectedly)"): (
        "a DataLoader worker was killed, mostly for memory: raise the memory limit, or use fewer or leaner workers"
    ),
    re.compile(r"No module named|cannot open shared object file"): (
        "the Python that runs the script lacks it: install it in the image (under ddp run in the active environment), "
        "or correct the name or PYTHONPATH"
    ),
    re.compile("EADDRINUSE|address already in use", re.I): (
        "another process has that port: let the script use MASTER_ADDR and MASTER_PORT as they are, and no fixed port"
    ),
    MISMATCH: (
        "all ranks must call the same collectives, in the same order and with tensors of the same shape: look for a "
        "call under a condition such as `if rank == 0`, and for data of unequal length; TORCH_DISTRIBUTED_DEBUG=DETAIL "
        "names the calls of two ranks that differ"
    ),
    re.compile(r"PermissionError: \[Errno 13\]"): (
        "let the process's user or one of its groups use that path: for a volume set "
        "template.spec.securityContext.fsGroup, for files of the image runAsUser to their owner"
    ),
}
EARLY_END_REMEDY = (
    "ranks of one job step together: none may leave the loop before the others (as with data of unequal length), and "
    "all should end with dist.barrier() and dist.destroy_process_group()"
)
_SILENT = "the script ended itself: its last lines in the log say why"
_CRASHED = "it crashed in native code, a library's or a kernel's; the log has the stack of a Python script then"
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE)


def find_advice(text: str) -> str:
    """Return what to do about an error by its message; empty where nothing is known of it."""
    return next((words for pattern, words in _ADVICE.items() if pattern.search(text)), "")


def advise(failure: dict[str, Any], *, silent: bool) -> str:
    """Return what to do about a worker's failure. ``silent``: it gave no reason but an exit code."""
    advice = find_advice(f"{failure['type']}: {failure['message']}")
    category, code = failure["outcome"].category, failure["exitCode"]
    if advice:
        return advice
    if category == UNKNOWN.name:
        return _CRASHED if (code - 128 if code >= 0 else -code) in _CRASHES else _SILENT
    return _SILENT if silent else CATEGORIES[category].remedy
