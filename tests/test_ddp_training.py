"""DistributedTrainer: each step is the step of one GPU, and what is added up over ranks is added up right."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from virtual_gpus import virtual_gpus

from helpers.parallel.launching import launch
from helpers.parallel.ranks import rank_loader
from helpers.train import DistributedTrainer
from helpers.train.scores import without_padding
from tests.ddp_jobs import JOBS, LOSS, in_ranks, largest_difference, mlp, numbers, run, run_in_rank, same, trainer


def check_equal(one, ranks, tolerance=1e-6):
    """`ranks` (their answers) are equal to each other, and to one device."""
    for other in ranks:
        assert same(other["weights"], ranks[0]["weights"])
        assert other["losses"] == ranks[0]["losses"]
    other = ranks[0]
    assert other["history"] == one["history"]
    assert other["losses"] == pytest.approx(one["losses"], rel=1e-5)
    for here, there in zip(other["steps"], one["steps"], strict=True):
        assert largest_difference(here, there) < tolerance
    return other


# ------------------------------------------------------------------------------------------------- equality


@pytest.mark.parametrize("job", JOBS)
def test_each_step_equals_one_device_s(job):
    there = check_equal(run(job=job, watch=True), in_ranks(4, job=job, watch=True), 5e-6)
    assert largest_difference(there["steps"][0], there["steps"][-1]) > 1e-3


@pytest.mark.parametrize("samples", [7, 11])
def test_lengths_that_three_ranks_cannot_share_equally(samples):
    job = (mlp, partial(numbers, samples), 6)
    check_equal(run(job=job, watch=True), in_ranks(3, job=job, watch=True))


def test_class_weights_are_what_the_mean_is_over():
    loss = nn.CrossEntropyLoss(weight=torch.tensor([0.1, 1.0, 5.0]), ignore_index=1)
    check_equal(run(watch=True, loss=loss), in_ranks(4, watch=True, loss=loss))


def by_hand(job="words"):
    """DistributedDataParallel as in most programs."""
    build, data, batch = JOBS[job]
    torch.manual_seed(0)
    model = build()
    network = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sampler = DistributedSampler(data())
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, labels in DataLoader(data(), batch // dist.get_world_size(), sampler=sampler):
            optimizer.zero_grad()
            LOSS(network(inputs).flatten(0, -2), labels.flatten()).backward()
            optimizer.step()
    return [parameter.detach().clone() for parameter in model.state_dict().values()]


def test_without_exact_mean_it_is_plain_ddp_whose_mean_of_means_is_another():
    plain = in_ranks(2, by_hand)
    inexact = in_ranks(2, job="words", exact_mean=False)
    assert same(plain[0], plain[1]) and same(inexact[0]["weights"], plain[0])
    assert largest_difference(plain[0], run(job="words")["weights"]) > 1e-3


def test_batch_norm_is_where_equality_ends():
    job = (partial(mlp, norm=partial(nn.BatchNorm1d, 16)), partial(numbers, 16), 8)
    ranks = in_ranks(2, job=job)
    assert largest_difference(ranks[0]["weights"], run(job=job)["weights"]) > 1e-3


def test_every_rank_starts_from_rank_0_s_weights_and_draws_its_own_dropout():
    drawn = []

    def act(rank):
        torch.manual_seed(rank)
        model = mlp()
        before = model[0].weight.detach().clone()
        made = trainer(model=model)
        after = model[0].weight.detach().clone()
        model.register_forward_pre_hook(lambda *_: drawn.append(torch.rand(3)) if not drawn else None)
        made.train(1)
        return before, after, drawn[0]

    (before, after, mine), (other_before, other_after, other) = launch(act, ranks=2, show=False)
    assert not torch.equal(before, other_before)
    assert torch.equal(before, after) and torch.equal(before, other_after)
    assert not torch.equal(mine, other)


# ------------------------------------------------------------------------------------------------- padding


def test_the_padding_is_left_out_wherever_the_sampler_put_it():
    """Over all ranks exactly the data set, whatever its length, the batch and drop_last."""
    for samples in range(1, 14):
        for ranks in (2, 3, 5):
            for drop_last in (False, True):
                seen = shards(samples, ranks, drop_last)
                assert seen == list(range(samples // ranks * ranks if drop_last else samples)), (samples, ranks)


def shards(samples, ranks, drop_last):
    data = [(torch.tensor(number), torch.tensor(number)) for number in range(samples)]
    seen = []
    for rank in range(ranks):
        sampler = DistributedSampler(data, ranks, rank, shuffle=False, drop_last=drop_last)
        batches = without_padding(DataLoader(data, 2, sampler=sampler), ignored=-100)
        seen += [int(label) for _, labels in batches for label in labels if label != -100]
    return sorted(seen)


# ----------------------------------------------------------------------------------------------------- GPUs


def test_on_virtual_gpus_each_rank_has_its_own():
    def act(rank):
        made = trainer("words", watch=True)
        made.train(2)
        devices = {str(parameter.device) for parameter in made.model.parameters()}
        allocated = [torch.cuda.memory_allocated(gpu) for gpu in range(2)]
        return {"steps": made.scheduler.seen, "name": made.name, "devices": devices, "allocated": allocated}

    with virtual_gpus(2, memory="1 GiB"):
        answers = launch(act, ranks=2, show=False)
    one = run(job="words", watch=True)
    for rank, answer in enumerate(answers):
        assert answer["name"] == "2 x cuda" and answer["devices"] == {f"cuda:{rank}"}
        assert answer["allocated"][1 - rank] == 0
        for here, there in zip(answer["steps"], one["steps"], strict=True):
            assert largest_difference(here, there) < 5e-6
    assert answers[0]["allocated"][0] == answers[1]["allocated"][1] > 0


@pytest.mark.gpu(2)
@pytest.mark.parametrize("job", ["numbers", "words"])
def test_on_real_gpus_with_nccl(job):
    ranks = launch(run_in_rank, {"job": job, "watch": True}, ranks=2, show=False, timeout=300)
    check_equal(run(job=job, watch=True), ranks, 1e-4)


# ---------------------------------------------------------------------------------------- logs


def test_only_rank_0_logs_and_everyone_has_the_history(capsys):
    def act(rank):
        made = trainer(log=print)
        made.train(2)
        return made.history

    histories = launch(act, ranks=2)
    lines = [line for line in capsys.readouterr().out.splitlines() if "epoch" in line]
    assert histories[0] == histories[1]
    assert lines == [f"[rank 0] {record}" for record in histories[0]]
    assert lines[0].startswith("[rank 0] [2 x cpu] epoch 0 | batch 8 | steps 3 | lr 0.1000 | loss ")


# ------------------------------------------------------------------------------------------- what is refused


def test_a_nan_loss_on_one_rank_stops_all_of_them():
    def act(rank):
        made = trainer()
        inputs, labels = (tensor[:4] for tensor in numbers().tensors)
        made.loader = [(inputs * (float("nan") if rank else 1.0), labels)]
        with pytest.raises(FloatingPointError, match="epoch 0 on 2 x cpu is nan"):
            made.train(1)
        return True

    assert launch(act, ranks=2, show=False) == [True, True]


def test_without_a_process_group():
    model = mlp()
    with pytest.raises(RuntimeError, match=r"no process group.*launch\(\.\.\.\).*torchrun"):
        DistributedTrainer(model, torch.optim.SGD(model.parameters()), LOSS, [])


def test_ranks_that_do_not_fit_together():
    def act(rank):
        model, data = mlp(), numbers()

        def make(loader, device="cpu", **options):
            return DistributedTrainer(model, torch.optim.SGD(model.parameters()), LOSS, loader, device, **options)

        with pytest.raises(ValueError, match="All 2 ranks would train on the same samples.*RandomSampler.*rank_loader"):
            make(DataLoader(data, 4, shuffle=True))
        with pytest.raises(ValueError, match=r"batches in the loader: 2, 3\) in rank"):
            make([(None, None)] * (2 + rank))
        with pytest.raises(ValueError, match="exact_mean: False, True"):
            make(rank_loader(data, 4), exact_mean=rank == 1)
        return True

    with virtual_gpus(2):
        assert launch(act, ranks=2, show=False) == [True, True]
