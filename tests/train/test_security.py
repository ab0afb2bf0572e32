"""What SECURITY.md promises of untrusted folders and files, of secrets and of the network."""

import ast
import html
import io
import json
import os
import random
import shutil
import string
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from sftron.checkpoint.hf_weights import load_model
from sftron.checkpoint.model_folder import check_files, read_json
from sftron.checks.parity import read_prompts
from sftron.commands import audit, compare, inspect, train
from sftron.compare.grid import read_sweep_file
from sftron.config import ConfigError, load_config
from sftron.data.chat.template import ChatTemplate, TemplateError
from sftron.errors import exit_with, redacted, show_traceback
from sftron.models.architecture import LlamaConfig
from sftron.train.build_run import build_run
from sftron.train.logs import console
from sftron.train.ranks import start_ranks
from tests.conftest import ROOT
from tests.data.files import refusal_of, write, write_rows
from tests.train.runs import make_config, on_each_step, settings, write_config
from tests.train.runs import write_rows as write_chats

PASSWORD = "s3cret-pa55word"
HUB_TOKEN = "hf_" + "aB3" * 12


# --- Code ---


def test_no_module_can_unpickle() -> None:
    """Neither by name, nor through a library's loader that may: torch.load, numpy's allow_pickle, remote code."""
    loaders = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
    callers = {"torch.load", "dcp.load", "eval", "exec", "yaml.load", "yaml.unsafe_load"}
    found = []
    for path in [*(ROOT / "src").rglob("*.py"), *(ROOT / "tools").glob("*.py"), ROOT / "run_train.py"]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            is_bad = False
            if isinstance(node, ast.Import):
                is_bad = any(alias.name.split(".")[0] in loaders for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                is_bad = (node.module or "").split(".")[0] in loaders
            elif isinstance(node, ast.Call):
                called = ast.unparse(node.func) if isinstance(node.func, ast.Name | ast.Attribute) else ""
                asked = [each for each in node.keywords if each.arg in ("allow_pickle", "trust_remote_code")]
                keywords = {each.arg: ast.unparse(each.value) for each in asked}
                may_ask = called == "AutoTokenizer.from_pretrained" and "src" in path.parts
                is_bad = called in callers or keywords.get("allow_pickle") == "True"
                is_bad |= keywords.get("trust_remote_code", "None" if may_ask else "False") != "False"
            if is_bad:
                found.append(f"{path.name}: {ast.unparse(node)}")
    # report.script() runs the program that it has written, in which data are literals.
    assert found == ["program.py: exec(compile(text, '<script>', 'exec'), scope)"]


@pytest.mark.parametrize(
    ("tokenizer_config", "model_config"),
    [
        ({}, {}),
        ({"tokenizer_class": "Evil"}, {}),
        ({"tokenizer_class": None}, {"auto_map": {"AutoTokenizer": "evil.Evil", "AutoConfig": "evil.Evil"}}),
    ],
)
def test_code_in_a_model_folder_never_runs_not_even_when_somebody_would_say_yes(
    tmp_path: Path,
    model_folder: Path,
    tokenizer_config: dict[str, Any],
    model_config: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = shutil.copytree(model_folder, tmp_path / "model")
    marker = tmp_path / "it-ran"
    (folder / "evil.py").write_text(
        f"open({str(marker)!r}, 'w')\nfrom transformers import PreTrainedTokenizerFast\n"
        "class Evil(PreTrainedTokenizerFast): pass\n"
    )
    for name, changes in (
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}, **tokenizer_config}),
        ("config.json", model_config),
    ):
        content = json.loads((folder / name).read_text()) | changes
        (folder / name).write_text(json.dumps(content))
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 10))
    config = make_config(tmp_path, folder)
    try:
        build_run(config, start_ranks())
    except ValueError as error:
        assert str(folder) in str(error)  # noqa: PT017  refused or ignored: both are well
    assert not marker.exists()


