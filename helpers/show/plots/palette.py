"""Colours and hatches of the course's pictures: each colour comes with a hatch, so that either tells bars apart."""

# Okabe and Ito's palette, in the order that also differs most in lightness.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#F0E442")
HATCHES = ("", "////", "....", "xxxx", "\\\\\\\\", "----", "++++")
_ALARM = 4  # what is over the edge; no other bar of the same picture has its colour or its hatch


def style(colour: int, hatch: int = 0) -> dict:
    """Arguments of `Axes.barh` for the colour and the hatch of these numbers."""
    return {"color": COLOURS[colour % 7], "hatch": HATCHES[hatch % 7], "edgecolor": "white", "linewidth": 0}


def styles(count: int, with_alarm: bool = False) -> list[dict]:
    """`count` styles, each with a colour and a hatch of its own up to seven; six where `OVER` appears beside them.

    Of more, up to the square of that, no two have both in common.
    """
    numbers = [number for number in range(7) if not (with_alarm and number == _ALARM)]
    rounds = [divmod(place, len(numbers)) for place in range(count)]
    return [style(numbers[rest], numbers[(rest + times) % len(numbers)]) for times, rest in rounds]


OVER = style(_ALARM, _ALARM)
ASKED = {"facecolor": "white", "edgecolor": COLOURS[_ALARM], "hatch": HATCHES[_ALARM], "linewidth": 1}
TAKEN = {"color": "0.75", "hatch": "||||", "edgecolor": "white", "linewidth": 0}
