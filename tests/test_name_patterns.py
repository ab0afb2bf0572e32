"""Patterns of others match what `re` matches, in a bounded number of steps."""

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sftron import name_patterns
from sftron.name_patterns import NamePatterns

NAMES = (
    "model.layers.0.self_attn.q_proj", "model.layers.11.mlp.down_proj", "model.layers.2.mlp.experts.3.up_proj",
    "model.language_model.layers.0.self_attn.qkv_proj", "visual.blocks.0.attn.qkv", "lm_head", "Q_PROJ", "é.q_proj",
)  # fmt: skip
ORDINARY = {
    "peft's documentation": r".*decoder.*(SelfAttention|EncDecAttention).*(q|v)$",
    "without the vision tower": r"^(?!.*visual).*(q_proj|k_proj|v_proj|o_proj|up_proj|down_proj|gate_proj).*",
    "ms-swift": r"^(model\.language_model(?=\.).*\.(qkv_proj|o_proj))$",
    "unsloth": r"(?:.*?(?:language|text).*?(?:self_attn|attention).*?(?:q_proj|qkv_proj).*?)"
    r"|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:q_proj|down_proj)))",
    "some layers": r"model\.layers\.([0-9]|1[0-1])\..*(q|down)_proj",
    "not behind experts": r".*(?<!experts\.3)\.(up|down)_proj",
    "ignores case": r"(?i)q_proj",
    "a set and its opposite": r"[^v][\w.]+\.q_\D{4}",
    "lazy and counted": r"m.*?\.\d{1,2}\.mlp\.\w+(\.\d\.up_proj)?",
    "a name": "lm_head",
    "dots": "model.layers.0.self_attn.q_proj",
}
EVIL = {
    "nested plus": "((([a-z_.0-9])+)+)+!",
    "nested star": "(.*.*.*)*.*!",
    "the same alternatives": "(a|a|[a-z_.0-9])*!",
    "many stars": ".*" * 60 + "!",
    "optional ones": "(.?){60}.{60}!",
    "counted in counted": "((.{0,65535}){0,65535}){0,65535}!",
    "a look ahead in a repeat": "((?=(.*)*!)?.)*!",
    "a look behind in a repeat": "((?<!(?:x|[a-z])).|.)*!",
    "very many alternatives": "(" + "|".join(["[a-z_.0-9]"] * 100) + ")*!",
    "without a repeat": "(.|[a-z_.0-9])" * 40 + "!",
}
_ATOMS = st.sampled_from(["a", "b", "c", ".", "[ab]", "[^a]", r"\w", r"\d", r"\.", "_", "1", r"\b", "^", "$", r"\W"])
EXPRESSIONS = st.recursive(
    _ATOMS,
    lambda each: st.one_of(
        st.lists(each, min_size=2, max_size=4).map("".join),
        st.tuples(each, each).map("|".join).map("({})".format),
        st.tuples(each, st.sampled_from(["*", "+", "?", "*?", "+?", "??", "{1,2}", "{2}", "{2,}"])).map(
            lambda pair: f"(?:{pair[0]}){pair[1]}"
        ),
        st.tuples(st.sampled_from(["(?=", "(?!"]), each).map(lambda pair: f"{pair[0]}{pair[1]})"),
        st.sampled_from(["(?<=a)", "(?<!b)", "(?<=a.)"]),
    ),
    max_leaves=6,
)


@pytest.mark.parametrize("pattern", ORDINARY.values(), ids=ORDINARY)
def test_ordinary_patterns_match_as_peft_matches_them(pattern: str) -> None:
    patterns = NamePatterns([pattern])
    ends = NamePatterns([pattern.replace("(?i)", "")], is_end=True)  # peft, too, refuses flags there
    for name in NAMES:
        assert (patterns.first(name) == pattern) == (re.fullmatch(pattern, name) is not None)
        if "(?i)" not in pattern:
            assert (ends.first(name) is not None) == (re.match(rf"(.*\.)?({pattern})$", name) is not None)
    assert name_patterns.MOST_STEPS - patterns._steps < 5000


@given(pattern=EXPRESSIONS, name=st.text("abc1_.", max_size=8))
def test_a_pattern_matches_exactly_what_re_matches(pattern: str, name: str) -> None:
    found = NamePatterns([pattern]).first(name)
    assert (found is not None) == (re.fullmatch(pattern, name) is not None)


@pytest.mark.parametrize("pattern", EVIL.values(), ids=EVIL)
@pytest.mark.parametrize("is_end", [False, True])
def test_no_pattern_takes_longer_than_its_steps(pattern: str, is_end: bool) -> None:
    before = time.process_time()
    patterns, name = NamePatterns([pattern], is_end=is_end), "model.layers.0.self_attn.q_proj" * 2
    try:
        assert not any(patterns.first(f"{name}.{n}") for n in range(500))
    except ValueError as error:
        assert "steps" in str(error)  # noqa: PT017
    assert time.process_time() - before < 30, "in a million and a half steps, of about a microsecond each"


def steps(pattern: str, name: str) -> int:
    patterns = NamePatterns([pattern])
    patterns.first(name)
    return name_patterns.MOST_STEPS - patterns._steps


def test_twice_the_name_takes_at_most_a_few_times_the_steps() -> None:
    for pattern in ("((([a-z_.0-9])+)+)+!", "(.*.*.*)*.*!", "(a|a|[a-z])*!"):
        short, long = steps(pattern, "a" * 40), steps(pattern, "a" * 80)
        assert long < 8.5 * short, "a cube at most"


REFUSED = {
    r"(a)\1": "groupref",
    "(?<=a|bc)d": "look-behind of several widths",
    r"(?>a*)b": "atomic_group",
    "a*+b": "possessive_repeat",
    "(a)?(?(1)b|c)": "groupref_exists",
    "(?x) a": "flags",
    "(?i:a)": "flags",
    "a)|(b": "is not a regular expression",
    "(" * 5000 + "a" + ")" * 5000: "is not a regular expression",
    "[a": "is not a regular expression",
    "a{99999999999999999999}": "is not a regular expression",
    "(a|b)" * 50_000: "characters",
}


@pytest.mark.parametrize("pattern", REFUSED, ids=lambda each: each[:20])
def test_what_is_not_matched_is_refused_with_the_remedy(pattern: str) -> None:
    with pytest.raises(ValueError, match=REFUSED[pattern]):
        NamePatterns([pattern], is_end=True)


def test_the_names_of_the_largest_models_take_few_of_the_steps() -> None:
    """126 layers: peft writes a key of rank_pattern for each, and others one expression for all."""
    names = [f"model.layers.{n}.{each}" for n in range(126) for each in ("mlp.up_proj", "mlp.down_proj") + 5 * ("x",)]
    escaped = [name.replace(".", r"\.") for name in names]
    for patterns in (names, escaped, [f"^({'|'.join(escaped)})$"], [r"^(?!.*visual).*(q_proj|k_proj|up_proj).*"]):
        compiled = NamePatterns(dict.fromkeys(patterns), is_end=True)
        assert any(compiled.first(name) for name in names)
        assert compiled._steps > name_patterns.MOST_STEPS / 2


def test_many_patterns_share_the_steps() -> None:
    patterns = NamePatterns([f"x{n}.(a|b)*c" for n in range(1000)], is_end=True)
    with pytest.raises(ValueError, match="takes more than 1500000 steps"):
        [patterns.first(f"model.layers.{n}.self_attn.q_proj") for n in range(2000)]
