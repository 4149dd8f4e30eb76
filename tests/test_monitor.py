"""MemoryMonitor: its curve is the allocator's to the byte, its kinds add up, and it leaves nothing behind."""

import matplotlib.pyplot as plt
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from virtual_gpus import virtual_gpus

from helpers.measure import GiB, MiB
from helpers.measure import monitor as monitor_module
from helpers.measure.monitor import KINDS, MemoryMonitor
from helpers.show import describe_memory, plot_memory
from tests.pictures import alt_text

pytestmark = pytest.mark.usefixtures("workspaces_given_back")


def net(width: int = 512) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


def train(model, optimizer, batch: int = 64, steps: int = 2, width: int = 512) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        outputs = model(torch.randn(batch, width).to("cuda:0"))
        F.cross_entropy(outputs, torch.zeros(batch, dtype=torch.long).to("cuda:0")).backward()
        del outputs
        optimizer.step()


def recorded(gpus: int = 1, batch: int = 64, steps: int = 2) -> MemoryMonitor:
    model = net().to("cuda:0")
    parallel = nn.DataParallel(model, list(range(gpus))) if gpus > 1 else model
    optimizer = torch.optim.Adam(model.parameters())
    with MemoryMonitor() as monitor:
        monitor.watch(parallel, optimizer)
        train(parallel, optimizer, batch, steps)
    return monitor


