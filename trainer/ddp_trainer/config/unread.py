"""Reject settings that nothing reads in a given configuration.

The parts of a run declare the settings that they read next to their names (``MODELS``, ``DATASETS``, ``OPTIMIZERS`` and
so on). A setting that none of them declares is read in every run. Settings that depend on the machine (the device, the
number of ranks, free memory) are never rejected: one configuration serves a laptop and a cluster.
"""

from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Any, Protocol

from ddp_trainer.config.options import Option, build, merge, options
from ddp_trainer.config.presets import PRESETS
from ddp_trainer.config.run import RunConfig
from ddp_trainer.data import AUGMENTATIONS, CACHES, DATASETS
from ddp_trainer.errors import UserError
from ddp_trainer.models import MODELS, NORMS
from ddp_trainer.optim import OPTIMIZERS, SCHEDULES


@dataclass(frozen=True)
class Unread:
    """A setting that is not read, the reason, and the remedy."""

    key: str
    reason: str
    remedy: str


class Rule(Protocol):
    """A dependency: whether settings are read depends on the value of another setting."""

    @property
    def governed(self) -> Set[str]:
        """Return the settings that depend on the other one."""
        ...

    def explain(self, config: RunConfig, key: str) -> Unread | None:
        """Return why ``config`` does not read the setting ``key``; None if this rule does not exclude it."""
        ...


@dataclass(frozen=True)
class Choice:
    """A setting whose value names parts, each with the settings that it reads.

    ``unlisted`` are the settings that a user's own part reads; None: it may read any.
    """

    key: str
    noun: str
    reads: Mapping[Any, tuple[str, ...]]
    unlisted: tuple[str, ...] | None = None

    @property
    def governed(self) -> Set[str]:
        """Return the settings that at least one of the parts reads."""
        return {key for reads in self.reads.values() for key in reads}

    def explain(self, config: RunConfig, key: str) -> Unread | None:
        """Return why the parts that ``config`` names do not read ``key``."""
        value = attrgetter(self.key)(config)
        names = value if isinstance(value, tuple) else (value,)
        reads = self._collect_reads(names)
        if reads is None or key in reads:
            return None

        flags = get_flags()
        readers = [name for name, part_reads in self.reads.items() if key in part_reads]
        verb = "reads" if len(readers) == 1 else "read"
        remedy = f"leave it out, or give {flags[self.key].flag} {' or '.join(readers)}, which {verb} it"
        if not names:
            return Unread(key, f"no {self.noun} is chosen that reads {flags[key].flag}", remedy)
        parts = ", ".join(map(str, names))
        alternatives = sorted(flags[read].flag for read in reads & self.governed)
        if alternatives:
            remedy += f"; {parts} reads {', '.join(alternatives)}"
        return Unread(key, f"{self.noun} {parts} does not read {flags[key].flag}", remedy)

    def _collect_reads(self, names: tuple[Any, ...]) -> Set[str] | None:
        """Return the settings that the parts ``names`` read together; None if one of them is unknown."""
        reads: set[str] = set()
        for name in names:
            part_reads = self.reads.get(name, self.unlisted)
            if part_reads is None:
                return None
            reads.update(part_reads)
        return reads


@dataclass(frozen=True)
class Switch:
    """A setting that enables others, or disables them if ``reads_when_on`` is False."""

    key: str
    reads: tuple[str, ...]
    reads_when_on: bool = True

    @property
    def governed(self) -> Set[str]:
        """Return the settings that are enabled or disabled."""
        return frozenset(self.reads)

    def explain(self, config: RunConfig, key: str) -> Unread | None:
        """Return why ``config`` does not read ``key``: None, False, 0 and empty values are off."""
        value = attrgetter(self.key)(config)
        is_on = bool(value) if self.reads_when_on else value is not None and value is not False
        if is_on == self.reads_when_on:
            return None
        flags = get_flags()
        flag = flags[key].flag
        switch = flags[self.key].flag
        if self.reads_when_on:
            return Unread(key, f"nothing reads {flag} without {switch}", f"leave it out, or give {switch}")
        return Unread(key, f"nothing reads {flag} beside {switch}", f"leave out one of the two, {flag} or {switch}")


RULES: tuple[Rule, ...] = (
    Choice("model.name", "model", {name: part.reads for name, part in MODELS.items()}),
    Choice("model.norm", "norm", NORMS),
    Choice("data.name", "data", {name: part.reads for name, part in DATASETS.items()}),
    Choice("data.augment", "augmentation", AUGMENTATIONS),
    Choice("data.cache", "cache", CACHES),
    # A program's own optimizer and schedule are built without settings.
    Choice("optim.name", "optimizer", OPTIMIZERS, unlisted=()),
    Choice("schedule.name", "schedule", SCHEDULES, unlisted=()),
    Switch("data.augment", ("data.validation_augment",)),
    Switch("schedule.warmup_epochs", ("schedule.warmup_start", "schedule.warmup_by_node", "schedule.warmup_stairs")),
    Switch("schedule.warmup_start", ("schedule.warmup_by_node",), reads_when_on=False),
    Switch("precision.compile", ("precision.compile_mode",)),
    Switch("early_stop.target_accuracy", ("early_stop.patience",)),
    Switch(
        "checkpoint.dir", ("checkpoint.every_epochs", "checkpoint.every_steps", "checkpoint.keep", "checkpoint.resume")
    ),
    Switch(
        "distributed.data_parallel",
        (
            "distributed.bucket_mb",
            "distributed.bucket_view",
            "distributed.find_unused_parameters",
            "distributed.broadcast_buffers",
            "distributed.compression",
        ),
        reads_when_on=False,
    ),
)


@cache
def get_flags() -> Mapping[str, Option]:
    """Return every setting of a run by its dotted name."""
    return {option.key: option for option in options(RunConfig)}


def find_unread(config: RunConfig) -> Iterator[Unread]:
    """Yield the settings that ``config`` does not read, whatever their values, in the order of the flags."""
    for key in get_flags():
        reasons = (rule.explain(config, key) for rule in RULES if key in rule.governed)
        reason = next(filter(None, reasons), None)
        if reason is not None:
            yield reason


def find_changed(config: RunConfig) -> set[str]:
    """Return the settings that differ from the defaults and from the preset."""
    references = [RunConfig()]
    preset = PRESETS.get(config.preset)
    if preset is not None:
        references.append(build(RunConfig, preset.values))
        references.append(build(RunConfig, merge(preset.values, preset.as_published)))

    def is_changed(get: Callable[[RunConfig], Any]) -> bool:
        return all(get(config) != get(reference) for reference in references)

    return {key for key in get_flags() if is_changed(attrgetter(key))}


def refuse_unread(config: RunConfig, flags: Set[str] = frozenset()) -> None:
    """Raise :class:`UserError` for settings that the user set and nothing reads.

    The user set those on the command line, ``flags`` by their dotted names, and all that differ from the preset.
    """
    set_by_user = flags | find_changed(config)
    unread = [setting for setting in find_unread(config) if setting.key in set_by_user]
    if not unread:
        return
    first, *more = unread
    rest = "".join(f". Also: {setting.reason}" for setting in more)
    raise UserError(first.key, first.reason, first.remedy + rest)
