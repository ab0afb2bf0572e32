"""tools/llama_cpp_templates.py on two templates, one of which llama.cpp renders otherwise."""

import json
from pathlib import Path

import pytest

from tests.data.rows import write_jsonl
from tools import llama_cpp_templates

EQUAL = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}{{ '<|assistant|>' }}"
UNLIKE = (
    "{# noise #}{% set name = 'a' %}{% for m in messages %}"
    "{{ '<|%s|>' | format(m.role) }}{{ m.content }}{% endfor %}{{ name }}"
)


def test_the_table_and_the_smallest_program_of_a_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, place = tmp_path / "out", tmp_path / "templates"
    place.mkdir()
    (place / "equal.jinja").write_text(EQUAL)
    write_jsonl(place / "unlike.json", {"chat_template": UNLIKE, "prompt": "messages {% if x %}", "again": [EQUAL]})
    (place / "code.py").write_text(f"TEMPLATE = {UNLIKE!r}\nOTHER = '{{% for m in messages %}}'\n")
    assert llama_cpp_templates.main([str(out), str(place)]) == 0

    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[:3] == ["0 of 2 templates left out", "2 templates", "1 templates equal"]
    table = {what: int(number) for number, _, what in (line.partition(" ") for line in lines[1:-1])}
    assert table["rows"] == 2 * table["rows equal"] == 2 * table["rows template"] >= 40
    assert lines[-1].startswith("template: 1 template; the shortest is ")
    assert lines[-1].endswith("/templates/code.py")
    assert (out / "template.jinja").read_text() == "{% for m in messages %}{{ '<|%s|>' | format(m.role) }}{% endfor %}"
    assert json.loads((out / "template.json").read_text())["messages"] == [
        {"role": "user", "content": ""},
        {"role": "assistant", "content": ""},
    ]
    first = json.loads((out / "differences.jsonl").read_text().splitlines()[0])
    assert (first["transformers"], first["llama_cpp"]) == ("<|user|>Who?a", "<|%s|>Who?a")


def test_templates_of_one_path_are_kept_apart_and_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in (("one/a/b/x.jinja", EQUAL), ("two/a/b/x.jinja", UNLIKE), ("bad.json", "{messages")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert llama_cpp_templates.templates([tmp_path]) == {"a/b/x.jinja": EQUAL, "a/b/x.jinja (2)": UNLIKE}
    assert f"{tmp_path / 'bad.json'} is left out: Expecting property name" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        llama_cpp_templates.main([str(tmp_path / "out"), str(tmp_path), "--every", "0"])
    assert "argument --every: invalid positive value: '0'" in capsys.readouterr().err


def test_a_place_without_templates_and_a_folder_with_files_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept, place = tmp_path / "mine" / "notes.txt", tmp_path / "equal.jinja"
    kept.parent.mkdir()
    kept.write_text("kept")
    place.write_text(EQUAL)
    for out, of, problem in (
        (kept.parent, place, "mine is not empty; name a folder that is not there"),
        (tmp_path / "out", kept.parent, "mine; name files or folders with *.jinja, *.json or *.py"),
        (tmp_path / "out", tmp_path / "none", "none: no such file or folder"),
    ):
        assert llama_cpp_templates.main([str(out), str(of)]) == 2
        assert problem in capsys.readouterr().err
    assert kept.read_text() == "kept"