# --- Chat templates ---

NESTED_LOOPS = "{% for a in messages %}" * 120 + "{% endfor %}" * 120
"""Python compiles no function of more than 20 blocks."""


@pytest.mark.parametrize("source", ["{{ 7 ** 99999 }}", "{{ " + "(" * 2000 + "1" + ")" * 2000 + " }}", NESTED_LOOPS])
def test_a_template_that_cannot_be_compiled_is_refused(source: str) -> None:
    with pytest.raises(TemplateError, match="the chat template"):
        ChatTemplate(source, {}).render([])


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ messages.append(1) }}",
        "{{ range(10 ** 9) | list }}",
        "{% include 'x' %}",
        "{% import 'os' as os %}{{ os }}",
    ],
)
def test_a_template_reaches_nothing_but_the_conversation(source: str) -> None:
    with pytest.raises((TemplateError, TypeError)):
        ChatTemplate(source, {}).render([{"role": "user", "content": "q"}])


# --- Files and names ---


def test_a_folder_with_a_file_larger_than_any_in_use_is_refused_before_it_is_read(
    tmp_path: Path, model_folder: Path
) -> None:
    check_files(model_folder)
    for name, size in (
        ("config.json", 2**30),
        ("tokenizer_config.json", 2**30),
        ("tokenizer.json", 2**31),
        ("chat_template.jinja", 2**21),
        ("model.safetensors.index.json", 2**30),
    ):
        folder = shutil.copytree(model_folder, tmp_path / name)
        with (folder / name).open("ab") as file:
            file.truncate(size)  # a hole, which takes no disk
        with pytest.raises(ValueError, match=rf"{name}: has {size:,} bytes, but such a file has at most"):
            check_files(folder)
        with pytest.raises(ValueError, match=name):
            build_run(make_config(tmp_path, folder), start_ranks())
    with pytest.raises(ValueError, match=r"config\.json: has 1,073,741,824 bytes, but such a file has at most"):
        read_json(tmp_path / "config.json/config.json")


def test_a_config_json_nested_without_end_and_sizes_beyond_any_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not valid JSON"):
        read_json(Path(write(tmp_path / "config.json", '{"a": ' + "[" * 100_000)))
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = {"model_type": "llama", **sizes, "vocab_size": 64}
    assert LlamaConfig.from_hf(config)
    for key in (*config, "max_position_embeddings", "head_dim"):
        if key != "model_type":
            with pytest.raises(ValueError, match=f"{key}: "):
                LlamaConfig.from_hf(config | {key: 10**12})


@pytest.mark.parametrize("name", ["LICENSE", "additional_chat_templates/x", "config.json", "model.safetensors"])
def test_no_link_out_of_a_model_folder_is_followed_and_the_hubs_cache_may_link(
    tmp_path: Path, model_folder: Path, name: str
) -> None:
    folder = shutil.copytree(model_folder, tmp_path / "models--a--b" / "snapshots" / "main")
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).unlink(missing_ok=True)
    secret = Path(write(tmp_path / "id_rsa", "PRIVATE"))
    (folder / name).symlink_to(secret)
    with pytest.raises(ValueError, match=rf"{name}: is a link to {secret}, outside the folder"):
        check_files(folder)
    (folder / name).unlink()
    (folder / name).symlink_to(write(tmp_path / "models--a--b" / "blobs" / "0a1b", "MIT"))
    check_files(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_whoever_reads_a_models_weights_follows_no_link_out_of_its_folder(
    tmp_path: Path, model_folder: Path, name: str
) -> None:
    """The tools read folders that no run has checked."""
    folder = shutil.copytree(model_folder, tmp_path / "model")
    (folder / name).rename(tmp_path / "moved")
    (folder / name).symlink_to("../moved")
    with pytest.raises(ValueError, match=rf"{name}: is a link to {tmp_path}/moved, outside the folder"):
        load_model(folder)
    (folder / name).unlink()
    (tmp_path / "moved").rename(folder / "moved")
    (folder / name).symlink_to("moved")
    load_model(folder)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path, model_folder: Path) -> None:
    os.mkfifo(tmp_path / "a.yaml")
    for read in (load_config, read_sweep_file, read_prompts):
        with pytest.raises(ValueError, match=r"a\.yaml: .*is not a regular file"):
            read(tmp_path / "a.yaml")
    folder = shutil.copytree(model_folder, tmp_path / "model")
    (folder / "generation_config.json").unlink()
    os.mkfifo(folder / "generation_config.json")
    with pytest.raises(ValueError, match=r"generation_config\.json: is not a regular file"):
        check_files(folder)


