"""The documentation is true: its keys, configurations, messages, laws, tests, files and links exist."""

import ast
import json
import re
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import yaml

from sftron import ChatTokenizer, PackedDataset, PackLoader, Role, load_model, weighted_loss_sum
from sftron.__main__ import COMMANDS, usage
from sftron.compare.grid import read_sweep_file
from sftron.config import ConfigError, describe_config, load_config
from sftron.config.results_schema import Logging
from tests.conftest import ROOT
from tests.docs_commands import FIRST_WORDS, PAGES, blocks

DOCS = ROOT / "docs"
ARCHITECTURE = DOCS / "architecture.md"
SOURCES = [*(ROOT / "src").rglob("*.py"), *ROOT.glob("tools/*.py"), ROOT / "run_train.py"]
TESTS = [*(ROOT / "tests").rglob("*.py")]
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def fenced(path: Path, language: str) -> list[str]:
    return [text for _, text in blocks(path, language)]


# --- Configurations ---


def test_the_configuration_page_is_what_help_prints() -> None:
    assert fenced(DOCS / "configuration.md", "text") == [describe_config()], (
        "docs/configuration.md is not the schema's: put the sections of `sftron train --help` into its block"
    )


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_every_configuration_loads(path: Path) -> None:
    if path.name.startswith("sweep_"):
        assert read_sweep_file(path).grid()
    else:
        load_config(path)


YAML_BLOCKS = [(page, number, text) for page in PAGES for number, text in enumerate(fenced(page, "yaml"))]
SMALLEST = """
general: {run_name: smallest}
model: {path: models/SmolLM2-135M-Instruct}
data: {datasets: [{path: chats.jsonl}]}
tokens: {sequence_length: 512, train_epochs: 1}
optimizer: {learning_rate: 1e-4}
"""


@pytest.mark.parametrize(
    "text", [text for *_, text in YAML_BLOCKS], ids=[f"{page.name}-{number}" for page, number, _ in YAML_BLOCKS]
)
def test_every_configuration_in_the_documentation_loads(text: str, tmp_path: Path) -> None:
    """A partial one is merged into the smallest one. Another program's is marked with its name: ```yaml axolotl."""
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


@each_page
def test_every_configuration_is_marked_as_one(page: Path) -> None:
    """Otherwise nobody would notice that it no longer loads."""
    known = set(re.findall(r"^(\w+):", describe_config(), re.MULTILINE))
    for text in fenced(page, ""):
        sections = set(re.findall(r"^(\w+):(?: *$| *\{)", text, re.MULTILINE))
        assert not sections or not sections <= known, f"put yaml after the fence of\n{text}"


def test_every_named_key_is_one_of_the_configuration() -> None:
    """`section.key` in backquotes, for each section of the configuration."""
    sections = "general|model|lora|tokenizer|data|tokens|parallelism|optimizer|checkpoints|hub|evaluation|logging"
    known = set(re.findall(r"^ *(\w+)(?: \(|:)", describe_config(), re.MULTILINE))
    named = re.compile(rf"`(?:--)?((?:{sections})\.(?!safetensors)([a-z_]+))(?![a-z_(])")  # no file's name, no call
    pages = [page for page in PAGES if page.name != "CHANGELOG.md"]  # it names keys that have left
    assert not [f"{page.name}: {name}" for page in pages for name, key in named.findall(read(page)) if key not in known]


# --- Messages, laws and tests ---


def test_every_quoted_phrase_is_in_the_source() -> None:
    """Three plain words or more in backquotes, which are what a run prints; `...` stands for values."""
    literals = []  # with a NUL for each hole of an f-string
    for path in SOURCES:
        for node in ast.walk(ast.parse(read(path))):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "\0" for part in node.values]
                literals.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                literals.append(node.value)
    source = "\1".join(literals)
    phrases = {
        (page.name, " ".join(text.split()))
        for page in PAGES
        for text in re.findall(
            r"`([a-z]+(?:\s+(?:[a-z,]+|\.\.\.)){2,})`", re.sub(r"(?ms)^ *```.*?^ *```", "", read(page))
        )
        if page.name != "CHANGELOG.md" and text.split()[0] not in (*FIRST_WORDS, "from")
    }
    assert len(phrases) > 5
    assert not [
        phrase for phrase in phrases if not re.search("[^\1]*".join(map(re.escape, phrase[1].split("..."))), source)
    ]


FOREIGN = {
    *("causal_conv1d", "causal_conv1d_fn", "mamba_split_conv1d_scan_combined", "mamba_ssm"),
    *("aya_vision", "cohere2_vision", "rotary_pct", "on_step_begin", "connectFullMesh"),
    *(
        "PIP_EXTRA_INDEX_URL",
        "WANDB_AGENT_KILL_DELAY",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
        "sanitize_control_tokens",
        "SWEEP_ID",
    ),
}
"""Names of other projects in the pages."""


