"""A pytest plugin that runs tests on virtual GPUs, so that CI can test multi-GPU code without a GPU.

    def test_all_gpus_agree(virtual_gpus):                     # two GPUs
        assert torch.cuda.device_count() == len(virtual_gpus) == 2

    @pytest.mark.virtual_gpus(4, memory="16 GiB")              # any arguments of virtual_gpus.virtual_gpus
    def test_the_batch_fits(): ...

    @pytest.mark.virtual_gpus(4, ranks=4, timeout=30)          # four processes with a process group run the test
    def test_all_reduce():
        x = torch.ones(1, device="cuda")
        torch.distributed.all_reduce(x)
        assert x.item() == 4

Every test gets new GPUs. After each test, PyTorch is restored, even if the test failed. The plugin is a module outside
the package, so that pytest imports PyTorch only for tests that use GPUs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import torch

_MARKER = (
    "virtual_gpus(count=2, **settings): run the test on virtual GPUs. With ranks=4, four processes with a process "
    "group run it, each on a GPU of its own, for at most timeout=60 seconds. The other settings are those of "
    "virtual_gpus.virtual_gpus: memory, kind, shapes_only, links, ..."
)
_OF_RANKS = ("ranks", "timeout", "start")


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


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare `--real-gpus`."""
    parser.getgroup("virtual GPUs").addoption(
        "--real-gpus",
        action="store_true",
        help="Run tests of the marker and the fixture virtual_gpus on this machine's GPUs. Where it has fewer, skip.",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test whose marker says ranks=N in N processes, and report the rank that failed first.

    Fixtures are made once, in this process, and the ranks start with what they gave.
    """
    marker = pyfuncitem.get_closest_marker("virtual_gpus")
    if marker is None or marker.kwargs.get("ranks") is None:
        return None
    if inspect.iscoroutinefunction(pyfuncitem.obj):
        pytest.fail("A test with ranks=... must be a plain function, not a coroutine.", pytrace=False)
    import torch
    from virtual_gpus.testing import RankError, run_ranks

    settings = {name: marker.kwargs[name] for name in _OF_RANKS if name in marker.kwargs}
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    for name, value in arguments.items():
        if any(isinstance(part, torch.Tensor) and part.is_cuda for part in _parts(value)):
            pytest.fail(
                f"The fixture {name!r} made a GPU tensor, and ranks start with empty GPUs. Make it in the test, or let "
                "the fixture return a function that makes it.",
                pytrace=False,
            )
    failure: Exception | None = None
    try:
        with _sent_by_value(pyfuncitem):
            run_ranks(_Test(pyfuncitem.obj, arguments, pyfuncitem.repr_failure), **settings)
    except (RankError, TimeoutError, ValueError) as error:  # ValueError: of the marker's arguments
        failure = error
    if isinstance(failure, RankError) and failure.of == "Skipped":
        pytest.skip(failure.said)
    if isinstance(failure, RankError) and failure.of == "XFailed":
        pytest.xfail(failure.said)
    if failure is not None:
        pytest.fail(str(failure), pytrace=False)
    return True


def _parts(value: Any) -> Iterator[Any]:
    """What a fixture gave, without lists, dicts and modules around it."""
    import torch

    if isinstance(value, torch.nn.Module):
        value = [*value.parameters(), *value.buffers()]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for part in value:
            yield from _parts(part)
    else:
        yield value


class _Test:
    """What a rank calls: the test with its fixtures. `explain` is pytest's words for an error, in forked ranks."""

    def __init__(self, test: Callable[..., Any], arguments: dict[str, Any], explain: Callable[..., Any] | None) -> None:
        self._test, self._arguments, self._explain = test, arguments, explain

    def __call__(self, rank: int) -> None:
        try:
            self._test(**self._arguments)
        except BaseException as error:
            if self._explain is not None and not isinstance(error, (KeyboardInterrupt, SystemExit)):
                # Failure.of_error reads it. The frame of this method is not the test's.
                below = error.__traceback__ and error.__traceback__.tb_next
                excinfo = pytest.ExceptionInfo.from_exception(error.with_traceback(below))
                said = str(self._explain(excinfo))  # which strips the first line
                is_code = said.startswith(("@", "def "))
                error.explained = "    " * is_code + said  # type: ignore[attr-defined]
            raise

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_explain": None}  # it holds the whole session


@contextmanager
def _sent_by_value(item: pytest.Function) -> Iterator[None]:
    """Ranks that are not forked get the test itself, with pytest's rewritten assertions, and do not import its file."""
    try:
        import cloudpickle
    except ModuleNotFoundError:  # run_ranks says so, where it is needed
        yield
        return
    plugins = item.config.pluginmanager.get_plugins()
    found = [each for each in plugins if getattr(each, "__file__", "").endswith("conftest.py")]
    known = cloudpickle.list_registry_pickle_by_value()
    modules = [module for module in [item.module, *found] if module and module.__name__ not in known]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


@pytest.fixture
def virtual_gpus(request: pytest.FixtureRequest) -> Iterator[list[torch.device]]:
    """Virtual GPUs for one test, as a list of devices. The default is two, and the marker `virtual_gpus` changes it.

    With `--real-gpus`, they are GPUs of this machine. Raises ValueError for an invalid argument of the marker.
    """
    marker = request.node.get_closest_marker("virtual_gpus")
    arguments: tuple[Any, ...] = marker.args if marker and marker.args else (2,)
    settings: dict[str, Any] = dict(marker.kwargs) if marker else {}
    if "count" in settings:
        arguments = (settings.pop("count"),)
    for name in _OF_RANKS:
        settings.pop(name, None)
    if request.config.getoption("--real-gpus"):
        yield _real_gpus(arguments[0])
        return
    from virtual_gpus import virtual_gpus as switch

    with switch(*arguments, **settings) as devices:
        yield devices


def _real_gpus(count: int) -> list[torch.device]:
    import torch

    seen = torch.cuda.device_count()
    if seen < count:
        pytest.skip(f"--real-gpus: the test needs {count} GPUs, and this machine has {seen}.")
    return [torch.device("cuda", index) for index in range(count)]
