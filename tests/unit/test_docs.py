"""Everything in the documentation that a user can type exists: commands, files, fields, columns, links."""

import re
import typing
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddp_operator.api import constants
from ddp_operator.api.crd import build_crd
from ddp_operator.api.job_file import find_among, parse_manifest
from ddp_operator.api.status import Phase
from ddp_operator.features import SCHEMA
from ddp_operator.manifests.children import build_children
from ddp_trainer.config.presets import PRESETS
from tests.support import ROOT
from tests.support.builders import job
from tests.support.tiers import TIERS

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "docs/llms.txt", ROOT / "tests/README.md"])
README = (ROOT / "README.md").read_text(encoding="utf-8")
REFERENCE = (ROOT / "docs/reference.md").read_text(encoding="utf-8")

# Pages whose program needs several ranks, and the test that runs it.
RUN_BY = {
    "python.md": "tests/unit/ddp_cli/client/test_client.py",
    "tutorial.md": "tests/integration/test_tutorial.py",
    "trainer.md": "tests/integration/test_trainer_spawn.py",
}


def fenced(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def outside_of_fences(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def commands(text: str) -> list[str]:
    """Return every command line: of indented and fenced blocks, and text in back-ticks on a separate line."""
    blocks = "\n".join(fenced(text, r"(?:sh|bash|console)"))
    outside = outside_of_fences(text)
    indented = re.findall(r"^    (\S.*)$", outside, flags=re.MULTILINE)
    inline = [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", outside)]
    return [line.strip().removeprefix("$ ") for line in [*blocks.splitlines(), *indented, *inline] if line.strip()]


def links_in(text: str) -> list[tuple[str, str]]:
    """Return the links to files, each with its anchor."""
    links = re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", text)
    return [(link, anchor) for link, anchor in links if "://" not in link]


def find_anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and MkDocs build them."""
    headings = re.findall(r"^#+ (.*)$", outside_of_fences(page.read_text(encoding="utf-8")), re.MULTILINE)
    texts = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in texts}


def pages_with(find: Callable[[str], Collection[Any]]) -> pytest.MarkDecorator:
    """Parametrize a test with the pages that contain an item of the checked kind."""
    results = [path for path in PAGES if find(path.read_text(encoding="utf-8"))]
    return pytest.mark.parametrize("path", results, ids=lambda path: str(path.relative_to(ROOT)))


def _defines(module: str, name: str) -> bool:
    """Return whether a module defines a function; modules without a building are the operator's."""
    building = "" if module.startswith("ddp_") else "ddp_operator/"
    path = ROOT / "operator" / f"{building}{module}.py"
    return path.exists() and re.search(rf"^ *(async )?def {name}\(", path.read_text(), re.MULTILINE) is not None


class TestPages:
    @pages_with(links_in)
    def test_links_lead_to_file_and_heading(self, path: Path) -> None:
        broken = []
        for link, anchor in links_in(path.read_text(encoding="utf-8")):
            target = path.parent / link if link else path
            if not target.exists() or (anchor and target.suffix == ".md" and anchor not in find_anchors(target)):
                broken.append(f"{link}#{anchor}")
        assert broken == []

    @pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
    def test_page_has_no_mark_of_merge(self, path: Path) -> None:
        assert re.search(r"^(<{7}|>{7}) ", path.read_text(encoding="utf-8"), re.MULTILINE) is None

    @pages_with(partial(fenced, language="yaml"))
    def test_yaml_is_accepted_by_operator(self, path: Path) -> None:
        blocks = fenced(path.read_text(encoding="utf-8"), "yaml")
        documents = {block: [item for item in yaml.safe_load_all(block) if isinstance(item, dict)] for block in blocks}
        profiles = find_among(item for document in documents.values() for item in document)
        for block, result in documents.items():
            if constants.KIND in {item.get("kind") for item in result}:
                parse_manifest(block, SCHEMA, profiles=profiles)

    @pages_with(partial(fenced, language="python"))
    def test_python_runs(self, path: Path) -> None:
        """The blocks of a page are one program, in order, which asserts the page's claims."""
        if second := RUN_BY.get(path.name):
            assert path.name in (ROOT / second).read_text(encoding="utf-8")
            return
        blocks = fenced(path.read_text(encoding="utf-8"), "python")
        exec(compile("\n".join(blocks), str(path), "exec"), {})
        assert all("assert" in block for block in blocks)

    def test_page_on_checkpoints_shows_stop_pattern_of_tutorial(self) -> None:
        (script,) = fenced((ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8"), "python")
        (pattern,) = fenced((ROOT / "docs" / "checkpoints.md").read_text(encoding="utf-8"), "py")
        lines = iter(script.splitlines())
        assert all(line in lines for line in pattern.splitlines() if line != "…"), "in the script's order"

    def test_functions_of_architecture_exist(self) -> None:
        text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
        named = re.findall(r"`([a-z_]+(?:/[a-z_]+)+)\.(_?[a-z_]{3,})`", text)
        assert len(named) > 25
        assert [f"{module}.{name}" for module, name in named if not _defines(module, name)] == []

    def test_every_decision_is_listed(self) -> None:
        index = (ROOT / "docs/adr/README.md").read_text(encoding="utf-8")
        kept = {path.name for path in (ROOT / "docs/adr").glob("[0-9]*.md")}
        assert set(re.findall(r"\((\d{4}-[\w-]+\.md)\)", index)) == kept


class TestProjectReadme:
    def test_names_two_commands(self) -> None:
        lines = [line.split()[:2] for line in commands(README)]
        assert [words for words in lines if words[0] == "make"][:2] == [["make", "demo"], ["make", "test"]]

    def test_is_read_in_two_minutes(self) -> None:
        assert len(README.splitlines()) <= 120


class TestReference:
    def test_columns_are_those_of_crd(self) -> None:
        _, _, section = REFERENCE.partition("`kubectl get ddp` prints")
        rows = re.findall(r"^\| ([A-Z/, ]+) \|", section, flags=re.MULTILINE)
        named = [name for row in rows for name in row.split(", ")]
        columns = build_crd(SCHEMA)["spec"]["versions"][0]["additionalPrinterColumns"]
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
    from ddp_sdk.metrics_table import BUCKETS, METRICS

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
