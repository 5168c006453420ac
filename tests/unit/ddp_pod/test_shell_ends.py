"""The command at which a rank's bash script ends, and what shells say about their scripts."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from ddp_pod.contract.failure_record import EVIDENCE_ERROR
from ddp_pod.contract.names import EXIT_USER_ERROR
from ddp_pod.failures.rules import WorkerEnd
from ddp_pod.failures.text import TIME_LIMIT_REMEDY, advise_on_output, is_setup_mistake
from ddp_pod.failures.worker_failure import add_last_lines, examine_worker, is_unexplained
from ddp_pod.rank.end_notes import read_shell_end
from ddp_pod.rank.shell_ends import observe_shell
from tests.support.launcher_config import launcher_pod

_SCRIPT = "set -e\nfail() {{\n  {line}\n}}\necho start\nfail\necho end\n"


def run_script(folder: Path, line: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run a bash script whose function has a line. Return its exit code."""
    monkeypatch.delenv("BASH_ENV", raising=False)
    (folder / "run.sh").write_text(_SCRIPT.format(line=line))
    observe_shell(str(folder / "note"))
    return subprocess.run(["bash", "run.sh"], cwd=folder, env=dict(os.environ), check=False).returncode


@pytest.mark.parametrize(
    ("line", "code", "command"),
    [
        ("grep -q nobody /dev/null", 1, "grep -q nobody /dev/null"),
        ("exit 3", 3, "exit 3"),
        ("bash -c 'exit 4'", 4, "bash -c 'exit 4'"),
        ("no-such-program", 127, "no-such-program"),
    ],
)
def test_command_at_which_a_script_ends_is_noted(
    tmp_path: Path, line: str, code: int, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_script(tmp_path, line, monkeypatch) == code
    assert read_shell_end(str(tmp_path / "note"), code) == f"run.sh ended at or after `{command}`"
    assert read_shell_end(str(tmp_path / "note"), code + 1) == ""
    monkeypatch.chdir(tmp_path)  # where the script can be read
    assert read_shell_end("note", code).startswith("run.sh:3 ended at or after `")


@pytest.mark.parametrize("line", ["true", "trap 'echo own' EXIT; false", "exec false", "kill $$"])
def test_script_that_succeeds_or_has_a_trap_of_its_own_is_left_alone(
    tmp_path: Path, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_script(tmp_path, line, monkeypatch)
    assert read_shell_end(str(tmp_path / "note"), 1) == ""


_EXTEND = """old=$(trap -p EXIT | sed -e "s/^trap -- '//" -e "s/' EXIT$//")
trap "${old:+$old; }rc=\\$?; echo cleanup \\$rc; exit \\$rc" EXIT
"""


@pytest.mark.parametrize("flags", [(), ("-x",), ("-eu",), ("-r",)])
@pytest.mark.parametrize(
    "script",
    [
        "echo $_\n",
        "set -Eeuo pipefail\ntrap 'echo ERR $? $LINENO $BASH_COMMAND' ERR\necho a\ngrep q /dev/null\n",
        f"set -e\n{_EXTEND}exit 7\n",
        "printf() { echo own $*; }\nexit 4\n",
        "set -C\nIFS=0123456789\n(exit 34)\n",
        "set -u\necho $NOPE\n",
        "declare -F\nset | grep -ci ddp_\nexit 3\n",
        "exec /nonexistent\n",
        "ulimit -f 0\nfalse\n",
        "if then\n",
    ],
)
def test_script_runs_as_without_the_note(
    tmp_path: Path, script: str, flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.sh").write_text(script)
    monkeypatch.delenv("BASH_ENV", raising=False)
    ends = []
    for is_observed in (False, True):
        if is_observed:
            observe_shell(str(tmp_path / "note"))
        done = subprocess.run(["bash", *flags, "run.sh"], cwd=tmp_path, capture_output=True, text=True, check=False)
        # The processes of a pipeline write in any order; `set -x` shows a trap that a script reads.
        errors = sorted(done.stderr.splitlines()) if "trap -p" not in script else []
        ends.append((done.returncode, done.stdout, errors))
    assert ends[0] == ends[1]


def test_script_that_has_run_no_command_is_not_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BASH_ENV", raising=False)
    (tmp_path / "run.sh").write_text("if then\n")
    observe_shell(str(tmp_path / "note"))
    exit_code = subprocess.run(["bash", "run.sh"], cwd=tmp_path, check=False).returncode
    assert read_shell_end(str(tmp_path / "note"), exit_code) == ""


def test_one_command_takes_the_place_of_its_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BASH_ENV", raising=False)
    observe_shell(str(tmp_path / "note"))
    line = ["bash", "-c", "ps -o comm= -p $$"]
    assert subprocess.run(line, capture_output=True, text=True, check=True).stdout == "ps\n"


def test_setup_of_the_user_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BASH_ENV", "/etc/own.sh")
    observe_shell(str(tmp_path / "note"))
    assert os.environ["BASH_ENV"] == "/etc/own.sh"


@pytest.mark.parametrize(
    ("text", "is_mistake", "remedy"),
    [
        ("run.sh: line 2: DATA: unbound variable\n", True, "set the variable"),
        ("run.sh: 2: DATA: parameter not set\n", True, "set the variable"),
        ("run.sh: line 2: DATA: unbound variable\nstep 1\n", False, ""),
        ("run.sh: line 3: syntax error near unexpected token `('\nrun.sh: line 3: `A=(1'\n", True, "bash has commands"),
        ('run.sh: 1: Syntax error: "(" unexpected\n', True, "bash has commands"),
        ("run.sh: line 9: unexpected EOF while looking for matching `\"'\n", True, "bash has commands"),
        ("sh: 1: source: not found\n", True, "bash has commands"),
        ("sh: 1: nvidia-smi: not found\n", False, ""),
        ("run.sh: line 3: cd: /data: No such file or directory\n", False, "correct the path"),
        (
            "Fatal Python error: config_init_hash_seed: PYTHONHASHSEED must be\nPython runtime state: preinitialized\n",
            True,
            "remove PYTHONHASHSEED",
        ),
        ("Fatal Python error: init_fs_encoding: failed to get the codec\n", True, "PYTHONHOME"),
        ("step 3\n", False, ""),
    ],
)
def test_message_of_a_shell_about_its_script_is_explained(text: str, is_mistake: bool, remedy: str) -> None:
    assert is_setup_mistake(text) is is_mistake
    assert remedy in advise_on_output(text, 1)


def test_time_limit_of_a_command_in_a_script_is_what_to_raise() -> None:
    assert advise_on_output("step 59 loss 1.8\n", 124) == TIME_LIMIT_REMEDY


def test_mistake_of_a_script_is_described_once_and_ends_the_job(tmp_path: Path) -> None:
    pod = launcher_pod(tmp_path)
    (tmp_path / "output").mkdir()
    (tmp_path / "output" / "0.end").write_text("run.sh: line 2: DATA: unbound variable\n")
    failure = examine_worker(pod, WorkerEnd(1))
    assert is_unexplained(pod, failure)
    explained = add_last_lines(pod, failure)
    assert (explained.category, explained.container_exit_code) == ("UserError", EXIT_USER_ERROR)
    assert explained.evidence == EVIDENCE_ERROR, "the end of the pod does not describe it again"
    assert not is_unexplained(pod, explained)
