import json

from sftron.report.inspection import inspect_packs

from .bytes_tokenizer import CHATS, awkward_pack, conversation, decode


def test_rows_are_read_up_to_the_cap_and_the_cap_is_said():
    num_taken = 0

    def rows():
        nonlocal num_taken
        for row in range(10):
            num_taken += 1
            yield conversation(CHATS[0], row=row)

    capped = inspect_packs([], rows(), decode, max_rows=4)
    assert (capped.audit.num_rows, capped.audit.is_partial, num_taken) == (4, True, 5)
    assert "the first ones only" in capped.as_text(color=False)
    whole = inspect_packs([], rows(), decode, max_rows=10)
    assert (whole.audit.num_rows, whole.audit.is_partial) == (10, False)


def test_all_packs_are_counted_and_the_first_ones_shown():
    inspection = inspect_packs([awkward_pack() for _ in range(5)], [], decode, num_shown=2)

    assert len(inspection.packs) == 2
    assert inspection.audit.packing.num_packs == 5


def test_packs_alone_are_enough_and_problems_are_handed_on(tmp_path):
    shown = awkward_pack()
    fine = inspect_packs(iter([shown]), [], decode, source_names=["a.jsonl"])
    assert fine.problems == []
    shown.loss_weights[:] = 0
    broken = inspect_packs([shown], [], decode)
    assert broken.problems
    broken.write_html(tmp_path / "page.html")
    broken.write_json(tmp_path / "audit.json")
    assert "Do not train on this." in (tmp_path / "page.html").read_text(encoding="utf-8")
    assert json.loads((tmp_path / "audit.json").read_text(encoding="utf-8"))["problems"] == broken.problems
