"""The documentation as a site: it builds without a warning, holds every page, and loads nothing from elsewhere."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import sftron
from tests.conftest import ROOT

pytest.importorskip("mkdocs", reason="mkdocs is not installed: pip install 'sftron[docs]'")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site; mkdocs ends with an error if a link or an anchor of a page leads nowhere."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def test_the_site_has_every_page_the_reference_and_an_index_to_search(site: Path) -> None:
    pages = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")]
    assert len(pages) > 20
    assert [str(page) for page in pages if not (site / page).with_suffix(".html").exists()] == []
    reference = (site / "reference.html").read_text(encoding="utf-8")
    assert [name for name in sftron.__all__ if f">{name}</span>" not in reference] == []
    found = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))["docs"]
    assert {"your-data.html", "index.html", "security.html", "reference.html"} <= {each["location"] for each in found}
    # Links of README and of a page to files of the repository
    assert 'href="security.html"' in (site / "index.html").read_text(encoding="utf-8")
    assert "/blob/main/configs/" in (site / "your-data.html").read_text(encoding="utf-8")


def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    loads = re.compile(r'<(?:script|img|iframe)[^>]*src="(\w+:[^"]*)|<link[^>]*rel="stylesheet"[^>]*href="(\w+:[^"]*)')
    for page in site.rglob("*.html"):
        assert loads.findall(page.read_text(encoding="utf-8")) == [], page


def test_the_reference_lists_every_role_with_a_sentence_and_every_public_name(site: Path) -> None:
    reference = (site / "reference.html").read_text(encoding="utf-8")
    for role in sftron.Role:
        place = reference.index(f'id="sftron.data.types.Role.{role.name}"')
        assert re.search(r"<p>[A-Z][^<]{10,}", reference[place : place + 3000]), role
