"""Pages of the site that are not in docs/: README and its neighbors, and the reference made from docstrings.

mkdocs calls the two functions (mkdocs.yml). A link to a file that is no page of the site leads to the repository.
"""

import re
from pathlib import Path, PurePosixPath
from posixpath import normpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import sftron

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "SECURITY.md": "security.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "examples/README.md": "examples.md",
}
"""The site's pages by the file outside of docs/ that they show."""

_LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    files.append(File.generated(config, "reference.md", content=_reference()))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Makes the links of the page, which are those of a repository's folder, those of the site."""
    sources = {page: source for source, page in PAGES.items()}
    here = page.file.src_uri
    folder = PurePosixPath(sources.get(here, f"docs/{here}")).parent

    def moved(link: re.Match[str]) -> str:
        target = normpath(folder / link[1])
        uri = PAGES.get(target, target.removeprefix("docs/"))
        if (target in PAGES or target.startswith("docs/")) and files.get_file_from_path(uri):
            return "/".join([".."] * here.count("/") + [uri])
        if not (ROOT / target).exists():
            return link[0]  # a broken link, which mkdocs reports
        return f"{config.repo_url}/blob/main/{target}"

    return _LINK.sub(moved, markdown)


def _reference() -> str:
    title = "# Reference\n\nThe names that `from sftron import` gives; [the guide](python.md) shows them at work.\n"
    return "\n".join([title, *(f"::: {module}.{name}\n" for name, module in sftron._MODULES.items())])
