"""The command line of the benchmark."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_trainer.benchmark import launch, synthetic
from ddp_trainer.benchmark.report import Measured, communication, plot, rows, table
from ddp_trainer.benchmark.systems import BY_ID, QUICK_BY_NAME, SYSTEMS, Case, System, plan_cases
from ddp_trainer.errors import UserError, require

if TYPE_CHECKING:
    from ddp_trainer.benchmark.worker import Spec

# What a run in --quick has for all its turns together; a rank needs some seconds before that.
_QUICK = {"rounds": 2, "seconds": 0.5}
_FULL = {"rounds": 5, "seconds": 3.0}
# Ways to run the trainer; contenders.py has what each changes in a preset.
_VARIANTS = (
    "preset", "fp32", "nchw", "tf32", "bf16", "fp16", "compile", "compile-graphs", "plain-ddp", "bf16-hook", "bf16-all",
)  # fmt: skip


def build_parser() -> argparse.ArgumentParser:
    """The flags; ``ddp bench`` passes the same ones on."""
    parser = argparse.ArgumentParser(
        prog="python -m ddp_trainer.benchmark",
        description="Measure the trainer against the documents' own loops and the bare step, in turn.",
        allow_abbrev=False,
    )
    parser.add_argument("--quick", action="store_true", help="about a minute on two cores: small batches, few systems")
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: cuda if there is one"
    )
    parser.add_argument("--systems", metavar="A,B", help=f"of {', '.join(BY_ID)}; default: all, or a few with --quick")
    parser.add_argument("--ranks", metavar="N,M", help="numbers of ranks to try with DDP; default: 1, 2 and all")
    parser.add_argument("--variants", metavar="A,B", help=f"of {', '.join(_VARIANTS)}; default: preset and fp32, on "
                        "cuda fp32, tf32, bf16 and compile")  # fmt: skip
    parser.add_argument("--rounds", type=int, metavar="N", help="turns of each contender")
    parser.add_argument("--seconds", type=float, metavar="X", help="length of a turn")
    parser.add_argument("--data-dir", metavar="DIR", help="the real data sets; what is missing there is made of noise")
    parser.add_argument(
        "--output-dir", metavar="DIR", default="bench-results", help="for benchmark.json and benchmark.png"
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and report; returns the exit code: 0, or 2 for a flag that makes no sense."""
    flags = build_parser().parse_args(arguments)
    try:
        run(flags)
    except UserError as error:
        print(f"benchmark: error: {error}", file=sys.stderr)
        return 2
    return 0


