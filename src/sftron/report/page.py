"""The shell of every HTML page: one file that holds everything, legible in light and dark. No other file, no network.

A content security policy that knows only the hash of the page's own script is the second lock: should text of the data
ever get past the escaping, a browser would still not run it or fetch anything for it.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from html import escape
from importlib.resources import files

from sftron.visible_text import visible_text


def page(title: str, *, header: str = "", body: str, styles: Sequence[str] = (), script: str = "") -> str:
    """The page as text.

    header: HTML under the title, the verdict most often. body: HTML of the main part. All text of others in both has to
    be escaped by whoever makes them.
    styles: files of this package that follow page.css, which has the colours, tables, numbers and bars of all pages.
    script: the text of the page's one script.
    """
    style = "".join(resource(name) for name in ("page.css", *styles))
    scripts = f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" if script else "'none'"
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src {scripts}; base-uri 'none'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escaped(title)}</title>\n<style>{style}</style></head>\n<body>\n"
        f"<header><h1>{escaped(title)}</h1>{header}</header>\n<main>\n{body}</main>\n"
        "<footer>Written by sftron</footer>\n" + (f"<script>{script}</script>\n" if script else "") + "</body></html>\n"
    )


def resource(name: str) -> str:
    """The text of a file of this package."""
    return files("sftron.report").joinpath(name).read_text(encoding="utf-8")


def escaped(text: str) -> str:
    """Text of the data for the page: what acts or hides is written out, then HTML's own characters are escaped."""
    return escape(visible_text(text), quote=True)