def rounded(tensors) -> int:
    return sum(-(-tensor.nbytes // 512) * 512 for tensor in tensors)


PARAMETERS = rounded(net().parameters())


@pytest.mark.parametrize("shapes_only", [False, True])
@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_the_peak_is_the_allocators_to_the_byte(gpus, shapes_only):
    with virtual_gpus(gpus, shapes_only=shapes_only):
        monitor = recorded(gpus)
        for gpu in range(gpus):
            peak = monitor.peak(gpu)
            assert peak.bytes == torch.cuda.max_memory_allocated(gpu)
            assert monitor.run(gpu).allocated[peak.event] == peak.bytes
            assert monitor.run(gpu).off == 0
            held = monitor.at_peak(gpu)
            assert tuple(held) == KINDS and sum(held.values()) == peak.bytes and min(held.values()) >= 0
            assert held["parameters"] == PARAMETERS


def test_shapes_only_records_what_numbers_do():
    found = []
    for shapes_only in (False, True):
        with virtual_gpus(2, shapes_only=shapes_only):
            monitor = recorded(2)
            found.append([(monitor.peak(gpu), monitor.at_peak(gpu), monitor.run(gpu).spans()) for gpu in (0, 1)])
    assert found[0] == found[1]


def test_what_the_allocator_did_not_split_counts_as_it_does():
    sizes = (3, 512, MiB - 1, MiB + 1, 9 * MiB + 5, 10 * MiB, 700_000, 19 * MiB + 3)
    with virtual_gpus(1):
        before = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in sizes]
        del before[::2]
        with MemoryMonitor() as monitor:
            for size in sizes + sizes[::-1]:
                before.append(torch.empty(size + 100, dtype=torch.uint8, device="cuda"))
                before.pop(len(before) // 3)
                if size == MiB + 1:
                    before.clear()
                    torch.cuda.empty_cache()
        assert monitor.run().off == 0
        assert monitor.run().allocated[-1] == torch.cuda.memory_allocated()


def test_phases_by_themselves():
    with virtual_gpus(1):
        monitor = recorded(steps=2)
        spans = monitor.run().spans()
    assert [span.phase for span in spans if span.start < span.end] == [
        *(None, "forward", "backward", None, "step"),
        *(None, "forward", "backward", None, "step"),
    ]  # between backward and step the loss is given back
    assert all(left.end == right.start for left, right in zip(spans, spans[1:], strict=False))


def test_a_large_batch_is_held_by_activations_at_the_end_of_the_forward_pass():
    with virtual_gpus(1, shapes_only=True):
        batch = 100_000
        model = net().to("cuda:0")
        with MemoryMonitor() as monitor:
            monitor.watch(model)
            inputs = torch.randn(batch, 512, device="cuda")
            model(inputs).sum().backward()
        held = monitor.at_peak()
        assert monitor.peak().phase == "backward"
    one = batch * 512 * 4  # ReLU's outputs are kept for the backward pass, the outputs of the layers before them not
    assert 2 * one <= held["activations"] <= 2 * one + batch * 10 * 4 + MiB
    assert held["other"] >= 2 * one  # the batch itself and gradients on their way
    assert held["parameters"] == PARAMETERS and held["optimizer state"] == 0


def test_gradients_and_state_are_counted_when_they_are_there():
    with virtual_gpus(1, shapes_only=True):
        model = net(4096).to("cuda:0")
        parameters = rounded(model.parameters())
        optimizer = torch.optim.Adam(model.parameters())
        with MemoryMonitor() as monitor:
            monitor.watch(model, optimizer)
            train(model, optimizer, batch=1, steps=1, width=4096)
        state = rounded(v for s in optimizer.state.values() for v in s.values() if v.is_cuda)
        held = monitor.at_peak()
    assert monitor.peak().phase == "step"
    assert (held["parameters"], held["gradients"], held["optimizer state"]) == (parameters, parameters, state)
    assert state >= 2 * parameters


def big_temporary_before(layer: nn.Module) -> None:
    """Make the peak: 64 MiB for a moment, in backward, when the gradient of `layer`'s outputs is there."""

    def temporary(gradient):
        torch.empty(64 * MiB, dtype=torch.uint8, device="cuda")

    layer.register_forward_hook(lambda module, inputs, outputs: outputs.register_hook(temporary) and None)


@pytest.mark.parametrize("accumulate", [False, True])
def test_gradients_in_the_middle_of_a_backward_pass(accumulate):
    """Those of the layers behind are there, and no other; where they add up, all are."""
    with virtual_gpus(1, shapes_only=True):
        model = nn.Sequential(*[nn.Linear(700, 700) for _ in range(5)]).to("cuda:0")
        inputs = torch.ones(8, 700, device="cuda")
        if accumulate:
            model(inputs).sum().backward()
        big_temporary_before(model[2])
        with MemoryMonitor() as monitor:
            monitor.watch(model)
            model(inputs).sum().backward()
        assert monitor.peak().phase == "backward"
        there = model if accumulate else model[3:]
        assert monitor.at_peak()["gradients"] == rounded(there.parameters())


@pytest.mark.parametrize("where", ["before forward", "after forward"])
def test_gradients_that_zero_grad_let_go_are_not_counted(where):
    """Loops call zero_grad() at either place; the new gradients lie where the old ones were."""
    with virtual_gpus(1):
        model = nn.Sequential(*[nn.Linear(700, 700) for _ in range(5)]).to("cuda:0")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        inputs = torch.ones(8, 700, device="cuda")
        with MemoryMonitor() as monitor:
            monitor.watch(model, optimizer)
            for number in range(3):
                if where == "before forward":
                    optimizer.zero_grad()
                if number == 2:
                    big_temporary_before(model[2])
                loss = model(inputs).sum()
                if where == "after forward":
                    optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        assert monitor.peak().phase == "backward"
        assert monitor.at_peak()["gradients"] == rounded(model[3:].parameters())


def test_a_model_with_a_part_in_two_places_and_parts_that_are_none():
    with virtual_gpus(1, shapes_only=True):
        shared = nn.Linear(300, 300, bias=False)
        model = nn.Sequential(shared, nn.BatchNorm1d(300), nn.Sequential(shared, nn.Linear(300, 300)))
        model[2][1].weight = shared.weight
        model.register_buffer("nothing", None)
        model[1].register_module("absent", None)
        model.to("cuda:0")
        with MemoryMonitor() as monitor:
            monitor.watch(model)
            model(torch.ones(2, 300, device="cuda")).sum().backward()
        assert monitor.at_peak()["parameters"] == rounded([*model.parameters(), *model.buffers()])


def test_two_models_with_an_optimizer_each_and_two_optimizers_of_one():
    with virtual_gpus(1, shapes_only=True):
        models = [net().to("cuda:0"), net(1024).to("cuda:0")]
        optimizers = [torch.optim.Adam(model.parameters()) for model in models]
        other = torch.optim.SGD(models[0].parameters(), lr=0.1, momentum=0.9)
        with MemoryMonitor() as monitor:
            for model, optimizer in (*zip(models, optimizers, strict=True), (models[0], other)):
                monitor.watch(model, optimizer)
            for model, width in zip(models, (512, 1024), strict=True):
                model(torch.ones(2, width, device="cuda")).sum().backward()
            for optimizer in (*optimizers, other):
                optimizer.step()
            last = torch.empty(64 * MiB, dtype=torch.uint8, device="cuda")  # the peak: all is there
        parameters = [tensor for model in models for tensor in model.parameters()]
        kept = [value for o in (*optimizers, other) for state in o.state.values() for value in state.values()]
        held = monitor.at_peak()
        assert held["parameters"] == held["gradients"] == rounded(parameters) and last.is_cuda
        assert held["optimizer state"] == rounded(value for value in kept if value is not None and value.is_cuda)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_what_a_checkpoint_computes_again_is_backward(reentrant, whole):
    """The model's own hook fires once more, and the reentrant kind calls backward() in backward."""
    with virtual_gpus(1):
        model = nn.Sequential(nn.Linear(64, 64), net(64)).to("cuda:0")
        part = model if whole else model[1]
        x = torch.ones(4, 64, device="cuda", requires_grad=True)
        with MemoryMonitor() as monitor:
            monitor.watch(model)
            first = x if whole else model[0](x)
            checkpoint(part, first, use_reentrant=reentrant).sum().backward()
        spans = [span for span in monitor.run().spans() if span.phase]
        assert [span.phase for span in spans if span.start < span.end] == [*["forward"] * whole, "backward"]
        assert monitor.run().spans()[-1].phase is None


def test_a_step_that_is_a_hook_of_a_gradient():
    with virtual_gpus(1):
        model = net().to("cuda:0")
        for parameter in model.parameters():
            alone = torch.optim.SGD([parameter], lr=0.1)

            def step(parameter, optimizer=alone):
                optimizer.step()
                optimizer.zero_grad()

            parameter.register_post_accumulate_grad_hook(step)
        with MemoryMonitor() as monitor:
            monitor.watch(model, alone)
            model(torch.ones(4, 512, device="cuda")).sum().backward()
        phases = [span.phase for span in monitor.run().spans() if span.start < span.end]
        assert phases[:3] == [None, "forward", "backward"] and set(phases[3:]) <= {"step", "backward", None}


def test_copies_of_an_evaluation_are_gone_after_it():
    with virtual_gpus(2, shapes_only=True):
        parallel = nn.DataParallel(net().to("cuda:0"), [0, 1])
        with MemoryMonitor() as monitor:
            monitor.watch(parallel)
            with torch.no_grad():
                parallel(torch.ones(8, 512, device="cuda:0"))
            kept = torch.empty(50 * MiB, dtype=torch.uint8, device="cuda:1")
        assert monitor.at_peak(1) == dict.fromkeys(KINDS, 0) | {"other": kept.numel()}


def test_copies_that_backward_does_not_need_are_gone_when_forward_has_ended():
    """An embedding's gradient needs the indices alone, so the table's copy goes with its replica."""
    with virtual_gpus(2, shapes_only=True):
        words, length, width = 100_000, 60, 256
        model = nn.Sequential(nn.Embedding(words, width), nn.Linear(width, width), nn.ReLU(), nn.Flatten())
        model.append(nn.Linear(length * width, 4096, bias=False)).to("cuda:0")
        table, *others = model.parameters()
        parallel = nn.DataParallel(model, [0, 1])
        with MemoryMonitor() as monitor:
            monitor.watch(parallel)
            tokens = torch.zeros(2_000, length, dtype=torch.long)
            parallel(tokens).sum().backward()
    # A block may be up to 1 MiB larger than its tensor.
    assert monitor.at_peak(0)["parameters"] == pytest.approx(rounded(model.parameters()), abs=MiB)
    found = monitor.at_peak(1)
    assert found["parameters"] == pytest.approx(rounded(others), abs=MiB) and rounded([table]) > 90 * MiB
    # The peak is in the embedding's backward: what it and the layer after it had kept is still there.
    assert found["activations"] == rounded([tokens[:1_000], torch.empty(1_000, length, width, device="meta")])


def test_copies_are_all_there_in_the_forward_pass():
    with virtual_gpus(2, shapes_only=True):
        parallel = nn.DataParallel(nn.Sequential(nn.Embedding(100_000, 256), nn.Linear(256, 256)).to("cuda:0"), [0, 1])
        with MemoryMonitor() as monitor:
            monitor.watch(parallel)
            outputs = parallel(torch.zeros(64, 8, dtype=torch.long))
        assert monitor.peak(1).phase == "forward" and outputs.requires_grad
        assert monitor.at_peak(1)["parameters"] == pytest.approx(rounded(parallel.parameters()), abs=MiB)


@pytest.mark.parametrize("gpus", [1, 3])
def test_a_step_is_looked_at_five_times_whatever_the_number_of_parameters(gpus, monkeypatch):
    """The cost of a mark is one reading of the allocator's counters per GPU: the benchmark times it."""
    counted, count = [], MemoryMonitor._events
    monkeypatch.setattr(MemoryMonitor, "_events", lambda self, index: counted.append(index) or count(self, index))
    with virtual_gpus(gpus, shapes_only=True):
        for layers in (2, 40):
            model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(layers)]).to("cuda:0")
            parallel = nn.DataParallel(model, list(range(gpus))) if gpus > 1 else model
            optimizer = torch.optim.Adam(model.parameters())
            with MemoryMonitor() as monitor:
                monitor.watch(parallel, optimizer)
                counted.clear()
                train(parallel, optimizer, steps=2, width=64)
                replicas = gpus if gpus > 1 else 0  # their copies are marked, each on its GPU
                assert len(counted) == 2 * (5 * gpus + replicas)
                assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


