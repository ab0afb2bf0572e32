"""What `pip install sftron` brings: what checks of other trainers need; training has an extra of its own."""

import importlib.metadata
import subprocess
import sys
import tomllib

import grimp
import pytest
from packaging.requirements import Requirement

import sftron.__main__
from sftron.__main__ import COMMANDS, WITHOUT_TRAINING, main, packages_for_training
from tests.conftest import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
BASE = [Requirement(line) for line in PROJECT["dependencies"]]
TRAIN = [Requirement(line) for line in PROJECT["optional-dependencies"]["train"]]

PUBLISHED = {
    "trl 0.29.0": "torch 2.13.0, transformers 4.57.6, numpy 1.26.4, jinja2 3.1.6, pyyaml 6.0.4, rich 15.0.0",
    "trl 1.9.0": "torch 2.15.0, transformers 5.24.0, numpy 2.4.6, jinja2 3.1.6, pyyaml 6.0.4, rich 15.0.0",
    "trl 1.16.0": "torch 2.15.0, transformers 5.24.0, numpy 2.4.6, jinja2 3.1.6, pyyaml 6.0.4, rich 15.0.0",
    "axolotl 0.19.0": "torch 2.13.0, transformers 5.16.1, numpy 2.3.5, jinja2 3.1.6, pyyaml 6.0.3, rich 15.0.0",
    "axolotl 0.21.0": "torch 2.14.1, transformers 5.20.1, numpy 2.3.5, jinja2 3.1.6, pyyaml 6.0.3, rich 15.0.0",
    "llamafactory 0.9.5": "torch 2.15.0, transformers 5.6.0, numpy 2.4.6, jinja2 3.1.6, pyyaml 6.0.4, rich 15.0.0",
    "ms-swift 4.6.0": "torch 2.15.0, transformers 5.19.0, numpy 2.4.6, jinja2 3.1.6, pyyaml 6.0.4, rich 15.0.0",
    "verl 0.9.1": "torch 2.15.0, transformers 5.10.4, numpy 2.4.6, jinja2 3.1.6, pyyaml 6.0.4, rich 15.0.0",
    "unsloth 2026.10.1": "torch 2.14.1, transformers 5.17.0, numpy 2.4.6, jinja2 3.1.6, pyyaml 6.0.4, rich 15.0.0",
}
"""The versions that a resolver chose for these releases on 2026-11-26 (`make versions` resolves them again)."""


@pytest.mark.parametrize("release", PUBLISHED)
def test_an_installation_beside_another_trainer_changes_none_of_its_packages(release: str) -> None:
    versions = dict(entry.split() for entry in PUBLISHED[release].split(", "))
    assert {requirement.name for requirement in BASE} == versions.keys()
    for requirement in BASE:
        assert requirement.specifier.contains(versions[requirement.name]), (release, str(requirement))


IMPORTS = """
import sys, time
import transformers, torch, numpy, jinja2

class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {refused!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

for name in {refused!r}:
    sys.modules.pop(name, None)
sys.meta_path.insert(0, Refused())
start = time.perf_counter()
from sftron import check_isolation, verify_step, verify_trainer
from sftron.commands.verify_trainer import main
from sftron.checks.presentation import page_of
print(time.perf_counter() - start)
import sftron
try:
    sftron.Trainer
except ModuleNotFoundError as error:
    print(error)
"""


def test_checks_of_trainers_import_nothing_of_the_extra_train() -> None:
    of_base = {requirement.name for requirement in BASE}
    modules = {"huggingface-hub": "huggingface_hub"}
    # These come with transformers, and the trainer itself may use them.
    refused = {modules.get(each.name, each.name) for each in TRAIN} - of_base - {"safetensors", "huggingface_hub"}
    assert {"datasets", "matplotlib", "pydantic", "tiktoken", "torchdata"} == refused
    ended = subprocess.run(
        [sys.executable, "-c", IMPORTS.format(refused=refused)], capture_output=True, text=True, timeout=120, check=True
    )
    seconds, message = ended.stdout.splitlines()
    print(f"{float(seconds):.2f} s after transformers")
    assert message == "sftron.Trainer needs the package pydantic: pip install 'sftron[train]'"


def closure(*names: str) -> set[str]:
    graph, modules, remaining = grimp.build_graph("sftron", "sftcheck", cache_dir=None), set[str](), list(names)
    while remaining:
        if (name := remaining.pop()) not in modules and name != "sftron":  # which has the names of all, lazily
            modules.add(name)
            remaining += graph.find_modules_directly_imported_by(name)
    return modules


def test_a_difference_needs_the_format_of_records_and_the_faults_alone() -> None:
    modules = closure("sftcheck.diff.difference")
    others = {"sftcheck.faults", "sftron.report.token_record", "sftron.visible_text"}
    assert {name for name in modules if not name.startswith("sftcheck.diff.")} == others
    assert len(modules) <= 8


def test_the_checker_imports_little_and_nothing_that_trains() -> None:
    modules = closure("sftcheck.verify_trainer", "sftcheck.verify_step", "sftcheck.check_isolation")
    own = {name for name in modules if name.startswith("sftcheck.")}
    assert {"sftcheck.faults", "sftcheck.ranks.on_ranks", "sftcheck.program.search"} <= own
    allowed = ("data.chat.", "data.formats.", "report.", "checks.report", "checks.isolation")
    leaves = {"data.types", "data.labels", "data.json_text", "data.for_transformers"}
    leaves |= {"regular_file", "user_code"}
    others = {name.removeprefix("sftron.") for name in modules - own}
    assert {name for name in others - leaves if not name.startswith(allowed)} == set()
    assert len(modules) <= 85


def test_a_command_that_trains_names_what_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stated = [*PROJECT["dependencies"], *(f"{line}; extra == 'train'" for line in map(str, TRAIN))]
    stated.append("wandb>=0.31; extra == 'wandb'")
    installed = {requirement.name: "99" for requirement in (*BASE, *TRAIN)} | {"matplotlib": "3.1"}
    del installed["torchdata"]

    def version(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(sftron.__main__.metadata, "requires", lambda _: stated)
    monkeypatch.setattr(sftron.__main__.metadata, "version", version)
    assert packages_for_training() == ["torchdata>=0.11", "matplotlib>=3.9 (3.1 is installed)"]
    for name in COMMANDS.keys() - {*WITHOUT_TRAINING}:
        assert main([name, "--help"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"sftron {name} needs torchdata>=0.11, ")
        assert line.endswith(": pip install 'sftron[train]'")
    with pytest.raises(SystemExit):
        main(["verify-trainer", "--help"])
    assert "SCRIPT.py:FUNCTION" in capsys.readouterr().out
    installed |= {"torchdata": "0.12", "matplotlib": "3.11"}
    assert packages_for_training() == []
