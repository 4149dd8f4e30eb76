"""Pages that load nothing from elsewhere: formulas are MathML, which browsers draw, and badges are words.

A badge that still names no repository is no link either.
"""

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator


def inline_formula(self: HTML5Translator, node: nodes.math) -> None:
    self.body.append(tex2mathml(node.astext(), as_block=False))
    raise nodes.SkipNode


def block_formula(self: HTML5Translator, node: nodes.math_block) -> None:
    self.body.append(tex2mathml(node.astext(), as_block=True))
    raise nodes.SkipNode


def replace_badges(app: Sphinx, doctree: nodes.document) -> None:
    """Put the description of a picture from elsewhere in its place."""
    for image in list(doctree.findall(nodes.image)):
        if "://" in image["uri"]:
            link = image.parent
            whole = link if "OWNER/REPOSITORY" in link.get("refuri", "") else image
            whole.replace_self(nodes.Text(image["alt"]))


def setup(app: Sphinx) -> dict:
    app.add_html_math_renderer("mathml", (inline_formula, None), (block_formula, None))
    app.connect("doctree-read", replace_badges)
    return {"parallel_read_safe": True}
