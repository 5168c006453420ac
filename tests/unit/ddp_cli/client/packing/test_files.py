"""The packed files of a folder: as git selects them, but without secrets."""

from __future__ import annotations

import json
import os
import re
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
    return run_git(folder, "ls-files", "-coz", "--exclude-standard").split("\0")[:-1]


def run_git(folder: Path, *words: str) -> str:
    return os.fsdecode(subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True).stdout)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty repository of a user without own rules."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "config" / "git" / "config"))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    run_git(tmp_path, "init", "-q", "repository")
    return tmp_path / "repository"


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


# The bytes of a .gitignore, each beside files that its lines may name.
ENDS_AND_MARKS = (
    *(b"\xef\xbb\xbfa\r\nb\r\n", b"b\n\xef\xbb\xbfa\n", b"\xef\xbb\xbf#a\nb", b"\xef\xbb\xbf\xef\xbb\xbfa\n"),
    *(b"a\rb\n", b"a\r\r\nb", b"a\r", b"r\r\r\n", b"r\\\r\n", b"a \r\n", b"a\t\nb", b"with\\ \r\n", b"\r\n!\r\n/\r\n"),
    *(b"a\fb\n", b"a\x0bb\nb", b"a\x1cb", "a\u2028b\nb\x85c\n".encode(), "é\n".encode("latin-1"), "é\n".encode()),
)


def test_lines_of_rules_end_where_git_ends_them(repository: Path) -> None:
    names = (
        "a",
        "b",
        "c",
        "r",
        "r\r",
        "\ufeffa",
        "with ",
        "a\rb",
        "a\fb",
        "a\x0bb",
        "a\x1cb",
        "a\u2028b",
        "b\x85c",
        "é",
        "a\t",
    )
    for number, rules in enumerate(ENDS_AND_MARKS):
        write(repository / str(number), dict.fromkeys(names, ""))
        (repository / str(number) / ".gitignore").write_bytes(rules)
    assert sorted(list_packed(repository)) == sorted(list_by_git(repository))


@pytest.mark.parametrize("name", [".gitignore", ".ddpignore"])
@pytest.mark.parametrize("rules", ["\ufeffmodels/\n".encode("utf-16-le"), b"models/\n\0"])
def test_rules_with_zero_bytes_are_refused(tmp_path: Path, name: str, rules: bytes) -> None:
    """Git reads such a file without an error, and ignores nothing."""
    (tmp_path / name).write_bytes(rules)
    with pytest.raises(CannotPack, match=rf"/{re.escape(name)} has zero bytes, .* save it as UTF-8"):
        list_packed(tmp_path)


@pytest.mark.parametrize("place", ["default", "named", "relative", "none"])
def test_rules_of_user_have_lowest_precedence(repository: Path, place: str) -> None:
    write(repository, dict.fromkeys(("a.tmp", "b.tmp", "c.tmp", "train.py"), "") | {".gitignore": "!b.tmp\n"})
    (repository / ".git" / "info" / "exclude").write_text("!c.tmp\n")
    config = repository.parent / "config" / "git"
    write(config, {"ignore": "*.tmp\n", "own": "*.py\n"})
    if place != "default":
        file = {"named": str(config / "own"), "relative": "../config/git/own", "none": ""}[place]
        run_git(repository, "config", "--global", "core.excludesFile", file)
    packed = list_packed(repository)
    assert packed == sorted(list_by_git(repository))
    assert packed.count("a.tmp") + packed.count("train.py") == (2 if place == "none" else 1)


