"""launch in a notebook: functions of cells, output that is the same in every run, the button that interrupts."""

import asyncio
from textwrap import dedent

import nbformat
import psutil
import pytest
import run_all

CELLS = {
    "start": """\
        import os, sys, time
        import torch, torch.distributed as dist
        from helpers import use_gpus
        from helpers.parallel import launch
        gpus = use_gpus(2, memory="1 GiB")
        (torch.ones(3, device="cuda:1", requires_grad=True) * 2).sum().backward()""",
    "works": """\
        class Net(torch.nn.Module):
            def forward(self, x):
                return x * factor
        factor = 3
        def work(rank):
            x = Net()(torch.full((2,), rank + 1.0, device="cuda", requires_grad=True))
            x.sum().backward()
            dist.all_reduce(x.detach())
            print("sum", x.tolist())
            print("oops", file=sys.stderr)
            os.system("echo a child")
            return x.detach(), Net()
        launch(work, ranks=2)""",
    "raises": """\
        def bad(rank):
            if rank == 1:
                Net()(None)
            dist.barrier()
        launch(bad, ranks=2)""",
    "interrupted": """\
        from pathlib import Path
        def long(rank):
            print("begun")
            Path(os.environ["BEGUN"], str(rank)).touch()
            time.sleep(600)
        launch(long, ranks=2, timeout=None)""",
    "works again": "launch(work, ranks=2)",
    "left": """\
        import psutil
        print([p.status() for p in psutil.Process().children(recursive=True)])""",
}


async def press_the_button(client, begun):
    """As soon as both ranks have begun."""
    while len(list(begun.iterdir())) < 2:
        await asyncio.sleep(0.01)
    await client.km.interrupt_kernel()


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """Name of the cell -> its outputs: stream name, "result" or "error" -> text."""
    begun, pressing = tmp_path_factory.mktemp("begun"), []
    cells = [nbformat.v4.new_code_cell(dedent(text)) for text in CELLS.values()]
    client = run_all.client_of(nbformat.v4.new_notebook(cells=cells), allow_errors=True, timeout=120)

    def beside(cell, cell_index):
        if "long" in cell.source:
            pressing.append(asyncio.create_task(press_the_button(client, begun)))

    client.on_cell_execute = beside
    client.execute(env=run_all.kernel_environment() | {"BEGUN": str(begun)})
    found = {name: {} for name in CELLS}
    for name, cell in zip(CELLS, client.nb.cells, strict=True):
        for output in cell.outputs:
            kind = {"stream": output.get("name"), "error": "error"}.get(output.output_type, "result")
            said = output.get("text") or output.get("evalue") or output.get("data", {}).get("text/plain", "")
            found[name][kind] = said if kind != "error" else f"{output.ename}: {said}"
    return found


def test_functions_of_cells_run_and_again_after_an_error_and_the_button_and_nothing_is_left(outputs):
    assert outputs["works again"] == outputs["works"]
    assert outputs["works"] == {
        "stdout": "2 ranks on 2 virtual GPUs, backend gloo in place of nccl\n"
        "[rank 0] sum [9.0, 9.0]\n[rank 0] a child\n[rank 1] sum [9.0, 9.0]\n[rank 1] a child\n",
        "stderr": "[rank 0] oops\n[rank 1] oops\n",
        "result": "[(tensor([9., 9.]), Net()), (tensor([9., 9.]), Net())]",
    }
    assert set(eval(outputs["left"]["stdout"])) <= {psutil.STATUS_ZOMBIE}


def test_an_error_names_the_cells_and_the_button_interrupts(outputs):
    error = outputs["raises"]["error"]
    assert error.startswith("RankError: Rank 1 of 2 raised TypeError: unsupported operand")
    assert '  File "Cell In[3]", line 3, in bad\n    Net()(None)\n' in error
    assert '  File "Cell In[2]", line 3, in forward\n    return x * factor\n' in error
    assert '  File "torch/nn/modules/module.py", line' in error and "site-packages" not in error
    assert outputs["interrupted"]["error"] == "KeyboardInterrupt: The 2 ranks were interrupted and ended."
    assert "[rank 0] begun\n[rank 1] begun\n" in outputs["interrupted"]["stdout"]
