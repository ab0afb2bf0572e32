"""Each planted fault of a server is named by its kind, over templates and conversations, and sound servers pass.

The stand-in (chat_server.py) renders with an engine of its own. Its paths are written by hand after the documentation
of vLLM, llama-server and Ollama: no answer of theirs was recorded.
"""

import datetime
import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from sftron.checks import served_turns
from sftron.checks.report import Check, Report
from sftron.checks.served_causes import Cause
from sftron.checks.served_prompts import GgufTemplate, OllamaPrompts, VllmPrompts, open_prompts, openai_messages
from sftron.checks.served_turns import compare_turns, open_rows_to_serve
from sftron.commands import check
from sftron.data.chat.tokenizer import ChatTokenizer
from sftron.data.prepare import DataSet, Preparation
from sftron.data.sources import open_source
from sftron.data.types import Conversation
from tests.checks.chat_server import Rendering, serve_prompts, serving
from tests.data.family_conversations import CONVERSATIONS, SYSTEM, TOOLS, answer, call, calling, given, result, user
from tests.data.test_families import Family, load

FAMILIES = (
    *("chatml_like", "qwen3_like", "llama31_like", "mistral_like", "gpt_oss_like", "granite_like"),
    *("hunyuan_like", "qwen3_thinking_like", "zephyr_like", "smollm3_like"),
)
DATED = "{{ strftime_now('%d %B %Y') }}"
MORE = (
    given("two systems", SYSTEM, {"role": "system", "content": "Be brief."}, user("Who?"), answer("Pip.")),
    given("an inline thought", user("Who?"), answer("<think>\nThey ask.\n</think>\n\nPip.")),
    given(
        "a thought before a call",
        *(user("Weather?"), calling(call(city="Zürich", at="8 <b>"), reasoning_content="I need it."), result("2")),
        answer("It is 2."),
        needs="tools",
    ),
)


@dataclass
class Served:
    """The stand-in without HTTP."""

    rendering: Rendering
    name: str = "the stand-in"
    source: str = "its ids"
    stop_ids: set[int] | None = None

    def prompt_ids(self, conversation: Conversation) -> list[int] | None:
        try:
            text = self.rendering.text(openai_messages(conversation), [dict(tool) for tool in conversation.tools])
        except Exception:  # a template raises exceptions of any kind
            return None
        return self.rendering.ids(text)


def make_folder(folder: Path, name: str, prefix: str = "") -> Path:
    family = Family(name)
    tokenizer = load(family, "tokenizer")
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(prefix + family.source, encoding="utf-8")
    stops = [tokenizer.convert_tokens_to_ids(each) for each in family.words("stop")]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    return folder


@cache
def tokenizer_in(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


def served_by(folder: Path, **changes: Any) -> Served:
    return Served(Rendering(folder, tokenizer_in(folder), **changes))


def words_of(tokenizer: Any) -> list[str]:
    return sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)


def open_row(home: Path, folder: Path, *messages: dict[str, Any], **more: Any) -> Preparation:
    (home / "rows.jsonl").write_text(json.dumps({"messages": messages, "tools": TOOLS, **more}), encoding="utf-8")
    return open_rows_to_serve(home / "rows.jsonl", folder)


def write_gguf(gguf: Any, folder: Path, file: Path, template: Any, tokens: list[str] | None = None) -> Path:
    """Writes the vocabulary of a folder and a template, which may be several by name, to a GGUF file."""
    writer, tokenizer = gguf.GGUFWriter(file, "llama"), tokenizer_in(folder)
    writer.add_token_list(tokens or words_of(tokenizer))
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_chat_template(template)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return file


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Preparation]]:
    """Makes the folder of a template, and opens the conversations of which a sound server gives the trained prompts.

    The rest are refused, or rewritten by the template itself once more messages follow.
    """

    @cache
    def make(name: str, prefix: str = "") -> tuple[Path, Preparation]:
        home = tmp_path_factory.mktemp(name)
        folder, rows = make_folder(home / "model", name, prefix), home / "rows.jsonl"
        lines = [json.dumps({"messages": e.messages, "tools": e.tools or None}) for e in (*CONVERSATIONS, *MORE)]
        rows.write_text("\n".join(lines) + "\n", encoding="utf-8")
        prepared, served, kept = open_rows_to_serve(rows, folder), served_by(folder), []
        prepared.options = replace(prepared.options, on_bad_row="skip")
        for conversation, tokenized in served_turns._conversations(prepared):
            turns, ids = list(served_turns._trained_turns(prepared, tokenized)), tokenized.input_ids.tolist()
            prompts = [replace(conversation, messages=conversation.messages[: turn.message]) for turn in turns]
            if [served.prompt_ids(prompt) for prompt in prompts] == [ids[: turn.start] for turn in turns]:
                kept.append(lines[conversation.key.row])
        rows.write_text("\n".join(kept) + "\n", encoding="utf-8")
        source = open_source(str(rows))
        data = DataSet(source.name, source, prepared.datasets[0].row_format)
        return folder, Preparation([data], prepared.chat_tokenizer, prepared.options)

    return make


