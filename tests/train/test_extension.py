"""A user's own code in a run: objectives, callbacks, optimizers and rows, in one process and over ranks."""

import json
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from examples.extend.kl import KLToBase
from examples.extend.label_smoothing import SmoothedLoss
from examples.extend.unlikelihood import Unlikelihood
from torch import Tensor, nn

from sftron import Callback, Config, Extension, LlamaForSFT
from sftron.config import load_config
from sftron.train.extension import Answer
from sftron.train.trainer import CompletedRun, Trainer, open_trainer
from tests.train.ranks import launch, train
from tests.train.runs import make_config, make_model_folder, settings, write_config, write_rows


def opened(config: Any, **parts: Any) -> Trainer:
    trainer = open_trainer(config, **parts)
    assert isinstance(trainer, Trainer)
    return trainer


def weights_of(trainer: Trainer) -> dict[str, Tensor]:
    return {name: each.detach().clone() for name, each in trainer.model.named_parameters()}


def metrics_of(trainer: Trainer) -> list[dict[str, Any]]:
    return [json.loads(line) for line in trainer.directory.metrics.read_text().splitlines()]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("model") / "model")


OBJECTIVES = {
    "kl": (lambda: KLToBase(0.5), {"lora__rank": 4}),
    "smoothing": (lambda: SmoothedLoss(0.2), {}),
    "unlikelihood": (lambda: Unlikelihood([5, 7, 11], 2.0), {}),
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_run_with_an_objective_resumes_to_the_same_bits(tmp_path: Path, model_folder: Path, name: str) -> None:
    make, options = OBJECTIVES[name]
    whole = make_config(tmp_path, model_folder, general__run_name="whole", **options)
    trainer = opened(whole, objective=make())
    assert trainer.train() == 0
    (measured,) = {key for line in metrics_of(trainer) for key in line["measures"]}
    assert measured == make().names[0]
    assert all(line["measures"][measured] >= 0 for line in metrics_of(trainer))

    stopped = make_config(tmp_path, model_folder, general__run_name="stopped", **options)
    stop = StopsAfter(3)
    first = opened(stopped, objective=make(), callbacks=[stop])
    stop.trainer = first
    assert first.train() == 0
    second = opened(stopped, objective=make(), callbacks=[StopsAfter(99)])
    assert second.progress.step == 3
    assert second.train() == 0
    assert weights_of(second).keys() == weights_of(trainer).keys()
    assert all(tensor.equal(weights_of(trainer)[name]) for name, tensor in weights_of(second).items())
    plain = opened(make_config(tmp_path, model_folder, general__run_name="plain", **options))
    plain.train()
    assert any(not tensor.equal(weights_of(trainer)[name]) for name, tensor in weights_of(plain).items())


class StopsAfter(Callback):
    """Asks the run to end after a step."""

    trainer: Trainer | None = None

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, metrics: Mapping[str, Any]) -> None:
        if metrics["step"] == self.step and self.trainer is not None:
            self.trainer.stop_request.received = True


class Recorder(Callback):
    def __init__(self, fails_at: str = "", folder: Path | None = None) -> None:
        self.events, self.fails_at, self.folder = list[str](), fails_at, folder

    def _record(self, event: str) -> None:
        self.events.append(event)
        if event == self.fails_at:
            raise KeyError("no such thing")

    def on_start(self, step: int, folder: Path) -> None:
        self._record(f"start {step} {folder.name}")

    def on_step(self, metrics: Mapping[str, Any]) -> None:
        self._record(f"step {metrics['step']}")

    def on_evaluation(self, evaluation: Mapping[str, Any]) -> None:
        self._record(f"evaluation {evaluation['step']}")

    def on_save(self, step: int, folder: Path) -> None:
        assert (folder / "state.json").exists()
        self._record(f"save {step}")

    def on_end(self, status: str) -> None:
        self._record(f"end {status}")


SHORT = {"tokens__train_steps": 4, "checkpoints__interval": 2, "checkpoints__async": False}
EVALUATED = {"evaluation__share": 0.2, "evaluation__interval": 4}


