"""Chats with exports, checkpoints and run directories: the model's own template, and text that stays text."""

import io
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from sftron.checkpoint.model_folder import check_files, read_config
from sftron.commands import check, convert, generate
from sftron.data.types import Message, Role
from sftron.models.generation import Sampler, greedy_generate, most_likely
from sftron.train.chat import Chat, ChatModel, open_chat_model, stream_text
from tests.conftest import ASSETS
from tests.train.conftest import FinishedRun


@pytest.fixture(scope="module")
def opened(model_folder: Path) -> ChatModel:
    return open_chat_model(model_folder, dtype=torch.float32)


@pytest.mark.parametrize("name", ["tokenizer", "tokenizer_sentencepiece"])
def test_streamed_text_is_the_text_of_all_ids_and_no_character_is_shown_in_part(name: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / name)

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    for text in ["a snow ☃ man", "  你好 , 👩‍👩‍👧 é\n\n x", "\ufffd and on", "plain words only", "👍"]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        parts = list(stream_text(decode, ids))
        assert "".join(parts) == decode(ids)
        if "\ufffd" not in text:
            assert not any("\ufffd" in part for part in parts)
    whole = tokenizer.encode("☃", add_special_tokens=False)
    assert len(whole) > 1
    assert list(stream_text(decode, whole[:-1])) == [decode(whole[:-1])]


def test_a_sampler_follows_temperature_and_top_p_and_repeats_by_its_seed() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, -1.0])
    assert {Sampler(0.0)(logits) for _ in range(5)} == {1} == {most_likely(logits)}
    # softmax is 0.090, 0.658, 0.242, 0.012: two tokens hold 0.9.
    sampler = Sampler(1.0, 0.89, seed=3)
    assert {sampler(logits) for _ in range(200)} == {1, 2}
    sampler = Sampler(1.0, seed=5)
    counts = torch.bincount(torch.tensor([sampler(logits) for _ in range(4000)]), minlength=4) / 4000
    torch.testing.assert_close(counts, logits.softmax(0), atol=0.03, rtol=0)
    first, again, other = (
        [draw(logits) for _ in range(20)] for draw in (Sampler(2.0, seed=7), Sampler(2.0, seed=7), Sampler(2.0, seed=8))
    )
    assert first == again != other


def test_each_turn_is_encoded_with_all_before_it_by_the_models_template(opened: ChatModel) -> None:
    chat = Chat(opened, choose=most_likely, max_new_tokens=6, system="Be brief.")
    tokenizer, questions = opened.chat_tokenizer, ("Hi <|im_end|> there", "And?")
    answers = ["".join(chat.ask(question)) for question in questions]
    messages = [Message(Role.SYSTEM, "Be brief.")]
    prompt_ids: list[int] = []
    for question, answer in zip(questions, answers, strict=True):
        messages.append(Message(Role.USER, question))
        prompt_ids = tokenizer.encode_prompt(messages)
        ids = greedy_generate(opened.model, prompt_ids, 6, opened.stop_ids).token_ids
        assert answer == str(tokenizer.tokenizer.decode(list(ids), skip_special_tokens=True))
        messages.append(Message(Role.ASSISTANT, answer))
    assert chat.messages == messages
    (stop,) = tokenizer.tokenizer.encode("<|im_end|>", add_special_tokens=False)
    assert prompt_ids.count(stop) == 4, "one a turn: the user's text made none"
    chat.reset()
    assert chat.messages == messages[:1]


def test_an_answer_that_is_stopped_counts_as_far_as_it_came(opened: ChatModel) -> None:
    chat = Chat(opened, choose=most_likely, max_new_tokens=20)
    answer = chat.ask("Hi")
    first = next(answer)
    answer.close()
    assert [each.content for each in chat.messages] == ["Hi", first]
    assert not chat.has_stopped
    stopped_at_once = Chat(opened, choose=lambda logits: min(opened.stop_ids), max_new_tokens=20)
    assert list(stopped_at_once.ask("Hi")) == stopped_at_once.messages == []
    assert stopped_at_once.has_stopped


def test_a_conversation_that_fills_the_model_is_refused_and_a_long_answer_ends_at_its_positions(
    opened: ChatModel,
) -> None:
    chat = Chat(opened, choose=lambda logits: 100, max_new_tokens=10_000)
    list(chat.ask("Hi"))
    assert not chat.has_stopped
    before = list(chat.messages)
    with pytest.raises(ValueError, match=r"tokens, and the model has room for 255 before an answer"):
        list(chat.ask("And now?"))
    assert chat.messages == before


