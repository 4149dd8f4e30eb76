"""The network of one machine: the address, the interface and the store through which its ranks talk."""

from __future__ import annotations

import os
import sys

HOST = "127.0.0.1"
# The interface of that address, as gloo calls it: on macOS and Windows by libuv's names (gloo/transport/uv/device.cc).
_LOOPBACK = {"darwin": "lo0", "win32": "Loopback Pseudo-Interface 1"}


def interface() -> dict[str, str]:
    """The variable that keeps gloo on this machine, unless the user set it: looking up the host's name may fail."""
    return {} if "GLOO_SOCKET_IFNAME" in os.environ else {"GLOO_SOCKET_IFNAME": _LOOPBACK.get(sys.platform, "lo")}


def has_libuv() -> bool:
    """Whether a TCPStore may use libuv, as torch/distributed/rendezvous.py decides it. PyTorch for Windows cannot."""
    return os.environ.get("USE_LIBUV", "0" if sys.platform == "win32" else "1") == "1"