def test_callbacks_get_the_events_of_a_run_in_order(tmp_path: Path, model_folder: Path) -> None:
    recorder = Recorder()
    trainer = opened(make_config(tmp_path, model_folder, **SHORT, **EVALUATED), callbacks=[recorder])
    assert trainer.train() == 0
    assert recorder.events == [
        *("start 0 run", "evaluation 0", "step 1", "step 2", "save 2", "step 3", "step 4", "evaluation 4", "save 4"),
        "end completed",
    ]


@pytest.mark.parametrize("event", ["start 0 run", "evaluation 0", "step 3", "save 2", "end completed"])
def test_a_callback_that_raises_ends_the_run_with_its_last_step_saved(
    tmp_path: Path, model_folder: Path, event: str
) -> None:
    config = make_config(tmp_path, model_folder, **SHORT, **EVALUATED)
    trainer = opened(config, callbacks=[Recorder(fails_at=event)])
    with pytest.raises(RuntimeError, match=r"test_extension\.Recorder\.on_\w+ raised KeyError: 'no such thing'"):
        trainer.train()
    result = json.loads((config.run_dir / "result.json").read_text())
    assert result["status"] == "failed"
    again = open_trainer(config)
    made = {"start 0 run": 1, "evaluation 0": 1, "step 3": 3, "save 2": 3, "end completed": 4}[event]
    assert again.progress.step == made
    if isinstance(again, CompletedRun):
        assert event == "end completed"
        return
    assert again.train() == 0
    whole = opened(make_config(tmp_path, model_folder, **SHORT, **EVALUATED, general__run_name="whole"))
    whole.train()
    assert all(tensor.equal(weights_of(whole)[name]) for name, tensor in weights_of(again).items())


def test_a_callback_that_only_watches_changes_no_bit(tmp_path: Path, model_folder: Path) -> None:
    runs = []
    for callbacks in ([], [Recorder()]):
        name = f"with_{len(callbacks)}"
        runs.append(opened(make_config(tmp_path, model_folder, **SHORT, general__run_name=name), callbacks=callbacks))
        runs[-1].train()
    plain, watched = map(weights_of, runs)
    assert all(tensor.equal(plain[name]) for name, tensor in watched.items())


class Shrinks(Callback):
    def on_before_step(self, step: int, model: LlamaForSFT) -> None:
        with torch.no_grad():
            model.model.embed_tokens.weight.mul_(0.5)


def test_a_callback_that_gets_the_model_is_named_in_the_settings_and_the_result(
    tmp_path: Path, model_folder: Path
) -> None:
    trainer = opened(make_config(tmp_path, model_folder, **SHORT), callbacks=[Shrinks()])
    trainer.train()
    assert trainer.setup.extension.changes_model == ["test_extension.Shrinks"] or (
        trainer.setup.extension.changes_model == [f"{__name__}.Shrinks"]
    )
    result = json.loads((trainer.directory.folder / "result.json").read_text())
    assert "Shrinks" in result["extended"]
    assert "Shrinks" in (trainer.directory.folder / "config.yaml").read_text()
    card = next(trainer.directory.folder.glob("hf/step-*/README.md")).read_text()
    assert "Shrinks" in card


# --- From the configuration ---

MODULE = """
from sftron import Callback, Extension, TokenLoss

class Twice(TokenLoss):
    names = ("twice",)

    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def loss_sum(self, model, batch, measures):
        loss = self.token_loss(model, batch, measures)
        measures.add_measure("twice", loss * self.factor)
        return loss * self.factor

def setup(options) -> Extension:
    return Extension(objective=Twice(options["factor"]))

def nothing(options) -> Extension:
    return None

def fails(options) -> Extension:
    return options["absent"]

def unmarked(options):
    raise AssertionError("a configuration has called it")
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of the user's in the working directory, of a new name."""
    import sys

    name = f"own_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    yield name
    sys.modules.pop(name, None)


