"""What tools/record_served.py recorded of a server, replayed through `check --against vllm` without that server.

Neither vLLM nor SGLang runs where the tests do, and tests/assets/served holds no fixture before someone who runs one
records it. The other fixtures are recorded here, from the stand-in: a recording and its replay must find the same.
"""

import json
from functools import cache
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from examples.quickstart.prepare_model import gguf_file, load_tokenizer
from transformers import PreTrainedTokenizerBase

from sftron.commands import check
from sftron.data.chat.tokenizer import ChatTokenizer
from tests.checks.chat_server import Rendering, serve_prompts, serving
from tests.conftest import ASSETS
from tests.data.family_conversations import CONVERSATIONS
from tests.data.rows import write_jsonl
from tools import record_served

RECORDED = sorted((ASSETS / "served").glob("*.json"))
TEMPLATE = ASSETS / "templates" / "qwen3_like.jinja"
PLANTED = {
    "nothing": {},
    "JSON without spaces": {"json_options": {"separators": (",", ":")}},
    "a refusal": {"reply": {"error": "no"}, "status": 400},
}
CAUSES = {"nothing": set(), "JSON without spaces": {"json_spacing"}, "a refusal": {"refused"}}
ROWS = ("system", "a call", "thoughts and calls", "calls at once")


@cache
def smollm2() -> PreTrainedTokenizerBase:
    return load_tokenizer(gguf_file())


def folder_with(home: Path, template: str) -> Path:
    smollm2().save_pretrained(home)
    (home / "chat_template.jinja").write_text(template, encoding="utf-8")
    (home / "generation_config.json").write_text('{"eos_token_id": 2}')
    return home


def replayed(fixture: dict[str, Any]) -> type[BaseHTTPRequestHandler]:
    replies = {json.dumps([each["path"], each["body"]]): each for each in fixture["exchanges"]}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply(None)

        def do_POST(self) -> None:
            self.reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def reply(self, body: Any) -> None:
            exchange = replies.get(json.dumps([self.path, body]), {"status": 500, "reply": {"error": "not recorded"}})
            self.send_response(exchange["status"])
            self.end_headers()
            self.wfile.write(json.dumps(exchange["reply"]).encode())

        def log_message(self, *_: object) -> None:
            pass

    return Handler


def recorded(home: Path, planted: str, *more: str) -> Path:
    folder, file = (
        folder_with(home / "recorded", TEMPLATE.read_text(encoding="utf-8")),
        home / "served" / "fixture.json",
    )
    with serving(serve_prompts(Rendering(folder, **PLANTED[planted]))) as url:
        assert record_served.main([url, str(file), "--model", str(folder), *more]) == 0
    return file


def some_rows(file: Path) -> Path:
    rows = ({"messages": each.messages, "tools": each.tools or None} for each in CONVERSATIONS if each.name in ROWS)
    return write_jsonl(file, *rows)


@pytest.mark.parametrize("source", [*PLANTED, *RECORDED], ids=str)
def test_a_recorded_server_is_compared_as_when_it_ran(tmp_path: Path, source: str | Path) -> None:
    if isinstance(source, str):
        file = recorded(tmp_path, source, "--data", str(some_rows(tmp_path / "given.jsonl")))
    else:
        file = source
    fixture = json.loads(file.read_text(encoding="utf-8"))
    folder, rows, report = (
        folder_with(tmp_path / "model", fixture["chat_template"]),
        tmp_path / "r.jsonl",
        tmp_path / "o",
    )
    write_jsonl(rows, *fixture["rows"])
    with serving(replayed(fixture)) as url:
        options = ["--model", str(folder), "--data", str(rows), "--against", "vllm", url, "--json", str(report)]
        assert check.main(options) == bool(fixture["causes"])
    facts = json.loads(report.read_text(encoding="utf-8"))["facts"]
    assert facts["causes"] == fixture["causes"]
    if isinstance(source, str):
        assert facts["turns"] == 8
        assert set(facts["causes"]) == CAUSES[source]


def test_a_recording_holds_what_vllm_and_sglang_take(tmp_path: Path) -> None:
    """The names of TokenizeChatRequest in vLLM 0.33 and of TokenizeRequest in SGLang 0.5.23."""
    fixture = json.loads(recorded(tmp_path, "nothing").read_text(encoding="utf-8"))
    models, *asked = fixture["exchanges"]
    assert models == {"path": "/v1/models", "body": None, "status": 200, "reply": {"data": [{"id": "tiny"}]}}
    assert {each["path"] for each in asked} == {"/tokenize"}
    assert set().union(*(each["body"] for each in asked)) == {"model", "messages", "tools"}
    calls = [call for each in asked for message in each["body"]["messages"] for call in message.get("tool_calls", ())]
    assert calls
    assert {type(call["function"]["arguments"]) for call in calls} == {str}
    assert [file.name for file in (tmp_path / "served").iterdir()] == ["fixture.json"]


VLLM = {"model_config": {"generation_config": "auto", "model": "/home/me/model", "override_generation_config": {}}}


@pytest.mark.parametrize(
    ("replies", "about"),
    [
        ({"/version": {"version": "0.33.0"}}, {"version": "0.33.0"}),
        (
            {"/version": {"version": "0.33.0"}, "/server_info?config_format=json": {"vllm_config": VLLM}},
            {
                "version": "0.33.0",
                "vllm_config.model_config.generation_config": "auto",
                "vllm_config.model_config.override_generation_config": {},
            },
        ),
        (
            {"/server_info?config_format=json": {"version": "0.5.23", "sampling_defaults": "model", "api_key": "k"}},
            {"version": "0.5.23", "sampling_defaults": "model"},
        ),
    ],
    ids=["vllm", "vllm in development", "sglang"],
)
def test_a_recording_tells_the_version_and_the_sampling_defaults(
    tmp_path: Path, replies: dict[str, Any], about: dict[str, Any]
) -> None:
    replies = {"/v1/models": {"data": [{"id": "tiny"}]}, **replies}
    exchanges = [{"path": path, "body": None, "status": 200, "reply": reply} for path, reply in replies.items()]
    chat = ChatTokenizer.from_pretrained(folder_with(tmp_path / "model", TEMPLATE.read_text(encoding="utf-8")))
    with serving(replayed({"exchanges": exchanges})) as url:
        assert record_served.Recorder(url, chat, None, 10.0).about() == about


def test_a_template_with_todays_date_is_not_recorded(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "model", "{{ strftime_now('%Y') }}" + TEMPLATE.read_text(encoding="utf-8"))
    rows = record_served.write_conversations(tmp_path / "rows.jsonl")
    with pytest.raises(ValueError, match="writes today's date"):
        record_served.record("http://127.0.0.1:9", folder, rows)
