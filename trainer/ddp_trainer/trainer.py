"""The training loop: epochs, validation, checkpoints, and a graceful stop."""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from ddp_sdk.errors import UserError
from ddp_sdk.exporter import Exporter
from ddp_sdk.memory import MemoryCheckpoint
from ddp_sdk.meters import Timeline
from ddp_trainer.assembly import UserParts, assemble, save_model
from ddp_trainer.checkpoint.store import SECONDS, load_newest
from ddp_trainer.config.run import RunConfig, describe
from ddp_trainer.data.loader import Batch
from ddp_trainer.distributed.stop import Reason, StopAgreement, StopSignal
from ddp_trainer.distributed.world import World
from ddp_trainer.errors import Preempted
from ddp_trainer.observability.epoch_record import EpochRecord
from ddp_trainer.observability.logs import ScalarLogs
from ddp_trainer.observability.reporter import Reporter
from ddp_trainer.optim import Schedule, lr_scale
from ddp_trainer.plan import Plan, Position


class RunState:
    """The state of a run for :class:`MemoryCheckpoint`: that of a checkpoint, and the training time so far.

    ``model`` and ``optimizer`` show which tensors only an optimizer's step changes.
    """

    def __init__(self, loop: "TrainingLoop") -> None:
        self._loop = loop
        self.model = loop.engine.model
        self.optimizer = loop.engine.optimizer
        self.seconds = 0.0
        # Set when the run has begun.
        self.measure_seconds: Callable[[], float] = lambda: 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return the state; all ranks call this."""
        return self._loop.build_state() | {"seconds": self.measure_seconds()}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Load a state."""
        self._loop.load_state(state)
        self.seconds = float(state["seconds"])