def test_extend_in_the_configuration_is_part_of_the_run_and_of_its_resumes(
    tmp_path: Path, model_folder: Path, module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    import sys

    given = {"extend__setup": f"{module}:setup", "extend__options": {"factor": 3.0}}
    config = make_config(tmp_path, model_folder, **SHORT, **given)
    trainer = opened(config)
    trainer.train()
    lines = metrics_of(trainer)
    assert all(line["loss"] == pytest.approx(line["measures"]["twice"]) for line in lines)
    written = (config.run_dir / "config.yaml").read_text()
    assert f"setup: {module}:setup" in written

    (tmp_path / f"{module}.py").write_text(MODULE + "\n# another line\n")
    sys.modules.pop(module)
    longer = make_config(tmp_path, model_folder, **SHORT | {"tokens__train_steps": 6}, **given)
    capsys.readouterr()
    opened(longer).train()
    assert "extend.source" in capsys.readouterr().out
    # The run's own config.yaml states the source, and another one is refused.
    sys.modules.pop(module)
    (tmp_path / f"{module}.py").write_text(MODULE)
    with pytest.raises(ValueError, match=r"extend\.source: [0-9a-f]{12}, but the source of own_\w+ now has"):
        open_trainer(load_config(config.run_dir / "config.yaml"))


@pytest.mark.parametrize(
    ("setup", "problem"),
    [
        ("absent_module:setup", "there is no module absent_module"),
        ("{module}:absent", "has no function absent"),
        ("{module}:unmarked", "does not state that it returns an Extension"),
        ("{module}:Twice", "has no function Twice"),
        ("subprocess:call", "subprocess is a module of Python"),
        ("{module}:nothing", "returned NoneType; return a sftron.Extension"),
        ("{module}:fails", r"failed: KeyError: 'absent' \(.*\.py:\d+\)"),
    ],
)
def test_a_setup_that_cannot_be_used_is_refused_before_the_weights_are_read(
    tmp_path: Path, model_folder: Path, module: str, setup: str, problem: str
) -> None:
    config = make_config(tmp_path, model_folder, extend__setup=setup.format(module=module))
    with pytest.raises(ValueError, match=problem):
        open_trainer(config)


def test_code_in_a_models_folder_does_not_run(tmp_path: Path, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_model_folder(tmp_path / "model")
    (folder / "canary.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\ndef setup(options) -> 'Extension': ...")
    config = make_config(tmp_path, folder, extend__setup="canary:setup")
    monkeypatch.chdir(folder)
    with pytest.raises(ValueError, match=r"canary or the working directory lies in .*, which holds downloaded files"):
        open_trainer(config)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        ({"objective": object()}, "object has no denominator; inherit from TokenLoss"),
        ({"callbacks": [len]}, "is not a Callback"),
        ({"optimizer": 3}, "optimizer: int is not a function"),
        ({"data": iter([1])}, "has no length or no index, so a resume could not find its place"),
    ],
)
def test_a_part_of_another_type_is_refused(parts: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Extension(**parts)


# --- Rows from Python ---


def rows(number: int = 30) -> list[dict[str, Any]]:
    return [
        {"messages": [{"role": "user", "content": f"What is {n}?"}, {"role": "assistant", "content": f"It is {n}."}]}
        for n in range(number)
    ]


@pytest.mark.parametrize("kind", ["list", "dataset"])
def test_rows_from_python_are_trained_and_resumed_as_those_of_a_file(
    tmp_path: Path, model_folder: Path, kind: str
) -> None:
    from datasets import Dataset

    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()))
    options = {"tokens__train_steps": None, "tokens__train_epochs": 1}
    of_file = opened(make_config(tmp_path, model_folder, **options))
    of_file.train()
    data: Any = rows() if kind == "list" else Dataset.from_list(rows())
    config = make_config(tmp_path, model_folder, **options, general__run_name=kind)
    stop = StopsAfter(2)
    first = opened(config, data=data, callbacks=[stop])
    stop.trainer = first
    first.train()
    assert first.progress.step == 2
    second = opened(config, data=data, callbacks=[StopsAfter(99)])
    second.train()
    assert all(tensor.equal(weights_of(of_file)[name]) for name, tensor in weights_of(second).items())
    longer = make_config(tmp_path, model_folder, **options | {"tokens__train_epochs": 2}, general__run_name=kind)
    with pytest.raises(ValueError, match="other data settings"):
        open_trainer(longer, data=data[:20] if kind == "list" else data.select(range(20)))