def test_every_name_in_backquotes_is_one_of_the_source() -> None:
    """Names with an underscore or a capital inside; on other pages than those that list the names of others."""
    files = [*SOURCES, *TESTS, *ROOT.glob("examples/**/*.py"), ROOT / "pyproject.toml", ROOT / "Makefile"]
    known = set(re.findall(r"\w+", "\n".join(map(read, files)))) | FOREIGN | {path.stem for path in TESTS}
    others = ("CHANGELOG.md", "decisions.md", "migrating.md", "metrics.md", "how-it-is-tested.md", "silent-failures.md")
    named = {
        (page.name, name)
        for page in PAGES
        for text in re.findall(r"`([^`\n]+)`", re.sub(r"(?ms)^ *```.*?^ *```", "", read(page)))
        for name in re.findall(r"\b[A-Za-z]\w*(?:_|[a-z][A-Z])\w*", text)
        if page.name not in others
    }
    assert len(named) > 300
    assert not "\n".join(sorted(f"{page}: {name}" for page, name in named if name not in known))


def test_every_command_target_and_extra_that_a_page_names_exists() -> None:
    targets = set(re.findall(r"(?m)^([a-z-]+):", read(ROOT / "Makefile")))
    project = tomllib.loads(read(ROOT / "pyproject.toml"))["project"]
    for page in (page for page in PAGES if page.name != "CHANGELOG.md"):
        text = read(page)
        assert set(re.findall(r"`sftron ([a-z][a-z-]*)", text)) <= COMMANDS.keys(), page.name
        assert set(re.findall(r"`make ([a-z-]+)", text)) <= targets, page.name
        extras = ",".join(re.findall(r"(?:sftron|['\" ]\.)\[([a-z,0-9]+)\]", text)).split(",")
        assert set(filter(None, extras)) <= project["optional-dependencies"].keys(), page.name
        assert not re.search(r"pip install sftron\b(?! and)|sftron/sftron@", text), f"{page.name}: not published"


def test_the_help_has_the_exit_statuses_of_all_commands() -> None:
    def statuses(text: str) -> set[str]:
        return set(re.findall(r"\b(\d) [a-z]|\b(\d)(?: if|, or)", " ".join(text.split()).partition("xit status")[2]))

    stated = {status for pair in statuses(usage()) for status in pair if status}
    for name in COMMANDS:
        module = import_module(f"sftron.commands.{name.replace('-', '_')}")
        found = {status for pair in statuses(module.__doc__ or "") for status in pair if status}
        assert found, name
        assert found <= stated, name
    page = read(DOCS / "resume.md").partition("has these exit statuses")[2]
    assert stated == set(re.findall(r"(?m)^\| (\d) \|", page))


def test_every_law_that_is_cited_is_an_invariant() -> None:
    stated = set(re.findall(r"^## (\d+)\. ", read(DOCS / "invariants.md"), re.MULTILINE))
    cited = {
        number
        for path in [*SOURCES, *TESTS, *PAGES]
        for citation in re.findall(r"\b[Ll]aws?((?:,? (?:and |to )?\d+\b)+)", read(path))
        for number in re.findall(r"\d+", citation)
    }
    assert len(cited) > 10
    assert cited <= stated


def test_every_test_that_a_page_names_exists() -> None:
    tests = set(re.findall(r"\bdef (test_\w+)", "\n".join(map(read, TESTS))))
    named = {name for page in PAGES for name in re.findall(r"`(test_\w{12,})`", read(page))}
    assert len(named) > 50
    assert sorted(named - tests) == []


# --- The row of GSM8K that goes through the pages ---

SECOND_ROW = {
    "question": "A couple with two children, ages 6 and 10 years old, decided to go to an amusement park. The regular "
    "ticket costs $109, but children below 12 years old have a $5 discount. If they gave the cashier $500, how much "
    "change will they receive?",
    "answer": "The ticket costs 109 - 5 = $<<109-5=104>>104 for each child.\nSo the ticket cost of the two children is "
    "104 x 2 = $<<104*2=208>>208.\nThe couple needs to pay the regular price, so it's 109 x 2 = $<<109*2=218>>218.\n"
    "Thus, the family needs to pay a total of 208 + 218 = $<<208+218=426>>426.\nTherefore, their change is 500 - 426 = "
    "$<<500-426=74>>74.\n#### 74",
}
SMOLLM2 = ROOT / "models" / "SmolLM2-135M-Instruct"


