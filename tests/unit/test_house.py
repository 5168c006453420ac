"""The project's rules that no linter has: the place of files, and invariants of every file."""

import ast
import operator
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import ROOT

LAUNCHER = ROOT / "operator" / "ddp_pod"
CONTRACT = LAUNCHER / "contract"

TOP_LEVEL = {
    "operator", "trainer", "images", "deploy", "charts", "tests", "docs", ".ci", ".github",
    "Makefile", "AGENTS.md", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "LICENSE", "pyproject.toml",
    ".dockerignore", ".editorconfig", ".gitattributes", ".gitignore", ".importlinter", ".pre-commit-config.yaml",
}  # fmt: skip

# Ruff's complexity rules limit functions. This limit only detects files with very long texts.
LINE_LIMIT = 800
LONG_FILES = {
    "deploy/crds/ddptrainingjobs.yaml": "generated: the whole schema",
    "charts/files/crd.yaml": "generated: the same",
    "deploy/manifests/crd.yaml": "generated: the same, where kustomize may read it",
    "operator/ddp_cli/view/why.py": "one explanation with its remedy for each state of a job",
    "tests/check/planted.py": "one table: each fault with the verdict that it must have",
    "tests/check/siblings.py": "another one",
    "tests/failures/planted.py": "one table: each failure with its script and the answer that it must have",
    **dict.fromkeys(
        (
            "deploy/crds/clusterddptrainingprofiles.yaml",
            "deploy/crds/ddptrainingprofiles.yaml",
            "charts/files/cluster-profile-crd.yaml",
            "charts/files/profile-crd.yaml",
            "deploy/manifests/cluster-profile-crd.yaml",
            "deploy/manifests/profile-crd.yaml",
            "deploy/schemas/ddptrainingjob.json",
            "deploy/schemas/ddptrainingprofile.json",
            "deploy/schemas/clusterddptrainingprofile.json",
        ),
        "generated: the schema of a job's parts",
    ),
    ".ci/constraints.txt": "generated: the hashes of every package",
    "images/operator/requirements.txt": "generated: the same for the operator's image",
    ".ci/release-tools.txt": "generated: the same for the release's tools",
    "LICENSE": "the licence",
}
SIZE_LIMIT = 512 * 1024


def tracked_files() -> list[str]:
    """The files that git tracks or would track: the checkout without build outputs."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    if listed.returncode != 0:
        pytest.skip("not a git checkout: there is no list of the files that belong to it")
    return sorted(name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file())


@pytest.fixture(scope="module")
def files() -> list[str]:
    return tracked_files()


def texts(files: list[str]) -> Iterator[tuple[str, str]]:
    for name in files:
        try:
            yield name, (ROOT / name).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue


def python_files(files: list[str]) -> Iterator[tuple[str, ast.Module]]:
    for name, text in texts([name for name in files if name.endswith(".py")]):
        yield name, ast.parse(text, name)


class TestStandardLibrary:
    """``operator/`` is our folder and a module of Python's: the folder must never become a package."""

    def test_folder_operator_is_no_package(self) -> None:
        assert not (ROOT / "operator" / "__init__.py").exists()

    def test_python_finds_its_own_operator_from_repository(self) -> None:
        assert operator.__file__ is not None
        assert not Path(operator.__file__).is_relative_to(ROOT)
        code = "import sys; sys.modules.pop('operator', None); import operator; print(operator.itemgetter(0)('x'))"
        ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
        assert ran.stdout == "x\n", ran.stderr

    def test_no_test_folder_is_called_operator(self) -> None:
        assert not [path for path in (ROOT / "tests").rglob("operator") if path.is_dir()]


class TestLayout:
    def test_top_level_names_are_expected(self, files: list[str]) -> None:
        assert {name.split("/", 1)[0] for name in files} - TOP_LEVEL == set()

    def test_chain_of_packages_under_tests_is_unbroken(self, files: list[str]) -> None:
        folders = {
            parent
            for name in files
            if name.startswith("tests/") and name.endswith(".py")
            for parent in Path(name).parents
            if parent.parts
        }
        assert {str(folder) for folder in folders if not (ROOT / folder / "__init__.py").exists()} == set()

    def test_long_files_have_reason(self, files: list[str]) -> None:
        long = {name for name, text in texts(files) if text.count("\n") > LINE_LIMIT}
        assert long - set(LONG_FILES) == set(), f"split them, or give the reason in LONG_FILES of {__file__}"

    def test_reasons_are_for_files_that_exist(self, files: list[str]) -> None:
        assert set(LONG_FILES) - set(files) == set()

    def test_no_file_is_large(self, files: list[str]) -> None:
        assert {name: size for name in files if (size := (ROOT / name).stat().st_size) > SIZE_LIMIT} == {}


