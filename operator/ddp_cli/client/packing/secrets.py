"""Recognize files that may hold secrets: by the names that tools use, and by keys and tokens in their text."""

import os
import re
from typing import Final

from ddp_pod.contract.plain_files import open_plain

# The last part of a name, as in .wandb_key, HF_TOKEN and gcp-key.json, but not of code (token.py) or a vocabulary
# (tokenizer.json, tokens.txt).
_WORDS: Final = (
    *("key", "apikey", "apikeys", "token", "secret", "secrets", "password", "passwords", "passwd", "passphrase"),
    *("credential", "credentials", "cred", "creds", "api[_-]keys", "access[_-]keys", "secret[_-]keys", "api[_-]tokens"),
)
_ENDS: Final = ("", ".txt", ".json", ".y*ml", ".toml", ".ini", ".cfg", ".conf", ".b64", ".csv", ".xml")
NAMES: Final = (
    *(".env*", "*.env", "!.env.example", "!.env.sample", "!.env.template", ".direnv/", ".*_history", ".dev.vars"),
    *("*.pem", "*.key", "*.p8", "*.p12", "*.pfx", "*.ppk", "*.jks", "*.keystore", "*.kdb", "*.kdbx", "*.keytab"),
    *(
        "id_rsa*",
        "id_dsa*",
        "id_ecdsa*",
        "id_ed25519*",
        "!*.pub",
        ".ssh/",
        ".gnupg/",
        "secring.*",
        "private-keys-v1.d/",
    ),
    *("*.ovpn", "wg[0-9]*.conf", ".vault*", "vault_pass*", "*.tfstate*", "*.tfvars", ".terraformrc", ".terraform.d/"),
    *(".netrc", "_netrc", ".pypirc", ".npmrc", ".condarc", "pip.conf", ".htpasswd", ".gem/", "**/.m2/settings*.xml"),
    *(".pgpass", "pgpass.conf", ".my.cnf", ".mylogin.cnf", ".git-credentials", ".boto", ".s3cfg", ".passwd-s3fs"),
    *("credentials*.json", "credentials*.y*ml", "*service[-_]account*.json", "client_secret*.json"),
    *("*creds-*.json", "*-creds*.json", "local.settings.json", "*.publishsettings", ".sentryclirc", ".rediscli*"),
    *("application_default_credentials.json", "kaggle.json", ".kaggle/", "rclone.conf", "hosts.y*ml", "auth.json"),
    *("kubeconfig", "kubeconfig.*", "*.kubeconfig", ".kube/", ".aws/", ".azure/", "**/.config/gcloud/", ".gcloud/"),
    *("**/.docker/config.json", ".docker*cfg", ".dockerconfigjson", ".huggingface/", "stored_tokens", ".modal.toml"),
    *(".databrickscfg", ".comet.config", "**/wandb/settings", "**/.dvc/config.local", ".ossutilconfig", ".snowsql/"),
    *(
        "*accesskeys.csv",
        "rootkey.csv",
        "credentials*.csv",
        "accesstokens.json",
        "**/.mc/config.json",
        ".oci/",
        ".ngc/",
    ),
    *(f"{start}{word}{end}" for start in ("", "*[._-]") for word in _WORDS for end in _ENDS),
)
"""Files with passwords, tokens and private keys, as patterns of .gitignore. Names are compared in lower case."""

# A private key, a kubeconfig, or the key of a service account or the login of a user of Google Cloud, under any name.
_START: Final = re.compile(
    rb"""\s*+(?:-----BEGIN [A-Z ]*PRIVATE KEY|apiVersion: v1\s+(?:clusters:|kind: Config\s)"""
    rb"""|\{[^}]*"type"\s*:\s*"(?:service_account|authorized_user)")"""
)
# How a key or token of a service begins, and the whole of it. Both are searched for by the beginning, which is fast.
_TOKENS: Final = tuple(
    (start, re.compile(re.escape(start) + rb"(?<![\w-]" + re.escape(start) + rb")" + rest))
    for start, rest in (
        (b"-----BEGIN ", rb"[A-Z ]{0,20}PRIVATE KEY(?: BLOCK)?-----(?:\\n|\\r|[\s\"',:\w+/=-]){100}"),
        (b"PrivateKey", rb"\s*=\s*[\w+/]{42}[AEIMQUYcgkosw480]="),
        (b"aws_secret_access_key", rb"[\"']?\s*[=:]\s*[\"']?[\w+/]{40}(?![\w+/])"),
        (b"AGE-SECRET-KEY-1", rb"[A-Z0-9]{58}(?!\w)"),
        (b"hf_", rb"[A-Za-z0-9]{34}(?!\w)"),
        *((start, rb"[A-Za-z0-9]{36}(?!\w)") for start in (b"ghp_", b"gho_", b"ghu_", b"ghs_", b"ghr_", b"npm_")),
        (b"github_pat_", rb"\w{82}(?!\w)"),
        (b"glpat-", rb"[\w-]{20,300}"),
        (b"sk-ant-", rb"[\w-]{80,300}"),
        (b"sk-proj-", rb"[\w-]{40,300}"),
        (b"xoxb-", rb"\d{9,}-[\w-]{20,300}"),
        (b"xoxp-", rb"\d{9,}-[\w-]{20,300}"),
        (b"AIza", rb"[\w-]{35}(?![\w-])"),
        (b"pypi-AgEIcHlwaS5vcmc", rb"[\w-]{50,300}"),
        (b"dckr_pat_", rb"[\w-]{27}(?![\w-])"),
        (b"hvs.", rb"[\w-]{90,300}"),
    )
)
_MOST: Final = 1 << 20
_FIRST: Final = 4096


def has_secret(path: str) -> bool:
    """Return whether a regular file starts as one that holds a key, or has one in the first mebibyte of its text."""
    try:
        with open(open_plain(path, os.O_RDONLY), "rb") as file:
            text = file.read(_FIRST)
            if b"\0" in text:
                return False  # weights, pictures and archives
            text += file.read(_MOST - _FIRST)
    except OSError:
        return False
    if _START.match(text, 0, _FIRST):
        return True
    return any(start in text and expression.search(text) for start, expression in _TOKENS)
