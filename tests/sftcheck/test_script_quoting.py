"""No string of others becomes code of a program: whatever models, tokenizers, rows, columns and paths spell."""

import ast
import importlib
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from sftcheck.program import quoting
from sftcheck.program.evidence import EVIDENCE, Evidence
from sftcheck.program.program import Program, run_here
from sftcheck.program.quoting import MOST_DEPTH, NoSourceError, called, filled, literal, require_own_code
from sftcheck.program.rebuild import Materials, with_sizes
from sftcheck.program.rows import Rows
from sftcheck.program.source import Names, is_of_library
from sftron import verify_trainer
from sftron.checks.report import Report
from tests.conftest import ROOT
from tests.sftcheck.small_trainers import encoded, messages, of_features, plain
from tests.sftcheck.test_isolation_scripts import deaf, error_of
from tests.sftcheck.test_scripts import AllTokens, faults_shown

pytestmark = pytest.mark.filterwarnings("ignore")  # of TRL and transformers, about their own options
CANARY = "sftron-canary"
_RUN = f"__import__('pathlib').Path('{CANARY}').touch()"
ATTACKS = {
    "a key of an argument": f"a={_RUN}, b",
    "a quote": f"'+str({_RUN})+'",
    "two quotes": f'"+str({_RUN})+"',
    "both quotes": f"\"+str({_RUN})+\"'+str({_RUN})+'",
    "three quotes": f"'''+str({_RUN})+'''",
    "a newline": f"x\n{_RUN}\n",
    "a carriage return": f"x\r{_RUN}\r",
    "a form feed and the line separators of Unicode": f"x\f{_RUN}\x85{_RUN}\u2028{_RUN}\u2029{_RUN}\v{_RUN}",
    "a place": f"$stop $wanted $rows {_RUN}",
    "a field of format": "{0!r} {0.__class__} {} {" + _RUN + "}",
    "a backslash before the quote": f"\\'+str({_RUN})+\\'",
    "a backslash at the end": f"{_RUN}\\",
    "a comment": f"# -*- coding: utf-7 -*-\n{_RUN} #",
    "brackets": f")]}}\n{_RUN}\n([{{",
    "a letter that Python reads as another": f"ﬁle={_RUN}, ｂ",
    "a half of a surrogate pair": f"\ud800'+str({_RUN})+'",
    "a word of Python": "lambda",
}
TEXTS = st.one_of(
    st.sampled_from([*ATTACKS.values()]),
    st.text(st.sampled_from("'\"\\${}()[]=,#;: \t\n\r\f\v\x00\x1b\x85\u2028\u2029\ufeffax0!r_ﬁ"), max_size=20),
    st.lists(st.sampled_from(["'", '"', "\n", "$stop", "{0!r}", "\\", _RUN, "=", ", "]), max_size=6).map("".join),
    st.text(max_size=10),
)
KINDS = [each for kinds in EVIDENCE.values() for each in kinds]


class Holes(ast.NodeTransformer):
    """Replaces each literal by a hole, so that what is left is the code around the values."""

    def visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, ast.expr):
            try:
                ast.literal_eval(node)
            except (ValueError, TypeError):
                pass
            else:
                return ast.Name("_", ast.Load())
        return self.generic_visit(node)


def shape(program: Program) -> str:
    return ast.dump(Holes().visit(ast.parse(program.text)))


def hostile_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path, stop: str, header: str) -> Any:
    """Returns a saved ChatML tokenizer that ends turns with one text, and begins answers with another."""
    tokenizer.add_special_tokens({"eos_token": stop})
    tokenizer.chat_template = (  # pyright: ignore[reportAttributeAccessIssue]
        "{% for each in messages %}{{ '<|im_start|>' + (" + repr(header) + " if each.role == 'assistant' else 'user') "
        "+ '\n' + each.content + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>' + " + repr(header) + " + '\n' }}{% endif %}"
    )
    tokenizer.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


# -- whole reports -----------------------------------------------------------------------------------------------------


@pytest.fixture
def canary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails the test if one of the programs that it runs has touched the file."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sftcheck.program.program.run_fresh", run_here)
    yield
    assert not (folder / CANARY).exists(), "a string became code, and ran"


def test_a_key_of_config_json_is_never_code(own: Any, tmp_path: Path, canary: None) -> None:
    trainer: Any = plain(own, tmp_path, AllTokens)
    for attack in ATTACKS.values():
        if "\ud800" not in attack:  # no JSON file holds one
            setattr(trainer.model.config, attack, [attack, {attack: attack}])
    text = verify_trainer(trainer).script("loss")
    assert run_here(text).status == 1
    assert CANARY not in text, "the fault does not need them"


def test_a_key_of_the_config_json_of_a_model_that_leaks_is_never_code(canary: None) -> None:
    model = deaf()
    for attack in ATTACKS.values():
        setattr(model.config, attack, [attack, {attack: attack}])
    assert run_here(error_of(model).script()).status == 1


