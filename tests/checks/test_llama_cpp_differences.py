"""What llama.cpp's engine writes otherwise than transformers: a report of each, with its smallest program.

tests/assets/llama_cpp/NAME.jinja and NAME.json are the template, the messages and both texts. llama.cpp's is null if
the server does not start, and has the HTTP status if it refuses the conversation. A report that fails here is fixed in
llama.cpp: remove its files, and its row in README.md beside them.
"""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from tests.checks.llama_cpp import llama_server, write_gguf
from tests.conftest import ASSETS

REPORTS = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in (ASSETS / "llama_cpp").glob("*.json")}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("llama_cpp")
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "tokenizer")
    tokenizer.save_pretrained(home)
    (home / "chat_template.jinja").write_text("{{ messages[0].content }}")
    return write_gguf(home, home / "model.gguf")


def with_objects(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns messages in OpenAI's form as transformers takes them."""
    given = json.loads(json.dumps(messages))
    for call in (call for message in given for call in message.get("tool_calls", ())):
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return given


@pytest.mark.parametrize("name", sorted(REPORTS))
def test_llama_cpp_writes_otherwise_than_transformers(model: Path, name: str) -> None:
    report, file = REPORTS[name], ASSETS / "llama_cpp" / f"{name}.jinja"
    given, source = {"tools": report.get("tools")}, file.read_text(encoding="utf-8")
    (text,), _ = render_jinja_template([with_objects(report["messages"])], chat_template=source, **given)
    assert text == report["transformers"]
    if report["llama.cpp"] is None:
        with pytest.raises(AssertionError, match="Failed to init server"), llama_server(model, file):
            pass
        return
    with llama_server(model, file) as url:
        body = {"messages": report["messages"], **({"tools": report["tools"]} if "tools" in report else {})}
        reply = httpx.post(f"{url}/apply-template", json=body, timeout=60)
    there = reply.json()["prompt"] if reply.is_success else {"refused": reply.status_code}
    assert there == report["llama.cpp"] != report["transformers"]


def test_the_table_has_a_row_for_each_report() -> None:
    table = (ASSETS / "llama_cpp" / "README.md").read_text(encoding="utf-8").splitlines()
    assert sorted(row.split("`")[1] for row in table if row.startswith("| `")) == sorted(REPORTS)