# --- Optimizers ---


def sgd(named: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in named], lr=1.0, momentum=0.9)


def half(named: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in named[::2]], lr=1.0)


@pytest.mark.parametrize("kind", ["muon", "sgd", "rmsprop"])
def test_another_optimizer_trains_and_resumes_to_the_same_bits(tmp_path: Path, model_folder: Path, kind: str) -> None:
    makers: dict[str, Any] = {
        "sgd": sgd,
        "rmsprop": lambda named: torch.optim.RMSprop([each for _, each in named], lr=1e-3, centered=True),
    }
    parts = {"optimizer": makers[kind]} if kind in makers else {}
    options = SHORT | ({"optimizer__name": "muon"} if kind == "muon" else {})
    whole = opened(make_config(tmp_path, model_folder, **options, general__run_name="whole"), **parts)
    whole.train()
    config = make_config(tmp_path, model_folder, **options)
    stop = StopsAfter(2)
    first = opened(config, callbacks=[stop], **parts)
    stop.trainer = first
    first.train()
    second = opened(config, **parts)
    assert second.progress.step == 2
    second.train()
    found, wanted = weights_of(second), weights_of(whole)
    assert all(tensor.equal(wanted[name]) for name, tensor in found.items())
    moved = {name for name, tensor in whole.model.named_parameters() if tensor in whole.optimizer.state}
    assert moved == set(wanted)


def test_muon_updates_the_matrices_of_blocks_and_adamw_all_else(tmp_path: Path, model_folder: Path) -> None:
    trainer = opened(make_config(tmp_path, model_folder, **SHORT, optimizer__name="muon"))
    trainer.train()
    for name, parameter in trainer.model.named_parameters():
        fields = trainer.optimizer.state[parameter].keys()
        is_muon = parameter.ndim == 2 and ".layers." in name
        assert fields == ({"momentum_buffer"} if is_muon else {"exp_avg", "exp_avg_sq", "step"}), name


