"""What holds for all operators of a kind, which are found by their schemas: the memory of `out=`, and times."""

import re
from pathlib import Path

import pytest
import torch
import torchgen
from measuring import every_overload, needed, recorded, seconds, table
from virtual_gpus import NotModelled, record_timeline, virtual_gpus
from virtual_gpus.clock import cost
from virtual_gpus.dispatch import timing
from virtual_gpus.dispatch.operators import Row, operator, row_of
from virtual_gpus.placement.storages import has_values

SIDE, MIB = 1024, 1 << 20
GPUS = {"count": 1, "kind": "H200", "shapes_only": True}
# Of those that want other arguments.
UNKNOWN = (RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError)


@pytest.fixture(autouse=True)
def forgotten(monkeypatch, gpus):
    """No operator's seconds are known yet."""
    monkeypatch.setattr(timing, "launch_times", {})


def overloads(condition):
    """(overload, arguments that have no default) of the ATen operators with a named argument of this kind."""
    for func in every_overload():
        if any(a.kwarg_only and condition(a) for a in func._schema.arguments):
            yield func, needed(func)


def argument(given, dtype):
    """Something that most operators take in its place."""
    kinds = {"Tensor": lambda: torch.ones(SIDE, SIDE, dtype=dtype, device="cuda"), "int": lambda: 1,
             "List[int]": lambda: [SIDE, SIDE] if given.name == "size" else [1], "number": lambda: 2,
             "float": lambda: 0.5, "bool": lambda: True, "str": lambda: "none"}  # fmt: skip
    return kinds[str(given.type)]()


def test_results_that_are_given_and_grow_take_memory_whatever_their_arguments_are_called():
    checked = []
    for func, needs in overloads(lambda a: a.alias_info is not None):
        packet, names = getattr(torch.ops.aten, func._schema.name.removeprefix("aten::")), [a.name for a in needs]
        twins = [getattr(packet, overload) for overload in packet.overloads()]
        twins = [f for f in twins if [a.name for a in needed(f)] == names]
        twins = [f for f in twins if not any(a.alias_info for a in f._schema.arguments)]
        outputs = operator(func).outputs
        for dtype in (torch.float32, torch.int64, torch.bool) if len(twins) == 1 else ():
            try:
                arguments = [argument(a, dtype) for a in needs]
                results = twins[0](*arguments)
                results = results if isinstance(results, tuple) else (results,)
                given = [torch.empty(0, dtype=result.dtype, device="cuda") for result in results]
                before = torch.cuda.memory_allocated()
                func(*arguments, **dict(zip(outputs, given, strict=True)))
                wanted = sum(result.nbytes for result in results)
            except UNKNOWN:
                continue
            grown = torch.cuda.memory_allocated() - before
            assert wanted <= grown < wanted + MIB, func  # the rest is that of blocks
            checked.append(func)
            break
    assert len(checked) > 250 and sum("out" not in operator(func).outputs for func in checked) > 20


def test_a_type_that_is_asked_for_takes_its_time_whatever_was_asked_before():
    checked, types = [], (torch.float16, torch.float64)
    for func, needs in overloads(lambda a: a.name == "dtype"):
        device = {"device": "cuda"} if "device" in operator(func).positions else {}
        try:
            arguments = [argument(a, torch.float32) for a in needs]
            calls = {dtype: lambda a=arguments, d=dtype, o=device, f=func: f(*a, dtype=d, **o) for dtype in types}
            orders = []
            for order in (types, types[::-1]):
                timing.launch_times.clear()
                orders.append({dtype: seconds(calls[dtype]) for dtype in order})
        except UNKNOWN:
            continue
        assert orders[0] == pytest.approx(orders[1], rel=1e-6), func
        checked.append(func)
    assert len(checked) > 30
    size = (1 << 28,)
    zeros = [lambda dtype=dtype: torch.zeros(size, dtype=dtype, device="cuda") for dtype in (torch.float64, torch.int8)]
    assert seconds(zeros[0]) > 6 * seconds(zeros[1])


def test_the_forms_of_an_operator_share_a_class_of_time():
    bases = {operator(func).base: operator(func) for func in every_overload()}  # `out=` has the same name
    in_place = {name for name in bases if name.removesuffix("_") in bases.keys() - {name}}
    different = {name for name in in_place if row_of(name).time != row_of(name.removesuffix("_")).time}
    assert different == {*table("operators")["in_place"].split()} and {"cumsum_", "addr_", "fill_"} < in_place
    assert not [name for name in in_place if row_of(name).time is cost.CHARGED_ELSEWHERE]
    assert operator(torch.ops.aten.add_.Tensor).recipe is not operator(torch.ops.aten.add.Tensor).recipe


def test_what_only_writes_random_numbers_is_in_one_class():
    drawn = set()
    for func in every_overload():
        facts = operator(func)
        read = {a.name for a in func._schema.arguments if "Tensor" in str(a.type)} - facts.written
        if torch.Tag.nondeterministic_seeded in func.tags and (not read or facts.base.endswith("_like")):
            drawn.add(facts.base)
    others = {name for name in drawn if row_of(name).time != row_of("fill_").time}
    assert others - {*table("operators")["random"].split()} == set()
    assert {"rand_like", "randint", "geometric_", "cauchy_"} < drawn


