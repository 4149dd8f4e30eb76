"""DistributedTrainer: each step is the step of one GPU, and what is added up over ranks is added up right."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset
from virtual_gpus import virtual_gpus

from helpers.parallel.launching import launch
from helpers.parallel.ranks import rank_loader
from helpers.train.loops import DistributedTrainer
from helpers.train.loops.micro_batches import real_batches
from helpers.train.loops.scores import label_weight
from tests.ddp_jobs import JOBS, LOSS, SGD, in_ranks, largest_difference, mlp, numbers, run, run_in_rank, same, trainer


def check_equal(one, ranks, tolerance=1e-6):
    """`ranks` (their answers) are equal to each other, and to one device."""
    for other in ranks:
        assert same(other["weights"], ranks[0]["weights"])
        assert other["losses"] == ranks[0]["losses"] and other["score"] == ranks[0]["score"]
    other = ranks[0]
    assert other["history"] == one["history"]
    assert other["losses"] == pytest.approx(one["losses"], rel=1e-5)
    assert other["score"].loss == pytest.approx(one["score"].loss, rel=1e-5)
    assert other["score"].accuracy == one["score"].accuracy
    for here, there in zip(other["steps"], one["steps"], strict=True):
        assert largest_difference(here, there) < tolerance
    return other


# ------------------------------------------------------------------------------------------------- equality


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_each_step_equals_one_device_s(job, ranks):
    one = run(job=job, watch=True)
    there = check_equal(one, in_ranks(ranks, job=job, watch=True), 5e-6)
    moved = largest_difference(there["steps"][0], there["steps"][-1])
    assert moved > 1e-3 or len(there["steps"]) < 3


@pytest.mark.parametrize("samples", [5, 6, 7, 8, 11])
def test_lengths_that_do_not_divide(samples):
    job = (mlp, partial(numbers, samples), 6)
    check_equal(run(job=job, watch=True), in_ranks(3, job=job, watch=True))


@pytest.mark.parametrize("job", ["numbers", "words"])
def test_accumulated_micro_batches_equal_one_batch(job):
    """Batches of 4 by twos, also where the last step of an epoch has one only."""
    one = run(job=job, watch=True)
    check_equal(one, [run(job=job, watch=True, batch=4, accumulate=2)], 5e-6)
    check_equal(one, in_ranks(2, job=job, watch=True, batch=4, accumulate=2), 5e-6)


def test_a_single_rank_is_one_device_bit_for_bit():
    one, other = run(watch=True), in_ranks(1, watch=True)[0]
    assert same(one["weights"], other["weights"]) and one["losses"] == other["losses"]


def test_class_weights_are_what_the_mean_is_over():
    loss = nn.CrossEntropyLoss(weight=torch.tensor([0.1, 1.0, 5.0]), ignore_index=1)
    one = run(watch=True, loss=loss)
    check_equal(one, in_ranks(4, watch=True, loss=loss))
    assert label_weight(loss, torch.tensor([0, 1, 2, 2])).item() == pytest.approx(10.1)


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
    # The running means are each rank's own during an epoch; evaluation and checkpoints have rank 0's.
    assert ranks[0]["score"] == ranks[1]["score"] and same(ranks[0]["weights"], ranks[1]["weights"])
    assert largest_difference(ranks[0]["weights"], run(job=job)["weights"]) > 1e-3


def test_every_rank_starts_from_rank_0_s_weights_and_draws_its_own_dropout():
    def act(rank):
        torch.manual_seed(rank)
        model = mlp()
        before = model[0].weight.detach().clone()
        made = trainer(model=model)
        after = model[0].weight.detach().clone()
        made._seed_epoch()
        return before, after, torch.rand(3)

    (before, after, drawn), (other_before, other_after, other_drawn) = launch(act, ranks=2, show=False)
    assert not torch.equal(before, other_before)
    assert torch.equal(before, after) and torch.equal(before, other_after)
    assert not torch.equal(drawn, other_drawn)


# --------------------------------------------------------------------------- accumulation, precision, clipping


def test_micro_batches_are_averaged_once():
    calls = []

    def act(rank):
        made = trainer(batch=2, accumulate=4)

        def hook(state, bucket):
            calls.append(bucket.buffer().numel())
            done = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done

        made.network.register_comm_hook(None, hook)
        made.train(1)
        return calls, made.history[0].steps

    for calls, steps in launch(act, ranks=2, show=False):
        # 22 samples, 8 a step: two whole steps and one of 3 micro-batches; one bucket each.
        assert steps == 3 and len(calls) == 3


def test_the_ranks_weights_are_added_up_a_step_ahead():
    """So that no rank waits for another one's forward pass before its own `backward`."""

    def what_happens():
        seen, made = [], trainer()
        load, step, shares = made.loader, made._step, made.shares
        made.loader = (seen.append("load") or batch for batch in load)
        made.shares = lambda batches: seen.append("add up") or shares(batches)
        made._step = lambda *arguments: seen.append("step") or step(*arguments)
        made.train(1)
        return seen

    one = ["load", "add up"]
    assert in_ranks(2, what_happens) == [one * 2 + ["step", *one, "step", "step"]] * 2


