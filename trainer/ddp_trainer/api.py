"""The trainer's Python API: ``Trainer(config).fit()``, also with the program's own model, data and task."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from ddp_sdk.errors import UserError
from ddp_sdk.exporter import Exporter, read_port
from ddp_sdk.rank_env import RankEnv
from ddp_trainer.assembly import UserParts
from ddp_trainer.config.run import RunConfig, refuse_unread
from ddp_trainer.data.arrays import Datasets
from ddp_trainer.distributed.stop import StopSignal
from ddp_trainer.distributed.world import World, find_rank_env
from ddp_trainer.errors import DataError, Preempted, Superseded
from ddp_trainer.tasks import Task
from ddp_trainer.trainer import TrainingLoop


@dataclass(frozen=True)
class Result:
    """The result of a complete run; ``epochs`` and ``steps`` count across restarts.

    ``metrics`` are the last validation's, over all ranks. ``model`` is the trained model on this rank's device.
    ``checkpoint`` is the file of the newest checkpoint, ``weights`` that of the model's state dict; both are None on
    other ranks than 0, and without a folder.
    """

    epochs: int
    steps: int
    metrics: dict[str, float]
    model: nn.Module
    checkpoint: Path | None
    weights: Path | None


class Trainer:
    """Trains by a configuration, in a single process or as one rank of several that torchrun or ``mp.spawn`` started.

    ``model``, ``data`` and ``task`` replace the parts that the configuration names. The model is a module, or a class
    or function without arguments that builds one, called after the run's seed is set. ``env`` holds this process's
    rank and world size; by default they are read from the initialized process group, or else from torchrun's
    variables. Raises :class:`UserError` for a setting that nothing would read.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        model: nn.Module | Callable[[], nn.Module] | None = None,
        data: Datasets | None = None,
        task: Task | None = None,
        env: RankEnv | None = None,
    ) -> None:
        # The log and config.json show the names of the program's own parts.
        if model is not None:
            config = replace(config, model=replace(config.model, name=_name(model)))
        if data is not None:
            config = replace(config, data=replace(config.data, name=_name(data.train)))
        if task is not None:
            config = replace(config, task=_name(task))
        refuse_unread(config)
        self.config = config
        self._user_parts = UserParts(model, data, task)
        self._env = env

    def fit(self, stop: StopSignal | None = None) -> Result:
        """Train to the end, from the newest checkpoint if one exists.

        During the run SIGTERM and SIGINT stop it after a step; afterwards the program's own handlers are restored. With
        ``stop``, the caller restores them. Raises, on every rank, :class:`UserError` for what the user can fix,
        :class:`Preempted` after a signal, :class:`Superseded` if a later attempt at the same job has started.
        """
        if stop is not None:
            return self._fit(stop)
        stop = StopSignal()
        try:
            return self._fit(stop)
        finally:
            stop.restore()

    def _fit(self, stop: StopSignal) -> Result:
        env = find_rank_env() if self._env is None else self._env
        port = read_port() if self.config.metrics.port is None else self.config.metrics.port
        world = World.start(self.config.distributed, env)
        with world.resources:
            return self._train(world, stop, port)

    def _train(self, world: World, stop: StopSignal, port: int) -> Result:
        exporter = Exporter.start(epochs=self.config.epochs, port=port, env=world.env)
        try:
            loop = TrainingLoop(self.config, world, exporter, self._user_parts, stop)
            weights = loop.fit()
        except DataError:
            exporter.close()  # does not leave the group: the other ranks are within a step
            raise
        except (UserError, Preempted, Superseded):
            # All ranks raise these. After another exception, leaving the group could wait for ranks that did not raise.
            exporter.close()
            world.close()
            raise
        exporter.close()
        world.close()
        position = loop.position
        saved = loop.checkpointer.list() if loop.checkpointer is not None else []
        return Result(
            position.epoch,
            position.step,
            position.scores,
            loop.engine.model,
            saved[0].data if saved else None,
            weights,
        )


def _name(part: object) -> str:
    """Return ``module:name`` of a class or function, or of an object's class."""
    named = part if hasattr(part, "__qualname__") else type(part)
    return f"{named.__module__}:{named.__qualname__}"
