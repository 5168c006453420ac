"""From a configuration to the parts of a run: data, model, optimiser, folder of checkpoints."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ddp_trainer.checkpoint.fence import Fence
from ddp_trainer.checkpoint.store import Checkpointer
from ddp_trainer.config.run import RunConfig
from ddp_trainer.data import DataConfig, download, load_datasets
from ddp_trainer.data.arrays import Datasets
from ddp_trainer.data.loader import TrainLoader, ValidationLoader
from ddp_trainer.data.sampling import derive_seed
from ddp_trainer.distributed.ddp import check
from ddp_trainer.distributed.world import World
from ddp_trainer.engine import Engine, seed_generator
from ddp_trainer.errors import UserError, require, warn
from ddp_trainer.files import replacing, writable, write_atomically
from ddp_trainer.machine import keep_freed_memory
from ddp_trainer.models import build_model
from ddp_trainer.models.cpu_convolutions import slice_before_narrow_convolutions
from ddp_trainer.models.export import check_export
from ddp_trainer.models.initial_weights import download_weights, load_weights, read_weights
from ddp_trainer.models.sync_batchnorm import convert
from ddp_trainer.optim import build_optimizer
from ddp_trainer.precision import Precision, check_graphs, graph_warning
from ddp_trainer.step_graph import record_steps
from ddp_trainer.tasks import Task, build_task

# Apart from the streams of augmentation (1) and dropout (2).
_STREAM_WEIGHTS = 3


@dataclass(frozen=True)
class Parts:
    """What the training loop works with. ``checkpointer`` is on rank 0 only, and only where there is a folder."""

    loader: TrainLoader
    validation: ValidationLoader
    task: Task
    engine: Engine
    checkpointer: Checkpointer | None


def assemble(config: RunConfig, world: World) -> Parts:
    """Build everything, the same on every rank.

    Raises :class:`UserError` on all ranks when any finds a mistake, :class:`Superseded` where a later attempt at the
    same job has begun.
    """
    checkpointer: Checkpointer | None = None
    if world.device.type == "cpu":
        keep_freed_memory()
    with world.agreed():
        precision = Precision(config.precision, world.device)
        check_graphs(config.precision, config.optim.accumulate, world.device)
        check(config.distributed, world)
        check_export(config.export)
        if world.is_main and precision.warning:
            warn(precision.warning)
        if world.is_main and config.precision.name == "auto":
            print(f"precision: {precision.name}", flush=True)
    datasets = fetch_datasets(config.data, world)
    source = config.model.init_from
    with world.agreed():
        if source and world.env.local_rank == 0:
            download_weights(source)
    with world.agreed():
        place: dict[str, Any] = {
            "rank": world.rank,
            "world_size": world.size,
            "device": world.device,
            "memory_format": precision.memory_format,
            "processes": world.env.local_world_size,
        }
        samples = config.data.batch_size * config.optim.accumulate
        loader = TrainLoader(datasets, config.data, samples_per_step=samples, seed=config.seed, **place)
        validation = ValidationLoader(datasets, config.data, **place)
        seed_generator(derive_seed(config.seed, _STREAM_WEIGHTS), world.device)
        model = build_model(config.model, datasets.in_channels, datasets.num_classes)
        if source:
            loaded = load_weights(model, read_weights(source), source, whole=config.eval_only)
            if world.is_main:
                print(loaded, flush=True)
        if config.checkpoint.dir is not None and world.is_main:
            checkpointer = Checkpointer(config.checkpoint, Fence.from_environ(Path(config.checkpoint.dir)))
            if not config.eval_only:
                checkpointer.prepare()
            require(
                config.eval_only or config.checkpoint.resume != "never" or not checkpointer.list(),
                "checkpoint.dir",
                f"{config.checkpoint.dir} already holds checkpoints",
                "give another folder, or --resume auto to go on from them",
            )
    with world.agreed():
        if checkpointer is not None and not config.eval_only:
            with writable(checkpointer.folder, "checkpoint.dir"):
                checkpointer.claim()
        folder = output_dir(config, world)
        if folder is not None:
            with writable(folder, "output_dir"):
                write_atomically(folder / "config.json", json.dumps(asdict(config), indent=2).encode() + b"\n")
    model.to(world.device)
    task = build_task(datasets, config.optim.label_smoothing)
    with world.agreed():
        _check_shapes(model, task, datasets, precision, world.device)
    # Afterwards: lazy layers have no shape before they have met an image. Before DDP, whose buckets take this layout.
    model.to(memory_format=precision.memory_format)  # type: ignore[call-overload]
    if world.device.type == "cpu" and config.precision.channels_last:
        slice_before_narrow_convolutions(model)
    if config.model.sync_batchnorm and world.is_distributed:
        model = convert(model)
    if world.is_main and (warning := graph_warning(config.precision, model, world.size, world.device)):
        warn(warning)
    optimizer = build_optimizer(config.optim, model.parameters())
    engine = Engine(model, task, optimizer, precision, world, config)
    record_steps(config, engine, loader.source)
    return Parts(loader, validation, task, engine, checkpointer)


def fetch_datasets(config: DataConfig, world: World) -> Datasets:
    """The data on every rank, downloaded first where asked, by one process a node while the others wait.

    Raises :class:`UserError` on all ranks where any of them can't have them.
    """
    with world.agreed():
        if config.download and world.env.local_rank == 0:
            download(config)
    with world.agreed():
        return load_datasets(config)


def _check_shapes(model: nn.Module, task: Task, datasets: Datasets, precision: Precision, device: torch.device) -> None:
    """Show the model a black image; raises :class:`UserError` where it takes or gives other shapes than the data's."""
    channels, height, width = datasets.train.image_shape
    image = torch.zeros(1, channels, height, width, device=device)
    target = torch.zeros((1, height, width) if datasets.train.masks else (1,), dtype=torch.int64, device=device)
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), precision.autocast():
            outputs = model(image.contiguous(memory_format=precision.memory_format))
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            "model.name",
            f"the model can't take images of shape (B, {channels}, {height}, {width}): {reason}",
            "choose a model and data that fit each other",
        ) from error
    task.check(outputs, target)
    model.train(training)


def output_dir(config: RunConfig, world: World) -> Path | None:
    """Where rank 0 leaves the configuration and the model; None on other ranks, and where nothing is to be left."""
    folder = config.output_dir or config.checkpoint.dir
    return Path(folder) if folder and world.is_main and not config.eval_only else None


def save_model(model: nn.Module, config: RunConfig, world: World) -> str:
    """Write the trained weights as ``model.pt`` (a state dict); returns where, as the end of a sentence.

    A failure is a warning: the run is complete, and its checkpoint holds the same weights.
    """
    folder = output_dir(config, world)
    if folder is None:
        return ""
    path = folder / "model.pt"
    try:
        with replacing(path) as file:
            torch.save({name: tensor.cpu() for name, tensor in model.state_dict().items()}, file)
    except (OSError, RuntimeError) as error:
        warn(f"cannot write to {path}: {error}")
        return ""
    return f", weights in {path}"
