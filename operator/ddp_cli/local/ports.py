"""Reserve TCP ports of this machine. Standard library only: GPU machines run tests that need them."""

import atexit
import socket
import sys


def hold_port(number: int = 0) -> socket.socket:
    """Return a socket that reserves a TCP port, any free one for 0. Raises: OSError.

    While it is open without listening, Linux assigns the port only to a process that requests this number with
    SO_REUSEADDR, as servers do. Connections are refused until that process listens.
    """
    holder = socket.socket()
    try:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", number))
    except OSError:
        holder.close()
        raise
    return holder


def hold_free_port() -> int:
    """Return a TCP port that no other program is assigned while this process lives.

    Pod 0 listens there seconds later, and again in each attempt; meanwhile any outgoing connection might use the port.
    """
    holder = hold_port()
    port = int(holder.getsockname()[1])
    if sys.platform == "linux":
        atexit.register(holder.close)
    else:
        holder.close()  # other systems would refuse the port to pod 0 as well
    return port
