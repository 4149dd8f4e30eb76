"""What tests ask of pictures."""

from matplotlib.artist import Artist


def alt_text(part: Artist) -> str:
    """Return the text alternative of the figure that contains `part`."""
    return part.get_figure(root=True)._repr_mimebundle_()[1]["image/png"]["alt"]
