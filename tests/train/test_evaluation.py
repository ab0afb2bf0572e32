"""A loss on rows that are not trained on: the right one, the same however it is computed, and of no effect."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from sftron.data.types import DataError, Role
from sftron.train.set_loss import SetLoss, measure_set
from sftron.train.trainer import Trainer
from tests.train.ranks import launch, train
from tests.train.runs import (
    bits,
    chat_line,
    make_config,
    metrics,
    result,
    run,
    settings,
    write_config,
    write_rows,
)

NUM_ROWS = 13
"""Of the fixture held_out."""


def evaluations(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "evaluations.jsonl").read_text().splitlines()]


def built(tmp_path: Path, model_folder: Path, held_out: Path, **overrides: Any) -> Trainer:
    options: dict[str, Any] = {"evaluation__datasets": [{"path": str(held_out)}]}
    trainer = Trainer(make_config(tmp_path, model_folder, **(options | overrides)))
    trainer.build()
    return trainer


def measure(trainer: Trainer, token_budget: int) -> SetLoss:
    (evaluation_set,) = trainer.setup.data.evaluation_sets
    measured = measure_set(trainer.model, evaluation_set, token_budget=token_budget, ranks=trainer.ranks)
    assert measured is not None
    return measured


def theirs_by_role(trainer: Trainer, model_folder: Path) -> tuple[dict[int, list[float]], list[float], list[bool]]:
    """Token losses by transformers, one conversation at a time: by role, of the completions, and which were right."""
    theirs = transformers.AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    by_role: dict[int, list[float]] = {}
    completions: list[float] = []
    right: list[bool] = []
    for conversation in trainer.setup.data.evaluation_sets[0].conversations:
        ids = torch.from_numpy(conversation.input_ids).long()
        with torch.no_grad():
            logits = theirs(ids[None]).logits[0, :-1]
        losses = torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none").tolist()
        for place, loss in enumerate(losses):
            by_role.setdefault(int(conversation.role_ids[place + 1]), []).append(loss)
            if conversation.role_ids[place + 1] == Role.ASSISTANT:
                completions.append(loss)
                right.append(bool(logits[place].argmax() == ids[place + 1]))
    return by_role, completions, right


@pytest.mark.parametrize("completions_only", [True, False])
@pytest.mark.parametrize("isolated", [True, False])
def test_it_is_transformers_loss_of_each_conversation_alone_whatever_the_toggles_say(
    tmp_path: Path, model_folder: Path, held_out: Path, completions_only: bool, isolated: bool
) -> None:
    toggles = {"data__train_on_completions_only": completions_only, "data__remove_cross_attention": isolated}
    trainer = built(tmp_path, model_folder, held_out, **toggles)
    by_role, completions, right = theirs_by_role(trainer, model_folder)
    measured = measure(trainer, 200)
    assert measured.conversations == NUM_ROWS
    assert measured.tokens == len(completions) > 100
    assert measured.loss == pytest.approx(sum(completions) / len(completions), rel=1e-6)
    assert measured.token_accuracy == pytest.approx(sum(right) / len(right))
    names = {"assistant": 3, "user": 2, "template": 0, "system": 1}
    assert {names[name] for name in measured.roles} == by_role.keys()
    for name, found in measured.roles.items():
        losses = by_role[names[name]]
        assert found == {"loss": pytest.approx(sum(losses) / len(losses), rel=1e-6), "tokens": len(losses)}
    (of_data,) = measured.datasets.values()
    assert of_data == {"loss": measured.loss, "tokens": measured.tokens}


def test_it_is_the_same_for_any_packing(tmp_path: Path, model_folder: Path, held_out: Path) -> None:
    trainer = built(tmp_path, model_folder, held_out)
    alone = measure(trainer, 96)
    for token_budget in (150, 400, 10_000):
        other = measure(trainer, token_budget)
        assert other.loss == pytest.approx(alone.loss, rel=1e-6)
        assert other.tokens == alone.tokens
        for name, found in alone.roles.items():
            assert other.roles[name] == {"loss": pytest.approx(found["loss"], rel=1e-6), "tokens": found["tokens"]}


def test_it_is_the_same_on_1_2_and_4_ranks(tmp_path: Path, model_folder: Path, held_out: Path) -> None:
    """Before training and after it, with fewer rows than ranks can share evenly, of two sets and a share."""
    write_rows(tmp_path / "rows.jsonl", 60)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(chat_line("What is 3?") + "\n")
    found: dict[int, list[dict[str, Any]]] = {}
    for num_ranks in (1, 2, 4):
        tree = settings(
            tmp_path,
            model_folder,
            general__run_name=f"on-{num_ranks}",
            tokens__train_steps=3,
            tokens__batch_accumulation_per_replica=4 // num_ranks,
            evaluation__share=0.1,
            evaluation__datasets=[{"path": str(held_out)}, {"path": str(held_out), "name": "one", "max_samples": 1}],
            evaluation__prompts=str(prompts),
            evaluation__max_new_tokens=4,
            checkpoints__export_hf=False,
        )
        for ended in launch(num_ranks, train, write_config(tmp_path / "config.yaml", tree), folder=tmp_path):
            assert ended.exit_code == 0, ended.err[-3000:]
        found[num_ranks] = evaluations(tmp_path / "runs" / f"on-{num_ranks}")
        assert [each["step"] for each in found[num_ranks]] == [0, 3]
        assert list(found[num_ranks][0]["sets"]) == ["held_out", "other", "one"]
    for num_ranks in (2, 4):
        for ours, alone, tolerance in zip(found[num_ranks], found[1], (1e-6, 1e-5), strict=True):
            assert ours["answers"] == alone["answers"]
            for name, theirs in alone["sets"].items():
                assert ours["sets"][name]["loss"] == pytest.approx(theirs["loss"], rel=tolerance)
                assert ours["sets"][name]["tokens"] == theirs["tokens"]
                assert ours["sets"][name]["conversations"] == theirs["conversations"]
                for role, of_role in theirs["roles"].items():
                    of_ours = ours["sets"][name]["roles"][role]
                    assert of_ours["tokens"] == of_role["tokens"]
                    assert of_ours["loss"] == pytest.approx(of_role["loss"], rel=tolerance)


def test_a_run_that_is_evaluated_trains_to_the_same_bits(tmp_path: Path, model_folder: Path, held_out: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(chat_line("What is 3?") + "\n")
    options = {"tokens__train_steps": 6, "model__activation_checkpointing": "full", "checkpoints__export_hf": False}
    plain = run(make_config(tmp_path, model_folder, general__run_name="plain", **options))
    random_state = torch.get_rng_state()
    evaluated = run(
        make_config(
            tmp_path,
            model_folder,
            general__run_name="evaluated",
            evaluation__datasets=[{"path": str(held_out)}],
            evaluation__interval=1,
            evaluation__prompts=str(prompts),
            evaluation__max_new_tokens=3,
            **options,
        )
    )
    assert bits(plain) == bits(evaluated)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert plain.loader.state_dict() == evaluated.loader.state_dict()
    told = [[each["loss"] for each in metrics(trainer.directory.folder)] for trainer in (plain, evaluated)]
    assert told[0] == told[1]
    found = evaluations(evaluated.directory.folder)
    assert [each["step"] for each in found] == list(range(7))
    assert len({each["sets"]["other"]["loss"] for each in found}) == 7
    console = (evaluated.directory.folder / "console.log").read_text().splitlines()
    begins = f"evaluation begins, which may take minutes: other, {NUM_ROWS} conversations; prompts to answer: 1"
    assert console.count(begins) == 1
    assert console.index(begins) < next(number for number, line in enumerate(console) if line.startswith("eval "))
    assert "evaluation begins" not in (plain.directory.folder / "console.log").read_text()
    assert not (plain.directory.folder / "evaluations.jsonl").exists()


def timeless(folder: Path) -> list[dict[str, Any]]:
    return [{name: value for name, value in each.items() if name != "seconds"} for each in evaluations(folder)]


def stop_at(trainer: Trainer, monkeypatch: pytest.MonkeyPatch, *, step: int, num_asked: int) -> None:
    """A signal that arrives while the evaluation after `step` goes on."""
    asked = 0

    def should_stop() -> bool:
        nonlocal asked
        if trainer.progress.step == step:
            asked += 1
        trainer.stop_request.received = asked > num_asked
        return trainer.stop_request.received

    monkeypatch.setattr(trainer._evaluator, "_should_stop", should_stop)


@pytest.mark.parametrize("num_asked", [0, 3, 7])
@pytest.mark.parametrize("step", [4, 6])
def test_a_stop_during_an_evaluation_saves_that_step_and_the_evaluation_is_made_on_resuming(
    tmp_path: Path, model_folder: Path, held_out: Path, monkeypatch: pytest.MonkeyPatch, step: int, num_asked: int
) -> None:
    """Between rows of the set, and between tokens of an answer; on the way, and at the end."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(chat_line("What is 3?") + "\n")
    options = {
        "tokens__train_steps": 6,
        "evaluation__datasets": [{"path": str(held_out)}],
        "evaluation__interval": 2,
        "evaluation__tokens_per_batch": 200,
        "evaluation__prompts": str(prompts),
        "evaluation__max_new_tokens": 5,
        "checkpoints__export_hf": False,
    }
    straight = run(make_config(tmp_path, model_folder, general__run_name="straight", **options))
    stopped = Trainer(make_config(tmp_path, model_folder, **options))
    stopped.build()
    stop_at(stopped, monkeypatch, step=step, num_asked=num_asked)
    assert stopped.train() == 0
    assert result(stopped)["status"] == "preempted"
    assert stopped.directory.checkpoints.joinpath(f"step-{step}").is_dir()
    folder = stopped.directory.folder
    assert [each["step"] for each in evaluations(folder)] == list(range(0, step, 2))
    resumed = run(make_config(tmp_path, model_folder, **options))
    assert bits(resumed) == bits(straight)
    assert timeless(folder) == timeless(straight.directory.folder)
    assert [each["step"] for each in timeless(folder)] == [0, 2, 4, 6]