def test_a_place_in_a_chat_template_and_a_stop_token_of_python_are_never_code(
    own: Any, tmp_path: Path, canary: None
) -> None:
    own = hostile_tokenizer(own, tmp_path, f"'+str({_RUN})+'", "assistant $stop")
    trainer = of_features(own, tmp_path, encoded(own, [{"messages": messages(n)} for n in range(8)]))
    report = verify_trainer(trainer, [{"messages": messages(n)} for n in range(8)])
    facts = materials_of(report).program.facts
    assert "$stop" in facts.header
    assert "__import__" in facts.stop
    assert not faults_shown(report)  # runs a program of each kind
    without = [{**row, "labels": [*row["labels"][:-1], -100]} for row in trainer.train_dataset]
    conversations = [{"messages": messages(n)} for n in range(8)]
    text = verify_trainer(of_features(own, tmp_path, without), conversations).script("stop tokens")
    assert run_here(text).status == 1
    assert "$stop" in text


# -- every place in every program --------------------------------------------------------------------------------------


def materials_of(report: Report) -> Materials:
    materials = report.make_script.args[0]  # pyright: ignore[reportFunctionMemberAccess, reportOptionalMemberAccess]
    assert isinstance(materials, Materials), materials
    return materials


@pytest.fixture(scope="module")
def materials(tmp_path_factory: pytest.TempPathFactory) -> Materials:
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "tests/assets/tokenizer")
    return materials_of(verify_trainer(plain(tokenizer, tmp_path_factory.mktemp("out"))))


def program_of(
    materials: Materials,
    evidence: Evidence,
    text: str,
    *,
    is_ids: bool,
    has_conversations: bool = True,
    has_completion: bool = False,
    **facts: Any,
) -> Program:
    """Returns a program whose every string that comes from others is this text."""
    own = {**materials.tokenizer_state, "eos_token": text, "chat_template": text, "padding_side": text}
    materials = replace(
        materials,
        config={**materials.config, text: [text, {text: text}], "layer_types": [text, text], "a_kind": text},
        tokenizer_state={**own, "added": [*own["added"], text]},
    )
    base = with_sizes(materials, is_small=True)
    answer = {"completion": [{"role": "assistant", "content": text}]} if has_completion else {}
    rows = Rows(({text: text, "another": [{text: [text, 1.5, None, True]}], **answer},))
    if is_ids:
        rows = Rows((({"input_ids": [5, 6, 7], text: [5, -100, 7]},),), is_ids=True)
    return replace(
        base,
        rows=rows,
        conversations=f"conversations = {literal([[{text: text}]])}" if has_conversations else "",
        evidence=evidence,
        facts=replace(base.facts, header=text, stop=text, beginning=text, twice=text, **facts),
    )


BOTH = (False, True)


@given(text=TEXTS, evidence=st.sampled_from(KINDS), is_ids=st.booleans())
def test_whatever_a_string_is_the_code_around_it_is_the_same(
    materials: Materials, text: str, evidence: Evidence, is_ids: bool
) -> None:
    benign = program_of(materials, evidence, "x y", is_ids=is_ids)
    assert shape(program_of(materials, evidence, text, is_ids=is_ids)) == shape(benign)


def test_the_answers_to_train_are_counted_in_the_rows_that_are_left(materials: Materials) -> None:
    """A program that still counted an answer that was taken away would find its stop token untrained."""
    (stops,) = EVIDENCE["stop tokens"]
    one = program_of(materials, stops, "x", is_ids=False, has_completion=True)
    two = {**one.rows.rows[0], "completion": one.rows.rows[0]["completion"] * 2}
    assert "int(is_trained.sum()), 2\n" in replace(one, rows=Rows((two,))).text
    assert "int(is_trained.sum()), 1\n" in one.text


@pytest.mark.parametrize("attack", ATTACKS)
def test_no_program_with_an_attack_in_every_place_runs_it(materials: Materials, attack: str, canary: None) -> None:
    for n, evidence in enumerate(KINDS):
        program = program_of(materials, evidence, ATTACKS[attack], is_ids=n % 2 == 0)
        tokenizer = [line for line in program.tokenizer if "from_pretrained" in line]
        # Without the tokenizer's own settings, so that the program goes on, as far as such rows let it.
        run_here(program.text if n % 8 == 0 else replace(program, tokenizer=tuple(tokenizer)).text)


@pytest.mark.parametrize(("has_positions", "has_mask", "is_adapter", "is_text"), [*product(BOTH, repeat=4)])
def test_every_measurement_is_known_to_the_check_of_programs(
    materials: Materials, has_positions: bool, has_mask: bool, is_adapter: bool, is_text: bool
) -> None:
    options = {"has_positions": has_positions, "has_mask": has_mask, "is_adapter": is_adapter, "is_text": is_text}
    options |= {"has_conversations": has_mask, "is_marked_by_trl": is_text, "has_completion": is_adapter}
    for evidence, is_ids in product(KINDS, BOTH):
        assert program_of(materials, evidence, "x", is_ids=is_ids, **options).text


