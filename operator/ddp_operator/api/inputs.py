"""``spec.inputs``: data and models to fetch before a job gets pods with GPUs."""

import hashlib
import re
from typing import Annotated

from msgspec import Meta

from ddp_operator.api.constants import INPUTS_FOLDER
from ddp_operator.api.fields import SpecFields
from ddp_operator.api.tracking import SecretReference


class NodeCache(SpecFields, frozen=True, kw_only=True):
    """A folder on each node, shared by all jobs of the node. Nothing deletes files from it."""

    path: Annotated[str, Meta(description="Absolute path on the nodes, on a disk with room for all cached inputs.")]


class Input(SpecFields, frozen=True, kw_only=True):
    """Data or a model. A pod without GPUs fetches it before the training pods are created; they mount it read-only."""

    name: Annotated[str | None, Meta(description="Name in messages. Unset: the last part of the URL.")] = None
    url: Annotated[
        str,
        Meta(
            description="A file, or all files below a folder or prefix: https://, file://, or any scheme of fsspec and "
            "its plug-ins in the image: s3://, gs://, hf://, … Files that were fetched before are not fetched again."
        ),
    ]
    mount_path: Annotated[
        str,
        Meta(
            description="Absolute path in the container: of the fetched folder, or of a folder with the fetched file."
        ),
    ]
    claim_name: Annotated[
        str | None,
        Meta(
            description="PersistentVolumeClaim that stores the input; several inputs and jobs may share it. Set either "
            "this or nodeCache."
        ),
    ] = None
    node_cache: NodeCache | None = None
    checksum: Annotated[
        str | None,
        Meta(
            description="For an input of one file: sha256: and 64 hexadecimal digits. The job fails if the file "
            "differs."
        ),
    ] = None
    secret_ref: Annotated[
        SecretReference | None,
        Meta(
            description="Secret whose keys become environment variables of the fetching pod: credentials of the "
            "plug-in, such as AWS_ACCESS_KEY_ID or HF_TOKEN. For https://: HTTP_AUTHORIZATION, the value of the header."
        ),
    ] = None

    @property
    def label(self) -> str:
        """The name of the input in messages."""
        return self.name or self.url.partition("?")[0].rstrip("/").rpartition("/")[2] or self.url

    @property
    def key(self) -> str:
        """The name of its folder in a claim or cache: equal for all jobs with the same URL and checksum."""
        readable = re.sub(r"[^a-z0-9.]+", "-", self.label.lower()).strip("-.")[:40]
        return f"{readable}-{hashlib.sha256(f'{self.url} {self.checksum}'.encode()).hexdigest()[:12]}"

    @property
    def place(self) -> str:
        """The location that stores it. Inputs with equal locations share their files."""
        where = f"node:{self.node_cache.path.rstrip('/')}" if self.node_cache else f"claim:{self.claim_name}"
        return f"{where}/{INPUTS_FOLDER}/{self.key}"
