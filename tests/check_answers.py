"""What tests of checks share: reading a "not yet", measuring once, an answer that no check may stumble over."""


def told(verdict, *words):
    """The check said "not yet", with each of `words` in its sentence."""
    assert not verdict.correct, verdict.text
    for word in ("not yet: ", ", because ", *words):
        assert word in verdict.text, verdict.text
    return True


def measured_once(monkeypatch, check, name):
    """Let the check's function `name` measure for the first call with some arguments only: large jobs take seconds."""
    measure, known = getattr(check, name), {}

    def once(*args):
        if repr(args) not in known:
            known[repr(args)] = measure(*args)
        return known[repr(args)]

    monkeypatch.setattr(check, name, once)


class Hostile:
    """Raises wherever it is touched."""

    def __getattribute__(self, name):
        raise ValueError(f"do not touch {name}")

    def __eq__(self, other):
        raise ValueError("do not compare")

    def __repr__(self):
        raise ValueError("do not look")

    __float__ = __iter__ = __len__ = __call__ = __bool__ = __repr__
    __hash__ = None