@pytest.mark.parametrize("name", ["../rows.arrow", "/etc/passwd", "a/b.arrow", "", "..", "a\0.arrow", None, 5])
def test_a_saved_data_set_names_no_file_outside_its_folder(tmp_path: Path, name: Any) -> None:
    write_rows(tmp_path / "rows.arrow", [{"n": 1}])
    state = {"_split": "train", "_data_files": [{"filename": name}]}
    write(tmp_path / "saved/state.json", json.dumps(state))
    message = str(refusal_of(tmp_path, str(tmp_path / "saved")))
    assert message.startswith("saved: ")


@pytest.mark.parametrize("name", ["../x", "a/b", "/x", "..", ".x", "a\\b", "a\n", "a\0"])
def test_a_run_name_stays_in_its_folder(tmp_path: Path, model_folder: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="wanted a plain name"):
        make_config(tmp_path, model_folder, general__run_name=name)


# --- YAML ---


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a: &a [x]\nb: &b [*a,*a]\nc: &c [*b,*b]\n", "only short single values can be aliased"),
        ("a: &a '" + "x" * 1001 + "'\nb: [" + "*a," * 9 + "]\n", "only short single values can be aliased"),
        ("a: " + "x" * 2**18, "has 262,147 bytes, but such a file has at most 262,144"),
        ("a: " + "[" * 10_000, "nested too deeply"),
        ("a: " + "9" * 10_000, "is not supported"),
        ("a: !!python/object/apply:os.system [id]", "is not supported"),
        ("a: !!binary aGk=", "is not supported"),
    ],
)
def test_no_yaml_unfolds_or_makes_objects(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(write(tmp_path / "a.yaml", content))


# --- Secrets ---


def _random(alphabet: str, length: int) -> str:
    return "".join(random.Random(f"{alphabet}{length}").choices(alphabet, k=length))


ALPHANUMERIC = string.ascii_letters + string.digits
JWT = ".".join(f"{start}{_random(ALPHANUMERIC + '-_', 40)}" for start in ("eyJ", "eyK", ""))
BY_FORM = {
    "user": "hf_" + _random(ALPHANUMERIC, 34),
    "organization": "api_org_" + _random(ALPHANUMERIC, 35),
    "OAuth": f"hf_oauth_{JWT}",
    "workload identity": f"hf_jwt_{JWT}",
}
"""Tokens of the Hub, which are secret wherever they come from."""
BY_VARIABLE = {
    "HF_TOKEN": "mirror-" + _random(ALPHANUMERIC, 20),
    "WANDB_API_KEY": _random("0123456789abcdef", 40),
    "AWS_SECRET_ACCESS_KEY": _random(ALPHANUMERIC + "/+", 40),
    "MLFLOW_TRACKING_PASSWORD": "p@ss wörd/\"'\\\t" + _random(string.punctuation, 9),
    "GITHUB_PAT": _random(ALPHANUMERIC + "_", 30),
    "OPENAI_APIKEY": _random(ALPHANUMERIC + "-", 30),
    "DEPLOY_KEY": f"--BEGIN KEY--\n{_random(ALPHANUMERIC + '/+', 64)}\n--END KEY--",
    "PGPASSWORD": _random(ALPHANUMERIC, 8) + "\n",
}
LOGGED_IN = {"hf": "enterprise-" + _random(ALPHANUMERIC, 12), "wandb": _random("0123456789abcdef", 39)}


@pytest.fixture
def secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Puts a secret of every form into the environment and into the files of logins; returns all of them."""
    for name, value in BY_VARIABLE.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("HF_TOKEN_PATH", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    write(tmp_path / "hf/token", LOGGED_IN["hf"] + "\n")
    monkeypatch.setenv("NETRC", write(tmp_path / "netrc", f"machine a\n login u\n  password {LOGGED_IN['wandb']}\n"))
    lines = [line for value in BY_VARIABLE.values() for line in value.splitlines()]
    return [*BY_FORM.values(), *lines, *LOGGED_IN.values()]


def test_a_secret_of_any_form_is_not_shown_in_any_place_and_the_text_around_it_is(
    secrets: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    places = ["{}", "/data/{}/rows.jsonl", "{}.jsonl:3", "GET https://host/a?key={}&b=1", "'{}'", "({}), and more"]
    places += ["Authorization: Bearer {}", "https://u:{}@host/x", '"{}":', "token={};", "a_{}", "a\n{}\nb"]
    for secret in secrets:
        for spelled in (secret, quote(secret), quote(secret, safe=""), json.dumps(secret)[1:-1], repr(secret)[1:-1]):
            for place in places:
                shown = redacted(place.format(spelled))
                assert secret not in shown
                assert spelled not in shown, (place, spelled)
                if place not in ("https://u:{}@host/x", "{}.jsonl:3"):
                    assert shown == place.format("***"), (place, spelled)
    assert redacted(f"https://me:{PASSWORD}@host/a?b, https://tok@host, {HUB_TOKEN}") == (
        "https://***@host/a?b, https://***@host, ***"
    )
    for password in ("a#b", "a/b", "a b", "p?a/s#s w", "#", "8080#a", "p@ss", "p:a:s", "ä/ö", "%2F/", "12345678/9"):
        for text in ("{}", "GET {}, failed", "url={}\nuser@host", '{{"url": "{}"}}', "see {} and https://other.org/x"):
            shown = redacted(text.format(f"https://me:{password}@host.org/a"))
            assert shown == text.format("https://***@host.org/a"), (password, text)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "a-longer-value")
    for url in (
        "https://host:8080: ask me@host",
        "http://host:80 by a@b",
        "https://host/a: b@c",
        "https://a.b/c?d=e:f@g",
    ):
        assert redacted(url) == url
    harmless = "a-longer-value, "
    harmless += "hf_hub_download of hf_internal/tiny, hf_oauth_ and a/hf/step-3, KEY, https://host:80/a@b, s@b.de, PATH"
    assert redacted(harmless) == harmless


def test_the_logged_in_token_is_read_where_huggingface_hub_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, (name, value, file) in enumerate(
        (
            ("HF_TOKEN_PATH", "$ROOT/own-file", "own-file"),
            ("HF_HOME", "$ROOT/home", "home/token"),
            ("XDG_CACHE_HOME", str(tmp_path), "huggingface/token"),
            ("HOME", str(tmp_path), ".cache/huggingface/token"),
        )
    ):
        token = f"a-token-of-{number}"
        write(tmp_path / file, token)
        with monkeypatch.context() as patch:
            for other in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH", "HF_HOME", "XDG_CACHE_HOME"):
                patch.delenv(other, raising=False)
            patch.setenv("ROOT", str(tmp_path))
            patch.setenv(name, value)
            command = [sys.executable, "-c", "from huggingface_hub import get_token; print(get_token())"]
            theirs = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
            assert theirs == token
            assert redacted(f"401 for {token}") == "401 for ***"
        assert redacted(f"401 for {token}") == f"401 for {token}"


def test_libraries_write_no_secret_to_standard_error(secrets: list[str], tmp_path: Path) -> None:
    """Warnings, logs, and tracebacks of threads and of the process."""
    script = """
import json, logging, pathlib, sys, threading, warnings
from sftron.errors import exit_with

def fail(text):
    raise OSError(text)

def main():
    texts = json.loads(pathlib.Path(sys.argv[1]).read_text())
    for text in texts:
        warnings.warn(f"warned of {text}")
        logging.warning("logged %s", text)
        print("printed", text, file=sys.stderr)
        thread = threading.Thread(target=fail, args=(text,))
        thread.start()
        thread.join()
    fail(texts)

exit_with(main)
"""
    texts = write(tmp_path / "texts.json", json.dumps(secrets))
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", script, texts], capture_output=True, text=True, env=environment)
    assert done.returncode == 1
    for words in ("warned of ***", "logged ***", "printed ***", "OSError: ***", "OSError: ['***', '***'"):
        assert words in done.stderr
    assert not [each for each in secrets if each in done.stderr + done.stdout]


def test_no_file_and_no_line_of_a_run_and_of_the_commands_on_it_has_a_secret(
    secrets: list[str], tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """Names of data files and of the model's folder hold secrets, rows are dropped by name, and an error quotes all."""
    names = [secret for secret in secrets if "/" not in secret and "\\" not in secret]
    for secret in names:
        write_chats((tmp_path / "data").mkdir(exist_ok=True) or tmp_path / f"data/{secret}.jsonl", 6)
        with (tmp_path / f"data/{secret}.jsonl").open("a") as file:
            file.write("no row\n")
    (tmp_path / BY_FORM["OAuth"]).symlink_to(model_folder)
    (tmp_path / "model").symlink_to(BY_FORM["OAuth"])
    questions = write(tmp_path / "q.jsonl", '{"messages": [{"role": "user", "content": "q"}]}\n')
    tree = settings(
        tmp_path,
        tmp_path / "model",
        data__datasets=[{"path": str(tmp_path / "data")}],
        data__on_bad_row="skip",
        data__max_dropped_share=0.5,
        tokens__train_steps=3,
        checkpoints__interval=2,
        evaluation__prompts=questions,
    )
    config = str(write_config(tmp_path / "a.yaml", tree))
    folder = tmp_path / "runs/run"
    reports = {name: str(tmp_path / "reports" / name) for name in ("i.html", "i.json", "a.json", "c.json")}

    def fail(step: int) -> None:
        if step == 3:  # the next start goes on counting
            raise OSError(f"the server refuses {secrets} and {' '.join(secrets)}")

    on_each_step(monkeypatch, fail)
    with pytest.raises(SystemExit):
        exit_with(lambda: train.run(["--config", config]))
    failed = (folder / "result.json").read_bytes()
    assert b"the server refuses ['***', " in failed
    assert train.run(["--config", config]) == 0
    pages = ["--html", reports["i.html"], "--json", reports["i.json"]]
    assert inspect.main(["--config", config, *pages]) == 0
    assert audit.main([str(folder), "--step", "2", "--json", reports["a.json"]]) == 0
    assert compare.main([str(folder), "--out", str(tmp_path / "reports"), "--json", reports["c.json"]]) == 0
    printed = capsys.readouterr()
    written = [path for part in ("runs", "reports") for path in (tmp_path / part).rglob("*") if path.is_file()]
    suffixes = {path.suffix for path in written}
    assert {".jsonl", ".json", ".html", ".yaml", ".md", ".log", ".safetensors"} <= suffixes, suffixes
    shown = {str(path): path.read_bytes() for path in written}
    shown |= {"stdout": printed.out.encode(), "stderr": printed.err.encode(), "the failure": failed}
    assert b"***.jsonl" in shown[str(folder / "samples.html")]
    assert b"***" in shown["stderr"]
    spelled = {secret: {secret, json.dumps(secret)[1:-1], html.escape(secret)} for secret in secrets}
    leaks = [(n, s) for n, text in shown.items() for s in secrets if any(e.encode() in text for e in spelled[s])]
    assert not leaks


@pytest.mark.parametrize("secret", [f"https://me:{PASSWORD}@host/data", HUB_TOKEN, PASSWORD])
@pytest.mark.parametrize("place", ["model.path", "model.SECRET", "tokens.train_steps", "an override"])
def test_a_configuration_that_holds_a_secret_is_refused_without_showing_it(
    tmp_path: Path, model_folder: Path, secret: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", PASSWORD)
    tree, overrides = settings(tmp_path, model_folder), [f"--model.path={secret}"]
    if place != "an override":
        section, key = place.split(".")
        tree[section][secret if key == "SECRET" else key] = secret
        overrides = []
    with pytest.raises(ConfigError) as caught:
        load_config(write_config(tmp_path / "a.yaml", tree), overrides)
    assert PASSWORD not in str(caught.value)
    assert HUB_TOKEN not in str(caught.value)
    assert "holds a password or a token, which would be written to logs" in str(caught.value) or "SECRET" in place


def test_neither_a_line_nor_a_traceback_shows_a_secret(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", PASSWORD)
    console.write(f"dropped    3 rows of {PASSWORD}")
    try:
        raise OSError(f"proxy https://me:{PASSWORD}@proxy:8080 gives 407")
    except OSError as error:
        show_traceback(error)
    said = capsys.readouterr()
    assert said.out == "dropped    3 rows of ***\n"
    assert said.err.endswith("OSError: proxy https://***@proxy:8080 gives 407\n")
    assert PASSWORD not in said.err


# --- The network ---

RUN_WITHOUT_NETWORK = """
import os, socket, sys

def refuse(*arguments, **_):
    print(f"the network was asked for {arguments[:2]}", file=sys.stderr, flush=True)
    os._exit(9)

socket.getaddrinfo = socket.gethostbyname = socket.create_connection = refuse
for name in ("connect", "connect_ex"):
    ours = getattr(socket.socket, name)
    setattr(socket.socket, name, lambda s, a, ours=ours: ours(s, a) if s.family == socket.AF_UNIX else refuse(a))
sys.argv = ["run_train.py", *sys.argv[1:]]
sys.path.insert(0, os.getcwd())
from sftron.commands.train import run as main
sys.exit(main(sys.argv[1:]))
"""


def test_a_whole_run_asks_nothing_of_the_network_and_shows_no_secret_of_the_environment(
    tmp_path: Path, model_folder: Path
) -> None:
    write_chats(tmp_path / "rows.jsonl")
    questions = write(tmp_path / "q.jsonl", '{"messages": [{"role": "user", "content": "q"}]}\n')
    tree = settings(tmp_path, model_folder, tokens__train_steps=3, data__num_workers=1, evaluation__prompts=questions)
    config = write_config(tmp_path / "a.yaml", tree)
    # No variable that keeps libraries offline: nothing but the configuration decides.
    inherited = {name: value for name, value in os.environ.items() if "OFFLINE" not in name}
    secrets = {"HF_TOKEN": HUB_TOKEN, "WANDB_API_KEY": PASSWORD}
    environment = {**inherited, **secrets, "PYTHONPATH": str(ROOT / "src"), "HF_HOME": str(tmp_path / "hf")}
    command = [sys.executable, "-c", RUN_WITHOUT_NETWORK, "--config", str(config)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert run.returncode == 0, run.stdout + run.stderr
    assert (tmp_path / "runs/run/hf/step-3/model.safetensors").is_file()
    written = [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    shown = [run.stdout.encode(), run.stderr.encode(), *(path.read_bytes() for path in written)]
    assert len(written) > 10
    assert not any(secret.encode() in each for secret in secrets.values() for each in shown)