@pytest.fixture(autouse=True, scope="module")
def _read_once():
    before = served_turns._readers_of
    served_turns._readers_of = cache(before)
    yield
    served_turns._readers_of = before


def without_thought(message: dict[str, Any]) -> dict[str, Any]:
    message.pop("reasoning_content", None)
    content = message.get("content") or ""
    if message["role"] == "assistant" and "</think>" in content:
        message["content"] = content.split("</think>")[-1].lstrip("\n")
    return message


def with_default_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    has_system = messages[0]["role"] == "system"
    return messages if has_system else [{"role": "system", "content": "You are helpful."}, *messages]


def system_in_next(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As llama.cpp writes it for a template that leaves system messages out."""
    first, *rest = messages
    if first["role"] != "system" or not rest:
        return messages
    return [{**rest[0], "content": f"{first['content']}\n{rest[0]['content']}"}, *rest[1:]]


def go_struct(tools: list[Any]) -> list[Any]:
    """As Ollama has written tools: names without quotes in braces."""
    return [{"function": {"name": "{f " + t["function"]["name"] + "}", "parameters": "{object map[]}"}} for t in tools]


FAULTS: dict[str, tuple[Cause, dict[str, Any]]] = {
    "thoughts dropped": (Cause.HISTORY_WITHOUT_THOUGHTS, {"change_message": without_thought}),
    "no tools": (Cause.TOOL_SCHEMA, {"change_tools": lambda tools: []}),
    "bare tools": (Cause.TOOL_SCHEMA, {"change_tools": lambda tools: [t["function"] for t in tools]}),
    "go struct": (Cause.TOOL_SCHEMA, {"change_tools": go_struct}),
    "compact": (Cause.JSON_SPACING, {"json_options": {"separators": (",", ":")}}),
    "sorted": (Cause.KEY_ORDER, {"json_options": {"sort_keys": True}}),
    "ascii": (Cause.UNICODE_ESCAPES, {"json_options": {"ensure_ascii": True}}),
    "html": (
        Cause.UNICODE_ESCAPES,
        {"change_json": lambda text: "".join(f"\\u{ord(c):04x}" if c in "<>&'" else c for c in text)},
    ),
    "arguments as text": (Cause.ARGUMENTS, {"parses_arguments": False}),
    "no generation prompt": (Cause.GENERATION_PROMPT, {"variables": {"add_generation_prompt": False}}),
    "default system": (Cause.SYSTEM_PROMPT, {"change_messages": with_default_system}),
    "system in the next": (Cause.SYSTEM_PROMPT, {"change_messages": system_in_next}),
    "control as text": (Cause.SPECIAL_TOKENS, {"parses_special": False}),
    "another template": (Cause.TEMPLATE, {"template": "{% for m in messages %}{{ m.content }} ; {% endfor %}:"}),
}


def checks_of(folder: Path, prepared: Preparation, **changes: Any) -> dict[str, Check]:
    report = compare_turns(folder, prepared, served_by(folder, **changes))
    return {each.name: each for each in report.checks}


def named(folder: Path, prepared: Preparation, **changes: Any) -> dict[str, int]:
    """Returns the number of rows by cause."""
    report = compare_turns(folder, prepared, served_by(folder, **changes))
    assert report.checks[0].passed is not bool(report.facts["causes"])
    assert set(report.checks[0].faults) == set(report.facts["causes"])
    return {cause: rows for cause, (rows, _, _) in report.facts["causes"].items()}


@pytest.fixture(scope="module")
def planted(places) -> Callable[[str], dict[str, dict[str, int]]]:
    """Returns what each fault is named on the rows of a template: the number of rows by cause."""

    @cache
    def causes_of(name: str) -> dict[str, dict[str, int]]:
        folder, prepared = places(name)
        return {fault: named(folder, prepared, **changes) for fault, (_, changes) in FAULTS.items()}

    return causes_of


@pytest.mark.parametrize("name", FAMILIES)
def test_each_planted_fault_is_named_by_its_kind_and_a_sound_server_by_none(places, planted, name: str) -> None:
    """A template may refuse what a faulty server gives it, which is named as a refusal and not counted here."""
    folder, prepared = places(name)
    # In gpt-oss's template, one token ends a thought and an earlier answer, so no list of stops is right for both.
    unsound = {check.name for check in checks_of(folder, prepared).values() if not check.passed}
    assert unsound == ({"stops"} if name == "gpt_oss_like" else set())
    for fault, causes in planted(name).items():
        assert set(causes) <= {FAULTS[fault][0].name.lower(), "refused"}, fault


def test_every_fault_is_planted_and_at_least_two_hundred_in_all(planted) -> None:
    """Three templates are enough for it, should they not be of this process yet."""
    found = Counter[str]()
    for name in ("qwen3_like", "granite_like", "llama31_like"):
        for fault, causes in planted(name).items():
            found[fault] += causes.get(FAULTS[fault][0].name.lower(), 0)
    assert min(found[fault] for fault in FAULTS) > 0, found
    assert found.total() >= 200, found


@pytest.mark.parametrize("name", ["llama31_like", "mistral_like"])
def test_a_second_bos_and_a_missing_one_are_named(places, name: str) -> None:
    folder, prepared = places(name)
    for change in (lambda ids: [ids[0], *ids], lambda ids: ids[1:]):
        assert set(named(folder, prepared, change_ids=change)) == {"bos"}


@pytest.mark.parametrize("name", ["chatml_like", "qwen3_like", "zephyr_like"])
def test_the_date_is_named_whatever_it_is(places, name: str) -> None:
    folder, prepared = places(name, DATED)
    assert named(folder, prepared) == {}
    for day in (datetime.date(2024, 7, 26), datetime.date(1970, 1, 1)):
        assert set(named(folder, prepared, date=day)) == {"date"}


def test_a_date_of_training_is_named_where_today_is_served(places, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="the extra quickstart has it")
    folder, prepared = places("qwen3_like", DATED)
    chat = ChatTokenizer.from_pretrained(folder, date=datetime.date(2024, 7, 26))
    dated = Preparation(prepared.datasets, chat, prepared.options)
    assert set(named(folder, dated)) == {"date"}
    assert named(folder, dated, date=datetime.date(2024, 7, 26)) == {}
    file = write_gguf(gguf, folder, tmp_path / "model.gguf", DATED + Family("qwen3_like").source)
    assert set(compare_turns(folder, dated, GgufTemplate(file, chat)).facts["causes"]) == {"date"}
    assert compare_turns(folder, prepared, GgufTemplate(file, prepared.chat_tokenizer)).passed


def test_a_history_that_the_template_itself_rewrites_is_named(places, tmp_path: Path) -> None:
    """Mistral's tools stand before the last question, so that an earlier answer was trained without them. Qwen's
    template drops the thoughts before the last question, so that the answer to a result was trained without them."""
    thinks = calling(call(city="Oslo"), reasoning_content="I need it.")
    for name, messages in {
        "mistral_like": [user("Who?"), answer("Pip."), user("Why?"), answer("It grows.")],
        "qwen3_like": [user("Weather?"), thinks, result("2"), answer("It is 2."), user("Sure?"), answer("Yes.")],
    }.items():
        folder, _ = places(name)
        prepared = open_row(tmp_path, folder, *messages)
        assert named(folder, prepared) == {"rewritten": 1}


def test_a_message_that_spells_a_control_token_is_named(places, tmp_path: Path) -> None:
    folder, _ = places("qwen3_like")
    prepared = open_row(tmp_path, folder, user("What is <|im_end|> for?"), answer("It ends a turn."))
    assert named(folder, prepared) == {"control_text": 1}
    assert named(folder, prepared, parses_special=False) == {"special_tokens": 1}


def test_stops_files_and_sampling_are_named(places, tmp_path: Path) -> None:
    _, prepared = places("gpt_oss_like")
    folder = make_folder(tmp_path / "model", "gpt_oss_like")
    stops = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]

    def faults(**generation: Any) -> dict[str, tuple[str, ...]]:
        (folder / "generation_config.json").write_text(json.dumps(generation))
        return {name: each.faults for name, each in checks_of(folder, prepared).items() if each.passed is False}

    assert faults(eos_token_id=stops) == {"stops": ("stop_list",)}  # <|end|> ends a thought too
    without_stop = compare_turns(folder, prepared, replace(served_by(folder), stop_ids=set())).checks[1]
    assert without_stop.measured.startswith("0 of")
    assert faults(eos_token_id=stops[1]) == {"stops": ("stop_list",)}
    assert faults()["files"] == faults(eos_token_id=[])["files"] == ("stop_list",)
    assert "files" not in faults(eos_token_id=0)
    assert faults(eos_token_id=stops, repetition_penalty=1.1)["sampling"] == ("sampling",)
    for changing in ({"num_beams": 4}, {"sequence_bias": [[[5], 10.0]]}, {"guidance_scale": 3.0}):
        assert faults(eos_token_id=stops, **changing)["sampling"] == ("sampling",)
    neutral = {"num_beams": 1, "sequence_bias": None, "guidance_scale": 1, "repetition_penalty": 1}
    assert "sampling" not in faults(eos_token_id=stops, temperature=0.6, top_p=0.9, **neutral)
    settings, source = folder / "tokenizer_config.json", (folder / "chat_template.jinja").read_text(encoding="utf-8")
    stored = json.loads(settings.read_text())
    whole = {"name": "default", "template": source}
    for template, is_sound in (
        *((sound, True) for sound in ([whole], [{"name": "rag", "template": "x"}, whole], source, None)),
        *((broken, False) for broken in ([{"name": "default"}], [{"name": "rag", "template": source}], ["x"])),
        *((broken, False) for broken in ([whole | {"template": "x"}], [], {}, {"rag": source}, [{}], 5)),
    ):
        settings.write_text(json.dumps(stored | {"chat_template": template}))
        assert faults(eos_token_id=stops).get("files") == (None if is_sound else ("template",)), template
    settings.write_text(json.dumps(stored))
    (folder / "chat_template.jinja").write_text("{{ messages }}", encoding="utf-8")
    assert faults(eos_token_id=stops)["files"] == ("template",)


@pytest.mark.parametrize("kind", ["vllm", "llama-server", "ollama"])
def test_the_command_asks_a_server_by_its_own_paths(
    places, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    folder, prepared = places("qwen3_like")
    rows, out = prepared.datasets[0].source, tmp_path / "report.json"
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(json.dumps(rows[n]) for n in range(len(rows))) + "\n", encoding="utf-8")
    for changes, status, causes in (({}, 0, set()), (FAULTS["compact"][1], 1, {"json_spacing"})):
        with serving(serve_prompts(Rendering(folder, tokenizer_in(folder), **changes))) as url:
            options = ["--model", folder, "--against", kind, url, "--data", data, "--json", out]
            assert check.main([*map(str, options)]) == status
        assert set(json.loads(out.read_text())["facts"]["causes"]) == causes


@pytest.mark.parametrize(
    ("kind", "status", "reply", "message"),
    [
        ("vllm", 500, {"error": "no memory"}, "/tokenize: HTTP 500 (.*memory.*); look at its log. If only .*:1 fails"),
        ("ollama", 503, {}, "/api/chat: HTTP 503 .*; look at its log"),
        ("llama-server", 429, {}, "/apply-template: HTTP 429 .*; wait, or raise its limit"),
        ("llama-server", 405, {}, "/apply-template: HTTP 405 .*; correct the URL"),
        ("vllm", 200, {"tokens": []}, "/tokenize: the reply has no tokens for a prompt; check that"),
        ("llama-server", 200, {"prompt": None}, "/apply-template: None is not the text of a prompt; check that"),
        ("ollama", 200, {"_debug_info": {"rendered_template": ""}}, "/api/chat: '' is not the text of a prompt"),
    ],
)
def test_a_failure_of_the_server_is_not_blamed_on_the_rows(
    places, kind: str, status: int, reply: dict[str, Any], message: str, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    folder, _ = places("qwen3_like")
    open_row(tmp_path, folder, user("Who?"), answer("Pip."))
    rendering = Rendering(folder, tokenizer_in(folder), status=status, reply=reply)
    with serving(serve_prompts(rendering)) as url:
        options = ["--model", folder, "--against", kind, url, "--data", tmp_path / "rows.jsonl"]
        assert check.main([*map(str, options)]) == 2
    assert re.search(re.escape(url) + message, capsys.readouterr().err)


@pytest.mark.parametrize("status", [400, 422])
def test_a_conversation_that_the_server_refuses_is_named(places, status: int, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    folder, _ = places("qwen3_like")
    prepared = open_row(tmp_path, folder, user("Who?"), answer("Pip."))
    rendering = Rendering(folder, tokenizer_in(folder), status=status, reply={"error": "no"})
    with serving(serve_prompts(rendering)) as url:
        report = compare_turns(folder, prepared, VllmPrompts(url, prepared.chat_tokenizer, None, 60.0))
    assert set(report.facts["causes"]) == {"refused"}


@pytest.mark.parametrize("family", ["mistral_like", "qwen3_like"])
def test_the_bos_token_of_ollama_is_what_its_model_says(
    places, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ollama's text has no BOS token, or one that the template writes, to which it adds another."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    folder, _ = places(family)
    prepared, bos = open_row(tmp_path, folder, user("Who?"), answer("Pip.")), tokenizer_in(folder).bos_token_id
    template, writes_bos = Family(family).source, family == "mistral_like"
    plain = template.replace("{{ bos_token }}", "").replace("{{- bos_token }}", "")
    assert (plain != template) is writes_bos
    flag, name = "tokenizer.ggml.add_bos_token", {"tokenizer.ggml.model": "llama"}
    for text, info, is_sound in (
        (plain, {flag: True}, writes_bos),
        (plain, name, writes_bos),
        (plain, {flag: False}, not writes_bos),
        (plain, name | {flag: False}, not writes_bos),
        (plain, {}, not writes_bos),
        (template, {flag: False}, True),
        (template, {flag: True}, False),
    ):
        info = {"tokenizer.ggml.bos_token_id": bos, **info}
        rendering = Rendering(folder, tokenizer_in(folder), template=text, model_info=info)
        with serving(serve_prompts(rendering)) as url:
            report = compare_turns(folder, prepared, OllamaPrompts(url, prepared.chat_tokenizer, None, 60.0))
        assert set(report.facts["causes"]) == (set() if is_sound else {"bos"}), (text == plain, info)


def test_the_template_the_stops_and_the_vocabulary_of_a_gguf_file_are_compared(places, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="the extra quickstart has it")
    folder, prepared = places("qwen3_like")

    def report(template: str, **facts: Any) -> Report:
        file = write_gguf(gguf, folder, tmp_path / "model.gguf", template, **facts)
        return compare_turns(folder, prepared, GgufTemplate(file, prepared.chat_tokenizer))

    source, own = Family("qwen3_like").source, words_of(tokenizer_in(folder))
    assert report(source).passed
    assert set(report(source.replace("# Tools", "# Functions")).facts["causes"]) == {"tool_schema"}
    with pytest.raises(ValueError, match="in the folder; convert it again"):
        report(source, tokens=[*own[:20], "another", *own[21:]])


def test_a_gguf_file_is_rendered_with_the_variables_of_the_row(places, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="the extra quickstart has it")
    prefix = "{% if enable_thinking is defined and not enable_thinking %}Answer at once.{% endif %}"
    folder, _ = places("qwen3_like", prefix)
    prepared = open_row(tmp_path, folder, user("Who?"), answer("Pip."), chat_template_kwargs={"enable_thinking": False})
    source = Family("qwen3_like").source
    for template, causes in ((prefix + source, set()), (source, {"generation_prompt"})):
        file = write_gguf(gguf, folder, tmp_path / "model.gguf", template)
        report = compare_turns(folder, prepared, GgufTemplate(file, prepared.chat_tokenizer))
        assert set(report.facts["causes"]) == causes


def test_a_gguf_file_s_own_template_for_tools_renders_rows_with_tools(places, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="the extra quickstart has it")
    folder, source = make_folder(tmp_path / "model", "qwen3_like"), Family("qwen3_like").source
    default = "{% if tools %}{{ raise_exception('no tools') }}{% endif %}" + source
    (folder / "chat_template.jinja").write_text(default, encoding="utf-8")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text(source, encoding="utf-8")
    prepared = open_row(tmp_path, folder, user("Who?"), answer("Pip."))
    both = [{"name": "default", "template": default}, {"name": "tool_use", "template": source}]
    for templates, causes in ((both, set()), (default, {"refused"})):
        file = write_gguf(gguf, folder, tmp_path / "model.gguf", templates)
        report = compare_turns(folder, prepared, GgufTemplate(file, prepared.chat_tokenizer))
        assert set(report.facts["causes"]) == causes


def test_a_damaged_gguf_file_is_refused_by_its_name(places, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="the extra quickstart has it")
    folder, prepared = places("qwen3_like")
    file = write_gguf(gguf, folder, tmp_path / "model.gguf", Family("qwen3_like").source)
    whole = file.read_bytes()
    first_key = whole.index(b"general.architecture")
    for damaged in (
        *(whole[:length] for length in (0, 5, 20, 36, first_key + 10, len(whole) // 2)),
        whole[:first_key] + b"\xff" * 4 + whole[first_key + 4 :],
    ):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=f"{file} cannot be read .* convert or copy it again"):
            GgufTemplate(file, prepared.chat_tokenizer)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompts", "x.jsonl"], "remove --prompts: with --data, no answer is computed"),
        (["--dtype", "float16", "--max-new-tokens", "3"], "remove --max-new-tokens, --dtype: with --data"),
        (["--device", "cpu"], "remove --device: with --data"),
    ],
)
def test_options_of_answers_are_refused_with_rows(tmp_path: Path, options: list[str], message: str, capsys) -> None:
    against = ["--model", str(tmp_path), "--against", "ollama", "http://127.0.0.1:1"]
    for arguments, problem in (([*against, "--data", "x", *options], message), (against, "ollama only with --data")):
        with pytest.raises(SystemExit, match="2"):
            check.main(arguments)
        assert problem in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "command"),
    [("ollama", "ollama serve"), ("llama-server", "llama-server --model FILE"), ("vllm", "vllm serve FOLDER")],
)
def test_a_server_that_is_not_there_is_started_by_its_own_command(places, kind: str, command: str) -> None:
    _, prepared = places("qwen3_like")
    with pytest.raises(ValueError, match=f"no server answers .*; start it .`{command}`.,"):
        open_prompts(kind, "http://127.0.0.1:1", prepared.chat_tokenizer, None, 60.0)


@pytest.mark.parametrize("template", [5, [{"name": "default"}], ["x"], [{"name": "default", "template": 5}], []])
def test_a_folder_without_a_template_that_can_be_read_is_refused(tmp_path: Path, template: Any, capsys) -> None:
    folder = make_folder(tmp_path / "model", "qwen3_like")
    (folder / "chat_template.jinja").unlink()
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"messages": [user("Who?"), answer("Pip.")]}), encoding="utf-8")
    options = ["--model", folder, "--against", "vllm", "http://127.0.0.1:1", "--data", rows]
    assert check.main([*map(str, options)]) == 2
    assert re.search("must have one chat template, but has|check its .* tokenizer_config.json", capsys.readouterr().err)


def test_a_trained_tokenizer_that_the_export_does_not_hold_is_named(places, tmp_path: Path) -> None:
    _, prepared = places("qwen3_like")
    folder = make_folder(tmp_path / "model", "zephyr_like")
    found = checks_of(folder, prepared)
    assert found["tokenizer"].faults == ("special_tokens",)
    assert found["files"].passed is False
