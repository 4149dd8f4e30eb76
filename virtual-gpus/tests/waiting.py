"""Waiting for what another process does."""

import time


def until(condition, seconds=200, every=0.005):
    """What `condition()` gives as soon as it is true."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(every)
    raise AssertionError(f"{condition} did not become true within {seconds} s")
