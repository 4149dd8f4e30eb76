"""A cell run as a browser runs it: JupyterLab on a free port, a kernel, a websocket."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from websocket import WebSocketException, create_connection

PATIENCE_S = 60  # for each step


class LabError(RuntimeError):
    """JupyterLab did not start, or no cell could be run through it."""


def run_in_a_kernel(code: str) -> str:
    """What `code` prints in a new kernel, one line. Raises LabError. No process is left."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, _server(Path(folder)) as (address, token):
        try:
            return _run(code, address, {"Authorization": f"token {token}"})
        except (OSError, WebSocketException, ValueError, KeyError) as error:
            raise LabError(f"{type(error).__name__}: {error}") from error


@contextlib.contextmanager
def _server(folder: Path) -> Iterator[tuple[str, str]]:
    """The address and the token of a JupyterLab with empty settings. It ends with the block."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}",
        "--ServerApp.port_retries=0", f"--ServerApp.root_dir={folder}",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    ]  # fmt: skip
    token, log = secrets.token_hex(16), folder / "log.txt"
    own = {"JUPYTER_TOKEN": token, "JUPYTER_CONFIG_DIR": str(folder)}
    with log.open("wb") as output:
        server = subprocess.Popen(command, env=os.environ | own, stdout=output, stderr=output)
    try:
        end = time.monotonic() + PATIENCE_S
        while not _answers(port):
            if server.poll() is not None or time.monotonic() > end:
                said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
                raise LabError(said[-1] if said else "It did not start")
            time.sleep(0.05)
        yield f"127.0.0.1:{port}", token
    finally:
        server.terminate()
        server.wait(PATIENCE_S)


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
        return True
    return False


def _run(code: str, address: str, headers: dict[str, str]) -> str:
    # Browsers reach 127.0.0.1 without a proxy, whatever the environment says.
    without_proxy = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    new = urllib.request.Request(f"http://{address}/api/kernels", b'{"name": "python3"}', headers)
    with without_proxy.open(new, timeout=PATIENCE_S) as answer:
        kernel = json.load(answer)["id"]
    host, _, port = address.partition(":")
    direct = socket.create_connection((host, int(port)), timeout=PATIENCE_S)
    url = f"ws://{address}/api/kernels/{kernel}/channels"
    channels = create_connection(url, timeout=PATIENCE_S, header=headers, socket=direct)
    with contextlib.closing(channels):
        header = {"msg_id": "1", "msg_type": "execute_request", "session": "1", "username": "", "version": "5.3"}
        content = {"code": code, "silent": False, "allow_stdin": False}
        request = {"header": header, "parent_header": {}, "metadata": {}, "content": content, "channel": "shell"}
        channels.send(json.dumps(request))
        while True:  # until the timeout of the connection
            message = json.loads(channels.recv())
            if message["msg_type"] == "stream" and message["parent_header"].get("msg_id") == "1":
                return message["content"]["text"].strip()
