"""Each law that is broken on purpose turns its own rows red, and no others."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sftron.checks import model_checks, rank_checks, run_checks
from sftron.checks import subject as subject_module
from sftron.checks import verify_run as verify_module
from sftron.checks.report import Check, Finding, NotMeasuredError, Report, Rule, carry_out
from sftron.checks.subject import Subject
from sftron.checks.verify_run import RULES, select
from sftron.commands import inspect
from sftron.commands import verify as verify_run
from sftron.config import load_config
from sftron.data import prepare as preparation_module
from sftron.data.chat import tokenizer as tokenizer_module
from sftron.data.chat.tokenizer import ChatTokenizer
from sftron.data.loader import PackLoader
from sftron.data.types import IGNORE_INDEX, Role
from sftron.kernels import table as table_module
from sftron.models.sdpa_attention import SdpaAttention, attend_causally
from sftron.train import build_data
from sftron.train import resume as resume_module
from sftron.train.step import StepResult
from tests.train.runs import settings, write_config

DATA = ("template", "prompt", "stop tokens", "masks", "forgery", "toggles", "data order", "start-up")
MODEL = tuple(rule.name for rule in RULES if rule.name not in (*DATA, "resume", "ranks", "context"))
OF_PACKS = {"gradients apart", "packed = single", "packed in its type", "accumulation"}


def config_file(home: Path, folder: Path, **overrides: Any) -> Path:
    tree = settings(home, home / "model", model__compute_dtype="bfloat16", **overrides)
    tree["general"]["output_dir"] = str(folder / "runs")
    return write_config(folder / "config.yaml", tree)


def report_of(
    home: Path,
    folder: Path,
    *only: str,
    ranks: int | None = None,
    context: int | None = None,
    layers: int | None = None,
    **overrides: Any,
) -> Report:
    (scratch := folder / "scratch").mkdir()
    config = load_config(config_file(home, folder, **overrides))
    sizes = {"num_ranks": ranks, "num_sharing": context}
    subject = Subject(config, scratch, num_rows=24, num_layers=layers, num_tokens=160, **sizes)
    several = {"with_ranks": ranks is not None, "with_context": context is not None}
    rules = select(only, **several, with_lora=config.lora is not None)
    return Report("run", {}, tuple(carry_out(rules, subject, is_own_code=True)))


def failed(report: Report) -> set[str]:
    return {check.name for check in report.failed}


def skipped(report: Report) -> set[str]:
    return {check.name for check in report.checks if check.passed is None}


@pytest.mark.parametrize("start", ["forked_ranks", pytest.param("torchrun", marks=pytest.mark.nightly)])
def test_a_sound_run_passes_every_check(home: Path, tmp_path: Path, start: str, request: pytest.FixtureRequest) -> None:
    if start != "torchrun":
        request.getfixturevalue(start)
    report = report_of(home, tmp_path, ranks=2, context=2)
    assert (failed(report), skipped(report)) == (set(), set()), report.as_dict()
    assert f"All {len(RULES)} checks passed" in report.verdict
    measured = {check.name: check.measured for check in report.checks}
    assert measured["isolation"].endswith("others change by 0")
    assert "2 processes" in measured["ranks"]
    assert measured["context"].startswith("2 ranks a pack: loss ")


Patch = pytest.MonkeyPatch


def wrap(patch: Patch, owner: Any, name: str, wrong: Callable[..., Any]) -> None:
    """Replaces a function by `wrong`, whose first argument is the right one."""
    right = getattr(owner, name)
    patch.setattr(owner, name, lambda *arguments, **options: wrong(right, *arguments, **options))


# --- the data ---


def change_labels(patch: Patch, change: Callable[[Any, np.ndarray, np.ndarray], object]) -> None:
    def wrong(right: Any, conversations: Any, *arguments: Any, **options: Any) -> Any:
        changed = []
        for tokenized, labeled in zip(conversations, right(conversations, *arguments, **options), strict=True):
            labels, weights = labeled.labels.copy(), labeled.loss_weights.copy()
            change(tokenized, labels, weights)
            changed.append(replace(labeled, labels=labels, loss_weights=weights))
        return changed

    wrap(patch, preparation_module, "label_conversations", wrong)


def train_the_header(patch: Patch) -> None:
    def change(tokenized: Any, labels: np.ndarray, weights: np.ndarray) -> None:
        first = int(np.flatnonzero(labels != IGNORE_INDEX)[0])
        labels[first - 1], weights[first - 1] = tokenized.input_ids[first], 1

    change_labels(patch, change)


def forget_the_stop_token(patch: Patch) -> None:
    def change(tokenized: Any, labels: np.ndarray, weights: np.ndarray) -> None:
        stop = next(turn.stop for turn in tokenized.turns if turn.role is Role.ASSISTANT)
        labels[stop - 1], weights[stop - 1] = IGNORE_INDEX, 0

    change_labels(patch, change)


def do_not_shift(patch: Patch) -> None:
    change_labels(patch, lambda tokenized, labels, _: np.copyto(labels, tokenized.input_ids, where=labels >= 0))


def change_an_id(patch: Patch) -> None:
    def wrong(right: Any, self: ChatTokenizer, conversations: Any) -> list[Any]:
        encoded = right(self, conversations)
        for each in encoded:
            each.input_ids[1] += 1
        return encoded

    wrap(patch, ChatTokenizer, "encode_batch", wrong)


def let_text_write_control_tokens(patch: Patch) -> None:
    patch.setattr(tokenizer_module, "allowed_by_role", lambda _, known: dict.fromkeys(Role, frozenset(known)))


def shuffle_by_a_toggle(patch: Patch) -> None:
    def wrong(right: Any, config: Any, *arguments: Any, **options: Any) -> Any:
        seed = 7 if config.data.remove_cross_attention else 8
        general = config.general.model_copy(update={"seed": seed})
        return right(config.model_copy(update={"general": general}), *arguments, **options)

    wrap(patch, build_data, "make_dataset", wrong)


def skip_a_pack_at_a_resume(patch: Patch) -> None:
    def wrong(right: Any, self: PackLoader, state: dict[str, Any]) -> None:
        right(self, {**state, "next_pack": state["next_pack"] + 1})

    wrap(patch, PackLoader, "load_state_dict", wrong)


# --- the model ---


def change_a_weight(patch: Patch, added: float = 0.5) -> None:
    def wrong(right: Any, setup: Any) -> Any:
        model = right(setup)
        with torch.no_grad():
            model.model.layers[1].self_attn.qkv_proj.weight[3, 5] += added
        return model

    wrap(patch, subject_module, "load_run_model", wrong)


def let_a_weight_be_no_number(patch: Patch) -> None:
    change_a_weight(patch, torch.nan)


def turn_rope_too_far(patch: Patch) -> None:
    wrap(patch, table_module, "build_rope_table", lambda right, n, spec: right(n, replace(spec, theta=2 * spec.theta)))


def attend_across_conversations(patch: Patch) -> None:
    def over_the_row(_right: Any, _self: Any, *qkv: torch.Tensor, **options: Any) -> torch.Tensor:
        return attend_causally(*qkv, **options)

    wrap(patch, SdpaAttention, "__call__", over_the_row)


def leak_in_the_backward_pass_alone(patch: Patch) -> None:
    def leaking(right: Any, documents: SdpaAttention, *qkv: torch.Tensor, **options: Any) -> torch.Tensor:
        everyone = qkv[2].sum()
        return right(documents, *qkv, **options) + (everyone - everyone.detach()) * 0.1

    wrap(patch, SdpaAttention, "__call__", leaking)


def take_a_mean_of_means(patch: Patch) -> None:
    loss_of = model_checks.loss_of

    def wrong(_: Any, model: Any, optimizer: Any, batches: Any, **options: Any) -> StepResult:
        loss = sum(loss_of(model, batch) / batch.weight_sum for batch in batches) / len(batches)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return StepResult(loss.item(), 1.0, None)

    wrap(patch, model_checks, "train_step", wrong)


def forget_the_optimizer(patch: Patch) -> None:
    wrap(patch, resume_module, "load_checkpoint", lambda right, *at, **of: right(*at, **of | {"optimizer": None}))


def climb(patch: Patch) -> None:
    def wrong(_right: Any, _config: Any, model: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1, maximize=True)

    wrap(patch, run_checks, "make_optimizer", wrong)


@pytest.mark.parametrize(
    ("break_it", "measured", "red"),
    [
        (train_the_header, DATA, {"masks", "start-up"}),
        (forget_the_stop_token, DATA, {"stop tokens", "masks", "start-up"}),
        (do_not_shift, DATA, {"stop tokens", "masks", "start-up"}),
        (change_an_id, DATA, {"template", "prompt", "start-up"}),
        (let_text_write_control_tokens, DATA, {"forgery"}),
        (shuffle_by_a_toggle, DATA, {"toggles"}),
        (skip_a_pack_at_a_resume, ("data order", "resume", "toggles"), {"data order", "resume"}),
        (forget_the_optimizer, ("data order", "resume"), {"resume"}),
        (change_a_weight, MODEL, {"weights", "transformers"}),
        (let_a_weight_be_no_number, MODEL, {"weights", "transformers", "isolation", *OF_PACKS, "learning"}),
        (turn_rope_too_far, MODEL, {"transformers"}),
        (attend_across_conversations, MODEL, {"isolation", *OF_PACKS}),
        (leak_in_the_backward_pass_alone, MODEL, OF_PACKS),
        (take_a_mean_of_means, MODEL, {"accumulation"}),
        (climb, ("weights", "learning"), {"learning"}),
    ],
)
def test_what_is_broken_turns_its_own_rows_red_and_no_others(
    home: Path, tmp_path: Path, monkeypatch: Patch, break_it: Callable[[Patch], None], measured: Any, red: set[str]
) -> None:
    break_it(monkeypatch)
    assert failed(report_of(home, tmp_path, *measured)) == red


def test_a_stop_token_is_learned_if_it_rises_and_is_not_shown_as_nothing() -> None:
    learned = [(0.3, 0.31), (0.95, 0.93), (1e-6, 2.1e-6), (1e-6, 6e-4)]
    not_learned = [(0.3, 0.2), (0.95, 0.89), (1e-6, 1.9e-6), (6e-4, 6e-4), (0.0, 0.0), (0.3, float("nan"))]
    assert all(run_checks._is_learned(*each) for each in learned)
    assert not any(run_checks._is_learned(*each) for each in not_learned)


def test_a_generation_prompt_that_is_not_the_trained_header_turns_the_prompt_red(home: Path, tmp_path: Path) -> None:
    template = tmp_path / "other.jinja"
    template.write_text(
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\nSure! ' }}{% endif %}"
    )
    assert failed(report_of(home, tmp_path, *DATA, tokenizer__chat_template=str(template))) == {"prompt"}


EACH_RANK_BY_ITS_OWN_TOKENS = """
from sftron.train import loop
right = loop.train_step

