"""A browser for pages."""

from collections.abc import Iterator

import pytest

from tests.browser import Browser, find_chromium


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One for all tests; they are skipped where there is none."""
    program = find_chromium()
    if program is None:
        pytest.skip("no chromium and no google-chrome on this machine: apt-get install chromium")
    with Browser(program, tmp_path_factory.mktemp("chromium")) as browser:
        yield browser
