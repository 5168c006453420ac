"""What `ddp check` asks of the ranks of a run, and what each of their processes records.

The folder in CHECK_VARIABLE has the order, ``order.json``, and one file for each process: ``<rank>.<number>.jsonl``, a
JSON object in each line. ``number`` counts the processes of the rank from 0. Nothing is recorded without that folder.
"""

from dataclasses import dataclass
from typing import Final

from ...contract.records import items, number, text

ORDER_FILE: Final = "order.json"
IDLE_SUFFIX: Final = "idle.json"  # of a file with an IdleRecord, after the rank
LENGTH_SUFFIX: Final = "length"  # of a file with the length of a DataLoader, after the rank and its number
MARK_FILE: Final = "marked"  # rank 0 creates it after the step ``RecordingOrder.mark``
MOST_STEPS: Final = 2000  # of a run
MOST_RECORDS: Final = 20_000  # lines of a process
MOST_TENSORS: Final = 4096  # of a model
MOST_BESIDE: Final = 16  # modules beside the models
SCAN_STEP: Final = 2  # of a process, after which all of its modules exist
MOST_SAMPLES: Final = 64  # of a batch
MOST_UNEVEN: Final = 2  # batches by which the cut epochs of ranks differ, if their whole ones do
MOST_OPENED: Final = 256  # files of a process without a step
MOST_STATES: Final = 512  # values beside the models

# Kinds of a value beside the models.
NUMBERS: Final = "number"
TENSORS: Final = "tensor"
GENERATOR: Final = "generator"  # of random numbers
EMPTY: Final = "empty"  # a container
WEIGHTS: Final = "weights"  # tensors with the shapes of all parameters

# What draws random numbers.
MODEL_DRAWS: Final = "model"
DATA_DRAWS: Final = "data"
SCRIPT_DRAWS: Final = "script"

# Kinds of a record: the value of ``event``.
START: Final = "start"
MODEL: Final = "model"
LOADER: Final = "loader"
BATCH: Final = "batch"
STEP: Final = "step"
SAVE: Final = "save"
LOAD: Final = "load"
FILE: Final = "file"
RESTORE: Final = "restore"
END: Final = "end"

# Reasons of an end.
LIMIT: Final = "limit"  # the order has no more steps
COMPLETED: Final = "script"  # exit code 0
ERROR: Final = "error"  # another exit code, or an exception


@dataclass(frozen=True)
class Kill:
    """A process that ends itself with SIGKILL after its step ``step``. ``rank``: None: the process of every rank."""

    step: int = number(MOST_STEPS, default=0)
    rank: int | None = number()


@dataclass(frozen=True)
class RecordingOrder:
    """What the ranks of a run have to do.

    ``folder``: the copy of the user's folder; existing files outside of it are not overwritten by a save; ``steps``:
    after so many steps a process ends with exit code 0; ``batches``: after so many batches an iteration of a DataLoader
    ends, and up to MOST_UNEVEN later on a rank that has more than others; 0: no limit; ``kills``: of a rank's
    processes, in order: the last one is not killed; ``mark``: the step after which rank 0 creates MARK_FILE; 0: never.
    """

    folder: str = text(4096)
    steps: int = number(MOST_STEPS, default=0)
    batches: int = number(MOST_STEPS, default=0)
    kills: tuple[Kill, ...] = items(8)
    mark: int = number(MOST_STEPS, default=0)


@dataclass(frozen=True)
class StartRecord:
    """A process that imported PyTorch's optimizers. ``time``: Unix time, as in all records."""

    event: str = START
    time: float = 0.0
    rank: int = 0
    world_size: int = 1