def mean_of_means(model, optimizer, batches, *objective, **options):
    own = 2 * sum(batch.weight_sum for batch in batches)
    print("the mean of this rank alone")
    return right(model, optimizer, batches, *objective, **(options | {"denominator": own}))

loop.train_step = mean_of_means
"""


@pytest.mark.usefixtures("forked_ranks")
def test_ranks_that_divide_by_their_own_tokens_are_red_and_their_output_is_shown(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_checks, "_SCRIPT", EACH_RANK_BY_ITS_OWN_TOKENS + rank_checks._SCRIPT)
    report = report_of(home, tmp_path, "start-up", ranks=2)
    assert failed(report) == {"ranks"}, report.as_dict()
    assert "the mean of this rank alone" in "\n".join(report.failed[0].detail)


POSITIONS_OF_THE_PART = """
import torch
from sftron.models.llama import LlamaForSFT
right = LlamaForSFT._hidden_states

def by_the_part(model, mixes, ids, positions, dtype, tokens=slice(None)):
    return right(model, mixes, ids, torch.arange(len(ids), dtype=positions.dtype), dtype)

LlamaForSFT._hidden_states = by_the_part
"""


@pytest.mark.usefixtures("forked_ranks")
def test_ranks_that_count_positions_in_their_part_of_a_pack_are_red(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_checks, "_SCRIPT", POSITIONS_OF_THE_PART + rank_checks._SCRIPT)
    report = report_of(home, tmp_path, "start-up", context=2)
    assert failed(report) == {"context"}, report.as_dict()


# --- the table ---


def test_what_is_not_measured_is_skipped_with_its_reason_and_named_in_the_verdict(home: Path, tmp_path: Path) -> None:
    report = report_of(home, tmp_path, "isolation", "accumulation", data__remove_cross_attention=False)
    isolation, accumulation = report.checks
    assert (isolation.passed, accumulation.passed) == (None, True)
    assert "remove_cross_attention is false" in isolation.measured
    assert report.verdict.startswith("1 of 2 checks passed")
    assert report.not_measured == "Not measured: isolation."


def test_a_run_that_would_be_refused_is_red_and_its_model_is_not_measured(home: Path, tmp_path: Path) -> None:
    report = report_of(home, tmp_path, *DATA, *MODEL, "resume", tokens__sequence_length=4000)
    assert failed(report) == {"start-up"}
    assert "max_position_embeddings" in report.failed[0].measured
    assert skipped(report) == {*MODEL, "resume"}


def test_a_report_passes_only_if_something_was_measured() -> None:
    passed, failed, skipped = (Check(name, value, "") for name, value in (("a", True), ("b", False), ("c", None)))
    raised = Check("d", None, "", raised=True)
    assert all(Report("", {}, checks).passed for checks in [(passed,), (passed, skipped)])
    not_passed = [(), (skipped,), (passed, failed), (passed, raised)]
    assert not any(Report("", {}, checks).passed for checks in not_passed)
    assert not Report("", {}, (passed, skipped), required=("c",)).passed


def test_a_rule_that_raises_or_measures_nothing_has_not_passed() -> None:
    def broken(_: object) -> Finding:
        raise RuntimeError("out of memory")

    def idle(_: object) -> Finding:
        raise NotMeasuredError("no reason")

    rules = [Rule("broken", broken, ""), Rule("idle", idle, "")]
    checks = tuple(carry_out(rules, object()))
    assert [check.status for check in checks] == ["SKIP", "SKIP"]
    assert [check.status for check in carry_out(rules, object(), is_own_code=True)] == ["FAIL", "SKIP"]
    assert "not measured: RuntimeError: out of memory (" in checks[0].measured
    assert not Report("", {}, checks).passed
    assert Report("", {}, checks).missing == ["broken"]
    assert Report("", {}, checks[1:]).verdict == "Nothing was measured."


# --- the tool ---


def test_the_tool_writes_table_page_and_json_with_a_remedy_and_leaves_the_run_directory_alone(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    let_text_write_control_tokens(monkeypatch)
    file, report, page = config_file(home, tmp_path), tmp_path / "report.json", tmp_path / "runs" / "run-verify.html"
    checks = ["--only", "forgery", "--only", "isolation", "--layers", "1"]
    assert verify_run.main(["--config", str(file), *checks, "--json", str(report)]) == 1
    out = capsys.readouterr().out
    for text in ("first 1 of 2 layers", "FAIL  forgery", "PASS  isolation", "1 of 2 checks failed: forgery", "Please"):
        assert text in out
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [page.name]
    assert 'class="check bad" id="check-forgery" open' in page.read_text()
    assert 'class="remedy"' in page.read_text()
    written = json.loads(report.read_text())
    assert written["passed"] is False
    assert [check["status"] for check in written["checks"]] == ["fail", "pass"]
    assert verify_run.main(["--config", str(file), "--only", "masks"]) == 0
    assert "All 1 checks passed" in page.read_text()


@pytest.mark.parametrize(
    ("command", "options"),
    [(verify_run.main, ["--html", "--card", "--json"]), (inspect.main, ["--html", "--json"])],
    ids=["verify", "inspect"],
)
def test_folders_of_reports_are_made_and_a_file_that_cannot_be_written_is_status_2(
    home: Path, tmp_path: Path, command: Callable[[list[str]], int], options: list[str], capsys: Any
) -> None:
    (tmp_path / "file").touch()
    arguments = ["--config", str(config_file(home, tmp_path))]
    arguments += ["--only", "masks"] if command is verify_run.main else ["--packs", "2", "--rows", "9"]
    files = {option: tmp_path / option / "report" for option in options}
    assert command([*arguments, *(f"{option}={file}" for option, file in files.items())]) == 0
    assert all(file.stat().st_size > 100 for file in files.values())
    for option in options:
        assert command([*arguments, f"{option}={tmp_path}/file/report"]) == 2
        assert f"choose another place with {option}" in capsys.readouterr().err


def test_a_bad_row_an_unknown_check_and_a_typo_are_status_2_and_a_message(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"messages": [{"role": "nobody", "content": "x"}]}\n', encoding="utf-8")
    for arguments, message in {
        ("--only", "rope"): "unknown check rope",
        ("--data.train_on_completion_only=true",): "did you mean",
        (f"--data.datasets=[{{path: {rows}}}]",): "rows.jsonl:1",
    }.items():
        assert verify_run.main(["--config", str(config_file(home, tmp_path)), *arguments]) == 2
        assert message in capsys.readouterr().err


def test_a_configured_context_is_checked_without_being_asked_for(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, bool]] = []

    def record(only: object, **options: bool) -> tuple[Rule, ...]:
        asked.append(options)
        return ()

    monkeypatch.setattr(verify_module, "select", record)
    for num_sharing in (1, 2):
        config = load_config(config_file(home, tmp_path, parallelism__context=num_sharing))
        verify_module.verify_run(config, num_rows=24)
    assert [options["with_context"] for options in asked] == [False, True]
