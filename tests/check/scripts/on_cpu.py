"""Run a script that requires CUDA and NCCL on CPUs with gloo: on_cpu.py SCRIPT ARGUMENTS."""

import functools
import os
import runpy
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def _to_cpu(value: Any) -> Any:
    is_name = isinstance(value, (str, torch.device)) and str(value).startswith("cuda")
    return "cpu" if is_name or type(value) is int else value


def _replace(owner: Any, name: str, **changes: Any) -> None:
    """Let calls of a function use CPUs, and these keyword arguments."""
    original: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(original)
    def call(*arguments: Any, **named: Any) -> Any:
        named = {key: _to_cpu(value) for key, value in named.items()} | changes
        return original(*map(_to_cpu, arguments), **named)

    setattr(owner, name, call)


_replace(torch.Tensor, "to")
_replace(torch.nn.Module, "to")
_replace(torch, "load")
_replace(dist, "init_process_group", backend="gloo")
_replace(DistributedDataParallel, "__init__", device_ids=None)
torch.cuda.set_device = lambda device: None
torch.Tensor.pin_memory = lambda tensor: tensor

del sys.argv[0]
sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