def test_an_export_its_checkpoint_and_its_run_directory_give_the_same_answers(
    tmp_path: Path, finished: FinishedRun, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(finished.folder, tmp_path / "run", symlinks=True)
    (folder / "latest").unlink()
    (folder / "latest").symlink_to(folder / "hf" / "step-6")
    options = ["--max-new-tokens", "8", "--json", str(tmp_path / "chat.json")]
    chats: list[dict[str, Any]] = []
    for model in (folder / "latest", folder / "checkpoints" / "step-6", folder):
        assert generate.main(["--model", str(model), "--prompt", "What is 3?", *options]) == 0
        chats.append(json.loads((tmp_path / "chat.json").read_text()))
        assert capfd.readouterr().out == chats[-1]["messages"][1]["content"] + "\n"
    assert chats[0]["messages"] == chats[1]["messages"] == chats[2]["messages"]
    assert Path(chats[2]["model"]) == folder / "hf" / "step-6"
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is 3?\n"))
    assert generate.main(["--model", str(folder), *options]) == 0
    assert json.loads((tmp_path / "chat.json").read_text()) == chats[2]
    (folder / "latest").unlink()
    assert open_chat_model(folder, dtype=torch.float32).folder == folder / "checkpoints" / "step-6"
    with (folder / "checkpoints" / "step-6" / "model.safetensors").open("r+b") as file:
        file.seek(-4, 2)
        file.write(b"\1\2\3\4")
    capfd.readouterr()
    assert generate.main(["--model", str(folder), "--prompt", "Hi"]) == 2
    assert "does not have the manifest's sha256" in capfd.readouterr().err
    assert generate.main(["--model", str(tmp_path / "nothing"), "--prompt", "Hi"]) == 2
    assert "give an exported model, a checkpoint, or a run directory" in capfd.readouterr().err


def test_a_run_directory_in_place_of_a_model_is_refused_with_what_to_give_instead(
    tmp_path: Path, finished: FinishedRun, capfd: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(finished.folder, tmp_path / "run", symlinks=True)
    for read in (check_files, read_config):
        with pytest.raises(ValueError, match=re.escape(f"{run}: is a run directory; give its export {run}/latest, or")):
            read(run)
    for command, arguments in ((convert.main, [str(run), str(tmp_path / "x")]), (check.main, ["--model", str(run)])):
        assert command(arguments) == 2
        assert f"{run}: is a run directory; " in capfd.readouterr().err
    (run / "latest").unlink()
    shutil.rmtree(run / "checkpoints")
    assert generate.main(["--model", str(run), "--prompt", "Hi"]) == 2
    assert f"{run}: has saved no checkpoint and no export yet" in capfd.readouterr().err


def test_what_cannot_be_done_is_refused_in_a_line(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    model = ["--model", str(model_folder), "--max-new-tokens", "2"]
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    for prompt in (["--prompt", " "], []):
        assert generate.main([*model, *prompt]) == 2
        assert "generate: the question is empty" in capfd.readouterr().err
    assert generate.main([*model, "--prompt", "Hi", "--json", str(model_folder / "config.json" / "x")]) == 2
    assert "cannot be written: " in capfd.readouterr().err
    for option, value in (("--device", "cuda:99"), ("--device", "gpu")):
        with pytest.raises(SystemExit) as ended:
            generate.main([*model, "--prompt", "Hi", option, value])
        assert ended.value.code == 2
        assert f"argument {option}: torch " in capfd.readouterr().err
    for option, value in (("--top-p", "0"), ("--temperature", "-1"), ("--temperature", "nan")):
        assert generate.main([*model, "--prompt", "Hi", option, value]) == 2
        assert f"{option[2:].replace('-', '_')} is {float(value)}" in capfd.readouterr().err


def test_in_a_terminal_a_chat_goes_on_until_its_end_and_can_be_reset_and_stopped(
    opened: ChatModel, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    chat = Chat(opened, choose=most_likely, max_new_tokens=4)
    lines = iter(["Hi", "", "/reset", KeyboardInterrupt(), "And?", EOFError()])

    def read(_prompt: str) -> str:
        line = next(lines)
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr("builtins.input", read)
    generate.chat_until_end(chat)
    assert chat.messages[0].content == "And?"
    assert "conversation cleared" in capfd.readouterr().err

    def stopped(text: str) -> Any:
        yield from list(Chat.ask(chat, text))[:1]
        raise KeyboardInterrupt

    lines = iter(["Again", EOFError()])
    monkeypatch.setattr(chat, "ask", stopped)
    generate.chat_until_end(chat)
