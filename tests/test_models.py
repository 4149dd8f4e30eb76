"""The networks of the lessons: sizes, shapes, seeds, and that their forward passes name no device."""

import math

import pytest
import torch
from article_nets import Bert, BertBlock, PyramidBlock, PyramidNet, bert_article, pyramidnet_article
from torch import nn
from virtual_gpus import virtual_gpus

from helpers import models
from helpers.models import parameter_count


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def test_article_pyramidnet_has_the_article_s_parameters():
    net = pyramidnet_article()
    assert parameter_count(net) == 24_253_410
    assert [block.conv2.out_channels for block in net.blocks] == list(range(21, 272, 5)) and len(net.blocks) == 3 * 17
    assert [number for number, block in enumerate(net.blocks) if block.stride == 2] == [17, 34]
    rounded = PyramidNet(depth=14, alpha=20).blocks
    assert [block.conv2.out_channels for block in rounded] == [19, 23, 26, 29, 33, 36]


@pytest.mark.parametrize("size", [32, 27])
def test_pyramidnet_takes_even_and_odd_image_sizes(size):
    net = PyramidNet(depth=8, alpha=12, classes=7)
    assert net(torch.randn(2, 3, size, size)).shape == (2, 7)


def test_pyramid_shortcut_is_a_pooled_input_with_channels_of_zeros():
    block = PyramidBlock(3, 5, stride=2)
    nn.init.zeros_(block.bn3.weight)
    x = torch.randn(2, 3, 4, 4)
    y = block(x)
    assert torch.equal(y[:, :3], nn.functional.avg_pool2d(x, 2))
    assert not y[:, 3:].any()


def test_group_norm_treats_each_sample_alone_and_batch_norm_does_not():
    x = torch.randn(4, 3, 32, 32)
    for norm, alone in ((models.group_norm, True), (nn.BatchNorm2d, False)):
        net = models.small_resnet(norm=norm)
        pieces = torch.cat([net(piece) for piece in x.chunk(2)])
        assert torch.allclose(net(x), pieces, atol=1e-5) is alone


def test_article_bert_has_the_article_s_sizes():
    article = bert_article()
    assert (article.token.num_embeddings, article.token.embedding_dim) == (30_000, 256)
    assert article.place.num_embeddings == 163 and len(article.blocks) == 8
    assert {block.heads for block in article.blocks} == {8}
    # 2 embeddings, 8 blocks of 12 h^2 + 13 h, the last norm, the head with its bias
    h, v = 256, 30_000
    assert parameter_count(article) == v * h + 163 * h + 8 * (12 * h * h + 13 * h) + 2 * h + v * h + v
    article.head.weight = article.token.weight
    assert parameter_count(article) == v * h + 163 * h + 8 * (12 * h * h + 13 * h) + 2 * h + v


@pytest.mark.parametrize("tied", [False, True])
def test_a_new_llama_knows_nothing(tied):
    words = torch.randint(0, 512, (2, 33))
    loss = nn.functional.cross_entropy(models.Llama(tied=tied)(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
    assert abs(loss.item() - math.log(512)) < 0.8


def test_wrong_sizes_are_named():
    with pytest.raises(ValueError, match="A sample has 9 tokens, but the model has 8 positions"):
        Bert(50, 16, 1, 4, length=8)(torch.zeros(1, 9, dtype=torch.long))
    with pytest.raises(ValueError, match="multiple of heads"):
        Bert(50, hidden=10, layers=1, heads=4, length=8)
    for heads, kv_heads in ((0, 4), (8, 0), (-8, 4), (6, 3), (8, 3)):
        with pytest.raises(ValueError, match=f"multiple of heads={heads}, and that of kv_heads={kv_heads}"):
            models.Llama(heads=heads, kv_heads=kv_heads)
    for depth in (9, 2):
        with pytest.raises(ValueError, match=r"6 n \+ 2"):
            PyramidNet(depth=depth, alpha=10)


def test_one_bert_block_equals_pytorch_s_own_layer():
    block = BertBlock(16, 4, dropout=0.0)
    layer = nn.TransformerEncoderLayer(16, 4, 64, 0.0, "gelu", batch_first=True, norm_first=True)
    block.project, block.up, block.down = layer.self_attn.out_proj, layer.linear1, layer.linear2
    with torch.no_grad():
        block.query_key_value.weight.copy_(layer.self_attn.in_proj_weight)
        block.query_key_value.bias.copy_(layer.self_attn.in_proj_bias)
    x = torch.randn(2, 7, 16)
    torch.testing.assert_close(block(x), layer(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("build, inputs", [(pyramidnet_article, (2, 3, 32, 32)), (bert_article, (2, 163))])
def test_full_size_nets_run_on_one_gpu_that_is_not_the_current_one(build, inputs):
    # A tensor that a forward pass makes without device= lies on the CPU or on GPU 0, and raises here.
    with virtual_gpus(2, memory="16 GiB", shapes_only=True):
        net = build().to("cuda:1")
        kind = torch.long if len(inputs) == 2 else torch.float
        output = net(torch.zeros(inputs, dtype=kind, device="cuda:1"))
        assert output.device == torch.device("cuda:1") and output.shape[0] == 2


def test_relu_net_keeps_the_size_of_numbers_and_ends_in_a_linear_layer():
    net = models.relu_net([196, 512, 512, 10])
    assert [type(part) for part in net] == [nn.Flatten, nn.Linear, nn.ReLU, nn.Linear, nn.ReLU, nn.Linear]
    assert net(torch.randn(3, 1, 14, 14)).shape == (3, 10)
    assert abs(net[1].weight.std().item() / (2 / 196) ** 0.5 - 1) < 0.05  # He: variance 2 / inputs
