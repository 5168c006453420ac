"""The local cluster's DNS: every pod's host name is an address of this machine."""

from __future__ import annotations

import re

from ddp_operator.launcher.pod import loopback_address


def rewrite_hosts(text: str, job: str, subdomain: str) -> str:
    """Replace the DNS names of the job's pods in ``text`` by their addresses here."""
    domain = r"(?:\.[a-z0-9-]+\.svc(?:\.[a-z0-9-]+)*)?"
    pattern = rf"(?<![\w.-]){re.escape(job)}-(\d+)\.{re.escape(subdomain)}{domain}(?![\w-])"
    return re.sub(pattern, lambda match: loopback_address(int(match[1])), text)