def test_clipping_uses_the_gradients_of_all_ranks():
    one = run(watch=True, clip=0.05)
    check_equal(one, in_ranks(4, watch=True, clip=0.05))
    assert largest_difference(one["weights"], run()["weights"]) > 1e-3


@pytest.mark.parametrize("amp", ["bf16", "fp16"])
def test_half_precision_trains_and_stays_near(amp):
    ranks = in_ranks(2, amp=amp, clip=1.0, act=lambda made: made.precision.state_dict())
    assert same(ranks[0]["weights"], ranks[1]["weights"]) and ranks[0]["more"] == ranks[1]["more"]
    exact = run(clip=1.0)
    assert 0 < largest_difference(ranks[0]["weights"], exact["weights"]) < 0.02
    assert ranks[0]["losses"] == pytest.approx(exact["losses"], rel=0.02)


def test_fp16_clips_unscaled_gradients_and_leaves_out_a_step_that_overflows_on_one_rank():
    def act(rank):
        made = trainer(amp="fp16", clip=0.5)
        inputs, labels = (tensor[4 * rank : 4 * rank + 4] for tensor in numbers().tensors)
        made.step(inputs, labels)
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in made.model.parameters()])
        before = [parameter.detach().clone() for parameter in made.model.parameters()]
        scale = made.precision.scaler.get_scale()
        made.step(inputs * (1e30 if rank else 1), labels)
        return norm.item(), same(before, list(made.model.parameters())), made.precision.scaler.get_scale() / scale

    for norm, unchanged, scale in launch(act, ranks=2, show=False):
        assert norm <= 0.5 * 1.001 and unchanged and scale == 0.5


# ---------------------------------------------------------------------------------------------- evaluation


def everything(job="numbers"):
    one = trainer(job)
    return one.evaluate(DataLoader(JOBS[job][1](), 5))


@pytest.mark.parametrize("job", ["numbers", "words"])
def test_evaluation_counts_each_sample_once(job):
    def act(rank):
        made, data = trainer(job), JOBS[job][1]()
        shares = [
            rank_loader(data, 8, shuffle=False),  # padded to a multiple of 4
            rank_loader(data, 4, shuffle=False),  # the last batch of some ranks is padding only
            DataLoader(data, 5),  # every rank has everything
            DataLoader(Subset(data, range(rank, len(data), 4)), 2),  # uneven numbers of batches
            DataLoader(Subset(data, range(len(data)) if rank == 2 else []), 2),  # one rank has it all
        ]
        return [made.evaluate(loader) for loader in shares]

    expected = everything(job)
    for scores in launch(act, ranks=4, show=False):
        for score in scores:
            assert score.loss == pytest.approx(expected.loss, rel=1e-5) and score.accuracy == expected.accuracy


def test_an_evaluation_without_a_sample_is_refused_on_every_rank():
    def act(rank):
        with pytest.raises(ValueError, match="the loader gave no batch"):
            trainer().evaluate([])
        return True

    assert launch(act, ranks=2, show=False) == [True, True]


