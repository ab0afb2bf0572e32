"""Each law that is broken on purpose turns its own rows red, and no others."""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from sftron.config import load_config
from sftron.data import prepare as preparation_module
from sftron.data.chat.tokenizer import ChatTokenizer
from sftron.data.loader import PackLoader
from sftron.data.types import IGNORE_INDEX, Role
from sftron.kernels import table as rope_table
from sftron.models import attention
from sftron.models.llama import LlamaForSFT
from sftron.train import resume
from sftron.train.step import StepResult
from sftron.verify import data_checks, model_checks, run_checks
from sftron.verify import subject as subject_module
from sftron.verify.subject import Sizes, Subject
from sftron.verify.table import Finding, Rule, RunReport, Table, carry_out, not_measured, skipped, verdict
from sftron.verify.verify_run import RULES, chosen
from tests.train.runs import chat_line, make_model_folder, settings, write_config
from tools import verify_run

DATA = ("template", "prompt", "stop tokens", "masks", "forgery", "toggles", "data order", "start-up")
MODEL = tuple(rule.name for rule in RULES if rule.name not in (*DATA, "resume", "ranks"))
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two layers, and two dozen conversations of unlike lengths."""
    home = tmp_path_factory.mktemp("verified")
    make_model_folder(home / "model")
    lines = [chat_line(f"What is {n}?", f"{n} is " + "one more than " * (n % 4) + f"{n}.") for n in range(24)]
    (home / "rows.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return home


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def config_file(home: Path, folder: Path, **overrides: Any) -> Path:
    tree = settings(home, home / "model", model__compute_dtype="bfloat16", **overrides)
    tree["general"]["output_dir"] = str(folder / "runs")
    return write_config(folder / "config.yaml", tree)


def report_of(home: Path, folder: Path, *only: str, ranks: int | None = None, **overrides: Any) -> RunReport:
    config = load_config(config_file(home, folder, **overrides))
    scratch = folder / "scratch"
    scratch.mkdir()
    subject = Subject(config, scratch, Sizes(rows=24, tokens=160, ranks=ranks))
    return RunReport("run", {}, tuple(carry_out(chosen(only, with_ranks=ranks is not None), subject)))


def failed(report: RunReport) -> set[str]:
    return {check.name for check in report.failed}


def skips(report: RunReport) -> set[str]:
    return {check.name for check in report.checks if check.passed is None}


def test_a_sound_run_passes_every_check(home: Path, tmp_path: Path) -> None:
    report = report_of(home, tmp_path)
    assert (failed(report), skips(report)) == (set(), set()), report.as_dict()
    assert report.passed
    assert f"All {len(RULES) - 1} checks passed" in verdict(report)


# --- the data ---


def _labels_changed(monkeypatch: pytest.MonkeyPatch, change: Callable[[Any, np.ndarray, np.ndarray], None]) -> None:
    right = preparation_module.label_conversation

    def wrong(tokenized: Any, *arguments: Any, **options: Any) -> Any:
        labeled = right(tokenized, *arguments, **options)
        labels, weights = labeled.labels.copy(), labeled.loss_weights.copy()
        change(tokenized, labels, weights)
        return replace(labeled, labels=labels, loss_weights=weights)

    monkeypatch.setattr(preparation_module, "label_conversation", wrong)


def test_a_header_that_is_trained_turns_the_masks_red(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train_the_header(tokenized: Any, labels: np.ndarray, weights: np.ndarray) -> None:
        first = int(np.flatnonzero(labels != IGNORE_INDEX)[0])
        labels[first - 1], weights[first - 1] = tokenized.input_ids[first], 1

    _labels_changed(monkeypatch, train_the_header)
    assert failed(report_of(home, tmp_path, *DATA)) == {"masks"}


def test_a_word_of_the_answer_that_is_not_trained_turns_the_masks_red(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forget_the_first(tokenized: Any, labels: np.ndarray, weights: np.ndarray) -> None:
        first = int(np.flatnonzero(labels != IGNORE_INDEX)[0])
        labels[first], weights[first] = IGNORE_INDEX, 0

    _labels_changed(monkeypatch, forget_the_first)
    assert failed(report_of(home, tmp_path, *DATA)) == {"masks"}


def test_labels_that_are_not_shifted_turn_the_masks_red_and_no_model_is_read(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unshift(tokenized: Any, labels: np.ndarray, weights: np.ndarray) -> None:
        np.copyto(labels, tokenized.input_ids, where=labels != IGNORE_INDEX)

    _labels_changed(monkeypatch, unshift)
    report = report_of(home, tmp_path, *DATA, *MODEL)
    assert {"masks", "start-up"} <= failed(report) <= {"masks", "start-up", "stop tokens"}
    assert {"weights", "isolation", "learning"} <= skips(report)


def test_an_untrained_stop_token_turns_the_stop_tokens_red(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forget_the_stop(tokenized: Any, labels: np.ndarray, weights: np.ndarray) -> None:
        stop = next(turn.stop for turn in tokenized.turns if turn.role is Role.ASSISTANT)
        labels[stop - 1], weights[stop - 1] = IGNORE_INDEX, 0

    _labels_changed(monkeypatch, forget_the_stop)
    assert failed(report_of(home, tmp_path, *DATA)) == {"stop tokens", "masks", "start-up"}


def test_ids_that_are_not_the_templates_turn_the_template_red(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = ChatTokenizer.encode_batch

    def wrong(self: ChatTokenizer, conversations: Any) -> list[Any]:
        encoded = right(self, conversations)
        for each in encoded:
            each.input_ids[1] += 1
        return encoded

    monkeypatch.setattr(ChatTokenizer, "encode_batch", wrong)
    assert failed(report_of(home, tmp_path, *DATA)) == {"template", "prompt", "start-up"}


def test_a_generation_prompt_that_is_not_the_trained_header_turns_the_prompt_red(home: Path, tmp_path: Path) -> None:
    template = tmp_path / "other.jinja"
    asked = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\nSure! ' }}{% endif %}"
    template.write_text(CHATML + asked, encoding="utf-8")
    assert failed(report_of(home, tmp_path, *DATA, tokenizer__chat_template=str(template))) == {"prompt"}


def test_text_that_becomes_a_control_token_turns_the_forgery_red(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def all_of_them(self: ChatTokenizer, *_: Any) -> set[str]:
        return {self.decode([token_id]) for token_id in self.control_ids}

    monkeypatch.setattr(ChatTokenizer, "_allowed_in", all_of_them)
    assert failed(report_of(home, tmp_path, *DATA)) == {"forgery"}


def test_a_toggle_that_changes_the_packs_turns_the_toggles_red(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = data_checks.run_data.make_dataset

    def wrong(config: Any, *arguments: Any, **options: Any) -> Any:
        if not config.data.remove_cross_attention:
            config = config.model_copy(update={"general": config.general.model_copy(update={"seed": 8})})
        return right(config, *arguments, **options)

    monkeypatch.setattr(data_checks.run_data, "make_dataset", wrong)
    assert failed(report_of(home, tmp_path, *DATA)) == {"toggles"}


def test_a_resume_that_skips_a_pack_turns_the_data_order_and_the_resume_red(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = PackLoader.load_state_dict

    def wrong(self: PackLoader, state: dict[str, Any]) -> None:
        right(self, {**state, "next_pack": state["next_pack"] + 1})

    monkeypatch.setattr(PackLoader, "load_state_dict", wrong)
    report = report_of(home, tmp_path, "data order", "resume", "toggles")
    assert failed(report) == {"data order", "resume"}


# --- the model ---


def test_one_flipped_weight_turns_the_weights_red(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = subject_module.build_model

    def wrong(plan: Any) -> LlamaForSFT:
        model = right(plan)
        with torch.no_grad():
            model.model.layers[1].self_attn.qkv_proj.weight[3, 5] += 0.5
        return model

    monkeypatch.setattr(subject_module, "build_model", wrong)
    assert failed(report_of(home, tmp_path, *MODEL)) == {"weights", "transformers"}


def test_weights_that_are_no_numbers_pass_no_check_that_computes(home: Path, tmp_path: Path) -> None:
    folder = tmp_path / "nan"
    shutil.copytree(home / "model", folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.self_attn.k_proj.weight"][3, 5] = torch.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    report = report_of(home, tmp_path, *MODEL, model__path=str(folder))
    computing = {
        "transformers",
        "isolation",
        "gradients apart",
        "packed = single",
        "packed in its type",
        "accumulation",
    }
    assert failed(report) == {*computing, "learning"}


def test_a_wrong_rope_turns_transformers_red(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = rope_table.build_rope_table
    monkeypatch.setattr(
        rope_table, "build_rope_table", lambda n, dim, theta, scaling: right(n, dim, 2 * theta, scaling)
    )
    assert failed(report_of(home, tmp_path, *MODEL)) == {"transformers"}


OF_PACKS = {"gradients apart", "packed = single", "packed in its type", "accumulation"}


def test_attention_across_conversations_turns_isolation_red(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def as_one_document(documents: attention.SdpaAttention, *qkv: torch.Tensor) -> torch.Tensor:
        assert documents.lengths
        return attention.attend_causally(*qkv)

    monkeypatch.setattr(attention.SdpaAttention, "__call__", as_one_document)
    assert failed(report_of(home, tmp_path, *MODEL)) == {"isolation", *OF_PACKS}


def test_a_backward_pass_that_leaks_turns_the_gradients_red_and_leaves_isolation_green(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = attention.SdpaAttention.__call__

    def leaking(documents: attention.SdpaAttention, *qkv: torch.Tensor) -> torch.Tensor:
        everyone = qkv[2].sum()
        return right(documents, *qkv) + (everyone - everyone.detach()) * 0.1

    monkeypatch.setattr(attention.SdpaAttention, "__call__", leaking)
    assert failed(report_of(home, tmp_path, *MODEL)) == OF_PACKS


def test_a_mean_of_means_turns_the_accumulation_red(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = model_checks.loss_of

    def mean(model: Any, optimizer: Any, batches: Any, *, max_grad_norm: Any, loss_function: Any) -> Any:
        loss = sum(right(model, batch, loss_function) / batch.weight_sum for batch in batches) / len(batches)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return StepResult(loss.item(), 1.0, None)

    monkeypatch.setattr(model_checks, "train_step", mean)
    assert failed(report_of(home, tmp_path, *MODEL)) == {"accumulation"}


def test_a_resume_without_the_optimizer_turns_the_resume_red(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = resume.load_checkpoint
    monkeypatch.setattr(
        resume, "load_checkpoint", lambda folder, model, optimizer: right(folder, model=model, optimizer=None)
    )
    assert failed(report_of(home, tmp_path, "data order", "resume")) == {"resume"}


def test_a_loss_that_rises_turns_learning_red(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        run_checks,
        "make_optimizer",
        lambda plan, model: torch.optim.SGD(model.parameters(), lr=0.1, maximize=True),
    )
    assert failed(report_of(home, tmp_path, "weights", "learning")) == {"learning"}


EACH_RANK_BY_ITS_OWN_TOKENS = """
from sftron.train import loop
right = loop.train_step

