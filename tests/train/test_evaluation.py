"""A loss on rows that are not trained on: the right one, the same however it is computed, and of no effect."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from sftron.data.types import DataError, Role
from sftron.train.evaluation import measure_set
from sftron.train.run import Setup
from sftron.train.trainer import Trainer, open_setup, open_trainer
from tests.train.conftest import FinishedRun
from tests.train.ranks import launch, train
from tests.train.runs import (
    bits,
    chat_line,
    make_config,
    metrics,
    opened,
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


def timeless(folder: Path) -> list[dict[str, Any]]:
    return [{name: value for name, value in each.items() if name != "seconds"} for each in evaluations(folder)]


@pytest.fixture
def options(tmp_path: Path, held_out: Path) -> dict[str, Any]:
    """The set `other` and a prompt."""
    (tmp_path / "prompts.jsonl").write_text(chat_line("What is 3?") + "\n")
    return {
        "tokens__train_steps": 6,
        "evaluation__datasets": [{"path": str(held_out)}],
        "evaluation__prompts": str(tmp_path / "prompts.jsonl"),
        "evaluation__max_new_tokens": 5,
        "checkpoints__export_hf": False,
    }


# --- The loss ---


@pytest.mark.parametrize(("completions_only", "isolated"), [(True, True), (False, False)])
def test_it_is_transformers_loss_of_each_conversation_alone_for_any_packing_and_toggles(
    tmp_path: Path, model_folder: Path, held_out: Path, completions_only: bool, isolated: bool
) -> None:
    toggles = {"data__train_on_completions_only": completions_only, "data__remove_cross_attention": isolated}
    sets = {"evaluation__datasets": [{"path": str(held_out)}]}
    trainer = opened(make_config(tmp_path, model_folder, **sets, **toggles))
    (evaluation_set,) = trainer.setup.data.evaluation_sets
    reference = transformers.AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    by_role: dict[str, list[float]] = {}
    is_right: list[bool] = []
    for conversation in evaluation_set.conversations:
        ids = torch.from_numpy(conversation.input_ids).long()
        with torch.no_grad():
            logits = reference(ids[None]).logits[0, :-1]
        losses = torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none").tolist()
        for loss, role, hit in zip(losses, conversation.role_ids[1:], logits.argmax(1) == ids[1:], strict=True):
            by_role.setdefault(Role(int(role)).name.lower(), []).append(loss)
            if role == Role.ASSISTANT:
                is_right.append(bool(hit))

    for token_budget in (96, 200, 10_000):
        measured = measure_set(trainer.model, evaluation_set, token_budget=token_budget, ranks=trainer.ranks)
        assert measured.conversations == NUM_ROWS
        assert measured.roles.keys() == by_role.keys() > {"user", "template"}
        for role, losses in by_role.items():
            mean = pytest.approx(sum(losses) / len(losses), rel=1e-6)
            assert measured.roles[role] == {"loss": mean, "tokens": len(losses)}
        assert measured.tokens == len(is_right) > 100
        assert measured.loss == pytest.approx(measured.roles["assistant"]["loss"], rel=1e-12)
        assert measured.token_accuracy == pytest.approx(sum(is_right) / len(is_right))
        (of_data,) = measured.datasets.values()
        assert of_data == {"loss": measured.loss, "tokens": measured.tokens}


def test_it_is_the_same_on_1_2_and_4_ranks(
    tmp_path: Path, model_folder: Path, held_out: Path, options: dict[str, Any]
) -> None:
    """Before training and after it, with fewer rows than ranks can share evenly, of two sets and a share."""
    write_rows(tmp_path / "rows.jsonl", 60)
    options |= {
        "tokens__train_steps": 3,
        "evaluation__share": 0.1,
        "evaluation__datasets": [{"path": str(held_out)}, {"path": str(held_out), "name": "one", "max_samples": 1}],
    }
    found: dict[int, list[dict[str, Any]]] = {}
    for num_ranks in (1, 2, 4):
        options |= {
            "general__run_name": f"on-{num_ranks}",
            "tokens__batch_accumulation_per_replica": 4 // num_ranks,
        }
        config = write_config(tmp_path / "config.yaml", settings(tmp_path, model_folder, **options))
        for ended in launch(num_ranks, train, config, folder=tmp_path):
            assert ended.exit_code == 0, ended.err[-3000:]
        found[num_ranks] = evaluations(tmp_path / "runs" / f"on-{num_ranks}")
        assert [each["step"] for each in found[num_ranks]] == [0, 3]
        assert list(found[num_ranks][0]["sets"]) == ["held_out", "other", "one"]
    for num_ranks in (2, 4):
        for several, alone, tolerance in zip(found[num_ranks], found[1], (1e-6, 1e-5), strict=True):
            assert several["answers"] == alone["answers"]
            for name, expected in alone["sets"].items():
                measured = several["sets"][name]
                assert measured["loss"] == pytest.approx(expected["loss"], rel=tolerance)
                assert measured["conversations"] == expected["conversations"]
                for role, mean in expected["roles"].items():
                    loss = pytest.approx(mean["loss"], rel=tolerance)
                    assert measured["roles"][role] == {"loss": loss, "tokens": mean["tokens"]}


# --- Evaluations of a run ---


def test_a_run_that_is_evaluated_trains_to_the_same_bits(
    tmp_path: Path, model_folder: Path, options: dict[str, Any]
) -> None:
    both = {"model__activation_checkpointing": "full", "tokens__train_steps": 4, "checkpoints__export_hf": False}
    plain = run(make_config(tmp_path, model_folder, general__run_name="plain", **both))
    random_state = torch.get_rng_state()
    evaluated = run(make_config(tmp_path, model_folder, **options | both, evaluation__interval=1))

    assert bits(plain) == bits(evaluated)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert plain.loader.state_dict() == evaluated.loader.state_dict()
    folders = [trainer.directory.folder for trainer in (plain, evaluated)]
    losses = [[each["loss"] for each in metrics(folder)] for folder in folders]
    assert losses[0] == losses[1]
    assert not (folders[0] / "evaluations.jsonl").exists()
    assert len({each["sets"]["other"]["loss"] for each in evaluations(folders[1])}) == 5


def test_the_console_announces_the_first_evaluation_and_rounds_each(finished: FinishedRun) -> None:
    begins = "evaluation begins, which may take minutes: held-out, 5 conversations; prompts to answer: 1"
    assert finished.console.count(begins) == 1
    shown = [line for line in finished.console if line.startswith("eval ") and "held-out" in line]
    assert finished.console.index(begins) < finished.console.index(shown[0])
    found = evaluations(finished.folder)
    assert [each["step"] for each in found] == [0, 2, 4, 6]
    for each, line in zip(found, shown, strict=True):
        measured = each["sets"]["held-out"]
        rounded = f"loss {measured['loss']:.4f} | accuracy {measured['token_accuracy']:.1%} "
        assert line.startswith(f"eval {each['step']:>4} | held-out {rounded}")
    (answer,) = found[-1]["answers"]
    assert (answer["prompt"], found[-1]["stop_rate"]) == ("What is 3?", float(answer["stopped"]))


def stop_at(trainer: Trainer, monkeypatch: pytest.MonkeyPatch, *, step: int, num_calls: int) -> None:
    """Stops the run during the evaluation after `step`."""
    calls = 0

    def should_stop() -> bool:
        nonlocal calls
        if trainer.progress.step == step:
            calls += 1
        trainer.stop_request.received = calls > num_calls
        return trainer.stop_request.received

    monkeypatch.setattr(trainer._evaluator, "_should_stop", should_stop)


@pytest.mark.parametrize(("step", "num_calls"), [(4, 0), (6, 7)])
def test_a_stop_during_an_evaluation_saves_that_step_and_the_evaluation_is_made_on_resuming(
    tmp_path: Path,
    model_folder: Path,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    step: int,
    num_calls: int,
) -> None:
    """Between rows of the set, and between tokens of an answer; on the way, and at the end."""
    options |= {"evaluation__interval": 2, "evaluation__tokens_per_batch": 200}
    straight = run(make_config(tmp_path, model_folder, general__run_name="straight", **options))
    stopped = opened(make_config(tmp_path, model_folder, **options))
    stop_at(stopped, monkeypatch, step=step, num_calls=num_calls)
    assert stopped.train() == 0
    assert result(stopped)["status"] == "preempted"
    assert stopped.directory.checkpoints.joinpath(f"step-{step}").is_dir()
    folder = stopped.directory.folder
    assert [each["step"] for each in evaluations(folder)] == list(range(0, step, 2))
    resumed = run(make_config(tmp_path, model_folder, **options))
    assert bits(resumed) == bits(straight)
    assert timeless(folder) == timeless(straight.directory.folder)
    assert [each["step"] for each in timeless(folder)] == [0, 2, 4, 6]


def test_evaluations_of_steps_that_are_made_again_are_logged_once(
    tmp_path: Path, model_folder: Path, options: dict[str, Any]
) -> None:
    options |= {"evaluation__interval": 2, "checkpoints__interval": 3, "optimizer__schedule": "constant"}
    folder = run(make_config(tmp_path, model_folder, **options | {"tokens__train_steps": 5})).directory.folder
    assert [each["step"] for each in evaluations(folder)] == [0, 2, 4, 5]
    first = timeless(folder)
    run(make_config(tmp_path, model_folder, **options, checkpoints__resume=str(folder / "checkpoints" / "step-3")))
    assert [each["step"] for each in evaluations(folder)] == [0, 2, 4, 6]
    assert timeless(folder)[:3] == first[:3]


def test_sets_are_checked_before_any_weight_is_read(tmp_path: Path, model_folder: Path, held_out: Path) -> None:
    def start(**overrides: Any) -> Setup:
        return open_setup(make_config(tmp_path, model_folder, **overrides))

    with held_out.open("a") as file:
        file.write("{broken\n")
    sets = [{"path": str(held_out)}]
    with pytest.raises(DataError, match=r"evaluation set other: .*other\.jsonl:14: is not JSON"):
        start(evaluation__datasets=sets)
    with pytest.raises(
        DataError,
        match=r"evaluation set other: (.|\n)*1 of 14 rows were dropped \(1 broken_json\).*mend the data, or allow",
    ):
        start(evaluation__datasets=sets, data__on_bad_row="skip")
    options = {"data__on_bad_row": "skip", "data__max_dropped_share": 0.1}
    (found,) = start(evaluation__datasets=sets, **options).data.evaluation_sets
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
    """Whatever file and format they stand in; the held-out share of rows that repeat is found too."""
    rows = write_rows(tmp_path / "rows.jsonl", 20).read_text().splitlines()
    user, assistant = (message["content"] for message in json.loads(rows[4])["messages"])
    pairs = [(f" {user} ", f" {assistant} "), *((f"{n}", "x") for n in range(3))]
    others = [
        json.dumps({"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]})
        for question, answer in pairs
    ]
    (tmp_path / "other.jsonl").write_text("\n".join(others) + "\n")
    open_trainer(make_config(tmp_path, model_folder, evaluation__datasets=[{"path": str(tmp_path / "other.jsonl")}]))
    out = capfd.readouterr().out
    assert "evaluation other: 4 conversations" in out
    assert "WARNING    1 row of other is also in the training data; the first: " in out
    assert f"{tmp_path}/other.jsonl:1 is {tmp_path}/rows.jsonl:5" in out
    (tmp_path / "rows.jsonl").write_text("\n".join(rows + rows) + "\n")
    open_trainer(make_config(tmp_path, model_folder, evaluation__share=0.1, general__run_name="share"))
    assert "WARNING    4 rows of held_out are also in the training data" in capfd.readouterr().out