def test_the_padding_is_taken_away_wherever_the_sampler_put_it():
    """Over all ranks exactly the data set, whatever its length, the batch and drop_last."""
    for samples in range(1, 14):
        for ranks in (2, 3, 5):
            for batch in (1, 2, 3):
                for drop_last in (False, True):
                    seen = shards(samples, ranks, batch, drop_last, loader_drops=False)
                    assert seen == list(range(samples // ranks * ranks if drop_last else samples)), (samples, ranks)
                    dropped = shards(samples, ranks, batch, drop_last, loader_drops=True)
                    assert set(dropped) <= set(seen) and len(dropped) == len(set(dropped))


def shards(samples, ranks, batch, drop_last, loader_drops):
    data = [(torch.tensor(number), torch.tensor(number)) for number in range(samples)]
    seen = []
    for rank in range(ranks):
        sampler = DistributedSampler(data, ranks, rank, shuffle=False, drop_last=drop_last)
        loader = DataLoader(data, batch, sampler=sampler, drop_last=loader_drops)
        seen += [int(label) for item in real_batches(loader, loader) if item.counts for label in item.labels]
    return sorted(seen)


# ---------------------------------------------------------------------------------------------- virtual GPUs


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


@pytest.mark.parametrize("amp", ["bf16", "fp16"])
def test_half_precision_on_virtual_gpus(amp):
    with virtual_gpus(2):
        ranks = in_ranks(2, job="words", amp=amp, clip=1.0, accumulate=2, batch=4)
    exact = run(job="words", clip=1.0)
    assert same(ranks[0]["weights"], ranks[1]["weights"])
    assert ranks[0]["losses"] == pytest.approx(exact["losses"], rel=0.02) and ranks[0]["losses"] != exact["losses"]


@pytest.mark.gpu(2)
@pytest.mark.parametrize("options", [{"job": "numbers"}, {"job": "words", "batch": 4, "accumulate": 2}])
def test_on_real_gpus_with_nccl(options):
    ranks = launch(run_in_rank, options | {"watch": True}, ranks=2, show=False, timeout=300)
    check_equal(run(**options, watch=True), ranks, 1e-4)


def test_two_ranks_on_one_gpu_are_refused():
    def act(rank):
        model = mlp()
        with pytest.raises(ValueError, match="ranks 0 and 1 train on the same GPU .*give each its own"):
            DistributedTrainer(model, torch.optim.SGD(model.parameters()), LOSS, [], device="cuda:0")
        return True

    with virtual_gpus(2):
        assert launch(act, ranks=2, show=False) == [True, True]


def test_synchronised_batch_norm_equals_one_device():
    job = (partial(mlp, norm=partial(nn.BatchNorm1d, 16)), partial(numbers, 16), 8)
    with virtual_gpus(2):
        ranks = in_ranks(2, job=job, watch=True, sync_batchnorm=True)
    check_equal(run(job=job, watch=True), ranks, 1e-5)


def test_synchronised_batch_norm_on_the_cpu_is_refused():
    def act(rank):
        with pytest.raises(ValueError, match="SyncBatchNorm works on GPUs only"):
            trainer(sync_batchnorm=True)
        return True

    assert launch(act, ranks=1, show=False) == [True]


# ------------------------------------------------------------------------------------------------ what is said


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


def test_a_nan_loss_on_one_rank_stops_all_of_them(tmp_path):
    def act(rank):
        made = trainer(checkpoint=tmp_path / "last.pt", save_every=1)
        inputs, labels = (tensor[:4] for tensor in numbers().tensors)
        made.loader = [(inputs * (float("nan") if rank else 1.0), labels)]
        with pytest.raises(FloatingPointError, match="epoch 0 on 2 x cpu is nan"):
            made.train(1)
        return True

    assert launch(act, ranks=2, show=False) == [True, True]
    assert not (tmp_path / "last.pt").exists()


def test_without_a_process_group():
    model = mlp()
    with pytest.raises(RuntimeError, match=r"no process group.*start this with launch\(\.\.\.\).*torchrun"):
        DistributedTrainer(model, torch.optim.SGD(model.parameters()), LOSS, [])


def test_ranks_that_do_not_fit_together():
    def act(rank):
        model, data = mlp(), numbers()

        def make(loader, **options):
            return DistributedTrainer(model, torch.optim.SGD(model.parameters()), LOSS, loader, "cpu", **options)

        with pytest.raises(ValueError, match="RandomSampler is not for 2 ranks.*rank_loader"):
            make(DataLoader(data, 4, shuffle=True))
        with pytest.raises(
            ValueError, match=r"the ranks must agree, and do not \(batches in the loader: 2, 3, in rank"
        ):
            make([(None, None)] * (2 + rank))
        with pytest.raises(ValueError, match="accumulate: 1, 2"):
            make(rank_loader(data, 4), accumulate=1 + rank)
        with pytest.raises(ValueError, match="a batch of 3 cannot be shared equally by 2 ranks.*take 2 or 4"):
            rank_loader(data, 3)
        with pytest.raises(ValueError, match="a batch of 1 cannot .* take 2, or start fewer ranks"):
            rank_loader(data, 1)
        return True

    assert launch(act, ranks=2, show=False) == [True, True]


def test_options_that_make_no_sense():
    for options, text in (
        ({"schedule": "batch"}, 'schedule must be "epoch" or "step"'),
        ({"accumulate": 0}, "accumulate must be a whole number of at least 1, not 0"),
        ({"save_every": 1.5, "checkpoint": "x"}, "save_every must be a whole number"),
        ({"save_every": 2}, "give checkpoint= as well"),
        ({"clip": 0.0}, "above 0, not 0.0"),
        ({"amp": "float16"}, 'amp must be None, "bf16" or "fp16"'),
    ):
        with pytest.raises(ValueError, match=text):
            trainer(**options)


def test_data_parallel_trains_in_fp16_and_accumulates():
    from helpers.train.loops import DataParallelTrainer

    def act(**options):
        torch.manual_seed(0)
        model = mlp()
        with virtual_gpus(2):
            loader = rank_loader(numbers(), 4)
            made = DataParallelTrainer(model, SGD(model.parameters()), LOSS, loader, range(2), log=None, **options)
            made.train(2)
            return [record.loss for record in made.history]

    exact = run()
    assert act(accumulate=2) == pytest.approx(exact["losses"], rel=1e-5)
    assert act(accumulate=2, amp="fp16", clip=5.0) == pytest.approx(exact["losses"], rel=0.02)


def test_data_parallel_refuses_bf16_that_its_threads_would_not_see():
    with virtual_gpus(2):
        from helpers.train.loops import DataParallelTrainer

        model = mlp()
        with pytest.raises(ValueError, match="threads would compute in float16"):
            DataParallelTrainer(model, torch.optim.SGD(model.parameters()), LOSS, [], range(2), amp="bf16")