# -- the ways in -------------------------------------------------------------------------------------------------------

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS | st.binary(),
    lambda each: st.lists(each, max_size=3) | st.dictionaries(TEXTS, each, max_size=3) | st.tuples(each),
    max_leaves=8,
)


@given(value=VALUES)
def test_a_literal_is_one_line_and_is_its_value(value: Any) -> None:
    text = literal(value)
    assert ast.literal_eval(text) == value
    assert len(text.splitlines()) == 1


class Told(str):
    """A text that shows itself as code, as a row's or a tokenizer's own class may."""

    __slots__ = ()

    def __repr__(self) -> str:
        return _RUN

    __str__ = __format__ = __repr__  # pyright: ignore[reportAssignmentType]


class Number(int):
    def __repr__(self) -> str:
        return _RUN


class Thing:
    def __repr__(self) -> str:
        return _RUN


def test_what_a_class_says_of_itself_is_not_written() -> None:
    assert literal([Told("a"), Number(3), {Told("b"): 1.0}]) == "['a', 3, {'b': 1.0}]"
    assert literal([float("nan"), -float("inf")]) == "[float('nan'), float('-inf')]"
    with pytest.raises(NoSourceError, match="a value of Thing is no literal"):
        literal({"a": [Thing()]})
    nested: Any = 1
    for _ in range(MOST_DEPTH + 1):
        nested = [nested]
    with pytest.raises(NoSourceError, match=f"nested more than {MOST_DEPTH} deep"):
        literal(nested)


def test_an_object_in_containers_is_written_and_a_tuple_of_any_length_is_one() -> None:
    value = {"kind": torch.float32, "sets": [{2, 1}], "pairs": ((), (1,), (1, 2))}
    assert Names({}).expression(value) == "{'kind': torch.float32, 'sets': [[1, 2]], 'pairs': ((), (1,), (1, 2))}"


@given(name=TEXTS)
def test_a_name_of_others_is_a_key_of_a_dictionary(name: str) -> None:
    tree: Any = ast.parse(called("make", [], {"size": "1", name: "2"}, own={"size"}), mode="eval").body
    assert [each.arg for each in tree.keywords] == ["size", None]
    assert ast.literal_eval(tree.keywords[1].value) == {name: 2}


def test_a_place_is_filled_once_and_one_that_nothing_fills_is_an_error() -> None:
    assert filled("f($a, $b)", {"a": "'$b'", "b": "'$a'"}) == "f('$b', '$a')"
    with pytest.raises(KeyError):
        filled("$a $c", {"a": "1"})


FOREIGN = {
    "a name": "print(__import__('os'))",
    "an attribute": "tokenizer.save_pretrained('x')",
    "an attribute of a class": "print(().__class__)",
    "a function that reads code": "eval('1')",
    "an import": "import os",
    "a class": "class A: pass",
    "a loop without an end": "while True: print(1)",
    "an assertion": "assert True",
    "a walrus": "print(a := 1)",
}


@pytest.mark.parametrize("line", FOREIGN.values(), ids=FOREIGN)
def test_code_that_no_program_of_ours_has_is_an_error_of_ours(line: str) -> None:
    require_own_code(["import sys"], ["tokenizer = 1", "print(tokenizer)", "sys.exit(0)"], ["# x"], ())
    with pytest.raises(AssertionError, match="a program has"):
        require_own_code(["import sys"], ["tokenizer = 1", line], ["# x"], ())


def test_a_comment_and_an_import_are_nothing_else() -> None:
    with pytest.raises(AssertionError, match="a comment is code"):
        require_own_code([], [], ["# a\rprint(1)"], ())
    with pytest.raises(AssertionError, match="the imports have"):
        require_own_code(["import sys; print(1)"], [], [], ())


def test_the_check_knows_every_attribute_in_the_lines_that_the_package_writes() -> None:
    package, found, outside = Path(quoting.__file__).parent, set[str](), ("from ", "trainer.get_", "import sys, runpy;")
    for name in ("evidence", "packed", "program", "rebuild", "rows", "search"):
        for node in ast.walk(ast.parse((package / f"{name}.py").read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and not node.value.startswith(outside):
                found |= {*re.findall(r"\.([a-z]\w*)", node.value)}
    assert len(found) > 20
    assert found - {"py"} <= quoting._ATTRIBUTES | quoting._DTYPES


@pytest.mark.parametrize(
    ("folder", "expected"), [("other/lib/site-packages", True), ("dist-packages", True), ("own", False)]
)
def test_a_package_of_any_environment_on_the_path_is_imported_and_not_copied(
    folder: str, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / folder).mkdir(parents=True)
    name = f"package_{len(folder)}"
    (tmp_path / folder / f"{name}.py").write_text("class Kept: ...\n")
    monkeypatch.syspath_prepend(tmp_path / folder)
    assert is_of_library(importlib.import_module(name).Kept) is expected
    del sys.modules[name]