@dataclass(frozen=True)
class ModelRecord:
    """A module that the script calls in training, before its first call.

    ``built``: the line that built it; ``wrapper``: the class around all of its trainable parameters that shares their
    gradients, such as DistributedDataParallel; empty: there is none; ``place``: the line of the call, as train.py:12,
    like all places; ``names``, ``digests``: of its parameters on this rank, in order; ``trainable``, ``sharded``: of
    the same parameters, 1 if it requires gradients, and if a rank has only a part of it; ``buffer_names``: of its
    buffers, in order; ``places``: the line that built the module of each parameter; ``modules``: each module in it,
    with the line that built it; ``late``: the modules that were built after an optimizer; ``bypassed``: the line of a
    DistributedDataParallel that has its parameters, if it is called without it; ``unshared``: the trainable parameters
    that a module of it got after DistributedDataParallel had wrapped it; ``loose``: whether it stands for the
    parameters of an optimizer that no module has; ``shared``: the dimension of its parameters' device mesh whose ranks
    may read the same data; empty: there is none.
    """

    event: str = MODEL
    time: float = 0.0
    built: str = text(200)
    wrapper: str = text(80)
    bypassed: str = text(200)
    unshared: tuple[str, ...] = items(MOST_TENSORS)
    loose: bool = False
    place: str = text(200)
    names: tuple[str, ...] = items(MOST_TENSORS)
    digests: tuple[str, ...] = items(MOST_TENSORS)
    trainable: tuple[int, ...] = items(MOST_TENSORS)
    sharded: tuple[int, ...] = items(MOST_TENSORS)
    buffer_names: tuple[str, ...] = items(MOST_TENSORS)
    places: tuple[str, ...] = items(MOST_TENSORS)
    modules: tuple[str, ...] = items(MOST_TENSORS)
    late: tuple[str, ...] = items(MOST_TENSORS)
    shared: str = text(80)


@dataclass(frozen=True)
class LoaderRecord:
    """The beginning of an iteration of a DataLoader.

    ``built``, ``place``: the lines that built it and that iterate it; ``batches``: its length; None: it has none;
    ``sampler_built``: the line that built its DistributedSampler; ``shuffles``, ``epoch``: of a
    DistributedSampler; None: it is none; ``setter``: which of its parts has set_epoch(), such as batch_sampler;
    ``state``: the integers that its dataset and samplers have as attributes, such as dataset.epoch=1; ``workers``: its
    processes; ``is_stream``: whether its dataset is an IterableDataset.
    """

    event: str = LOADER
    time: float = 0.0
    loader: int = 0
    iteration: int = 0
    built: str = text(200)
    place: str = text(200)
    batches: int | None = number()
    sampler_built: str = text(200)
    shuffles: bool | None = None
    epoch: int | None = None
    setter: str = text(80)
    state: tuple[str, ...] = items(32)
    workers: int = number(default=0)
    is_stream: bool = False


@dataclass(frozen=True)
class BatchRecord:
    """A batch that a DataLoader delivered.

    ``content``, ``indices``: digests of its tensors, and of the indices of its samples; empty if it has none;
    ``descents``: how often an index is less than the one before, also than that of the batch before; ``samples``:
    digests of its first samples.
    """

    event: str = BATCH
    loader: int = 0
    iteration: int = 0
    content: str = text(40)
    indices: str = text(40)
    descents: int = number(default=0)
    samples: tuple[str, ...] = items(MOST_SAMPLES)


