"""A live panel: memory of every GPU while a training runs, for real and virtual GPUs with the same call.

    with live_memory():
        trainer.train(epochs=2)

    with live_memory() as panel:                      # the epochs' lines on the panel as well
        Trainer(..., log=panel.log).train(epochs=2)

A thread looks every half second at what `read_memory` reads and changes one picture in place. After the block the peaks
remain, as a picture and in words; on virtual GPUs they are the same in every run.
"""

import threading
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from html import escape

import ipywidgets
from IPython import get_ipython
from IPython.display import display

from helpers.measure import MiB, Reading, Readings, format_bytes, measure_memory, read_memory
from helpers.show.bars import empty_figure, memory_bars
from helpers.show.panel import image, png, size_of
from helpers.show.words import describe


class LivePanel:
    """What `live_memory` gives: after the block `readings` has the peaks, and `words` says them if they were shown."""

    def __init__(self, gpus, every: float):
        if not every > 0:
            raise ValueError(f"every={every}: give the seconds between two looks, more than 0.")
        self.readings, self.words = Readings(), ""
        self._gpus, self._every, self._line = gpus, every, ""
        self._picture = self._display = None
        self._ended = threading.Event()

    def log(self, record: object) -> None:
        """Print `record`, and show it on the panel: give it to a `Trainer` as its `log`."""
        self._line = str(record)
        print(record)

    @contextmanager
    def _showing(self) -> Iterator[None]:
        self._picture = ipywidgets.HTML(layout=ipywidgets.Layout(margin="0 0 3px 0"))  # as below an image
        self._look()
        # No text/plain: what is shown at first is not what is stored in the end.
        bundle = self._picture._repr_mimebundle_() or {}
        view = {kind: data for kind, data in bundle.items() if kind != "text/plain"}
        self._display = display(view, raw=True, display_id=True)
        thread = threading.Thread(target=self._keep_looking, name="live_memory", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()

    def _keep_looking(self) -> None:
        """A look that fails is left out: the training is worth more than its panel, and the next one may succeed."""
        while not self._ended.wait(self._every):
            with suppress(Exception):
                self._look()

    def _look(self) -> None:
        self._picture.value = _now(read_memory(self._gpus), self._line)

    def _close(self) -> None:
        """Leave the peaks: on the page and in the notebook's file as an image, which needs no kernel, and as words."""
        self.words, figure = describe(self.readings), empty_figure(len(self.readings))
        memory_bars(self.readings, "Peaks of this run", figure)
        picture = png(figure)
        self._picture.value = image(picture, self.words)  # until the output below has taken its place
        # With its size, so that the page keeps the place free before the image is decoded: nothing below moves.
        metadata = {"image/png": size_of(picture) | {"alt": self.words}}
        self._display.update({"image/png": b64encode(picture).decode()}, metadata=metadata, raw=True)
        print(self.words)


@contextmanager
def live_memory(gpus=None, every: float = 0.5, show: bool = True) -> Iterator[LivePanel]:
    """Show the memory of `gpus` (a device, an index, or a list of them; None for all) while the block runs.

    every: seconds between two looks. Peaks start anew, as with `measure_memory`. Ends with the block, also when that
    fails or is interrupted. Without a notebook, or with show=False, nothing is shown and nothing is read. Raises
    ValueError for a time that is not positive; where it shows something also RuntimeError without any GPU, ValueError
    for a GPU that does not exist.
    """
    panel = LivePanel(gpus, every)
    if not show or not _in_a_notebook():
        yield panel
        return
    try:
        with measure_memory(gpus) as panel.readings, panel._showing():
            yield panel
    finally:
        if panel.readings and panel._display is not None:
            panel._close()


def _in_a_notebook() -> bool:
    return getattr(get_ipython(), "kernel", None) is not None


def _now(readings: Readings, line: str) -> str:
    """What is allocated now as bars, the rest in words, in HTML: matplotlib would take a fifth of a second.

    `line`: what the training said last. It is as high as the picture of the peaks. A frame's length is the capacity or,
    where all are small beside it, a power of two: so the scale seldom changes while memory grows.
    """
    capacity, most = (max(getattr(each, name) for each in readings) for name in ("capacity", "peak_reserved"))
    length = capacity if 8 * most >= capacity else max(1 << (most - 1).bit_length(), MiB)
    rows = "".join(_row(reading, length) for reading in readings)
    return (
        f'<div role="img" aria-label="{escape(describe(readings, "allocated"))}" style="width: 700px; '
        f'height: {120 + 62 * len(readings)}px; line-height: 20px; font-size: 13px; overflow: hidden">'
        f"<b>{escape((line or 'Memory now')[:96])}</b><br>"
        f"the bars: what is allocated; frame: {format_bytes(length)}{rows}</div>"
    )


def _row(reading: Reading, length: int) -> str:
    said = (
        f"GPU {reading.index}: {format_bytes(reading.allocated)}, peak {format_bytes(reading.peak_allocated)}, "
        f"reserved {format_bytes(reading.reserved)} of {format_bytes(reading.capacity)}"
    )
    style = "display: block; width: 100%; height: 20px"
    bar = f'<progress value="{reading.allocated}" max="{length}" style="{style}"></progress>'
    return f'<div style="padding-top: 14px">{said}</div>{bar}'