def test_a_state_of_another_optimizer_is_refused(tmp_path: Path, model_folder: Path) -> None:
    config = make_config(tmp_path, model_folder, **SHORT)
    opened(config).train()
    longer = make_config(tmp_path, model_folder, **SHORT | {"tokens__train_steps": 6})
    with pytest.raises(ValueError, match=r"tensors differ.*Set optimizer.name to the optimizer of the checkpoint"):
        open_trainer(longer, optimizer=sgd)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (half, r"trained parameters are in no group, such as \S+; give the optimizer all of them"),
        (lambda named: named, "the function returned list; return a torch.optim.Optimizer"),
    ],
)
def test_an_optimizer_that_cannot_be_used_is_refused(
    tmp_path: Path, model_folder: Path, make: Any, problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        open_trainer(make_config(tmp_path, model_folder, **SHORT), optimizer=make)


# --- Over ranks ---


HOPS: dict[str, dict[str, Any]] = {
    "muon": {"optimizer__name": "muon", "optimizer__learning_rate": 1e-3},
    "kl": {"extend__setup": "examples.extend.kl:setup", "extend__options": {"weight": 0.5}},
    "smoothing": {"extend__setup": "examples.extend.label_smoothing:setup"},
    "unlikelihood": {
        "extend__setup": "examples.extend.unlikelihood:setup",
        "extend__options": {"token_ids": [5, 7, 11], "weight": 2.0},
    },
}


@pytest.mark.parametrize("kind", HOPS)
def test_a_run_that_hops_between_ranks_is_the_run_that_did_not(tmp_path: Path, model_folder: Path, kind: str) -> None:
    write_rows(tmp_path / "rows.jsonl", 120)
    options = HOPS[kind] | ({} if kind == "muon" else {"lora__rank": 4})

    def run(name: str, num_ranks: int, last_step: int) -> Path:
        tree = settings(tmp_path, model_folder, **options, general__run_name=name, tokens__train_steps=last_step)
        tree["tokens"]["batch_accumulation_per_replica"] = 4 // num_ranks
        tree["optimizer"]["schedule"] = "constant"  # the length of the run decides the others
        config = write_config(tmp_path / f"{name}-{last_step}.yaml", tree)
        for ended in launch(num_ranks, train, config, folder=tmp_path):
            assert ended.exit_code == 0, ended.err
        return tmp_path / "runs" / name

    alone = run("alone", 1, 4)
    for num_ranks, last_step in ((2, 2), (1, 3), (2, 4)):
        hopped = run("hopped", num_ranks, last_step)
    files = [each / "metrics.jsonl" for each in (alone, hopped)]
    lines = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    assert [line["step"] for line in lines[1]] == [1, 2, 3, 4]
    for theirs, ours in zip(*lines, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
        assert ours["measures"] == pytest.approx(theirs["measures"], rel=1e-3, abs=1e-6)
    if kind == "kl":
        assert lines[0][-1]["measures"]["kl"] > 0


# --- Numbers of answers ---


def exact(answers: Sequence[Answer], rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    assert [each.prompt for each in answers] == [row["messages"][-1]["content"] for row in rows]
    return {
        "asked": len(answers),
        "right": sum(row["reference"] != each.answer for each, row in zip(answers, rows, strict=True)),
    }


def exact_score(answers: Sequence[Answer], rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    return {"score": 1.0}


def prompts(folder: Path) -> Path:
    file = folder / "prompts.jsonl"
    questions = [{"messages": [{"role": "user", "content": f"What is {n}?"}], "reference": n} for n in range(3)]
    file.write_text("".join(json.dumps(row) + "\n" for row in questions))
    return file


def answered(tmp_path: Path, model_folder: Path, **more: Any) -> Config:
    options = {"evaluation__prompts": str(prompts(tmp_path)), "evaluation__max_new_tokens": 2}
    return make_config(tmp_path, model_folder, **SHORT | options | {"evaluation__interval": 2} | more)


def evaluations_of(trainer: Trainer) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (trainer.directory.folder / "evaluations.jsonl").read_text().splitlines()]


def test_a_function_of_the_users_measures_the_answers_and_chooses_the_best(
    tmp_path: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scores = iter((0.0, 3.0, 1.0))

    def scored(answers: Sequence[Answer], rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        return exact(answers, rows) | {"score": next(scores)}

    config = answered(tmp_path, model_folder, checkpoints__keep_best="eval/measures/score")
    trainer = opened(config, compute_metrics=scored)
    assert trainer.train() == 0
    measured = [line["measures"] for line in evaluations_of(trainer)]
    assert measured == [{"asked": 3.0, "right": 3.0, "score": score} for score in (0.0, 3.0, 1.0)]
    assert " | asked 3.0000 | right 3.0000 | score 1.0000" in capsys.readouterr().out
    assert (config.run_dir / "best").resolve().name == "step-2"


@pytest.mark.parametrize(
    ("compute", "problem"),
    [
        (lambda answers, rows: rows[0]["absent"], "raised KeyError: 'absent'"),
        (lambda answers, rows: {"score": float("nan")}, "gives nan for score; give a finite number"),
        (lambda answers, rows: 3.0, "gives float; return numbers by name"),
        (lambda answers, rows: {"a/b": 3.0}, "gives the name 'a/b'; write a text without /"),
        (lambda answers, rows: {1: 3.0}, "gives the name 1; write a text without /"),
        (lambda answers, rows: {"score": "0.5"}, "gives '0.5' for score; give a finite number"),
        (
            lambda answers, rows: {"other": 3.0},
            "configuration names eval/measures/score, but compute_metrics gives",
        ),
    ],
)
def test_a_function_that_gives_no_numbers_ends_the_run(
    tmp_path: Path, model_folder: Path, compute: Any, problem: str
) -> None:
    config = answered(tmp_path, model_folder, checkpoints__keep_best="eval/measures/score")
    with pytest.raises(RuntimeError, match=problem):
        opened(config, compute_metrics=compute).train()
    assert json.loads((config.run_dir / "result.json").read_text())["status"] == "failed"


def constant(answers: Sequence[Answer], rows: Sequence[Any], value: float = 1.0, kind: str = "") -> dict[str, Any]:
    for row in rows:
        row["messages"].clear()  # rows are copies
    return {"score": torch.tensor(value) if kind == "tensor" else value}


@pytest.mark.parametrize(
    ("now", "changes", "stays"),
    [
        (constant, {}, True),
        (partial(constant, value=0.5), {}, False),
        (exact_score, {}, False),
        (constant, {"evaluation__max_new_tokens": 3}, False),
    ],
)
def test_the_best_stays_only_if_it_was_measured_in_the_same_way(
    tmp_path: Path,
    model_folder: Path,
    now: Any,
    changes: dict[str, Any],
    stays: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    best = {"checkpoints__keep_best": "eval/measures/score"}
    opened(answered(tmp_path, model_folder, **best), compute_metrics=partial(constant, kind="tensor")).train()
    opened(answered(tmp_path, model_folder, **best, general__run_name="b"), compute_metrics=constant).train()
    longer = {"general__run_name": "b", "tokens__train_steps": 6, **best, **changes}
    capsys.readouterr()
    opened(answered(tmp_path, model_folder, **longer), compute_metrics=now)
    assert ("the search for the best starts again" not in capsys.readouterr().out) == stays


def test_the_best_rate_of_stops_is_of_its_prompts(
    tmp_path: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    best = {"checkpoints__keep_best": "eval/stop_rate"}
    opened(answered(tmp_path, model_folder, **best)).train()
    config = answered(tmp_path, model_folder, **best, tokens__train_steps=6)
    prompts(tmp_path).write_text(json.dumps({"messages": [{"role": "user", "content": "Another?"}]}) + "\n")
    capsys.readouterr()
    opened(config)
    assert "its eval/stop_rate was measured under different settings" in capsys.readouterr().out


def test_metrics_of_answers_without_prompts_are_refused(tmp_path: Path, model_folder: Path) -> None:
    with pytest.raises(ValueError, match=r"no answers to compute from; set evaluation\.prompts"):
        open_trainer(make_config(tmp_path, model_folder, **SHORT), compute_metrics=exact)
    with pytest.raises(ValueError, match="only a function compute_metrics can give eval/measures/score"):
        open_trainer(answered(tmp_path, model_folder, checkpoints__keep_best="eval/measures/score"))
    with pytest.raises(ValueError, match="compute_metrics: int is not a function"):
        Extension(compute_metrics=3)  # pyright: ignore[reportArgumentType]


def answer_over_ranks(config: Path, kind: str) -> None:
    """Trains with a function that only the main rank may call, and that fails at its second call if it is to."""
    calls = list[int]()

    def compute(answers: Sequence[Answer], rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        assert os.environ["RANK"] == "0"
        calls.append(len(answers))
        if kind == "fails" and len(calls) == 2:
            raise KeyError("second")
        return {"calls": len(calls)}

    try:
        opened(load_config(config), compute_metrics=compute).train()
    except RuntimeError as error:
        print(error)


@pytest.mark.parametrize("kind", ["measures", "fails"])
def test_only_the_main_rank_computes_numbers_of_answers_and_all_end_alike(
    tmp_path: Path, model_folder: Path, kind: str
) -> None:
    options = {"evaluation__prompts": str(prompts(tmp_path)), "evaluation__max_new_tokens": 2}
    tree = settings(tmp_path, model_folder, **SHORT, **options, evaluation__interval=2)
    write_rows(tmp_path / "rows.jsonl")
    config = write_config(tmp_path / "config.yaml", tree)
    for ended in launch(2, answer_over_ranks, config, kind, folder=tmp_path):
        assert ended.exit_code == 0, ended.err
        assert ("raised KeyError: 'second'" in ended.out) == (kind == "fails")
    result = json.loads((tmp_path / "runs" / "run" / "result.json").read_text())
    assert result["status"] == {"measures": "completed", "fails": "failed"}[kind]
