"""What to do about a failure."""

import os
import re
import signal
import sys
from typing import Any, Optional

from .contract import ENV_LOCAL_POD
from .failure_table import CATEGORIES, UNKNOWN
from .pod import CodeConfig

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
    re.compile(r"cannot open shared object file"): (
        "the Python that runs the script lacks it: install it in the image (under ddp run in the active environment), "
        "or correct the name or LD_LIBRARY_PATH"
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
_MISSING_MODULE = re.compile(r"No module named '?([\w.]+)")
# What argparse writes before it exits with code 2, and the exceptions that click and typer exit with.
_USAGE = re.compile(r"^usage: .*: error: ", re.I | re.M | re.S)
_WRONG_ARGUMENTS = re.compile(r"SystemExit: (\S+: error: |click\.exceptions\.\w+: )")
ARGUMENTS_REMEDY = (
    "correct the arguments of the script: args in spec.template, or those after -- on the command line; the script's "
    "--help lists them"
)
_LEFT_OUT = "if it is a file of the packed folder, .gitignore or .ddpignore may leave it out (--include PATH packs it)"
_SILENT = "the script ended itself: its last lines in the log say why"
_CRASHED = "it crashed in native code, a library's or a kernel's; the log has the stack of a Python script then"
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE)


def find_advice(text: str) -> str:
    """Return what to do about an error by its message; empty where nothing is known of it."""
    return next((words for pattern, words in _ADVICE.items() if pattern.search(text)), "")


def advise_on_module(name: str, code: Optional[CodeConfig]) -> str:
    """Return what to do where a Python module is missing. ``code``: the packed folder that the pod runs, if any."""
    if code is not None and code.requirements:
        return f"add the package of {name} to {code.requirements}, or correct the name; {_LEFT_OUT}"
    if code is not None:
        return f"list the package of {name} in requirements.txt of the packed folder and add --pip; {_LEFT_OUT}"
    if ENV_LOCAL_POD in os.environ:
        return f"install the package of {name} for {sys.executable}, or correct the name or PYTHONPATH"
    return (
        f"the image lacks {name}: install it in the image, or correct the name or PYTHONPATH; "
        "`ddp submit --workdir DIR` packs modules of yours, and with --pip installs the folder's requirements.txt"
    )


def advise_on_program(code: Optional[CodeConfig]) -> str:
    """Return what to do where the training script is missing. ``code``: the packed folder that the pod runs, if any."""
    if code is not None:
        return f"check command and args in spec.template; {_LEFT_OUT}"
    if ENV_LOCAL_POD in os.environ:
        return "check command and args in spec.template, or run ddp in the folder that has it"
    return (
        "the image does not have it: submit the folder that has it with `ddp submit job.yaml --workdir DIR`, or "
        "check command and args in spec.template"
    )


def is_usage(text: str, code: int) -> bool:
    """Tell whether a program's last lines are its usage, as it was given wrong arguments."""
    return code == 2 and bool(_USAGE.search(text))


def advise(failure: dict[str, Any], *, silent: bool, code: Optional[CodeConfig] = None) -> str:
    """Return what to do about a worker's failure.

    ``silent``: it gave no reason but an exit code. ``code``: the packed folder that the pod runs, if any.
    """
    text = f"{failure['type']}: {failure['message']}"
    advice = find_advice(text)
    missing = _MISSING_MODULE.search(text)
    if missing and not advice:
        return advise_on_module(missing[1], code)
    if failure["exitCode"] == 2 and _WRONG_ARGUMENTS.match(text):
        return ARGUMENTS_REMEDY
    category, status = failure["outcome"].category, failure["exitCode"]
    if advice:
        return advice
    if category == UNKNOWN.name:
        return _CRASHED if (status - 128 if status >= 0 else -status) in _CRASHES else _SILENT
    return _SILENT if silent else CATEGORIES[category].remedy
