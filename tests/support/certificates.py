"""Certificates for tests, by openssl."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Final

_CONFIG: Final = """
[req]
distinguished_name=dn
[dn]
[ca]
basicConstraints=critical,CA:TRUE
keyUsage=critical,keyCertSign,cRLSign,digitalSignature
subjectKeyIdentifier=hash
[server]
extendedKeyUsage=serverAuth
subjectKeyIdentifier=hash
authorityKeyIdentifier=keyid
subjectAltName=DNS:localhost,DNS:kubernetes,DNS:kubernetes.default,DNS:kubernetes.default.svc,IP:127.0.0.1,IP:10.96.0.1
[client]
extendedKeyUsage=clientAuth
subjectKeyIdentifier=hash
authorityKeyIdentifier=keyid
"""
_NEW_KEY: Final = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-config", "openssl.cnf")


class Authority:
    """A new certificate authority. Its certificate is ``ca.crt`` in ``folder``, beside those that it issues."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        (folder / "openssl.cnf").write_text(_CONFIG)
        self.call_openssl("req", "-x509", *_NEW_KEY, "-keyout", "ca.key", "-out", "ca.crt", "-days", "2",
                          "-subj", "/CN=test-ca", "-extensions", "ca")  # fmt: skip

    def issue(self, name: str, subject: str, use: str) -> None:
        """Write ``name.key`` and ``name.crt`` for a ``server`` on this machine or a ``client``."""
        self.call_openssl("req", *_NEW_KEY, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", subject)
        self.call_openssl("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.crt", "-CAkey", "ca.key",
                          "-CAcreateserial", "-days", "2", "-extfile", "openssl.cnf", "-extensions", use,
                          "-out", f"{name}.crt")  # fmt: skip

    def call_openssl(self, *arguments: str) -> None:
        """Run openssl in the folder."""
        subprocess.run(["openssl", *arguments], cwd=self.folder, check=True, capture_output=True, timeout=60)
