"""CSV as spreadsheets write it is read as Python's csv reads the decoded text, by random access and forward alike."""

import codecs
import csv
import gc
import io
import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from sftron.data.chat.tokenizer import ChatTokenizer
from sftron.data.dataset import PackedDataset
from sftron.data.formats.detect import resolve_format
from sftron.data.sources import open_source, open_stream
from sftron.data.types import DataError
from tests.conftest import rest_nightly
from tests.data.files import all_rows, packed, write

TABLE = [
    ["Frage", "Antwort", "Notiz"],
    ["Was ist 1,5 + 2;5?", "3,14", "007"],
    ['sagt "ja"', "zwei\r\nZeilen", ""],
    ["\tein Tab | ein Strich", "42", "1e5"],
    ["日本 😀", "é", "NA"],
]
ENCODINGS = {
    "UTF-8": lambda text: text.encode(),
    "UTF-8 with its mark": lambda text: codecs.BOM_UTF8 + text.encode(),
    "UTF-16-LE": lambda text: codecs.BOM_UTF16_LE + text.encode("utf-16-le"),
    "UTF-16-BE": lambda text: codecs.BOM_UTF16_BE + text.encode("utf-16-be"),
}


def text_of(table: list[list[str]], **options: Any) -> str:
    file = io.StringIO(newline="")
    csv.writer(file, **options).writerows(table)
    return file.getvalue()


def rows_of(text: str, separator: str, first_line: int = 1) -> list[tuple[int, dict[str, str | None]]]:
    """Returns the line of each row of decoded text, and the row, by Python's csv."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator)
    names, rows, end = next(reader), [], reader.line_num
    for cells in reader:
        rows.append((first_line + end, dict(zip(names, (cell or None for cell in cells), strict=True))))
        end = reader.line_num
    return rows


def read(path: str) -> list[tuple[int, Any]]:
    """Returns the line of each row, and the row, which are the same by random access and forward."""
    source = open_source(path)
    stream = open_stream(path).head(len(source) + 1)
    located = [
        [(int(each.locate(index).removeprefix(f"{path}:")), row) for index, row in enumerate(all_rows(each))]
        for each in (source, stream)
    ]
    assert located[0] == located[1]
    return located[0]


@pytest.mark.parametrize("encoding", rest_nightly(ENCODINGS, ["UTF-8 with its mark", "UTF-16-LE"]))
@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
def test_every_separator_encoding_line_end_quoting_and_compression_is_read_as_pythons_csv_reads_it(
    tmp_path: Path, separator: str, encoding: str
) -> None:
    """With and without a first line that declares the separator."""
    line_ends, quotings = ("\n", "\r\n", "\r"), (csv.QUOTE_MINIMAL, csv.QUOTE_ALL)
    for end, quoting, declared, ending in itertools.product(
        line_ends, quotings, ("", f"sep={separator}"), (".csv", ".tsv", ".csv.gz", ".tsv.zst")
    ):
        text = text_of(TABLE, delimiter=separator, lineterminator=end, quoting=quoting)
        before = declared and declared + end
        path = write(tmp_path / f"a{ending}", packed(ENCODINGS[encoding](before + text), Path(ending).suffix))
        expected = rows_of(text, separator, first_line=2 if declared else 1)
        assert len(expected) == 4
        assert read(path) == expected


@given(
    table=st.integers(2, 4).flatmap(
        lambda width: st.lists(
            st.lists(st.text(st.sampled_from("ab1,;|\t\"'\n\r .=é\u2028"), max_size=8), min_size=width, max_size=width),
            min_size=1,
            max_size=6,
        )
    ),
    separator=st.sampled_from(",;\t|"),
    quoting=st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
    encoding=st.sampled_from(sorted(ENCODINGS)),
)
def test_the_separator_is_found_whatever_the_cells_hold(
    tmp_path_factory: pytest.TempPathFactory, table: list[list[str]], separator: str, quoting: Any, encoding: str
) -> None:
    names = [f"name {number}" for number in range(len(table[0]))]
    table = [[f"x{row[0]}", *row[1:]] for row in table]  # no line is empty
    text = text_of([names, *table], delimiter=separator, quoting=quoting)
    path = write(tmp_path_factory.getbasetemp() / "any.csv", ENCODINGS[encoding](text))
    assert [list(row.values()) for _, row in read(path)] == [[cell or None for cell in row] for row in table]
    assert read(path) == rows_of(text, separator)


def test_a_header_longer_than_the_sample_and_rows_after_it_are_read(tmp_path: Path) -> None:
    """As well as two columns of one name among 100,000, which took a minute to find."""
    names = [f"column {number}" for number in range(100_000)]
    assert open_source(write(tmp_path / "a.csv", f"{';'.join(names)}\n{';' * 99_999}x\n"))[0]["column 99999"] == "x"
    with pytest.raises(DataError, match="has two columns 'column 7'; rename or remove one"):
        open_source(write(tmp_path / "b.csv", f"{';'.join(names)};column 7\n"))


# --- What Excel writes ---

GERMAN = '\ufeffFrage;Antwort\r\nWas ist 1,5 + 1,64?;3,14\r\n{}"Zwei\r\nZeilen; ""so""";42\r\n'


