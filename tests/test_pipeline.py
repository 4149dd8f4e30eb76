"""Schedules, stages, the pipeline, its panel and the sketch of a matrix that is cut."""

from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from virtual_gpus import virtual_gpus

from helpers.measure import measure_memory
from helpers.measure.timeline import record_timeline
from helpers.parallel.pipeline import Pipeline, Task, bubble, gpipe, most_kept, one_f_one_b, simulate


@pytest.mark.parametrize("schedule", [gpipe, one_f_one_b])
def test_every_stage_does_every_task_once_and_the_bubble_is_the_formulas(schedule):
    for stages, micro_batches in [(1, 5), (4, 1), (4, 2), (4, 8), (8, 3)]:
        orders = schedule(stages, micro_batches)
        every = {Task(kind, number) for kind in "FB" for number in range(micro_batches)}
        assert len(orders) == stages
        assert all(set(order) == every and len(order) == len(every) for order in orders)
        for times in ((1, 2), (3, 1)):
            slots = simulate(orders, *times)
            busy = sum(slot.end - slot.start for slot in slots) / stages
            assert 1 - busy / max(slot.end for slot in slots) == pytest.approx(bubble(stages, micro_batches))

    for arguments in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="=0 must be an integer of at least 1"):
            bubble(*arguments)


def test_what_each_stage_keeps_and_1f1b_of_four_stages_as_the_papers_draw_it():
    assert [most_kept(order) for order in gpipe(4, 8)] == [8, 8, 8, 8]
    assert [most_kept(order) for order in one_f_one_b(4, 8)] == [4, 3, 2, 1]
    assert [most_kept(order) for order in one_f_one_b(4, 2)] == [2, 2, 2, 1]
    said = [" ".join(task.kind + str(task.micro_batch) for task in order) for order in one_f_one_b(4, 5)]
    assert said[0] == "F0 F1 F2 F3 B0 F4 B1 B2 B3 B4" and said[3] == "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4"


def test_orders_of_plain_pairs_and_orders_that_never_end():
    pairs = [[tuple(task) for task in order] for order in one_f_one_b(2, 3)]
    assert simulate(pairs) == simulate(one_f_one_b(2, 3)) and most_kept(pairs[0]) == 2
    with pytest.raises(ValueError, match="never end.*stage 0 before B0, stage 1 before F1"):
        simulate([[("F", 0), ("B", 0), ("F", 1), ("B", 1)], [("F", 1), ("F", 0), ("B", 0), ("B", 1)]])


def gradients(net):
    return torch.cat([parameter.grad.flatten().cpu() for parameter in net.parameters()])


