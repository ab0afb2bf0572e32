"""Runs with documents of plain text beside chats: their loss, stops, ranks, adapters, evaluations and audits."""

import json
import re
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from sftron.checks.inspect_run import inspect
from sftron.checks.replay import OpenedRun, audit_run
from sftron.data.loader import collate
from sftron.data.types import Role
from sftron.train.trainer import Trainer, open_trainer
from tests.train.ranks import launch, train
from tests.train.runs import (
    bits,
    make_config,
    make_model_folder,
    metrics,
    on_each_step,
    run,
    settings,
    stop_in,
    write_config,
    write_rows,
)
from tests.train.test_ranks import flat

DOCUMENT = "Tea is made of leaves.\nThey grow on hills, and rain falls there. "


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("model"))


def options_of(tmp_path: Path, **overrides: Any) -> dict[str, Any]:
    write_rows(tmp_path / "rows.jsonl")
    folder = tmp_path / "docs"
    folder.mkdir(exist_ok=True)
    for number in range(8):
        (folder / f"{number}.txt").write_text(f"Page {number}. {DOCUMENT}" * (1 + number), encoding="utf-8")
    (tmp_path / "kept.txt").write_text("Coffee is not tea.\nCocoa is neither.\n", encoding="utf-8")
    return {
        "data__datasets": [
            {"path": str(tmp_path / "rows.jsonl"), "weight": 3, "name": "chats"},
            {"path": str(folder), "format": "text", "weight": 1, "name": "docs"},
        ],
        "evaluation__datasets": [{"path": str(tmp_path / "kept.txt"), "format": "text", "documents": "line"}],
        "evaluation__interval": 5,
        "tokens__train_steps": 10,
        "checkpoints__interval": 5,
        **overrides,
    }


def texts_of(folder: Path) -> dict[str, Any]:
    read = [json.loads(line) for line in (folder / "evaluations.jsonl").read_text().splitlines()]
    assert all(found.pop("kept") is None for each in read for found in each["sets"].values())
    return {each["step"]: each["sets"] for each in read}


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_a_run_with_text_that_was_stopped_is_the_run_that_was_not(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], lora: bool
) -> None:
    extra = {"lora__rank": 4, "optimizer__weight_decay": 0.0} if lora else {}
    make = lambda name: make_config(tmp_path, model_folder, **options_of(tmp_path, general__run_name=name, **extra))  # noqa: E731
    whole = run(make("whole"))
    printed = capsys.readouterr().out
    on_each_step(monkeypatch, stop_in(3, 7))
    for _ in range(3):
        stopped = open_trainer(make("stopped"))
        stopped.train()
    assert bits(stopped) == bits(whole)  # pyright: ignore[reportArgumentType]
    folders = [trainer.directory.folder for trainer in (whole, stopped)]
    steps = [metrics(folder) for folder in folders]
    assert [step["rows"] for step in steps[0]] == [step["rows"] for step in steps[1]]
    assert texts_of(folders[0]) == texts_of(folders[1])

    with_text = [step for step in steps[0] if "text" in step["roles"]]
    assert len(with_text) > 2
    for step in steps[0]:
        trained = [step["roles"][role]["tokens"] for role in ("assistant", "text") if role in step["roles"]]
        assert sum(trained) == step["trained_tokens"]
    kept = texts_of(folders[0])[10]["kept"]
    assert kept["roles"].keys() == {"text"}
    assert kept["loss"] == kept["roles"]["text"]["loss"]
    assert kept["conversations"] == 2
    for folder in folders:
        audit = audit_run(OpenedRun(folder), with_text[0]["step"])
        assert audit.passed
        assert re.search(r"docs/\d.txt", audit.as_text())
        assert "text: Page " in audit.as_text()
    assert re.search(
        r"docs, read as text, each file a document, 25.0 % of the tokens\n +8 documents, \d of them cut", printed
    )
    assert "the tokenizer adds no BOS; no EOS ends a document (tokenizer.document_end sets another)" in printed
    report = json.loads((folders[0] / "mix_report.json").read_text())["datasets"][1]
    assert report["documents"]["num_documents"] == 8
    assert report["trained"]["trained_tokens"] == report["trained"]["tokens"] - report["trained"]["conversations"]