class TrainingLoop:
    """One run on one rank."""

    def __init__(
        self,
        config: RunConfig,
        world: World,
        exporter: Exporter,
        user_parts: UserParts | None = None,
        stop: StopSignal | None = None,
    ) -> None:
        self.config = config
        self.world = world
        self.exporter = exporter
        self.timeline = Timeline(world.device)
        self.stop = StopSignal() if stop is None else stop
        self.stop.install()
        # Step and value of this rank's first non-finite loss; only with --nonfinite stop.
        self._nonfinite_loss: tuple[int, float] | None = None
        watcher = self._request_stop if config.nonfinite == "stop" else None
        self.report = Reporter(world, exporter, config.log_every, watcher)
        self.report.info(describe(config))
        parts = assemble(config, world, user_parts)
        self.loader = parts.loader
        self.validation = parts.validation
        self.task = parts.task
        self.engine = parts.engine
        self.checkpointer = parts.checkpointer
        self.example = parts.example
        if self.checkpointer is not None:
            self.checkpointer.on_superseded = lambda: self.stop.request(Reason.SUPERSEDED)
        self.position = Position()
        run_state = RunState(self)
        self.memory = MemoryCheckpoint(
            {f"run in {config.checkpoint.dir}": run_state},  # a program may train several times in one job
            enabled=config.checkpoint.dir is not None,
            finite_only=config.nonfinite == "stop",
        )
        restored = self._restore()
        if not restored:
            self._resume()
        self.plan = Plan(
            samples=self.loader.length,
            samples_per_step=config.data.batch_size * world.size,
            drop_last=config.data.drop_last,
            epochs=config.epochs,
            max_steps=config.max_steps,
            first=Position(**vars(self.position)),
        )
        self.total_steps = self.plan.total_steps
        self.schedule = Schedule(
            config.schedule,
            base=config.optim.lr,
            scale=lr_scale(config.optim, world.size),
            length=self.plan.length,
            processes_per_node=world.env.local_world_size,
        )
        resumed = self.checkpointer.resumed if self.checkpointer is not None else None
        seconds = 0.0 if resumed is None else resumed.seconds
        self.epochs = EpochRecord(config, world, self.position, run_state.seconds if restored else seconds)
        run_state.measure_seconds = self.epochs.measure_total
        self.logs = self.report.logs = ScalarLogs(config, world, self.position.step)
        self.agreement = StopAgreement(world, self.stop)

    def _restore(self) -> bool:
        """Load the newest copy in memory, unless the checkpoints are newer. Returns False if there is none."""
        if self.memory.restore(at_least=self._find_saved_step) is None:
            return False
        self.report.info(f"resumed from memory: {self.position.step} steps are done")
        return True

    def _find_saved_step(self, held: int) -> int:
        """Return the step of the newest checkpoint; of the newest valid one if ``held`` in memory is older."""
        saved = self.checkpointer.list() if self.checkpointer is not None else []
        if self.checkpointer is None or not saved or saved[0].step <= held:
            return saved[0].step if saved else 0
        self.checkpointer.read_newest()
        return self.checkpointer.resumed.step if self.checkpointer.resumed is not None else 0

    def _resume(self) -> None:
        """Load the newest valid checkpoint, if one exists."""
        folder = self.config.checkpoint.dir
        state = None if folder is None else load_newest(self.checkpointer, self.world)
        if folder is None or state is None:
            return
        with self.world.agreed():
            try:
                self.load_state(state)
            except UserError:
                raise
            except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
                reason = " ".join(str(error).split())[:300]
                raise UserError(
                    "checkpoint.dir",
                    f"the checkpoint in {folder} does not fit this model or optimizer ({reason})",
                    "give another folder",
                ) from error
        self.report.resumed(folder, self.position)
        if self.position.consumed:
            self._warn_of_changed_order(state.get("order", {}))

    def build_state(self) -> dict[str, Any]:
        """Return the state of a checkpoint, without copies of its tensors."""
        return {
            "engine": self.engine.state_dict(),
            "position": vars(self.position).copy(),
            "order": self._order(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Load the state of a checkpoint."""
        self.engine.load_state_dict(state["engine"])
        self.position = Position(**state["position"])

    def _warn_of_changed_order(self, saved: dict[str, int]) -> None:
        """Warn if the settings that decide the order of the samples differ from those ``saved`` in the checkpoint."""
        changes = [
            f"{name} was {saved[name]}, is {value}"
            for name, value in self._order().items()
            if saved.get(name, value) != value
        ]
        if changes:
            self.report.warn(
                f"the order of the samples differs from the checkpoint's ({'; '.join(changes)}): the rest of this "
                "epoch repeats some samples and skips others"
            )

    def _order(self) -> dict[str, int]:
        """Return the values that, with the epoch, determine the order of its samples."""
        return {"seed": self.config.seed, "samples": self.loader.length}

    def fit(self) -> Path | None:
        """Train to the end; return the path of the saved weights on rank 0, None if there are none."""
        try:
            return self._fit()
        finally:
            self.logs.close()
            self.memory.close()
            # If the garbage collector deletes them instead, it waits five seconds for each reader process.
            del self.loader, self.validation

    def _fit(self) -> Path | None:
        self.report.begin(self.plan, self.task.tokens(self.example))
        if 0 < self.position.step != self.position.validated and self._is_validation_due():
            self._end_epoch()  # the run was stopped before or within this validation
        while not self._at_end():
            self._epoch()
            self._end_epoch()
        self.agreement.finish()
        self._wait_for_checkpoint()
        with self.exporter.saving():
            weights = save_model(self.engine.model, self.config, self.world)
        self.report.done(self.position, self.task.score, weights)
        return weights

    def _is_validation_due(self) -> bool:
        """Return whether the last step was that of an epoch or of the run."""
        return self.position.consumed == 0 or self.position.step >= self.total_steps

    def _at_end(self) -> bool:
        position = self.position
        done = position.step >= self.total_steps or position.epoch >= self.config.epochs
        return done or self.epochs.target_met

    def _epoch(self) -> None:
        """Train to the end of the epoch or of the run."""
        self.epochs.begin()
        self.agreement.begin()
        for _ in self.steps():
            pass
        self.epochs.end()

    def _end_epoch(self) -> None:
        """Validate, and save a checkpoint if one is due."""
        self._pause(self._validate)
        every = self.config.checkpoint.every_epochs
        if self._at_end() or (every and self.position.epoch % every == 0):
            self._pause(self._save)

    def steps(self) -> Iterator[None]:
        """Yield after each of the epoch's remaining steps."""
        position = self.position
        world = self.world
        every = self.config.checkpoint.every_steps
        remaining = self.plan.steps_left(position.consumed)
        step_started = time.perf_counter()
        for batch, waited in _timed(self.loader.epoch(position.epoch, position.consumed)):
            if reason := self.agreement.poll():
                self._stop_early(reason)
            lr = self.schedule.lr(self.plan.fraction(position))
            result = self.engine.step(batch, position.step, lr)
            position.step += 1
            # The epoch's last batch may be smaller; the epoch ends then, and the count is reset.
            position.consumed += self.plan.samples_per_step
            remaining -= 1
            if not remaining or position.step >= self.total_steps:
                self.timeline.wait()  # pending device work is part of the last step's time, not of the validation's
            now = time.perf_counter()
            self.epochs.step(result.correct, len(batch) * world.size)
            self.report.step(
                position,
                result.loss,
                result.grad_norm,
                len(batch),
                lr,
                seconds=now - step_started,
                waited=waited,
                computed=self.engine.clock.seconds(),
            )
            step_started = now
            yield
            if position.step >= self.total_steps:
                break
            if remaining:
                self.memory.save(position.step)
            if remaining and every and position.step % every == 0:
                if self.config.nonfinite == "stop":
                    self.timeline.wait()  # _save reads all losses; count that wait as time of the steps
                step_started += self._pause(self._save)
        else:
            remaining = 0
        if not remaining:
            position.epoch += 1
            position.consumed = 0
        self.memory.save(position.step)

    def _validate(self) -> None:
        """Validate the model after an epoch and record both."""
        scores, seconds = self._score()
        score = scores[self.task.score]
        position = self.position
        position.accuracy = score
        position.validated = position.step
        position.scores = scores
        best = max if self.task.greater_is_better else min
        position.best_accuracy = best(score, score if position.best_accuracy is None else position.best_accuracy)
        training = self.epochs.validated(score)
        self.report.validated(position, scores, self.task.score, seconds, training)
        if self.epochs.target_met:
            self.report.info(f"target reached in {position.streak} validations in a row; the run is complete")

    def _score(self) -> tuple[dict[str, float], float]:
        """Validate the model, each sample once over all ranks; return the scores and the duration in seconds."""
        started = self.timeline.now()
        model = self.engine.model
        self.world.broadcast_buffers(model)
        model.eval()
        self.agreement.begin(0)
        totals = torch.zeros(self.task.num_totals, dtype=torch.float64, device=self.world.device)
        reason = Reason.NONE
        with torch.inference_mode(), self.engine.precision.autocast():
            # Every rank has the same number of rounds: in each the ranks agree on whether to stop.
            for batch in self.validation.rounds():
                if reason := self.agreement.poll():
                    break
                if batch is not None:
                    totals += self.task.totals(model(batch.inputs), batch.targets)
                self.exporter.heartbeat()
        if reason:
            self._stop_early(reason)
        scores = self.task.scores(self.world.sum(totals.tolist()))
        return scores, self.timeline.seconds(started, self.timeline.now())

    def _save(self) -> None:
        """Save a checkpoint of the current state; all ranks call this, rank 0 writes."""
        self._raise_if_nonfinite()
        self.world.broadcast_buffers(self.engine.model)
        if self.checkpointer is None:
            return
        state = self.build_state()
        run_properties = {
            "preset": self.config.preset,
            "seed": self.config.seed,
            "worldSize": self.world.size,
            "batchSize": self.config.data.batch_size,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            SECONDS: self.epochs.measure_total(),
        }
        step = self.position.step
        # Within an epoch the last validation's accuracy is that of older weights.
        accuracy = self.position.accuracy if self.position.validated == step else None
        if accuracy is not None and not self.task.greater_is_better:
            accuracy = -accuracy  # the store keeps the checkpoint with the greatest value
        with self.exporter.saving():
            self.checkpointer.save(state, step, accuracy, run_properties, on_saved=self.report.saved)

    def _pause(self, action: Callable[[], None]) -> float:
        """Run ``action`` without counting its time as training; return its duration on the host in seconds."""
        started = time.perf_counter()
        before = self.timeline.now()
        action()
        after = self.timeline.now()
        seconds = time.perf_counter() - started
        self.report.pause(before, after)
        self.epochs.pause(before, after, seconds)
        return seconds

    def _stop_early(self, reason: Reason) -> None:
        """Save if the state is valid, wait until it is on disk, and raise; all ranks call this after the same step."""
        self.agreement.finish()
        if reason is Reason.NOT_FINITE:
            self._raise_if_nonfinite()
        if reason is Reason.SIGNAL:
            self._save()
        self._wait_for_checkpoint()
        raise Preempted(self.position.step, saved=bool(self.config.checkpoint.dir))

    def _request_stop(self, step: int, loss: float) -> None:
        self._nonfinite_loss = (step, loss)
        self.stop.request(Reason.NOT_FINITE)

    def _raise_if_nonfinite(self) -> None:
        """With ``nonfinite`` "stop", raise :class:`UserError` on all ranks if any rank had a loss that is not finite.

        Call it before a state is saved: the run could not recover from a checkpoint with non-finite weights.
        """
        if self.config.nonfinite != "stop":
            return
        self.report.check_losses()
        mine = [0.0] * self.world.size
        if self._nonfinite_loss is not None:
            mine[self.world.rank] = float(self._nonfinite_loss[0])
        first_steps = self.world.sum(mine)
        if not any(first_steps):
            return
        # Name the lowest rank with the first such step. Its gradients make the losses of all peers non-finite later.
        step, rank = min((int(step), rank) for rank, step in enumerate(first_steps) if step)
        self.agreement.finish()
        raise UserError(
            "nonfinite",
            f"the loss of step {step} on rank {rank} is not a finite number; no later state is saved",
            "lower the learning rate, clip the gradients or check the data, or continue with --nonfinite count",
        )

    def _wait_for_checkpoint(self) -> None:
        """Block every rank until rank 0 has written: torchrun stops all workers of a node when the first exits.

        Raises :class:`Superseded` on all ranks if a later attempt holds the checkpoint folder.
        """
        with self.exporter.saving():
            if self.checkpointer is not None:
                self.checkpointer.wait()
            with self.world.agreed(), contextlib.suppress(OSError):  # the writer has warned about an unreadable folder
                if self.checkpointer is not None:
                    self.checkpointer.check_fence()


def _timed(batches: Iterator[Batch]) -> Iterator[tuple[Batch, float]]:
    """Yield each batch with the seconds of the wait for it."""
    while True:
        started = time.perf_counter()
        batch = next(batches, None)
        if batch is None:
            return
        yield batch, time.perf_counter() - started
