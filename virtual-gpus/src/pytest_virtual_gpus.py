"""A pytest plugin that runs tests on virtual GPUs, so that CI can test multi-GPU code without a GPU.

    def test_all_gpus_agree(virtual_gpus):                     # two GPUs
        assert torch.cuda.device_count() == len(virtual_gpus) == 2

    @pytest.mark.virtual_gpus(4, memory="16 GiB")              # any arguments of virtual_gpus.virtual_gpus
    def test_the_batch_fits(): ...

Every test gets new GPUs. After each test, PyTorch is restored, even if the test failed. The plugin is a module outside
the package, so that pytest imports PyTorch only for tests that use GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import torch

_MARKER = (
    "virtual_gpus(count=2, **settings): run the test on virtual GPUs. The settings are those of "
    "virtual_gpus.virtual_gpus: memory, kind, shapes_only, links, ..."
)


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker, so that --strict-markers accepts it."""
    config.addinivalue_line("markers", _MARKER)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Give a marked test the fixture without naming it, before all of its other fixtures."""
    names = getattr(item, "fixturenames", None)
    if names is not None and item.get_closest_marker("virtual_gpus"):
        if "virtual_gpus" in names:
            names.remove("virtual_gpus")
        names.insert(0, "virtual_gpus")


@pytest.fixture
def virtual_gpus(request: pytest.FixtureRequest) -> Iterator[list[torch.device]]:
    """Virtual GPUs for one test, as a list of devices. The default is two, and the marker `virtual_gpus` changes it.

    Raises ValueError for an invalid argument of the marker.
    """
    from virtual_gpus import virtual_gpus as switch

    marker = request.node.get_closest_marker("virtual_gpus")
    arguments: tuple[Any, ...] = marker.args if marker and marker.args else (2,)
    settings: dict[str, Any] = dict(marker.kwargs) if marker else {}
    if "count" in settings:
        arguments = ()
    with switch(*arguments, **settings) as devices:
        yield devices
