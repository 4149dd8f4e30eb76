"""Alternative text of pictures: words that travel with a figure into the notebook.

A notebook stores them beside the picture, as the output's metadata `alt`. Web pages made with nbconvert's templates
"classic" and "basic" put them on the image. JupyterLab 4 and the template "lab" do not, so lessons print the words too.
"""

from matplotlib.artist import Artist


class _Words:
    """What IPython asks a figure for before it draws it: nothing to show, but `alt` for its PNG."""

    def __init__(self):
        self.said: dict[Artist, str] = {}

    def __call__(self, include=None, exclude=None) -> tuple[dict, dict]:
        return {}, {"image/png": {"alt": "\n".join(self.said.values())}}


def set_alt_text(part: Artist, words: str) -> None:
    """Give a figure, or axes in it, a text alternative; a second call for the same part replaces the first."""
    figure = part.get_figure(root=True)
    if not isinstance(getattr(figure, "_repr_mimebundle_", None), _Words):
        figure._repr_mimebundle_ = _Words()
    figure._repr_mimebundle_.said[part] = words


def alt_text(part: Artist) -> str:
    """The text alternative of the figure that `part` is in; "" if it has none."""
    words = getattr(part.get_figure(root=True), "_repr_mimebundle_", None)
    return "\n".join(words.said.values()) if isinstance(words, _Words) else ""
