"""What a run refuses of a user's code: each would make a wrong number, or a run that cannot be resumed."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml
from examples.extend.kl import KLToBase
from examples.extend.label_smoothing import SmoothedLoss
from torch import Tensor, nn

from sftron import Callback, Extension, TokenLoss, hidden_states
from sftron.data.sources.views import RowList
from sftron.train.places import find_commits
from sftron.train.trainer import Trainer, open_trainer
from tests.models.reference import EXPERTS
from tests.train.runs import make_config, make_model_folder

SHORT = {"tokens__train_steps": 4, "checkpoints__interval": 2, "checkpoints__async": False}
ROW = {"messages": [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "This."}]}


def opened(config: Any, **parts: Any) -> Trainer:
    trainer = open_trainer(config, **parts)
    assert isinstance(trainer, Trainer)
    return trainer


def status_of(config: Any) -> str:
    return json.loads((config.run_dir / "result.json").read_text())["status"]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("model") / "model")


# --- Parts ---


class OneName(TokenLoss):
    names = "kl"


class SameName(TokenLoss):
    names = ("kl", "kl")


class Learned(TokenLoss):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


class Frame:
    """As a DataFrame of pandas: rows by column."""

    columns, to_dict = ("messages",), dict

    def __len__(self) -> int:
        return 1


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        ({"objective": SmoothedLoss}, "SmoothedLoss is a class; make an instance of it"),
        ({"objective": OneName()}, r"OneName\.names is 'kl'; give a list of different texts"),
        ({"objective": SameName()}, r"SameName\.names is \('kl', 'kl'\)"),
        ({"objective": Learned()}, r"Learned\.scale has parameters, which no optimizer of the run trains"),
        ({"callbacks": Callback()}, "found Callback; give a list of callbacks"),
        ({"callbacks": None}, "found NoneType; give a list of callbacks"),
        ({"callbacks": [Callback]}, "Callback is a class; make an instance of it"),
        ({"data": {"train": [ROW]}}, r"found a dict with train; give one of them, such as data\['train'\]"),
        ({"data": "rows.jsonl"}, r"found the text 'rows\.jsonl'; a path belongs in data\.datasets"),
        ({"data": Frame()}, r"found a Frame; give datasets\.Dataset\.from_pandas\(frame\)"),
        ({"data": []}, "there are 0 rows"),
        ({"data": [["a", "b"]]}, "row 0 is of type list; give rows as mappings"),
    ],
)
def test_a_part_that_cannot_be_meant_is_refused(parts: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Extension(**parts)


def test_callbacks_from_an_iterator_are_called_more_than_once(tmp_path: Path, model_folder: Path) -> None:
    steps = list[int]()

    class Counts(Callback):
        def on_step(self, metrics: Mapping[str, Any]) -> None:
            steps.append(metrics["step"])

    opened(make_config(tmp_path, model_folder, **SHORT), callbacks=iter([Counts()])).train()
    assert steps == [1, 2, 3, 4]


# --- The hash of the source ---


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A user's package: `loss` takes a base from `base` and a number from `.numbers.one`, in a function."""
    name = f"own_{tmp_path.name.replace('-', '_')}"
    folder = tmp_path / name
    (folder / "numbers").mkdir(parents=True)
    texts = {
        "__init__": "",
        "base": "from sftron import TokenLoss\nclass Base(TokenLoss):\n    names = ()\n",
        "numbers/__init__": "",
        "numbers/one": "ONE = 1.0\n",
        "loss": (
            "from .base import Base\nfrom sftron import Extension\nclass Own(Base):\n"
            "    def loss_sum(self, model, batch, measures):\n        from .numbers import one\n"
            "        return one.ONE * self.token_loss(model, batch, measures)\n"
            "from .numbers import one as _one\n"
        ),
    }
    for file, text in texts.items():
        (folder / f"{file}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name, folder
    for each in [each for each in sys.modules if each.partition(".")[0] == name]:
        del sys.modules[each]


@pytest.mark.parametrize("file", ["loss", "base", "numbers/one"])
def test_the_hash_covers_bases_and_imported_modules_of_the_users(package: tuple[str, Path], file: str) -> None:
    import importlib
    import linecache

    name, folder = package

    def source() -> str:
        importlib.invalidate_caches()
        linecache.clearcache()
        for each in [each for each in sys.modules if each.partition(".")[0] == name]:
            del sys.modules[each]
        module = importlib.import_module(f"{name}.loss")
        described = Extension(objective=module.Own()).describe(None)
        assert described is not None
        assert described.source is not None
        return described.source

    before = source()
    assert source() == before
    path = folder / f"{file}.py"
    path.write_text(path.read_text() + "# another line\n")
    assert source() != before


def test_the_hash_covers_code_without_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a notebook whose cells are run again."""

    def source(text: str) -> str:
        module = ModuleType("of_a_notebook")
        monkeypatch.setitem(sys.modules, module.__name__, module)
        exec(text, module.__dict__)
        described = Extension(compute_metrics=module.__dict__["own"]).describe(None)
        assert described is not None
        assert described.source is not None
        return described.source

    text = "def own(answers, rows):\n    return {'a': sum(1 for each in rows if each in {'x', 'y'})}\n"
    assert source(text) == source(text)
    assert len({source(text), source(text.replace("'a'", "'b'")), source(text.replace("1 for", "2 for"))}) == 3


def test_the_values_of_an_objective_are_settings_of_the_run(
    tmp_path: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(tmp_path, model_folder, **SHORT)
    opened(config, objective=SmoothedLoss(0.2)).train()
    recorded = yaml.safe_load((config.run_dir / "config.yaml").read_text())["extend"]
    assert 0.2 in recorded["options"].values()
    longer = make_config(tmp_path, model_folder, **SHORT | {"tokens__train_steps": 6})
    capsys.readouterr()
    opened(longer, objective=SmoothedLoss(0.3))
    output = capsys.readouterr().out
    assert "extend.options" in output
    assert "0.2" in output
    assert "0.3" in output


# --- Callbacks ---


class Breaks(Callback):
    """Changes the model and fails, in an event of choice."""

    def __init__(self, event: str) -> None:
        self.ended, self.event = list[str](), event

    def on_before_step(self, step: int, model: nn.Module) -> None:
        if self.event == "on_before_step" and step == 4:
            with torch.no_grad():
                next(model.parameters()).zero_()
            raise KeyError("half way")

    def on_step(self, metrics: Mapping[str, Any]) -> None:
        if self.event == "on_step" and metrics["step"] == 4:
            raise KeyError("half way")

    def on_end(self, status: str) -> None:
        self.ended.append(status)


@pytest.mark.parametrize(("event", "saved"), [("on_before_step", 2), ("on_step", 4)])
def test_a_callback_that_fails_saves_only_a_model_that_it_could_not_change(
    tmp_path: Path, model_folder: Path, event: str, saved: int
) -> None:
    config = make_config(tmp_path, model_folder, **SHORT | {"tokens__train_steps": 6})
    callback = Breaks(event)
    with pytest.raises(RuntimeError, match=rf"Breaks\.{event} raised KeyError"):
        opened(config, callbacks=[callback]).train()
    assert status_of(config) == "failed"
    assert callback.ended == ["failed"]
    assert opened(config).progress.step == saved


def test_the_end_is_told_to_callbacks_of_a_run_that_fails_elsewhere(tmp_path: Path, model_folder: Path) -> None:
    class Falls(TokenLoss):
        def loss_sum(self, *arguments: Any) -> Tensor:
            raise KeyError("not here")

    callback = Breaks("none")
    with pytest.raises(KeyError):
        opened(make_config(tmp_path, model_folder, **SHORT), objective=Falls(), callbacks=[callback]).train()
    assert callback.ended == ["failed"]


# --- Rows ---


def test_rows_from_python_need_no_data_set_of_the_name(tmp_path: Path, model_folder: Path) -> None:
    config = make_config(tmp_path, model_folder, **SHORT, data__datasets=[{"path": "nobody/has-this"}])
    assert find_commits(config, gives_rows=True) == {}
    with pytest.raises(ValueError, match="nobody/has-this"):
        find_commits(config)
    trainer = opened(config, data=[ROW] * 30)
    assert trainer.train() == 0
    card = next(trainer.directory.folder.glob("hf/step-*/README.md")).read_text()
    assert "datasets:" not in card.split("---")[1]  # no data set of the Hub is claimed


@pytest.mark.parametrize("changed", [0, 5_432, 9_999])
def test_a_changed_row_of_a_list_changes_its_fingerprint(changed: int) -> None:
    rows = [{"messages": n} for n in range(10_000)]
    assert RowList(rows).fingerprint == RowList([*rows]).fingerprint
    assert RowList(rows).fingerprint != RowList([*rows[:changed], {"messages": -1}, *rows[changed + 1 :]]).fingerprint


# --- Optimizers ---


def values_of(named: Sequence[tuple[str, nn.Parameter]]) -> list[nn.Parameter]:
    return [each for _, each in named]


def scheduled(named: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(values_of(named), lr=1.0)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    return optimizer


class Inner(torch.optim.SGD):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=1.0)
        self.others = [torch.optim.Adam(self.param_groups[0]["params"])]


class Estimates(torch.optim.SGD):
    """Keeps an estimate in its groups, as Prodigy does."""

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = super().step(closure)
        for group in self.param_groups:
            group["estimate"] = group.get("estimate", 0) + 1
        return loss


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (scheduled, "a scheduler or hook wraps the step of SGD; remove it, and set optimizer.schedule instead"),
        (lambda named: Inner(values_of(named)), "Inner holds other optimizers"),
        (lambda named: Estimates(values_of(named), lr=1.0), "Estimates keeps estimate in its groups"),
        (lambda named: torch.optim.Adafactor(values_of(named)), "give it a method state_shapes"),
        (lambda named: torch.optim.SGD(values_of(named), lr=0.0), "all groups have the learning rate 0"),
        (lambda named: torch.optim.LBFGS(values_of(named)), "a step of LBFGS failed"),
    ],
)
def test_an_optimizer_that_a_checkpoint_cannot_save_is_refused_at_start(
    tmp_path: Path, model_folder: Path, make: Any, problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        open_trainer(make_config(tmp_path, model_folder, **SHORT), optimizer=make)


def test_the_rates_of_groups_keep_their_ratio_even_if_the_first_is_zero(tmp_path: Path, model_folder: Path) -> None:
    def frozen_first(named: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        parameters = values_of(named)
        groups = [{"params": parameters[:1], "lr": 0.0}, {"params": parameters[1:], "lr": 3.0}]
        return torch.optim.SGD(groups)

    config = make_config(tmp_path, model_folder, **SHORT, optimizer__schedule="constant")
    trainer = opened(config, optimizer=frozen_first)
    before = [each.detach().clone() for each in trainer.model.parameters()]
    trainer.train()
    assert [group["lr"] for group in trainer.optimizer.param_groups] == [0.0, config.optimizer.learning_rate]
    still = [torch.equal(old, new) for old, new in zip(before, trainer.model.parameters(), strict=True)]
    assert still[0]
    assert not any(still[1:])


def test_an_optimizer_of_the_users_is_not_said_to_be_layout_invariant(tmp_path: Path, model_folder: Path) -> None:
    config = make_config(tmp_path, model_folder, **SHORT, general__deterministic="layout")
    with pytest.raises(ValueError, match="layout holds for sftron's own AdamW alone"):
        open_trainer(config, optimizer=lambda named: torch.optim.SGD(values_of(named), lr=1.0))


# --- Objectives ---


class Unnamed(TokenLoss):
    names = ("kl",)

    def loss_sum(self, model: Any, batch: Any, measures: Any) -> Tensor:
        measures.add_measure("k1", torch.ones(()))
        return self.token_loss(model, batch, measures)


class Vector(TokenLoss):
    names = ("kl",)

    def loss_sum(self, model: Any, batch: Any, measures: Any) -> Tensor:
        measures.add_measure("kl", torch.ones(3))
        return self.token_loss(model, batch, measures)


class PerToken(TokenLoss):
    def loss_sum(self, model: Any, batch: Any, measures: Any) -> Tensor:
        return self.token_loss(model, batch, measures).reshape(1)


class Detached(TokenLoss):
    def loss_sum(self, model: Any, batch: Any, measures: Any) -> Tensor:
        return self.token_loss(model, batch, measures).detach()


class Nothing(TokenLoss):
    def denominator(self, batch: Any) -> float:
        return 0.0


@pytest.mark.parametrize(
    ("objective", "problem"),
    [
        (Unnamed(), r"'k1' is not among the names of the objective, \['kl'\]"),
        (Vector(), r"'kl' has shape \(3,\)"),
        (PerToken(), r"PerToken\.loss_sum returned shape \(1,\); return the sum, a scalar tensor"),
        (Detached(), r"Detached\.loss_sum returned a sum without a gradient; compute it from the model's outputs"),
        (Nothing(), r"Nothing\.denominator gives 0 for a step with [\d,]+ trained tokens"),
    ],
)
def test_an_objective_that_returns_something_else_stops_the_first_step(
    tmp_path: Path, model_folder: Path, objective: Any, problem: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=problem):
        opened(make_config(tmp_path, model_folder, **SHORT), objective=objective).train()


def test_a_base_that_is_not_in_memory_is_refused(tmp_path: Path, model_folder: Path) -> None:
    for lora in (None, {"rank": 4, "modules_to_save": ["embed_tokens"]}):
        options = {} if lora is None else {f"lora__{key}": value for key, value in lora.items()}
        config = make_config(tmp_path, model_folder, **SHORT, **options, general__run_name=f"run{bool(lora)}")
        with pytest.raises(ValueError, match="the base is not in memory: the run also trains"):
            opened(config, objective=KLToBase(0.5)).train()


class ByNorms(TokenLoss):
    """Takes the loss from the final hidden states, which it computes twice."""

    def loss_sum(self, model: Any, batch: Any, measures: Any) -> Tensor:
        hidden = (hidden_states(model, batch) + hidden_states(model, batch)) / 2
        return self.token_loss(model, batch, measures, hidden)


@pytest.mark.parametrize("coefficient", [0.0, 0.01])
def test_two_passes_over_experts_are_refused_with_their_auxiliary_loss(tmp_path: Path, coefficient: float) -> None:
    folder = make_model_folder(tmp_path / "experts", model_type="qwen2_moe", **EXPERTS)
    config = make_config(tmp_path, folder, **SHORT, model__router_aux_loss_coef=coefficient)
    trainer = opened(config, objective=ByNorms())
    if coefficient:
        with pytest.raises(ValueError, match="computes the hidden states of a micro-batch twice"):
            trainer.train()
    else:
        assert trainer.train() == 0
