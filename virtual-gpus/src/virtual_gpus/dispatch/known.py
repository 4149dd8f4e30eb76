"""`shapes_only`: what an operator's meta kernel answered, kept for the next call with tensors of the same form.

PyTorch computes on meta tensors with kernels of its own, many of them in Python: batch norm's takes milliseconds to
find three shapes. What comes out follows from the shapes, strides and types that go in and from the other arguments, so
the first call of a kind asks PyTorch, and from then on an equal answer is made at once. Whatever is out of the
ordinary (another layout, a CPU tensor among the inputs, results that share memory, a mode below) is asked every time.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from virtual_gpus.operators import Operator
from virtual_gpus.placement.storages import tensors_in

_MISSING = object()
_FIRST = object()  # the answer of an operator in place: its first argument
_META = torch.device("meta")
_MOST = 16384  # answers that are kept
_SETTINGS = frozenset((int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.layout,
                       torch.memory_format))  # fmt: skip
_keys_of = torch._C._dispatch_keys
_default_dtype, _is_deterministic = torch.get_default_dtype, torch._C._get_deterministic_algorithms
_empty_strided = torch._C._VariableFunctions.empty_strided  # not `torch`'s, which is a patch while GPUs are on
_PLAIN = _keys_of(torch.empty(0, device=_META))
with torch.inference_mode():
    _OF_INFERENCE = _keys_of(torch.empty(0, device=_META))


class _Form(NamedTuple):
    """What a new tensor is made from."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class _Unusual(Exception):
    """Something about which nothing is kept."""


_known: dict[tuple, object] = {}  # question -> a form, None, a list or tuple of these, or _FIRST


def ask(op: Operator, args: tuple, kwargs: dict[str, Any], run: Callable[[], Any]) -> Any:
    """The results of an operator on meta tensors: made at once if they are known, else by `run()`."""
    asked = _question_of(op, args, kwargs) if op.keeps_answers else None
    if asked is None:
        return run()
    found = _known.get(asked, _MISSING)
    if found is not _MISSING:
        return args[0] if found is _FIRST else _made(found)
    result = run()
    if not op.written:
        _keep_form(asked, args, result)
    elif _question_of(op, args, kwargs) == asked and (result is None or result is args[0]):
        _remember(asked, None if result is None else _FIRST)
    return result


def computed(function: Callable, *args: Any) -> Any:
    """The results of `function(*args)`, several operators that compute below the accounting on meta tensors.

    They are made at once if they are known, as an operator's are.
    """
    ours_alone = torch._C._len_torch_dispatch_stack() == 1 and not torch.is_autocast_enabled("cuda")
    asked = _question(function, args, {}, False) if ours_alone else None
    if asked is None:
        return function(*args)
    found = _known.get(asked, _MISSING)
    if found is not _MISSING:
        return _made(found)
    result = function(*args)
    _keep_form(asked, args, result)
    return result


def _question_of(op: Operator, args: tuple, kwargs: dict[str, Any]) -> tuple | None:
    """All that the answer hangs on; None if it may hang on more, or if another mode wants to see every operator."""
    return None if torch._C._len_torch_dispatch_stack() else _question(op, args, kwargs, op.by_element)


def _question(asks: Any, args: tuple, kwargs: dict, by_element: bool) -> tuple | None:
    """asks: the operator or function."""
    asked = [asks, _default_dtype(), _is_deterministic()]
    try:
        for value in args:
            _add(asked, value, by_element)
        for name, value in kwargs.items():
            asked.append(name)
            _add(asked, value, by_element)
    except _Unusual:
        return None
    return tuple(asked)


def _add(asked: list, value, by_element: bool) -> None:
    kind = type(value)
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        if not _is_plain(value):
            raise _Unusual
        asked += value.shape, value.stride(), value.dtype
    elif kind is float and by_element:
        asked.append(float)  # of Adam's factors, which differ from step to step, none changes a shape
    elif kind in _SETTINGS:
        asked += kind, value  # with the type: 1 == 1.0 == True
    elif kind is list or kind is tuple:
        kinds = tuple(map(type, value))
        asked += kind, kinds
        if _SETTINGS.issuperset(kinds) and not by_element:  # sizes and strides, as most
            asked.append(tuple(value))
            return
        for part, kind in zip(value, kinds, strict=True):
            if kind is torch.Tensor and _is_plain(part):  # a call less for each tensor of an optimizer
                asked += part.shape, part.stride(), part.dtype
            else:
                _add(asked, part, by_element)
    elif isinstance(value, torch._C.Generator):
        asked.append(torch._C.Generator)  # no shape is drawn
    else:
        raise _Unusual


def _is_plain(tensor: torch.Tensor) -> bool:
    """A strided meta tensor, neither conjugated nor negated nor wrapped."""
    keys = _keys_of(tensor)
    return keys == _PLAIN or keys == _OF_INFERENCE


def _made(form):
    kind = type(form)
    if kind is _Form:
        return _empty_strided(form[0], form[1], dtype=form[2], device=_META)
    return None if form is None else kind(map(_made, form))


def _keep_form(asked: tuple, args: tuple, result) -> None:
    with suppress(_Unusual):
        _remember(asked, _form(result, {t.untyped_storage()._cdata for t in tensors_in(args)}))


def _remember(asked: tuple, found: object) -> None:
    if len(_known) >= _MOST:
        _known.clear()
    _known[asked] = found


def _form(result, seen: set[int]):
    """seen: the storages that a result may not share, which grow by its own."""
    if type(result) in (list, tuple):
        return type(result)([_form(part, seen) for part in result])
    if result is None:
        return None
    if type(result) is not torch.Tensor or not _is_plain(result) or result.storage_offset():
        raise _Unusual
    storage, form = result.untyped_storage(), _Form(tuple(result.shape), result.stride(), result.dtype)
    if storage._cdata in seen or storage.nbytes() != _made(form).untyped_storage().nbytes():
        raise _Unusual
    seen.add(storage._cdata)
    return form