@dataclass(frozen=True)
class StepRecord:
    """A completed optimizer step, and what the iteration before it used.

    ``step``: of the process, from 1; ``place``, ``backward``: the lines
    of the step and of the last backward; ``loss``: the exact values of the roots of the backwards; ``rates``: learning
    rates of the optimizer's groups; ``batch``: digest of the tensors that the outermost modules were called with;
    ``indices``: digest of the samples' indices, from DataLoaders; ``loaders``: those that delivered a batch;
    ``digests``, ``gradients``: of each parameter of all models so far, after the step; ``buffers``: of each of their
    buffers, at the first call in the iteration; ``without_gradient``: parameters that require a gradient and have none;
    ``not_finite``: loss, or the name of a parameter whose gradient is not finite; ``skipped``: steps that a GradScaler
    has skipped so far; ``group_size``, ``group_rank``: of the default process group; 0: none; ``group_built``: the line
    that created it; ``joins``: whether the script handles uneven data with Join; ``unoptimized``: parameters with a
    gradient that no optimizer has; ``foreign``: parameters of the optimizers that have no gradient and are of no model;
    ``optimizer``: the line that built the last optimizer; ``scheduled``: the line of the last step of a scheduler;
    ``measured``: whether it was given a metric; ``unsynchronized``: whether the last call of a
    DistributedDataParallel or FSDPModule left its gradients unshared; ``draws``: what has drawn random numbers, the
    generator and the digest of its state before, such as model torch=1f; ``state``: name, kind and digest of the values
    beside the models that have changed before the first call of the iteration, such as norm.mean=number:1f; ``beside``:
    class and digest of each module that is no part of the models, such as an average of the weights; until the step
    SCAN_STEP of those that exist; ``copies``: line, class and digest of the parameters of those that are called and
    have the shapes of a model's; ``scales``: of GradScalers that have stepped, with their count of steps since the last
    growth; ``cleared``: parameters that had a gradient after a backward, and none at any step of an optimizer so far;
    ``optimized``: at the first step the parameters of the optimizers, in their order; ``cycled``: whether the step got
    no batch, and an ``itertools.cycle`` has those of a DataLoader.
    """

    event: str = STEP
    time: float = 0.0
    step: int = 0
    place: str = text(200)
    backward: str = text(200)
    loss: tuple[str, ...] = items(64)
    rates: tuple[float, ...] = items(64)
    batch: str = text(40)
    indices: str = text(40)
    digests: tuple[str, ...] = items(MOST_TENSORS)
    gradients: tuple[str, ...] = items(MOST_TENSORS)
    buffers: tuple[str, ...] = items(MOST_TENSORS)
    loaders: tuple[int, ...] = items(16)
    without_gradient: tuple[str, ...] = items(64)
    not_finite: str = text(200)
    skipped: int = number(default=0)
    group_size: int = number(default=0)
    group_rank: int = number(default=0)
    group_built: str = text(200)
    joins: bool = False
    unoptimized: tuple[str, ...] = items(64)
    foreign: int = number(default=0)
    optimizer: str = text(200)
    scheduled: str = text(200)
    measured: bool = False
    unsynchronized: bool = False
    draws: tuple[str, ...] = items(16)
    state: tuple[str, ...] = items(MOST_STATES)
    beside: tuple[str, ...] = items(MOST_BESIDE)
    copies: tuple[str, ...] = items(MOST_BESIDE)
    scales: tuple[str, ...] = items(16)
    cleared: tuple[str, ...] = items(64)
    optimized: tuple[str, ...] = items(MOST_TENSORS)
    cycled: bool = False


@dataclass(frozen=True)
class SaveRecord:
    """A checkpoint that the process wrote, or renamed to ``path``. ``step``: completed steps of the process.

    ``taken``: the step after which the script took the weights in it, if it has kept references to them since then;
    ``taken_place``: the line that took them; ``taken_name``: the variable that has them, if that line is not known.
    """

    event: str = SAVE
    time: float = 0.0
    path: str = text(1000)
    place: str = text(200)
    step: int = 0
    taken: int | None = number()
    taken_place: str = text(200)
    taken_name: str = text(200)


@dataclass(frozen=True)
class RestoreRecord:
    """Weights that a module was given by ``load_state_dict`` although they are its own: references since ``taken``.

    ``taken``, ``taken_place``, ``taken_name``: as in a SaveRecord.
    """

    event: str = RESTORE
    place: str = text(200)
    step: int = 0
    taken: int = 0
    taken_place: str = text(200)
    taken_name: str = text(200)


@dataclass(frozen=True)
class LoadRecord:
    """A checkpoint that the process read. ``step``: completed steps of the process."""

    event: str = LOAD
    path: str = text(1000)
    place: str = text(200)
    step: int = 0


@dataclass(frozen=True)
class FileRecord:
    """What a saved file has. ``path``: below the checked folder; ``step``: of the save; ``content``: of its tensors."""

    event: str = FILE
    path: str = text(1000)
    step: int = 0
    content: str = text(40)


@dataclass(frozen=True)
class IdleRecord:
    """The end of a process without a step. ``opened``: files below the checked folder that it has read.

    ``is_cut``: whether the end of a DataLoader's iteration was ordered.
    """

    is_cut: bool = False
    opened: tuple[str, ...] = items(MOST_OPENED)


@dataclass(frozen=True)
class EndRecord:
    """The end of a process. ``reason``: LIMIT, COMPLETED or ERROR; a killed process has no such record."""

    event: str = END
    time: float = 0.0
    step: int = 0
    reason: str = text(40)
