"""A live panel that shows the memory of every GPU during training, on real and on virtual GPUs.

    with live_memory():
        train()

    with live_memory() as panel:                      # also shows the line of each epoch on the panel
        train_epochs(..., log=panel.log)

A thread calls `read_memory` every half second and updates one picture. After the block, the panel shows the peaks as a
picture and as text. On virtual GPUs, the peaks are the same in every run.
"""

import threading
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import ipywidgets
from IPython import get_ipython
from IPython.display import display

from helpers.measure.memory import measure_memory, read_memory
from helpers.measure.readings import Readings
from helpers.show.bars import bars_now, describe_memory, empty_figure, memory_bars
from helpers.show.panel import image, png, size_of, view


class LivePanel:
    """The panel of `live_memory`. After the block, `readings` has the peaks, and `words` describes them if shown."""

    def __init__(self, every: float):
        if not every > 0:
            raise ValueError(f"every={every}, but the number of seconds between two updates must be positive.")
        self.readings, self.words = Readings(), ""
        self._every, self._line = every, ""
        self._picture: Any = None  # a widget, and where it is displayed, from the moment at which it is shown
        self._display: Any = None
        self._ended = threading.Event()

    def log(self, line: str) -> None:
        """Print a line and show it on the panel. Pass this method to `train_epochs` as its `log`."""
        self._line = line
        print(line)

    @contextmanager
    def _showing(self) -> Iterator[None]:
        self._picture = ipywidgets.HTML(layout=ipywidgets.Layout(margin="0 0 3px 0"))  # the margin of an image
        self._update()
        # Without text/plain, because the notebook's file should have the peaks, not the first view.
        self._display = display(view(self._picture), raw=True, display_id=True)
        thread = threading.Thread(target=self._keep_updating, name="live_memory", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()

    def _keep_updating(self) -> None:
        """Ignore an update that fails, because training is more important than the panel, and the next may succeed."""
        while not self._ended.wait(self._every):
            with suppress(Exception):
                self._update()

    def _update(self) -> None:
        self._picture.value = bars_now(read_memory(), self._line or "Memory now")

    def _close(self) -> None:
        """Show the peaks as an image and as text. The notebook's file keeps both, and they need no kernel."""
        self.words, figure = describe_memory(self.readings), empty_figure(len(self.readings))
        memory_bars(self.readings, "Peaks of this run", figure)
        picture = png(figure)
        self._picture.value = image(picture, self.words)  # until the output below replaces it
        # With its size, so that the page reserves the space before the image is decoded, and nothing below moves.
        metadata = {"image/png": size_of(picture) | {"alt": self.words}}
        self._display.update({"image/png": b64encode(picture).decode()}, metadata=metadata, raw=True)
        print(self.words)


@contextmanager
def live_memory(every: float = 0.5) -> Iterator[LivePanel]:
    """Show the memory of all GPUs while the block runs: what the driver counts, reserved and allocated.

    every: seconds between two updates. Peaks are reset at the start, as with `measure_memory`. The panel ends with the
    block, even if the block fails or is interrupted. Outside a notebook, nothing is shown or read. Raises ValueError if
    `every` is not positive and, in a notebook, RuntimeError if there is no GPU.
    """
    panel = LivePanel(every)
    if not _in_a_notebook():
        yield panel
        return
    try:
        with measure_memory() as panel.readings, panel._showing():
            yield panel
    finally:
        if panel.readings and panel._display is not None:
            panel._close()


def _in_a_notebook() -> bool:
    return getattr(get_ipython(), "kernel", None) is not None
