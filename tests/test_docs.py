"""The documentation holds what it says: keys, configurations, messages, files and links."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from sftron.config import describe_config, load_config
from sftron.sweep.expansion import expand
from sftron.sweep.sweep_file import read_sweep_file
from tests.conftest import ROOT

DOCS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
CONFIGURATION = ROOT / "docs" / "configuration.md"
TROUBLESHOOTING = ROOT / "docs" / "troubleshooting.md"


def fenced(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def test_the_configuration_page_is_what_help_prints() -> None:
    assert fenced(CONFIGURATION, "text") == [describe_config()], (
        "docs/configuration.md is not the schema's: put the sections of `python run_train.py --help` into its block"
    )


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_every_configuration_loads(path: Path) -> None:
    if path.name.startswith("sweep_"):
        assert expand(read_sweep_file(path))
    else:
        load_config(path)


def test_the_sweeps_page_shows_the_sweep_of_the_toggles(tmp_path: Path) -> None:
    (text,) = fenced(ROOT / "docs" / "sweeps.md", "yaml sweep")
    path = tmp_path / "sweep.yaml"
    path.write_text(text, encoding="utf-8")
    shown, whole = read_sweep_file(path), read_sweep_file(ROOT / "configs" / "sweep_toggles.yaml")
    assert shown.parameters == whole.parameters
    assert [word for word in whole.command if word in shown.command] == [*shown.command]


YAML_BLOCKS = [(path, number, text) for path in DOCS for number, text in enumerate(fenced(path, "yaml"))]


@pytest.mark.parametrize(
    "text", [text for *_, text in YAML_BLOCKS], ids=[f"{path.name}-{number}" for path, number, _ in YAML_BLOCKS]
)
def test_every_configuration_in_the_documentation_loads(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text, encoding="utf-8")
    load_config(path)


def test_the_readme_explains_the_quickstarts_configuration(tmp_path: Path) -> None:
    (text,) = fenced(ROOT / "README.md", "yaml")
    path = tmp_path / "config.yaml"
    path.write_text(text, encoding="utf-8")
    assert load_config(path) == load_config(ROOT / "configs" / "quickstart.yaml")


def string_literals() -> Iterator[str]:
    """Every string of the source; each hole of an f-string is a NUL."""
    for path in [*(ROOT / "src").rglob("*.py"), *ROOT.glob("tools/*.py"), ROOT / "run_train.py"]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                yield "".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


QUOTED_MESSAGES = re.findall(r"^### `(.+)`$", TROUBLESHOOTING.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.fixture(scope="module")
def literals() -> list[str]:
    return list(string_literals())


@pytest.mark.parametrize("message", QUOTED_MESSAGES)
def test_every_quoted_message_is_one_of_ours(message: str, literals: list[str]) -> None:
    pattern = re.compile(".*".join(map(re.escape, message.split("..."))), re.DOTALL)
    assert any(pattern.search(literal) for literal in literals)


def test_every_link_and_every_named_file_exists() -> None:
    missing = []
    for path in DOCS:
        text = path.read_text(encoding="utf-8")
        links = [target.partition("#")[0] for target in re.findall(r"\]\(([^)]+)\)", text) if "://" not in target]
        missing += [f"{path.name}: {link}" for link in links if link and not (path.parent / link).exists()]
        files = re.findall(r"\b(?:tests|tools|docs|examples|configs|src)/[\w/.-]+\.(?:py|md|yaml|jsonl)\b", text)
        missing += [f"{path.name}: {file}" for file in files if not (ROOT / file).exists()]
    assert not missing


def test_every_named_key_is_one_of_the_configuration() -> None:
    """`section.key` in backquotes, for each section of the configuration."""
    sections = "general|model|tokenizer|data|tokens|optimizer|checkpoints|evaluation|logging"
    known = describe_config()
    # Not a file's name, and not a call.
    named = re.compile(rf"`(?:--)?({sections})\.(?!safetensors)([a-z_]+)(?![a-z_(])")
    unknown = [
        f"{path.name}: {section}.{key}"
        for path in DOCS
        for section, key in named.findall(path.read_text(encoding="utf-8"))
        if not re.search(rf"^ *{key}(?: \(|:)", known, re.MULTILINE)
    ]
    assert not unknown
