"""Intervals of time."""

import pytest

from helpers.measure.intervals import merged, seconds_covered


def test_what_overlaps_or_touches_is_one():
    assert merged([(3, 4), (0, 2), (1, 1.5), (2, 2.5)]) == [(0, 2.5), (3, 4)]
    assert merged([(0.0, 0.1 + 0.2), (0.3, 1.0)]) == merged([(0.0, 0.3), (0.1 + 0.2, 1.0)]) == [(0.0, 1.0)]
    assert merged(iter([])) == []


def test_a_gap_joins_what_is_near():
    near = [(0, 1), (1.5, 2), (4, 5)]
    assert merged(near, 0.4) == near and merged(near, 0.6) == [(0, 2), (4, 5)]


def test_two_at_once_count_once():
    assert seconds_covered([(5, 6), (0, 2), (1, 3), (1.5, 2.5)]) == pytest.approx(4)
    assert seconds_covered([]) == 0
