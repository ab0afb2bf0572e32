"""A run takes one commit of everything on the Hub, records it, and goes on with it, though the branch has moved."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import yaml

from sftron.checkpoint.checkpoint import CheckpointError
from sftron.commands.init import main as init
from sftron.commands.inspect import main as inspect
from sftron.commands.verify import main as verify
from sftron.compare.grid import PlannedRun
from sftron.config import ConfigError, load_config
from sftron.train.places import REVISIONS
from sftron.train.run import Setup
from sftron.train.trainer import Trainer, open_setup, open_trainer
from tests.conftest import rest_nightly
from tests.local_hub import LocalHub, folder_files, gsm8k, local_hub, point_at
from tests.train.ranks import launch, train
from tests.train.runs import bits, metrics, on_each_step, result, run, settings, stop_in, write_config

GSM8K = "datasets/openai/gsm8k"
TEMPLATE = "{% for message in messages %}{{ '<|VERSION ' + message.role + '|>\\n' + message.content + eos_token }}"
TEMPLATE += "{% endfor %}{% if add_generation_prompt %}{{ '<|VERSION assistant|>\\n' }}{% endif %}"


@pytest.fixture
def hub(tmp_path: Path, model_folder: Path) -> Iterator[LocalHub]:
    """A Hub with a model, a tokenizer and data, each with an earlier commit, v1."""
    with local_hub(tmp_path / "cache") as hub:
        push_all(hub, model_folder, "1", "v1")
        push_all(hub, model_folder, "2")
        yield hub


def push_all(hub: LocalHub, model_folder: Path, answer: str, *refs: str) -> None:
    """Commits a model, a tokenizer and data of which each differs by `answer`."""
    files = folder_files(model_folder)
    weights = safetensors.torch.load(files["model.safetensors"])
    weights["model.norm.weight"] *= int(answer)
    files["model.safetensors"] = safetensors.torch.save(weights, {"format": "pt"})
    card = f"---\nlicense: mit\n---\nVersion {answer}".encode()
    hub.repository("models/owner/model").push(files | {"README.md": card}, *refs)
    template = TEMPLATE.replace("VERSION", answer).encode()
    hub.repository("models/owner/tokenizer").push(files | {"chat_template.jinja": template}, *refs)
    hub.repository(GSM8K).push(gsm8k(answer), *refs)


def commits(hub: LocalHub, revision: str) -> dict[str, str]:
    return {name: repository.refs[revision] for name, repository in hub.repositories.items()}


def config_of(tmp_path: Path, *, revision: str | None = None, streaming: bool = False, **overrides: Any) -> Path:
    tree = settings(tmp_path, Path("owner/model"), checkpoints__interval=2, **overrides)
    data = {"path": "openai/gsm8k", "config": "main"}
    tree["data"]["datasets"] = [{**data, "streaming": streaming}]
    tree["evaluation"] = {"datasets": [{**data, "split": "test"}], "at_start": False}
    tree["tokenizer"] = {"path": "owner/tokenizer"}
    for section in (tree["model"], tree["tokenizer"], tree["data"]["datasets"][0], tree["evaluation"]["datasets"][0]):
        section |= {} if revision is None else {"revision": revision}
    tree["tokens"]["train_steps"] = 4
    return write_config(tmp_path / "sft.yaml", tree)


def recorded(run_dir: Path) -> dict[str, str]:
    """The revisions in config.yaml, by repository."""
    tree = yaml.safe_load((run_dir / "config.yaml").read_text())
    data, evaluation = tree["data"]["datasets"][0], tree["evaluation"]["datasets"][0]
    assert data["revision"] == evaluation["revision"]
    return {
        "models/owner/model": tree["model"]["revision"],
        "models/owner/tokenizer": tree["tokenizer"]["revision"],
        GSM8K: data["revision"],
    }


def trained_text(setup: Setup) -> str:
    """What the run read: its rows, as the tokenizer renders them."""
    data = setup.data
    return "".join(data.chat_tokenizer.decode([token_id]) for token_id in next(iter(data.dataset)).input_ids.tolist())


# A data set that is downloaded has all of it; one that is streamed has another fingerprint.
CASES = [(revision, streaming) for revision in ("v1", None, "main", "commit") for streaming in (False, True)]


@pytest.mark.parametrize("case", rest_nightly(CASES, [("v1", False), (None, True)]), ids=str)
def test_a_run_trains_on_the_commit_that_it_records_and_resumes_with_it_though_the_branch_has_moved(
    tmp_path: Path, hub: LocalHub, model_folder: Path, monkeypatch: pytest.MonkeyPatch, case: tuple[str | None, bool]
) -> None:
    revision, streaming = case
    if revision == "commit":
        # Every repository has a commit of its own; the tag leads to it, and is not written.
        tree = yaml.safe_load(config_of(tmp_path, streaming=streaming).read_text())
        found = commits(hub, "v1")
        tree["model"]["revision"] = found["models/owner/model"]
        tree["tokenizer"]["revision"] = found["models/owner/tokenizer"]
        for rows in (tree["data"]["datasets"][0], tree["evaluation"]["datasets"][0]):
            rows["revision"] = found[GSM8K]
        config = load_config(write_config(tmp_path / "sft.yaml", tree))
    else:
        config = load_config(config_of(tmp_path, revision=revision, streaming=streaming))
    is_old = revision in ("v1", "commit")
    expected, answer = (commits(hub, "v1"), "1") if is_old else (commits(hub, "main"), "2")
    whole = run(config.model_copy(update={"general": config.general.model_copy(update={"run_name": "whole"})}))

    on_each_step(monkeypatch, stop_in(2))
    stopped = run(config)
    assert result(stopped)["status"] == "preempted"
    run_dir = stopped.directory.folder
    assert recorded(run_dir) == expected

    hub.log.clear()
    push_all(hub, model_folder, "3", "v1")
    resumed = run(config)
    assert not [line for line in hub.log if "/revision/main" in line or "/revision/v1" in line]
    assert result(resumed)["status"] == "completed"
    assert recorded(run_dir) == expected
    assert bits(resumed) == bits(whole)
    text = trained_text(resumed.setup)
    assert f"<|{answer} user|>" in text
    assert f"#### {answer}" in text
    files = hub.repository("models/owner/model").commits[expected["models/owner/model"]]
    assert (resumed.setup.model.folder / "model.safetensors").read_bytes() == files["model.safetensors"]

    assert PlannedRun((), config).state() == "completed"
    card = (run_dir / "latest" / "README.md").read_text()
    assert f"| `openai/gsm8k (main) @ {expected[GSM8K]}` |" in card
    assert f"| Revision of the base | `{expected['models/owner/model']}` |" in card

    again = config.model_copy(update={"general": config.general.model_copy(update={"run_name": "again"})})
    assert (recorded(run(again).directory.folder) != expected) == (revision != "commit")


def test_a_resume_with_another_revision_is_refused_and_goes_on_if_a_change_of_data_is_allowed(
    tmp_path: Path, hub: LocalHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_each_step(monkeypatch, stop_in(2))
    run(load_config(config_of(tmp_path, revision="v1")))
    for key in ("data.datasets.0.revision", "tokenizer.revision"):
        with pytest.raises(CheckpointError, match="was made with other data settings"):
            open_trainer(load_config(tmp_path / "sft.yaml", [f"--{key}=main"]))
    changed = ["--data.datasets.0.revision=main", "--checkpoints.allow_data_change=true"]
    trainer = run(load_config(tmp_path / "sft.yaml", changed))
    assert recorded_data(trainer) == commits(hub, "main")[GSM8K]
    assert "#### 2" in trained_text(trainer.setup)


def recorded_data(trainer: Trainer) -> str:
    return yaml.safe_load((trainer.directory.folder / "config.yaml").read_text())["data"]["datasets"][0]["revision"]


@pytest.mark.nightly
def test_a_checkpoint_of_another_run_brings_its_commits_and_its_weights_alone_do_not(
    tmp_path: Path, hub: LocalHub, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_each_step(monkeypatch, stop_in(2))
    folder = run(load_config(config_of(tmp_path))).directory.folder
    before = commits(hub, "main")
    push_all(hub, model_folder, "3")
    options = [f"--checkpoints.resume={folder}/checkpoints/step-2", "--general.run_name=other"]
    assert recorded_data(run(load_config(tmp_path / "sft.yaml", options))) == before[GSM8K]
    options = [options[0], "--general.run_name=weights", "--checkpoints.load=weights"]
    assert recorded_data(run(load_config(tmp_path / "sft.yaml", options))) == commits(hub, "main")[GSM8K]


def test_a_damaged_record_is_refused(tmp_path: Path, hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    on_each_step(monkeypatch, stop_in(2))
    folder = run(load_config(config_of(tmp_path))).directory.folder
    for text in ("{", "[]", '{"datasets/openai/gsm8k@main": "../../other"}', '{"models/owner/model@main": 5}'):
        (folder / REVISIONS).write_text(text)
        with pytest.raises(ValueError, match=rf"{REVISIONS}: is damaged .* name the commits of config.yaml"):
            open_setup(load_config(tmp_path / "sft.yaml"))


def test_the_tokenizer_of_a_model_has_its_revision_unless_it_has_its_own(tmp_path: Path, hub: LocalHub) -> None:
    tree = yaml.safe_load(config_of(tmp_path, revision="v1").read_text())
    expected = {name: commits(hub, name)["models/owner/tokenizer"] for name in ("v1", "main")}
    for own, revision in ((None, "v1"), ("main", "main")):
        tree["model"]["path"], tree["tokenizer"] = "owner/tokenizer", {"revision": own}
        setup = open_setup(load_config(write_config(tmp_path / "sft.yaml", tree)))
        assert setup.model.folder.name == expected["v1"]
        assert setup.config.tokenizer_revision == expected[revision]
        assert f"<|{'1' if revision == 'v1' else '2'} user|>" in trained_text(setup)


@pytest.mark.nightly
@pytest.mark.parametrize("layers", [[], ["--layers", "1"]], ids=str)
def test_a_card_of_verify_is_that_of_the_run_that_follows(tmp_path: Path, hub: LocalHub, layers: list[str]) -> None:
    config = config_of(tmp_path, revision="v1")
    assert verify(["--config", str(config), "--only", "template", "--only", "isolation", "--card", *layers]) == 0
    card = (run(load_config(config)).directory.folder / "latest" / "README.md").read_text()
    assert "Of 2 checks before the run, 2 passed" in card
    assert "differed from the run's" not in card


def train_at(url: str, cache: Path, config: Path) -> int:
    point_at(url, cache)
    return train(config)


@pytest.mark.nightly  # test_nodes.py has that one rank decides
@pytest.mark.parametrize("streaming", [False, True])
def test_two_ranks_train_on_the_commit_of_the_first(tmp_path: Path, hub: LocalHub, streaming: bool) -> None:
    config = config_of(tmp_path, streaming=streaming, tokens__batch_accumulation_per_replica=1)
    ended = launch(2, train_at, hub.url, tmp_path / "cache", config, folder=tmp_path)
    assert [each.exit_code for each in ended] == [0, 0], ended[0].err[-3000:] + ended[1].err[-3000:]
    assert recorded(tmp_path / "runs/run") == commits(hub, "main")
    asked = [line for line in hub.log if line.startswith("GET") and "/revision/main" in line]
    assert len(asked) == len(set(asked)) == 3
    overrides = ["--general.run_name=alone", "--tokens.batch_accumulation_per_replica=2"]
    losses = [step["loss"] for step in metrics(run(load_config(config, overrides)).directory.folder)]
    assert [step["loss"] for step in metrics(tmp_path / "runs/run")] == pytest.approx(losses, rel=1e-4)
    config = config_of(tmp_path, revision="v9", streaming=streaming)
    ended = launch(2, train_at, hub.url, tmp_path / "cache", config, folder=tmp_path)
    assert [each.exit_code for each in ended] == [2, 2]
    assert "Revision Not Found" in ended[0].err


def test_init_takes_a_configuration_and_its_file_trains(
    tmp_path: Path, hub: LocalHub, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert init(["openai/gsm8k", "owner/model"]) == 2
    assert "['main', 'socratic']" in capfd.readouterr().err
    assert init(["openai/gsm8k:socratic", "owner/model"]) == 0
    config = load_config("sft.yaml")
    assert (config.data.datasets[0].path, config.data.datasets[0].config) == ("openai/gsm8k", "socratic")
    assert config.general.run_name == "gsm8k-socratic"
    assert inspect(["--config", "sft.yaml", "--packs", "1"]) == 0
    assert "in socratic?" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("model.revision", value) for value in ("../x", "a/../b", "/etc")),
        *(("data.datasets.0.revision", value) for value in ("..", "refs/../../x", ".")),
        *(("tokenizer.revision", value) for value in ("-x", "a//b", "a\\b", "", "a\nb", "a b", "..")),
        *(("data.datasets.0.config", value) for value in ("..", "a/b", "a\\b", ".", "", "a\x1bb")),
    ],
)
def test_a_name_that_leads_out_of_the_cache_is_refused(tmp_path: Path, key: str, value: str) -> None:
    config_of(tmp_path)
    with pytest.raises(ConfigError, match=key):
        load_config(tmp_path / "sft.yaml", [f"--{key}={json.dumps(value)}"])
