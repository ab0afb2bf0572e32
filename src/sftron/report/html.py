"""HTML pages, rendered from the templates in pages/.

Each page is one self-contained file. All values in a template are escaped, and their invisible characters are made
visible (`visible_text`), whatever their origin. As a second protection, a content security policy allows only the hash
of the page's own script: if text of the data ever bypassed the escaping, a browser would still neither execute it nor
fetch anything for it.
"""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files
from itertools import groupby
from typing import Any

import jinja2
from markupsafe import Markup, escape

from sftron.errors import redacted
from sftron.report.tokens import role_name
from sftron.visible_text import visible_text


def render(name: str, **values: Any) -> str:
    """Returns the page rendered from a template in pages/, without secrets; equal values give equal pages."""
    return redacted(_ENVIRONMENT.get_template(name).render(**values))


def asset(name: str) -> Markup:
    """Returns the content of a file in pages/ without escaping."""
    return Markup(files("sftron.report").joinpath("pages", name).read_text(encoding="utf-8"))


def _with_line_ends(text: str) -> Markup:
    """Returns the escaped text with each newline in a <u>, which the stylesheet marks with an arrow."""
    return Markup(escape(visible_text(text)).replace("\n", Markup("<u>\n</u>")))


def _script_source(script: str) -> Markup:
    """Returns the script source for the content security policy: the hash of the page's own script, or none."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return Markup(f"'sha256-{digest}'" if script else "'none'")


_ENVIRONMENT = jinja2.Environment(
    loader=jinja2.PackageLoader("sftron.report", "pages"),
    autoescape=True,
    finalize=lambda value: value if hasattr(value, "__html__") else visible_text(str(value)),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_ENVIRONMENT.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
_ENVIRONMENT.globals.update(asset=asset, script_source=_script_source)
_ENVIRONMENT.filters.update(
    commas=lambda number: f"{number:,}",
    line_ends=_with_line_ends,
    role_name=role_name,
    looks=lambda block: groupby(block.spans, lambda span: (span.role, span.is_trained, span.is_partly_trained)),
)
