"""The command line of the benchmark."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ddp_trainer.config.presets import PRESETS
from tests.bench.trainer import launch, synthetic
from tests.bench.trainer.report import LEGEND, CaseResult, communication, describe, rows
from tests.bench.trainer.systems import (
    BY_NAME,
    ON_GPU,
    ON_GPU_IN_FULL,
    QUICK,
    SYSTEMS,
    VARIANTS,
    BenchmarkCase,
    each_preset_first,
    plan_cases,
)


def build_parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.trainer",
        description="Measure the trainer against the documents' own loops and the bare step, in turn.",
        allow_abbrev=False,
    )
    names = [system.name for system in SYSTEMS]
    parser.add_argument("--quick", action="store_true", help="about a minute on two cores: small batches, few systems")
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: cuda if there is one"
    )
    parser.add_argument("--systems", metavar="A,B", type=_list_of(BY_NAME, names),
                        help=f"of {', '.join(names)}; default: all, or a few with --quick")  # fmt: skip
    parser.add_argument("--ranks", metavar="N,M", type=_numbers,
                        help="numbers of ranks to try with DDP; default: 1, 2 and all")  # fmt: skip
    parser.add_argument("--variants", metavar="A,B", type=_list_of(VARIANTS, tuple(VARIANTS)),
                        help=f"of {', '.join(VARIANTS)}; default: preset and fp32, on cuda "
                        f"{' and '.join(ON_GPU)}, and for {SYSTEMS[0].name} {', '.join(ON_GPU_IN_FULL)}")  # fmt: skip
    parser.add_argument("--batches", metavar="N,M", type=_numbers, help="batch sizes of the preset to compare; "
                        "default: 32 to 512 where the document asks for it, on cuda without --quick")  # fmt: skip
    parser.add_argument("--accuracy", action="store_true",
                        help="then train for the document's epochs, where the real data are there")  # fmt: skip
    parser.add_argument("--rounds", type=int, metavar="N", help="turns of each contender; default: 5, 2 with --quick")
    parser.add_argument("--seconds", type=float, metavar="X", help="length of a turn; default: 3, 0.5 with --quick")
    parser.add_argument("--minutes", type=float, metavar="X", default=math.inf,
                        help="begin no case later, and end the one under way; each preset once first")  # fmt: skip
    parser.add_argument("--data-dir", metavar="DIR", help="the real data sets; a missing one is replaced by noise")
    parser.add_argument("--output-dir", metavar="DIR", default="bench-results", help="folder for benchmark.json")
    return parser


def _list_of(known: Collection[str], shown: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        names = tuple(name.strip() for name in text.split(",") if name.strip())
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is not known; choose from {', '.join(shown)}")
        return names

    return parse


def _numbers(text: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers above 0; give for example 1,2")
    return tuple(map(int, words))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table and write the values; return 0. Exit with 2 for flags that do not fit this machine."""
    parser = build_parser()
    flags = parser.parse_args(arguments)
    device, available = _find_device(parser, flags.device)
    ranks = flags.ranks or ((min(2, available),) if flags.quick else None)
    systems = tuple(
        BY_NAME[name] for name in flags.systems or [item.name for item in SYSTEMS if item.quick or not flags.quick]
    )
    usual = ("preset",) if flags.quick else ("preset", "fp32")
    pace = {"rounds": 2, "seconds": 0.5} if flags.quick else {"rounds": 5, "seconds": 3.0}
    pace |= {name: getattr(flags, name) for name in pace if getattr(flags, name) is not None}
    output = Path(flags.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    print(f"{_machine()}; {available} {'GPU' if device == 'cuda' else 'core'}(s)", flush=True)
    started = time.perf_counter()
    everything: list[CaseResult] = []
    asked = {"quick": flags.quick, "batches": flags.batches, "accuracy": flags.accuracy}
    with tempfile.TemporaryDirectory(prefix="ddp-bench-") as name:
        folder = Path(name)
        data = _Data(flags.data_dir, folder / "data", flags.quick)
        cases = plan_cases(systems, device, available, ranks)
        if flags.minutes < math.inf:
            cases = each_preset_first(cases)
        for case in cases:
            in_full = case.system is SYSTEMS[0] and not flags.quick
            on_gpu = ON_GPU_IN_FULL if in_full else ON_GPU
            variants = flags.variants or (on_gpu if device == "cuda" else usual)
            remaining = 60 * flags.minutes - (time.perf_counter() - started)
            measured = _measure(case, variants, device, pace, data, folder, left=remaining, **asked)
            everything.append(measured)
            # One write per case: an interruption loses only the running case.
            (output / f"{case.system.name}-{case.ranks}.json").write_text(json.dumps(_as_json(measured), indent=2))
            print(f"[{time.perf_counter() - started:4.0f} s]", "\n".join(describe(measured, everything)), flush=True)
        link = _link(everything, folder)
    print(LEGEND)
    print(communication(everything, link))
    print(*data.notes, sep="\n")
    if flags.quick:
        print("--quick: batches and models are cut down: ratios hold for these, images/s for no published system")
    figures = {
        "machine": _machine(),
        "device": device,
        "settings": {"quick": flags.quick, "variants": flags.variants, **pace},
        "cases": [_as_json(item) for item in everything],
        "link": asdict(link) if link else None,
        "notes": data.notes,
    }
    (output / "benchmark.json").write_text(json.dumps(figures, indent=2))
    print(f"figures: {output / 'benchmark.json'}")
    return 0


class _Data:
    """The folders of the data sets. A missing one is written, as noise, at its first use."""

    def __init__(self, given: str | None, made: Path, quick: bool) -> None:
        self._given = Path(given) if given else None
        self._made = made
        self._quick = quick
        self._folders: dict[str, Path] = {}
        self.notes: list[str] = []

    def is_real(self, name: str) -> bool:
        """Whether the data set ``name`` is real, not noise."""
        return self._given is not None and synthetic.is_there(name, self._given)

    def folder(self, name: str) -> str:
        """The folder of the data set ``name``."""
        if name not in self._folders:
            if self._given and self.is_real(name):
                self._folders[name] = self._given
            else:
                expected = {"voc2012": 60 if self._quick else 200}.get(name, 5_000 if self._quick else 50_000)
                samples = synthetic.write(name, self._made / name, expected)
                self._folders[name] = self._made / name
                self.notes.append(f"data: {name} is noise in the true format, {samples} samples: --data-dir lacks it")
        return str(self._folders[name])


def _measure(
    case: BenchmarkCase,
    variants: tuple[str, ...],
    device: str,
    pace: dict[str, Any],
    data: _Data,
    folder: Path,
    *,
    quick: bool,
    batches: tuple[int, ...] | None = None,
    accuracy: bool = False,
    left: float = math.inf,
) -> CaseResult:
    preset = case.system.preset
    measured = CaseResult(case, PRESETS[preset].values["data"]["name"])
    if case.missing:
        return measured
    if left <= 0:
        measured.problem = "not begun within --minutes"
        return measured
    # This module imports torch; the command line above does not need it.
    from tests.bench.trainer.worker import MeasurementSpec

    changes: dict[str, Any] = dict(QUICK[preset]) if quick else {}
    changes["data"] = {**changes.get("data", {}), "dir": data.folder(measured.data)}
    half = case.system.published_precision == "fp16"
    real = data.is_real(measured.data)
    if accuracy and not real:
        measured.notes.append(f"accuracy: not measured, --data-dir lacks {measured.data}")
    if batches is None:
        batches = case.system.sweep if device == "cuda" and not quick else ()
    spec = MeasurementSpec(
        preset=preset,
        changes=changes,
        contenders=_contenders(case, ("preset",) if half else variants, batches),
        train=accuracy and real,
        device=device,
        result=str(folder / "result.json"),
        half=half,
        data_parallel=case.system.mode == "dp",
        warm_up=1 if device == "cpu" else 13,
        **pace,
    )
    try:
        # A compiled step needs minutes before the first turn, also if the turns are short.
        patient = not quick or any("compile" in name for name in spec.contenders)
        seconds = min(120 + 900 * patient + (24 * 3600 if spec.train else 0), left)
        measured.about = launch.run(spec, case.ranks, folder, timeout=seconds, nodes=case.system.nodes)
    except launch.MeasurementFailed as error:
        measured.problem = str(error)
    return measured


def _contenders(case: BenchmarkCase, variants: tuple[str, ...], batches: tuple[int, ...]) -> list[str]:
    if case.system.mode == "dp":
        variants = tuple(name for name in variants if "compile" not in name)
    kinds = ("ours", "bare", "mute") if case.ranks > 1 else ("ours", "bare")
    names = ["documents", *(f"{kind}:{variant}" for variant in variants for kind in kinds)]
    return names + [f"ours:batch-{size}" for size in batches]


def _link(everything: list[CaseResult], folder: Path) -> Any:
    """The link measured during the runs, or otherwise between two processes started for it."""
    from tests.bench.trainer.network import Link
    from tests.bench.trainer.worker import MeasurementSpec

    links = [item.about["link"] for item in everything if item.about.get("link")]
    if not links:
        spec = MeasurementSpec("", {}, [], "cpu", 1, 0.0, str(folder / "link.json"))
        try:
            links = [launch.run(spec, 2, folder, timeout=120)["link"]]
        except launch.MeasurementFailed as error:
            print(f"benchmark: warning: no link measured: {error}", file=sys.stderr)
            return None
    return Link(**links[0])


def _find_device(parser: argparse.ArgumentParser, asked: str) -> tuple[str, int]:
    import torch

    from ddp_trainer.machine import available_cpus

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if asked == "cuda" and not gpus:
        parser.error("argument --device: torch sees no GPU; give cpu, or run where nvidia-smi lists one")
    return ("cuda", gpus) if gpus and asked != "cpu" else ("cpu", available_cpus())


def _machine() -> str:
    import torch

    name = platform.processor() or platform.machine()
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name(0)
    else:
        try:
            lines = Path("/proc/cpuinfo").read_text().splitlines()
            name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
        except (OSError, StopIteration):
            pass
    return f"{name}, torch {torch.__version__}, {os.cpu_count()} CPUs"


def _as_json(measured: CaseResult) -> dict[str, Any]:
    case = measured.case
    return {
        "system": case.system.name,
        "title": case.system.title,
        "preset": case.system.preset,
        "ranks": case.ranks,
        "published": {str(gpus): seconds for gpus, seconds in case.system.published.items()},
        "notAvailable": case.missing or measured.problem or None,
        "rows": [asdict(row) for row in rows(measured, None)],
        "notes": measured.notes,
        **measured.about,
    }
