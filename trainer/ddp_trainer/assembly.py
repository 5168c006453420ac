"""From a configuration to the parts of a run: data, model, optimiser, folder of checkpoints."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from ddp_trainer.checkpoint.fence import Fence
from ddp_trainer.checkpoint.store import Checkpointer
from ddp_trainer.config.options import Recording
from ddp_trainer.config.run import RunConfig
from ddp_trainer.config.unread import refuse_unread
from ddp_trainer.data import DATASETS, IMAGES, MASKED_IMAGES, DataConfig, download, load_datasets
from ddp_trainer.data.arrays import Datasets
from ddp_trainer.data.loader import TrainLoader, ValidationLoader, train_loader, validation_loader
from ddp_trainer.data.sampling import derive_seed
from ddp_trainer.data.sources import Form, Place
from ddp_trainer.data.streams import StreamLoader, StreamValidation
from ddp_trainer.distributed.ddp import check
from ddp_trainer.distributed.world import World
from ddp_trainer.engine import Engine, seed_generator
from ddp_trainer.errors import UserError, require, warn
from ddp_trainer.files import replacing, writable, write_atomically
from ddp_trainer.machine import keep_freed_memory
from ddp_trainer.models import CONVOLUTIONAL, MODELS, build_model
from ddp_trainer.models.cpu_convolutions import slice_before_narrow_convolutions
from ddp_trainer.models.export import check_export
from ddp_trainer.models.initial_weights import download_weights, load_weights, read_weights
from ddp_trainer.models.sync_batchnorm import convert
from ddp_trainer.optim import build_optimizer
from ddp_trainer.precision import ModelTraits, Precision, check_graphs, describe_defaults, graph_warning
from ddp_trainer.step_graph import record_steps
from ddp_trainer.tasks import Task, build_task

# Apart from the streams of augmentation (1) and dropout (2).
_STREAM_WEIGHTS = 3


@dataclass(frozen=True)
class Own:
    """What a program gives itself, instead of by names in the configuration; None: by name.

    ``model`` is a module, or what makes one: a class or function without arguments, called when the seed is set.
    """

    model: nn.Module | Callable[[], nn.Module] | None = None
    data: Datasets | None = None
    task: Task | None = None


@dataclass(frozen=True)
class Parts:
    """What the training loop works with. ``checkpointer`` is on rank 0 only, and only where there is a folder.

    ``example`` is a batch of one input, as the model takes it.
    """

    loader: TrainLoader | StreamLoader
    validation: ValidationLoader | StreamValidation
    task: Task
    engine: Engine
    checkpointer: Checkpointer | None
    example: Any


def assemble(config: RunConfig, world: World, own: Own | None = None) -> Parts:
    """Build everything, the same on every rank; what is not the program's ``own`` as the configuration names it.

    Raises :class:`UserError` on all ranks when any finds a mistake, :class:`Superseded` where a later attempt at the
    same job has begun.
    """
    checkpointer: Checkpointer | None = None
    own = own or Own()
    if world.device.type == "cpu":
        keep_freed_memory()
    with world.agreed():
        precision = Precision(config.precision, world.device, describe_model(config))
        check_graphs(config.precision, config.optim.accumulate, world.device)
        check(config.distributed, world)
        check_export(config.export)
        if world.is_main and precision.warning:
            warn(precision.warning)
        if world.is_main and config.precision.name == "auto":
            print(f"precision: {precision.name}", flush=True)
    data_reads = Recording(config.data)
    datasets = own.data or fetch_datasets(data_reads.config, world)
    source = config.model.init_from
    with world.agreed():
        if source and world.env.local_rank == 0:
            download_weights(source)
    with world.agreed():
        place = Place(world.rank, world.size, world.device, precision.memory_format, world.env.local_world_size)
        samples = config.data.batch_size * config.optim.accumulate
        loader = train_loader(datasets, config.data, place, samples_per_step=samples, seed=config.seed)
        validation = validation_loader(datasets, config.data, place)
        channels = datasets.in_channels  # before the seed: it may take a sample, which may draw
        _refuse_unread_of_own_data(config, own, datasets, data_reads)
        model_reads = Recording(config.model)
        seed_generator(derive_seed(config.seed, _STREAM_WEIGHTS), world.device)
        if own.model is not None:
            model = _make(own.model)
        else:
            model = build_model(model_reads.config, channels, datasets.num_classes)
        _refuse_unread_of_own_model(config, own, model, model_reads)
        if source:
            loaded = load_weights(model, read_weights(source), source, whole=config.eval_only)
            if world.is_main:
                print(loaded, flush=True)
        if config.checkpoint.dir is not None and world.is_main:
            checkpointer = Checkpointer(config.checkpoint, Fence.from_environ(Path(config.checkpoint.dir)))
            if not config.eval_only:
                world.resources.callback(checkpointer.close)
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
    with world.agreed():
        task = own.task or build_task(datasets, config.optim.label_smoothing, config.task)
        _check_task(task, config)
        example = _check_shapes(model, task, datasets, precision, world.device)
    # Afterwards: lazy layers have no shape before they have met an image. Before DDP, whose buckets take this layout.
    model.to(memory_format=precision.memory_format)  # type: ignore[call-overload]
    if world.device.type == "cpu" and precision.numerics.channels_last:
        slice_before_narrow_convolutions(model)
    if config.model.sync_batchnorm and world.is_distributed:
        model = convert(model)
    if world.is_main and (warning := graph_warning(config.precision, model, world.size, world.device)):
        warn(warning)
    optimizer = build_optimizer(config.optim, model.parameters())
    fused = bool(optimizer.defaults.get("fused"))
    defaults = describe_defaults(config.precision, precision.numerics, world.device.type, fused=fused)
    if world.is_main and defaults:
        print(defaults, flush=True)
    engine = Engine(model, task, optimizer, precision, world, config)
    record_steps(config, engine, loader.source)
    return Parts(loader, validation, task, engine, checkpointer, example)


def _refuse_unread_of_own_data(config: RunConfig, own: Own, datasets: Datasets, recording: Recording) -> None:
    """Raise :class:`UserError` for settings that neither the user's function nor the trainer reads of such data."""
    reads = recording.finish()
    if reads is None or (own.data is None and config.data.name in DATASETS):
        return
    if datasets.holds_images:
        reads |= frozenset(MASKED_IMAGES if datasets.masks else IMAGES)
    refuse_unread(config, own={"data.name": reads})


