"""From measurements to a table, a JSON file and a plot."""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddp_trainer.benchmark.network import SOURCES, Link, parameter_server_seconds, ring_seconds
from ddp_trainer.benchmark.synthetic import EPOCH
from ddp_trainer.benchmark.systems import Case

WORLD_SIZES = (2, 4, 8, 16)
_LEGEND = """\
data, compute, comm.: milliseconds of a step. x doc.: images/s over the documents' loop's in the same round, median.
of bare: likewise over the same model's bare step on tensors in memory. epoch: the whole data set at this rate.
scaling: images/s over ranks times those of one rank."""


@dataclass
class Measured:
    """A case with what came of it: ``about`` of the worker, or why there is nothing."""

    case: Case
    data: str
    about: dict[str, Any] = field(default_factory=dict)
    problem: str = ""

    def result(self, name: str) -> dict[str, Any] | None:
        """What the contender ``name`` achieved, if it did."""
        found = self.about.get("results", {}).get(name)
        return found if found and "failed" not in found else None


@dataclass(frozen=True)
class Row:
    """One contender of one case. Seconds are those of a step; None: not known, or there is none."""

    who: str
    images_per_second: float
    spread: float  # (highest - lowest) / median of the turns
    to_documents: float | None
    of_bare: float | None
    epoch_seconds: float
    data: float | None
    compute: float | None
    communication: float | None
    efficiency: float | None


def ratio(one: dict[str, Any], other: dict[str, Any]) -> float:
    """How many times the images/s of ``other`` those of ``one`` are: the median over the rounds.

    Turns of one round follow each other, so what slows the machine down for a while slows down both.
    """
    rounds: list[float] = [mine / theirs for mine, theirs in zip(one["rates"], other["rates"], strict=True)]
    return statistics.median(rounds)


def rows(measured: Measured, alone: Measured | None) -> list[Row]:
    """The rows of a case; ``alone`` is the same preset on one rank, for the efficiency.

    Communication is what the bare step takes longer than the same without all-reduce; data is the host's wait for a
    batch, on a GPU where batches are made by the device the loader's time by itself; compute is the rest.
    """
    found = []
    documents = measured.result("documents")
    for name in measured.about.get("results", {}):
        result = measured.result(name)
        if result is None:
            continue
        kind, _, variant = name.partition(":")
        rate, step = result["images_per_second"], result["step_seconds"]
        bare = measured.result(f"bare:{variant}")
        one = alone.result(name) if alone is not None and measured.case.ranks > 1 else None
        data = communication = compute = None
        if kind in ("ours", "documents"):
            data = max(result["data_seconds"], result.get("loading_seconds", 0.0) if kind == "ours" else 0.0)
            communication = _communication(measured, variant) if kind == "ours" else None
            compute = max(0.0, step - data - (communication or 0.0))
        found.append(
            Row(
                name,
                rate,
                (result["highest"] - result["lowest"]) / rate,
                ratio(result, documents) if documents is not None and kind != "documents" else None,
                ratio(result, bare) if bare is not None and kind == "ours" else None,
                EPOCH[measured.data] / rate,
                data,
                compute,
                communication,
                rate / (measured.case.ranks * one["images_per_second"]) if one is not None else None,
            )
        )
    return found


def _communication(measured: Measured, variant: str) -> float | None:
    """Seconds a step that the bare step waits for all-reduce; 0 on one rank."""
    if measured.case.ranks == 1:
        return 0.0
    talking, mute = measured.result(f"bare:{variant}"), measured.result(f"mute:{variant}")
    if talking is None or mute is None:
        return None
    return max(0.0, float(talking["step_seconds"] - mute["step_seconds"]))


def published(measured: Measured) -> str:
    """What the document reports for this system."""
    system = measured.case.system
    parts = [f"{number} GPU{'s' if number > 1 else ''}: {seconds:g} s {system.seconds_of}"
             for number, seconds in system.published.items()]  # fmt: skip
    rate = published_rate(measured)
    if rate is not None:
        parts.append(f"that is {rate:.0f} images/s")
    return "; ".join(filter(None, [*parts, system.claim])) or "no figure"


def published_rate(measured: Measured) -> float | None:
    """Images a second that the document reports for as many GPUs; None where it doesn't, or doesn't say of what."""
    system = measured.case.system
    seconds = system.published.get(measured.case.ranks)
    return EPOCH[measured.data] / seconds if seconds is not None and system.seconds_of == "an epoch" else None


def table(everything: Sequence[Measured]) -> str:
    """The table for a terminal."""
    lines = []
    header = f"  {'':24} {'images/s':>10} {'+-':>5} {'x doc.':>7} {'of bare':>8} {'epoch s':>8} " \
             f"{'data':>8} {'compute':>8} {'comm.':>8} {'scaling':>8}"  # fmt: skip
    for measured in everything:
        case = measured.case
        lines.append(f"{case.system.id}  {case.system.title}, {case.ranks} rank{'s' if case.ranks > 1 else ''}")
        lines.append(f"  documents report: {published(measured)}")
        if case.missing or measured.problem:
            lines.append(f"  not available: {case.missing or measured.problem}")
            continue
        lines.append(header)
        for row in rows(measured, _alone(measured, everything)):
            lines.append(
                f"  {row.who:24} {row.images_per_second:10.1f} {row.spread:5.0%} {_times(row.to_documents)} "
                f"{_number(row.of_bare, 8, 3)} {row.epoch_seconds:8.1f} {_milli(row.data)} {_milli(row.compute)} "
                f"{_milli(row.communication)} {_number(row.efficiency, 8, 2)}"
            )
        for name, result in measured.about["results"].items():
            if "failed" in result:
                lines.append(f"  {name:24} not available: {result['failed']}")
        lines += _costs(measured)
    lines += _LEGEND.splitlines()
    return "\n".join(lines)


