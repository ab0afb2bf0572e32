"""What a broken configuration is told, and what a good one means."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from sftron.config import Config, ConfigError, Dataset, General, describe_config, dump_config, load_config
from sftron.config.help import keys_of, locate, suggest_key
from sftron.config.other_trainers import SENTENCES

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


# Each case: what replaces what in the good file, and all the problems that makes.
BROKEN = {
    "a misspelt key": (
        "  learning_rate: 1e-5",
        "  learning_rate: 1e-5\n  warmup_step: 3",
        ["run.yaml:13: optimizer.warmup_step: unknown key; did you mean warmup_steps?"],
    ),
    "a misspelt section": (
        "model:",
        "modl:",
        [
            "run.yaml: model.path: missing; wanted text",
            "run.yaml:3: modl: unknown key; did you mean model?",
        ],
    ),
    "a key in the wrong section": (
        "  train_steps: 100",
        "  train_steps: 100\n  learning_rate: 1",
        ["run.yaml:11: tokens.learning_rate: unknown key; did you mean optimizer.learning_rate?"],
    ),
    "a key that could belong to two sections": (
        "  train_steps: 100",
        "  train_steps: 100\n  chat_templat: x",
        ["run.yaml:11: tokens.chat_templat: unknown key; did you mean tokenizer.chat_template?"],
    ),
    "a key like no other": (
        "  path: models/tiny",
        "  path: models/tiny\n  zzz: 1",
        [
            "run.yaml:5: model.zzz: unknown key; the keys here are path, attention, loss, activation_checkpointing, "
            "compile, compute_dtype"
        ],
    ),
    "a key that only sounds like one": (
        "model:\n",
        "expert: 1\nmodel:\n",
        [
            "run.yaml:3: expert: unknown key; the keys here are general, model, tokenizer, data, tokens, parallelism, "
            "optimizer, checkpoints, evaluation, logging"
        ],
    ),
    "another trainer's key": (
        "model:\n",
        "lora: {r: 8}\nmodel:\n",
        ["run.yaml:3: lora: unknown key; adapters are not here: whole models are trained"],
    ),
    "another trainer's value of a section": (
        "data:\n",
        "data:\n  packing: true\n",
        [
            "run.yaml:6: data.packing: found true; wanted a mapping with the keys strategy, pool_size; conversations "
            "are always packed; data.packing.strategy is pool, minibatch or none, one conversation a pack"
        ],
    ),
    "a dotted key": (
        "optimizer:\n",
        "data.num_workers: 2\noptimizer:\n",
        [
            "run.yaml:11: data.num_workers: unknown key; write data.num_workers nested: a line for each section and "
            "one for the key"
        ],
    ),
    "a missing key": (
        "  sequence_length: 128\n",
        "",
        ["run.yaml:8: tokens.sequence_length: missing; wanted a whole number above 1"],
    ),
    "a quoted number": (
        "1e-5",
        '"1e-5"',
        ['run.yaml:12: optimizer.learning_rate: found "1e-5" (text); wanted a number above 0; remove the quotes'],
    ),
    "a path that no file system takes": (
        "  path: models/tiny",
        f"  path: models/{'é' * 128}/tiny",
        [
            f"run.yaml:4: model.path: {'é' * 20}... has 256 bytes, and no file or folder has a name of more than 255; "
            "shorten it"
        ],
    ),
    "more packs in a step than any memory holds": (
        "  train_steps: 100",
        "  train_steps: 100\n  batch_accumulation_per_replica: 10000000000000",
        [
            "run.yaml:11: tokens.batch_accumulation_per_replica: found 10000000000000 (a whole number); wanted a whole "
            "number from 1 to 1048576"
        ],
    ),
    "a word for the interval of checkpoints": (
        "  train_steps: 100",
        "  train_steps: 100\ncheckpoints:\n  interval: often",
        ['run.yaml:12: checkpoints.interval: found "often" (text); wanted auto or a whole number above 0 or null'],
    ),
    "a number for a text": (
        "run_name: demo",
        "run_name: 7",
        [
            "run.yaml:2: general.run_name: found 7 (a whole number); wanted a plain name (letters, digits, . _ -); "
            "put it in quotes"
        ],
    ),
    "a name with a slash": (
        "run_name: demo",
        "run_name: a/b",
        ['run.yaml:2: general.run_name: found "a/b" (text); wanted a plain name (letters, digits, . _ -)'],
    ),
    "a bool for a whole number": (
        "train_steps: 100",
        "train_steps: true",
        ["run.yaml:10: tokens.train_steps: found true; wanted a whole number above 0 or null"],
    ),
    "a bool for a number": (
        "1e-5",
        "true",
        ["run.yaml:12: optimizer.learning_rate: found true; wanted a number above 0"],
    ),
    "yes for true": (
        "run_name: demo",
        "run_name: demo\n  deterministic: yes",
        ['run.yaml:3: general.deterministic: found "yes" (text); wanted true or false'],
    ),
    "a fraction for a whole number": (
        "sequence_length: 128",
        "sequence_length: 128.0",
        ["run.yaml:9: tokens.sequence_length: found 128.0 (a number); wanted a whole number above 1"],
    ),
    "an unknown option": (
        "path: models/tiny",
        "path: models/tiny\n  attention: eager",
        ['run.yaml:5: model.attention: found "eager" (text); wanted auto, sdpa, varlen, flash_attn or flex'],
    ),
    "a union of an option and a number": (
        "data:\n",
        "data:\n  num_lanes: 0\n",
        ["run.yaml:6: data.num_lanes: found 0 (a whole number); wanted auto or a whole number above 0"],
    ),
    "a value below its range": (
        "1e-5",
        "-1e-5",
        ["run.yaml:12: optimizer.learning_rate: found -1e-05 (a number); wanted a number above 0"],
    ),
    "a value that overflows": (
        "1e-5",
        "1e999",
        ["run.yaml:12: optimizer.learning_rate: found Infinity (a number); wanted a number above 0"],
    ),
    "a beta of one": (
        "1e-5",
        "1e-5\n  betas: [0.9, 1.0]",
        [
            "run.yaml:13: optimizer.betas: found [0.9, 1.0] (a list); wanted a list of two numbers, each at least 0 "
            "and below 1"
        ],
    ),
    "a single beta": (
        "1e-5",
        "1e-5\n  betas: [0.9]",
        [
            "run.yaml:13: optimizer.betas: found [0.9] (a list); wanted a list of two numbers, each at least 0 "
            "and below 1"
        ],
    ),
    "no data sets": (
        "\n    - path: chats.jsonl",
        " []",
        ["run.yaml:6: data.datasets: found [] (a list); wanted a list of at least one data set"],
    ),
    "a data set that is a path": (
        "- path: chats.jsonl",
        "- chats.jsonl",
        [
            'run.yaml:7: data.datasets.0: found "chats.jsonl" (text); wanted a mapping with the keys path, name, '
            "split, format, prompt_template, columns, max_samples, weight, streaming"
        ],
    ),
    "a data set's weight": (
        "- path: chats.jsonl",
        "- path: chats.jsonl\n      weight: 0",
        ["run.yaml:8: data.datasets.0.weight: found 0 (a whole number); wanted a number above 0 or null"],
    ),
    "a misspelt key in the second data set": (
        "- path: chats.jsonl",
        "- path: chats.jsonl\n    - path: b.jsonl\n      slpit: x",
        ["run.yaml:9: data.datasets.1.slpit: unknown key; did you mean split?"],
    ),
    "a section that is a value": (
        "optimizer:\n  learning_rate: 1e-5",
        "optimizer: adam",
        [
            'run.yaml:11: optimizer: found "adam" (text); wanted a mapping with the keys learning_rate, schedule, '
            "warmup_steps, decay_share, min_learning_rate_ratio, weight_decay, betas, eps, max_grad_norm; AdamW is the "
            "only optimizer: optimizer.learning_rate, optimizer.betas, optimizer.weight_decay"
        ],
    ),
    "both lengths of training": (
        "  train_steps: 100",
        "  train_steps: 100\n  train_epochs: 2",
        ["run.yaml:10: tokens.train_steps: train_steps is 100 and train_epochs is 2; keep one of them"],
    ),
    "no length of training": (
        "  train_steps: 100\n",
        "",
        ["run.yaml:8: tokens.train_steps: neither train_steps nor train_epochs is given; set one of them"],
    ),
    "a warm-up that never ends": (
        "1e-5",
        "1e-5\n  warmup_steps: 100",
        [
            "run.yaml:13: optimizer.warmup_steps: 100 is not below tokens.train_steps 100; the peak is never reached: "
            "lower it"
        ],
    ),
    "a weight that not all data sets have": (
        "- path: chats.jsonl",
        "- path: chats.jsonl\n      weight: 0.5\n    - path: b\n    - path: c",
        [
            "run.yaml:6: data.datasets: data.datasets.0.weight given, but not data.datasets.1.weight, "
            "data.datasets.2.weight; give all data sets a weight, or none"
        ],
    ),
    "epochs of a mixture": (
        "- path: chats.jsonl\ntokens:\n  sequence_length: 128\n  train_steps: 100",
        "- path: chats.jsonl\n      weight: 0.5\ntokens:\n  sequence_length: 128\n  train_epochs: 2",
        ["run.yaml:11: tokens.train_epochs: is 2, but data sets with weights end at different times; set train_steps"],
    ),
    "a streamed data set beside others": (
        "- path: chats.jsonl",
        "- path: chats.jsonl\n    - path: b\n      streaming: true",
        [
            "run.yaml:6: data.datasets: item 1 is streamed, so it cannot be joined with the others; "
            "give all data sets a weight"
        ],
    ),
    "epochs and held-out rows of a stream": (
        "- path: chats.jsonl\ntokens:\n  sequence_length: 128\n  train_steps: 100",
        "- path: chats.jsonl\n      streaming: true\ntokens:\n  sequence_length: 128\n  train_epochs: 2\n"
        "evaluation:\n  share: 0.1",
        [
            "run.yaml:11: tokens.train_epochs: is 2, but where a streamed data set ends is not known; set train_steps",
            "run.yaml:13: evaluation.share: is 0.1, but no rows can be held out of a streamed data set; remove the key",
        ],
    ),
    "a decay that no schedule reads": (
        "1e-5",
        "1e-5\n  decay_share: 0.1",
        ["run.yaml:13: optimizer.decay_share: is read by schedule wsd only, and schedule is cosine: remove the key"],
    ),
    "a floor that is never reached": (
        "1e-5",
        "1e-5\n  schedule: constant\n  min_learning_rate_ratio: 0.1",
        ["run.yaml:14: optimizer.min_learning_rate_ratio: is 0.1, but schedule constant never falls: remove the key"],
    ),
    "a pool without a pool": (
        "data:\n",
        "data:\n  packing: {strategy: none, pool_size: 8}\n",
        ["run.yaml:6: data.packing.pool_size: is read by strategy pool only, and strategy is none: remove the key"],
    ),
    "wandb online without a project": (
        "model:\n",
        "logging:\n  wandb:\n    mode: online\nmodel:\n",
        ["run.yaml:4: logging.wandb.project: mode online needs it: set the project's name, or mode: offline"],
    ),
    "the same key twice": (
        "  learning_rate: 1e-5",
        "  learning_rate: 1e-5\n  eps: 1e-8\n  learning_rate: 2e-5",
        ["run.yaml:14: optimizer.learning_rate: given twice, first on line 12; keep one"],
    ),
    "the same section twice": (
        "optimizer:",
        "model: {path: b}\noptimizer:",
        ["run.yaml:11: model: given twice, first on line 3; keep one"],
    ),
    "an alias of a mapping": (
        "optimizer:",
        "evaluation: &a {}\ncheckpoints: *a\noptimizer:",
        ["run.yaml:12: is not YAML: only short single values can be aliased: write it out"],
    ),
    "a Python tag": (
        "1e-5",
        "!!python/object/apply:os.getcwd []",
        ["run.yaml:12: is not YAML: tag:yaml.org,2002:python/object/apply:os.getcwd is not read here"],
    ),
    "an open bracket": (
        "1e-5",
        "[1e-5",
        ["run.yaml:13: is not YAML: expected ',' or ']', but got '<stream end>'"],
    ),
    "a control character": ("demo", "de\x07mo", ["run.yaml:2: is not YAML: the character 7 is not allowed"]),
    "absurd nesting": ("1e-5", "[" * 5000, ["run.yaml:1: is nested too deeply"]),
}


@pytest.mark.parametrize(("old", "new", "expected"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_file_is_told_line_key_and_remedy(tmp_path, old, new, expected):
    text = GOOD.replace(old, new, 1)
    assert text != GOOD
    assert problems_of(tmp_path, text) == expected


def test_all_problems_of_a_file_and_its_overrides_are_reported_together_in_order(tmp_path):
    text = GOOD.replace("  train_steps: 100", "  train_steps: 100\n  train_epochs: 2\n  nope: 1").replace("1e-5", "x")
    problems = problems_of(tmp_path, text, "--model.compile=maybe", "--general.seed=-1", "--optimizer.warmup_steps=100")
    assert [re.split(r": (?=[a-z_]+\.)", problem)[0] for problem in problems] == [
        "run.yaml:10",  # a contradiction, although values elsewhere are invalid
        "run.yaml:12",
        "run.yaml:14",
        "override --model.compile=maybe",
        "override --general.seed=-1",
        "override --optimizer.warmup_steps=100",
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


@pytest.mark.parametrize("number", ["1e-5", "1E-5", "1.0e-5", "0.00001", "+1e-5", ".1e-4", "1.e-5"])
def test_every_way_to_write_a_number_is_a_number(tmp_path, number):
    assert load(tmp_path, GOOD.replace("1e-5", number)).optimizer.learning_rate == pytest.approx(1e-5, rel=1e-12)


def test_on_and_off_are_text_and_a_whole_number_may_stand_for_a_number(tmp_path):
    config = load(tmp_path, GOOD.replace("1e-5", "1"), "--model.compile=on")
    assert config.model.compile == "on"
    assert config.optimizer.learning_rate == 1.0


def test_a_section_whose_keys_are_all_commented_out_has_its_defaults(tmp_path):
    assert load(tmp_path, GOOD + "logging:\n  # interval: 5\n") == load(tmp_path, GOOD)


def test_overrides_change_exactly_the_key_they_name(tmp_path):
    config = load(
        tmp_path,
        GOOD,
        "--optimizer.learning_rate=2e-4",
        "--data.datasets.0.path=b=c.jsonl",
        "--logging.wandb.tags=[a, b]",
        "--tokens.train_steps=",
        "--tokens.train_epochs=3",
    )
    expected = load(tmp_path, GOOD).model_dump()
    expected["optimizer"]["learning_rate"] = 2e-4
    expected["data"]["datasets"][0]["path"] = "b=c.jsonl"
    expected["logging"]["wandb"]["tags"] = ("a", "b")
    expected["tokens"] |= {"train_steps": None, "train_epochs": 3}
    assert config.model_dump() == expected


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("optimizer.eps=1", "override optimizer.eps=1: wanted --section.key=value"),
        ("--optimizer.eps", "override --optimizer.eps: wanted --section.key=value"),
        ("--optimizer.epz=1", "override --optimizer.epz=1: optimizer.epz: unknown key; did you mean eps?"),
        ("--optimizer.eps=a", 'override --optimizer.eps=a: optimizer.eps: found "a" (text); wanted a number above 0'),
        (
            "--data.datasets.1.path=x",
            "override --data.datasets.1.path=x: data.datasets: no item 1; wanted an index below 1",
        ),
        (
            "--tokens.train_steps.x=1",
            "override --tokens.train_steps.x=1: tokens.train_steps: is 100 (a whole number), which holds no keys",
        ),
        (
            "--lora.r=8",
            "override --lora.r=8: lora: unknown key; adapters are not here: whole models are trained",
        ),
        (
            "--lora.r.x=8",
            "override --lora.r.x=8: lora: unknown key; adapters are not here: whole models are trained",
        ),
        (
            "--general.seed.x=8",
            'override --general.seed.x=8: general.seed: found {"x": 8} (a mapping); wanted a whole number from 0 to '
            "4294967295",
        ),
        (
            "--tokens.train_epochs=1",
            "override --tokens.train_epochs=1: tokens.train_steps: train_steps is 100 and train_epochs is 1; keep one "
            "of them",
        ),
        (
            "--data.datasets=[{path: a, weight: 1}, {path: b}]",
            "override --data.datasets=[{path: a, weight: 1}, {path: b}]: data.datasets: data.datasets.0.weight given, "
            "but not data.datasets.1.weight; give all data sets a weight, or none",
        ),
        (
            "--optimizer.betas=[",
            "override --optimizer.betas=[: is not YAML: expected the node content, but found '<stream end>'",
        ),
        (
            "--data.packing={strategy: none, strategy: pool}",
            "override --data.packing={strategy: none, strategy: pool}: data.packing.strategy: given twice, first on "
            "line 1; keep one",
        ),
    ],
)
def test_a_wrong_override_is_named(tmp_path, override, expected):
    assert problems_of(tmp_path, GOOD, override) == [expected]


def test_an_override_of_a_part_of_what_contradicts_is_named_although_the_file_has_the_rest(tmp_path):
    text = GOOD.replace("train_steps: 100", "train_epochs: 1")
    problems = problems_of(tmp_path, text, "--data.datasets.0.streaming=true")
    assert problems == [
        "override --data.datasets.0.streaming=true: tokens.train_epochs: is 1, but where a streamed data set ends is "
        "not known; set train_steps"
    ]


def test_what_a_section_lacks_is_blamed_on_the_file_whatever_an_override_adds_to_it(tmp_path):
    text = GOOD.replace("optimizer:\n  learning_rate: 1e-5\n", "")
    problems = problems_of(tmp_path, text, "--optimizer.eps=1e-6")
    assert problems == ["run.yaml: optimizer.learning_rate: missing; wanted a number above 0"]


def test_the_same_override_twice_is_refused(tmp_path):
    problems = problems_of(tmp_path, GOOD, "--general.seed=1", "--general.seed=2")
    assert problems == ["override --general.seed=2: general.seed: given twice; keep one"]


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
    with pytest.raises(ValidationError, match="neither train_steps nor train_epochs"):
        Config.model_validate(good)


@pytest.mark.parametrize("name", sorted(SENTENCES))
def test_what_is_said_of_a_key_of_another_trainer_names_keys_that_there_are(name):
    assert suggest_key((name,)) == suggest_key(("data", "datasets", 0, name)) == SENTENCES[name]
    sections = "|".join(keys_of(Config))
    for key in re.findall(rf"\b(?:{sections})\.[a-z_.]+[a-z]", SENTENCES[name]):
        path = tuple(key.split("."))
        assert locate(path) == (path, locate(path)[1]), f"{key} is no key"
        assert locate(path)[1] is not None, f"{key} is no key"


def test_a_config_cannot_be_changed(tmp_path):
    with pytest.raises(ValidationError, match="frozen"):
        load(tmp_path, GOOD).general.seed = 3


@settings(deadline=None)  # it writes files
@given(
    text=st.text(min_size=1, max_size=60, alphabet=st.characters(exclude_categories=["Cs"]))
    | st.sampled_from(["1e-5", "08"])
)
def test_a_dumped_config_loads_back_equal_whatever_its_texts(tmp_path_factory, text):
    tmp_path = tmp_path_factory.getbasetemp()
    plain = load(tmp_path, GOOD)
    logging = plain.logging.model_copy(update={"wandb": plain.logging.wandb.model_copy(update={"tags": (text,)})})
    config = plain.model_copy(update={"logging": logging, "model": plain.model.model_copy(update={"path": text})})
    assert load(tmp_path, dump_config(config)) == config


@pytest.mark.parametrize("name", ["1e-5", "08", "1_000", "on", "null", "true", "2024-01-01", "0x1F", "1.e3"])
def test_a_name_that_looks_like_something_else_survives_the_dump(tmp_path, name):
    config = load(tmp_path, GOOD, f"--general.run_name='{name}'")
    assert load(tmp_path, dump_config(config)).general.run_name == name


def test_the_dump_holds_every_key(tmp_path):
    dumped = dump_config(load(tmp_path, GOOD))
    for section in Config.model_fields:
        assert f"\n{section}:" in "\n" + dumped
    assert "max_dropped_share: 0.05" in dumped


def sections(model: type[BaseModel]) -> list[type[BaseModel]]:
    inner = [f.annotation for f in model.model_fields.values()]
    found = [s for s in inner if isinstance(s, type) and issubclass(s, BaseModel)]
    return [model, *(deeper for section in found for deeper in sections(section))]


def test_the_help_names_every_key_with_a_description():
    text = describe_config(width=90)
    assert max(len(line) for line in text.splitlines()) <= 120
    described = [*sections(Config)[1:], Dataset]
    assert len(described) > 10
    for section in described:
        for name, field in keys_of(section).items():
            assert re.search(rf"^ *{name}( \(|:)", text, re.MULTILINE), f"{section.__name__}.{name}"
            is_section = isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
            assert field.description or is_section, f"{section.__name__}.{name} has no description"
