"""`sftron init` writes a configuration that a run accepts, with lengths and shares that are those of the data."""

import contextlib
import csv
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from sftron.__main__ import main
from sftron.config import load_config
from sftron.data.sources import open_source
from sftron.report.counts import LengthCount
from sftron.train.memory import with_reserve
from sftron.train.text import first_config
from tests.conftest import ROOT
from tests.train.runs import make_model_folder, write_rows

ANSWERS = ["It is one more than " + "that, which is one more than " * (n % 7) + f"{n}." for n in range(60)]
COLUMNS = {"renamed.csv": {"completion": "response"}, "upper.csv": {"prompt": "Prompt", "completion": "Completion "}}
PAIRS = [(f"What comes after {n}?", answer) for n, answer in enumerate(ANSWERS)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_model_folder(folder / "tiny", max_position_embeddings=4096)
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4}
    make_model_folder(folder / "wide", **sizes, num_key_value_heads=2)
    base = make_model_folder(folder / "base", max_position_embeddings=4096)
    for file in base.glob("*chat_template*"):
        file.unlink()
    settings = json.loads((base / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (base / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture
def home(models: Path, tmp_path: Path) -> Iterator[Path]:
    """The working directory, with the models in it."""
    (tmp_path / "models").symlink_to(models)
    with contextlib.chdir(tmp_path):
        yield tmp_path


def write_csv(path: Path, *columns: str) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([columns, *PAIRS])
    return path


def write_parquet(path: Path) -> Path:
    import pyarrow
    from pyarrow import parquet

    rows = [[{"from": "human", "value": question}, {"from": "gpt", "value": answer}] for question, answer in PAIRS]
    parquet.write_table(pyarrow.table({"conversations": rows, "id": [*range(len(rows))]}), path)
    return path


def write(name: str) -> Path:
    if name.endswith(".jsonl"):
        return write_rows(Path(name), 60)
    if name.endswith(".parquet"):
        return write_parquet(Path(name))
    renamed = COLUMNS.get(name, {})
    return write_csv(Path(name), *(renamed.get(column, column) for column in ("prompt", "completion")))


def dry_run(capfd: pytest.CaptureFixture[str]) -> str:
    capfd.readouterr()
    assert main(["train", "--config", "sft.yaml", "--dry-run"]) == 0
    return capfd.readouterr().out


@pytest.mark.parametrize(
    ("data", "name"),
    [
        ("bücherei.csv", "bucherei"),
        ("data/Café №1/*.jsonl", "my-run"),
        ("a b (1).csv", "a-b-1"),
    ],
)
def test_the_runs_name_is_that_of_the_file_in_letters_that_a_name_may_have(data: str, name: str) -> None:
    assert first_config._run_name(data) == name


@pytest.mark.parametrize(
    ("name", "model", "read_as"),
    [
        ("chats.jsonl", "models/tiny", "messages"),
        ("pairs.csv", "models/tiny", "prompt_completion"),
        ("turns.parquet", "models/tiny", "sharegpt"),
        ("renamed.csv", "models/base", 'prompt_completion, completion from column "response"'),
        (
            "upper.csv",
            "models/tiny",
            'prompt_completion, completion from column "Completion ", prompt from column "Prompt"',
        ),
    ],
)
def test_the_file_passes_a_dry_run_with_the_projection_that_it_states(
    home: Path, name: str, model: str, read_as: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", str(write(name)), model]) == 0
    looked = capfd.readouterr().out
    text = Path("sft.yaml").read_text(encoding="utf-8")
    config = load_config("sft.yaml")
    (dataset,) = config.data.datasets
    assert (dataset.path, config.model.path, config.general.run_name) == (name, model, name.partition(".")[0])
    assert dataset.columns == COLUMNS.get(name, {})
    assert config.tokenizer.chat_template == ("plain" if model == "models/base" else None)
    assert f"60 rows, read as {read_as}\n" in text
    checked = dry_run(capfd)
    assert f"read as {read_as}" in checked
    assert "making a training step on two batches of" in checked.partition("measured for this run")[0]
    for line in ("template", "projection", "memory"):
        (stated,) = re.findall(rf"^{line} .*", looked, re.MULTILINE)
        assert stated in checked
    (steps,) = re.findall(r"epochs, about (\d+) steps", checked)
    assert f"# Projected: about {steps} steps of" in text


def test_the_lengths_are_those_of_apply_chat_template(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["init", str(write("pairs.csv")), "models/tiny"]) == 0
    tokenizer = AutoTokenizer.from_pretrained("models/tiny")
    chats = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in PAIRS]
    lengths = sorted(len(tokenizer.apply_chat_template(chat, return_dict=False)) for chat in chats)
    stated = f"half have up to {lengths[29]:,} tokens, the longest {lengths[-1]:,}"
    assert f"100 % of the sampled rows fit 512 tokens; {stated}\n" in capfd.readouterr().out
    assert f"100 % fit; {stated}." in Path("sft.yaml").read_text(encoding="utf-8")


def test_adapters_are_suggested_where_only_they_fit(
    home: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    needed: dict[str, float] = {}

    def ways(setup: Any) -> Any:
        found = real(setup)
        needed.update({name: with_reserve(each.peak, on_gpu=False) for name, each in found.items()})
        return found

    real = first_config._memory_of_ways
    monkeypatch.setattr(first_config, "_memory_of_ways", ways)
    monkeypatch.setattr(first_config, "total_memory", lambda device: int((needed["full"] + needed["LoRA"]) / 2))
    assert main(["init", str(write("chats.jsonl")), "models/wide"]) == 0
    text = Path("sft.yaml").read_text(encoding="utf-8")
    assert load_config("sft.yaml").lora is None
    assert "A step that trains all weights does not fit" in text
    Path("sft.yaml").write_text(text.replace("# lora:", "lora:"), encoding="utf-8")
    assert "lora       rank 16, alpha 32 on" in dry_run(capfd)

    Path("sft.yaml").unlink()
    monkeypatch.setattr(first_config, "total_memory", lambda device: 2**20)
    assert main(["init", "chats.jsonl", "models/wide"]) == 0
    assert "Neither all weights nor adapters fit" in Path("sft.yaml").read_text(encoding="utf-8")


def test_a_streamed_base_is_suggested_where_only_it_fits(
    home: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    make_model_folder(Path("models/deep"), num_hidden_layers=12, intermediate_size=512)
    monkeypatch.setattr(first_config, "total_memory", lambda _: 1)
    ways = first_config._memory_of_ways

    def just_enough(setup: Any) -> Any:
        found = ways(setup)
        needed = with_reserve(found["LoRA, streamed"].peak, on_gpu=False)
        assert needed < with_reserve(found["LoRA"].peak, on_gpu=False)
        monkeypatch.setattr(first_config, "total_memory", lambda _: needed)
        return found

    monkeypatch.setattr(first_config, "_memory_of_ways", just_enough)
    assert main(["init", str(write("chats.jsonl")), "models/deep"]) == 0
    text = Path("sft.yaml").read_text(encoding="utf-8")
    assert "remove the # in front of lora and frozen_base, and" in text
    for key in ("lora:", "frozen_base:"):
        text = text.replace(f"# {key}", key)
    Path("sft.yaml").write_text(text, encoding="utf-8")
    assert load_config("sft.yaml").model.frozen_base == "stream"
    assert "reads" in dry_run(capfd)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.jsonl", "models/tiny"], "none.jsonl"),
        (["chats.jsonl", "models/tinny"], "models/tinny is not a local folder in {home}"),
        (
            ["chats.jsonl", "no/model"],
            "no/model is not a local folder in {home}, and it cannot be downloaded from the Hub",
        ),
        (["chats.jsonl", "chats.jsonl"], "chats.jsonl is a file, not a model folder; give DATA first, then MODEL"),
        (["chats.jsonl", "no_tokenizer"], "no_tokenizer has no tokenizer.json"),
        (["chats.jsonl", "models"], "config.json"),
        (["answers.csv", "models/tiny"], "set `columns: {prompt: a, completion: b}`, or if `b` is the user's"),
        (
            ["questions.jsonl", "models/tiny"],
            "20 of 20 rows were dropped (20 no_trained_token), more than",
        ),
        (["long.jsonl", "models/tiny"], "longer than the 4,096 positions of models/tiny; shorten"),
        (
            ["chats.jsonl", "models/tiny", "--out", "models"],
            "models is a folder; give a file in it: --out models/sft.yaml",
        ),
        (["chats.jsonl", "models/tiny", "--out", "taken.yaml"], "taken.yaml exists; remove it, or choose another"),
    ],
)
def test_what_cannot_be_trained_is_refused_and_nothing_is_written(
    home: Path, arguments: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    write("chats.jsonl")
    write_csv(Path("answers.csv"), "a", "b")
    question = json.dumps({"messages": [{"role": "user", "content": "Why?"}]})
    Path("questions.jsonl").write_text(f"{question}\n" * 20, encoding="utf-8")
    Path("long.jsonl").write_text(json.dumps({"prompt": "Count.", "completion": "1 2 3 " * 5000}), encoding="utf-8")
    Path("taken.yaml").write_text("mine", encoding="utf-8")
    (home / "no_tokenizer").mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(home / "models" / "tiny" / name, home / "no_tokenizer")
    before = sorted(home.iterdir())
    assert main(["init", *arguments]) == 2
    assert message.replace("{home}", str(home)) in capfd.readouterr().err
    assert sorted(home.iterdir()) == before
    assert Path("taken.yaml").read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize("name", ["my rows #1: 'new'.jsonl", "2024.jsonl", "-x.jsonl", "é\nbad: {.jsonl"])
def test_any_path_is_written_so_that_it_is_read_again(home: Path, name: str) -> None:
    write_rows(home / name, 8)
    assert main(["init", name, "models/tiny"] if name[0] != "-" else ["init", "--", name, "models/tiny"]) == 0
    assert load_config("sft.yaml").data.datasets[0].path == name


@given(
    lengths=st.lists(st.integers(2, 6000), min_size=20, max_size=400),
    positions=st.sampled_from([1024, 4096, 8192]),
    rows=st.integers(20, 10**7),
    on_gpu=st.booleans(),
)
def test_the_sizes_leave_at_most_one_row_in_a_hundred_out(
    lengths: list[int], positions: int, rows: int, on_gpu: bool
) -> None:
    num_beyond = sum(each > positions for each in lengths)
    if num_beyond > 0.05 * len(lengths):
        with pytest.raises(ValueError, match=r"shorten them, allow a larger share .*, or use a model with more"):
            first_config._sizes(LengthCount(lengths), rows, positions, "m", 0.05, on_gpu=on_gpu)
        return
    sizes = first_config._sizes(LengthCount(lengths), rows, positions, "m", 0.05, on_gpu=on_gpu)
    length, size = sizes["sequence_length"], sizes["micro_batch_size"]
    assert length <= positions
    assert length in (512, 1024) or length % 256 == 0
    if length < positions:
        assert sum(each > length for each in lengths) <= 0.01 * len(lengths)
        assert length == 512 or length < 2 * max(lengths)
    assert size == 1 or (on_gpu and length * size <= 8192)
    step = length * size * sizes["batch_accumulation_per_replica"]
    assert step <= max(2**17, length * size)


def test_the_quickstart_is_copied_as_it_is_and_overwrites_nothing(
    home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", "--quickstart"]) == 0
    copied = [file for folder in ("configs", "examples") for file in (home / folder).rglob("*") if file.is_file()]
    assert len(copied) >= 10
    assert home / "configs" / "recipes" / "llama-3.1-8b-full.yaml" in copied
    for file in copied:
        assert file.read_bytes() == (ROOT / file.relative_to(home)).read_bytes()
    for config in (home / "configs").glob("[!s]*.yaml"):
        for dataset in load_config(config).data.datasets:
            assert len(open_source(dataset.path, "train", 2**20)) > 10
    assert main(["init", "--quickstart"]) == 2
    assert "these exist already: configs/quickstart.yaml" in capfd.readouterr().err


def test_arguments_that_do_not_go_together_are_refused(capfd: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["my.csv"], ["my.csv", "model", "--quickstart"]):
        with pytest.raises(SystemExit, match="2"):
            main(["init", *arguments])
        assert "give DATA and MODEL, or --quickstart" in capfd.readouterr().err


def test_a_file_that_cannot_be_written_is_reported_before_the_data_is_read(
    home: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sftron.commands.init.os.access", lambda *_: False)
    assert main(["init", "none.jsonl", "models/tiny", "--out", "x.yaml"]) == 2
    message = "x.yaml cannot be written: Permission denied; choose another place with --out\n"
    assert capfd.readouterr().err == f"sftron init: {message}"


def test_a_run_of_a_few_steps_is_one_too(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["init", str(write("chats.jsonl")), "models/tiny"]) == 0
    text = Path("sft.yaml").read_text(encoding="utf-8")
    assert load_config("sft.yaml").optimizer.learning_rate == 1e-4
    assert "with lora, 1.0e-3\n" in text
    for steps in (1, 3):
        short = load_config("sft.yaml", [f"--tokens.train_steps={steps}"])
        assert (short.tokens.train_steps, short.optimizer.warmup_steps) == (steps, 0.05)


def test_keys_are_given_as_to_every_command_and_stand_in_the_file(
    home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also those that the file has anyway, those of sections that it does not have, and a whole list."""
    given = {
        "general.seed": 7,
        "model.attention": "sdpa",
        "tokenizer.chat_template": "chatml",
        "data.packing.pool_size": 64,
        "data.datasets.0.format": "messages",
        "data.datasets.0.weight": 2,
        "tokens.train_steps": 6,
        "tokens.sequence_length": 256,
        "optimizer.learning_rate": 0.00001,
        "optimizer.schedule": "linear",
        "evaluation.share": 0.1,
        "lora.rank": 4,
        "lora.targets": ["q_proj", "v_proj"],
        "checkpoints.export_hf": False,
    }
    overrides = [f"--{key}={json.dumps(value)}" for key, value in given.items()]
    assert main(["init", str(write("chats.jsonl")), "models/tiny", *overrides]) == 0
    config = load_config("sft.yaml")
    assert config == load_config("sft.yaml", overrides)
    assert (config.tokens.train_epochs, config.tokens.sequence_length) == (None, 256)
    assert config.evaluation.interval == 1
    assert "6 steps" in dry_run(capfd)


def test_the_line_that_a_remedy_names_is_given_to_init(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    call = {"type": "function", "function": {"name": "now", "arguments": {"zone": "UTC"}}}
    messages = [
        {"role": "user", "content": "What time is it?"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "12:00"},
        {"role": "assistant", "content": "Noon."},
    ]
    Path("tools.jsonl").write_text(f"{json.dumps({'messages': messages})}\n" * 20, encoding="utf-8")
    assert main(["init", "tools.jsonl", "models/tiny"]) == 2
    assert "(tokenizer.chat_template: hermes, or FILE)" in capfd.readouterr().err
    assert main(["init", "tools.jsonl", "models/tiny", "--tokenizer.chat_template=hermes"]) == 0
    assert "tokenizer:\n  chat_template: hermes\n" in Path("sft.yaml").read_text(encoding="utf-8")
    dry_run(capfd)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens.train_step=3"], "override --tokens.train_step=3: tokens.train_step: unknown key; did you mean"),
        (["--lora={rank: 0}"], "override --lora={rank: 0}: lora.rank: found 0"),
        (["--force"], "override --force: wanted --section.key=value"),
    ],
)
def test_a_wrong_key_is_refused_by_init_and_nothing_is_written(
    home: Path, arguments: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", str(write("chats.jsonl")), "models/tiny", *arguments]) == 2
    assert message in capfd.readouterr().err
    assert not Path("sft.yaml").exists()


def test_loss_png_has_about_ten_evaluations_on_the_way(home: Path) -> None:
    assert main(["init", str(write("chats.jsonl")), "models/tiny", "--tokens.train_steps=200"]) == 0
    assert load_config("sft.yaml").evaluation.interval == 20


def test_one_of_a_kind_is_in_the_singular_and_rows_that_are_repeated_are_counted(
    home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    one, *others = write("chats.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    Path("one.jsonl").write_text(one, encoding="utf-8")
    assert main(["init", "one.jsonl", "models/tiny", "--tokens.train_epochs=1"]) == 0
    assert main(["train", "--config", "sft.yaml"]) == 0
    assert main(["inspect", "--config", "sft.yaml"]) == 0
    assert main(["audit", "runs/one"]) == 0
    printed = capfd.readouterr().out
    assert "1 row in one lane" in printed
    assert "1 epoch is whole" in printed
    assert not re.findall(r"(?<!of )(?<![\d,.])1 (?:[a-z]+s)\b(?! of)", printed)
    assert "equal to an earlier one" not in printed

    Path("sft.yaml").unlink()
    Path("twice.jsonl").write_text("".join([one, *others[:3], one, one.replace("}]}", "} ] }"), one]), encoding="utf-8")
    assert main(["init", "twice.jsonl", "models/tiny", "--evaluation.share=0"]) == 0
    where = "the first: twice.jsonl:5 is twice.jsonl:1"
    assert f"WARNING    3 rows equal to an earlier one; {where}" in capfd.readouterr().out
    assert main(["inspect", "--config", "sft.yaml", "--json", "audit.json"]) == 0
    assert re.search(rf"rows equal to an earlier one +3; {where}\n", capfd.readouterr().out)
    assert json.loads(Path("audit.json").read_text())["rows"]["num_repeated"] == 3
