"""Records what a running vLLM or SGLang answers, for the tests to replay where neither can run.

    python tools/record_served.py http://localhost:8000 FIXTURE.json --model DIR [--data rows.jsonl]

Serve DIR, and give the server the template of DIR. Asks what `sftron check --against vllm` asks: /v1/models, and
/tokenize with the messages and tools before each trained turn; by default those of the tests' conversations. Also
records the server's version and its sampling defaults, which vLLM tells only with VLLM_SERVER_DEV_MODE=1.

tests/checks/test_recorded_servers.py replays each fixture in tests/assets/served, and must find the same causes. It has
SmolLM2's tokenizer, so record with models/SmolLM2-135M-Instruct, and as many templates as you like: `vllm serve DIR
--chat-template FILE`, and a copy of DIR with that template.
"""

import argparse
import json
import sys
import tempfile
from contextlib import suppress
from dataclasses import replace
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from sftron.checks.served_prompts import VllmPrompts
from sftron.checks.served_turns import _conversations, compare_turns, open_rows_to_serve
from sftron.checks.servers import RefusedError
from sftron.commands.arguments import refusing
from sftron.data.chat.tokenizer import ChatTokenizer
from sftron.errors import exit_with, show
from tests.checks.test_served_turns import MORE
from tests.data.family_conversations import CONVERSATIONS

ABOUT = {
    "/version": ("version",),  # vLLM
    "/server_info?config_format=json": (
        *("version", "sampling_defaults", "preferred_sampling_params"),  # SGLang
        *("vllm_config.model_config.generation_config", "vllm_config.model_config.override_generation_config"),
    ),
}
"""The paths that tell what serves, and the keys that are kept: others hold paths of the machine, and secrets."""


class Recorder(VllmPrompts):
    """Keeps every request with its reply."""

    def __init__(self, url: str, chat: ChatTokenizer, model: str | None, timeout: float) -> None:
        self.exchanges: list[dict[str, Any]] = []
        super().__init__(url, chat, model, timeout)

    def _request(self, path: str, body: dict[str, Any] | None = None) -> Any:
        exchange = {"path": path, "body": body, "status": 200}
        try:
            exchange["reply"] = super()._request(path, body)
        except RefusedError as error:
            exchange |= {"status": error.status, "reply": {"error": str(error)}}
            raise
        finally:
            self.exchanges.append(exchange)
        return exchange["reply"]

    def about(self) -> dict[str, Any]:
        found = dict[str, Any]()
        for path, keys in ABOUT.items():
            try:
                reply = super()._request(path)
            except ValueError:  # it has no such path
                continue
            for key in keys:
                with suppress(KeyError, TypeError):
                    found[key] = reduce(getitem, key.split("."), reply)
        return found


def record(url: str, folder: Path, data: Path, model: str | None = None, timeout: float = 120.0) -> dict[str, Any]:
    """Compares the trained prompts of `data` with the server's. Returns all that a replay needs.

    Raises ValueError, also for a template that writes today's date, which would be another one in the replay.
    """
    prepared = open_rows_to_serve(data, folder)
    prepared.options = replace(prepared.options, on_bad_row="skip")
    template = prepared.chat_tokenizer.template
    if template.date is not None:
        raise ValueError(f"the template in {folder} writes today's date; record another one")
    recorder = Recorder(url, prepared.chat_tokenizer, model, timeout)
    report = compare_turns(folder, prepared, recorder)
    lines = data.read_text(encoding="utf-8").splitlines()
    return {
        "about": recorder.about(),
        "chat_template": template.source,
        "rows": [json.loads(lines[each.key.row]) for each, _ in _conversations(prepared)],  # those that can be trained
        "causes": report.facts["causes"],
        "exchanges": recorder.exchanges,
    }


def write_conversations(file: Path) -> Path:
    rows = [{"messages": each.messages, "tools": each.tools or None} for each in (*CONVERSATIONS, *MORE)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


@refusing(ValueError, OSError, tool="record_served")
def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("fixture", type=Path)
    parser.add_argument("--model", type=Path, required=True, help="the folder that is served")
    parser.add_argument("--data", type=Path, help="rows of messages (JSON lines)")
    parser.add_argument("--served-model", help="its name there, if the server has several")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        data = options.data or write_conversations(Path(folder) / "rows.jsonl")
        fixture = record(options.url, options.model, data, options.served_model)
    options.fixture.parent.mkdir(parents=True, exist_ok=True)
    options.fixture.write_text(json.dumps(fixture, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    show(f"{options.fixture}: {len(fixture['exchanges'])} answers, causes {fixture['causes'] or 'none'}")
    return 0


if __name__ == "__main__":
    exit_with(lambda: main(sys.argv[1:]))
