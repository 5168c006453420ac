"""The benchmark of the documents' systems: its cases, its loops on tiny data, and its report."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddp_sdk.rank_env import RankEnv
from ddp_trainer.config.presets import PRESETS
from ddp_trainer.config.run import resolve
from ddp_trainer.data import DataConfig
from ddp_trainer.data.datasets import load_datasets
from ddp_trainer.distributed.world import World
from tests.bench.trainer import cli, launch, synthetic, systems
from tests.bench.trainer.cli import main
from tests.bench.trainer.contenders import Bare, Ours, Switches, build_config, start_exporter
from tests.bench.trainer.documents import DocumentsLoop
from tests.bench.trainer.network import Link, parameter_server_seconds, ring_seconds
from tests.bench.trainer.report import CaseResult, communication, describe, rows
from tests.bench.trainer.systems import (
    BY_NAME,
    QUICK,
    SYSTEMS,
    VARIANTS,
    BenchmarkCase,
    changes_of,
    each_preset_first,
    plan_cases,
)
from tests.bench.trainer.worker import MeasurementSpec, _Runner, measure

CPU = torch.device("cpu")

pytestmark = pytest.mark.nightly


def planned(device: str, available: int, ranks: tuple[int, ...] | None = None) -> dict[str, list[tuple[int, str]]]:
    results: dict[str, list[tuple[int, str]]] = {}
    for case in plan_cases(SYSTEMS, device, available, ranks):
        results.setdefault(case.system.name, []).append((case.ranks, case.missing))
    return results


def test_every_system_of_documents_has_preset_row_and_label() -> None:
    assert (
        {system.preset for system in SYSTEMS} == set(PRESETS) - {"digits-resnet", "python-reference-gpt"} == set(QUICK)
    )
    assert set(planned("cpu", 2)) == {system.name for system in SYSTEMS}
    assert len(BY_NAME) == 2 * len(SYSTEMS)
    flags = cli.build_parser().parse_args(["--systems", "S0a, cifar10-resnet18-ddp"])
    assert [BY_NAME[name].name for name in flags.systems] == ["cifar10-resnet50", "cifar10-resnet18-ddp"]


@pytest.mark.parametrize(
    ("device", "available", "ranks", "system", "cases"),
    [
        ("cpu", 2, None, "cifar10-resnet50", [(1, "")]),
        ("cpu", 2, None, "cifar10-resnet50-dp", [(1, "DataParallel needs two GPUs, this machine has 0")]),
        ("cpu", 2, None, "cifar10-resnet50-ddp", [(1, ""), (2, "")]),
        ("cpu", 2, (1,), "cifar10-resnet50-ddp-fp16", [(1, "fp16 with a gradient scaler needs a GPU")]),
        ("cpu", 2, None, "cifar10-resnet18-ddp", [(2, "")]),
        ("cpu", 2, None, "cifar10-resnet18-ddp-4", [(4, "needs 4 cores, this machine has 2")]),
        ("cuda", 8, None, "cifar10-resnet50-dp", [(1, "")]),
        ("cuda", 8, None, "cifar10-resnet50-ddp-fp16", [(1, ""), (2, ""), (4, ""), (8, "")]),
        ("cuda", 1, None, "cifar10-resnet18-ddp", [(2, "needs 2 GPUs, this machine has 1")]),
        ("cuda", 8, (4,), "fashion-mnist-wideresnet", [(4, "")]),
    ],
)
def test_machine_runs_supported_systems_and_reports_missing_ones(
    device: str, available: int, ranks: tuple[int, ...] | None, system: str, cases: list[tuple[int, str]]
) -> None:
    assert planned(device, available, ranks)[system] == cases


def test_ring_cost_is_nearly_constant_and_server_cost_proportional() -> None:
    link = Link(bandwidth=1e9, latency=1e-4, what="")
    # 4 ranks, 1 GB: 2 * 3/4 s, and six messages' latency.
    assert ring_seconds(4, 1e9, link) == pytest.approx(1.5 + 6e-4)
    assert parameter_server_seconds(4, 1e9, link) == pytest.approx(8.0 + 2e-4)
    assert ring_seconds(1, 1e9, link) == parameter_server_seconds(1, 1e9, link) == 0.0
    text = communication([measured(documents=result(1.0))], Link(2**20 * 1000, 0.0, "a link"))
    ring, server = ([line for line in text.splitlines() if f" {name} " in line][-1] for name in ("ring", "server"))
    assert [float(word) for word in ring.split()[-4:]] == [100.0, 150.0, 175.0, 187.5]
    assert [float(word) for word in server.split()[-4:]] == [400.0, 800.0, 1600.0, 3200.0]
    assert "no link could be measured" in communication([], None)


@pytest.mark.parametrize("name", list(synthetic.EPOCH))
def test_synthetic_data_use_real_readers(name: str, tmp_path: Path) -> None:
    assert not synthetic.is_there(name, tmp_path)
    assert synthetic.write(name, tmp_path, 20) == 20
    assert synthetic.is_there(name, tmp_path)
    datasets = load_datasets(DataConfig(name=name, dir=str(tmp_path), verify=False, image_size=64))
    assert len(datasets.train) == 20
    assert len(datasets.validation) > 0


@pytest.mark.parametrize("preset", ["cifar10-resnet18", "fashion-mnist-wideresnet-large-batch", "cifar10-wideresnet"])
def test_all_contenders_train_on_same_amount_of_same_data(preset: str, tmp_path: Path) -> None:
    name = str(PRESETS[preset].values["data"]["name"])
    synthetic.write(name, tmp_path, 40)
    small = {} if preset == "cifar10-resnet18" else {"model": {"widen": 1}}
    changes: dict[str, Any] = {**small, "data": {"dir": str(tmp_path), "batch_size": 4}}
    world = World(RankEnv(), CPU)
    exporter = start_exporter(RankEnv())
    fast = {"precision": {"name": "fp32"}, "distributed": {"device": "cpu"}}
    documents = DocumentsLoop(build_config(preset, changes, as_published=True), world)
    ours = Ours(build_config(preset, changes, fast), world, exporter)
    bare = Bare(build_config(preset, changes, fast), world)
    assert documents.batch_size == ours.batch_size == bare.batch_size == len(bare.images) == 4
    models = {documents: documents.model, ours: ours.trainer.engine.model, bare: bare.parts.engine.model}
    for contender, model in models.items():
        steps = contender.steps()
        before = [parameter.clone() for parameter in model.parameters()]
        assert all(next(steps) >= 0.0 for _ in range(2))
        assert any(not torch.equal(item, second) for item, second in zip(before, model.parameters(), strict=True))
    assert ours.report_seconds(20) > 0
    assert ours.loading_seconds(2) > 0
    held, whole = ours.save_seconds(str(tmp_path / "checkpoints"))
    assert 0 < held < whole
    exporter.close()


def result(rate: float, batch: int = 10, **more: float) -> dict[str, Any]:
    common: dict[str, Any] = {"lowest": rate, "highest": rate, "rates": [rate], "data_seconds": 0.0}
    return {"images_per_second": rate, "step_seconds": batch / rate, **common, **more}


def measured(ranks: int = 1, **results: dict[str, Any]) -> CaseResult:
    named = {name.replace("_", ":"): value for name, value in results.items()}
    case = BenchmarkCase(BY_NAME["cifar10-resnet50-ddp" if ranks > 1 else "cifar10-resnet50"], ranks)
    return CaseResult(case, "cifar10", {"results": named, "gradient_bytes": 100 * 2**20})


def test_steps_time_is_shared_out_and_rates_are_compared() -> None:
    first = measured(documents=result(10.0, data_seconds=0.4), ours_fp32=result(50.0), bare_fp32=result(62.5))
    two = measured(
        2,
        documents=result(12.0),
        ours_fp32=result(80.0, data_seconds=0.01, loading_seconds=0.02),
        bare_fp32=result(100.0, step_seconds=0.1),
        mute_fp32=result(125.0, step_seconds=0.07),
    )
    results = {row.who: row for row in rows(first, first)}
    assert (results["documents"].data, results["documents"].compute) == pytest.approx((0.4, 0.6))
    ours = results["ours:fp32"]
    assert (ours.to_documents, ours.of_bare, ours.epoch_seconds) == pytest.approx((5.0, 0.8, 1000.0))
    assert (ours.communication, ours.efficiency) == (0.0, None)
    ours = {row.who: row for row in rows(two, first)}["ours:fp32"]
    shares = (ours.efficiency, ours.data, ours.communication, ours.compute)
    assert shares == pytest.approx((80 / (2 * 50), 0.02, 0.03, 10 / 80 - 0.05))


def test_table_shows_documents_figures_and_why_system_is_missing() -> None:
    failed = CaseResult(BenchmarkCase(BY_NAME["cifar10-resnet18"], 1), "cifar10", problem="rank 0 ended with 1")
    lacking = CaseResult(BenchmarkCase(BY_NAME["cifar10-resnet50-dp"], 1, "DataParallel needs two GPUs"), "cifar10")
    some = measured(documents=result(10.0), ours_fp32={"failed": "UserError: no"})
    some.about["trained"] = {"published": {"accuracy": 0.2731, "epochs": 1, "seconds": 9.5}}
    everything = [some, lacking, failed]
    text = "\n".join(line for item in everything for line in describe(item, everything))
    for expected in (
        "1 GPU: 13.2 s an epoch; that is 3788 images/s",
        "not available: DataParallel needs two GPUs",
        "not available: rank 0 ended with 1",
        "ours:fp32                not available: UserError: no",
        "4 GPUs: 19.1 s an epoch",
        "accuracy of published: 0.2731 after 1 epoch(s)",
    ):
        assert expected in text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--systems", "S9"], "--systems: 'S9' is not known; choose from cifar10-resnet50, "),
        (["--ranks", "0"], "--ranks: '0' is not a list of numbers above 0"),
        (["--variants", "int4"], "--variants: 'int4' is not known"),
        (["--device", "cuda"], "--device: torch sees no GPU"),
    ],
)
def test_wrong_flags_are_refused(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        main(flags)
    assert message in capsys.readouterr().err


def test_unavailable_system_is_in_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.bench.trainer.cli._link", lambda everything, folder: None)
    assert main(["--device", "cpu", "--systems", "cifar10-resnet50-dp", "--output-dir", str(tmp_path)]) == 0
    document = json.loads((tmp_path / "benchmark.json").read_text())
    assert document["cases"][0]["notAvailable"].startswith("DataParallel")
    assert document["cases"][0]["published"] == {"4": 19.1}
    assert json.loads((tmp_path / "cifar10-resnet50-dp-1.json").read_text()) == document["cases"][0]


def test_ranks_of_two_nodes_see_their_own_half_of_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES")
    places = [tuple(launch._environment(rank, 4, 29500, nodes=2)[name] for name in names) for rank in (1, 2)]
    assert places == [("1", "1", "2", "4,5"), ("2", "0", "2", "6,7")]


@pytest.mark.parametrize(
    ("system", "variants", "batches", "contenders"),
    [
        ("cifar10-resnet50-dp", ("fp32", "compile"), (), ["documents", "ours:fp32", "bare:fp32"]),
        ("cifar10-resnet50", (), (32, 64), ["documents", "ours:batch-32", "ours:batch-64"]),
    ],
)
def test_contenders_follow_system(
    system: str, variants: tuple[str, ...], batches: tuple[int, ...], contenders: list[str]
) -> None:
    assert cli._contenders(BenchmarkCase(BY_NAME[system], 1), variants, batches) == contenders
    assert changes_of("batch-64") == {"data": {"batch_size": 64}}
    assert {*systems.ON_GPU, *systems.ON_GPU_IN_FULL} <= VARIANTS.keys()
    for name in VARIANTS:
        resolve("cifar10-resnet50", None, changes_of(name))


def test_accuracy_is_that_of_documents_epochs_and_not_taken_from_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"max_steps": 2, "model": {"width": 4}}
    spec = MeasurementSpec("digits-resnet", changes, [], "cpu", 1, 0.0, "", train=True)
    assert measure(spec, World(RankEnv(), CPU))["trained"].keys() == {"preset", "published"}

    specs: list[MeasurementSpec] = []
    monkeypatch.setattr(launch, "run", lambda spec, *_, **__: specs.append(spec) or {"results": {}})
    data = cli._Data(None, tmp_path, True)
    case = BenchmarkCase(BY_NAME["cifar10-resnet18"], 1)
    results = cli._measure(case, (), "cuda", {"rounds": 1, "seconds": 0.0}, data, tmp_path, quick=True, accuracy=True)
    assert not specs[0].train
    assert results.notes == ["accuracy: not measured, --data-dir lacks cifar10"]


def test_reasons_are_result_if_no_system_can_be_built() -> None:
    spec = MeasurementSpec("cifar10-resnet18", {"data": {"dir": "/nowhere"}}, ["ours:fp32"], "cpu", 2, 0.0, "")
    results = measure(spec, World(RankEnv(), torch.device("cpu")))["results"]
    assert "CIFAR-10 is not complete in /nowhere" in results["ours:fp32"]["failed"]


def test_batches_built_in_other_turns_are_not_counted() -> None:
    runner = object.__new__(_Runner)
    runner.switches = Switches()
    runner.contender = SimpleNamespace(prefetched=4)
    runner._steps = iter([100.0] * 4 + [1.0] * 3)
    assert runner.take(2, World(RankEnv(), CPU))[1] == 2.0


def test_short_run_measures_presets_first_and_reports_rest(tmp_path: Path) -> None:
    cases = each_preset_first(plan_cases(SYSTEMS, "cuda", 1, None))
    assert sorted(map(str, cases)) == sorted(map(str, plan_cases(SYSTEMS, "cuda", 1, None)))
    assert len({case.system.preset for case in cases[:6] if not case.missing}) == 6
    results = cli._measure(cases[0], (), "cuda", {}, cli._Data(None, tmp_path, True), tmp_path, quick=True, left=0.0)
    assert results.problem == "not begun within --minutes"
