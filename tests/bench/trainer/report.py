"""Turn measurements into a table."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.bench.trainer.network import FORMULAS, Link, parameter_server_seconds, ring_seconds
from tests.bench.trainer.synthetic import EPOCH
from tests.bench.trainer.systems import BenchmarkCase

WORLD_SIZES = (2, 4, 8, 16)
LEGEND = """\
data, compute, comm.: milliseconds of a step. x doc.: images/s over the documents' loop's in the same round, median.
of bare: likewise over the same model's bare step on tensors in memory. epoch: the whole data set at this rate.
scaling: images/s over ranks times those of one rank."""


@dataclass
class CaseResult:
    """A case with its result: ``about`` of the worker, or the reason why there is none."""

    case: BenchmarkCase
    data: str
    about: dict[str, Any] = field(default_factory=dict)
    problem: str = ""
    notes: list[str] = field(default_factory=list)

    def result(self, name: str) -> dict[str, Any] | None:
        """The result of the contender ``name``, if it has one."""
        results = self.about.get("results", {}).get(name)
        return results if results and "failed" not in results else None


@dataclass(frozen=True)
class ContenderRow:
    """One contender of one case. Seconds are those of a step; None: unknown, or not applicable."""

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


def ratio(base: dict[str, Any], other: dict[str, Any]) -> float:
    """The ratio of the images/s of ``other`` to those of ``base``: the median over the rounds.

    Turns of one round follow each other, so that a slow phase of the machine affects both.
    """
    rounds: list[float] = [mine / theirs for mine, theirs in zip(base["rates"], other["rates"], strict=True)]
    return statistics.median(rounds)


def rows(measured: CaseResult, alone: CaseResult | None) -> list[ContenderRow]:
    """The rows of a case; ``alone`` is the same preset on one rank, for the efficiency.

    Communication is the difference between the bare step with and without all-reduce. Data is the host's wait for a
    batch; on a GPU that builds its batches it is the loader's time alone. Compute is the rest.
    """
    results = []
    documents = measured.result("documents")
    for name in measured.about.get("results", {}):
        result = measured.result(name)
        if result is None:
            continue
        kind, _, variant = name.partition(":")
        rate = result["images_per_second"]
        step = result["step_seconds"]
        bare = measured.result(f"bare:{variant}")
        first = alone.result(name) if alone is not None and measured.case.ranks > 1 else None
        data = communication = compute = None
        if kind in ("ours", "documents"):
            data = max(result["data_seconds"], result.get("loading_seconds", 0.0) if kind == "ours" else 0.0)
            communication = _communication(measured, variant) if kind == "ours" else None
            compute = max(0.0, step - data - (communication or 0.0))
        results.append(
            ContenderRow(
                name,
                rate,
                (result["highest"] - result["lowest"]) / rate,
                ratio(result, documents) if documents is not None and kind != "documents" else None,
                ratio(result, bare) if bare is not None and kind == "ours" else None,
                EPOCH[measured.data] / rate,
                data,
                compute,
                communication,
                rate / (measured.case.ranks * first["images_per_second"]) if first is not None else None,
            )
        )
    return results


def _communication(measured: CaseResult, variant: str) -> float | None:
    """Seconds a step that the bare step waits for all-reduce; 0 on one rank."""
    if measured.case.ranks == 1:
        return 0.0
    talking = measured.result(f"bare:{variant}")
    mute = measured.result(f"mute:{variant}")
    if talking is None or mute is None:
        return None
    return max(0.0, float(talking["step_seconds"] - mute["step_seconds"]))


def published(measured: CaseResult) -> str:
    """The values that the document reports for this system."""
    system = measured.case.system
    parts = [f"{number} GPU{'s' if number > 1 else ''}: {seconds:g} s {system.seconds_of}"
             for number, seconds in system.published.items()]  # fmt: skip
    seconds = system.published.get(measured.case.ranks)
    if seconds is not None and system.seconds_of == "an epoch":
        parts.append(f"that is {EPOCH[measured.data] / seconds:.0f} images/s")
    return "; ".join(filter(None, [*parts, system.claim])) or "no figure"


def describe(measured: CaseResult, everything: Sequence[CaseResult]) -> list[str]:
    """The lines of a case for a terminal; ``everything`` includes earlier measurements."""
    columns = ("images/s", "+-", "x doc.", "of bare", "epoch s", "data", "compute", "comm.", "scaling")
    case = measured.case
    system = measured.case.system
    spread = f" on {system.nodes} nodes" if system.nodes > 1 else ""
    lines = [
        f"{system.name}: {system.title}, {case.ranks} rank{'s' if case.ranks > 1 else ''}{spread}",
        f"  documents report: {published(measured)}",
    ]
    if case.missing or measured.problem:
        return [*lines, f"  not available: {case.missing or measured.problem}"]
    lines.append(f"  {'':24}" + "".join(f"{column:>9}" for column in columns))
    for row in rows(measured, _alone(measured, everything)):
        cells = (
            _cell(row.images_per_second), _cell(row.spread, ".0%"), _cell(row.to_documents, ".2f"),
            _cell(row.of_bare, ".3f"), _cell(row.epoch_seconds), _cell(row.data, scale=1e3),
            _cell(row.compute, scale=1e3), _cell(row.communication, scale=1e3), _cell(row.efficiency, ".2f"),
        )  # fmt: skip
        lines.append(f"  {row.who:24}" + "".join(f"{cell:>9}" for cell in cells))
    for name, result in measured.about["results"].items():
        if "failed" in result:
            lines.append(f"  {name:24} not available: {result['failed']}")
    for name, trained in measured.about.get("trained", {}).items():
        lines.append(
            f"  accuracy of {name}: {trained['accuracy']:.4f} after {trained['epochs']} epoch(s), "
            f"{trained['seconds']:.1f} s in all (document: {system.accuracy or 'none given'})"
        )
    return lines + [f"  {note}" for note in measured.notes] + _costs(measured)


def _alone(measured: CaseResult, everything: Sequence[CaseResult]) -> CaseResult | None:
    same = [
        item for item in everything if item.case.system.preset == measured.case.system.preset and item.case.ranks == 1
    ]
    good = [item for item in same if item.about and item.case.system.mode != "dp"]
    return good[0] if good else None


def _costs(measured: CaseResult) -> list[str]:
    lines = []
    for name, result in measured.about["results"].items():
        if not name.startswith("ours:") or "report_seconds" not in result:
            continue
        report = result["report_seconds"]
        step = result["step_seconds"]
        text = f"  {name}: exporter + log {report * 1e6:.1f} us a step, {report / step:.2%} of it"
        if "save_seconds" in result:
            text += (
                f"; a checkpoint holds the loop up {result['save_held_seconds'] * 1e3:.1f} ms, "
                f"is on the disk after {result['save_seconds'] * 1e3:.0f} ms"
            )
        lines.append(text)
    return lines


def communication(everything: Sequence[CaseResult], link: Link | None) -> str:
    """The cost of averaging the gradients in both ways, for each model and number of ranks."""
    if link is None:
        return "communication: no link could be measured"
    lines = [
        "ring all-reduce and parameter server, computed",
        f"link: {link.bandwidth / 1e6:.0f} MB/s, {link.latency * 1e6:.0f} us a message ({link.what})",
        *(f"  {line}" for line in FORMULAS.splitlines()),
        f"  {'milliseconds a step':28} {'gradients':>10} " + "".join(f"{f'n = {n}':>18}" for n in WORLD_SIZES),
    ]
    seen = set()
    for measured in everything:
        size = measured.about.get("gradient_bytes")
        preset = measured.case.system.preset
        if size is None or preset in seen:
            continue
        seen.add(preset)
        for method, cost in (("ring", ring_seconds), ("server", parameter_server_seconds)):
            costs = "".join(f"{cost(n, size, link) * 1e3:18.1f}" for n in WORLD_SIZES)
            lines.append(f"  {preset[:20] + ' ' + method:28} {size / 2**20:6.1f} MiB {costs}")
    return "\n".join(lines)


def _cell(value: float | None, form: str = ".1f", scale: float = 1.0) -> str:
    return "" if value is None else format(value * scale, form)
