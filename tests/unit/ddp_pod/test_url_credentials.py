"""Credentials in URLs: found with every scheme, and removed from printed text."""

from __future__ import annotations

import pytest

from ddp_operator.api.errors import FieldError
from ddp_pod.contract.credentials import has_credentials, hide_credentials
from ddp_pod.transfer.sources import UnusableStorage, explain, hide_query

WITH = [
    ("s3://KEY:secret@bucket/x", "s3://***@bucket/x"),
    ("s3://KEY:sec/ret+x@bucket/x", "s3://***@bucket/x"),
    ("s3://:secret@bucket", "s3://***@bucket"),
    ("https://token@host/file", "https://***@host/file"),
    ("https://me:secret@host:8080/file", "https://***@host:8080/file"),
    ("sftp://me:123@host/file", "sftp://***@host/file"),
    ("HTTPS://token@host/file", "HTTPS://***@host/file"),
    ("git+Https://token@host/file", "git+Https://***@host/file"),
    ("redis://me:p@ss@host", "redis://***@***@host"),
]
WITHOUT = [
    "s3://bucket/prefix",
    "https://host.example:8080/path@v2",
    "http://localhost:9000/path@v2",
    "http://host:8080",
    "hf://datasets/user/repo@main/file",
    "abfss://container@account.dfs.core.windows.net/path",
    "sftp://me@host/file",
    "a time such as 12:30, and me@host",
    "registry:5000/team/image:1.2@sha256:0123abcd",
    "git@github.com:team/repository.git",
    "top1:76.1@epoch3 recall:0.83@5 lr:1e-3@100",
    "mailto:me@host.example",
    "10.0.0.1:29500/x@y",
]
POSSIBLE = [
    ("u:80/secret@h", "***@h"),
    ("me:secret@host/path", "***@host/path"),
    ("first.last:secret@host", "***@host"),
    ("--store=me:secret@host:5432/db", "--store=***@host:5432/db"),
    ("('me:secret@host')", "('***@host')"),
    ("http://u:80/secret@h", "http://***@h"),
    ("[oauth2:ghp_abc@github.com]", "[***@github.com]"),
]


@pytest.mark.parametrize(("url", "hidden"), WITH)
def test_credentials_in_url_are_found_and_hidden(url: str, hidden: str) -> None:
    assert has_credentials(url)
    assert hide_credentials(f"{url} fails, {url} too") == f"{hidden} fails, {hidden} too"
    assert hide_query(f"{url}?signature") == hidden


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("GET /x?page=2&access_token=ab%2Fc HTTP", "GET /x?page=2&access_token=*** HTTP"),
        ("'https://a.blob/x?sv=1&sig=Z%3D&se=2'", "'https://a.blob/x?sv=1&sig=***&se=2'"),
        ("(https://s3/x?AWSAccessKeyId=AK&Signature=s)", "(https://s3/x?AWSAccessKeyId=***&Signature=***)"),
        ("https://g/x?X-Goog-Credential=a@b&key=AIza", "https://g/x?X-Goog-Credential=***&key=***"),
        ('["http://host:8080","me@host"]', '["http://host:8080","me@host"]'),
        ("?keyword=a&tokens=3&design=b", "?keyword=a&tokens=3&design=b"),
    ],
)
def test_secret_parameters_are_hidden(text: str, hidden: str) -> None:
    assert hide_credentials(text) == hidden


@pytest.mark.parametrize("url", WITHOUT)
def test_url_without_credentials_is_unchanged(url: str) -> None:
    assert not has_credentials(url)
    assert hide_credentials(url) == url


@pytest.mark.parametrize(("text", "hidden"), POSSIBLE)
def test_possible_credentials_are_hidden_and_accepted_in_fields(text: str, hidden: str) -> None:
    assert hide_credentials(f"{text} fails, {text} too") == f"{hidden} fails, {hidden} too"
    assert not has_credentials(text)


def test_messages_have_no_credentials() -> None:
    url = "s3://KEY:secret@bucket/x"
    assert str(UnusableStorage(f"{url} cannot be opened")) == "s3://***@bucket/x cannot be opened"
    assert "secret" not in str(explain(ValueError(f"Invalid bucket name in {url}"), url))
    assert "secret" not in str(FieldError("spec.x", "is wrong", url))
