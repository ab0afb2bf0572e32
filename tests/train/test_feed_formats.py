"""A run reads each data set as its configuration says, and says on the console how it read it."""

import json
from pathlib import Path
from typing import Any

import pytest

from sftron.data.types import DataError, TokenizedConversation
from sftron.train import run_data
from sftron.train.description import describe_data
from sftron.train.sample import check_sample
from tests.train.runs import make_config


def config_for(
    tmp_path: Path, model_folder: Path, *datasets: tuple[list[dict], dict[str, Any]], **overrides: Any
) -> Any:
    options = []
    for number, (rows, keys) in enumerate(datasets):
        path = tmp_path / f"{number}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        options.append({"path": str(path), "name": f"set {number}", **keys})
    return make_config(tmp_path, model_folder, data__datasets=options, **overrides)


def ids_of(preparation: Any, row: int) -> list[int]:
    tokenized = preparation.tokenize(preparation.key(row))
    assert isinstance(tokenized, TokenizedConversation), tokenized
    return tokenized.input_ids.tolist()


def test_columns_prompt_template_and_reasoning_of_the_configuration_reach_the_conversations(
    tmp_path: Path, model_folder: Path
) -> None:
    def messages(question: str, answer: str) -> list[dict]:
        return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    problems = [{"problem": "1 + 1", "solution": "<think>easy</think>2"}]
    columns = {"columns": {"query": "problem", "response": "solution"}, "prompt_template": "What is {query}?"}
    config = config_for(tmp_path, model_folder, (problems, columns), data__reasoning="strip")
    preparation = run_data.open_data(config, run_data.load_chat_tokenizer(config))
    (tmp_path / "plain").mkdir()
    plain = config_for(tmp_path / "plain", model_folder, ([{"messages": messages("What is 1 + 1?", "2")}], {}))
    expected = run_data.open_data(plain, run_data.load_chat_tokenizer(plain))

    assert ids_of(preparation, 0) == ids_of(expected, 0)
    assert preparation.datasets[0].row_format.name == "query_response"
    assert preparation.fingerprint["data.reasoning"] == "strip"


def test_a_prompt_template_that_is_not_read_is_an_error_of_the_data_set(tmp_path: Path, model_folder: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": "q"}]}]
    config = config_for(tmp_path, model_folder, (rows, {"prompt_template": "cot"}))
    with pytest.raises(
        DataError, match=r"0\.jsonl: prompt_template: format messages does not read it, only query_resp"
    ):
        run_data.open_data(config, run_data.load_chat_tokenizer(config))


def test_rows_of_ids_are_counted_apart_and_give_their_stop_tokens_where_these_are_control_tokens(
    tmp_path: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chats = [{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], "id": 1}]
    config = config_for(tmp_path, model_folder, (chats, {}))
    chat_tokenizer = run_data.load_chat_tokenizer(config)
    tokenizer = chat_tokenizer.tokenizer
    word, end = tokenizer.encode("word")[0], tokenizer.convert_tokens_to_ids("<|im_end|>")
    ids = [
        {"input_ids": [word] * 5, "labels": [-100, word, word, -100, word]},
        {"input_ids": [word, word, end, word, word], "labels": [-100, word, end, -100, word], "note": "x"},
    ]
    config = config_for(tmp_path, model_folder, (ids, {}), (chats, {}))
    preparation = run_data.open_data(config, chat_tokenizer)
    sample = check_sample(preparation, max_dropped_share=0.0)

    assert (sample.num_pretokenized, sample.num_equal, sample.audit.num_kept) == (2, 1, 3)
    assert sample.stop_ids == (end,)
    assert sample.audit.turns.num_turns == 1
    describe_data(config, run_data.make_dataset(config, preparation), sample)
    printed = capsys.readouterr().out
    assert "data       set 0, read as input_ids; not read: note\n" in printed
    assert "data       set 1, read as messages; not read: id\n" in printed
    assert "1 of 1 sampled conversations have exactly the ids of apply_chat_template\n" in printed
    assert "1 of 1 assistant turns train their stop token, <|im_end|>\n" in printed
    assert "2 sampled rows are ready-made ids, taken as they are: their template and stop tokens cannot be" in printed

    only_words = run_data.open_data(config_for(tmp_path, model_folder, (ids[:1], {})), chat_tokenizer)
    assert check_sample(only_words, max_dropped_share=0.0).stop_ids == ()


def test_empty_answers_are_warned_of_with_the_first(
    tmp_path: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def warnings_of(*answers: str) -> list[str]:
        rows = [
            {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": text}]} for text in answers
        ]
        config = config_for(tmp_path, model_folder, (rows, {}))
        preparation = run_data.open_data(config, run_data.load_chat_tokenizer(config))
        sample = check_sample(preparation, max_dropped_share=0.0)
        describe_data(config, run_data.make_dataset(config, preparation), sample)
        return [line for line in capsys.readouterr().out.splitlines() if line.startswith("WARNING")]

    assert warnings_of("a", "b") == []
    (warning,) = warnings_of("a", "", "")
    assert "empty answers" in warning
    assert warning.endswith("among the sampled rows: 2, the first in row 1 of set 0")