class TestWheel:
    """The installed files; ``make release-check`` builds them."""

    def test_wheel_contains_all_packages_with_types(self, files: list[str]) -> None:
        built = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
        buildings = [f"operator/ddp_{name}" for name in ("operator", "pod", "cli")]
        assert built["packages"] == [*buildings, "trainer/ddp_sdk", "trainer/ddp_trainer"]
        # Hatch leaves out the files that git ignores.
        assert {f"{package}/py.typed" for package in built["packages"]} <= set(files)

    def test_trainer_needs_its_extra_alone(self, files: list[str]) -> None:
        extra = {"numpy", "PIL", "sklearn", "torch", "torchvision", "yaml"}
        formats = {"safetensors"}  # a developer may have such files
        imported = set()
        for _, tree in python_files([name for name in files if name.startswith("trainer/")]):
            for node in ast.walk(tree):
                names = [name.name for name in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
                imported |= {name.split(".")[0] for name in names}
        assert imported - set(sys.stdlib_module_names) - {"ddp_sdk", "ddp_trainer"} <= extra | formats


class TestNoTraceOfAMachine:
    # Written in pieces, so that this file does not match itself.
    PATTERNS = (
        "/" + "work/", "/" + "farm/", "/opt/" + "wheels", "/opt/" + "pypi",
        r"/home/(?!nonroot\b|kubernetes/bin/)[a-z]", "/" + r"root/",  # of our image, and of GKE's nodes
        "/" + r"Users/[a-z]", "file:" + "///", "(index-" + r"url|find-" + r"links)[ =]\S*[:/]", r"\." + r"pyenv\b",
    )  # fmt: skip

    def test_no_machine_path_and_no_package_index(self, files: list[str]) -> None:
        pattern = re.compile("|".join(self.PATTERNS))
        results = [
            f"{name}:{number}: {line.strip()[:100]}"
            for name, text in texts(files)
            for number, line in enumerate(text.splitlines(), 1)
            if pattern.search(line)
        ]
        assert results == []


class TestTests:
    def test_every_skip_and_xfail_has_reason(self, files: list[str]) -> None:
        bare = [
            f"{name}:{call.lineno}"
            for name, tree in python_files([name for name in files if name.startswith("tests/")])
            for call in unreasoned(tree)
        ]
        assert bare == []

    @pytest.mark.parametrize(
        "source",
        ["pytest.skip()", "pytest.skip('')", "@pytest.mark.skip\ndef f(): ...", "@pytest.mark.skipif(x)\ndef f(): ...",
         "@pytest.mark.xfail()\ndef f(): ...", "p = pytest.param(1, marks=pytest.mark.skip)"],
    )  # fmt: skip
    def test_bare_skip_is_found(self, source: str) -> None:
        assert len(unreasoned(ast.parse(source))) == 1

    @pytest.mark.parametrize(
        "source",
        ["pytest.skip('no network')", "pytest.skip(reason=why)", "@pytest.mark.skip(reason='x')\ndef f(): ...",
         "@pytest.mark.skipif(x, reason='y')\ndef f(): ...", "pytest.importorskip('x')"],
    )  # fmt: skip
    def test_reasoned_skip_is_not(self, source: str) -> None:
        assert unreasoned(ast.parse(source)) == []


def unreasoned(tree: ast.Module) -> list[ast.expr]:
    """Return the uses of pytest's skip, skipif and xfail without a reason."""
    results: list[ast.expr] = []
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in called:
            if re.fullmatch(r"pytest\.mark\.(skip|skipif|xfail)", ast.unparse(node)):
                results.append(node)
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in {"pytest.skip", "pytest.xfail", "pytest.mark.skip"}:
                reasons = [*node.args[:1], *(word.value for word in node.keywords if word.arg in {"reason", "msg"})]
            elif name in {"pytest.mark.skipif", "pytest.mark.xfail"}:
                reasons = [word.value for word in node.keywords if word.arg == "reason"]
            else:
                continue
            if not reasons or (isinstance(reasons[0], ast.Constant) and not reasons[0].value):
                results.append(node)
    return results


SDK = ROOT / "trainer" / "ddp_sdk"


class TestDeliveredPackage:
    """The launcher brings it to images with Python 3.10 and torch."""

    @pytest.mark.parametrize("path", sorted(SDK.rglob("*.py")), ids=lambda path: path.name)
    def test_imports_the_standard_library_torch_and_itself_only(self, path: Path) -> None:
        tree = ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 10))
        absolute = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level]
        plain = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
        assert {name.partition(".")[0] for name in absolute + plain} <= {*sys.stdlib_module_names, "torch", "ddp_sdk"}

    @pytest.mark.parametrize("path", sorted((SDK / "memory").glob("[!_]*.py")), ids=lambda path: path.name)
    def test_annotations_are_not_evaluated(self, path: Path) -> None:
        assert "from __future__ import annotations" in path.read_text(encoding="utf-8")


