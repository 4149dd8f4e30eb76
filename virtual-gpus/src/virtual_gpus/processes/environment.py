"""Environment variables that machines set while they are on, for this process and for those that it starts."""

import os

# (who set them, by name: what was there before and what was set), the newest last
_set: list[tuple[object, dict[str, tuple[str | None, str]]]] = []


def put_in(owner: object, variables: dict[str, str]) -> None:
    """Set the variables until `take_out(owner)`."""
    _set.append((owner, {name: (os.environ.get(name), value) for name, value in variables.items()}))
    os.environ.update(variables)


def take_out(owner: object) -> None:
    """Let the variables of `owner` be as they were. Those that another owner has set since stay until that one goes."""
    index = next(index for index, (other, _) in enumerate(_set) if other is owner)
    for name, (before, value) in _set.pop(index)[1].items():
        later = next((variables for _, variables in _set[index:] if name in variables), None)
        now = os.environ.get(name)
        if later is not None:
            later[name] = before, later[name][1]
        elif now == value and before is not None:
            os.environ[name] = before
        elif now == value:
            del os.environ[name]
        elif now is not None and os.sep in value:  # a list of folders, to which others have added some
            os.environ[name] = now.replace(value, before or "").strip(os.pathsep)
