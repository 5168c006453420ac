"""Keep a rank's stores off the network where all ranks are on one machine.

torch's TCPStore listens on all addresses, whatever its host is. In a rank's program a store whose host is a loopback
address listens on that address alone.
"""

import errno
import functools
import importlib
import os
import socket
from typing import Any, Callable

from ..files import log
from .import_hook import ImportHook

_GROUPS_MODULE = "torch.distributed.distributed_c10d"  # by whose import the store's class is loaded
_BACKLOG = 2048
_PARAMETERS = (
    "host_name",
    "port",
    "world_size",
    "is_master",
    "timeout",
    "wait_for_workers",
    "multi_tenant",
    "master_listen_fd",
    "use_libuv",
)


def is_loopback(host: Any) -> bool:
    """Tell whether a host is an IPv4 address of the loopback interface."""
    return isinstance(host, str) and host.startswith("127.")


class StoreHook(ImportHook):
    """Binds the stores of a rank's program once it imports torch."""

    def __init__(self) -> None:
        super().__init__(_GROUPS_MODULE)

    def watch(self, module: Any) -> None:
        """Bind them."""
        bind_stores()


def bind_stores() -> None:
    """Let each store of this process whose host is a loopback address listen on that address alone."""
    try:
        kind: Any = importlib.import_module("torch.distributed").TCPStore
        if getattr(kind.__init__, "binds_loopback", False):
            return
        kind.__init__ = _bind(kind.__init__)
    except (ImportError, AttributeError, TypeError) as error:
        log(f"torch's stores of this process listen on all addresses: {error}")


def _bind(initialize: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(initialize)
    def initialize_on_loopback(store: Any, *args: Any, **kwargs: Any) -> None:
        given = {**{_PARAMETERS[place]: value for place, value in enumerate(args)}, **kwargs}
        serves = given.get("is_master") and given.get("master_listen_fd") is None
        if serves and is_loopback(given.get("host_name")):
            _serve(initialize, store, given)
        else:
            initialize(store, *args, **kwargs)

    initialize_on_loopback.binds_loopback = True  # type: ignore[attr-defined]
    return initialize_on_loopback


def _serve(initialize: Callable[..., None], store: Any, given: "dict[str, Any]") -> None:
    """Initialize a store that serves. Raises: what torch raises where the port is taken, RuntimeError of a kind."""
    host = given["host_name"]
    port = int(given["port"])
    try:
        listener = _bind_socket(host, port)
        listener.listen(_BACKLOG)
    except OSError as error:
        if error.errno != errno.EADDRINUSE or not given.get("multi_tenant"):
            raise _describe(host, port, error) from None
        _share(initialize, store, given, error)
        return
    given["port"] = listener.getsockname()[1]
    given["master_listen_fd"] = listener.detach()  # the store closes it
    initialize(store, **given)


def _share(initialize: Callable[..., None], store: Any, given: "dict[str, Any]", taken: OSError) -> None:
    """Initialize one more store on the server that this process has on its port already.

    torch looks for that before it uses the socket, and refuses one with another port: it never listens elsewhere.
    """
    spare = _bind_socket(given["host_name"], 0)
    descriptor = spare.detach()
    try:
        initialize(store, **given, master_listen_fd=descriptor)
    except RuntimeError:  # the descriptor is torch's then
        raise _describe(given["host_name"], int(given["port"]), taken) from None
    os.close(descriptor)


def _bind_socket(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError:
        listener.close()
        raise
    return listener


def _describe(host: str, port: int, error: OSError) -> Exception:
    kind = getattr(importlib.import_module("torch.distributed"), "DistNetworkError", RuntimeError)
    name = errno.errorcode.get(error.errno or 0, "")
    problem: Exception = kind(
        f"The server socket has failed to listen on {host}. port: {port}, name: {name}, message: {error.strerror}"
    )
    return problem