def test_empty_lines_are_bad_rows_and_those_at_the_end_are_none(tmp_path: Path, chat_tokenizer: ChatTokenizer) -> None:
    rows = {
        2: {"Frage": "Was ist 1,5 + 1,64?", "Antwort": "3,14"},
        3: {"Frage": 'Zwei\r\nZeilen; "so"', "Antwort": "42"},
    }
    path = write(tmp_path / "a.csv", GERMAN.format("") + "\r\n;\r\n  \r\n")
    assert dict(read(path)) == rows

    path = write(tmp_path / "b.csv", GERMAN.format("\r\n;\r\n") + "\r\n")
    assert dict(read(path)) == {2: rows[2], 3: {}, 4: {}, 5: rows[3]}
    columns = {"prompt": "Frage", "completion": "Antwort"}
    problem = r"b\.csv:3: is an empty row; remove it, or let bad rows be dropped and counted \(data\.on_bad_row: skip\)"
    options: dict[str, Any] = {"sequence_length": 96, "num_epochs": 1}
    with pytest.raises(DataError, match=problem):
        PackedDataset.from_path(path, chat_tokenizer, columns=columns, **options)
    for num_lanes in (1, "auto"):
        dataset = PackedDataset.from_path(
            path,
            chat_tokenizer,
            format="prompt_completion",
            columns=columns,
            on_bad_row="skip",
            num_lanes=num_lanes,
            **options,
        )
        packs = list(dataset)
        assert sorted(key.row for pack in packs for key in pack.keys) == [0, 3]
        assert [drop.reason for pack in packs for drop in pack.dropped_rows] == ["empty_row"] * 2


@pytest.mark.parametrize(
    "names",
    [
        ("Frage", "Antwort"),
        ("yes", "1"),
        ("a: b", "#c"),
        ("Ist es {so}?", "😀 'ja'"),
        ("A" * 90, "B" * 90),
        ("question", "Lösung"),
    ],
)
def test_two_texts_of_any_names_are_offered_the_columns_that_read_them(tmp_path: Path, names: tuple[str, str]) -> None:
    source = open_source(write(tmp_path / "a.csv", text_of([list(names), ["q", "a"]], delimiter=";")))
    with pytest.raises(DataError) as caught:
        resolve_format(source)
    offered = [yaml.safe_load(each) for each in re.findall(r"`(columns: .*?)`", str(caught.value))]
    read_as = []
    for each in offered:
        row_format = resolve_format(source, columns=each["columns"])
        question, answer = (row_format.column(name) for name in (row_format.name.split("_")))
        read_as.append((question, answer))
    assert read_as == [names, names[::-1]]


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("Frage, kurz;Antwort\nPi?;3\n", [{"Frage, kurz": "Pi?", "Antwort": "3"}]),
        ("Frage;Antwort\nPi?;3,14\n", [{"Frage": "Pi?", "Antwort": "3,14"}]),
        ("\r\n\r\nFrage;Antwort\r\nPi?;3,14", [{"Frage": "Pi?", "Antwort": "3,14"}]),
        ('\ufeff"sep=\t"\nFrage, ja;nein\tAntwort\nPi?\t3;14\n', [{"Frage, ja;nein": "Pi?", "Antwort": "3;14"}]),
        ('messages\n"[{""role"": ""user""}]"\n', [{"messages": [{"role": "user"}]}]),
        ("text\none\ntwo\n", [{"text": "one"}, {"text": "two"}]),
    ],
)
def test_the_separator_is_that_of_all_rows(tmp_path: Path, text: str, rows: list[Any]) -> None:
    assert [row for _, row in read(write(tmp_path / "a.csv", text))] == rows


# --- Broken files, and files that are not read to their end ---

LARGE = text_of([["prompt", "completion"], *([f"{n} x {n}", str(n * n)] for n in range(9000))])


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_a_compressed_file_that_is_cut_off_anywhere_is_named(tmp_path: Path, ending: str) -> None:
    small, large = packed(LARGE[:400].encode(), ending), packed(LARGE.encode(), ending)
    assert len(LARGE) > 2 * 2**16
    for whole, sizes in ((small, range(1, len(small))), (large, (len(large) // 2, len(large) - 1))):
        for size in sizes:
            path = write(tmp_path / f"a.csv{ending}", whole[:size])
            for opened in (open_source, lambda path: open_stream(path).raw(10_000)):
                with pytest.raises(
                    DataError, match=rf"^{re.escape(path)}: cannot be decompressed near byte \d+ of {size}"
                ):
                    opened(path)


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_a_stream_that_is_left_after_its_first_row_raises_nothing(tmp_path: Path, ending: str) -> None:
    """Not even while its generators are deleted, which pytest reports."""
    stream = open_stream(write(tmp_path / f"a.csv{ending}", packed(LARGE.encode(), ending)))
    assert stream.head(1)[0] == {"prompt": "0 x 0", "completion": "0"}
    del stream
    gc.collect()
