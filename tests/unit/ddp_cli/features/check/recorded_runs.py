"""Records of a right script, and changes of them."""

import dataclasses
from collections.abc import Callable
from typing import Any

from ddp_cli.features.check.recordings import Process, Recording
from ddp_pod.features.check.contract import (
    COMPLETED,
    SCAN_STEP,
    BatchRecord,
    EndRecord,
    FileRecord,
    LoaderRecord,
    ModelRecord,
    SaveRecord,
    StartRecord,
    StepRecord,
)

STEPS = 12
EPOCH = 4
Change = Callable[[list[Process]], object]


def build_process(rank: int, *, steps: range = range(1, STEPS + 1), number: int = 0) -> Process:
    """Return the records of a right script from one step to another; ``steps``: of the run."""
    process = Process(rank, number, StartRecord(rank=rank, world_size=2))
    process.models = [
        ModelRecord(
            built="train.py:10",
            wrapper="DistributedDataParallel",
            place="train.py:20",
            names=("weight", "frozen"),
            digests=(f"w{steps.start - 1}", "f"),
            trainable=(1, 0),
            sharded=(0, 0),
            buffer_names=("mean",),
            places=("net.py:1", "net.py:2"),
        )
    ]
    for index, step in enumerate(steps, 1):
        if (step - 1) % EPOCH == 0 or index == 1:
            epoch = (step - 1) // EPOCH
            loader = LoaderRecord(
                loader=0,
                iteration=epoch + 1,
                built="train.py:12",
                place="train.py:18",
                batches=EPOCH,
                sampler_built="train.py:11",
                shuffles=True,
                epoch=epoch,
            )
            process.loaders.append((index - 1, loader))
        process.batches.append(
            BatchRecord(
                loader=0,
                iteration=(step - 1) // EPOCH + 1,
                content=f"b{step}.{rank}",
                indices=f"i{step}.{rank}",
                descents=3,
                samples=(f"s{step}.{rank}",),
            )
        )
        process.steps.append(
            StepRecord(
                time=float(step),
                step=index,
                place="train.py:22",
                backward="train.py:21",
                loss=(f"l{step}.{rank}",),
                rates=(1.0 / step,),
                batch=f"b{step}.{rank}",
                indices=f"i{step}.{rank}",
                digests=(f"w{step}", "f"),
                gradients=(f"g{step}", ""),
                buffers=(f"m{step}",),
                loaders=(0,),
                beside=(f"Average:{step}", "Teacher:0") if index >= SCAN_STEP else (),
                scheduled="train.py:23",
                draws=(f"model torch=d{step}.{rank}",),
                state=(
                    f"mean=number:m{step}",
                    f"queue=tensor:q{step}",
                    f"shadow=weights:a{step}",
                    f"matrix=tensor:{(step - 1) % EPOCH}",
                    f"noise=generator:n{step}",
                ),
                group_size=2,
                group_rank=rank,
            )
        )
        if step % EPOCH == 0 and rank == 0:
            process.saves.append(SaveRecord(time=float(step), path="/x/last.pt", place="train.py:25", step=index))
    process.end = EndRecord(step=len(process.steps), reason=COMPLETED)
    return process


def change_steps(process: Process, *, since: int = 1, **values: Any) -> None:
    """Change records of steps; a callable gets the step's number and the rank."""
    process.steps = [
        dataclasses.replace(
            step,
            **{name: value(step.step, process.rank) if callable(value) else value for name, value in values.items()},
        )
        if step.step >= since
        else step
        for step in process.steps
    ]


def change_model(process: Process, **values: Any) -> None:
    process.models = [dataclasses.replace(model, **values) for model in process.models]


def change_loaders(process: Process, **values: Any) -> None:
    process.loaders = [(begin, dataclasses.replace(loader, **values)) for begin, loader in process.loaders]


def build_reference() -> Recording:
    ranks = {rank: [build_process(rank)] for rank in range(2)}
    for step in (8, 12):
        ranks[0][0].files.append(FileRecord(path="ema.pt", step=step, content=f"e{step}"))
        ranks[0][0].files.append(FileRecord(path="log.pt", step=step, content=f"{step}"))
    return Recording(ranks)
