"""Readers of untrusted input keep their contracts on the corpus, its mutations, and what hypothesis finds."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz import targets

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(st.characters(), max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)
ROLES = st.sampled_from(["system", "developer", "user", "assistant", "tool", "human", "gpt", "function_call"])
COLUMNS = st.sampled_from(
    [
        *("messages", "conversations", "prompt", "completion", "query", "response", "instruction", "output", "history"),
        *("input_ids", "labels", "roles", "role_ids", "tools", "system", "attention_mask", "position_ids"),
    ]
)
CALLS = st.fixed_dictionaries({}, optional=dict.fromkeys(("function", "name", "arguments", "id", "type"), JSON))
TURN = {
    **dict.fromkeys(("role", "from"), ROLES | JSON),
    **dict.fromkeys(("content", "value"), st.text() | JSON),
    **dict.fromkeys(("weight", "reasoning_content"), JSON),
    "tool_calls": st.lists(CALLS, max_size=2) | JSON,
}
TURNS = st.lists(st.fixed_dictionaries({}, optional=TURN) | JSON, max_size=4)
CONTROL = [
    *("<|im_start|>", "<|im_end|>", "<s>", "</s>", "<unk>", "<think>", "</think>"),
    *("\U000f0000", "\U0010fffc", "\ud800"),
]
TEXT = st.lists(st.sampled_from(CONTROL) | st.text(max_size=8), max_size=6).map("".join)


@pytest.mark.parametrize("target", targets.TARGETS)
def test_no_input_of_the_corpus_breaks_a_contract(target: str) -> None:
    inputs = targets.corpus(target)
    assert inputs
    for data in inputs:
        targets.TARGETS[target](data)


@pytest.mark.parametrize("target", targets.TARGETS)
def test_no_mutation_breaks_a_contract(target: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    targets.run_randomly(target, targets.corpus(target), num_runs=100, seed=3)


@given(st.dictionaries(COLUMNS, TURNS | JSON, max_size=4) | JSON)
def test_any_json_is_a_conversation_or_an_error_with_its_place(value: Any) -> None:
    targets.row(json.dumps(value).encode())
    targets.row(json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass"))


@given(st.lists(TEXT, min_size=1, max_size=6))
def test_no_text_becomes_a_control_token(texts: list[str]) -> None:
    targets.encode("\n---\n".join(texts).encode("utf-8", "surrogatepass"))


@given(st.text(), st.lists(st.text(), max_size=3))
def test_any_yaml_is_a_configuration_or_a_list_of_problems(text: str, overrides: list[str]) -> None:
    data = "\n".join([text, "---", *overrides]).encode("utf-8", "surrogatepass")
    targets.config(data)


@given(st.text() | JSON.map(json.dumps), st.dictionaries(st.sampled_from(["step", "data"]), JSON) | JSON)
def test_a_manifest_or_state_that_is_none_is_told_and_never_trusted(manifest: str, state: Any) -> None:
    whole = targets.corpus("manifest")[-1].partition(b"\n---\n")[0]
    for text in (manifest.encode("utf-8", "surrogatepass"), whole):
        targets.manifest(text + b"\n---\n" + json.dumps(state).encode())


@given(st.text("0123456789abcdef:,.-_x", max_size=20))
def test_a_lanes_state_comes_back_as_it_was_or_is_refused(state: str) -> None:
    targets.lane_state(state.encode())
