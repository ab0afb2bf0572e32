"""What is wrong with a broken configuration, and what a good one means."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from sftron.compare.recorded_run import flat_config
from sftron.config import Config, ConfigError, describe_config, dump_config, load_config
from sftron.config.data_schema import Dataset, Rows
from sftron.config.help import _all_keys, keys_of, locate, section_in, suggest_key
from sftron.config.plain_yaml import variable_problem
from sftron.config.replacements import OTHER_TRAINERS, REMOVED, VALUES_OF_OTHERS
from sftron.config.schema import General, Lora
from sftron.config.values import Section
from tests.conftest import ROOT

PATH_KEYS = ("path", "output_dir", "chat_template", "adapter", "prompts", "resume")
GOOD = """\
general:
  run_name: demo
model:
  path: models/tiny
data:
  datasets:
    - path: chats.jsonl
tokens:
  sequence_length: 128
  train_steps: 100
optimizer:
  learning_rate: 1e-5
"""


def load(tmp_path: Path, text: str, *overrides: str) -> Config:
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return load_config(path, overrides)


def problems_of(tmp_path: Path, text: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, *overrides)
    return [problem.replace(f"{tmp_path}/", "") for problem in caught.value.problems]


def test_a_minimal_file_loads_and_everything_else_has_its_default(tmp_path):
    config = load(tmp_path, GOOD)
    assert config.optimizer.learning_rate == 1e-5
    assert config.data.datasets == (Dataset(path="chats.jsonl"),)
    assert config.optimizer.betas == (0.9, 0.95)
    assert config.checkpoints.resume == "auto"
    assert config.tokenizer_path == "models/tiny"
    assert config.run_dir == Path("runs/demo")


LR, STEPS, MODEL, ROWS = "learning_rate: 1e-5", "train_steps: 100", "path: models/tiny", "- path: chats.jsonl"
TOP = "model:"

# What replaces what in the good file, the line and the key of the problem, and words of its reason.
BROKEN: list[tuple[str, str, str, str]] = [
    (LR, f"{LR}\n  warmup_step: 3", ":13: optimizer.warmup_step", "did you mean warmup_steps?"),
    (STEPS, f"{STEPS}\n  chat_templat: x", ":11: tokens.chat_templat", "did you mean tokenizer.chat_template?"),
    (MODEL, f"{MODEL}\n  zzz: 1", ":5: model.zzz", "the keys here are path, revision"),
    (TOP, "expert: 1\nmodel:", ":3: expert", "the keys here are general,"),
    (TOP, "lora: {r: 8}\nmodel:", ":3: lora.r", "write lora.rank"),
    ("optimizer:", "data.num_workers: 2\noptimizer:", ":11: data.num_workers", "write data.num_workers nested"),
    (ROWS, f"{ROWS}\n    - path: b.jsonl\n      slpit: x", ":9: data.datasets.1.slpit", "did you mean split?"),
    ("  sequence_length: 128\n", "", ":8: tokens.sequence_length", "missing; wanted a whole number above 1"),
    # Values of another type or range.
    ("1e-5", '"1e-5"', ":12: optimizer.learning_rate", 'found "1e-5" (text); wanted a number above 0'),
    ("demo", "7", ":2: general.run_name", "found 7 (a whole number); wanted a plain name"),
    ("demo", "a/b", ":2: general.run_name", "wanted a plain name"),
    ("demo", "demo\n  deterministic: yes", ":3: general.deterministic", "wanted true or false"),
    ("128", "128.0", ":9: tokens.sequence_length", "found 128.0 (a number)"),
    (MODEL, f"{MODEL}\n  attention: eager", ":5: model.attention", "wanted auto, sdpa, varlen"),
    (STEPS, f"{STEPS}\ncheckpoints:\n  resume: 3", ":12: checkpoints.resume", "wanted auto, never or the path"),
    (TOP, "checkpoints: {interval: often}\nmodel:", ":3: checkpoints.interval", "wanted auto or a whole number"),
    ("1e-5", "1e999", ":12: optimizer.learning_rate", "found Infinity"),
    (LR, f"{LR}\n  betas: [0.9, 1.0]", ":13: optimizer.betas", "below 1"),
    (f"\n    {ROWS}", " []", ":6: data.datasets", "wanted a list of at least one"),
    (ROWS, "- chats.jsonl", ":7: data.datasets.0", "wanted a mapping with the keys path, name"),
    (ROWS, "path: chats.jsonl", ":6: data.datasets", "wanted a list of at least one"),
    (f"optimizer:\n  {LR}", "optimizer: adam", ":11: optimizer", "write optimizer.name"),
    (TOP, "lora: true\nmodel:", ":3: lora", "found true; wanted a mapping"),
    (TOP, "tokenizer: {document_end: ''}\nmodel:", ":3: tokenizer.document_end", "wanted the text of a control token"),
    (TOP, "lora:\n  # rank: 8\nmodel:", ":3: lora", "is empty; write {} for its defaults"),
    (TOP, "lora: {rank: 0}\nmodel:", ":3: lora.rank", "wanted a whole number from 1"),
    (TOP, "lora: {alpha: 1e308}\nmodel:", ":3: lora.alpha", "wanted a number above 0, below 3e38"),
    ("1e-5", "1e300", ":12: optimizer.learning_rate", "wanted a number above 0, below 3e38"),
    (LR, f"{LR}\n  weight_decay: 1e300", ":13: optimizer.weight_decay", "wanted a number from 0, below 3e38"),
    (LR, f"{LR}\n  max_grad_norm: 1e39", ":13: optimizer.max_grad_norm", "wanted a number above 0, below 3e38"),
    ("demo", "d" * 300, ":2: general.run_name", "wanted a plain name (up to 200 letters"),
    (TOP, "lora: {dropout: 0.05}\nmodel:", ":3: lora.dropout", "only 0 is supported"),
    (TOP, "lora: {targets: []}\nmodel:", ":3: lora.targets", "wanted all-linear"),
    (TOP, "lora: {targets: (q}\nmodel:", ":3: lora.targets", "is not a regular expression"),
    (TOP, "lora: {modules_to_save: [wte]}\nmodel:", ":3: lora.modules_to_save", "wanted a list of embed_tokens"),
    (LR, f"{LR}\n  warmup_steps: 1.5", ":13: optimizer.warmup_steps", "wanted a whole number of"),
    # What is not YAML, or more than plain values.
    (LR, f"{LR}\n  learning_rate: 2e-5", ":13: optimizer.learning_rate", "given twice, first on line 12"),
    ("optimizer:", "evaluation: &a {}\ncheckpoints: *a\noptimizer:", ":12: is not YAML", "only short single values"),
    ("1e-5", "!!python/object/apply:os.getcwd []", ":12: is not YAML", "is not supported"),
    ("1e-5", "[1e-5", ":13: is not YAML", "expected ',' or ']'"),
    (
        MODEL,
        f"{MODEL}\n   loss: native",
        ":5: is not YAML",
        "column 4, 'loss': YAML reads it as part of the value",
    ),
    (MODEL, f"{MODEL}\n loss: native", ":5: is not YAML", "column 2, 'loss': its indentation matches no key above;"),
    (MODEL, f"{MODEL}\n\tloss: native", ":5: is not YAML", "column 2, 'loss': a tab; indent with spaces"),
    (MODEL, "path: a: b", ":4: is not YAML", "column 9, 'a': mapping values are not allowed here; put quotes around"),
    # One item where a list is wanted.
    (
        ROWS,
        "path: chats.jsonl",
        ":6: data.datasets",
        "write a dash and a space before the first key",
    ),
    (LR, f"{LR}\n  betas: 0.9, 0.95", ":13: optimizer.betas", "write [0.9, 0.95]"),
    ("demo", "de\x07mo", ":2: is not YAML", "the character 7"),
    ("1e-5", "[" * 5000, ":1: is not YAML", "nested too deeply"),
]


@pytest.mark.parametrize(("old", "new", "place", "reason"), BROKEN)
def test_a_broken_file_is_reported_by_line_key_and_remedy(tmp_path, old, new, place, reason):
    text = GOOD.replace(old, new, 1)
    assert text != GOOD
    (problem,) = problems_of(tmp_path, text)
    assert problem.startswith(f"run.yaml{place}: ")
    assert reason in problem


@pytest.mark.parametrize(
    "line",
    [
        "-" * 80_000,
        f"{'-' * 80_000} a: b",
        "a" * 80_000,
        ":" * 80_000,
        " -" * 400,
        "--:" * 30_000,
        "é-" * 40_000,
        "-\t" * 900,
    ],
    ids=lambda line: f"{line[:4]} {line[-4:]}",
)
def test_a_long_line_that_is_not_yaml_is_reported_at_once_and_in_short(tmp_path, line):
    before = time.process_time()
    found = problems_of(tmp_path, GOOD.replace(LR, f"{LR}\n  {line}: b: c: ["))
    assert found
    assert all(len(problem) < 1000 for problem in found)
    assert time.process_time() - before < 20, "hours, where the time is of the cube of the line"


# Overrides of the good file, and the keys that then contradict each other.
CONTRADICTIONS: list[tuple[str, ...]] = [
    ("model.frozen_dtype=nf4", "model.frozen_dtype"),
    ("tokenizer.add_tokens=[<x>] lora={modules_to_save:[lm_head]}", "tokenizer.add_tokens"),
    ("lora={adapter:a,init:gaussian}", "lora.init"),
    ("tokens={sequence_length:8,train_steps:1,train_epochs:2}", "tokens.train_steps"),
    ("tokens.train_steps=null", "tokens.train_steps"),
    ("tokens.micro_batch_size=1000000000000", "tokens.micro_batch_size"),
    ("optimizer.warmup_steps=100", "optimizer.warmup_steps"),
    ("optimizer.decay_share=0.1", "optimizer.decay_share"),
    ("optimizer.schedule=constant optimizer.min_learning_rate_ratio=0.1", "optimizer.min_learning_rate_ratio"),
    ("data.datasets=[{path:a,weight:0.5},{path:b}]", "data.datasets"),
    ("data.datasets=[{path:a},{path:b,streaming:true}]", "data.datasets"),
    ("tokens.train_epochs=2 data.datasets.0.weight=1", "tokens.train_epochs"),
    (
        "tokens.train_epochs=2 data.datasets.0.streaming=true evaluation.share=.1",
        "tokens.train_epochs",
        "evaluation.share",
    ),
    ("data.packing={strategy:none,pool_size:8}", "data.packing.pool_size"),
    ("evaluation.interval=5", "evaluation.interval"),
    ("evaluation.patience=2", "evaluation.patience"),
    ("evaluation={share:.1,patience:2}", "evaluation.patience"),
    ("evaluation.metric=a", "evaluation.metric"),
    ("evaluation.tokens_per_batch=64", "evaluation.tokens_per_batch"),
    ("checkpoints.keep_best=a/loss", "checkpoints.keep_best"),
    ("checkpoints={export_hf:false,export_interval:3}", "checkpoints.export_interval"),
    ("checkpoints.load=weights", "checkpoints.load"),
    ("hub.private=false hub.every=exports", "hub.private", "hub.every"),
    ("hub.push_to=a/b checkpoints.export_hf=false", "hub.push_to"),
    ("hub={push_to:a/b,every:3} checkpoints.export_interval=2", "hub.every"),
    ("logging.to=[mlflow,mlflow]", "logging.to"),
    ("logging.to=[wandb]", "logging.wandb.project"),
    ("logging.to=[wandb] logging.wandb.mode=disabled", "logging.wandb.mode"),
    ("logging.wandb.mode=online", "logging.wandb.project"),
]


@pytest.mark.parametrize(("overrides", "keys"), [(words, keys) for words, *keys in CONTRADICTIONS])
def test_values_that_contradict_each_other_are_refused_at_their_key(tmp_path, overrides, keys):
    found = problems_of(tmp_path, GOOD, *(f"--{word.replace(':', ': ')}" for word in overrides.split()))
    assert sorted(re.findall(r": ([a-z_]+\.[a-z_.]+): ", problem)[0] for problem in found) == sorted(keys), found


def test_a_key_or_a_value_that_was_removed_is_refused_with_what_to_write_instead(tmp_path, monkeypatch):
    monkeypatch.setitem(REMOVED, "tokens.lenght", "write tokens.sequence_length")
    monkeypatch.setitem(REMOVED, "model.attention=eager", "write sdpa")
    found = problems_of(tmp_path, GOOD, "--tokens.lenght=1", "--model.attention=eager")
    assert found[0].endswith("tokens.lenght: unknown key; it was removed: write tokens.sequence_length")
    assert found[1].endswith("model.attention: eager was removed: write sdpa")


def test_all_problems_of_a_file_and_its_overrides_are_reported_together_in_order(tmp_path):
    text = GOOD.replace("  train_steps: 100", "  train_steps: 100\n  train_epochs: 2").replace(
        "1e-5", "1e-5\n  nope: 1"
    )
    problems = problems_of(tmp_path, text, "--model.compile=maybe", "--general.seed=-1", "--evaluation.interval=5")
    assert [re.split(r": (?=[a-z_]+\.)", problem)[0] for problem in problems] == [
        "run.yaml:10",  # a contradiction, although other sections are invalid
        "run.yaml:14",
        "override --model.compile=maybe",
        "override --general.seed=-1",
        "override --evaluation.interval=5",
    ]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "run.yaml: is empty; wanted a mapping with the keys general, model"),
        (b"# nothing\n", "run.yaml: is empty; wanted"),
        (b"- a\n- b\n", 'run.yaml: found ["a", "b"] (a list); wanted a mapping'),
        (b"general:\n  run_name: \xff\n", "run.yaml: byte 21 is not UTF-8; save the file as UTF-8"),
        (None, "run.yaml: cannot be read: No such file or directory"),
    ],
)
def test_a_file_without_sections_is_refused(tmp_path, content, expected):
    path = tmp_path / "run.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    [problem] = caught.value.problems
    assert problem.replace(f"{tmp_path}/", "").startswith(expected)


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("  datasets:", "\u00a0 datasets:", 6),
        ("    - path", "    -\u00a0path", 7),
        ("sequence_length: 128", "sequence_length:\u00a0128", 9),
        ("train_steps: 100", "train_steps:\u202f100", 10),
        ("path: chats.jsonl", "path: chats.jsonl\u3000", 7),
        ("optimizer:\n", "optimizer:\u2003\n", 11),
        ("learning_rate: 1e-5", "\u00a0learning_rate: 1e-5", 12),
    ],
)
def test_a_space_that_yaml_takes_for_a_letter_is_named_with_its_line(tmp_path, old, new, line):
    assert old in GOOD
    (problem,) = problems_of(tmp_path, GOOD.replace(old, new))
    assert problem.startswith(f"run.yaml:{line}: is not YAML: ")
    code = next(ord(each) for each in new if ord(each) > 127)
    assert f"(U+{code:04X}); replace it with an ordinary space" in problem


def test_a_text_may_have_special_spaces(tmp_path):
    text = GOOD.replace("chats.jsonl", 'chats.jsonl\n      prompt_template: "Frage\u00a0:\u00a0{query}\u00a0"')
    assert load(tmp_path, text).data.datasets[0].prompt_template == "Frage\u00a0:\u00a0{query}\u00a0"


@pytest.mark.parametrize(
    ("old", "new", "key", "name"),
    [
        ("models/tiny", "${MODELS}/tiny", "model.path", "${MODELS}"),
        ("chats.jsonl", "$DATA/chats.jsonl", "data.datasets.0.path", "$DATA"),
        ("chats.jsonl", "sets/$NAME", "data.datasets.0.path", "$NAME"),
        ("128", "${LENGTH}", "tokens.sequence_length", "${LENGTH}"),
        ("run_name: demo", "run_name: demo-${USER}", "general.run_name", "${USER}"),
    ],
)
def test_a_variable_of_the_shell_is_explained_once(tmp_path, old, new, key, name):
    (problem,) = problems_of(tmp_path, GOOD.replace(old, new))
    assert re.match(
        rf"run\.yaml:\d+: {re.escape(key)}: {re.escape(name)} is not expanded here; write its value, ", problem
    )


def test_a_variable_in_braces_on_one_line_is_explained(tmp_path):
    text = GOOD.replace(
        "tokens:\n  sequence_length: 128\n  train_steps: 100", "tokens: {sequence_length: ${N}, train_steps: 3}"
    )
    (problem,) = problems_of(tmp_path, text)
    assert "${N} is not expanded here" in problem


def test_a_dollar_that_is_no_variable_stays(tmp_path):
    config = load(tmp_path, GOOD, "--lora.targets=model.*(q|v)_proj$", "--general.output_dir=a$b")
    assert config.lora is not None
    assert (config.lora.targets, config.general.output_dir) == ("model.*(q|v)_proj$", "a$b")


def test_the_home_folder_is_meant_by_a_tilde_in_every_path(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    keys = [key for key in _all_keys(Config) if key.rpartition(".")[2] in PATH_KEYS]
    overrides = [f"--{key}=~/x" for key in keys if not key.startswith("data.datasets")]
    sets = ["--evaluation.datasets=[{path: ~/x}]", "--data.datasets.0.path=~/x", "--lora.modules_to_save=[]"]
    (tmp_path / "run.yaml").write_text(GOOD)
    text = dump_config(load_config("~/run.yaml", [*overrides, *sets]))
    assert text.count(f"{tmp_path}/x\n") == len(overrides) + 2 >= 9
    assert "~" not in text


@pytest.mark.parametrize("targets", ["q_proj,v_proj", "q_proj, v_proj", "q_proj v_proj", "q_proj;v_proj,"])
def test_names_in_one_text_are_answered_with_the_list(tmp_path, targets):
    (problem,) = problems_of(tmp_path, f"{GOOD}lora:\n  targets: {targets}\n")
    assert problem.endswith(f"lora.targets: {targets} is one text; write a list of names: [q_proj, v_proj]")


def test_plain_values_are_those_of_yaml_1_2_and_an_empty_section_has_its_defaults(tmp_path):
    for number in ("1e-5", "1E-5", "1.0e-5", "0.00001", "+1e-5", ".1e-4"):
        assert load(tmp_path, GOOD.replace("1e-5", number)) == load(tmp_path, GOOD)
    config = load(tmp_path, GOOD.replace("1e-5", "1"), "--model.compile=on")
    assert (config.model.compile, config.optimizer.learning_rate) == ("on", 1.0)
    assert load(tmp_path, GOOD + "logging:\n  # interval: 5\n") == load(tmp_path, GOOD)


def test_overrides_change_exactly_the_key_they_name(tmp_path):
    config = load(
        tmp_path,
        GOOD,
        "--optimizer.learning_rate=2e-4",
        "--data.datasets.0.path=b=c.jsonl",
        "--logging.wandb.tags=[a, b]",
        "--tokens.train_epochs=3",
    )
    expected = load(tmp_path, GOOD).model_dump()
    expected["optimizer"]["learning_rate"] = 2e-4
    expected["data"]["datasets"][0]["path"] = "b=c.jsonl"
    expected["logging"]["wandb"]["tags"] = ("a", "b")
    expected["tokens"] |= {"train_steps": None, "train_epochs": 3}
    assert config.model_dump() == expected


@pytest.mark.parametrize(
    ("override", "key", "reason"),
    [
        ("optimizer.eps=1", "", "wanted --section.key=value"),
        ("--optimizer.eps", "", "wanted --section.key=value"),
        ("--optimizer.epss=1", "optimizer.epss: ", "did you mean eps?"),
        ("--optimizer.eps=a", "optimizer.eps: ", 'found "a" (text); wanted a number above 0'),
        ("--data.datasets.1.path=x", "data.datasets: ", "no item 1; wanted an index below 1"),
        ("--tokens.train_steps.x=1", "tokens.train_steps: ", "is 100 (a whole number), which has no keys"),
        ("--lora.r=8", "lora.r: ", "unknown key; write lora.rank"),
        ("--lorra.rank=8", "lorra: ", "did you mean lora?"),
        ("--lora=[rank]", "lora: ", "wanted a mapping with the keys rank, alpha"),
        ("--general.seed.x=8", "general.seed: ", 'found {"x": 8} (a mapping); wanted a whole number from 0 to'),
        ("--tokens.train_epochs=0", "tokens.train_epochs: ", "found 0 (a whole number); wanted a whole number above 0"),
        ("--tokens.train_steps=null", "tokens.train_steps: ", "set train_steps or train_epochs"),
        (
            "--data.datasets=[{path: a, weight: 1}, {path: b}]",
            "data.datasets: ",
            "give every data set a weight, or none",
        ),
        ("--optimizer.betas=[", "", "is not YAML: expected the node content"),
        ("--data.packing={strategy: none, strategy: pool}", "data.packing.strategy: ", "given twice"),
    ],
)
def test_a_wrong_override_is_named(tmp_path, override, key, reason):
    (problem,) = problems_of(tmp_path, GOOD, override)
    assert problem.startswith(f"override {override}: {key}")
    assert reason in problem


STEPS_OF, EPOCHS = "--tokens.train_steps=20", "--tokens.train_epochs=3"


@pytest.mark.parametrize(
    ("in_file", "overrides", "lengths"),
    [
        ("train_epochs: 2", [STEPS_OF], (20, None)),
        ("train_steps: 100", [EPOCHS], (None, 3)),
        ("train_epochs: 2", [EPOCHS], (None, 3)),
        ("train_epochs: 2", [STEPS_OF, "--tokens.train_epochs=null"], (20, None)),
        ("train_steps: null\n  train_epochs: 2", [STEPS_OF], (20, None)),
    ],
)
def test_an_override_of_steps_replaces_the_epochs_of_the_file_and_the_other_way_round(
    tmp_path, in_file, overrides, lengths
):
    tokens = load(tmp_path, GOOD.replace("train_steps: 100", in_file), *overrides).tokens
    assert (tokens.train_steps, tokens.train_epochs) == lengths


@pytest.mark.parametrize(
    ("in_file", "overrides", "problem"),
    [
        ("train_epochs: 2", [STEPS_OF, EPOCHS], "train_steps is 20 and train_epochs is 3; keep one of them"),
        ("train_epochs: 2", [EPOCHS, STEPS_OF], "train_steps is 20 and train_epochs is 3; keep one of them"),
        ("train_steps: 1\n  train_epochs: 2", [], "train_steps is 1 and train_epochs is 2; keep one of them"),
        ("train_steps: 1\n  train_epochs: 2", [STEPS_OF], "train_steps is 20 and train_epochs is 2; keep one of them"),
    ],
)
def test_steps_and_epochs_in_one_file_or_as_two_overrides_are_an_error(tmp_path, in_file, overrides, problem):
    assert problem in "\n".join(problems_of(tmp_path, GOOD.replace("train_steps: 100", in_file), *overrides))


def test_a_problem_is_reported_at_the_override_that_makes_it_and_else_at_the_file(tmp_path):
    problems = problems_of(tmp_path, GOOD, "--general.seed=1", "--general.seed=2")
    assert problems == ["override --general.seed=2: general.seed: given twice; keep one"]
    (problem,) = problems_of(
        tmp_path, GOOD.replace("train_steps: 100", "train_epochs: 1"), "--data.datasets.0.streaming=true"
    )
    assert problem.startswith("override --data.datasets.0.streaming=true: tokens.train_epochs: is 1, but")
    without = GOOD.replace("optimizer:\n  learning_rate: 1e-5\n", "")
    problems = problems_of(tmp_path, without, "--optimizer.eps=1e-6")
    assert problems == ["run.yaml: optimizer.learning_rate: missing; wanted a number above 0, below 3e38"]


# --- The optional section ---


WITH_LORA = GOOD + "lora: {rank: 8, targets: [q_proj, v_proj], modules_to_save: [embed_tokens]}\n"


@pytest.mark.parametrize("lora", ["", "lora: null\n", "lora: ~\n"])
def test_an_optional_section_that_is_absent_or_null_is_none(tmp_path, lora):
    assert load(tmp_path, GOOD + lora).lora is None


def test_an_optional_section_has_its_defaults_where_it_leaves_keys_out(tmp_path):
    assert load(tmp_path, GOOD + "lora: {}\n").lora == Lora()
    assert load(tmp_path, GOOD + "lora:\n  alpha: 8\n  dropout: 0\n  rank:\n").lora == Lora(alpha=8.0)


@pytest.mark.parametrize(
    ("text", "overrides", "expected"),
    [
        (GOOD, ["--lora={}"], Lora()),
        (GOOD, ["--lora.rank=4"], Lora(rank=4)),
        (GOOD, ["--lora.rank=null"], Lora()),
        (GOOD + "lora: null\n", ["--lora.rank=4", "--lora.merge=false"], Lora(rank=4, merge=False)),
        (GOOD + "lora: {rank: 8, dora: true}\n", ["--lora.rank=4"], Lora(rank=4, dora=True)),
        (GOOD, ["--lora.targets=.*_proj"], Lora(targets=".*_proj")),
        (WITH_LORA, ["--lora=null"], None),
        (WITH_LORA, ["--lora="], None),
    ],
)
def test_overrides_open_change_and_remove_an_optional_section(tmp_path, text, overrides, expected):
    config = load(tmp_path, text, *overrides)
    assert config.lora == expected
    assert config.model_copy(update={"lora": None}) == load(tmp_path, GOOD)


def test_a_contradiction_with_an_optional_section_is_reported_at_the_override_that_makes_it(tmp_path):
    text = WITH_LORA.replace(MODEL, f"{MODEL}\n  frozen_dtype: nf4")
    assert load(tmp_path, text).model.frozen_dtype == "nf4"
    (problem,) = problems_of(tmp_path, text, "--lora=null")
    assert problem.startswith("override --lora=null: model.frozen_dtype: is nf4")
    text = WITH_LORA + "tokenizer: {add_tokens: [<x>]}\n"
    assert load(tmp_path, text).tokenizer.add_tokens == ("<x>",)
    (problem,) = problems_of(tmp_path, text, "--lora.modules_to_save=[]")
    assert problem.startswith("override --lora.modules_to_save=[]: tokenizer.add_tokens: adds <x>")
    assert load(tmp_path, text, "--lora=null").lora is None
    adapter = load(tmp_path, text, "--lora.modules_to_save=[]", "--lora.adapter=a").lora
    assert adapter == Lora(rank=8, targets=("q_proj", "v_proj"), adapter="a")  # it may train the embeddings itself


def test_eight_bit_moments_need_no_adapters_and_a_run_may_merge_without_an_export(tmp_path):
    assert load(tmp_path, GOOD, "--optimizer.name=adamw_8bit").optimizer.name == "adamw_8bit"
    assert load(tmp_path, WITH_LORA, "--checkpoints.export_hf=false").lora == load(tmp_path, WITH_LORA).lora


def test_the_quickstart_with_adapters_differs_from_the_quickstart_in_its_name_its_rate_and_lora_alone():
    whole, lora = (flat_config(load_config(f"configs/quickstart{kind}.yaml")) for kind in ("", "_lora"))
    changed = {key for key in whole | lora if whole.get(key) != lora.get(key)}
    assert {key for key in changed if not key.startswith("lora.")} == {"general.run_name", "optimizer.learning_rate"}
    assert (lora["lora.rank"], lora["lora.alpha"]) == (16, 32)


def test_what_was_built_in_code_is_checked_as_well():
    with pytest.raises(ValidationError, match="run_name"):
        General(run_name="a/b")
    good = {
        "general": {"run_name": "a"},
        "model": {"path": "m"},
        "data": {"datasets": [{"path": "d"}]},
        "tokens": {"sequence_length": 8},
        "optimizer": {"learning_rate": 1.0},
    }
    with pytest.raises(ValidationError, match="set train_steps or train_epochs"):
        Config.model_validate(good)
    good["tokens"]["train_steps"] = 1
    assert Config.model_validate(good).lora is None
    for lora, problem in (({"dropout": 0.1}, "only 0 is supported"), ({"adapter": "a", "init": "gaussian"}, "adapter")):
        with pytest.raises(ValidationError, match=problem):
            Config.model_validate({**good, "lora": lora})


def test_the_answer_to_another_trainers_key_names_keys_that_there_are():
    sections = "|".join(keys_of(Config))
    for name, sentence in OTHER_TRAINERS.items():
        path = tuple(name.split("."))
        assert suggest_key(path) == suggest_key(("data", "datasets", 0, *path)) == sentence
        for key in re.findall(rf"\b(?:{sections})\.[a-z_.]+[a-z]", sentence):
            path = tuple(key.split("."))
            assert locate(path)[0] == path, f"{key} is no key"
            assert locate(path)[1] is not None, f"{key} is no key"


def _migrations() -> list[tuple[str, str]]:
    """The keys of other trainers in the first column of each table of migrating.md, with the last column."""
    page = (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in page.partition("## TRL")[2].splitlines() if line[:3] == "| `"]
    key = re.compile(r"`(?:--)?(?:\w+(?:\[\])?\.)*([a-z]\w*)(?:: [^`]*)?`")
    return [(name, row[-1]) for row in rows for name in key.findall(row[0])]


def test_each_key_of_the_migration_tables_is_answered_with_a_key_of_its_row():
    found, keys = _migrations(), set(_all_keys(Config))
    assert len(found) > 130
    for name, row in found:
        if name in {**keys_of(Config), **keys_of(Dataset)}:
            continue  # a section, or a key of ours too
        answer = suggest_key(("datasets", name))
        assert "the keys here are" not in answer, f"{name} has no answer, and {row}"
        in_answer, in_row = ({key for key in keys if key in text} for text in (answer, row))
        assert not in_answer or not in_row or in_answer & in_row, f"{name}: {answer}, but the table has {row}"


def test_the_answer_to_a_value_of_another_trainer_is_a_value_that_there_is(tmp_path: Path) -> None:
    for setting, advice in VALUES_OF_OTHERS.items():
        (problem,) = problems_of(tmp_path, GOOD, f"--{setting}")
        assert problem.endswith(f"; {advice}"), problem
        (known,) = (field for found, field in [locate(tuple(setting.partition("=")[0].split(".")))] if field)
        if value := re.match(r"write (\w+)\b(?! list)", advice):
            assert value[1] in str(known.rebuild_annotation()), f"{setting}: {advice}"


def test_train_on_inputs_is_answered_with_the_opposite_value():
    assert "train_on_completions_only with the opposite value" in suggest_key(("train_on_inputs",))


@pytest.mark.parametrize(
    ("key", "advice"),
    [
        ("optimizer.state", "it was removed: write optimizer.name: adamw for fp32"),
        ("optimizer.type", "write optimizer.name: adamw, adamw_8bit or muon"),
        ("parallelism.tp", "tensor, pipeline and expert parallelism are not supported"),
        ("tp", "tensor, pipeline and expert parallelism are not supported"),
        ("stage", "every run is supervised fine-tuning (SFT): remove the key"),
        ("template", "write tokenizer.chat_template; without it, the run uses the model's own template"),
        ("finetuning_type", "write a section lora: {rank: 16} to train adapters; without it, all weights are trained"),
        ("model_id", "write model.path, a folder or a Hub id"),
        ("model.type", "the keys here are path,"),
        ("data.datasets.0.type", "a data set's format is detected, or named by format"),
        ("keep_last_n", "did you mean checkpoints.keep_last?"),
        ("learning_rate", "did you mean optimizer.learning_rate?"),
        ("tokens.warmup_stepps", "did you mean optimizer.warmup_steps?"),
        ("optimizer.warm_up_steps", "did you mean warmup_steps?"),
        ("optimizer.wramup_steps", "did you mean warmup_steps?"),
    ],
)
def test_a_key_that_is_not_here_has_its_own_sentence(key, advice):
    path = tuple(int(part) if part.isdecimal() else part for part in key.split("."))
    assert suggest_key(path).startswith(advice)


@pytest.mark.parametrize("optional", ["", "lora: {}\n"])
def test_the_dump_has_every_key_also_where_the_file_leaves_it_to_its_default(tmp_path, optional):
    def require_every_key(tree: Any, section: type[Section]) -> None:
        assert tree.keys() == keys_of(section).keys()
        for name, field in keys_of(section).items():
            inner, value = section_in(field.annotation), tree[name]
            for each in value if isinstance(value, list) else [value]:
                if inner is not None and (each is not None or name not in ("lora", "extend")):
                    require_every_key(each, inner)

    dumped = yaml.safe_load(dump_config(load(tmp_path, GOOD + optional)))
    require_every_key(dumped, Config)
    assert (dumped["lora"] is None) == (not optional)
    assert dumped["data"]["max_dropped_share"] == 0.05


@pytest.mark.parametrize("text", [GOOD + "lora: {}\n", WITH_LORA, WITH_LORA.replace("[q_proj, v_proj]", "a|b")])
def test_a_dumped_optional_section_loads_back_equal(tmp_path, text):
    config = load(tmp_path, text)
    assert load(tmp_path, dump_config(config)) == config
    assert Config.model_validate(config.model_dump(mode="json")) == config


@settings(deadline=None)  # it writes files
@given(
    text=st.text(min_size=1, max_size=60, alphabet=st.characters(exclude_categories=["Cs"]))
    | st.sampled_from(["1e-5", "08", "1_000", "on", "null", "true", "2024-01-01", "0x1F", "1.e3"])
)
@example(text="a$b")
def test_a_dumped_config_loads_back_equal_whatever_its_texts(tmp_path_factory, text):
    assume(variable_problem(text) is None)  # $A is refused in a file, whoever wrote it
    tmp_path = tmp_path_factory.getbasetemp()
    plain = load(tmp_path, GOOD)
    logging = plain.logging.model_copy(update={"wandb": plain.logging.wandb.model_copy(update={"tags": (text,)})})
    config = plain.model_copy(update={"logging": logging, "model": plain.model.model_copy(update={"path": text})})
    assert load(tmp_path, dump_config(config)) == config


# --- Names of runs that hold values of other keys ---


def named(tmp_path: Path, name: str, *overrides: str) -> Config:
    return load(tmp_path, GOOD, f"--general.run_name={name!r}", *overrides)


@pytest.mark.parametrize(
    ("name", "filled"),
    [
        ("isolated_{data.remove_cross_attention}", "isolated_false"),
        ("{optimizer.learning_rate}-{tokens.micro_batch_size}", "1e-05-1"),
        ("of-{model.path}", "of-models-tiny"),
        ("{data.datasets.0.path}", "chats.jsonl"),
        ("epochs_{tokens.train_epochs}", "epochs_null"),
        ("of-{lora}-{lora.merge}", "of-null-null"),
    ],
)
def test_a_key_in_braces_stands_for_its_value_as_given_or_by_default(tmp_path, name, filled):
    config = named(tmp_path, name, "--data.remove_cross_attention=False")
    assert config.run_dir == Path("runs") / filled
    assert load(tmp_path, dump_config(config)) == config


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("{data.remove_cross_atention}", "is not a key; did you mean remove_cross_attention?"),
        ("{data.datasets}", "which cannot be part of a name"),
        ("{general.run_name}", "refers to itself"),
        ("{}", "{} is not a key"),
        ("{data.overlong", "wanted a plain name"),
    ],
)
def test_what_is_no_single_value_is_refused_once(tmp_path, name, problem):
    with pytest.raises(ConfigError) as caught:
        named(tmp_path, name)
    (line,) = caught.value.problems
    assert "general.run_name: " in line
    assert problem in line


def sections(model: type[BaseModel]) -> list[type[BaseModel]]:
    inner = [option for f in model.model_fields.values() for option in (f.annotation, *get_args(f.annotation))]
    found = [s for s in inner if isinstance(s, type) and issubclass(s, BaseModel)]
    return [model, *(deeper for section in found for deeper in sections(section))]


def test_the_help_names_every_key_with_a_description():
    text = describe_config()
    assert max(len(line) for line in text.splitlines()) <= 120
    described = sections(Config)[1:]
    assert len(described) > 10
    assert {Dataset, Lora} <= {*described}
    for section in described:
        for name, field in keys_of(section).items():
            assert re.search(rf"^ *{name}( \(|:)", text, re.MULTILINE), f"{section.__name__}.{name}"
            assert field.description or section_in(field.annotation), f"{section.__name__}.{name} has no description"


def test_the_help_describes_the_keys_of_a_data_set_once_and_those_of_one_section_in_full():
    assert describe_config().count("max_samples (default null)") == 1
    (named, again) = re.findall(r"^ +([\w, ]+): as in data\.datasets$", describe_config(), re.MULTILINE)
    assert named == again
    assert set(named.split(", ")) == set(keys_of(Rows)) - {"name"}
    assert "max_samples (default null)" in describe_config("evaluation")