def mean_of_means(model, optimizer, batches, **options):
    own = 2 * sum(batch.weight_sum for batch in batches)
    print("the mean of this rank alone")
    return right(model, optimizer, batches, **(options | {"weight_sum": own}))

loop.train_step = mean_of_means
"""


def test_the_ranks_are_asked_for_by_their_number_and_red_where_each_divides_by_its_own_tokens(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = tmp_path / "right", tmp_path / "wrong"
    for folder in folders:
        folder.mkdir()
    report = report_of(home, folders[0], "start-up", ranks=2)
    sound = [(check.name, check.passed) for check in report.checks]
    assert sound == [("start-up", True), ("ranks", True)], report.as_dict()
    assert "2 processes" in report.checks[1].measured
    monkeypatch.setattr(run_checks, "_SCRIPT", EACH_RANK_BY_ITS_OWN_TOKENS + run_checks._SCRIPT)
    report = report_of(home, folders[1], "start-up", ranks=2)
    assert failed(report) == {"ranks"}, report.as_dict()
    assert "the mean of this rank alone" in "\n".join(Table(color=False).row(report.failed[0]))


# --- the table ---


def test_what_is_not_measured_is_skipped_with_its_reason_and_said_in_the_verdict(home: Path, tmp_path: Path) -> None:
    report = report_of(home, tmp_path, "isolation", "accumulation", data__remove_cross_attention=False)
    (isolation, accumulation) = report.checks[:1], report.checks[1:]
    assert isolation[0].passed is None
    assert "remove_cross_attention is false" in isolation[0].measured
    assert accumulation[0].passed is True
    assert verdict(report).startswith("1 of 2 checks passed")
    assert not_measured(report) == "Not measured: isolation."


def test_a_run_that_would_be_refused_is_red_and_its_model_is_not_measured(home: Path, tmp_path: Path) -> None:
    report = report_of(home, tmp_path, *DATA, *MODEL, tokens__sequence_length=4000)
    assert failed(report) == {"start-up"}
    assert "max_position_embeddings" in report.failed[0].measured
    assert {"weights", "transformers", "isolation", "learning"} <= skips(report)


def test_a_check_that_cannot_be_carried_out_has_failed() -> None:
    def broken(_: object) -> Finding:
        raise RuntimeError("out of memory")

    rules = [Rule("broken", broken, "", ""), Rule("skipped", lambda _: skipped("no reason"), "", "")]
    checks = tuple(carry_out(rules, object()))
    assert [check.word for check in checks] == ["FAIL", "SKIP"]
    assert "out of memory" in checks[0].measured
    assert not RunReport("", {}, checks).passed


def test_nothing_measured_is_not_all_passed() -> None:
    checks = tuple(carry_out([Rule("skipped", lambda _: skipped("no reason"), "", "")], object()))
    assert verdict(RunReport("", {}, checks)) == "Nothing was measured."


# --- the tool ---


def test_the_tool_writes_table_page_and_json_and_leaves_the_run_directory_alone(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = config_file(home, tmp_path)
    report = tmp_path / "report.json"
    only = ["--only", "masks", "--only", "isolation"]
    assert verify_run.main(["--config", str(file), *only, "--layers", "1", "--json", str(report)]) == 0
    out = capsys.readouterr().out
    assert "first 1 of 2 layers" in out
    assert [line.split()[:2] for line in out.splitlines() if line.startswith("PASS")] == [
        ["PASS", "masks"],
        ["PASS", "isolation"],
    ]
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["run-verify.html"]
    page = (tmp_path / "runs" / "run-verify.html").read_text()
    assert "All 2 checks passed" in page
    assert page.count('class="check good"') == 2
    told = json.loads(report.read_text())
    assert told["passed"]
    assert [check["status"] for check in told["checks"]] == ["pass", "pass"]


def test_a_failed_check_is_status_1_and_says_what_to_do(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ChatTokenizer, "_allowed_in", lambda self, *_: {"<|im_end|>", "<|im_start|>"})
    assert verify_run.main(["--config", str(config_file(home, tmp_path)), "--only", "forgery"]) == 1
    out = capsys.readouterr().out
    assert "FAIL  forgery" in out
    assert "Do not train yet: 1 of 1 checks failed: forgery" in out
    assert "Please report" in out
    page = (tmp_path / "runs" / "run-verify.html").read_text()
    assert 'class="check bad" id="check-forgery" open' in page
    assert 'class="remedy"' in page


def test_a_bad_row_an_unknown_check_and_a_typo_are_status_2_and_a_message(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = config_file(home, tmp_path)
    assert verify_run.main(["--config", str(file), "--only", "rope"]) == 2
    assert "no check is named rope" in capsys.readouterr().err
    assert verify_run.main(["--config", str(file), "--data.train_on_completion_only=true"]) == 2
    assert "did you mean" in capsys.readouterr().err
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"messages": [{"role": "nobody", "content": "x"}]}\n', encoding="utf-8")
    assert verify_run.main(["--config", str(file), f"--data.datasets=[{{path: {rows}}}]"]) == 2
    assert "rows.jsonl:1" in capsys.readouterr().err
