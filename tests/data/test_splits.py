"""A part of a split is that of the datasets library, and whatever is not understood is refused."""

import datasets
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sftron.data.sources import open_source
from sftron.data.splits import parse_split
from sftron.data.types import DataError
from tests.data.files import all_rows, numbered, refusal_of, write_rows


@st.composite
def parts(draw: st.DrawFn) -> str:
    unit, most = draw(st.sampled_from([("%", 100), ("", 250)]))
    border = st.integers(-most, most).map(lambda number: f"{number}{unit}") | st.just("")
    return f"train[{draw(border)}:{draw(border)}]"


@given(part=parts(), num_rows=st.integers(1, 230))
@example(part="train[:50%]", num_rows=5)  # 2.5 rows, halves to the even one
@example(part="train[-10%:]", num_rows=199)
def test_a_part_takes_the_rows_that_the_datasets_library_takes(part: str, num_rows: int) -> None:
    (theirs,) = datasets.ReadInstruction.from_spec(part).to_absolute({"train": num_rows})
    ours = parse_split(part).rows(num_rows)
    assert list(ours) == list(range(num_rows))[theirs.from_ : theirs.to]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("train[:5", 'split "train[:5" is not understood; write train, train[:100]'),
        ("train[5]", "is not understood; write"),
        ("train[:0.5%]", "is not understood; write"),
        ("train[::2]", "is not understood; write"),
        ("train [:5]", "is not understood; write"),
        ("train[:5%](pct1_dropremainder)", "is not understood; write"),
        ("", 'split "" is not understood'),
        ("train+test", 'split "train+test" is not understood; make each part a data set of its own'),
        ("train[:10]+train[-10:]", "make each part a data set of its own"),
        ("train[10:20%]", "has one border in percent and one in rows; write both in one unit"),
        ("train[:101%]", 'split "train[:101%]": 101% is more than there is; write -100% to 100%'),
    ],
)
def test_what_the_syntax_does_not_have_is_refused_with_the_remedy(text: str, problem: str) -> None:
    with pytest.raises(DataError) as caught:
        parse_split(text)
    assert problem in str(caught.value)


def test_a_part_has_the_rows_lines_and_fingerprint_of_its_own(tmp_path) -> None:
    path = write_rows(tmp_path / "a.jsonl", numbered(200))
    whole, part = open_source(path), open_source(path, "train[10%:15%]", max_samples=4)
    assert all_rows(part) == numbered(200)[20:24]
    assert (part.locate(0), part.name) == (f"{path}:21", f"{path} (train[10%:15%])")
    others = [("train", None), ("train[10%:15%]", 5), ("train[10%:15%]", None), ("train[21:25]", None)]
    prints = [open_source(path, split, max_samples=number).fingerprint for split, number in others]
    assert len({*prints, part.fingerprint}) == 5
    assert open_source(path, "train[20:]", max_samples=4).fingerprint == part.fingerprint
    assert open_source(path, "train[:100%]", max_samples=200).fingerprint != part.fingerprint
    assert open_source(path, max_samples=1000).fingerprint == whole.fingerprint
    for outside in (-1, 4):
        with pytest.raises(IndexError, match="has 4 rows, no row"):
            part[outside]


def test_a_part_without_rows_is_refused(tmp_path) -> None:
    path = write_rows(tmp_path / "a.jsonl", numbered(20))
    assert (
        str(refusal_of(tmp_path, path, "train[:1%]"))
        == 'a.jsonl: split "train[:1%]" takes none of its 20 rows; name others'
    )
