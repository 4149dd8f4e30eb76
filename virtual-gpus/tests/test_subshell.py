"""JupyterLab runs widget callbacks in a kernel subshell, a thread of its own: a slider may name a GPU too."""

from jupyter_client.manager import start_new_kernel
from ranks import HANGS_S

START = """
import torch
from virtual_gpus import virtual_gpus
virtual_gpus(3, memory="1 GiB").start()
weight = torch.ones(1000, device="cuda:2", requires_grad=True)
"""
CALLBACK = """
import threading
x = torch.zeros(3, device="cuda:1")
y = (weight * 2).sum()
y.backward()
print(threading.current_thread() is threading.main_thread(), x.device, y.device, weight.grad.device,
      torch.cuda.memory_allocated(1), torch.cuda.current_device())
"""


def run(client, code, subshell=None):
    """Run `code` in the main shell or in a subshell; what it printed. Fails on an error in the cell."""
    message = client.session.msg("execute_request", {"code": code, "silent": False, "store_history": False})
    message["header"]["subshell_id"] = subshell
    client.shell_channel.send(message)
    printed = []
    while True:
        reply = client.get_iopub_msg(timeout=HANGS_S)
        if reply["parent_header"].get("msg_id") != message["header"]["msg_id"]:
            continue
        if reply["msg_type"] == "stream" and reply["content"]["name"] == "stdout":
            printed.append(reply["content"]["text"])
        assert reply["msg_type"] != "error", reply["content"]["evalue"]
        if reply["msg_type"] == "status" and reply["content"]["execution_state"] == "idle":
            return "".join(printed)


def create_subshell(client):
    client.control_channel.send(client.session.msg("create_subshell_request"))
    return client.get_control_msg(timeout=HANGS_S)["content"]["subshell_id"]


def test_subshells_made_before_and_after_the_gpus_see_them():
    manager, client = start_new_kernel(startup_timeout=HANGS_S, kernel_name="python3")
    try:
        before = create_subshell(client)
        run(client, "1 + 1", before)  # the thread exists before there are virtual GPUs
        run(client, START)
        after = create_subshell(client)
        for name, subshell in (("a thread from before", before), ("a new thread", after)):
            assert run(client, CALLBACK, subshell).strip() == "False cuda:1 cuda:2 cuda:2 512 0", name
        assert run(client, CALLBACK).strip().startswith("True cuda:1 cuda:2 cuda:2")
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
