"""Number formats: autocast, the gradient scaler, and memory layout, and which combinations make sense.

TF32 is set by ``allow_tf32`` alone, which every supported torch has: Inductor fails where ``fp32_precision`` is set
too (pytorch#166387).
"""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ddp_trainer.config.options import Settings, option
from ddp_trainer.errors import UserError, require

if TYPE_CHECKING:
    import torch

# What /proc/cpuinfo calls arithmetic on bf16: on x86 two sets of instructions, on Arm one.
_CPU_FLAGS = frozenset(("avx512_bf16", "amx_bf16", "bf16"))


@dataclass(frozen=True)
class PrecisionConfig(Settings, group="precision"):
    """How numbers are kept and multiplied."""

    name: str = option(
        "default",
        "default (cpu: fp32; cuda: bf16, or tf32 with a model or task of your own, fp32 on GPUs without them), fp32, "
        "torch (as torch comes: fp32, on cuda with TF32 in convolutions alone), tf32 (fp32 with faster products, "
        "cuda), bf16, fp16 with a gradient scaler (cuda), "
        "or auto (bf16 where the hardware computes in it, else fp32)",
        flag="--precision",
        choices=("default", "auto", "fp32", "torch", "tf32", "bf16", "fp16"),
    )
    channels_last: bool | None = option(
        None, "keep images as (N, H, W, C) in memory; none: on cuda for the trainer's convolutional models"
    )
    deterministic: bool = option(
        False, "kernels that give the same result every time (slower on cuda); one that has none is named in a warning"
    )
    cuda_graph: str = option(
        "off",
        "on cuda, record a training step and replay it in one launch: auto (where nothing speaks against it, which the "
        "log says), on (also a model of your own), off (the default until it has been measured on GPUs)",
        choices=("auto", "on", "off"),
    )
    compile: bool = option(
        False, "compile the training step with torch.compile: minutes of warm-up, then faster on cuda"
    )
    compile_mode: str = option(
        "default",
        "torch.compile's mode; reduce-overhead and max-autotune replay CUDA graphs (not with --accumulate)",
        choices=("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
    )


_GRAPH_MODES = ("reduce-overhead", "max-autotune")


def graph_warning(config: PrecisionConfig, model: "torch.nn.Module", ranks: int, device: "torch.device") -> str:
    """What to say where torch leaves out the CUDA graphs that were asked for; empty where it does not."""
    from torch.nn.modules.batchnorm import _BatchNorm

    if not (config.compile and config.compile_mode in _GRAPH_MODES and ranks > 1 and device.type == "cuda"):
        return ""
    if not any(isinstance(module, _BatchNorm) and module.track_running_stats for module in model.modules()):
        return ""
    return (
        f"--compile-mode {config.compile_mode} replays no CUDA graphs for batch norm under DDP (pytorch#139207): "
        "--compile-mode default is as fast and compiles sooner"
    )


def check_graphs(config: PrecisionConfig, accumulate: int, device: "torch.device") -> None:
    """Raise :class:`UserError` where CUDA graphs would spoil gradients of several batches that are added up.

    Each replay writes its gradients to where those of the one before are. torch says so, or does not notice.
    """
    graphs = config.compile and config.compile_mode in _GRAPH_MODES
    require(
        not (graphs and accumulate > 1 and device.type == "cuda"),
        "precision.compile_mode",
        f"{config.compile_mode} replays CUDA graphs, whose gradients can't be accumulated",
        "use --compile-mode default or max-autotune-no-cudagraphs, or leave --accumulate out",
    )


@dataclass(frozen=True)
class DeviceTraits:
    """The properties of a device that decide number formats. A GPU with bf16 has TF32 too."""

    type: str
    fast_bf16: bool

    @classmethod
    def of(cls, device: "torch.device") -> Self:
        """Read the properties of ``device``, on cuda those of the current GPU."""
        import torch

        if device.type == "cuda":
            return cls(device.type, torch.cuda.is_bf16_supported(including_emulation=False))
        return cls(device.type, cpu_has_bf16())


@dataclass(frozen=True)
class ModelTraits:
    """The properties of a model and its task that decide number formats.

    ``own``: one of them is the user's code, which may handle neither bf16 (``numpy``) nor channels_last (``view``).
    """

    convolutional: bool = False
    own: bool = False


@dataclass(frozen=True)
class Numerics:
    """The number formats and the layout of images in a run."""

    name: str
    channels_last: bool = False
    tf32_products: bool = False
    tf32_convolutions: bool = False


def choose_numerics(config: PrecisionConfig, device: DeviceTraits, model: ModelTraits) -> Numerics:
    """Return what a run computes in: as ``config`` sets it, and by device and model where it leaves that open."""
    cuda = device.type == "cuda"
    name = config.name
    if name == "default":
        name = _choose_default(device, model)
    elif name == "auto":
        name = "bf16" if device.fast_bf16 else "fp32"
    channels_last = config.channels_last
    if channels_last is None:
        channels_last = cuda and model.convolutional and not model.own
    return Numerics(
        name,
        channels_last,
        tf32_products=cuda and name not in ("fp32", "torch"),
        tf32_convolutions=cuda and name != "fp32",
    )


def _choose_default(device: DeviceTraits, model: ModelTraits) -> str:
    if device.type != "cuda" or not device.fast_bf16:
        return "fp32"
    return "tf32" if model.own else "bf16"


def describe_defaults(config: PrecisionConfig, numerics: Numerics, device_type: str, *, fused: bool) -> str:
    """Return the line of the log that states what was chosen on a GPU without a setting; empty if nothing was."""
    if device_type != "cuda" or (config.name != "default" and config.channels_last is not None):
        return ""
    tf32 = [
        operations
        for operations, allowed in (
            ("matrix products", numerics.tf32_products),
            ("convolutions", numerics.tf32_convolutions),
        )
        if allowed
    ]
    parts = [
        f"precision {numerics.name}",
        f"TF32 in fp32 {' and '.join(tf32)}" if tf32 else "no TF32",
        "channels_last images" if numerics.channels_last else "contiguous images",
        "fused optimizer" if fused else "no fused optimizer",
    ]
    hint = "--precision and --channels-last change this"
    if config.name == "default" and numerics.name == "fp32":
        hint += "; this GPU has no bf16, --precision fp16 is faster on one with tensor cores"
    elif config.name == "default" and numerics.name == "tf32":
        hint += "; with a model or task of your own, try --precision bf16 and --channels-last"
    return f"defaults on this GPU: {', '.join(parts)} ({hint})"


class Precision:
    """One format on one device; owns the order scale, unscale, clip, step, update.

    Raises :class:`UserError` for what the device cannot do. ``name`` is the format in use, also where auto was given.
    """

    def __init__(self, config: PrecisionConfig, device: "torch.device", model: ModelTraits | None = None) -> None:
        import torch

        cuda = device.type == "cuda"
        if not cuda and config.name in ("fp16", "tf32"):
            raise UserError("precision.name", f"{config.name} needs a GPU", "use fp32 or bf16 on the CPU")
        traits = DeviceTraits.of(device)
        if cuda and config.name == "bf16" and not traits.fast_bf16:
            raise UserError("precision.name", "this GPU has no bf16", "use fp16 or fp32")
        self.numerics = choose_numerics(config, traits, model or ModelTraits())
        self.name = self.numerics.name
        # Asked for by name it is done, if slowly: the same numbers as on a machine that is fast at it.
        self.warning = ""
        if self.name == "bf16" and not traits.fast_bf16:
            self.warning = "this CPU has neither avx512_bf16 nor AMX: bf16 will be slower than fp32"
        self.device = device
        self.memory_format = torch.channels_last if self.numerics.channels_last else torch.contiguous_format
        self.dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.name)
        if config.deterministic:
            if cuda:
                # cuBLAS looks for it when it is first used.
                os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True, warn_only=True)
            # It is about reading memory that was never written, which no step does, and costs a pass over each tensor.
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        if cuda:
            torch.backends.cuda.matmul.allow_tf32 = self.numerics.tf32_products
            torch.backends.cudnn.allow_tf32 = self.numerics.tf32_convolutions
            torch.backends.cudnn.deterministic = config.deterministic
            torch.backends.cudnn.benchmark = not config.deterministic
        self.scaler: Any = torch.amp.GradScaler(device.type) if self.name == "fp16" else None

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The context for the forward pass and the loss."""
        import torch

        if self.dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.dtype)

    @contextlib.contextmanager
    def tuned(self, whole: bool) -> Iterator[None]:
        """Within it cuDNN tries its kernels on a shape that is new, unless the batch is not a ``whole`` one."""
        import torch

        cudnn, before = torch.backends.cudnn, torch.backends.cudnn.benchmark
        cudnn.benchmark = before and whole
        try:
            yield
        finally:
            cudnn.benchmark = before

    def backward(self, loss: "torch.Tensor") -> None:
        """Add the gradients of ``loss`` to the parameters', scaled where the format needs it."""
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        loss.backward()  # type: ignore[no-untyped-call]

    def step(
        self, optimizer: "torch.optim.Optimizer", parameters: "list[torch.Tensor]", clip_norm: float | None
    ) -> "torch.Tensor | None":
        """Unscale, clip to ``clip_norm`` where given, and step; returns the norm before clipping, if clipped.

        With a scaler a step with non-finite gradients is left out, as its next scale is smaller.
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
        """The scaler's state; empty without one."""
        return dict(self.scaler.state_dict()) if self.scaler is not None else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up the scaler's state where both this run and the saved one have a scaler."""
        if self.scaler is not None and state:
            self.scaler.load_state_dict(state)


def cpu_has_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this machine's processor multiplies bf16 itself; where it can't be known, no."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return False
    flags = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    return not _CPU_FLAGS.isdisjoint(flags.partition(":")[2].split())