def _alone(measured: Measured, everything: Sequence[Measured]) -> Measured | None:
    same = [one for one in everything if one.case.system.preset == measured.case.system.preset and one.case.ranks == 1]
    good = [one for one in same if one.about and one.case.system.way != "dp"]
    return good[0] if good else None


def _costs(measured: Measured) -> list[str]:
    lines = []
    for name, result in measured.about["results"].items():
        kind, _, variant = name.partition(":")
        if kind != "ours" or "report_seconds" not in result:
            continue
        report, step = result["report_seconds"], result["step_seconds"]
        text = f"  {name}: exporter + log {report * 1e6:.1f} us a step, {report / step:.2%} of it"
        silent = measured.result(f"silent:{variant}")
        if silent is not None:
            text += f" (against the same without: {ratio(silent, result) - 1:+.2%})"
        if "save_seconds" in result:
            text += (
                f"; a checkpoint holds the loop up {result['save_held_seconds'] * 1e3:.1f} ms, "
                f"is on the disk after {result['save_seconds'] * 1e3:.0f} ms"
            )
        lines.append(text)
        bare = measured.result(f"bare:{variant}")
        if bare is not None and result["peak_bytes"] is not None and bare["peak_bytes"]:
            own = result["peak_bytes"] - result["cache_bytes"]
            lines.append(
                f"  {name}: peak memory {own / 2**20:.0f} MiB and {result['cache_bytes'] / 2**20:.0f} MiB of cached "
                f"images; bare step {bare['peak_bytes'] / 2**20:.0f} MiB; ratio {own / bare['peak_bytes']:.2f}"
            )
    return lines


def communication(everything: Sequence[Measured], link: Link | None) -> str:
    """What averaging the gradients costs by either way, for each model and number of ranks."""
    if link is None:
        return "communication: no link could be measured"
    lines = [
        "S2c  ring all-reduce and parameter server, computed",
        f"link: {link.bandwidth / 1e6:.0f} MB/s, {link.latency * 1e6:.0f} us a message ({link.what})",
        *(f"  {line}" for line in SOURCES.splitlines()),
        f"  {'milliseconds a step':28} {'gradients':>10} " + "".join(f"{f'n = {n}':>18}" for n in WORLD_SIZES),
    ]
    seen = set()
    for measured in everything:
        size, preset = measured.about.get("gradient_bytes"), measured.case.system.preset
        if size is None or preset in seen:
            continue
        seen.add(preset)
        for what, cost in (("ring", ring_seconds), ("server", parameter_server_seconds)):
            costs = "".join(f"{cost(n, size, link) * 1e3:18.1f}" for n in WORLD_SIZES)
            lines.append(f"  {preset[:20] + ' ' + what:28} {size / 2**20:6.1f} MiB {costs}")
    return "\n".join(lines)


def plot(everything: Sequence[Measured], path: Path) -> str:
    """Draw rates and where a step's time goes; returns what became of it, as a line for the terminal."""
    if importlib.util.find_spec("matplotlib") is None:
        return "no plot: matplotlib is not installed"
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    of_cases = [(measured, row) for measured in everything for row in rows(measured, _alone(measured, everything))]
    owners = [measured for measured, _ in of_cases]
    bars = [(f"{measured.case.system.id} x{measured.case.ranks} {row.who}", row) for measured, row in of_cases]
    if not bars:
        return "no plot: nothing was measured"
    figure, (rates, times) = pyplot.subplots(1, 2, figsize=(14, 1.5 + 0.28 * len(bars)), sharey=True)
    names = [name for name, _ in bars]
    colours = {"documents": "tab:gray", "ours": "tab:blue", "silent": "tab:cyan", "bare": "tab:orange"}
    for kind in dict.fromkeys(row.who.partition(":")[0] for _, row in bars):
        chosen = [(name, row.images_per_second) for name, row in bars if row.who.partition(":")[0] == kind]
        rates.scatter([rate for _, rate in chosen], [name for name, _ in chosen], label=kind,
                      color=colours.get(kind, "tab:brown"))  # fmt: skip
    reported = [(name, rate) for name, measured in zip(names, owners, strict=True)
                if name.endswith(" documents") and (rate := published_rate(measured)) is not None]  # fmt: skip
    if reported:
        rates.scatter([rate for _, rate in reported], [name for name, _ in reported], label="document reports",
                      color="tab:red", marker="x")  # fmt: skip
    rates.set_xscale("log")
    rates.set_xlabel("images/s")
    rates.grid(True, which="both", alpha=0.3)
    rates.legend()
    rates.invert_yaxis()
    left = [0.0] * len(bars)
    for part in ("data", "compute", "communication"):
        widths = [1e3 * (getattr(row, part) or 0.0) for _, row in bars]
        times.barh(names, widths, left=left, label=part)
        left = [before + width for before, width in zip(left, widths, strict=True)]
    times.set_xlabel("ms a step")
    times.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return f"plot: {path}"


def _times(value: float | None) -> str:
    return f"{value:6.2f}x" if value is not None else " " * 7


def _number(value: float | None, width: int, digits: int) -> str:
    return f"{value:{width}.{digits}f}" if value is not None else " " * width


def _milli(seconds: float | None) -> str:
    return f"{seconds * 1e3:8.1f}" if seconds is not None else " " * 8
