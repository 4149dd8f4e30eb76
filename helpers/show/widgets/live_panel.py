"""A live panel: memory of every GPU while a training runs, for real and virtual GPUs with the same call.

    with live_memory():
        trainer.train(epochs=2)

    with live_memory() as panel:                      # the epochs' lines on the panel as well
        Trainer(..., log=panel.log).train(epochs=2)

A thread looks every half second at what `helpers.measure.read_memory` reads and changes one picture in place. After the
block the peaks remain, as a picture and in words; on virtual GPUs they are the same in every run. Without a notebook,
or with show=False, nothing is shown and nothing is read.
"""

from __future__ import annotations

import threading
import warnings
from base64 import b64encode
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from helpers.measure import Readings, measure_memory, read_memory
from helpers.measure.memory import gpu_indices
from helpers.show.widgets import live_picture
from helpers.show.widgets.scene import Scene

MOST = 240  # points of a curve; older ones are thinned out


class LivePanel:
    """What `live_memory` gives: after the block `readings` has the peaks, and `words` says them."""

    def __init__(self, every: float):
        if not every > 0:
            raise ValueError(f"every={every}: give the seconds between two looks, more than 0.")
        self.readings, self.error = Readings(), None
        self._every, self._line, self._ended = every, "", threading.Event()
        self._history: dict[int, list[int]] = defaultdict(list)
        self._picture = self._display = None

    @property
    def words(self) -> str:
        """The peaks in words; "" before the end, and where nothing was shown."""
        return live_picture.said(self.readings) if self.readings else ""

    def log(self, record: object) -> None:
        """Print `record`, and show it on the panel: give it to a `Trainer` as its `log`."""
        self._line = str(record)
        print(record)

    # ---- while it runs

    @contextmanager
    def _showing(self, indices: list[int]) -> Iterator[None]:
        self._open(indices)
        thread = threading.Thread(target=self._run, args=(indices,), name="live_memory", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()

    def _run(self, indices: list[int]) -> None:
        try:
            while not self._ended.wait(self._every):
                self._look(indices)
        except Exception as error:  # said at the end: the training is worth more than its panel
            self.error = error

    def _look(self, indices: list[int]) -> None:
        readings = read_memory(indices)
        for reading in readings:
            history = self._history[reading.index]
            history.append(reading.allocated)
            if len(history) > MOST:
                del history[1 : MOST // 2 : 2]
        self._picture.value = live_picture.now(readings, self._history, self._line).svg()

    # ---- what is on the page

    def _open(self, indices: list[int]) -> None:
        import ipywidgets
        from IPython.display import display

        # As high as the image that takes its place: below an image JupyterLab leaves 3 pixels.
        self._picture = ipywidgets.HTML(layout=ipywidgets.Layout(margin="0 0 3px 0"))
        self._look(indices)
        self._display = display(self._view(), raw=True, display_id=True)

    def _view(self) -> dict:
        # No text/plain: what is shown at first is not what is stored in the end.
        bundle = self._picture._repr_mimebundle_() or {}
        return {kind: data for kind, data in bundle.items() if kind != "text/plain"}

    def _close(self) -> None:
        """Leave the peaks: on the page and in the notebook's file as an image, which needs no kernel, and as words."""
        scene = live_picture.peaks(self.readings)
        self._picture.value = scene.svg()  # the same picture, for the moment until the image is there
        self._display.update(_png(scene), metadata={"image/png": _size(scene) | {"alt": self.words}}, raw=True)
        print(self.words)
        if self.error is not None:
            what = f"{type(self.error).__name__}: {self.error}"
            warnings.warn(f"The live panel stopped before the end ({what}). The peaks are right.", stacklevel=4)


@contextmanager
def live_memory(gpus=None, every: float = 0.5, show: bool = True) -> Iterator[LivePanel]:
    """Show the memory of `gpus` (a device, an index, or a list of them; None for all) while the block runs.

    every: seconds between two looks. Peaks start anew, as with `helpers.measure.measure_memory`. Ends with the block,
    also when that fails or is interrupted. Raises ValueError for a time that is not positive; where it shows something
    also RuntimeError without any GPU, ValueError for a GPU that does not exist.
    """
    panel = LivePanel(every)
    if not show or not _in_a_notebook():
        yield panel
        return
    indices = gpu_indices(gpus)
    try:
        with measure_memory(indices) as panel.readings, panel._showing(indices):
            yield panel
    finally:
        if panel.readings and panel._display is not None:
            panel._close()


def _in_a_notebook() -> bool:
    try:
        from IPython import get_ipython
    except ImportError:
        return False
    return getattr(get_ipython(), "kernel", None) is not None


def _png(scene: Scene) -> dict:
    return {"image/png": b64encode(scene.png()).decode()}


def _size(scene: Scene) -> dict:
    """So that the page keeps the image's place free before it is decoded: nothing below moves."""
    return {"width": scene.width, "height": scene.height}


__all__ = ["LivePanel", "live_memory"]
