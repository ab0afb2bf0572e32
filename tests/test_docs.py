"""The documentation holds what it says: keys, configurations, messages, files and links."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from sftron.config import ConfigError, describe_config, load_config
from sftron.sweep.grid import read_sweep_file
from tests.conftest import ROOT
from tests.docs_commands import PAGES as DOCS

CONFIGURATION = ROOT / "docs" / "configuration.md"
ARCHITECTURE = ROOT / "docs" / "architecture.md"
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
        assert read_sweep_file(path).grid()
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
SMALLEST = """
general: {run_name: smallest}
model: {path: models/SmolLM2-135M-Instruct}
data: {datasets: [{path: chats.jsonl}]}
tokens: {sequence_length: 512, train_epochs: 1}
optimizer: {learning_rate: 1e-4}
"""
SECTIONS = re.findall(r"^(\w+):", describe_config(), re.MULTILINE)


@pytest.mark.parametrize(
    "text", [text for *_, text in YAML_BLOCKS], ids=[f"{path.name}-{number}" for path, number, _ in YAML_BLOCKS]
)
def test_every_configuration_in_the_documentation_loads(text: str, tmp_path: Path) -> None:
    """A part of one is put into the smallest one. Another trainer's is marked with its name: ```yaml axolotl."""
    path = tmp_path / "config.yaml"
    path.write_text(text if is_whole(text) else yaml.safe_dump(merged(SMALLEST, text)), encoding="utf-8")
    try:
        load_config(path)
    except ConfigError as error:
        pytest.fail(f"{error}\nIf it is not a run's, write after yaml whose it is: ```yaml wandb", pytrace=False)


def is_whole(text: str) -> bool:
    return set(yaml.safe_load(SMALLEST)) <= set(yaml.safe_load(text))


def merged(whole: str, part: str) -> dict[str, Any]:
    tree, more = yaml.safe_load(whole), yaml.safe_load(part)
    if more.get("tokens", {}).keys() & {"train_steps", "train_epochs"}:
        del tree["tokens"]["train_epochs"]
    for section, keys in more.items():
        tree[section] = tree.get(section, {}) | keys
    return tree


@pytest.mark.parametrize("path", DOCS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_configuration_is_marked_as_one(path: Path) -> None:
    """Else nobody would see that it no longer loads."""
    for text in fenced(path, ""):
        sections = re.findall(r"^(\w+):(?: *$| *\{)", text, re.MULTILINE)
        assert not sections or not set(sections) <= set(SECTIONS), f"put yaml after the fence of\n{text}"


def test_the_readme_explains_the_quickstarts_configuration(tmp_path: Path) -> None:
    (text,) = fenced(ROOT / "README.md", "yaml")
    path = tmp_path / "config.yaml"
    path.write_text(text, encoding="utf-8")
    assert load_config(path) == load_config(ROOT / "configs" / "quickstart.yaml")


def test_the_page_of_ones_own_data_shows_the_configuration_whose_three_keys_are_changed(tmp_path: Path) -> None:
    (text,) = fenced(ROOT / "docs" / "your-data.md", "yaml")
    whole = (ROOT / "configs" / "your-data.yaml").read_text(encoding="utf-8")
    assert whole.endswith(text)
    assert [line.split(":")[0].strip(" -") for line in text.splitlines() if re.search(r"# \d\. ", line)] == [
        "run_name",
        "path",
        "path",
    ]


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
        text = re.sub(r"--out \S+", "", text)  # is written
        files = re.findall(r"\b(?:tests|tools|docs|examples|configs|src)/[\w/.-]+\.(?:py|md|yaml|jsonl)\b", text)
        missing += [f"{path.name}: {file}" for file in files if not (ROOT / file).exists()]
    assert not missing


def anchors(page: Path) -> set[str]:
    """What GitHub makes of the headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_place_in_a_page_that_is_linked_to_exists() -> None:
    missing = []
    for path in DOCS:
        for target, anchor in re.findall(r"\]\(([^)#]*)#([^)]+)\)", path.read_text(encoding="utf-8")):
            if "://" not in target and anchor not in anchors(path.parent / target if target else path):
                missing.append(f"{path.name}: {target}#{anchor}")
    assert not missing


def test_every_page_is_reached_from_the_readme() -> None:
    reached, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop().resolve()
        if page in reached or page.suffix != ".md":
            continue
        reached.add(page)
        links = re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8"))
        waiting += [page.parent / link for link in links if "://" not in link]
    lost = [str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md") if page.resolve() not in reached]
    assert not lost, f"no page links to {lost}: put them into the README's table, Where to read on"


def test_every_named_key_is_one_of_the_configuration() -> None:
    """`section.key` in backquotes, for each section of the configuration."""
    sections = "general|model|tokenizer|data|tokens|parallelism|optimizer|checkpoints|evaluation|logging"
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


def test_the_house_has_every_module_and_no_other() -> None:
    house = ARCHITECTURE.read_text(encoding="utf-8")
    modules = {path.name for path in (ROOT / "src").rglob("*.py") if path.name != "__init__.py"}
    named = set(re.findall(r"\b\w+\.py\b", "\n".join(fenced(ARCHITECTURE, ""))))
    scripts = {path.name for path in [*ROOT.glob("*.py"), *ROOT.glob("tools/*.py"), *ROOT.glob("examples/**/*.py")]}
    missing = sorted(name for name in modules if not re.search(rf"\b{name}", house))
    assert not missing, f"docs/architecture.md, The house, does not say what is in {missing}"
    assert named <= modules | scripts, f"docs/architecture.md names {sorted(named - modules - scripts)}, which are gone"


def test_what_is_nightly_only_is_listed_with_the_day_of_its_last_green_run_and_ci_runs_make_test() -> None:
    listed = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (nightly,) = re.findall(r"^nightly: (.+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    for target in nightly.split():
        row = rf"^\| `make {target}` \|.*\| nightly \| \d{{4}}-\d\d-\d\d"
        assert re.search(row, listed, re.MULTILINE), f"CONTRIBUTING.md lists no `make {target}`, nightly, with its day"
    assert (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()[-1] == "make test"


def test_no_page_starts_one_process_by_torchrun() -> None:
    pages = [*DOCS, ROOT / "Makefile", ROOT / "run_train.py", *(ROOT / "configs").glob("*.yaml")]
    one = re.compile(r"nproc[-_]per[-_]node[= ]1\b")
    assert not [path.name for path in pages if one.search(path.read_text(encoding="utf-8"))]
