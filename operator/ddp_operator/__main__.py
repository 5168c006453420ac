"""``python -m ddp_operator``: run the operator."""

import argparse
import asyncio
import ctypes
import gc
import logging
import sys
from contextlib import suppress
from typing import Final

from msgspec.structs import replace

from ddp_operator._version import __version__
from ddp_operator.features import FEATURES
from ddp_operator.manager.settings import Settings, SettingsError, describe

_M_MMAP_THRESHOLD: Final = -3


def main(argv: list[str] | None = None) -> int:
    """Run the operator until SIGTERM or SIGINT; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m ddp_operator",
        description="Watch DDPTrainingJob resources and run them as Jobs. Configure it by environment variables:",
        epilog=describe(FEATURES),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"ddp-operator {__version__}")
    parser.parse_args(argv)
    try:
        settings = Settings.from_env(features=FEATURES)
    except SettingsError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 2
    return _run(settings)


def _run(settings: Settings) -> int:
    _return_large_blocks()
    # Imports create thousands of objects, few of them in cycles. ``Operator.start`` sets the later thresholds.
    gc.set_threshold(20_000, 10, 10)
    # Kopf imports the official client and pykube, if they are installed, only to recognise their objects. That takes
    # 0.5 s and 20 MB, and the operator uses neither.
    for module in ("kubernetes", "kubernetes_asyncio", "pykube"):
        sys.modules.setdefault(module, None)  # type: ignore[arg-type]
    import kopf

    import ddp_operator.manager.handlers  # noqa: F401 - registers the handlers
    from ddp_operator.manager.leader import new_identity

    identity = settings.identity or new_identity()
    _configure_logging(settings)
    try:
        asyncio.run(
            kopf.operator(
                clusterwide=not settings.namespaces,
                namespaces=settings.namespaces,
                standalone=True,
                # Without an identity Kopf reads the login name, which a pod may not have.
                identity=identity,  # type: ignore[arg-type]  # Kopf does not export its type
                memo=kopf.Memo(settings=replace(settings, identity=identity), features=FEATURES),
            )
        )
    except asyncio.CancelledError:
        return 1
    return 0


def _return_large_blocks() -> None:
    """Let glibc return each freed block of 64 KiB to the system.

    By default it raises this size when it frees a larger block, and the texts of large specs then fragment the heap.
    """
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 64 << 10)


def _configure_logging(settings: Settings) -> None:
    import kopf

    kopf.configure(log_format=kopf.LogFormat.JSON if settings.log_format == "json" else kopf.LogFormat.FULL)
    logging.getLogger().setLevel(settings.log_level.upper())


if __name__ == "__main__":
    sys.exit(main())