def test_the_model_inside_dataparallel_may_be_watched_too():
    found = []
    for inner in (False, True):
        with virtual_gpus(2, shapes_only=True):
            parallel = nn.DataParallel(net().to("cuda:0"), [0, 1])
            optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
            with MemoryMonitor(gpus=[0, 1]) as monitor:
                monitor.watch(parallel.module if inner else parallel, optimizer)
                train(parallel, optimizer, batch=10_000)
            found.append((monitor.peak(1).bytes, monitor.at_peak(1)))
            assert [s.phase for s in monitor.run(1).spans()][-3:] == ["forward", "backward", None]
    (peak, whole), (same_peak, inside) = found
    assert peak == same_peak and whole["parameters"] == inside["parameters"] == PARAMETERS
    assert whole["activations"] - inside["activations"] == 5_000 * 512 * 4  # the batch came before the model inside


def test_in_evaluation_the_forward_phase_ends_with_the_model():
    with virtual_gpus(1):
        model = net().to("cuda:0")
        with MemoryMonitor() as monitor, torch.no_grad():
            monitor.watch(model)
            outputs = model(torch.ones(64, 512, device="cuda"))
            kept = outputs + 1
        phases = [span.phase for span in monitor.run().spans() if span.start < span.end]
    assert phases == [None, "forward", None] and kept is not None