def test_an_operator_with_a_kernel_of_its_own_for_cuda_has_a_row_or_is_known_to_be_plain():
    """Read the source of a new one (aten/src/ATen/native/cuda). If it takes more than its results, write a row for it.
    Else put its name into tests/data/plain_operators.txt."""
    text = (Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml").read_text()
    entries = {entry.partition("(")[0]: entry for entry in text.split("\n- func: ")}
    found = {name: re.search(r"structured_delegate: (\S+)", entry) for name, entry in entries.items()}
    kernels = {name: entries[delegate[1]] if delegate else entries[name] for name, delegate in found.items()}
    own = {name for name, kernel in kernels.items() if re.search(r"^ +(\w+, )*CUDA(, \w+)*:", kernel, re.M)}
    elementwise = {name for name in own if re.search("TensorIterator|tags: .*pointwise", kernels[name] + entries[name])}
    names = {name.partition(".")[0] for name in own - elementwise}
    plain = set((Path(__file__).parent / "data/plain_operators.txt").read_text().split())
    without_row = {name.removesuffix("_") for name in names if row_of(name) == Row(cost.READS_AND_WRITES)}
    assert len(names) > 300 and without_row - plain == set()


def test_a_copy_within_a_gpu_has_its_own_name_and_errors_of_the_package_are_not_hidden(monkeypatch):
    x = torch.empty(4, 4, device="cuda")
    assert [span.name for span in recorded(lambda: x.copy_(x + 1)).spans] == ["add", "copy_"]
    monkeypatch.setattr(timing, "launch_times", None)  # a mistake shows its line
    with pytest.raises(AttributeError) as error:
        x + 1
    assert error.traceback[-1].path.name == "timing.py"
    monkeypatch.setattr(timing, "_more", lambda call: torch.ones(2) @ torch.ones(3))
    with pytest.raises(RuntimeError, match="size"):
        x @ x


def test_an_operator_of_higher_order_has_all_facts():
    assert vars(operator(torch.ops.higher_order.cond)).keys() == vars(operator(torch.ops.aten.mm.default)).keys()
    assert operator(torch.ops.higher_order.cond).base == "cond"


def shapes_and_offsets_or_error(func):
    own, named = torch.cuda.default_generators[0], {"generator": torch.Generator("cuda"), "device": "cuda"}
    start, arguments = own.get_offset(), {name: named[name] for name in named if name in operator(func).positions}
    try:
        result = func(*[argument(a, torch.float32) for a in needed(func)], **arguments)
        results = result if isinstance(result, tuple) else (result,)
        return [part.shape for part in results], own.get_offset() - start, named["generator"].get_offset()
    except UNKNOWN as error:
        return type(error).__name__


def test_what_draws_takes_generators_and_moves_them_on_with_values_and_without():
    drawing, answers = [func for func in every_overload() if torch.Tag.nondeterministic_seeded in func.tags], []
    for shapes_only in (False, True):
        with virtual_gpus(1, shapes_only=shapes_only):
            answers.append([shapes_and_offsets_or_error(func) for func in drawing])
    ran = [row for row in zip(drawing, *answers, strict=True) if isinstance(row[1], tuple)]
    wanting = {func._schema.name: answer for func, wanted, answer in ran if answer != wanted}
    assert set(wanting) - {"aten::_standard_gamma"} == {"aten::binomial", "aten::_sample_dirichlet"}  # it is in 2.11
    assert len(ran) > 40 and set(wanting.values()) == {"NeedsValues"}


@torch.library.custom_op("of_these_tests::squared", mutates_args=())
def squared(x: torch.Tensor) -> torch.Tensor:
    return torch.mm(x, x, out_dtype=torch.float32) + 1


on_cuda = torch.library.custom_op("of_these_tests::on_cuda", squared._init_fn, mutates_args=(), device_types="cuda")
torch.library.define("in_a_library::squared", "(Tensor x) -> Tensor")
torch.library.define("in_a_library::in_cpp", "(Tensor x) -> Tensor")
torch.library.impl("in_a_library::squared", "CUDA", squared._init_fn)


@pytest.mark.parametrize("function", [squared, on_cuda, torch.ops.in_a_library.squared])
def test_an_operator_in_python_takes_the_memory_and_time_of_what_it_calls(gpu, function):
    with record_timeline() as timeline:
        y = function(torch.ones(64, 64, device="cuda", dtype=torch.bfloat16))
        assert torch.cuda.max_memory_allocated() > 32 << 20 and (not has_values(y) or y.unique().item() == 65)  # cuBLAS
    assert [span.name for span in timeline.spans][:3] == ["ones", "mm", "add"] and y.dtype == torch.float32


def test_a_librarys_operator_for_cuda_alone_is_refused_by_its_name():
    with virtual_gpus(1), pytest.raises(NotModelled, match="in_a_library::in_cpp, which exists only for CUDA"):
        torch.ops.in_a_library.in_cpp(torch.ones(2, device="cuda"))