def test_rules_of_repository_apply_in_worktree_and_submodule(repository: Path) -> None:
    by = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "protocol.file.allow=always")
    write(repository, {"train.py": ""})
    run_git(repository, "add", "train.py")
    run_git(repository, *by, "commit", "-qm", "first")
    run_git(repository, "worktree", "add", "-q", "../tree")
    run_git(repository, *by, "submodule", "--quiet", "add", str(repository), "part")
    (repository / ".git" / "info" / "exclude").write_text("*.tmp\n")
    (repository / ".git" / "modules" / "part" / "info" / "exclude").write_text("*.log\n")
    for folder in (repository.parent / "tree", repository / "part"):
        write(folder, {"a.tmp": "", "b.log": ""})
        packed = list_packed(folder)
        assert packed == sorted(list_by_git(folder))
        assert len(packed) == 2


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
    *(
        "api_keys.yaml",
        "creds.json",
        "gha-creds-0a1b2c3d.json",
        "wg0.conf",
        "secring.gpg",
        "api-tokens.json",
        "aws.creds",
    ),
    *("db_passwords.txt", "id_ed25519_sk", "gh.kdb", "prod.publishsettings", "sub/.m2/settings.xml", "OPENAI_API_KEYS"),
)
NO_SECRETS = (
    "credits.md",
    "creds.py",
    "keys.json",
    "keys.py",
    "label_keys.json",
    "passwords.py",
    "pubring.gpg",
    "settings.xml",
    "wg.conf",
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


_BASE64 = "MIIEvQIBADANBgkqhkiG9w0BAQEFAASCBKcwggSjAgEAAoIBAQC7VJTUt9Us8cKj" * 2


@pytest.mark.parametrize(
    "secret",
    [
        "hf_" + "aB3" * 11 + "Z",
        "ghp_" + "a1B2" * 9,
        "github_pat_" + "a1" * 41,
        "glpat-" + "aB3_" * 5,
        "sk-ant-" + "api03-aB3x" * 9,
        "sk-proj-" + "aB3_" * 12,
        "xoxb-123456789012-" + "aB3x" * 6,
        "AIza" + "aB3_x" * 7,
        "pypi-AgEIcHlwaS5vcmc" + "aB3_x" * 12,
        "npm_" + "a1B2" * 9,
        "dckr_pat_" + "aB3" * 9,
        "hvs." + "aB3_x" * 19,
        "AGE-SECRET-KEY-1" + "Q2" * 29,
        "aws_secret_access_key = " + "aB3/" * 10,
        "PrivateKey = " + "aB3" * 14 + "A=",
        f"-----BEGIN RSA PRIVATE KEY-----\n{_BASE64}",
        f"-----BEGIN PGP PRIVATE KEY BLOCK-----\n\n{_BASE64}",
    ],
    ids=lambda text: text[:12],
)
@pytest.mark.parametrize("file", ["train.ipynb", "notes.md", "sub/config.yaml"])
def test_key_or_token_in_text_is_recognized(tmp_path: Path, file: str, secret: str) -> None:
    text = json.dumps({"cells": [{"source": ["x" * 9000, f'login(token="{secret}")']}]})
    write(tmp_path, {file: text if file.endswith(".ipynb") else f"# {'x' * 9000}\n{secret}\n", "train.py": ""})
    selection = Selection(tmp_path)
    assert [path for path, _ in selection.walk()] == ["train.py"]
    assert selection.left_out == [file]


@pytest.mark.parametrize(
    "text",
    [
        "hf_hub_download(repo_id), hf_" + "x" * 20,
        "token = os.environ['HF_TOKEN']; assert token.startswith('hf_')",
        "cache/shf_" + "aB3" * 11 + "Z",
        "ghp_" + "a" * 50,
        "task-proj-" + "a" * 50,
        "key = '-----BEGIN PRIVATE KEY-----' + body",
        "PrivateKey = generate()",
        "aws_secret_access_key = os.environ['AWS_SECRET_ACCESS_KEY']",
        "\0" + "hf_" + "aB3" * 11 + "Z",
        "x" * (1 << 20) + "hf_" + "aB3" * 11 + "Z",
    ],
    ids=lambda text: text[:12],
)
def test_text_without_key_or_token_is_packed(tmp_path: Path, text: str) -> None:
    write(tmp_path, {"train.py": text})
    assert list_packed(tmp_path) == ["train.py"]


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