def run(flags: argparse.Namespace) -> None:
    """Measure what ``flags`` ask for, print the table and write the files."""
    device, available = _find_device(flags.device)
    ranks = _numbers("--ranks", flags.ranks) or ((min(2, available),) if flags.quick else None)
    systems = _systems(flags)
    variants = _variants(flags, device)
    pace = dict(_QUICK if flags.quick else _FULL)
    pace |= {name: getattr(flags, name) for name in ("rounds", "seconds") if getattr(flags, name) is not None}
    output = Path(flags.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    print(f"{_machine()}; {available} {'GPU' if device == 'cuda' else 'core'}(s)", flush=True)
    started = time.perf_counter()
    everything: list[Measured] = []
    with tempfile.TemporaryDirectory(prefix="ddp-bench-") as name:
        folder = Path(name)
        data = _Data(flags.data_dir, folder / "data", flags.quick)
        for case in plan_cases(systems, device, available, ranks):
            measured = _measure(case, variants, device, pace, data, folder, quick=flags.quick)
            everything.append(measured)
            _progress(measured, time.perf_counter() - started)
        link = _link(everything, folder)
    print(table(everything))
    print(communication(everything, link))
    for note in data.notes:
        print(note)
    if flags.quick:
        print(
            "--quick: batches and models are cut down; ratios hold for these, images/s are not the documents' systems'"
        )
    print(plot(everything, output / "benchmark.png"))
    document = {
        "machine": _machine(),
        "device": device,
        "settings": {"quick": flags.quick, "variants": variants, **pace},
        "cases": [_as_json(one) for one in everything],
        "link": asdict(link) if link else None,
        "notes": data.notes,
    }
    (output / "benchmark.json").write_text(json.dumps(document, indent=2))
    print(f"figures: {output / 'benchmark.json'}")


class _Data:
    """The folders of the data sets, written on demand."""

    def __init__(self, given: str | None, made: Path, quick: bool) -> None:
        self._given, self._made, self._quick = given and Path(given), made, quick
        self._folders: dict[str, str] = {}
        self.notes: list[str] = []

    def folder(self, name: str) -> str:
        """Where the data set ``name`` lies."""
        if name not in self._folders:
            if self._given and synthetic.is_there(name, self._given):
                self._folders[name] = str(self._given)
            else:
                wanted = {"voc2012": 60 if self._quick else 200}.get(name, 5_000 if self._quick else 50_000)
                samples = synthetic.write(name, self._made / name, wanted)
                self._folders[name] = str(self._made / name)
                self.notes.append(f"data: {name} is noise in the true format, {samples} samples, as it is not at hand")
        return self._folders[name]


def _measure(
    case: Case, variants: tuple[str, ...], device: str, pace: dict[str, Any], data: _Data, folder: Path, *, quick: bool
) -> Measured:
    from ddp_trainer.config.run import resolve

    try:
        name = resolve(case.system.preset, None, {}).data.name
    except UserError as error:
        return Measured(case, "cifar10", problem=f"the preset {case.system.preset} can't be had: {error}")
    measured = Measured(case, name)
    if case.missing:
        return measured
    # A module that imports torch; the command line above is answered without it.
    from ddp_trainer.benchmark.worker import Spec

    changes: dict[str, Any] = dict(QUICK_BY_NAME.get(case.system.preset, {})) if quick else {}
    changes["data"] = {**changes.get("data", {}), "dir": data.folder(name)}
    half = case.system.published_precision == "fp16"
    spec = Spec(
        preset=case.system.preset,
        changes=changes,
        contenders=_contenders(case, ("preset",) if half else variants, quick=quick),
        device=device,
        result=str(folder / "result.json"),
        half=half,
        data_parallel=case.system.way == "dp",
        warm_up=1 if device == "cpu" else 5,
        **pace,
    )
    try:
        # A compiled step takes its minutes before the first turn, also where the turns are short.
        patient = not quick or any("compile" in name for name in spec.contenders)
        measured.about = launch.run(spec, case.ranks, folder, timeout=120 + 900 * patient)
        if device == "cpu" and case.ranks == 1 and not quick:
            _measure_memory(measured, spec, variants[0], folder)
    except launch.Failed as error:
        measured.problem = str(error)
    return measured


def _measure_memory(measured: Measured, spec: Spec, variant: str, folder: Path) -> None:
    """Add the peak memory of ours and of the bare step, which on a CPU takes a process of its own for each."""
    for name in (f"ours:{variant}", f"bare:{variant}"):
        alone = launch.run(replace(spec, contenders=[name], rounds=1, seconds=0.0), 1, folder, timeout=600)
        result = alone["results"][name]
        if measured.result(name) is not None and "failed" not in result:
            measured.about["results"][name] |= {key: result[key] for key in ("peak_bytes", "cache_bytes")}


def _contenders(case: Case, variants: tuple[str, ...], *, quick: bool) -> list[str]:
    if case.system.way == "dp":
        return ["documents"]
    names = ["documents"]
    for variant in variants:
        names += [f"ours:{variant}", f"bare:{variant}"]
        if case.ranks > 1:
            names.append(f"mute:{variant}")
    return names if quick else [*names, f"silent:{variants[-1]}"]


def _link(everything: list[Measured], folder: Path) -> Any:
    """The link measured on the way, or else between two processes started for it."""
    from ddp_trainer.benchmark.network import Link
    from ddp_trainer.benchmark.worker import Spec

    links = [one.about["link"] for one in everything if one.about.get("link")]
    if not links:
        spec = Spec("", {}, [], "cpu", 1, 0.0, str(folder / "link.json"))
        try:
            links = [launch.run(spec, 2, folder, timeout=120)["link"]]
        except launch.Failed as error:
            print(f"benchmark: warning: no link measured: {error}", file=sys.stderr)
            return None
    return Link(**links[0])


def _progress(measured: Measured, seconds: float) -> None:
    case = measured.case
    what = "not available" if case.missing or measured.problem else "measured"
    print(f"[{seconds:4.0f} s] {case.system.id}, {case.ranks} rank(s): {what}", flush=True)


def _find_device(asked: str) -> tuple[str, int]:
    import torch

    from ddp_trainer.machine import available_cpus

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    require(asked != "cuda" or gpus > 0, "--device", "torch sees no GPU", "give cpu, or run where nvidia-smi lists one")
    return ("cuda", gpus) if gpus and asked != "cpu" else ("cpu", available_cpus())


def _systems(flags: argparse.Namespace) -> tuple[System, ...]:
    if not flags.systems:
        return tuple(system for system in SYSTEMS if not flags.quick or system.quick is not None)
    names = [name.strip() for name in flags.systems.split(",") if name.strip()]
    for name in names:
        require(name in BY_ID, "--systems", f"{name!r} is not known", f"choose from {', '.join(BY_ID)}")
    return tuple(BY_ID[name] for name in names)


def _variants(flags: argparse.Namespace, device: str) -> tuple[str, ...]:
    if not flags.variants:
        if device == "cuda":
            return ("bf16", "compile") if flags.quick else ("fp32", "tf32", "bf16", "compile")
        return ("preset",) if flags.quick else ("preset", "fp32")
    names = tuple(name.strip() for name in flags.variants.split(",") if name.strip())
    for name in names:
        require(name in _VARIANTS, "--variants", f"{name!r} is not known", f"choose from {', '.join(_VARIANTS)}")
    return names


def _numbers(flag: str, text: str | None) -> tuple[int, ...] | None:
    if not text:
        return None
    words = [word.strip() for word in text.split(",")]
    for word in words:
        require(word.isdecimal() and int(word) > 0, flag, f"{word!r} is no number of ranks", "give for example 1,2")
    return tuple(int(word) for word in words)


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


def _as_json(measured: Measured) -> dict[str, Any]:
    case = measured.case
    return {
        "system": case.system.id,
        "title": case.system.title,
        "preset": case.system.preset,
        "ranks": case.ranks,
        "published": {str(gpus): seconds for gpus, seconds in case.system.published.items()},
        "notAvailable": case.missing or measured.problem or None,
        "rows": [asdict(row) for row in rows(measured, None)],
        **measured.about,
    }
