"""Every operation gives the text that str gives, and every character keeps its origin."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sftron.data.chat.tracked_text import Origin, ProvenanceLostError, TrackedStr, concatenate
from sftron.data.types import Role

# Each text is marked per character by its own alphabet: the template writes only "t" and white space, field k digits k.
OPERATIONS = {
    "strip": lambda s: s.strip(),
    "lstrip chars": lambda s: s.lstrip("t "),
    "rstrip chars": lambda s: s.rstrip("t1"),
    "slice": lambda s: s[1:-1],
    "reverse": lambda s: s[::-1],
    "every second": lambda s: s[::2],
    "characters": lambda s: "".join(list(s)) if type(s) is str else concatenate(list(s)),
    "split": lambda s: s.split(),
    "split at": lambda s: s.split("0 "),
    "split once": lambda s: s.split("t", 1),
    "rsplit": lambda s: s.rsplit(),
    "rsplit once": lambda s: s.rsplit("t", 1),
    "rsplit space": lambda s: s.rsplit(None, 1),
    "splitlines": lambda s: s.splitlines(),
    "splitlines with ends": lambda s: s.splitlines(True),
    "partition": lambda s: s.partition("1"),
    "rpartition": lambda s: s.rpartition("1"),
    "replace": lambda s: s.replace("0", "tt"),
    "replace once": lambda s: s.replace("1 ", "", 1),
    "removeprefix": lambda s: s.removeprefix("t0"),
    "removesuffix": lambda s: s.removesuffix("1"),
    "times": lambda s: s * 3,
    "upper": lambda s: s.upper(),
    "title": lambda s: s.title(),
    "plus": lambda s: "t" + s + "t",
    "join": lambda s: s.join(["t", "t", "t"]),
}
ORIGINS = {"0": Origin(0, "content", Role.USER), "1": Origin(1, "content", Role.ASSISTANT)}
spans = st.lists(st.tuples(st.sampled_from(["t", "0", "1"]), st.text("x \n", max_size=4)), max_size=6)


def tracked(parts: list[tuple[str, str]]) -> TrackedStr:
    return concatenate([TrackedStr.of(filler.replace("x", owner), ORIGINS.get(owner)) for owner, filler in parts])


@pytest.mark.parametrize("name", OPERATIONS)
@given(parts=spans)
def test_an_operation_gives_what_str_gives_and_no_character_changes_hands(name: str, parts: list) -> None:
    text = tracked(parts)
    plain = "".join(text)
    native, reference = OPERATIONS[name](text), OPERATIONS[name](plain)

    assert native == reference
    for part in [native] if isinstance(native, str) else native:
        assert isinstance(part, TrackedStr)
        assert sum(length for length, _ in part.spans) == len(part)
        start = 0
        for length, origin in part.spans:
            owned = str.__getitem__(part, slice(start, start + length)).lower()
            expected = {"t"} if origin is None else {"0", "1"} & {str(origin.message)}
            assert set(owned) - set(" \n") <= expected, (part, part.spans)
            start += length


def test_the_mark_of_an_empty_field_survives_joining_and_stripping() -> None:
    empty = TrackedStr.of("  ", Origin(0, "content", Role.USER)).strip()

    assert ("<" + empty + ">").spans == ((1, None), (0, Origin(0, "content", Role.USER)), (1, None))


def test_neighbors_of_one_origin_are_one_span_and_a_part_has_no_origin_of_the_text_around_it() -> None:
    user, again, answer = (
        Origin(n, "content", role) for n, role in ((0, Role.USER), (0, Role.USER), (1, Role.ASSISTANT))
    )
    texts = [TrackedStr.of("a", user), TrackedStr.of("bc", again), "x", "", "y", TrackedStr.of("", answer)]
    text = concatenate(texts)
    assert (text, text.spans) == ("abcxy", ((3, user), (2, None), (0, answer)))
    pair = TrackedStr.of("ab", user) + TrackedStr.of("cd", answer) + TrackedStr.of("ef", user)
    assert pair[2:4].spans == ((2, answer),)


@pytest.mark.parametrize("method", ["format", "zfill", "translate", "casefold", "center", "expandtabs", "encode"])
def test_a_method_that_would_lose_the_origin_is_refused(method: str) -> None:
    with pytest.raises(ProvenanceLostError, match=f"the string method {method}"):
        getattr(TrackedStr.of("user's", Origin(0, "content", Role.USER)), method)()
