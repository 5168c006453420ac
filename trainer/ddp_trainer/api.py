"""The trainer for programs: ``Trainer(config).fit()``, with models, data and losses of their own."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from ddp_trainer.assembly import Own
from ddp_trainer.config.run import RunConfig
from ddp_trainer.config.unread import refuse_unread
from ddp_trainer.data.arrays import Datasets
from ddp_trainer.distributed import RankEnv
from ddp_trainer.distributed.stop import StopSignal
from ddp_trainer.distributed.world import World, find_rank_env
from ddp_trainer.errors import DataError, Preempted, Superseded, UserError
from ddp_trainer.exporter import Exporter, read_port
from ddp_trainer.tasks import Task
from ddp_trainer.trainer import Loop


@dataclass(frozen=True)
class Result:
    """What a run that has come to its end leaves behind; ``epochs`` and ``steps`` count from its first beginning.

    ``metrics`` are the last validation's, over all ranks. ``model`` is the trained one, on this rank's device, or the
    average of its weights where one is kept. ``checkpoint`` is the newest one's file, and ``weights`` that of the
    model's state dict; both are known on rank 0 alone, and None where no folder was given.
    """

    epochs: int
    steps: int
    metrics: dict[str, float]
    model: nn.Module
    checkpoint: Path | None
    weights: Path | None


class Trainer:
    """Trains as a configuration says, on this process or, started by torchrun or ``mp.spawn``, as one rank of many.

    ``model``, ``data`` and ``task`` take the place of what the configuration names. The model is a module, or a class
    or function without arguments that makes one, called when the run's seed is set. ``env`` is this process's place
    among the ranks, by default that in the initialized process group, else what torchrun's variables name. Raises
    :class:`UserError` for a setting that nothing would read.
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
        # Who reads the log or config.json is told whose they are.
        if model is not None:
            config = replace(config, model=replace(config.model, name=_name(model)))
        if data is not None:
            config = replace(config, data=replace(config.data, name=_name(data.train)))
        if task is not None:
            config = replace(config, task=_name(task))
        refuse_unread(config)
        self.config = config
        self._own, self._env = Own(model, data, task), env

    def fit(self, stop: StopSignal | None = None) -> Result:
        """Train to the end, from the newest checkpoint where there is one.

        SIGTERM and SIGINT stop the run after a step, as long as it lasts; afterwards the program has its own handlers
        again. With ``stop``, the caller restores them. Raises :class:`UserError` on every rank alike for what the user
        can fix, :class:`Preempted` after a signal, :class:`Superseded` where a later attempt at the same job has begun.
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
            loop = Loop(self.config, world, exporter, self._own, stop)
            weights = loop.fit()
        except DataError:
            exporter.close()  # and the group stays: the other ranks are in a step
            raise
        except (UserError, Preempted, Superseded):
            # All ranks are here. After another exception they are not, and leaving the group could wait for them.
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
            loop.engine.evaluated_model,
            saved[0].data if saved else None,
            weights,
        )


def _name(thing: object) -> str:
    """``module:name`` of a class or function, or of a thing's class."""
    named = thing if hasattr(thing, "__qualname__") else type(thing)
    return f"{named.__module__}:{named.__qualname__}"
