"""What fills a GPU, by kind: the classifier, on live allocations and on PyTorch's public history."""

import torch
from torch import nn
from virtual_gpus import record_training, virtual_gpus
from virtual_gpus.timeline.peak import ACTIVATIONS, OTHER, PARAMETERS, PeakLog, kind_of

TORCH = "/site-packages/torch"


def test_the_stack_of_an_allocation_says_its_kind():
    call, program = (f"{TORCH}/nn/modules/module.py", "_call_impl"), ("train.py", "train")
    assert kind_of([]) == ACTIVATIONS  # a thread of C++: autograd's
    assert kind_of([program]) == OTHER
    assert kind_of([call, program]) == ACTIVATIONS
    assert kind_of([("C:\\torch\\nn\\modules\\module.py", "_apply")]) == PARAMETERS
    assert kind_of([(f"{TORCH}/nn/modules/linear.py", "__init__")]) == PARAMETERS
    # The innermost one that says something counts.
    assert kind_of([(f"{TORCH}/nn/parallel/replicate.py", "replicate"), call]) == PARAMETERS


def test_a_block_counts_by_its_kind_at_the_peak_though_another_takes_its_address():
    log = PeakLog([(1, 100)])
    log.mark(PARAMETERS, 1)
    log.allocated(2, 70, OTHER)
    log.freed(2, 70)
    log.allocated(2, 50, ACTIVATIONS)
    log.freed(9, 5)  # nobody knows it
    log.fold()
    assert log.peak == 170 and (log.by_kind[PARAMETERS], log.by_kind[OTHER]) == (100, 70)


def test_the_history_gives_the_kinds_that_the_recorder_finds(workspaces_given_back):
    with virtual_gpus(1, memory="1 GiB", shapes_only=True):
        net = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)).cuda()
        adam = torch.optim.Adam(net.parameters(), fused=True)
        torch.cuda.memory._record_memory_history("all", context="alloc", stacks="python")
        with record_training() as recorded:
            x = torch.empty(4096, 512, device="cuda")
            loss = nn.functional.mse_loss(net(x), torch.empty(4096, 512, device="cuda"))
            held = {ACTIVATIONS: 0, OTHER: 0}
            for segment in torch.cuda.memory._snapshot()["segments"]:
                for block in segment["blocks"]:
                    if block["state"] == "active_allocated" and block["frames"]:  # the parameters are older
                        held[kind_of((f["filename"], f["name"]) for f in block["frames"])] += block["size"]
            loss.backward()
            adam.step()
        kinds = recorded.report().by_kind
    assert kinds["parameters"] == 2 * (512 * 512 + 512) * 4
    assert held == {ACTIVATIONS: held[ACTIVATIONS], OTHER: 2 * 4096 * 512 * 4}  # the input and the targets
    assert kinds[ACTIVATIONS] >= held[ACTIVATIONS] > 2 * 4096 * 512 * 4