def test_out_of_memory_passes_through_and_the_picture_shows_what_held_it():
    with virtual_gpus(1, memory="1 GiB", shapes_only=True):
        model = net().to("cuda:0")
        with pytest.raises(torch.OutOfMemoryError), MemoryMonitor() as monitor:
            monitor.watch(model)
            train(model, torch.optim.SGD(model.parameters(), lr=0.1), batch=120_000)
        held = monitor.at_peak()
        assert monitor.peak().phase == "forward" and held["activations"] > held["other"] > 0
        failed = monitor.run().ooms[0]
        assert describe_memory(monitor).endswith(f"; out of memory after event {failed}.")
        crosses = [line for line in plot_memory(monitor).axes[0].lines if line.get_marker() == "x"]
        assert [cross.get_xdata()[0] for cross in crosses] == [failed]
        assert not torch._C._cuda_isHistoryEnabled()


def test_nothing_is_left_behind():
    with virtual_gpus(1):
        model, backward = net().to("cuda:0"), torch.autograd.backward
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ZeroDivisionError), MemoryMonitor() as monitor:
            monitor.watch(model, optimizer)
            assert torch._C._cuda_isHistoryEnabled() and torch.autograd.backward != backward
            raise ZeroDivisionError
        assert torch.autograd.backward is backward and not torch._C._cuda_isHistoryEnabled()
        assert not model._forward_hooks and not model._forward_pre_hooks and not optimizer._optimizer_step_pre_hooks
        assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


