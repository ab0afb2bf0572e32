"""A comparison as files: report.html, report.json and plots/*.png."""

from __future__ import annotations

import json
from pathlib import Path

from sftron.report.charts import write_images
from sftron.report.page import render
from sftron.sweep.comparison import Comparison, as_json
from sftron.sweep.wording import effect_words, spread_words


def write_comparison(comparison: Comparison, folder: Path) -> Path:
    """Writes the files, and returns the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "report.html"
    path.write_text(comparison_page(comparison), encoding="utf-8")
    (folder / "report.json").write_text(json.dumps(as_json(comparison), indent=1) + "\n", encoding="utf-8")
    words, letters = [group.words for group in comparison.groups], [group.letter for group in comparison.groups]
    write_images(comparison.charts, folder / "plots", words=words, letters=letters)
    return path


def comparison_page(comparison: Comparison) -> str:
    """Returns the page as text."""
    return render("comparison.html.jinja", comparison=comparison, effect_words=effect_words, spread_words=spread_words)
