"""Documents of plain text: the ids of `tokenizer(text)`, all trained but the first, in pieces that lose nothing."""

from __future__ import annotations

import gzip
import json
import re
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from sftron.data.chat.check import MaskCount, require_reference_ids
from sftron.data.chat.template import TemplateError
from sftron.data.chat.tokenizer import ChatTokenizer
from sftron.data.dataset import PackedDataset
from sftron.data.formats.detect import resolve_format
from sftron.data.formats.table import RowFormat
from sftron.data.labels import Targets
from sftron.data.overlap import repetitions
from sftron.data.prepare import DataOptions, DataSet, Preparation
from sftron.data.sources import open_source, open_stream
from sftron.data.types import IGNORE_INDEX, ConversationKey, DataError, Document, Dropped, Role, TokenizedConversation
from tests.data.rows import assistant, turns, user, write_jsonl
from tests.data.streams import Rows, chat, facts, keys, make_mixture, mixed_rows, take

TEXT = RowFormat("text")
SHORT, LONG = "Tea is a drink.", "It is made of leaves.\nThey grow on hills, and rain falls there. " * 12


def documents(*texts: Any, **options: Any) -> DataSet:
    return DataSet(
        "docs", Rows([text if isinstance(text, dict) else {"text": text} for text in texts]), TEXT, **options
    )


def prepared(chat_tokenizer: ChatTokenizer, *texts: Any, length: int = 48, **options: Any) -> Preparation:
    return Preparation([documents(*texts)], chat_tokenizer, DataOptions(sequence_length=length, **options))


def texts_of(preparation: Preparation) -> list[str]:
    parsed = [preparation.parse(key) for key in preparation.all_keys()]
    return [each.text for each in parsed if isinstance(each, Document)]


def with_specials(tokenizer: PreTrainedTokenizerBase, before: str, after: str) -> ChatTokenizer:
    """A copy that adds tokens before and after any text, as Llama's adds a BOS."""
    backend = tokenizers.Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    ids = [(name, backend.token_to_id(name)) for name in (before, after) if name]
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single=[*filter(None, [before, "$A", after])], special_tokens=ids
    )
    copy = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=tokenizer.eos_token)
    copy.chat_template = tokenizer.chat_template
    return ChatTokenizer(copy)


# --- Ids, roles and labels ---


@pytest.mark.parametrize(("before", "after"), [("", ""), ("<|im_start|>", ""), ("<|im_start|>", "<|im_end|>")])
def test_a_document_has_the_ids_of_the_tokenizer_alone_and_all_but_the_first_are_trained(
    tokenizer: PreTrainedTokenizerBase, before: str, after: str
) -> None:
    chat_tokenizer = with_specials(tokenizer, before, after)
    preparation = prepared(chat_tokenizer, "  Tea, ☕ and 茶.\n", SHORT, LONG)
    judge, keys = chat_tokenizer.tokenizer, list(preparation.all_keys())
    assert len(keys) > 4
    for key in keys:
        document, tokenized, labeled = preparation.parse(key), preparation.tokenize(key), preparation.read(key)
        assert isinstance(document, Document)
        assert not isinstance(tokenized, Dropped)
        assert not isinstance(labeled, Dropped)
        expected = judge(document.text)["input_ids"]
        if after and not document.is_last:
            assert expected.pop() == judge.convert_tokens_to_ids(after)
        assert tokenized.input_ids.tolist() == expected
        assert labeled.labels.tolist() == [*expected[1:], IGNORE_INDEX]
        assert labeled.loss_weights.tolist() == [1] * (len(expected) - 1) + [0]
        assert set(tokenized.role_ids.tolist()) == {Role.TEXT}
        require_reference_ids(chat_tokenizer, document, tokenized)


