"""Where the code of a job is in its pods, as `ddp submit --workdir` packs it. Public, as the constants are."""

from typing import Final

CODE_MOUNT_PATH: Final = "/opt/ddp-code"
CODE_FILE: Final = "code.tar.gz"  # in a ConfigMap and in an image
CODE_FOLDER: Final = "/workspace"  # the archive is unpacked there
PACKAGES_MOUNT_PATH: Final = "/opt/ddp-packages"
