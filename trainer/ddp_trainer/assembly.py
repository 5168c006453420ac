"""Build the parts of a run from its configuration: data, model, optimizer, checkpoint folder."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from ddp_sdk.errors import UserError, require
from ddp_sdk.files import replacing, writable, write_atomically
from ddp_trainer.checkpoint.fence import Fence
from ddp_trainer.checkpoint.store import Checkpointer
from ddp_trainer.config.run import RunConfig
from ddp_trainer.data import DataConfig
from ddp_trainer.data.arrays import Datasets
from ddp_trainer.data.datasets import load_datasets
from ddp_trainer.data.loader import TrainLoader, ValidationLoader
from ddp_trainer.data.published import download
from ddp_trainer.data.sampling import derive_seed
from ddp_trainer.data.sources import Form, Place
from ddp_trainer.distributed.ddp import check
from ddp_trainer.distributed.world import World
from ddp_trainer.engine import Engine, seed_generator
from ddp_trainer.errors import warn
from ddp_trainer.machine import keep_freed_memory
from ddp_trainer.models import build_model
from ddp_trainer.models.layers import convert, slice_before_narrow_convolutions
from ddp_trainer.optim import build_optimizer
from ddp_trainer.precision import Precision
from ddp_trainer.tasks import Task, build_task

# Random stream of the initial weights; augmentation has 1, dropout 2.
_STREAM_WEIGHTS = 3


@dataclass(frozen=True)
class UserParts:
    """Parts that a program passes as objects; None: the configuration names the part.

    ``model`` is a module, or a class or function without arguments that builds one, called after the seed is set.
    """

    model: nn.Module | Callable[[], nn.Module] | None = None
    data: Datasets | None = None
    task: Task | None = None


@dataclass(frozen=True)
class Parts:
    """The parts of the training loop. ``checkpointer`` exists on rank 0 only, and only with a checkpoint folder.

    ``example`` is the model's input for a batch of one sample.
    """

    loader: TrainLoader
    validation: ValidationLoader
    task: Task
    engine: Engine
    checkpointer: Checkpointer | None
    example: Any


def assemble(config: RunConfig, world: World, user_parts: UserParts | None = None) -> Parts:
    """Build all parts, the same on every rank; parts that are not in ``user_parts`` are built by ``config``.

    Raises :class:`UserError` on all ranks if any rank finds a mistake, :class:`Superseded` if a later attempt at the
    same job has started.
    """
    user_parts = user_parts or UserParts()
    if world.device.type == "cpu":
        keep_freed_memory()
    with world.agreed():
        precision = _build_precision(config, world)
        check(config.distributed, world)

    datasets = user_parts.data or fetch_datasets(config.data, world)
    with world.agreed():
        place = Place(world.rank, world.size, world.device, precision.memory_format, world.env.local_world_size)
        loader = TrainLoader(datasets, config.data, place, seed=config.seed)
        validation = ValidationLoader(datasets, config.data, place)
        in_channels = datasets.in_channels  # before the seed is set: this may read a sample, which may draw numbers
        model = _build_initial_model(config, world, user_parts.model, datasets, in_channels)
        checkpointer = _open_checkpointer(config, world)
    with world.agreed():
        _claim_folders(config, world, checkpointer)

    model.to(world.device)
    with world.agreed():
        task = user_parts.task or build_task(datasets, config.task)
        _check_task(task, config)
        example = _check_shapes(model, task, datasets, precision, world.device)
    model = _convert_layers(model, config, world, precision)
    optimizer = build_optimizer(config.optim, model.parameters())
    engine = Engine(model, task, optimizer, precision, world, config)
    return Parts(loader, validation, task, engine, checkpointer, example)


def _build_precision(config: RunConfig, world: World) -> Precision:
    """Choose the number formats and print the choice. Raises :class:`UserError` if the device lacks a format."""
    precision = Precision(config.precision, world.device)
    if world.is_main and precision.warning:
        warn(precision.warning)
    if world.is_main and config.precision.name == "auto":
        print(f"precision: {precision.name}", flush=True)
    return precision


def _build_initial_model(
    config: RunConfig,
    world: World,
    source: nn.Module | Callable[[], nn.Module] | None,
    datasets: Datasets,
    in_channels: int,
) -> nn.Module:
    """Build the model on the CPU, with random weights by the seed; ``source`` is the program's own."""
    seed_generator(derive_seed(config.seed, _STREAM_WEIGHTS), world.device)
    if source is None:
        return build_model(config.model, in_channels, datasets.num_classes)
    model = source if isinstance(source, nn.Module) else source()
    if not isinstance(model, nn.Module):
        raise UserError("model", f"{source} returned {type(model).__name__}", "return a torch.nn.Module")
    return model


def _open_checkpointer(config: RunConfig, world: World) -> Checkpointer | None:
    """Open the checkpoint folder on rank 0; return None on other ranks, and without a folder.

    Raises :class:`UserError` if the folder is not writable.
    """
    folder = config.checkpoint.dir
    if folder is None or not world.is_main:
        return None
    checkpointer = Checkpointer(config.checkpoint, Fence.from_environ(Path(folder)))
    world.resources.callback(checkpointer.close)
    checkpointer.prepare()
    return checkpointer


