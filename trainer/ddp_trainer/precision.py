"""Number formats: autocast, the gradient scaler and the memory layout, and their valid combinations."""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_sdk.errors import UserError
from ddp_trainer.options import SettingsGroup, option

if TYPE_CHECKING:
    import torch

# Flags of /proc/cpuinfo for bf16 arithmetic: two instruction sets on x86, one on Arm.
_CPU_FLAGS = frozenset(("avx512_bf16", "amx_bf16", "bf16"))


@dataclass(frozen=True)
class PrecisionConfig(SettingsGroup, group="precision"):
    """The number formats and the memory layout."""

    name: str = option(
        "fp32",
        "fp32 (torch's defaults, on cuda with TF32 in convolutions), bf16, fp16 with a gradient scaler (cuda), or auto "
        "(bf16 if the hardware supports it, else fp32)",
        flag="--precision",
        choices=("auto", "fp32", "bf16", "fp16"),
    )
    channels_last: bool = option(False, "store images as (N, H, W, C) in memory")
    deterministic: bool = option(
        False, "use deterministic kernels (slower on cuda); a warning names operations without one"
    )
    compile: bool = option(
        False, "compile the training step with torch.compile: minutes of warm-up, then faster on cuda"
    )
    compile_mode: str = option(
        "default",
        "mode of torch.compile: default, reduce-overhead (with CUDA graphs), max-autotune (longer warm-up)",
        choices=("default", "reduce-overhead", "max-autotune"),
        only={"precision.compile": ()},
    )


class Precision:
    """The number format of a device. This class owns the order scale, unscale, clip, step, update.

    Raises :class:`UserError` for a format that the device does not support. ``name`` is the format in use, never auto.
    """

    def __init__(self, config: PrecisionConfig, device: "torch.device") -> None:
        import torch

        cuda = device.type == "cuda"
        if not cuda and config.name == "fp16":
            raise UserError("precision.name", "fp16 needs a GPU", "use fp32 or bf16 on a CPU")
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False) if cuda else cpu_has_bf16()
        if cuda and config.name == "bf16" and not has_bf16:
            raise UserError("precision.name", "this GPU has no bf16", "use fp16 or fp32")
        self.name = config.name
        if self.name == "auto":
            self.name = "bf16" if has_bf16 else "fp32"
        # A format named by the user is used even where it is slow: the numbers are the same as on a fast machine.
        self.warning = ""
        if self.name == "bf16" and not has_bf16:
            self.warning = "this CPU has neither avx512_bf16 nor AMX: bf16 will be slower than fp32"
        self.device = device
        self.memory_format = torch.channels_last if config.channels_last else torch.contiguous_format
        self.dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.name)
        if config.deterministic:
            if cuda:
                # cuBLAS reads it on first use.
                os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True, warn_only=True)
            # Filling would cost a pass over each tensor, and no step reads uninitialized memory.
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        if cuda:
            torch.backends.cudnn.deterministic = config.deterministic
            torch.backends.cudnn.benchmark = not config.deterministic
        self.scaler: Any = torch.amp.GradScaler(device.type) if self.name == "fp16" else None

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context for the forward pass and the loss."""
        import torch

        if self.dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.dtype)

    def backward(self, loss: "torch.Tensor") -> None:
        """Accumulate the gradients of ``loss``, scaled if the format needs it."""
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        loss.backward()  # type: ignore[no-untyped-call]

    def step(
        self, optimizer: "torch.optim.Optimizer", parameters: "list[torch.Tensor]", clip_norm: float | None
    ) -> "torch.Tensor | None":
        """Unscale, clip to ``clip_norm`` if set, and step; return the norm before clipping, None without clipping.

        A gradient scaler skips a step with non-finite gradients and reduces its scale.
        """
        import torch

        norm: torch.Tensor | None = None
        if clip_norm is not None:
            if self.scaler is not None:
                self.scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(parameters, clip_norm)
        if self.scaler is not None:
            self.scaler.step(optimizer)
            self.scaler.update()
        else:
            optimizer.step()
        return norm

    def state_dict(self) -> dict[str, Any]:
        """Return the scaler's state; empty without a scaler."""
        return dict(self.scaler.state_dict()) if self.scaler is not None else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the scaler's state if both this run and the saved one have a scaler."""
        if self.scaler is not None and state:
            self.scaler.load_state_dict(state)


def cpu_has_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether this machine's CPU has bf16 instructions; False if unknown."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return False
    flags = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    return not _CPU_FLAGS.isdisjoint(flags.partition(":")[2].split())
