"""The packed files of a folder: as git selects them, but without secrets."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from ddp_cli.client.packing.files import CannotPack, Selection

# Each list is a .gitignore in a separate folder with all of the files below.
PATTERNS = (
    ("*.log", "!keep.log"),
    ("build/", "!build/keep.txt"),
    ("/build", "data/*", "!data/keep.txt"),
    ("*", "!*/", "!*.py"),
    ("**/deep/*.txt", "a/**/c.txt", "docs/**"),
    ("a/*/c.txt", "?.py", "[bc].py", "[!k]*.log"),
    ("# a comment", "", "trailing  ", "\\#file", "\\!file", "with\\ space.txt"),
    ("data", "!data/keep.txt", "*.tmp", "!/x.tmp", "[unclosed", "a/deep/"),
    ("**", "!a", "!a/**"),
    ("foo/*", "!foo/bar/", "foo/bar/*", "!foo/bar/baz.py", "*.pth/"),
    ("[[:alpha:]].py", "[\\a]/b.py", "[z-ab]uild", "a/**/**", "!**/er/**"),
    ("[]#]file", "[!]#]file", "[^a-", "*[p]*.*", "k?*[.]*p[x-z]"),
    # Expressions that try all divisions of a name between the stars would not end.
    ("*a" * 20 + "b", "**/a*e*p/" * 30 + "c.txt", "**/*a*a*a*a*a*a*a*a*a*a*a*b/" * 9 + "c"),
)
FILES = (
    *(
        "keep.log",
        "other.log",
        "build/keep.txt",
        "build/x.o",
        "data/keep.txt",
        "data/big.bin",
        "a/b.py",
        "b.py",
        "k.py",
    ),
    *("a/deep/c.txt", "a/deep/er/c.txt", "a/c.txt", "deep/x.txt", "docs/index.md", "docs/sub/page.md", "docsy/page.md"),
    *(
        "#file",
        "!file",
        "trailing",
        "with space.txt",
        "x.tmp",
        "a/x.tmp",
        "foo/one.py",
        "foo/bar/baz.py",
        "foo/bar/two.py",
    ),
    *(
        "a" * 200,
        "/".join(["deeeep" * 20] * 20),
        "c.pth/file",
        "d.pth",
        "[unclosed",
        "a/data/keep.txt",
        "a/build/y",
        "name.py/file.txt",
    ),
)


def write(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def list_packed(folder: Path, *include: str) -> list[str]:
    return [path for path, _ in Selection(folder, include).walk()]


def list_by_git(folder: Path) -> list[str]:
    words = ["git", "-c", "core.excludesFile=", "ls-files", "-coz", "--exclude-standard"]
    return subprocess.run(words, cwd=folder, check=True, capture_output=True).stdout.decode().split("\0")[:-1]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    return tmp_path


def test_files_are_those_that_git_would_add(repository: Path) -> None:
    for number, patterns in enumerate(PATTERNS):
        write(repository / str(number), dict.fromkeys(FILES, "") | {".gitignore": "\n".join(patterns)})
    write(
        repository, {".gitignore": "er/\n*.bin\n!/1/data/big.bin\n", "1/a/.gitignore": "!er/\n/deep/c.txt\n", "top": ""}
    )
    (repository / ".git" / "info" / "exclude").write_text("docsy/\n")
    packed = list_packed(repository)
    assert sorted(packed) == sorted(list_by_git(repository))
    assert "1/data/big.bin" in packed  # the comparison contains both kinds
    assert "2/data/big.bin" not in packed


def test_rules_of_parent_folder_apply(repository: Path) -> None:
    write(repository, dict.fromkeys(("src/train.py", "src/x.tmp", "src/sub/y.tmp", "src/only"), ""))
    write(repository, {".gitignore": "*.tmp\n/src/only\n", "src/.gitignore": "!y.tmp\n"})
    assert list_packed(repository / "src") == sorted(list_by_git(repository / "src"))


def test_ddpignore_is_stronger_than_gitignore_and_needs_no_git(tmp_path: Path) -> None:
    write(tmp_path, dict.fromkeys(("train.py", "model.bin", "notes.md", "sub/notes.md", "sub/keep.bin"), ""))
    write(tmp_path, {".gitignore": "*.bin\n", ".ddpignore": "!model.bin\n*.md\n"})
    assert list_packed(tmp_path) == [".ddpignore", ".gitignore", "model.bin", "train.py"]


def test_git_environments_caches_and_runs_never_travel(tmp_path: Path) -> None:
    inside = (
        ".git/config",
        "__pycache__/a.pyc",
        ".venv/x",
        "myenv/pyvenv.cfg",
        "myenv/lib/x.py",
        "ddp-runs/r/job.yaml",
    )
    write(tmp_path, dict.fromkeys((*inside, "train.py"), ""))
    assert list_packed(tmp_path) == ["train.py"]


SECRETS = (
    ".env",
    ".env.prod",
    "certs/server.pem",
    "id_rsa",
    "credentials-gcp.json",
    ".netrc",
    "sub/.aws/config",
    "kubeconfig",
    ".wandb_key",
    "hf_token",
    "HF_TOKEN",
    "gcp-key.json",
    "token",
    "openai.apikey",
    "sub/api-token.txt",
    "db_password.yaml",
    *(".envrc", "sub/.env-prod", "kaggle.json", "rclone.conf", "gh/hosts.yml", "terraform.tfstate.backup"),
    *("Kubeconfig", "ID_RSA", "wandb/settings", ".zsh_history", ".my.cnf", "pip.conf", "prod.tfvars", "auth.json"),
    *("ann_accessKeys.csv", "rootkey.csv"),
)
NO_SECRETS = (
    "keys.py",
    "monkey",
    "primary_key.py",
    "special_tokens_map.json",
    "token.py",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokens.txt",
    "turkey.txt",
)


def test_secrets_are_excluded_and_reported(tmp_path: Path) -> None:
    write(tmp_path, dict.fromkeys((*SECRETS, ".env.example", "id_rsa.pub", *NO_SECRETS), ""))
    selection = Selection(tmp_path)
    assert [path for path, _ in selection.walk()] == sorted([".env.example", "id_rsa.pub", *NO_SECRETS])
    assert {"sub/.aws/" if name.startswith("sub/.aws") else name for name in SECRETS} == {*selection.left_out}


def test_secret_of_any_name_is_recognized_by_its_start(tmp_path: Path) -> None:
    account = '{\n  "type": "service_account", "project_id": "p", "private_key": "..."}'
    write(tmp_path, {"my-project-0123456789ab.json": account, "deploy": "-----BEGIN OPENSSH PRIVATE KEY-----\n"})
    write(
        tmp_path, {"admin.conf": "apiVersion: v1\nclusters:\n- cluster:\n", "cm": "apiVersion: v1\nkind: ConfigMap\n"}
    )
    write(tmp_path, {"map.json": '{"type": "account"}', "train.py": "key = '-----BEGIN PRIVATE KEY-----'\n"})
    os.mkfifo(tmp_path / "pipe")
    selection = Selection(tmp_path)
    assert [path for path, _ in selection.walk()] == ["cm", "map.json", "train.py"]
    assert selection.left_out == ["admin.conf", "deploy", "my-project-0123456789ab.json"]


def test_rules_above_limits_are_refused_and_a_pipe_has_none(tmp_path: Path) -> None:
    write(tmp_path, {"train.py": "", ".ddpignore": "x" * 1001})
    with pytest.raises(CannotPack, match=r"\.ddpignore: the pattern x+… has more than 1000 characters"):
        list_packed(tmp_path)
    write(tmp_path, {".ddpignore": "# comment\n" * 30_000})
    with pytest.raises(CannotPack, match=r"\.ddpignore has more than 256 KiB"):
        list_packed(tmp_path)
    (tmp_path / ".ddpignore").unlink()
    os.mkfifo(tmp_path / ".ddpignore")
    assert list_packed(tmp_path) == ["train.py"]


def test_explicitly_named_file_is_packed_despite_rules(tmp_path: Path) -> None:
    write(tmp_path, dict.fromkeys((".env", "data/a.bin", "data/deep/b.bin", "data2/c", "train.py", "zz.pem"), ""))
    write(tmp_path, {".gitignore": "data*/\n.env\n"})
    selection = Selection(tmp_path, (".env", "data/", "./train.py"))
    assert [path for path, _ in selection.walk()] == [".env", ".gitignore", "data/a.bin", "data/deep/b.bin", "train.py"]
    assert selection.left_out == ["zz.pem"]
    for wrong in ("missing", "../outside"):
        with pytest.raises(CannotPack, match="no such file"):
            list_packed(tmp_path, wrong)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_folder_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    write(tmp_path, {"sub/file": ""})
    (tmp_path / "sub").chmod(0)
    with pytest.raises(CannotPack, match=r"sub/: Permission denied; .*\.ddpignore"):
        list_packed(tmp_path)
    (tmp_path / "sub").chmod(0o700)