def test_who_was_recording_goes_on():
    with virtual_gpus(1):
        torch.cuda.memory._record_memory_history("all", context="all", stacks="python", max_entries=1000)
        first = torch.ones(7, device="cuda")
        with MemoryMonitor() as monitor:
            second = torch.ones(1000, device="cuda")
        third = torch.ones(7, device="cuda")
        trace = torch.cuda.memory._snapshot()["device_traces"][0]
        torch.cuda.memory._record_memory_history(None)
        made = [entry for entry in trace if entry["action"] == "alloc"]
        assert len(made) == 3 and all(entry["frames"] for entry in made) and monitor.run().last == 1
        assert all(tensor is not None for tensor in (first, second, third))


def test_errors_say_what_to_do():
    with pytest.raises(RuntimeError, match="Call use_gpus first"), MemoryMonitor():
        pass
    with virtual_gpus(1):
        with pytest.raises(ValueError, match="no cuda:3"), MemoryMonitor(gpus=3):
            pass
        monitor = MemoryMonitor()
        with monitor:
            with pytest.raises(RuntimeError, match="Create a new one"):
                monitor.__enter__()
            with pytest.raises(RuntimeError, match="not over"):
                monitor.peak(0)
        with pytest.raises(RuntimeError, match="Call watch inside the"):
            monitor.watch(net())
        for ask in (MemoryMonitor.peak, plot_memory, describe_memory):
            with pytest.raises(RuntimeError, match="Nothing was recorded"):
                ask(monitor)
        with pytest.raises(torch.OutOfMemoryError), MemoryMonitor() as stopped:  # that is not nothing
            torch.empty(2000 * GiB, dtype=torch.uint8, device="cuda")
        assert describe_memory(stopped).startswith("GPU 0: peak 0.00 MiB (event 0 of 0); out of memory after event 0")
        assert "out of memory" in [text.get_text() for text in plot_memory(stopped).legends[0].get_texts()]
        with MemoryMonitor() as full:
            kept = torch.ones(5, device="cuda")
        with pytest.raises(ValueError, match="GPU 1 was not recorded"):
            full.peak(1)
        with pytest.raises(RuntimeError, match="Call monitor.watch"):
            full.at_peak(0)
        assert full.peak().event == 1 and kept is not None


def test_the_picture_and_its_words():
    with virtual_gpus(2):
        monitor, open_figures = recorded(2, batch=4096), plt.get_fignums()
        figure = plot_memory(monitor, "Two steps")
        words = describe_memory(monitor).splitlines()
        assert len(words) == 2 and words[1].startswith(
            f"GPU 1: peak {monitor.peak(1).bytes / MiB:.1f} MiB in backward (event "
        )
        assert "parameters 2.02 MiB" in words[1] and plt.get_fignums() == open_figures
    for gpu, ax in enumerate(figure.axes):
        assert " ".join(ax.get_title("left").split()) + "." == words[gpu]
        marks = [line for line in ax.lines if line.get_marker() == "D"]
        assert marks[0].get_xdata()[0] == monitor.peak(gpu).event
        curve = ax.lines[0].get_ydata()
        assert max(curve) == monitor.peak(gpu).bytes / MiB == marks[0].get_ydata()[0]
    assert "MiB" in figure.get_supylabel() and figure.get_suptitle() == "Two steps"
    assert {text.get_text() for text in figure.legends[0].get_texts()} == {"forward", "backward", "step", "peak"}
    assert alt_text(figure) == f"Two steps\n{describe_memory(monitor)}"