def test_the_end_of_a_document_may_be_named_and_ends_only_its_last_piece(tokenizer: PreTrainedTokenizerBase) -> None:
    chat_tokenizer = ChatTokenizer(tokenizer, document_end="<|im_end|>")
    preparation = prepared(chat_tokenizer, SHORT, LONG)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    rows = [preparation.tokenize(key) for key in preparation.all_keys()]
    assert [end in row.input_ids for row in rows] == [True, *[False] * (len(rows) - 2), True]
    assert rows[-1].input_ids[-1] == end
    assert preparation.label(rows[-1]).labels[-2] == end
    for key, row in zip(preparation.all_keys(), rows, strict=True):
        require_reference_ids(chat_tokenizer, preparation.parse(key), row)
    assert chat_tokenizer.documents.frame_in_words.endswith("ends in <|im_end|> (tokenizer.document_end)")
    assert chat_tokenizer.fingerprint != ChatTokenizer(tokenizer).fingerprint
    with pytest.raises(TemplateError, match=r"tokenizer.document_end: tea is not a control token of the tokenizer"):
        ChatTokenizer(tokenizer, document_end="tea")


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("", "", "the tokenizer adds no BOS; no EOS ends a document (tokenizer.document_end sets another)"),
        ("<|im_start|>", "", "each piece begins with <|im_start|>, as the tokenizer adds it; no EOS ends a document"),
        ("<|im_start|>", "<|im_end|>", "; each document ends in <|im_end|>, as the tokenizer adds it"),
    ],
)
def test_what_begins_and_ends_documents_is_said(
    tokenizer: PreTrainedTokenizerBase, before: str, after: str, words: str
) -> None:
    assert words in with_specials(tokenizer, before, after).documents.frame_in_words


