"""`make generate`: generators that read generated files, and generators that fail."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from tests.support import ROOT

READS_A = 'from pathlib import Path; text = Path("a").read_text(); assert text == "new", "a is outdated"; print(text)'


@pytest.fixture
def generate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """``.ci/generate.py`` for a folder with the generators ``one``, and ``two``, which needs the file of the first."""
    spec = importlib.util.spec_from_file_location("generate", ROOT / ".ci/generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "one.py").write_text('print("new", end="")')
    (tmp_path / "two.py").write_text(READS_A)
    (tmp_path / "a").write_text("old")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "GENERATED", {"a": "one", "b": "two"})
    monkeypatch.setattr(module, "VERSIONED", ())
    return module


def test_a_generator_that_fails_on_an_outdated_file_runs_again(generate: ModuleType, tmp_path: Path) -> None:
    assert generate.main([]) == 0
    assert (tmp_path / "a").read_text() == "new"
    assert (tmp_path / "b").read_text() == "new\n"


def test_a_generator_that_always_fails_ends_with_its_error(generate: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "two.py").write_text('raise ValueError("no such value")')
    with pytest.raises(SystemExit, match=r"(?s)two failed:.*no such value"):
        generate.main([])


def test_check_reports_a_failing_generator_and_writes_nothing(generate: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="two failed"):
        generate.main(["--check"])
    assert (tmp_path / "a").read_text() == "old"
