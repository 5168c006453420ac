"""Shell lines that hide the exit code of the program."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from ddp_operator.manifests.exit_codes import add_pipefail, describe_hidden_exit

TEE = "python train.py 2>&1 | tee log"


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["bash", "-c", TEE], ["bash", "-o", "pipefail", "-c", TEE]),
        (["/bin/bash", "-lc", TEE], ["/bin/bash", "-o", "pipefail", "-lc", TEE]),
        (["bash", "--login", "-c", TEE], ["bash", "--login", "-o", "pipefail", "-c", TEE]),
        (["env", "A=1", "bash", "-c", TEE], ["env", "A=1", "bash", "-o", "pipefail", "-c", TEE]),
        (["zsh", "-c", TEE], ["zsh", "-o", "pipefail", "-c", TEE]),
        *(
            (["bash", "-c", line], ["bash", "-o", "pipefail", "-c", line])
            for line in (
                f"cd /app && {TEE}",
                f"set -ex\ncd /app\n{TEE}\n",
                f"{TEE};",
                f"cd /app;\n\n {TEE}\n",
                "python train.py |\n tee log",
                "python train.py --pattern 'a|b' 2>&1 | grep -v warn",
                "python train.py \\\n --lr 1 |& tee log",
            )
        ),
    ],
)
def test_shell_whose_last_pipeline_has_the_only_pipe_runs_with_pipefail(argv: list[str], expected: list[str]) -> None:
    assert list(add_pipefail(argv)) == expected
    assert not describe_hidden_exit(argv)


@pytest.mark.parametrize(
    "argv",
    [
        ["python", "train.py", "|", "tee"],
        ["bash", "train.sh"],
        ["bash", "-c", "python train.py"],
        ["bash", "-c", "python train.py --pattern 'a|b'"],
        ["bash", "-c", f"set -o pipefail; {TEE}"],
        ["bash", "-euo", "pipefail", "-c", TEE],
        ["bash", "-c", f"{TEE}; exit ${{PIPESTATUS[0]}}"],
        ["bash", "-c", "if nvidia-smi | grep -q A100; then python a.py; else python b.py; fi"],
        ["bash", "-c", "nvidia-smi | head -3; python train.py"],
        ["sh", "-c", "a || b"],
        ["sh", "-c", "set -e; python train.py; echo done"],
        ["sh", "-ec", "python train.py\n\necho done"],
        ["sh", "-c", "python train.py && echo done"],
        ["sh", "-c", "python a.py & python b.py & wait"],
        ["bash", "-c", 'echo "'],
        ["bash", "-c"],
    ],
)
def test_other_lines_are_unchanged_and_hide_nothing(argv: list[str]) -> None:
    assert list(add_pipefail(argv)) == argv
    assert not describe_hidden_exit(argv)


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["sh", "-c", TEE], "set -o pipefail"),
        (["bash", "-c", f"nvidia-smi | grep -q A100 && {TEE}"], "set -o pipefail"),
        (["bash", "-c", "nohup python train.py > log 2>&1 &"], "remove the &"),
        (["sh", "-c", "python train.py || true"], "that of `true`"),
        (["sh", "-c", "python train.py; exit 0\n"], "that of `exit 0`"),
        (["bash", "-c", "python train.py || echo failed"], "that of `echo failed`"),
        (["sh", "-c", "python train.py\n\n  echo done"], "that of `echo done`"),
    ],
)
def test_line_that_hides_the_exit_code_is_described_and_unchanged(argv: list[str], part: str) -> None:
    assert list(add_pipefail(argv)) == argv
    assert part in describe_hidden_exit(argv)


def test_bash_with_pipefail_returns_the_exit_code_of_the_program() -> None:
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed")
    argv = ["bash", "-c", "(exit 3) | cat"]
    assert subprocess.run(argv, check=False).returncode == 0
    assert subprocess.run(add_pipefail(argv), check=False).returncode == 3