def _refuse_unread_of_own_model(config: RunConfig, own: Own, model: nn.Module, recording: Recording) -> None:
    """Raise :class:`UserError` for settings that neither the user's function nor the trainer reads of such a model."""
    reads = recording.finish()
    if reads is None or (own.model is None and config.model.name in MODELS):
        return
    reads |= {"precision.channels_last"}
    if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
        reads |= {"model.sync_batchnorm"}
    refuse_unread(config, own={"model.name": reads})


def fetch_datasets(config: DataConfig, world: World) -> Datasets:
    """The data on every rank, downloaded first where asked, by one process a node while the others wait.

    Raises :class:`UserError` on all ranks where any of them can't have them.
    """
    with world.agreed():
        if config.download and world.env.local_rank == 0:
            download(config)
    with world.agreed():
        return load_datasets(config)


def describe_model(config: RunConfig) -> ModelTraits:
    """Return what of the model and the task decides number formats, by their names."""
    own_task = config.task is not None and not config.task.startswith("ddp_trainer.")
    return ModelTraits(
        convolutional=config.model.name in CONVOLUTIONAL,
        own=config.model.name not in MODELS or own_task,
    )


def _make(model: nn.Module | Callable[[], nn.Module]) -> nn.Module:
    made = model if isinstance(model, nn.Module) else model()
    if not isinstance(made, nn.Module):
        raise UserError("model", f"{model} returned {type(made).__name__}", "return a torch.nn.Module")
    return made


def _check_task(task: Task, config: RunConfig) -> None:
    """Raise :class:`UserError` where the task lacks what the configuration asks for."""
    name = type(task).__name__
    require(type(task).loss is not Task.loss, "task.loss", f"{name} has no loss", "define loss(self, output, target)")
    require(
        not config.train_accuracy or type(task).correct is not Task.correct,
        "train_accuracy",
        f"{name} counts no right answers",
        "define correct(self, output, target), or leave it out",
    )
    require(
        config.early_stop.target_accuracy is None or task.greater_is_better,
        "early_stop.target_accuracy",
        f"{name}'s {task.score} is better when smaller",
        "set greater_is_better and score, or leave it out",
    )


def _check_shapes(model: nn.Module, task: Task, datasets: Datasets, precision: Precision, device: torch.device) -> Any:
    """Show the model a first sample, and the task its answer; returns the sample's input, a batch of one.

    Raises :class:`UserError` where the model takes or gives other shapes than the data's, and where the task's loss or
    metrics are not what they should be.
    """
    own = not datasets.holds_images
    inputs, targets = tree_map_only(Tensor, lambda tensor: tensor.to(device), datasets.first_batch)
    if own:
        inputs = Form(datasets, device, precision.memory_format)(inputs, targets).inputs
    else:
        inputs = inputs.contiguous(memory_format=precision.memory_format)
    training = model.training
    model.eval()
    try:
        with precision.autocast(), torch.set_grad_enabled(own):
            outputs = model(inputs)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        reason = " ".join(str(error).split())[:200]
        shapes = tree_map_only(Tensor, lambda tensor: f"(B{''.join(f', {side}' for side in tensor.shape[1:])})", inputs)
        kinds = {tensor.dtype for tensor in tree_leaves(inputs) if isinstance(tensor, Tensor)} if own else ()
        raise UserError(
            "model.name",
            f"the model can't take {'inputs' if own else 'images'} of shape {shapes}"
            f"{''.join(f', {kind}' for kind in kinds)}: {reason}",
            "choose a model and data that fit each other",
        ) from error
    model.train(training)
    with precision.autocast(), torch.set_grad_enabled(own):
        task.check(outputs, targets)
        if own:
            check_loss(task.loss(outputs, targets))
    with torch.no_grad():
        scores = task.scores(task.totals(outputs, targets).tolist())
    known = ", ".join(scores)
    require(task.score in scores, "task.score", f"{task.score!r} is none of {known}", "name one of those")
    return inputs


def check_loss(loss: object) -> None:
    """Raise :class:`UserError` unless ``loss`` is one number that backward can begin at."""
    problem = ""
    if not isinstance(loss, Tensor):
        problem = f"returned {type(loss).__name__}"
    elif loss.ndim or not loss.is_floating_point():
        problem = f"returned {loss.dtype} of shape {tuple(loss.shape)}"
    elif not loss.requires_grad:
        problem = "does not depend on the model's parameters"
    require(not problem, "task.loss", problem, "return the mean over the batch, one floating-point number")


def output_dir(config: RunConfig, world: World) -> Path | None:
    """Where rank 0 leaves the configuration and the model; None on other ranks, and where nothing is to be left."""
    folder = config.output_dir or config.checkpoint.dir
    return Path(folder) if folder and world.is_main and not config.eval_only else None


def save_model(model: nn.Module, config: RunConfig, world: World) -> Path | None:
    """Write the trained weights as ``model.pt`` (a state dict); returns where.

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
        warn(f"cannot write to {path}: {error}")
        return None
    return path