@pytest.mark.skipif(not SMOLLM2.exists(), reason="needs models/SmolLM2-135M-Instruct (make quickstart)")
def test_the_row_of_gsm8k_is_on_every_page_what_smollm2_makes_of_it() -> None:
    row = json.loads(next(text for text in fenced(DOCS / "data.md", "") if text.startswith('{"question"')))
    tokenizer = ChatTokenizer.from_pretrained(SMOLLM2)
    packs = [next(iter(packs_of([each], tokenizer))) for each in (row, SECOND_ROW)]
    both = next(iter(packs_of([row, SECOND_ROW], tokenizer)))
    assert [(pack.num_tokens, pack.num_trained_tokens) for pack in [*packs, both]] == [
        (121, 55),
        (274, 178),
        (395, 233),
    ]
    pack, shown = packs[0], [*range(58, 67), *range(117, 121)]
    table = {
        "position": shown,
        "token": [tokenizer.decode([pack.input_ids[n]]).replace("\n", "\\n").strip(" ") for n in shown],
        "input_ids": pack.input_ids[shown],
        "role_ids": [Role(role).name[0] for role in pack.role_ids[shown]],
        "labels": ["-" if label == -100 else label for label in pack.labels[shown]],
        "loss_weights": [int(weight) for weight in pack.loss_weights[shown]],
    }
    for name, cells in table.items():
        line = " ".join([name, *map(str, cells[:9]), "...", *map(str, cells[9:])])
        assert line in " ".join(read(DOCS / "masks.md").split()), line
    bounds = "cu_seqlens " + " ".join(map(str, both.cu_seqlens))
    for page in ("packing.md", "architecture.md"):
        assert bounds in " ".join(read(DOCS / page).split()), page

    model = load_model(SMOLLM2, compute_dtype=torch.float32)
    sums = []
    for rows in ([row], [SECOND_ROW]):
        batch = next(iter(PackLoader(packs_of(rows, tokenizer), num_workers=0, keep_tail=False)))
        with torch.no_grad():
            hidden = model(batch.input_ids, batch.position_ids, batch.cu_seqlens, batch.max_seqlen)
            labels = (batch.label_positions, batch.labels, batch.loss_weights)
            sums.append(weighted_loss_sum(hidden, model.head, *labels)[0].item())
    assert sums == pytest.approx([122.55, 265.69], abs=0.02)
    assert "122.55 + 265.69 nats" in read(ARCHITECTURE)
    assert "388.24 / 233 = 1.666" in read(ARCHITECTURE)
    assert "(122.55 + 265.69) / 233 = 1.666. The mean of both conversations' means would be 1.860" in read(
        DOCS / "metrics.md"
    )


def packs_of(rows: list[dict[str, str]], tokenizer: ChatTokenizer) -> PackedDataset:
    return PackedDataset.from_rows(rows, tokenizer, sequence_length=512, num_epochs=1)


# --- Files and links ---


def test_python_is_on_the_page_whose_blocks_run() -> None:
    """tests/test_api.py runs those of docs/python.md."""
    assert [page.name for page in PAGES if fenced(page, "python")] == ["python.md"]


def test_every_tested_logger_has_an_extra_of_its_name() -> None:
    extras = tomllib.loads(read(ROOT / "pyproject.toml"))["project"]["optional-dependencies"]
    loggers = get_args(get_args(Logging.model_fields["to"].annotation)[0])
    assert loggers[:4] == ("wandb", "trackio", "tensorboard", "mlflow")
    assert set(loggers[:4]) <= extras.keys()
    makefile = read(ROOT / "Makefile")
    for name in re.findall(r"\.\[(.*?)\]", makefile)[0].split(","):
        assert name in extras, name
    for name in re.findall(r"--extra ,(.*?)\)", makefile)[0].split():
        assert name in extras, name


def test_every_link_and_every_named_file_exists() -> None:
    missing = []
    for page in PAGES:
        text = read(page)
        outside_of_code = re.sub(r"`[^`\n]*`", "", text)
        for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", outside_of_code):
            linked = page.parent / target if target else page
            if "://" not in target and not (linked.exists() and (not anchor or anchor in anchors(linked))):
                missing.append(f"{page.name}: {target}#{anchor}")
        if page.name == "CHANGELOG.md":  # names what has left, too
            continue
        text = re.sub(r"--out \S+", "", text)  # is written
        files = re.findall(r"\b(?:tests|tools|docs|examples|configs|src)/[\w/.-]+\.(?:py|md|yaml|jsonl)\b", text)
        missing += [f"{page.name}: {file}" for file in files if not (ROOT / file).exists()]
        modules = re.findall(
            r"`((?:config|data|kernels|models|checkpoint|train|verify|report|compare)/[\w/]+\.py)`", text
        )
        missing += [f"{page.name}: {module}" for module in modules if not (ROOT / "src" / "sftron" / module).exists()]
    assert not missing


def anchors(page: Path) -> set[str]:
    """Returns GitHub's anchors of the headings."""
    text = re.sub(r"^```.*?^```", "", read(page), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_page_is_reached_from_the_readme() -> None:
    reached, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop().resolve()
        if page not in reached and page.suffix == ".md":
            reached.add(page)
            waiting += [page.parent / link for link in re.findall(r"\]\(([^)#]+)", read(page)) if "://" not in link]
    assert not [str(page) for page in DOCS.rglob("*.md") if page.resolve() not in reached]


def test_nightly_commands_are_listed_with_the_day_of_their_last_green_run_and_ci_runs_make_test() -> None:
    (nightly,) = re.findall(r"^nightly: (.+)$", read(ROOT / "Makefile"), re.MULTILINE)
    for target in nightly.split():
        row = rf"^\| `make {target}` \|.*\| nightly \| \d{{4}}-\d\d-\d\d"
        assert re.search(row, read(ROOT / "CONTRIBUTING.md"), re.MULTILINE), f"CONTRIBUTING.md lists no `make {target}`"
    assert read(ROOT / ".ci" / "run").splitlines()[-1] == "make test"
