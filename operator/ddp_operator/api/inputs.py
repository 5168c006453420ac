"""``spec.inputs``: data and models that are fetched before a job gets pods with GPUs."""

import hashlib
import re
from typing import Annotated

from msgspec import Meta, Struct

from ddp_operator.api.tracking import SecretReference
from ddp_operator.constants import INPUTS_FOLDER


class _Fields(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel", omit_defaults=True):
    """Common behaviour: as in ``spec``."""


class NodeCache(_Fields, frozen=True, kw_only=True):
    """A folder of each node, which all jobs there share; nobody deletes from it."""

    path: Annotated[str, Meta(description="Absolute path on the nodes, on a disk with room for all that is cached.")]


class Input(_Fields, frozen=True, kw_only=True):
    """Data or a model, fetched by a pod without GPUs before there are others, and mounted read-only in these."""

    name: Annotated[str | None, Meta(description="As messages have it. Unset: the last part of the URL.")] = None
    url: Annotated[
        str,
        Meta(
            description="A file, or all files below a folder or prefix: https://, file://, or what fsspec and its "
            "plug-ins in the image know: s3://, gs://, hf://, … It is fetched once; what is there is not fetched again."
        ),
    ]
    mount_path: Annotated[
        str, Meta(description="Absolute path in the container of the folder with the file, or of that folder.")
    ]
    claim_name: Annotated[
        str | None,
        Meta(description="PersistentVolumeClaim to keep it in. Several inputs and jobs may share one; or nodeCache."),
    ] = None
    node_cache: NodeCache | None = None
    checksum: Annotated[
        str | None,
        Meta(description="sha256: and 64 hexadecimal digits, of an input of one file. Another file ends the job."),
    ] = None
    secret_ref: Annotated[
        SecretReference | None,
        Meta(
            description="Secret whose keys are environment variables while it is fetched: those of the plug-in, such "
            "as AWS_ACCESS_KEY_ID or HF_TOKEN; for https:// HTTP_AUTHORIZATION, the header's value."
        ),
    ] = None

    @property
    def label(self) -> str:
        """What messages call it."""
        return self.name or self.url.partition("?")[0].rstrip("/").rpartition("/")[2] or self.url

    @property
    def key(self) -> str:
        """Its folder in a claim or cache: the same for all jobs that want the same."""
        readable = re.sub(r"[^a-z0-9.]+", "-", self.label.lower()).strip("-.")[:40]
        return f"{readable}-{hashlib.sha256(f'{self.url} {self.checksum}'.encode()).hexdigest()[:12]}"

    @property
    def place(self) -> str:
        """Where it is kept, as text: one of the same text is the same."""
        where = f"node:{self.node_cache.path.rstrip('/')}" if self.node_cache else f"claim:{self.claim_name}"
        return f"{where}/{INPUTS_FOLDER}/{self.key}"