def test_ranks_and_ranks_that_share_packs_make_the_steps_of_one(tmp_path: Path, model_folder: Path) -> None:
    found = {}
    for name, num_ranks, context in (("alone", 1, 1), ("two", 2, 1), ("shared", 2, 2)):
        overrides: dict[str, Any] = {
            "general__run_name": name,
            "tokens__batch_accumulation_per_replica": 2 * context // num_ranks,
            "parallelism__context": context,
            "parallelism__timeout_seconds": 60,
            "tokens__train_steps": 4,
            "evaluation__interval": 2,
        }
        tree = settings(tmp_path, model_folder, **options_of(tmp_path, **overrides))
        config = write_config(tmp_path / "config.yaml", tree)
        for rank, ended in enumerate(launch(num_ranks, train, config, folder=tmp_path)):
            assert ended.exit_code == 0, f"rank {rank}: {ended.err[-3000:]}"
        found[name] = metrics(tmp_path / "runs" / name), texts_of(tmp_path / "runs" / name)
    alone = found.pop("alone")
    assert any("text" in step["roles"] for step in alone[0])
    for name, (steps, evaluations) in found.items():
        for ours, theirs in zip(steps, alone[0], strict=True):
            assert ours["rows"] == theirs["rows"], name
            assert flat(ours["roles"]) == pytest.approx(flat(theirs["roles"]), rel=1e-5), name
        assert flat(evaluations[4]) == pytest.approx(flat(alone[1][4]), rel=1e-5), name


def test_the_neighbors_of_a_document_change_no_bit_of_its_loss(tmp_path: Path, model_folder: Path) -> None:
    trainer = open_trainer(make_config(tmp_path, model_folder, **options_of(tmp_path)))
    assert isinstance(trainer, Trainer)
    num_compared, model = 0, trainer.model
    for pack in islice(trainer.setup.data.dataset, 80):
        bounds = pack.conversation_bounds.tolist()
        for start, end in pairwise(bounds):
            if pack.role_ids[start] != Role.TEXT or len(bounds) < 3:
                continue
            ids = pack.input_ids.copy()
            ids[:start], ids[end:] = 7, 9
            with torch.no_grad():
                outputs = []
                for each in (pack, replace(pack, input_ids=ids)):
                    batch = collate(each, keep_tail=True)
                    outputs.append(model(batch.input_ids, batch.position_ids, batch.cu_seqlens, batch.max_seqlen))
            assert torch.equal(outputs[0][start:end], outputs[1][start:end])
            num_compared += 1
    assert num_compared > 3


def test_a_run_of_text_alone_is_made_and_said(
    tmp_path: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = options_of(tmp_path)
    options["data__datasets"] = [{key: value for key, value in options["data__datasets"][1].items() if key != "weight"}]
    trainer = run(make_config(tmp_path, model_folder, **options))
    printed = capsys.readouterr().out
    assert "all sampled rows are plain text: no chat is trained, and no answer's stop token" in printed
    assert {role for step in metrics(trainer.directory.folder) for role in step["roles"]} == {"text"}
    exported = json.loads((trainer.directory.folder / "latest" / "generation_config.json").read_text())
    original = json.loads((model_folder / "generation_config.json").read_text())
    assert exported.get("eos_token_id") == original.get("eos_token_id")


def test_inspect_shows_documents_and_counts_those_that_are_cut(tmp_path: Path, model_folder: Path) -> None:
    config = make_config(tmp_path, model_folder, **options_of(tmp_path))
    inspection = inspect(config, num_shown=12)
    assert inspection.problems == []
    numbers = inspection.audit.as_dict()["rows"]["documents"]["docs"]
    assert numbers["num_documents"] == 8
    assert numbers["num_pieces"] > numbers["num_cut"] > 0
    cut = f"{numbers['num_cut']} of 8, into {numbers['num_pieces']} pieces"
    text = inspection.as_text(color=False, max_tokens=None)
    assert re.search(rf"documents of docs cut to fit +{cut}\n", text)
    assert re.search(r" text │ .*⟦", text)
    roles = inspection.audit.row_roles
    assert roles.trained[Role.TEXT] == roles.tokens[Role.TEXT] - numbers["num_pieces"] - (8 - numbers["num_cut"])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            {"path": "rows.jsonl", "documents": "line"},
            "documents: line is for .txt files of format text; remove the key",
        ),
        ({"path": "docs", "format": "text", "streaming": True}, "docs: .txt files are not streamed; remove streaming"),
    ],
)
def test_keys_that_do_not_fit_the_files_are_refused(
    tmp_path: Path, model_folder: Path, rows: dict[str, Any], message: str
) -> None:
    options = options_of(tmp_path, data__datasets=[rows | {"path": str(tmp_path / rows["path"])}])
    with pytest.raises(ValueError, match=re.escape(message)):
        open_trainer(make_config(tmp_path, model_folder, **options))
