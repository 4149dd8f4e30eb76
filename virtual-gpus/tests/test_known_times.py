"""Known results must come out of the clock's rules. Each test names its source and its tolerance."""

import pytest
import torch
import torch.distributed as dist
from benchmarks.reference import measure
from benchmarks.reference.networks import GPT
from measuring import recorded
from torch import nn
from torchvision.models import efficientnet_b0
from torchvision.models.resnet import Bottleneck, ResNet
from virtual_gpus import virtual_gpus

WORDS, GPUS, ALONE = 4000, 4, {"rank": 0, "world_size": 4}
SLOW = tuple(tuple("X" if a == b else "SYS" for b in range(GPUS)) for a in range(GPUS))


@pytest.fixture(autouse=True)
def networks_without_numbers():
    with measure.nothing_drawn():
        yield


def timed(step, warm_up: int = 1):
    """The timeline of a step, after others."""
    for _ in range(warm_up):
        step()
    return recorded(step)


class Halves(ResNet):
    """ResNet-50 cut in two as in PyTorch's tutorial "Single-Machine Model Parallel Best Practices"."""

    def __init__(self, split: int = 120):
        super().__init__(Bottleneck, [3, 4, 6, 3], num_classes=1000)
        self.split = split
        self.first = nn.Sequential(self.conv1, self.bn1, self.relu, self.maxpool, self.layer1, self.layer2).to(0)
        self.second = nn.Sequential(self.layer3, self.layer4, self.avgpool, nn.Flatten(), self.fc).to(1)

    def forward(self, x):
        """Micro-batches of `split` images, each sent on as soon as it is through the first half."""
        halves = iter(x.split(self.split))
        sent, done = self.first(next(halves)).to(1), []
        for images in halves:
            done.append(self.second(sent))
            sent = self.first(images).to(1)
        return torch.cat([*done, self.second(sent)])


def resnet50_seconds(build, last_gpu: int) -> float:
    """A training step of the tutorial, batch 120 of 128 x 128 images, on K80s."""
    with virtual_gpus(2, kind="K80", memory="48 GiB", shapes_only=True):
        net = build()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.001)

        def step():
            images, targets = torch.empty(120, 3, 128, 128), torch.zeros(120, 1000)
            optimizer.zero_grad()
            nn.functional.mse_loss(net(images.to(0)), targets.to(last_gpu)).backward()
            optimizer.step()

        return timed(step, warm_up=0).seconds


def test_the_pipeline_of_pytorchs_tutorial():
    """It does not name its GPU; the speed of the K80's convolutions was chosen with it in view, and with the article of
    whose jobs the course tells."""
    whole = resnet50_seconds(lambda: ResNet(Bottleneck, [3, 4, 6, 3], num_classes=1000).to(0), 0)
    split = {size: resnet50_seconds(lambda s=size: Halves(s), 1) for size in (120, 20, 8)}
    assert 0.88 * 3.75 < 3 * whole < 3.75  # three steps
    assert 1.0 < split[120] / whole < 1.10  # two GPUs by turns: 4.02 s against 3.75 s, 7 % longer
    assert whole / split[20] - 1 == pytest.approx(0.49, abs=0.10)  # a pipeline: 2.51 s, 49 % faster
    assert split[20] < min(split[120], split[8])  # small parts cost launches, large ones leave a GPU idle


def loss_of(net, words):
    return nn.functional.cross_entropy(net(words.to("cuda")).flatten(0, 1), words.to("cuda").flatten())


class WithLoss(nn.Sequential):
    """A net whose output is its loss: under DataParallel each GPU computes its own, and sends one number."""

    def forward(self, words):
        return loss_of(self[0], words).unsqueeze(0)


def small_transformer_step(links, wrap, loss, options):
    """(seconds, mean utilisation of the GPUs that this process uses) of a step."""
    with virtual_gpus(GPUS, kind="TITAN Xp", links=links, shapes_only=True, **options):
        if options:
            dist.init_process_group("nccl")
        model = GPT(0.0, WORDS, hidden=64, layers=2, heads=2, length=32).to("cuda")
        net, optimizer, words = wrap(model), torch.optim.Adam(model.parameters()), torch.zeros(32, 32).long()

        def step():
            optimizer.zero_grad()
            loss(net, words).backward()
            optimizer.step()

        timeline, used = timed(step, warm_up=2), 1 if options else GPUS
        return timeline.seconds, sum(map(timeline.utilisation, range(used))) / used


def test_dataparallel_parallel_loss_ddp_from_slowest_to_fastest():
    """Each is faster and busier than the one before, and a slower link hurts DataParallel more."""
    ways = [  # the net of a model, the loss of a net and its words, further options
        (nn.DataParallel, loss_of, {}),
        (lambda model: nn.DataParallel(WithLoss(model)), lambda net, words: net(words.to("cuda")).mean(), {}),
        (nn.parallel.DistributedDataParallel, lambda net, words: loss_of(net, words[::GPUS]), ALONE),
    ]
    (seconds, busy), (slower, _) = (zip(*(small_transformer_step(links, *way) for way in ways), strict=True)
                                    for links in (None, SLOW))  # fmt: skip
    assert list(seconds) == sorted(seconds, reverse=True) and list(busy) == sorted(busy)
    lost = [after - before for before, after in zip(seconds, slower, strict=True)]
    assert lost[0] > lost[2] >= -1e-9


def test_ddps_best_bucket_size_is_neither_the_smallest_nor_the_largest():
    """Li et al. 2020, PyTorch Distributed, figures 7 and 8: no overlap with one bucket, overhead with many."""
    found = {}
    with virtual_gpus(2, kind="K80", shapes_only=True, rank=0, world_size=2):
        dist.init_process_group("nccl")
        for size in (1e-4, 4, 1000):
            net = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(6)]).cuda()
            net = nn.parallel.DistributedDataParallel(net, bucket_cap_mb=size)
            x = torch.ones(64, 1024, device="cuda")
            found[size] = timed(lambda net=net, x=x: net(x).sum().backward(), warm_up=2)
    assert found[4].seconds < min(found[1e-4].seconds, found[1000].seconds)
    assert [sum(s.kind == "collective" for s in each.spans) for each in found.values()] == [12, 6, 1]


@pytest.mark.parametrize(("kind", "tf32", "published"), [("A100-80GB", True, 0.0494), ("V100", False, 0.0856)])
def test_depthwise_convolutions_in_efficientnet(kind, tf32, published, monkeypatch):
    """Inference of 256 images: efficientnet/README.md in NVIDIA's DeepLearningExamples, to which they were fitted."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", tf32)
    with virtual_gpus(1, kind=kind, memory="80 GiB", shapes_only=True), torch.no_grad():
        net, images = efficientnet_b0().cuda().eval(), torch.empty(256, 3, 224, 224, device="cuda")
        assert timed(lambda: net(images)).seconds == pytest.approx(published, rel=0.1)
