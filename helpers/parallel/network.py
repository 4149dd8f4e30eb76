"""The network of one machine: the address, the interface and the store through which its ranks talk."""

import os
import socket
import sys

import psutil

HOST = "127.0.0.1"


def loopback() -> str | None:
    """Return the name of the interface that has the address 127.0.0.1, as GLOO_SOCKET_IFNAME wants it.

    It is "lo" on Linux, "lo0" on macOS and "Loopback Pseudo-Interface 1" on Windows. On macOS and Windows gloo takes
    the names from libuv (gloo/transport/uv/device.cc). There, psutil's names are the same, and those of
    socket.if_nameindex() are not. None if no interface has the address.
    """
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == HOST for each in addresses):
            return name
    return None


def interface() -> dict[str, str]:
    """The environment variable that keeps gloo on this machine, unless the user has set it.

    Without it, gloo looks up the name of the host, which fails or takes seconds on many laptops.
    """
    name = loopback()
    return {"GLOO_SOCKET_IFNAME": name} if name and "GLOO_SOCKET_IFNAME" not in os.environ else {}


def has_libuv() -> bool:
    """Whether a TCPStore may use libuv, as torch/distributed/rendezvous.py decides it. PyTorch for Windows cannot."""
    return os.environ.get("USE_LIBUV", "0" if sys.platform == "win32" else "1") == "1"


def free_port() -> int:
    """Return a port of this machine that nobody uses at the moment."""
    with socket.create_server((HOST, 0)) as server:
        return server.getsockname()[1]