def _claim_folders(config: RunConfig, world: World, checkpointer: Checkpointer | None) -> None:
    """Claim the checkpoint folder for this run, and write ``config.json`` into the output folder."""
    if checkpointer is not None:
        with writable(checkpointer.folder, "checkpoint.dir"):
            checkpointer.claim()
    folder = output_dir(config, world)
    if folder is not None:
        with writable(folder, "output_dir"):
            write_atomically(folder / "config.json", json.dumps(asdict(config), indent=2).encode() + b"\n")


def _convert_layers(model: nn.Module, config: RunConfig, world: World, precision: Precision) -> nn.Module:
    """Set the memory layout and replace layers for this device and number of ranks.

    Call it after a first forward pass, which gives lazy layers their shapes, and before DDP, whose buckets take the
    parameters' layout.
    """
    model.to(memory_format=precision.memory_format)  # type: ignore[call-overload]
    if world.device.type == "cpu" and config.precision.channels_last:
        slice_before_narrow_convolutions(model)
    if config.model.sync_batchnorm and world.is_distributed:
        return convert(model)
    return model


def fetch_datasets(config: DataConfig, world: World) -> Datasets:
    """Load the data on every rank; with ``download`` one process per node downloads it first.

    Raises :class:`UserError` on all ranks if any rank can't load it.
    """
    with world.agreed():
        if config.download and world.env.local_rank == 0:
            download(config)
    with world.agreed():
        return load_datasets(config)


def _check_task(task: Task, config: RunConfig) -> None:
    """Raise :class:`UserError` if the task lacks a method or a score that the configuration needs."""
    name = type(task).__name__
    require(
        type(task).loss is not Task.loss,
        "task.loss",
        f"{name} does not define a loss",
        "define loss(self, output, target)",
    )
    require(
        not config.train_accuracy or type(task).correct is not Task.correct,
        "train_accuracy",
        f"{name} does not count correct answers",
        "define correct(self, output, target), or omit --train-accuracy",
    )
    require(
        config.early_stop.target_accuracy is None or task.greater_is_better,
        "early_stop.target_accuracy",
        f"{name}'s {task.score} is better when smaller, but the target is a lower bound",
        "set greater_is_better and score, or omit --target-accuracy",
    )


def _check_shapes(model: nn.Module, task: Task, datasets: Datasets, precision: Precision, device: torch.device) -> Any:
    """Run the model and the task on a first sample; return the sample's input as a batch of one.

    Raises :class:`UserError` if the model or the task does not accept the shapes of the data, or if the loss or the
    metrics have the wrong form.
    """
    generic = not datasets.holds_images
    inputs, targets = tree_map_only(Tensor, lambda tensor: tensor.to(device), datasets.first_batch)
    if generic:
        inputs = Form(datasets, device, precision.memory_format)(inputs, targets).inputs
    else:
        inputs = inputs.contiguous(memory_format=precision.memory_format)

    training = model.training
    model.eval()
    try:
        with precision.autocast(), torch.set_grad_enabled(generic):
            outputs = model(inputs)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise _describe_shape_error(inputs, error, generic=generic) from error
    model.train(training)

    with precision.autocast(), torch.set_grad_enabled(generic):
        task.check(outputs, targets)
        if generic:
            check_loss(task.loss(outputs, targets))
    with torch.no_grad():
        scores = task.scores(task.totals(outputs, targets).tolist())
    names = ", ".join(scores)
    require(task.score in scores, "task.score", f"{task.score!r} is not among the metrics {names}", "name one of those")
    return inputs


def _describe_shape_error(inputs: Any, error: Exception, *, generic: bool) -> UserError:
    """Build the error of a model that failed on a batch ``inputs``; images are of one type, so it is not named."""
    reason = " ".join(str(error).split())[:200]
    shapes = tree_map_only(Tensor, lambda tensor: f"(B{''.join(f', {side}' for side in tensor.shape[1:])})", inputs)
    problem = f"the model can't process images of shape {shapes}"
    if generic:
        types = {tensor.dtype for tensor in tree_leaves(inputs) if isinstance(tensor, Tensor)}
        problem = f"the model can't process inputs of shape {shapes}{''.join(f', {dtype}' for dtype in types)}"
    return UserError("model.name", f"{problem}: {reason}", "choose a model that accepts this data")


def check_loss(loss: object) -> None:
    """Raise :class:`UserError` unless ``loss`` is a scalar with a gradient."""
    problem = ""
    if not isinstance(loss, Tensor):
        problem = f"returned {type(loss).__name__}"
    elif loss.ndim or not loss.is_floating_point():
        problem = f"returned {loss.dtype} of shape {tuple(loss.shape)}"
    elif not loss.requires_grad:
        problem = "does not depend on the model's parameters"
    require(not problem, "task.loss", problem, "return the mean over the batch, one floating-point number")


def output_dir(config: RunConfig, world: World) -> Path | None:
    """Return the folder of ``config.json`` and the weights; None on other ranks than 0, and without a folder."""
    folder = config.output_dir or config.checkpoint.dir
    return Path(folder) if folder and world.is_main else None


def save_model(model: nn.Module, config: RunConfig, world: World) -> Path | None:
    """Write the trained weights as ``model.pt`` (a state dict) and return its path.

    A failure is a warning: the run is complete, and its checkpoint holds the same weights.
    """
    folder = output_dir(config, world)
    if folder is None:
        return None
    path = folder / "model.pt"
    try:
        with replacing(path) as file:
            torch.save({name: tensor.cpu() for name, tensor in model.state_dict().items()}, file)
    except (OSError, RuntimeError) as error:
        warn(f"cannot write {path}: {error}")
        return None
    return path
