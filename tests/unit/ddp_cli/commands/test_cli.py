"""The command line: subcommands, refusals, exit codes. Nothing here starts a pod."""

from __future__ import annotations

import io
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddp_cli import commands
from ddp_cli.__main__ import COMMANDS, main
from ddp_cli.client.hooks import Command
from ddp_cli.commands import build_parser, submit
from ddp_cli.commands import run as cli_run
from ddp_cli.commands.arguments import explain_elsewhere
from ddp_cli.local.folder import ENV_RUN_FOLDER
from tests.support import ROOT
from tests.support.builders import claiming

GOOD: dict[str, Any] = {
    "apiVersion": "ddp-operator.dev/v1alpha1",
    "kind": "DDPTrainingJob",
    "metadata": {"name": "x"},
    "spec": {"template": {"spec": {"containers": [{"name": "trainer", "image": "i", "command": ["python", "t.py"]}]}}},
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(**changes: Any) -> str:
    body = {**GOOD, "spec": {**GOOD["spec"], **changes}}
    Path("job.yaml").write_text(yaml.safe_dump(body))
    return "job.yaml"


def prepare(*words: str, **changes: Any) -> Any:
    """Return the plan of a run that is not started."""
    import argparse

    parser = argparse.ArgumentParser()
    cli_run.add_arguments(parser)
    before, _, after = " ".join(words).partition("-- ")
    arguments = parser.parse_args([write(**changes), *before.split()])
    arguments.extra = after.split()
    arguments.command_line = "ddp run job.yaml"
    return cli_run._prepare(Path("job.yaml").read_text(), arguments)


def test_run_that_python_started_names_no_command_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    assert prepare().command == "ddp run job.yaml"
    monkeypatch.setenv(ENV_RUN_FOLDER, "3")
    assert prepare().command == "client.train(…) or client.submit(…)"


def test_installed_programs_have_the_commands_of_features() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for name, target in project["scripts"].items():
        assert EntryPoint(name, target, "console_scripts").load() is main


def test_cli_runs_as_module() -> None:
    words = [sys.executable, "-m", "ddp_cli", "render", "nowhere.yaml"]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, "nowhere.yaml" in ran.stderr) == (2, True), ran


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["why", "--foo"], "unrecognized arguments: --foo"),
        (["list", "foo"], "unrecognized arguments: foo"),
        (["run", "x.py", "--nodse", "2"], "did you mean --nodes?"),
        (["init", "--cpu", "train.py"], "unrecognized arguments: --cpu; did you mean --cpus?"),
        (["run", "x.py", "--lr", "2"], "put arguments of the script after --"),
    ],
)
def test_unknown_argument_shows_usage_of_its_command(
    words: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    shown = capsys.readouterr().err
    assert (shown.startswith(f"usage: ddp {words[0]}"), hint in shown) == (True, True)


def test_submit_without_cluster_reports_errors_of_file_first(
    monkeypatch: pytest.MonkeyPatch, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(folder))
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    for changes, code, message in (
        ({"nodes": 0}, 2, "spec.nodes"),
        ({}, 4, "no cluster is configured"),
    ):
        assert main(["submit", write(**changes)]) == code
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"nodes": 0}, "spec.nodes"),
        ({"node": 2}, 'unknown field "spec.node"; did you mean nodes?'),
        ({"suspend": True}, "spec.suspend: a suspended job starts no pods"),
        ({"procPerNode": "gpu"}, "spec.procPerNode"),
        (
            {"template": claiming(), "procPerNode": 1},
            "spec.template.spec.resourceClaims: not supported on this machine: there is no cluster device driver",
        ),
    ],
)
def test_invalid_manifest_exits_2_names_field_and_leaves_no_folder(
    changes: dict[str, Any], words: str, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    assert main(["run", write(**changes)]) == 2
    assert words in capsys.readouterr().err
    assert not (folder / "ddp-runs").exists()


def test_option_that_breaks_rule_is_refused_as_file_would_be(capsys: pytest.CaptureFixture[str]) -> None:
    file = write(nodes=2, elastic={"minNodes": 2, "maxNodes": 4})
    assert main(["run", file, "--nodes", "5"]) == 2
    assert "spec.nodes: Invalid value: must be between elastic.minNodes and elastic.maxNodes" in capsys.readouterr().err


def test_render_shows_sizes_instead_of_the_launcher(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["render", write()]) == 0
    short = capsys.readouterr().out
    assert len(short) < 20_000
    assert " characters)" in short
    assert main(["render", "--launcher", write()]) == 0
    (launcher,) = (item for item in yaml.safe_load_all(capsys.readouterr().out) if item.get("binaryData"))
    assert len(str(launcher)) > 100_000


def test_secret_that_is_not_in_file_is_refused_before_anything_runs(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    container = {**GOOD["spec"]["template"]["spec"]["containers"][0], "envFrom": [{"secretRef": {"name": "keys"}}]}
    assert main(["run", write(template={"spec": {"containers": [container]}})]) == 2
    assert 'Secret "keys" is not in the file' in capsys.readouterr().out
    (run_folder,) = (path for path in (folder / "ddp-runs").iterdir() if path.name not in ("claims", ".gitignore"))
    assert list((run_folder / "logs").iterdir()) == []


def test_error_of_our_own_is_no_failure_of_job(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ddp_cli.client.workdir.check_manifest", lambda text, code: 1 // 0)
    assert main(["render", write()]) == 70
    assert capsys.readouterr().err.endswith("ddp render: internal error in ddp; please report the traceback above\n")


@pytest.mark.parametrize(
    "words",
    [
        ["--nodes", "0"],
        ["--procs", "-1"],
        ["--nodes", "x"],
        ["--metrics-port", "80"],
        ["--metrics-port", "x"],
        *(["--name", name] for name in ("../up", "/tmp/x", "a/b", "..", ".hidden", "", "-x", "a\nb")),
    ],
)
def test_bad_numbers_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", write(), *words])
    assert ended.value.code == 2
    assert words[0] in capsys.readouterr().err


def test_options_change_job_and_its_objects() -> None:
    plan = prepare("--nodes 3 --procs 2 --name other -- --epochs 1")
    (job,) = [child for child in plan.children if child["kind"] == "Job"]
    assert (job["spec"]["completions"], plan.nproc, plan.folder_name) == (3, 2, "other")
    line = job["spec"]["template"]["spec"]["containers"][0]
    assert [*line["command"], *line["args"]][-3:] == ["t.py", "--epochs", "1"]
    assert plan.resource["spec"]["nodes"] == 3


@pytest.mark.parametrize("words", [["list", "-n", "x"], ["why", "x", "-n", "x"]])
def test_missing_extra_is_named(words: list[str]) -> None:
    write()
    hidden = ("kubernetes",)
    code = f"import sys; sys.modules.update(dict.fromkeys({hidden!r}))"
    code += "; from ddp_cli.__main__ import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert f"{sys.executable} -m pip install" in done.stderr
    assert "'kubernetes>=31'" in done.stderr
    assert "ddp-operator" not in done.stderr  # no index has it
    assert "Traceback" not in done.stderr


def test_help_imports_no_heavy_module() -> None:
    code = (
        "import sys, ddp_cli.local.runner; from ddp_cli.__main__ import COMMANDS; "
        "from ddp_cli.commands import build_parser; "
        "build_parser(COMMANDS, *(command.name for command in COMMANDS)); print(*sys.modules)"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    heavy = {"torch", "matplotlib", "rich", "kubernetes", "kopf", "aiohttp", "numpy"}
    assert heavy & set(loaded.stdout.split()) == set()


def write_module(folder: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> tuple[Command, ...]:
    """Return the commands with another one, whose module has this source."""
    (folder / "broken.py").write_text(source)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "broken", raising=False)
    return (*COMMANDS, Command("broken", "broken", "a command of a feature"))


@pytest.mark.parametrize(
    "source",
    ["def", "1 / 0", "import ddp_cli.nothing", "def add_arguments(parser):\n    1 / 0", "raise ModuleNotFoundError"],
)
def test_feature_that_cannot_be_imported_breaks_its_own_command_only(
    source: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    listed = write_module(folder, monkeypatch, source)
    assert commands.main(listed, ["broken"]) == 70
    shown = capsys.readouterr().err
    assert "Traceback" in shown
    assert shown.endswith("ddp broken: internal error in ddp; please report the traceback above\n")
    with pytest.raises(SystemExit) as ended:
        commands.main(listed, ["--help"])
    assert ended.value.code == 0
    assert "a command of a feature" in capsys.readouterr().out
    assert commands.main(listed, ["render", write()]) == 0


def test_missing_package_is_named_with_its_requirement(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes_validate", None)
    assert commands.main(write_module(folder, monkeypatch, "import kubernetes_validate"), ["broken"]) == 2
    assert "pip install 'kubernetes-validate>=" in capsys.readouterr().err


def test_list_of_commands_has_its_order() -> None:
    from ddp_cli.features import FEATURES

    added = [command for feature in FEATURES for command in feature.commands]
    own = [command for command in COMMANDS if command not in added]
    assert own == [*commands.COMMANDS]
    assert sorted(COMMANDS) == sorted([*own, *added])
    for command in added:
        before = COMMANDS[: COMMANDS.index(command)]
        assert [entry.name for entry in before if entry in own][-1] == command.after


@pytest.mark.parametrize(
    ("encoding", "printed"), [("ascii", "ddp r?n: "), ("latin-1", "ddp rün: "), ("utf-8", "ddp rün: ")]
)
def test_characters_that_output_lacks_are_replaced(
    monkeypatch: pytest.MonkeyPatch, encoding: str, printed: str
) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="strict")
    monkeypatch.setattr(sys, "stderr", stream)
    assert main(["rün"]) == 2
    stream.flush()
    assert stream.buffer.getvalue().decode(encoding).startswith(printed)  # type: ignore[attr-defined]


_START = [command.name for command in COMMANDS if command.script == "file" and command.name != "init"]


def list_flags(command: str) -> list[str]:
    """Return the long options of a command."""
    return commands._list_flags(load(command).parser)


def load(command: str) -> commands.LoadedCommand:
    """Return a command with its module."""
    return build_parser(COMMANDS, command)[1][command]


@pytest.mark.parametrize("command", _START)
def test_option_of_one_command_is_known_or_explained_in_others(command: str) -> None:
    own = {"--steps", "--seed", "--timeout", "--json", "--keep", "--output", "--strict"}  # of one subject
    every = {flag for other in _START for flag in list_flags(other)} - own
    unknown = every.difference(list_flags(command))
    assert [flag for flag in sorted(unknown) if not explain_elsewhere(load(command).module, flag)] == []
    assert [flag for flag in list_flags(command) if explain_elsewhere(load(command).module, flag)] == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "submit job.yaml --python /usr/bin/python3",
            "--python /usr/bin/python3; the pods use the Python of their image",
        ),
        ("run job.yaml -n team", "-n team; it is for this machine: `ddp submit`"),
        ("run job.yaml --replace", "--replace; it is for this machine: `ddp submit`"),
        ("submit job.yaml --cpu", "--cpu: only for a script; remove the GPUs from job.yaml instead"),
    ],
)
def test_option_that_command_cannot_honour_is_refused_with_remedy(
    capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    write()
    Path("t.py").write_text("import torch")
    try:
        code = main(line.split())
    except SystemExit as end:
        code = int(end.code or 0)
    assert code == 2
    assert message in capsys.readouterr().err


def test_script_with_cpu_requests_no_gpu_in_cluster() -> None:
    Path("t.py").write_text("import torch")
    parser, _ = build_parser(COMMANDS, "submit")
    arguments = parser.parse_args(["submit", "t.py", "--cpu"])
    arguments.extra = []
    text, _ = submit.read_manifest(arguments)
    [container] = yaml.safe_load(text)["spec"]["template"]["spec"]["containers"]
    assert "limits" not in container["resources"]
