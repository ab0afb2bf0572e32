"""Few rooms lie between a configuration and the first step, and no door is opened twice: whoever follows a run opens so
many files, and a run finds and verifies each folder once."""

import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import sftron.train
from sftron.checkpoint import model_folder as model_folders
from sftron.train.trainer import open_trainer
from tests.train.runs import make_config

TRAIN = Path(sftron.train.__file__).parent


class FirstStepError(Exception):
    """The first step begins here."""


FOUND_ONCE = ("local_folder", "check_files", "read_config")
"""Functions of checkpoint/model_folder.py whose first argument is a folder."""


@contextmanager
def rooms_entered() -> Iterator[tuple[set[str], set[str], Counter[str]]]:
    """Yields the files of `train` in which a function was called within the context, the classes of `train` of which a
    method was, and the calls of FOUND_ONCE by name and folder; the call of `train_step` ends it."""
    files: set[str] = set()
    classes: set[str] = set()
    looks: Counter[str] = Counter()

    def enter(frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        path, function = Path(frame.f_code.co_filename), frame.f_code.co_qualname
        if path.is_relative_to(TRAIN):
            files.add(str(path.relative_to(TRAIN)))
        if path == Path(model_folders.__file__) and function in FOUND_ONCE:
            looks[f"{function} {frame.f_locals.get('folder', frame.f_locals.get('path'))}"] += 1
        # The __init__ of a dataclass is in no file, and what calls a class method has no instance.
        kind = type(frame.f_locals.get("self"))
        if kind.__module__.startswith("sftron.train"):
            classes.add(kind.__name__)
        if path == TRAIN / "step.py" and function == "train_step":
            raise FirstStepError

    sys.setprofile(enter)
    try:
        yield files, classes, looks
    except FirstStepError:
        pass
    finally:
        sys.setprofile(None)


def test_few_files_and_classes_of_train_lie_between_a_configuration_and_the_first_step(
    tmp_path: Path, model_folder: Path
) -> None:
    config = make_config(tmp_path, model_folder)
    with rooms_entered() as (files, classes, _):
        open_trainer(config).train()
    assert "step.py" in files
    assert len(files) <= 24, sorted(files)
    assert len(classes) <= 34, sorted(classes)


@pytest.mark.parametrize("has_own_tokenizer", [False, True])
def test_a_run_finds_and_verifies_each_folder_once(
    tmp_path: Path, model_folder: Path, *, has_own_tokenizer: bool
) -> None:
    tokenizer = model_folder
    if has_own_tokenizer:
        tokenizer = shutil.copytree(model_folder, tmp_path / "tokenizer")
    config = make_config(tmp_path, model_folder, tokenizer__path=str(tokenizer), checkpoints__export_hf=True)
    with rooms_entered() as (_, _, looks):
        open_trainer(config).train()
    found = [f"{function} {model_folder}" for function in FOUND_ONCE]
    if has_own_tokenizer:
        found += [f"{function} {tokenizer}" for function in ("local_folder", "check_files")]
    assert looks == Counter(found)
