"""A few of many combinations, in which every two values that can meet still do."""

import itertools
from collections.abc import Mapping, Sequence


def pairwise(cases: Sequence[Mapping[str, object]]) -> list[Mapping[str, object]]:
    """As few of `cases` as are needed for this: any two values that are in one of `cases` are in one of these.
    cases: parameter -> value, the same parameters in each. Takes at each step the first case with most new pairs."""
    pairs = [frozenset(itertools.combinations(((name, repr(v)) for name, v in case.items()), 2)) for case in cases]
    missing, chosen = frozenset().union(*pairs), []
    while missing:
        best = max(range(len(cases)), key=lambda i: len(pairs[i] & missing))
        chosen.append(cases[best])
        missing -= pairs[best]
    return chosen


def product(**parameters: Sequence) -> list[dict[str, object]]:
    """Every combination of the parameters' values, as cases."""
    return [dict(zip(parameters, values, strict=True)) for values in itertools.product(*parameters.values())]


def title(case: Mapping[str, object]) -> str:
    """A name for a test of this case."""
    return ", ".join(f"{name}={getattr(value, '__name__', value)}" for name, value in case.items())