@pytest.fixture(params=sorted([*LAUNCHER.rglob("*.py"), *CONTRACT.rglob("*.py")]), ids=lambda path: path.name)
def module_path(request: pytest.FixtureRequest) -> Path:
    return Path(request.param)


@pytest.fixture
def module(module_path: Path) -> ast.Module:
    return ast.parse(module_path.read_text(encoding="utf-8"), feature_version=(3, 10))


class TestLauncherImports:
    """It runs in every image with Python 3.10 and torch, and may need nothing else of that image."""

    WITH_TORCH = ("agent", "ranks", "rendezvous", "round_state", "store")
    """Modules of launcher/torchrun that import torch, directly or by another one: the agent's process, which is forked
    from one that has imported it."""

    def test_imports_standard_library_torch_and_neighbours_only(self, module: ast.Module) -> None:
        imported = {
            name.partition(".")[0]
            for node in ast.walk(module)
            for name in (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else ["" if node.level == 1 else "." if node.level else node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
        }
        assert imported - {"torch"} <= {*sys.stdlib_module_names, ""}

    def test_only_agent_imports_torch_before_it_is_needed(self, module_path: Path, module: ast.Module) -> None:
        if module_path.parent.name == "torchrun" and module_path.stem in self.WITH_TORCH:
            return
        at_import = [ast.unparse(node) for node in module.body if isinstance(node, ast.Import | ast.ImportFrom)]
        agents = re.compile(rf"\btorch\b|^from \.+(torchrun)?\.?({'|'.join(self.WITH_TORCH)}) import")
        assert not [line for line in at_import if agents.search(line)]

    def test_signals_are_handled_before_slow_imports(self) -> None:
        body = ast.parse((LAUNCHER / "bootstrap.py").read_text(encoding="utf-8")).body
        catches = next(number for number, node in enumerate(body) if isinstance(node, ast.If))
        before = [ast.unparse(node) for node in body[:catches] if isinstance(node, ast.Import | ast.ImportFrom)]
        assert before == ["import signal", "import sys"]


PURE = (
    "ddp_operator/api/",
    "ddp_operator/decide/",
    "ddp_operator/manifests/",
    "ddp_cli/features/drill/recovery.py",
    "ddp_cli/view/why.py",
)
CLOCKS = {
    "datetime.now", "datetime.utcnow", "datetime.today", "datetime.datetime.now", "datetime.datetime.utcnow",
    "date.today", "datetime.date.today", "time.time", "time.time_ns", "time.monotonic", "time.perf_counter",
}  # fmt: skip


def clock_reads(tree: ast.Module) -> list[ast.Call]:
    """Return the calls that read the time."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [call for call in calls if ast.unparse(call.func) in CLOCKS]


class TestPureModules:
    """Modules that decide receive the time as an argument, so that a test can choose it."""

    def test_read_no_clock(self, files: list[str]) -> None:
        pure = tuple(f"operator/{name}" for name in PURE)
        trees = list(python_files([name for name in files if name.startswith(pure)]))
        assert trees
        reads = [name for name, tree in trees for _ in clock_reads(tree)]
        assert reads == ["operator/ddp_operator/api/kubeobjects.py"]  # utc_now, which callers pass on

    @pytest.mark.parametrize("source", ["now = datetime.now(UTC)", "def f(): return time.time() - 1"])
    def test_clock_is_found(self, source: str) -> None:
        assert len(clock_reads(ast.parse(source))) == 1


class TestTargets:
    def test_ci_runs_command_of_readme(self) -> None:
        assert "make test" in (ROOT / "README.md").read_text(encoding="utf-8")
        assert re.search(r"^make test$", (ROOT / ".ci" / "run").read_text(encoding="utf-8"), re.MULTILINE)

    def test_scripts_of_ci_are_executable(self) -> None:
        scripts = [path for path in (ROOT / ".ci").iterdir() if path.suffix == ""]
        assert scripts
        assert [path.name for path in scripts if not path.stat().st_mode & 0o100] == []

    def test_help_names_every_target(self) -> None:
        text = (ROOT / "Makefile").read_text(encoding="utf-8")
        phony = set(re.findall(r"^\.PHONY: ([a-z].*)$", text, re.MULTILINE))
        helped = set(re.findall(r"^([a-z0-9-]+):.*? ## ", text, re.MULTILINE))
        assert phony == helped