def test_the_picture_of_what_is_around_the_peak():
    with virtual_gpus(2, shapes_only=True):
        monitor = recorded(2, batch=4096)
        figure = plot_memory(monitor, around=6)
        with pytest.raises(ValueError, match="1 or more"):
            plot_memory(monitor, around=0)
    for gpu, ax in enumerate(figure.axes):
        peak, allocated = monitor.peak(gpu), monitor.run(gpu).allocated
        assert ax.get_xlim() == (peak.event - 6, peak.event + 6)
        assert list(ax.lines[0].get_ydata()) == [size / MiB for size in allocated[peak.event - 6 : peak.event + 7]]
        assert f"of {monitor.run(gpu).last:,})" in " ".join(ax.get_title("left").split())
        assert all(peak.event - 6 <= patch.get_x() < peak.event + 6 for patch in ax.patches)
    phases = {text.get_text() for text in figure.legends[0].get_texts()}
    assert "backward" in phases and "step" not in phases  # what is not in the picture is not in its legend


def test_the_picture_of_very_many_phases_has_the_curve_and_no_shades():
    with virtual_gpus(1, shapes_only=True):
        monitor = recorded(steps=21)
        figure = plot_memory(monitor)
    curve, mark = [line.get_ydata() for line in figure.axes[0].lines]
    assert len(figure.axes[0].patches) == 0 and max(curve) == mark[0] == monitor.peak().bytes / MiB
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["peak"]


@pytest.mark.parametrize("gpus", [1, 2, 8])
def test_nothing_in_the_picture_is_cut_off(gpus):
    with virtual_gpus(gpus, shapes_only=True):
        title = "A title that is so long that it needs a second line, and perhaps even a third: " * 2
        figure = plot_memory(recorded(gpus), title)
    figure.canvas.draw()
    whole = figure.bbox
    parts = [figure.legends[0], figure._suptitle, figure._supylabel, *(ax.title for ax in figure.axes)]
    for part in [*parts, *(ax._left_title for ax in figure.axes)]:
        box = part.get_window_extent()
        assert box.x0 >= whole.x0 - 1 and box.x1 <= whole.x1 + 1 and box.y0 >= whole.y0 - 1 and box.y1 <= whole.y1 + 1


def test_expandable_segments_that_were_there_before_are_split_wherever_it_may_be(monkeypatch):
    """A large segment that is not expandable hands out a block whole where less than 1 MiB would be left of it."""
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    with virtual_gpus(1, shapes_only=True):
        torch.empty(20 * MiB, dtype=torch.uint8, device="cuda")
        with MemoryMonitor() as monitor:
            kept = torch.empty(20 * MiB - 4096, dtype=torch.uint8, device="cuda")
        assert monitor.peak().bytes == torch.cuda.memory_allocated() == kept.nbytes and monitor.run().off == 0


def test_a_run_that_the_history_does_not_hold_is_refused(monkeypatch):
    monkeypatch.setattr(monitor_module, "MOST_EVENTS", 20)
    with virtual_gpus(1):
        monitor = recorded()
        with pytest.raises(RuntimeError, match="does not contain the whole run"):
            monitor.peak()


def test_a_curve_that_differs_from_the_allocators_count_says_so(monkeypatch):
    with virtual_gpus(1):
        with MemoryMonitor() as monitor:
            kept = torch.ones(MiB, device="cuda")
            monkeypatch.setattr(torch.cuda, "memory_allocated", lambda index: 3 * MiB)
        assert describe_memory(monitor).endswith("; the curve ends 1.00 MiB off what the allocator counts.")
        assert kept.is_cuda