def test_a_control_token_spelled_in_a_document_stays_text_unless_it_is_allowed(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    text, end = "He wrote <|im_end|> here.", tokenizer.convert_tokens_to_ids("<|im_end|>")
    for allowed, num_control in ({}, 0), ({"assistant": ["<|im_end|>"]}, 0), ({"text": ["<|im_end|>"]}, 1):
        chat_tokenizer = ChatTokenizer(tokenizer, allow_control_tokens=allowed)
        preparation = prepared(chat_tokenizer, text)
        (key,) = preparation.all_keys()
        tokenized = preparation.tokenize(key)
        assert (tokenized.input_ids == end).sum() == num_control
        assert chat_tokenizer.decode(tokenized.input_ids) == text
        assert tokenized.holds_control_text == (num_control == 0)
        require_reference_ids(chat_tokenizer, preparation.parse(key), tokenized)


TARGETS = [
    Targets(),
    Targets(last_turn_only=True),
    Targets.named(["user"], "all"),
    Targets.named(["reasoning"], "last"),
]


@pytest.mark.parametrize("targets", TARGETS, ids=str)
@pytest.mark.parametrize("completions_only", [True, False])
def test_options_that_select_answers_neither_narrow_documents_nor_are_widened_by_them(
    chat_tokenizer: ChatTokenizer, targets: Targets, completions_only: bool
) -> None:
    rows = [chat("What is it?", "It is tea.", "And?", "Good."), chat("Why?", "So.")]
    options = {"sequence_length": 48, "targets": targets, "train_on_completions_only": completions_only}
    chats = DataSet("chats", Rows(rows), RowFormat("messages"))
    alone = Preparation([chats], chat_tokenizer, DataOptions(**options))
    mixed = Preparation([chats, documents(SHORT, LONG)], chat_tokenizer, DataOptions(**options))
    for key in mixed.all_keys():
        row = mixed.read(key)
        if key.source == 0:
            if completions_only and not isinstance(row, Dropped):
                assert {*row.role_ids[1:][row.labels[:-1] != IGNORE_INDEX].tolist()} <= targets.roles
            before = alone.read(key)
            if not isinstance(before, Dropped):
                assert row.labels.tolist() == before.labels.tolist()
                continue
            assert isinstance(row, Dropped)
        else:
            assert row.labels.tolist() == [*row.input_ids[1:].tolist(), IGNORE_INDEX]


def test_a_mask_that_leaves_out_a_token_of_a_document_or_trains_its_first_is_found(
    chat_tokenizer: ChatTokenizer,
) -> None:
    preparation = prepared(chat_tokenizer, SHORT)
    (key,) = preparation.all_keys()
    document, tokenized, labeled = preparation.parse(key), preparation.tokenize(key), preparation.read(key)
    masks = MaskCount()
    masks.add(chat_tokenizer, Targets(), document, tokenized, labeled, ())
    assert (masks.num_equal, masks.wrong) == (1, [])
    labeled.labels[2] = IGNORE_INDEX
    masks.add(chat_tokenizer, Targets(), document, tokenized, labeled, ())
    assert "token 3, " in masks.wrong[0]
    assert "is not trained, but the model must generate it" in masks.wrong[0]


# --- Pieces ---

PROSE = st.text(st.sampled_from("abc é☕茶\U0001f375\n\n\t  .<|im_end|>"), min_size=1, max_size=400)


@given(text=PROSE, length=st.integers(6, 40))
def test_pieces_are_the_document_whole_and_in_order_and_each_fits(
    chat_tokenizer: ChatTokenizer, text: str, length: int
) -> None:
    pieces = chat_tokenizer.documents.pieces(text, length)
    assert "".join(pieces) == text
    encoded = chat_tokenizer.documents.encode([Document(piece, ConversationKey(0, 0), "here") for piece in pieces])
    assert all(isinstance(each, TokenizedConversation) for each in encoded)
    lengths = [len(each) for each in encoded if isinstance(each, TokenizedConversation)]
    assert max(lengths) <= length
    assert len(pieces) == 1 or sum(lengths) > length
    assert len(pieces) == 1 or min(lengths) >= 2, "a piece of one token would train nothing"


def test_pieces_are_cut_where_lines_begin_else_at_white_space_else_between_characters(
    chat_tokenizer: ChatTokenizer,
) -> None:
    lines = chat_tokenizer.documents.pieces("One line of five words.\n" * 30, 48)
    assert len(lines) > 3
    assert all(piece.endswith("\n") for piece in lines)
    words = chat_tokenizer.documents.pieces("many more words " * 60, 48)
    assert len(words) > 3
    assert all(a[-1].isspace() or b[0].isspace() for a, b in pairwise(words))
    emoji = chat_tokenizer.documents.pieces("\U0001f375" * 90, 48)
    assert len(emoji) > 3
    assert set("".join(emoji)) == {"\U0001f375"}


def test_pieces_of_a_document_are_about_equally_long(chat_tokenizer: ChatTokenizer) -> None:
    for number in range(60, 400, 7):
        pieces = chat_tokenizer.documents.pieces("tea " * number, 48)
        sizes = [len(chat_tokenizer.documents.encode([Document(p, ConversationKey(0, 0), "")])[0]) for p in pieces]
        assert min(sizes) >= 20, (number, sizes)


def test_each_piece_is_a_row_that_is_named_and_the_documents_are_counted(chat_tokenizer: ChatTokenizer) -> None:
    preparation = prepared(chat_tokenizer, SHORT, {"text": LONG, "id": 7}, "error", SHORT)
    (dataset,) = preparation.datasets
    num = len(dataset.source) - 3
    assert num > 3
    assert "".join(texts_of(preparation)) == SHORT + LONG + "error" + SHORT
    assert dataset.documents == {"num_documents": 4, "num_cut": 1, "num_pieces": num}
    assert dataset.pieces_in_words == f"4 documents, 1 of them cut into {num} pieces"
    assert [dataset.source.locate(row) for row in (0, 1, num, num + 1)] == [
        "rows.jsonl:1",
        f"rows.jsonl:2, piece 1 of {num}",
        f"rows.jsonl:2, piece {num} of {num}",
        "rows.jsonl:3",
    ]
    assert dataset.source[2]["id"] == 7
    lasts = [
        parsed.is_last for parsed in map(preparation.parse, preparation.all_keys()) if isinstance(parsed, Document)
    ]
    assert lasts == [True, *[False] * (num - 1), True, True, True]
    assert repetitions(preparation)[0] == [("rows.jsonl:4", "rows.jsonl:1")]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_long_run_of_white_space_is_part_of_its_document_and_a_bad_document_is_refused_once(
    tmp_path: Path, chat_tokenizer: ChatTokenizer, is_streamed: bool
) -> None:
    """A piece of white space alone is as good as any; a document of it is none, and no piece of a bad one is read."""
    texts = [LONG + "\n" * 300 + LONG, LONG + " " * 900, " \n" * 900, LONG + "\0" + LONG]
    path = str(write_jsonl(tmp_path / "docs.jsonl", *({"text": text} for text in texts)))
    source = open_stream(path) if is_streamed else open_source(path)
    options = DataOptions(sequence_length=48, on_bad_row="skip")
    preparation = Preparation([DataSet("docs", source, TEXT)], chat_tokenizer, options)
    read = [preparation.read(key) for key in preparation.all_keys()]
    whole = [chat_tokenizer.decode(each.input_ids) for each in read if not isinstance(each, Dropped)]
    assert any(text.isspace() for text in whole)
    assert "".join(whole) == "".join(texts[:2])
    dropped = [(each.reason, each.detail.split("`")[0]) for each in read if isinstance(each, Dropped)]
    assert dropped == [("empty_text", f"{path}:3: "), ("not_text", f"{path}:4: ")]


def test_a_document_of_one_token_is_dropped_with_the_reason(chat_tokenizer: ChatTokenizer) -> None:
    dropped = prepared(chat_tokenizer, "a").read(ConversationKey(0, 0))
    assert isinstance(dropped, Dropped)
    assert dropped.detail == "rows.jsonl:1: is one token, with none before it"


def test_a_document_is_not_read_again_for_each_of_its_pieces(
    chat_tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    preparation, read = prepared(chat_tokenizer, *(f"{n} {LONG}" for n in range(3)), SHORT), list[int]()
    (dataset,) = preparation.datasets
    (*pieces, _), row_of = list(range(len(dataset.source))), Rows.__getitem__
    monkeypatch.setattr(Rows, "__getitem__", lambda self, row: read.append(row) or row_of(self, row))
    texts = {number: dataset.source[number]["text"] for number in pieces[::-2] + pieces[::2] + pieces}
    assert read == [2, 1, 0]
    assert "".join(texts[number] for number in pieces) == "".join(f"{n} {LONG}" for n in range(3))
    monkeypatch.setattr("sftron.data.pieces._MOST_CHARACTERS", 2 * len(LONG) + 10)
    again = [dataset.source[number]["text"] for number in pieces * 2]
    assert again == [texts[number] for number in pieces] * 2
    assert read[3:] == [1, 2, 0, 1, 2], "the first is held still"
    read.clear()
    assert [dataset.source[len(pieces)]["text"] for _ in range(2)] == [SHORT] * 2
    assert read == [3, 3], "a document that is not cut is not held"


def test_overlong_error_refuses_a_long_document_in_place_of_cutting_it(chat_tokenizer: ChatTokenizer) -> None:
    preparation = prepared(chat_tokenizer, SHORT, LONG, overlong="error")
    assert preparation.num_rows == 2
    remedy = "raise it, or set data.overlong to drop, which cuts documents into pieces$"
    with pytest.raises(DataError, match=rf"rows.jsonl:2: \d+ tokens, but tokens.sequence_length is 48; {remedy}"):
        preparation.read(ConversationKey(0, 1))
    for overlong in ("drop", "truncate_turns"):
        assert prepared(chat_tokenizer, SHORT, LONG, overlong=overlong).num_rows > 3


def test_a_stream_of_documents_has_the_same_pieces(tmp_path: Path, chat_tokenizer: ChatTokenizer) -> None:
    path = str(write_jsonl(tmp_path / "docs.jsonl", *({"text": text} for text in (SHORT, LONG, "", SHORT, LONG))))
    options = DataOptions(sequence_length=48, on_bad_row="skip")
    indexed, streamed = (
        Preparation([DataSet("docs", source, TEXT)], chat_tokenizer, options)
        for source in (open_source(path, max_samples=4), open_stream(path, max_samples=4))
    )
    assert streamed.num_rows is None
    assert "as they are read" in streamed.datasets[0].pieces_in_words
    found = [[each.read(key) for key in each.all_keys()] for each in (indexed, streamed)]
    assert len(found[0]) > 6
    assert [str(each) for each in found[0]] == [str(each) for each in found[1]]
    assert all(
        np.array_equal(a.input_ids, b.input_ids) for a, b in zip(*found, strict=True) if not isinstance(a, Dropped)
    )
    assert [each.reason for each in found[1] if isinstance(each, Dropped)] == ["empty_text"]
    assert streamed.datasets[0].source.raw(2).location == f"{path}:2, piece 2 of {len(found[0]) - 3}"


# --- Packs ---


def mixture(chat_tokenizer: ChatTokenizer, **options: Any) -> PackedDataset:
    chats = DataSet("chats", Rows(mixed_rows(40)), RowFormat("messages"), weight=2.0)
    texts = documents(*(f"{n} {SHORT} " * (1 + n % 9) + LONG * (n % 5 == 0) for n in range(20)), weight=1.0)
    return make_mixture([chats, texts], chat_tokenizer, **options)


def test_pack_n_is_the_same_on_any_number_of_ranks_and_after_a_stop(chat_tokenizer: ChatTokenizer) -> None:
    expected = [facts(pack) for pack in take(mixture(chat_tokenizer), 60)]
    assert {key.source for each in expected for key in each["keys"]} == {0, 1}
    for size in (2, 3):
        ranks = [take(mixture(chat_tokenizer, dp_rank=rank, dp_world_size=size), 60 // size) for rank in range(size)]
        assert [facts(pack) for round in zip(*ranks, strict=True) for pack in round] == expected
    stopped = mixture(chat_tokenizer)
    packs = list(islice(stopped, 23))
    resumed = mixture(chat_tokenizer)
    resumed.seek(23, {pack.lane: pack.lane_state for pack in packs})
    assert [facts(pack) for pack in take(resumed, 37)] == expected[23:]


def test_the_share_of_text_is_that_of_its_weight(chat_tokenizer: ChatTokenizer) -> None:
    tokens = np.zeros(2)
    for pack in take(mixture(chat_tokenizer, num_lanes=1), 200):
        for key, (start, end) in zip(pack.keys, pairwise(pack.conversation_bounds.tolist()), strict=True):
            tokens[key.source] += end - start
    assert tokens[1] / tokens.sum() == pytest.approx(1 / 3, abs=0.01)


@pytest.mark.parametrize("num_lanes", [6, "auto"])
def test_an_epoch_has_every_token_of_every_document_once_each_in_a_document_of_attention_of_its_own(
    chat_tokenizer: ChatTokenizer, num_lanes: Any
) -> None:
    texts = [f"{n} {SHORT} " * (1 + n % 9) + LONG * (n % 5 == 0) for n in range(30)]
    dataset = make_mixture([documents(*texts)], chat_tokenizer, num_epochs=1, num_lanes=num_lanes)
    pieces, read = texts_of(dataset.preparation), dict[int, str]()
    packs = take(dataset, 6 * 40)
    for pack in filter(lambda pack: pack.keys, packs):
        bounds = pack.conversation_bounds
        assert pack.cu_seqlens[: len(bounds)].tolist() == bounds.tolist()
        for key, (start, end) in zip(pack.keys, pairwise(bounds.tolist()), strict=True):
            assert pack.position_ids[start:end].tolist() == list(range(end - start))
            assert pack.labels[start : end - 1].tolist() == pack.input_ids[start + 1 : end].tolist()
            assert pack.labels[end - 1] == IGNORE_INDEX
            assert key.row not in read
            read[key.row] = chat_tokenizer.decode(pack.input_ids[start:end])
    assert not sum(pack.dropped for pack in packs if pack.dropped)
    assert "".join(read[row] for row in range(len(pieces))) == "".join(texts)


# --- Files ---


def rows(path: Path, **options: Any) -> list[str]:
    source = open_source(str(path), **{"documents": "file"} | options)
    return [source[index]["text"] for index in range(len(source))]


def test_a_text_file_holds_one_document_or_one_in_each_line(tmp_path: Path) -> None:
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "b_test.txt").write_text("  Two\n\nlines\n", encoding="utf-8")
    (folder / "a.txt").write_bytes(b"\xef\xbb\xbfOne \xe8\x8c\xb6\r\nand two\r\n \r\n")
    (folder / "c.txt.gz").write_bytes(gzip.compress(b"Packed\nin"))
    assert rows(folder) == ["One 茶\r\nand two\r\n \r\n", "  Two\n\nlines\n", "Packed\nin"]
    assert rows(folder, documents="line") == ["One 茶", "and two", "  Two", "lines", "Packed", "in"]
    assert rows(folder / "*.txt") == rows(folder)[:2]
    assert rows(folder, max_samples=1) == rows(folder)[:1]
    lines = open_source(str(folder), documents="line")
    assert [lines.locate(0), lines.locate(3)] == [f"{folder}/a.txt:1", f"{folder}/b_test.txt:3"]
    whole = open_source(str(folder), documents="file")
    assert whole.locate(1) == f"{folder}/b_test.txt"
    assert whole.fingerprint != lines.fingerprint
    before = whole.fingerprint
    (folder / "a.txt").write_text("Another", encoding="utf-8")
    assert open_source(str(folder), documents="file").fingerprint != before
    with pytest.raises(DataError, match=r"a.txt: had \d+ bytes when it was opened, but has 7 now"):
        whole[0]


def test_documents_in_folders_below_a_folder_are_not_left_out_in_silence(tmp_path: Path) -> None:
    for name in ("a.txt", "below/b.txt", "below/further/c.txt.gz", ".hidden/d.txt", "below/e.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    remedy = r"name all by a pattern, .*/\*\*/\*.txt, or some by .*/\*.txt"
    with pytest.raises(DataError, match=rf"has .txt files, and below/b.txt in a folder of its own, .*; {remedy}"):
        rows(tmp_path)
    assert rows(tmp_path / "**/*.txt") == ["a.txt", "below/b.txt"]
    assert rows(tmp_path / "*.txt") == ["a.txt"]
    (tmp_path / "below/b.txt").unlink()
    (tmp_path / "below/further/c.txt.gz").unlink()
    (tmp_path / "below/folder.txt").mkdir()
    assert rows(tmp_path) == ["a.txt"]


def test_a_file_or_a_folder_without_an_ending_of_text_is_refused_with_those_that_are_read(tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("Tea")
    wanted = "wanted .txt, .jsonl, .json, .csv, .tsv, .parquet or .arrow, the first five also as .gz or .zst"
    for path in (tmp_path / "notes.md", tmp_path):
        with pytest.raises(DataError, match=re.escape(wanted)):
            rows(path)
        with pytest.raises(DataError, match=r"wanted \.jsonl, .*, the first four also"):
            open_source(str(path))


def test_more_files_than_a_process_may_open_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resource = pytest.importorskip("resource")
    for number in range(200):
        (tmp_path / f"{number:03}.txt").write_text(f"Document {number}", encoding="utf-8")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, limits[1]))
    try:
        assert rows(tmp_path) == [f"Document {number}" for number in range(200)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_folder_of_text_files_is_a_data_set_of_packs(tmp_path: Path, chat_tokenizer: ChatTokenizer) -> None:
    (tmp_path / "a.txt").write_text(SHORT + "\n" + LONG, encoding="utf-8")
    options = {"format": "text", "sequence_length": 48, "num_epochs": 1}
    packs = list(PackedDataset.from_path(tmp_path, chat_tokenizer, **options))
    tokens = sum(pack.num_tokens for pack in packs)
    by_line = list(PackedDataset.from_path(tmp_path, chat_tokenizer, documents="line", **options))
    assert len(keys(packs)) > 3
    assert len(keys(by_line)) != len(keys(packs))
    assert sum(pack.num_trained_tokens for pack in packs) == tokens - len(keys(packs))


# --- Bad input ---


def refused(tmp_path: Path, chat_tokenizer: ChatTokenizer, content: bytes, name: str = "a.txt") -> str:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        PackedDataset.from_path(path, chat_tokenizer, format="text", sequence_length=48)
    assert str(caught.value).startswith(str(path))
    return str(caught.value)


CHAT = json.dumps({"messages": [user("Hi"), assistant("Yo")]})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x89PNG\r\n\x1a\n", "byte 1 is not UTF-8, in "),
        (b"PK\x03\x04\x00\x00", "`text` has a NUL at character 5, which plain text must not contain; remove it"),
        ("Tee".encode("utf-16"), "byte 1 is not UTF-8"),
        (b"", "`text` is empty; write the text, or remove the row"),
        (b" \n\t\n", "`text` is empty"),
        (CHAT.encode(), "is a chat, as it has `messages`, and format text would train its prompts; set `format: mess"),
        (f"{CHAT}\n{CHAT}\n".encode(), "`format: messages`, and name the file .jsonl"),
    ],
)
def test_files_that_hold_no_document_are_refused_with_the_reason(
    tmp_path: Path, chat_tokenizer: ChatTokenizer, content: bytes, message: str
) -> None:
    assert message in refused(tmp_path, chat_tokenizer, content)


def test_chats_that_are_given_as_text_are_refused_by_the_column_that_they_have(
    tmp_path: Path, chat_tokenizer: ChatTokenizer
) -> None:
    message = refused(tmp_path, chat_tokenizer, CHAT.encode(), "a.jsonl")
    assert message.endswith(
        "a.jsonl:1: is a chat, as it has `messages`, and format text would train its prompts; set `format: messages`"
    )
    both = json.dumps(json.loads(CHAT) | {"text": "Hi Yo"}).encode()
    assert "if its column `text` is meant, write `columns: {text: text}`" in refused(
        tmp_path, chat_tokenizer, both, "a.jsonl"
    )
    assert resolve_format(open_source(str(tmp_path / "a.jsonl")), "text", {"text": "text"}).name == "text"
    sharegpt = json.dumps(turns(("human", "q"), ("gpt", "a"))).encode()
    assert "as it has `conversations`" in refused(tmp_path, chat_tokenizer, sharegpt, "a.jsonl")
    assert "has no column `text`, which format text needs" in refused(
        tmp_path, chat_tokenizer, b'{"prose": "Tea"}', "a.jsonl"
    )
    assert "`text` is the number 7; wanted text" in refused(tmp_path, chat_tokenizer, b'{"text": 7}', "a.jsonl")
    documents_of_json = b'{"tea": "green"}'
    (tmp_path / "b.txt").write_bytes(documents_of_json)
    assert resolve_format(open_source(str(tmp_path / "b.txt"), documents="file"), "text").name == "text"


def test_text_is_never_read_as_such_unless_it_is_declared(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="set `format: text` if `text` holds plain text without a chat: all of it is"):
        resolve_format(open_source(str(write_jsonl(tmp_path / "a.jsonl", {"text": "Tea"}))))
    (tmp_path / "a.txt").write_text("Tea", encoding="utf-8")
    with pytest.raises(DataError, match=r"a.txt: a file with the ending .txt; .*; or set `format: text`, if it holds"):
        open_source(str(tmp_path / "a.txt"))
    with pytest.raises(DataError, match=r"has .txt files and others; make each kind a data set of its own"):
        open_source(f"{tmp_path}/a.*", documents="file")
    with pytest.raises(DataError, match=r".txt files are not streamed; remove streaming, or convert them to .jsonl"):
        open_stream(str(tmp_path / "a.txt"), documents="file")
