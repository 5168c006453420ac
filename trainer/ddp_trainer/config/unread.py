"""Settings that nothing reads in a run as it is configured: one that is given all the same is refused.

The parts of a run declare what they read beside their names (``MODELS``, ``DATASETS``, ``OPTIMIZERS`` and so on). A
setting that none of them declares is read in every run. What depends on the machine (the device, the number of ranks,
free memory) is never refused, because one configuration serves a laptop and a cluster.
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
from ddp_trainer.distributed import COMPRESSIONS
from ddp_trainer.errors import UserError
from ddp_trainer.models import MODELS, NORMS
from ddp_trainer.optim import OPTIMIZERS, SCHEDULES

# By the key of a choice: what the program's own part reads.
OwnReads = Mapping[str, Set[str]]


@dataclass(frozen=True)
class Unread:
    """A setting that is not read, the part or the setting that is the reason, and how it would be read."""

    key: str
    reason: str
    remedy: str


class Rule(Protocol):
    """Which settings are read at which values of another one."""

    @property
    def governed(self) -> Set[str]:
        """The settings that this rule is about."""
        ...

    def explain(self, config: RunConfig, key: str, own: OwnReads) -> Unread | None:
        """Why ``config`` does not read the setting ``key``; None where this rule does not speak against it."""
        ...


@dataclass(frozen=True)
class Choice:
    """A setting whose value names parts, each with the settings that it reads.

    ``unlisted`` is what a part of the user's own reads; None: known only once it is built.
    """

    key: str
    noun: str
    reads: Mapping[Any, tuple[str, ...]]
    unlisted: tuple[str, ...] | None = None

    @property
    def governed(self) -> Set[str]:
        """The settings that at least one of the parts reads."""
        return {key for reads in self.reads.values() for key in reads}

    def explain(self, config: RunConfig, key: str, own: OwnReads) -> Unread | None:
        """Compare with the parts that ``config`` names, or with what the program's own part reads."""
        chosen = attrgetter(self.key)(config)
        names = chosen if isinstance(chosen, tuple) else (chosen,)
        reads = own.get(self.key)
        if reads is None:
            found = [self.reads.get(name, self.unlisted) for name in names]
            if None in found:
                return None
            reads = {read for part in found for read in part or ()}
        if key in reads:
            return None
        flags = get_flags()
        part = f"{self.noun} {', '.join(map(str, names))}" if names else f"no {self.noun} is chosen that"
        verb = "does not read" if names else "reads"
        readers = [name for name, part_reads in self.reads.items() if key in part_reads and name is not None]
        without = key in self.reads.get(None, ())
        remedy = f"leave it out, or {_join_readers(flags[self.key].flag, readers, without)}"
        nearest = sorted(flags[read].flag for read in reads & self.governed)
        if nearest and names:
            remedy += f"; {', '.join(map(str, names))} reads {', '.join(nearest)}"
        return Unread(key, f"{part} {verb} {flags[key].flag}", remedy)


def _join_readers(flag: str, readers: list[str], without: bool) -> str:
    if without:
        return f"leave out {flag}"
    return f"give {flag} {' or '.join(readers)}, which {'reads' if len(readers) == 1 else 'read'} it"


@dataclass(frozen=True)
class Switch:
    """A setting without which, or beside which, others are not read."""

    key: str
    reads: tuple[str, ...]
    reads_when_on: bool = True

    @property
    def governed(self) -> Set[str]:
        """The settings that are read in one of the two positions."""
        return frozenset(self.reads)

    def explain(self, config: RunConfig, key: str, own: OwnReads) -> Unread | None:
        """Compare with the switch's position in ``config``: None, False, 0 and empty are off."""
        value = attrgetter(self.key)(config)
        is_on = bool(value) if self.reads_when_on else value is not None and value is not False
        if is_on == self.reads_when_on:
            return None
        flags = get_flags()
        flag, other = flags[key].flag, flags[self.key].flag
        if self.reads_when_on:
            return Unread(key, f"nothing reads {flag} without {other}", f"leave it out, or give {other}")
        return Unread(key, f"nothing reads {flag} beside {other}", f"leave out one of the two, {flag} or {other}")


RULES: tuple[Rule, ...] = (
    Choice("model.name", "model", {name: part.reads for name, part in MODELS.items()}),
    Choice("model.norm", "norm", NORMS),
    Choice("data.name", "data", {name: part.reads for name, part in DATASETS.items()}),
    Choice("data.augment", "augmentation", AUGMENTATIONS),
    Choice("data.cache", "cache", CACHES),
    Choice("optim.name", "optimizer", OPTIMIZERS),
    Choice("schedule.name", "schedule", SCHEDULES),
    Choice("distributed.compression", "compression", COMPRESSIONS),
    # A task by name is built without arguments.
    Choice("task", "task", {None: ("optim.label_smoothing",)}, unlisted=()),
    Switch("data.augment", ("data.validation_augment",)),
    Switch("schedule.warmup_epochs", ("schedule.warmup_start", "schedule.warmup_by_node", "schedule.warmup_stairs")),
    Switch("schedule.warmup_start", ("schedule.warmup_by_node",), reads_when_on=False),
    Switch("early_stop.target_accuracy", ("early_stop.patience",)),
    Switch("precision.compile", ("precision.compile_mode",)),
    Switch(
        "checkpoint.dir", ("checkpoint.every_epochs", "checkpoint.every_steps", "checkpoint.keep", "checkpoint.resume")
    ),
    Switch(
        "distributed.data_parallel",
        (
            "distributed.bucket_mb",
            "distributed.bucket_view",
            "distributed.static_graph",
            "distributed.find_unused_parameters",
            "distributed.broadcast_buffers",
            "distributed.compression",
        ),
        reads_when_on=False,
    ),
)


@cache
def get_flags() -> Mapping[str, Option]:
    """Every setting of a run by its dotted name."""
    return {option.key: option for option in options(RunConfig)}


def find_unread(config: RunConfig, own: OwnReads | None = None) -> Iterator[Unread]:
    """The settings that ``config`` does not read, whatever their values are, in the order of the flags.

    ``own`` is what parts of the user's own read, where that is known.
    """
    for key in get_flags():
        reasons = (rule.explain(config, key, own or {}) for rule in RULES if key in rule.governed)
        reason = next(filter(None, reasons), None)
        if reason is not None:
            yield reason


def find_changed(config: RunConfig) -> set[str]:
    """The settings that have neither their default nor a value of the preset's."""
    known = [RunConfig()]
    preset = PRESETS.get(config.preset)
    if preset is not None:
        known += [build(RunConfig, values) for values in (preset.values, merge(preset.values, preset.as_published))]

    def is_changed(get: Callable[[RunConfig], Any]) -> bool:
        return all(get(config) != get(other) for other in known)

    return {key for key in get_flags() if is_changed(attrgetter(key))}


def refuse_unread(config: RunConfig, flags: Set[str] = frozenset(), own: OwnReads | None = None) -> None:
    """Raise :class:`UserError` for settings that were given and are not read.

    Given are those on the command line, ``flags`` by their dotted names, and all that differ from the preset.
    """
    given = flags | find_changed(config)
    unread = [setting for setting in find_unread(config, own) if setting.key in given]
    if not unread:
        return
    first, *more = unread
    rest = "".join(f". Also: {setting.reason}" for setting in more)
    raise UserError(first.key, first.reason, first.remedy + rest)