def test_evaluations_of_steps_that_are_made_again_are_told_once(
    tmp_path: Path, model_folder: Path, held_out: Path
) -> None:
    options = {"evaluation__datasets": [{"path": str(held_out)}], "evaluation__interval": 2, "checkpoints__interval": 3}
    run(make_config(tmp_path, model_folder, tokens__train_steps=5, optimizer__schedule="constant", **options))
    folder = tmp_path / "runs" / "run"
    assert [each["step"] for each in evaluations(folder)] == [0, 2, 4, 5]
    first = timeless(folder)
    again = str(folder / "checkpoints" / "step-3")
    options |= {"checkpoints__resume": again, "optimizer__schedule": "constant"}
    run(make_config(tmp_path, model_folder, tokens__train_steps=6, **options))
    assert [each["step"] for each in evaluations(folder)] == [0, 2, 4, 6]
    assert timeless(folder)[:3] == first[:3]


def test_a_completed_run_that_is_started_again_evaluates_nothing(
    tmp_path: Path, model_folder: Path, held_out: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(chat_line("What is 3?") + "\n")
    config = make_config(
        tmp_path,
        model_folder,
        tokens__train_steps=2,
        evaluation__datasets=[{"path": str(held_out)}],
        evaluation__prompts=str(prompts),
        evaluation__max_new_tokens=3,
    )
    run(config)
    before = evaluations(tmp_path / "runs" / "run")
    capfd.readouterr()
    run(config)
    assert evaluations(tmp_path / "runs" / "run") == before
    assert "nothing is left to do" in capfd.readouterr().out


def test_sets_are_checked_before_any_weight_is_read(tmp_path: Path, model_folder: Path, held_out: Path) -> None:
    def start(**overrides: Any) -> Trainer:
        return Trainer(make_config(tmp_path, model_folder, **overrides))

    with held_out.open("a") as file:
        file.write("{broken\n")
    sets = [{"path": str(held_out)}]
    with pytest.raises(DataError, match=r"evaluation set other: .*other\.jsonl:14: is not JSON"):
        start(evaluation__datasets=sets)
    with pytest.raises(DataError, match=r"evaluation set other: (.|\n)*1 of 14 rows were dropped"):
        start(evaluation__datasets=sets, data__on_bad_row="skip")
    options = {"data__on_bad_row": "skip", "data__max_dropped_share": 0.1}
    (found,) = start(evaluation__datasets=sets, **options).setup.data.evaluation_sets
    assert (len(found.conversations), dict(found.dropped)) == (13, {"broken_json": 1})
    with pytest.raises(DataError, match="2 sets are named other; give it another `name`"):
        start(evaluation__datasets=[*sets, {"path": str(held_out)}], **options)
    with pytest.raises(DataError, match="a set is named stop_rate"):
        start(evaluation__datasets=[{"path": str(held_out), "name": "stop_rate"}], **options)
    with pytest.raises(ValueError, match=r"keep_best: eval/own/loss is no metric of this run; give one of eval/other/"):
        start(evaluation__datasets=sets, checkpoints__keep_best="eval/own/loss", **options)


def test_rows_that_are_also_trained_on_are_counted_and_named(
    tmp_path: Path, model_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whatever file and format they stand in; the held-out share of rows that repeat is found out too."""
    rows = write_rows(tmp_path / "rows.jsonl", 20).read_text().splitlines()
    repeated = json.loads(rows[4])["messages"]
    turns = [
        {"from": name, "value": f" {each['content']} "} for name, each in zip(("human", "gpt"), repeated, strict=True)
    ]
    other = [json.dumps({"conversations": turns})] + [
        json.dumps({"conversations": [{"from": "human", "value": f"{n}"}, {"from": "gpt", "value": "x"}]})
        for n in range(3)
    ]
    (tmp_path / "other.jsonl").write_text("\n".join(other) + "\n")
    Trainer(make_config(tmp_path, model_folder, evaluation__datasets=[{"path": str(tmp_path / "other.jsonl")}])).build()
    out = capfd.readouterr().out
    assert "evaluation other: 4 conversations" in out
    assert "WARNING    1 rows of other are also in the training data; the first: " in out
    assert f"{tmp_path}/other.jsonl:1 is {tmp_path}/rows.jsonl:5" in out
    rows += rows  # every row twice
    (tmp_path / "rows.jsonl").write_text("\n".join(rows) + "\n")
    Trainer(make_config(tmp_path, model_folder, evaluation__share=0.1, general__run_name="share")).build()
    assert "WARNING    4 rows of held_out are also in the training data" in capfd.readouterr().out
