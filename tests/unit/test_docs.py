"""Everything in the documentation that a user can type exists: commands, files, fields, columns, links."""

import importlib.util
import re
import shlex
import typing
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddp_operator.api import constants
from ddp_operator.api.crd import build_crd
from ddp_operator.api.parse import find_among, parse_manifest
from ddp_operator.api.status import Phase
from ddp_operator.manifests.children import build_children
from ddp_trainer.config.presets import PRESETS
from tests.support import ROOT
from tests.support.builders import job
from tests.support.tiers import TIERS

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "tests/README.md"])
README = (ROOT / "README.md").read_text(encoding="utf-8")
REFERENCE = (ROOT / "docs/reference.md").read_text(encoding="utf-8")

# Pages whose program needs several ranks, and the test that runs it.
RUN_BY = {
    "python.md": "tests/unit/ddp_cli/client/test_client.py",
    "tutorial.md": "tests/integration/test_tutorial.py",
    "your-script.md": "tests/unit/ddp_pod/test_trainer_status.py",
    "trainer.md": "tests/integration/test_trainer_spawn.py",
}


def fenced(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def commands(text: str) -> list[str]:
    """Return every command line: of indented and fenced blocks, and text in back-ticks on a separate line."""
    blocks = "\n".join(fenced(text, r"(?:sh|bash|console)"))
    outside = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    indented = re.findall(r"^    (\S.*)$", outside, flags=re.MULTILINE)
    inline = [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", outside)]
    return [line.strip().removeprefix("$ ") for line in [*blocks.splitlines(), *indented, *inline] if line.strip()]


def starting_with(program: str, text: str) -> list[list[str]]:
    results = [line for line in commands(text) if re.match(rf"(\S*/)?{program} ", line)]
    return [words_of(line) for line in results]


def words_of(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError:  # prose with an apostrophe
        return line.split()


def targets() -> set[str]:
    return set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def help_of(*arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the output of ``ddp … --help``."""
    from ddp_cli.commands import main

    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--help"])
    assert ended.value.code in (0, None)
    return capsys.readouterr().out


def make_targets_in(text: str) -> set[str]:
    words = [word for line in starting_with("make", text) for word in line[1:]]
    return {word for word in words if "=" not in word and not word.startswith(("-", "<"))}


def files_in_commands(text: str) -> set[str]:
    programs = ("ddp", "kubectl", "kopf", r"python3?", "pytest")
    words = [word for program in programs for line in starting_with(program, text) for word in line]
    return {word for word in words if re.fullmatch(r"(deploy|docs|tests|charts|trainer|operator)/[\w./-]+", word)}


def our_modules_in(text: str) -> set[str]:
    lines = [line for line in starting_with(r"(?:python3?|torchrun)", text) if "-m" in line[:-1]]
    modules = {line[line.index("-m") + 1] for line in lines}
    return {name for name in modules if name.startswith(("ddp_operator", "ddp_trainer", "tests"))}


def links_in(text: str) -> list[str]:
    links = re.findall(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)", text)
    return [link for link in links if "://" not in link]


def pages_with(find: Callable[[str], Collection[Any]]) -> pytest.MarkDecorator:
    """Parametrize a test with the pages that contain an item of the checked kind."""
    results = [path for path in PAGES if find(path.read_text(encoding="utf-8"))]
    return pytest.mark.parametrize("path", results, ids=lambda path: str(path.relative_to(ROOT)))


class TestCommands:
    @pages_with(make_targets_in)
    def test_make_targets_exist(self, path: Path) -> None:
        assert make_targets_in(path.read_text(encoding="utf-8")) - targets() == set()

    @pages_with(files_in_commands)
    def test_files_named_in_commands_exist(self, path: Path) -> None:
        named = files_in_commands(path.read_text(encoding="utf-8"))
        assert {name for name in named if not (ROOT / name).exists()} == set()

    @pages_with(our_modules_in)
    def test_modules_run_with_python_exist(self, path: Path) -> None:
        ours = our_modules_in(path.read_text(encoding="utf-8"))
        assert {name for name in ours if importlib.util.find_spec(name) is None} == set()

    @pages_with(partial(starting_with, "ddp"))
    def test_subcommands_and_flags_of_ddp_exist(self, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        for words in starting_with("ddp", path.read_text(encoding="utf-8")):
            if words[1].startswith("-"):
                assert words[1] in help_of(capsys=capsys)
                continue
            text = help_of(words[1], capsys=capsys)
            ours = words[2 : words.index("--")] if "--" in words else words[2:]
            for flag in ours:
                if flag.startswith("--"):
                    assert flag.split("=")[0] in text, " ".join(words)

    def test_commands_are_found_in_every_form(self) -> None:
        text = "Run `make a`, or\n\n    make b  # comment\n\n```sh\n$ make c X=1\n```\n\n```yaml\nmake: d\n```\n"
        assert starting_with("make", text) == [["make", "c", "X=1"], ["make", "b"], ["make", "a"]]


class TestPages:
    @pages_with(links_in)
    def test_links_lead_somewhere(self, path: Path) -> None:
        links = links_in(path.read_text(encoding="utf-8"))
        assert [link for link in links if not (path.parent / link).exists()] == []

    @pages_with(partial(fenced, language="yaml"))
    def test_yaml_is_accepted_by_operator(self, path: Path) -> None:
        blocks = fenced(path.read_text(encoding="utf-8"), "yaml")
        documents = {block: [item for item in yaml.safe_load_all(block) if isinstance(item, dict)] for block in blocks}
        profiles = find_among(item for document in documents.values() for item in document)
        for block, result in documents.items():
            if constants.KIND in {item.get("kind") for item in result}:
                parse_manifest(block, profiles=profiles)

    @pages_with(partial(fenced, language="python"))
    def test_python_runs(self, path: Path) -> None:
        """The blocks of a page are one program, in order, which asserts the page's claims."""
        if second := RUN_BY.get(path.name):
            assert path.name in (ROOT / second).read_text(encoding="utf-8")
            return
        blocks = fenced(path.read_text(encoding="utf-8"), "python")
        exec(compile("\n".join(blocks), str(path), "exec"), {})
        assert all("assert" in block for block in blocks)

    def test_every_decision_is_listed(self) -> None:
        index = (ROOT / "docs/adr/README.md").read_text(encoding="utf-8")
        kept = {path.name for path in (ROOT / "docs/adr").glob("[0-9]*.md")}
        assert set(re.findall(r"\((\d{4}-[\w-]+\.md)\)", index)) == kept


class TestProjectReadme:
    def test_names_two_commands(self) -> None:
        assert starting_with("make", README)[:2] == [["make", "demo"], ["make", "test"]]

    def test_is_read_in_two_minutes(self) -> None:
        assert len(README.splitlines()) <= 120


class TestReference:
    def test_columns_are_those_of_crd(self) -> None:
        _, _, section = REFERENCE.partition("`kubectl get ddp` prints")
        rows = re.findall(r"^\| ([A-Z/, ]+) \|", section, flags=re.MULTILINE)
        named = [name for row in rows for name in row.split(", ")]
        columns = build_crd()["spec"]["versions"][0]["additionalPrinterColumns"]
        shown = [column["name"].upper() for column in columns if not column.get("priority")]
        assert named == [name for name in shown if name != "AGE"]

    def test_phases_are_those_of_status(self) -> None:
        row = re.search(r"^\| PHASE \| (.*) \|$", REFERENCE, flags=re.MULTILINE)
        assert row is not None
        assert set(re.findall(r"[A-Z][a-z]+", row[1])) == set(typing.get_args(Phase))


def test_table_of_presets_is_complete() -> None:
    _, _, section = (ROOT / "docs/trainer.md").read_text(encoding="utf-8").partition("## Presets")
    assert set(re.findall(r"^\| `([\w-]+)` \|", section.partition("\n## ")[0], flags=re.MULTILINE)) == set(PRESETS)


def test_number_of_series_of_rank_is_that_of_exporter() -> None:
    from ddp_trainer.observability.metrics_table import BUCKETS, METRICS

    text = (ROOT / "docs/scaling.md").read_text(encoding="utf-8")
    claimed = re.search(r"(\d+) series per rank, (\d+) of which are buckets", text)
    assert claimed is not None
    histograms = [metric for metric in METRICS if metric.kind == "histogram"]
    buckets = sum(len(BUCKETS[metric.name]) + 1 for metric in histograms)  # one is +Inf
    series = len(METRICS) - len(histograms) + buckets + 2 * len(histograms)
    assert (int(claimed[1]), int(claimed[2])) == (series, buckets)


def test_tiers_are_those_of_report() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    _, _, section = text.partition("| tier |")
    rows = re.findall(r"^\| ([\w, -]+) \|", section.partition("\n\n")[0], flags=re.MULTILINE)
    named = {name.strip() for row in rows for name in row.split(",")}
    assert named == {tier.name for tier in TIERS} - {"benchmarks"}


def test_tests_that_security_model_rests_on_exist() -> None:
    text = (ROOT / "docs/security.md").read_text(encoding="utf-8")
    _, _, section = text.partition("## Threats")
    named = set(re.findall(r"`([\w/]*test_\w+\.py)`", section.partition("\n## ")[0]))
    assert len(named) > 10
    assert {name for name in named if not any(ROOT.glob(f"tests/**/{name}"))} == set()


def test_size_of_launcher_matches_page_on_scaling() -> None:
    (kilobytes,) = re.findall(r"the launcher's ConfigMap \(about (\d+) kB", (ROOT / "docs/scaling.md").read_text())
    (config_map,) = [child for child in build_children(job(), attempt=1, nodes=1) if "binaryData" in child]
    contents = [*config_map["data"].values(), *config_map["binaryData"].values()]
    assert sum(map(len, contents)) / 1000 == pytest.approx(int(kilobytes), rel=0.15)


def test_no_text_installs_the_unpublished_name() -> None:
    """A name that nobody owns in an index could be taken by anybody."""
    files = [*PAGES, *(ROOT / "deploy").rglob("*"), *(ROOT / "images").rglob("*"), *(ROOT / "operator").rglob("*.py")]
    files += (ROOT / "trainer").rglob("*.py")
    texts = {path: path.read_text(encoding="utf-8", errors="replace") for path in files if path.is_file()}
    pattern = re.compile(r"(pip|pipx|uv)\s+(install|add)[^\n]*\s['\"]?ddp[-_]operator\b(?!\s+charts)")
    assert not [path for path, text in texts.items() if path.name != "CHANGELOG.md" and pattern.search(text)]
