"""Few rooms lie between a configuration and the first step: whoever follows a run opens so many files, and no more."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import sftron.train
from sftron.train.trainer import Trainer
from tests.train.runs import make_config

TRAIN = Path(sftron.train.__file__).parent


class FirstStepError(Exception):
    """The first step begins here."""


@contextmanager
def rooms_entered() -> Iterator[tuple[set[str], set[str]]]:
    """Yields the files of `train` in which a function was called within the context, and the classes of `train` of
    which a method was; the call of `train_step` ends it."""
    files: set[str] = set()
    classes: set[str] = set()

    def enter(frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        path, function = Path(frame.f_code.co_filename), frame.f_code.co_qualname
        if path.is_relative_to(TRAIN):
            files.add(str(path.relative_to(TRAIN)))
        # The __init__ of a dataclass is in no file, and what calls a class method has no instance.
        kind = type(frame.f_locals.get("self"))
        if kind.__module__.startswith("sftron.train"):
            classes.add(kind.__name__)
        if path == TRAIN / "step.py" and function == "train_step":
            raise FirstStepError

    sys.setprofile(enter)
    try:
        yield files, classes
    except FirstStepError:
        pass
    finally:
        sys.setprofile(None)


def test_few_files_and_classes_of_train_lie_between_a_configuration_and_the_first_step(
    tmp_path: Path, model_folder: Path
) -> None:
    config = make_config(tmp_path, model_folder)
    with rooms_entered() as (files, classes):
        Trainer(config).run()
    assert "step.py" in files
    assert len(files) <= 22, sorted(files)
    assert len(classes) <= 31, sorted(classes)