def batch():
    """Ten samples: 4 or 3 micro-batches of them are uneven."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(10, 6, generator=generator), torch.arange(10) % 4


def layers():
    torch.manual_seed(0)
    return [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)]


def gpipe_from_the_first(stages, micro_batches):
    """Another order that can be done: GPipe, with the backward passes in the order of the forward passes."""
    orders = gpipe(stages, micro_batches)
    return [sorted(order, key=lambda task: (task.kind == "B", task.micro_batch)) for order in orders]


@pytest.mark.parametrize(
    ("schedule", "count", "micro_batches"),
    [(gpipe, 1, 3), (one_f_one_b, 2, 1), (one_f_one_b, 4, 10), (gpipe, 4, 3), (gpipe_from_the_first, 2, 4)],
)
def test_loss_and_gradients_are_those_of_the_whole_batch(schedule, count, micro_batches):
    alone = nn.Sequential(*layers())
    expected = cross_entropy(alone(batch()[0]), batch()[1])
    expected.backward()
    with virtual_gpus(count) as gpus:
        parts, cuts = layers(), [round(5 * part / count) for part in range(count + 1)]
        pipeline = Pipeline([nn.Sequential(*parts[a:b]) for a, b in pairwise(cuts)], gpus, schedule)
        for steps in (1, 2):  # gradients add up
            loss = pipeline.step(*batch(), cross_entropy, micro_batches)
            assert loss.device == gpus[-1]
            torch.testing.assert_close(loss.cpu(), expected.detach())
            torch.testing.assert_close(gradients(nn.Sequential(*parts)), steps * gradients(alone), atol=1e-5, rtol=1e-4)
        assert {*pipeline.parameters()} == {*nn.Sequential(*parts).parameters()}


def test_a_pipeline_that_cannot_be_is_refused():
    with virtual_gpus(2) as gpus:
        with pytest.raises(ValueError, match="one GPU for each stage, not 2 for 1"):
            Pipeline([nn.Linear(2, 2)], gpus)
        pipeline = Pipeline([nn.Linear(2, 2), nn.Linear(2, 2)], gpus)
        for stages, schedule in (([nn.ReLU, nn.ReLU], gpipe), (nn.Sequential(nn.ReLU(), nn.ReLU()), gpipe(2, 4))):
            with pytest.raises(TypeError, match="not their classes, and as the schedule a function"):
                Pipeline(stages, gpus, schedule)
        with pytest.raises(TypeError, match="two tensors, not a tuple and a Tensor"):
            pipeline.step((torch.ones(3, 2),), torch.ones(1, 2), nn.MSELoss(), 1)
        with pytest.raises(ValueError, match="no cuda:7"):
            Pipeline([nn.Linear(2, 2)], ["cuda:7"])
        with pytest.raises(RuntimeError, match="does not require grad"), torch.no_grad():
            Pipeline([nn.Linear(2, 2)], gpus[:1]).step(torch.ones(3, 2), torch.ones(3, 2), nn.MSELoss(), 1)
        for parts, x, y, said in ((0, 3, 3, "1 to 3"), (4, 3, 3, "to 3"), (1, 3, 2, "3 inputs"), (1, 0, 0, "0 inputs")):
            with pytest.raises(ValueError, match=said):
                pipeline.step(torch.ones(x, 2), torch.ones(y, 2), nn.MSELoss(), parts)
        for loss, said in (
            (nn.CrossEntropyLoss(torch.ones(2)), "weights classes"),
            (partial(cross_entropy, weight=torch.ones(2)), "weights classes"),
            (nn.CrossEntropyLoss(), "of -100"),
            (cross_entropy, "of -100"),
            (partial(nn.CrossEntropyLoss(reduction="sum")), 'not "sum"'),
            (nn.CrossEntropyLoss, r"is a class.*: CrossEntropyLoss\(\)"),
        ):
            with pytest.raises(TypeError if loss is nn.CrossEntropyLoss else ValueError, match=said):
                pipeline.step(torch.ones(3, 2), torch.tensor([1, -100, 0]), loss, 2)
        with pytest.raises(TypeError, match="Stage 1 returned a tuple"):
            Pipeline([nn.Linear(2, 2), nn.LSTM(2, 2)], gpus).step(torch.ones(3, 2), torch.ones(3, 2), nn.MSELoss(), 1)
        with pytest.raises(RuntimeError, match="No stage has a parameter that trains"):
            Pipeline([nn.ReLU(), nn.ReLU()], gpus).step(torch.ones(3, 2), torch.ones(3, 2), nn.MSELoss(), 1)
        divides_by_samples = nn.BCEWithLogitsLoss(torch.ones(2, device=gpus[1]))
        pipeline.step(torch.ones(3, 2), torch.ones(3, 2), divides_by_samples, 2)
        pipeline.schedule = lambda stages, micro_batches: [order[:-1] for order in gpipe(stages, micro_batches)]
        with pytest.raises(ValueError, match="F and B of every micro-batch once"):
            pipeline.step(torch.ones(3, 2), torch.ones(3, 2), nn.MSELoss(), 1)


def test_a_parameter_of_two_stages_is_one_parameter_and_targets_may_lie_on_a_gpu_in_shapes_only():
    with virtual_gpus(2, shapes_only=True) as gpus:
        embedding, output = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        output.weight = embedding.weight
        pipeline = Pipeline([embedding, nn.Linear(4, 4), output], [gpus[0], gpus[1], gpus[0]])
        assert len(pipeline.parameters()) == 3
        tokens = torch.zeros(6, dtype=torch.long, device=gpus[0])
        pipeline.step(tokens, tokens, nn.CrossEntropyLoss(), 2)
        with pytest.raises(ValueError, match="Stages on different GPUs share a parameter"):
            Pipeline([embedding, output], gpus)


def test_the_modelled_bubble_is_the_formulas_and_1f1b_keeps_less(count=4, micro_batches=8):
    """GPipe, arXiv 1811.06965, section 2.3. Tolerance: 0.03 of the step, for copies and losses."""
    peaks = {}
    for schedule in (gpipe, one_f_one_b):
        with virtual_gpus(count, shapes_only=True) as gpus:
            stages = [nn.Sequential(*[nn.Linear(4096, 4096, False, gpu) for _ in range(3)]) for gpu in gpus]
            pipeline = Pipeline(stages, gpus, schedule)
            x, y = torch.empty(8192 * micro_batches, 4096, device=gpus[0]), torch.empty(8192 * micro_batches)

            def step(pipeline=pipeline, x=x, y=y):
                pipeline.step(x, y, lambda out, _: out.square().mean(), micro_batches)

            step()
            with record_timeline() as timeline:
                step()
            with measure_memory() as readings:
                step()
            peaks[schedule] = [reading.peak_allocated for reading in readings]
        idle = 1 - sum(map(timeline.utilisation, range(count))) / count
        assert idle == pytest.approx(bubble(count, micro_batches), abs=0.03)
    assert all(less < more for less, more in zip(peaks[one_f_one_b], peaks[gpipe], strict=True))
    assert peaks[one_f_one_b][-1] == min(peaks[one_f_one_b])
