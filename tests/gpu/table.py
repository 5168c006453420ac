"""The table that ``tests/gpu/run`` prints last. A value that was not measured is a dash."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from tests.bench.trainer.report import ratio

Results = Mapping[str, Any]
_ROW = "{:37} {:5} {:>10} {:>10} {:>10} {:>10} {:>9} {:>9} {:>9}"
_COLUMNS = ("images/s", "", "documents", "ours", "compiled", "bare", "ours/doc", "ours/bare", "comp/bare")


def build_table(
    summary: Results, tests: Sequence[Results], seeds: Results, floor: Results, costs: Results
) -> list[str]:
    """Return the lines."""
    lines = [
        f"{step['name']:50} {step['state']:11} {step['seconds']:6.1f} s of {step['limit']:5.1f}  {step['problem'][:80]}"
        for step in summary["steps"]
    ]
    lines += ["", f"tests: {', '.join(f'{n} {outcome}' for outcome, n in Counter(map(_outcome, tests)).items())}"]
    lines += [f"  {_outcome(test)}: {test['test']}" for test in tests if _outcome(test) not in ("passed", "skipped")]
    lines += ["", _ROW.format(*_COLUMNS)]
    for name, system in seeds.items():
        lines += [_describe_loops(name, precision, about) for precision, about in system["precisions"].items()]
    return ["", _describe_card(summary), "", *lines, "", _describe_floor(floor), *_describe_costs(costs)]


def _outcome(test: Results) -> str:
    return str(test["outcome"])


def _describe_card(summary: Results) -> str:
    card = summary["card"]
    if not card:
        return f"{summary['device']}: not measured"
    rates = ", ".join(f"{name} {rate / 1e12:.3g}" for name, rate in card["operationsPerSecond"].items())
    versions = f"torch {card['torch']}, Python {card['python']}"
    return f"{card['device']}, {versions}, copies {card['bytesPerSecond'] / 1e9:.0f} GB/s, products {rates} TFLOP/s"


def _describe_loops(name: str, precision: str, about: Results) -> str:
    measured = {
        loop: about["results"][variant]
        for loop, variant in about["loops"].items()
        if "rates" in about["results"].get(variant, {})
    }

    def compare(loop: str, base: str) -> str:
        return f"{ratio(measured[loop], measured[base]):.3g}" if {loop, base} <= measured.keys() else "-"

    rates = [
        f"{measured[loop]['images_per_second']:.0f}" if loop in measured else "-"
        for loop in ("documents", "ours", "compiled", "bare")
    ]
    ratios = [compare("ours", "documents"), compare("ours", "bare"), compare("compiled", "bare")]
    return _ROW.format(name, precision, *rates, *ratios)


def _describe_floor(floor: Results) -> str:
    if not floor:
        return "floor of ResNet-18: -"
    shares = ", ".join(f"{name} {share:.2%}" for name, share in floor["shares"].items())
    moved = (floor["trafficBytes"] + floor["stateBytes"]) / 1e6
    return (
        f"floor of ResNet-18 in {floor['precision']}: {floor['operations'] / 1e9:.1f} GFLOP and {moved:.0f} MB a step, "
        f"{1e6 * floor['floorSeconds']:.0f} us, {floor['floorImagesPerSecond']:.0f} images/s; reached: {shares}"
    )


def _describe_costs(costs: Results) -> list[str]:
    lines = []
    if "hook" in costs:
        pairs = zip(costs["hook"]["withSeconds"], costs["hook"]["withoutSeconds"], strict=True)
        lines.append(f"step hook: {1e6 * median(on - off for on, off in pairs):.1f} us a step of the host")
    lines += [
        f"copies in memory, interval {copy['setting']} ({copy['interval']}): stall {1e3 * copy['stall_seconds']:.2f} "
        f"of {1e3 * copy['step_seconds']:.2f} ms a step, step time x {copy['step_ratio']:.3f}"
        for copy in costs.get("copies", ())
    ]
    loop = costs.get("loop", {})
    if "report_seconds" in loop.get("ours:preset", {}):
        ours = loop["ours:preset"]
        lines.append(
            f"exporter and log: {1e6 * ours['report_seconds']:.1f} us a step of the host; a checkpoint stalls "
            f"{1e3 * ours['save_held_seconds']:.1f} ms"
        )
    return lines or ["costs: -"]
