"""The report of tiers and the guard against leaked processes."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support import ROOT, tiers
from tests.support.core import CORE
from tests.support.processes import ProcessGuard


def run_pytest(folder: Path, *arguments: str, **env: str) -> tuple[int, str]:
    """Run pytest in a separate project that has this repository's conftest."""
    (folder / "pyproject.toml").write_text(
        '[tool.pytest.ini_options]\naddopts = "--import-mode=importlib --strict-markers"\ntestpaths = ["tests"]\n'
    )
    (folder / "tests" / "support").mkdir()
    modules = ("__init__.py", "core.py", "fuzzing.py", "kubernetes_binaries.py", "processes.py", "tiers.py")
    for name in ("conftest.py", "__init__.py", *(f"support/{module}" for module in modules)):
        (folder / "tests" / name).write_text((ROOT / "tests" / name).read_text())
    clean = {key: value for key, value in os.environ.items() if key not in {"KUBEBUILDER_ASSETS", "PYTEST_ADDOPTS"}}
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
        cwd=folder, env=clean | {"DDP_TEST_GRACE": "0.2"} | env, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    return ran.returncode, ran.stdout + ran.stderr


def lines(output: str) -> dict[str, str]:
    """Return the lines of the report by tier."""
    report = re.search(r"^=+ tiers =+\n(.*?)(?=^=|\Z)", output, flags=re.MULTILINE | re.DOTALL)
    assert report, output
    return dict(line.split(maxsplit=1) for line in report[1].splitlines() if line)


PROJECT = {
    "unit/test_outcomes.py": """
        import pytest

        @pytest.fixture
        def broken():
            yield
            raise RuntimeError

        def test_good(): pass
        def test_bad(): assert False
        def test_not_now(): pytest.skip("because")
        def test_bad_tear_down(broken): pass
        """,
    "contract/test_api.py": """
        import pytest

        def test_stand_in(): pass

        @pytest.mark.apiserver
        def test_real(): pass
        """,
    "golden/test_files.py": """
        def test_kept(golden): golden("a/b.yaml", "one\\ntwo\\n")
        """,
    "integration/test_processes.py": """
        import subprocess
        import pytest

        @pytest.mark.process
        def test_leaks(): subprocess.Popen(["sleep", "63"])
        """,
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name, body in PROJECT.items():
        path = tmp_path / "tests" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(body))
    return tmp_path


def test_report_has_true_line_for_each_tier(project: Path) -> None:
    (project / "tests/golden/a").mkdir()
    (project / "tests/golden/a/b.yaml").write_text("one\nthree\n")
    code, output = run_pytest(project, DDP_TEST_ALL="1")
    report = lines(output)
    assert code == 1
    assert list(report) == [tier.name for tier in tiers.TIERS]
    assert report["unit"].startswith("ran 3 tests in ")
    assert report["unit"].endswith("(1 passed, 2 failed, 1 skipped)")
    assert report["contract"].endswith("(1 passed)")
    assert report["apiserver"].startswith("NOT RUN: KUBEBUILDER_ASSETS is not set")
    assert report["apiserver"].endswith(": 1 test")
    assert report["golden"].endswith("(1 failed)")
    assert "-three" in output
    assert "+two" in output
    assert report["more"].endswith("(1 failed)")
    assert "left running" in output
    assert "sleep 63" in output
    assert report["property"].startswith("NOT RUN: it has no tests")


def test_present_api_server_runs_its_tier_and_golden_files_are_written_on_request(project: Path) -> None:
    for name in ("etcd", "kube-apiserver"):
        (project / name).touch(mode=0o755)
    code, output = run_pytest(
        project, "--update-golden", "-k", "test_kept or test_real", KUBEBUILDER_ASSETS=str(project)
    )
    report = lines(output)
    assert code == 0
    assert report["apiserver"].startswith("ran 1 test in ")
    assert report["contract"] == "NOT RUN: its 1 test was deselected"
    assert (project / "tests/golden/a/b.yaml").read_text() == "one\ntwo\n"


@pytest.mark.parametrize(
    ("path", "markers", "tier"),
    [
        ("tests/unit/ddp_operator/test_x.py", [], "unit"),
        ("tests/unit/ddp_operator/test_x.py", ["process"], "process"),
        ("tests/integration/test_x.py", [], "operator-in-the-loop"),
        ("tests/e2e/test_x.py", ["apiserver"], "apiserver"),
        ("tests/e2e/test_x.py", ["apiserver", "e2e"], "e2e"),
    ],
)
def test_marker_wins_over_folder(path: str, markers: list[str], tier: str) -> None:
    assert tiers.tier_of(path, markers) == tier


@pytest.mark.parametrize("mechanism", CORE)
def test_core_test_of_mechanism_exists(mechanism: str) -> None:
    file, _, name = CORE[mechanism].partition("::")
    (path,) = (ROOT / "tests").rglob(file)
    source = path.read_text(encoding="utf-8")
    assert f"def {name.partition('[')[0]}(" in source


def test_folder_without_tier_is_refused() -> None:
    with pytest.raises(pytest.UsageError, match=r"tests/elsewhere/test_x\.py: not in the folder of a tier"):
        tiers.tier_of("tests/elsewhere/test_x.py", [])


def test_incomplete_api_server_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "etcd").touch(mode=0o755)
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(tmp_path))
    missing = next(tier for tier in tiers.TIERS if tier.name == "apiserver").missing()
    assert missing == f"KUBEBUILDER_ASSETS={tmp_path} lacks kube-apiserver"


class TestProcessGuard:
    def test_quiet_when_nothing_is_left(self) -> None:
        with ProcessGuard() as guard:
            subprocess.run([sys.executable, "-c", ""], check=True)
        assert guard.leaked == []

    def test_finds_and_ends_child(self) -> None:
        with ProcessGuard(grace=0.2) as guard:
            child = subprocess.Popen(["sleep", "60"])
        assert "sleep 60" in guard.leaked[0]
        child.wait()

    def test_finds_orphan_in_session_of_its_own(self) -> None:
        # A process has no environment for a moment within its exec.
        parent = "import subprocess, time; subprocess.Popen(['sleep', '61'], start_new_session=True); time.sleep(0.2)"
        with ProcessGuard(grace=0.2) as guard:
            subprocess.run([sys.executable, "-c", parent], check=True, stdout=subprocess.DEVNULL)
        assert len(guard.leaked) == 1
        assert "sleep 61" in guard.leaked[0]

    def test_ignores_what_ran_before(self) -> None:
        child = subprocess.Popen(["sleep", "62"])
        try:
            with ProcessGuard(grace=0.2) as guard:
                pass
            assert guard.leaked == []
        finally:
            child.kill()
            child.wait()

    def test_gives_process_time_to_end(self) -> None:
        with ProcessGuard(grace=300) as guard:
            child = subprocess.Popen(["sleep", "0.3"])
        assert guard.leaked == []
        child.wait()
