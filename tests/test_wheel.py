"""The wheel, installed into an environment outside the repository, has every command and every file that they read."""

import csv
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from sftron import __version__
from sftron.__main__ import COMMANDS
from tests.conftest import ROOT
from tests.train.runs import make_model_folder

pytestmark = pytest.mark.nightly

FEWER = ["--tokens.train_steps=3", "--model.compute_dtype=float32"]


def build_wheel(folder: Path) -> Path:
    """Builds from a copy, because setuptools writes into the sources."""
    for name in ("src", "configs", "examples"):
        shutil.copytree(ROOT / name, folder / "source" / name, symlinks=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, folder / "source" / name)
    build = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", *build, str(folder / "source")], check=True, timeout=300)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


class Environment:
    """A virtual environment with the wheel. Its dependencies are those of the environment of the tests."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=120)
        self._bin = folder / "bin"
        # With the sources in PYTHONPATH, where tests of ranks put them, pip would take the wheel for installed.
        self._variables = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
        install = ["--python", str(self._bin / "python"), "install", "--quiet", "--no-deps", str(wheel)]
        subprocess.run([sys.executable, "-m", "pip", *install], check=True, timeout=120, env=self._variables)
        (packages,) = folder.glob("lib/python*/site-packages")
        (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")

    def run(self, *command: str, cwd: Path, typed: str = "", status: int = 0) -> str:
        """Returns the output of a command, which has to end with `status`."""
        words = [str(self._bin / command[0]), *command[1:]]
        options = {"cwd": cwd, "env": self._variables, "capture_output": True, "text": True, "timeout": 300}
        ended = subprocess.run(words, input=typed, **options)
        assert ended.returncode == status, f"{command}: {ended.stdout}{ended.stderr}"
        return ended.stdout


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment(tmp_path_factory.mktemp("environment"), wheel)


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    """A folder with nothing but a model and a CSV file."""
    make_model_folder(tmp_path / "model")
    with (tmp_path / "my.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["prompt", "completion"])
        writer.writerows([f"What is {n}?", f"{n} is one more than {n - 1}."] for n in range(60))
    return tmp_path


def test_the_wheel_has_every_file_that_the_package_reads(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
    print(f"{wheel.name}: {wheel.stat().st_size:,} bytes")
    source = ROOT / "src"
    files = [Path(folder) / name for folder, _, names in os.walk(source, followlinks=True) for name in names]
    wanted = {str(file.relative_to(source)) for file in files if "__pycache__" not in file.parts}
    wanted = {name for name in wanted if ".egg-info/" not in name}
    assert "sftron/py.typed" in wanted
    assert "sftron/starter/configs/quickstart.yaml" in wanted
    assert not wanted - packed
    # And nothing else: README says that make, tools and the other examples are in the checkout alone.
    others = {name for name in packed - wanted if ".dist-info/" not in name}
    assert not others, others
    assert wheel.name == f"sftron-{__version__}-py3-none-any.whl"
    assert wheel.stat().st_size < 2_000_000


def test_every_command_of_the_wheel_describes_itself(environment: Environment, tmp_path: Path) -> None:
    assert environment.run("sftron", "--version", cwd=tmp_path) == f"sftron {__version__}\n"
    assert environment.run("python", "-m", "sftron", "--version", cwd=tmp_path) == f"sftron {__version__}\n"
    for name in COMMANDS:
        assert f"usage: sftron {name}" in environment.run("sftron", name, "--help", cwd=tmp_path)


def test_a_run_of_ones_own_csv_from_an_empty_folder(environment: Environment, empty: Path) -> None:
    module = "import sftron; print(sftron.__file__)"
    assert not Path(environment.run("python", "-c", module, cwd=empty).strip()).is_relative_to(ROOT)
    environment.run("sftron", "init", "my.csv", "model", cwd=empty)
    dry = environment.run("sftron", "train", "--config", "sft.yaml", "--dry-run", *FEWER, cwd=empty)
    assert "dry run    all checks passed" in dry
    trained = environment.run("python", "-m", "sftron", "train", "--config", "sft.yaml", *FEWER, cwd=empty)
    assert "completed  after step 3" in trained
    checked = environment.run("sftron", "check", "--model", "runs/my/latest", cwd=empty)
    assert "PASS  greedy generation" in checked
    assert "FAIL" not in checked
    environment.run("sftron", "generate", "--model", "runs/my/latest", cwd=empty, typed="What is 7?\n")
    assert (empty / "runs" / "my" / "latest" / "README.md").is_file()
    assert (empty / "runs" / "my" / "samples.html").is_file()


def test_the_readmes_configurations_load_where_they_are_copied(environment: Environment, empty: Path) -> None:
    environment.run("sftron", "init", "--quickstart", cwd=empty)
    model = "--model.path=model"
    for config in ("quickstart", "quickstart_lora", "your-data"):
        path = f"configs/{config}.yaml"
        options = ["--tokens.sequence_length=256", "--data.max_dropped_share=1", "--evaluation.prompts=null"]
        command = ["sftron", "inspect", "--config", path, model, *options, "-n", "0", "--rows", "20"]
        assert "No problem found" in environment.run(*command, cwd=empty)
