"""The parts of the animated picture of a timeline, as SVG: its style sheet, its frame, and the elements of a GPU's row.

In the style sheet, the number --t runs from 0 to 1, and each part that appears or travels has a number --a at which it
begins and a number --b at which it ends. In print, and where motion is switched off, --t keeps its value of the most
telling moment.
"""

from html import escape

from virtual_gpus.timeline.spans import COLOURS

LEFT, WIDE = 250, 496  # where the time axis begins, and its length
# The colours of the kinds, that of text on them, and a hatch by its number.
_COLOURS = {"forward": (COLOURS["forward"], "#fff", 0), "compute": (COLOURS["forward"], "#fff", 0),
            "backward": (COLOURS["backward"], "#111", 1), "step": (COLOURS["step"], "#fff", 2),
            "copy": (COLOURS["copy"], "#111", 3), "collective": (COLOURS["collective"], "#111", 5),
            "reduce": ("#F0E442", "#111", 6), "waits": ("var(--idle)", "var(--dim)", 0)}  # fmt: skip
_LINES = {1: "M0 6L6 0", 2: "M1 3h1.5M4 0h1.5", 3: "M0 6L6 0M0 0L6 6", 5: "M0 3H6", 6: "M0 3H6M3 0V6"}
_PATTERNS = "".join(
    f'<pattern id="h{number}" width="6" height="6" patternUnits="userSpaceOnUse"><rect width="6" height="6" '
    f'fill="{colour}"/><path d="{_LINES[number]}" stroke="#fff" stroke-opacity=".75"/></pattern>'
    for colour, _, number in _COLOURS.values()
    if number
)
_STYLE = """
@property --t{syntax:"&lt;number&gt;";inherits:true;initial-value:0}
svg{--t:STILL;--paper:#fff;--ink:#1a1a1a;--dim:#666;--idle:#dcdcdc;--line:#e3e3e3;--card:#f4f4f4;--memory:#8f8f8f;
font:12px system-ui,sans-serif;fill:var(--ink)}
@media(prefers-color-scheme:dark){svg{--paper:#16181c;--ink:#eee;--dim:#aaa;--idle:#3a3d44;--line:#33363c;--card:#23262c;
--memory:#8a8f99}}
@media screen and (prefers-reduced-motion:no-preference){svg{animation:t 14s steps(260) infinite}}
@keyframes t{from{--t:0}93%,to{--t:1}}
.w{opacity:clamp(0,min((var(--t) - var(--a))*1e5 + 1,(var(--b) - var(--t))*1e5),1)}
.m{transform:translateY(calc(clamp(0,(var(--t) - var(--a))/(var(--b) - var(--a)),1)*var(--y)))}
.t{transform:translateX(calc(var(--t)*496px))}.v{fill:var(--paper);opacity:.72}
.b{font-weight:600}.s{font-size:13px}.d{fill:var(--dim);font-size:11px}.k{text-anchor:middle;font-size:11px}
.c{font-size:17px;font-weight:600;text-anchor:end;font-variant-numeric:tabular-nums}
.n{paint-order:stroke;stroke:#fff;stroke-width:3px;fill:#111}
"""
_SVG = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {high:g}" role="img" aria-label="{title}">
<title>{title}</title><desc>{words}</desc><style>{style}</style><defs>{defs}</defs>
<rect width="760" height="{high:g}" rx="8" fill="var(--paper)"/>
<text x="12" y="22" class="b" style="font-size:15px">{title}</text>
<text x="652" y="22" class="d" text-anchor="end">{how} time</text>{body}</svg>"""
_PILL = """<g id="pill-{kind}">{box}<rect x="4" y="4" width="82" height="14" rx="3" fill="{colour}"/>
<text x="45" y="15" class="k" fill="{ink}">{kind}</text></g>"""
_BLOCK = """<g id="block-{kind}"><rect x="-1" y="-9" width="18" height="18" rx="3" fill="var(--ink)"/>{box}</g>"""
# Of a GPU's row: its card, the bar of the memory in use with the curve of the whole time, and one size in the bar.
CARD = """<rect x="12" width="156" height="{high}" rx="5" fill="var(--card)"/>
<text x="20" y="21" class="b">GPU {gpu}</text><rect x="250" width="496" height="{high}" fill="var(--card)"/>"""
MEMORY = """<path d="M250 60{steps}V60Z" fill="var(--memory)" opacity=".6"/>
<rect x="20" y="33" width="140" height="8" fill="var(--idle)"/>{levels}
<path d="M{mark:.1f} 31v12" stroke="var(--ink)"/>
<text x="160" y="55" class="d" text-anchor="end">peak {peak}</text>"""
LEVEL = """<g {when}><rect x="20" y="33" width="{wide:.1f}" height="8" fill="var(--memory)"/>
<text x="20" y="55" class="b">{size}</text></g>"""
VEIL = """<svg x="250" y="{y:g}" width="498" height="{high:g}"><g class="t">
<rect width="496" height="{high:g}" class="v"/><rect x="-1" width="2" height="{high:g}" fill="var(--ink)"/></g></svg>"""


def whole(title: str, words: str, how: str, kinds: list[str], body: str, high: float, still: float) -> str:
    """The file. kinds: those of work in it. still: the share of the time that a picture without motion shows."""
    defs = _PATTERNS
    for kind in [*kinds, "waits"]:
        fill, ink, _ = look(kind)
        defs += _PILL.format(kind=kind, box=box(0, 0, 90, 22, kind), colour=fill, ink=ink)
        defs += _BLOCK.format(kind=kind, box=box(0, -8, 16, 16, kind))
    style = _STYLE.replace("STILL", f"{still:.3f}")
    return _SVG.format(title=escape(title), words=escape(words), how=how, defs=defs, body=body, high=high, style=style)


def look(kind: str) -> tuple[str, str, int]:
    """The colour of a kind of work, that of text on it, and the number of its hatch. Collectives that add numbers
    differ from those that move them."""
    return _COLOURS.get(kind) or _COLOURS["reduce" if "reduce" in kind else "collective"]


def shown(begin: float, end: float, of_class: str = "", more: str = "") -> str:
    """The attributes of an element that is visible between two shares of the time, or to the end."""
    return f'class="{f"w {of_class}".strip()}" style="--a:{begin:.4g};--b:{2 if end >= 1 else end:.4g}{more}"'


def text(x: float, y: float, words: str, attributes: str) -> str:
    """A line of text."""
    return f'<text x="{x:.4g}" y="{y:g}" {attributes}>{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, kind: str) -> str:
    """A box that looks like a kind of work, with a hatch if there is room for one."""
    fill, _, hatch = look(kind)
    fill = f"url(#h{hatch})" if hatch and width > 3 else fill
    return f'<rect x="{x:.4g}" y="{y:g}" width="{width:.3g}" height="{height:g}" fill="{fill}"/>'
