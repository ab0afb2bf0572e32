"""The types of values and of sections of the configuration; `Wanted` puts values in words for help and errors."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

from sftron.name_patterns import NamePatterns
from sftron.regular_file import expand_home


@dataclass(frozen=True)
class Wanted:
    """What a value must be, in words that complete the sentence "wanted ..."."""

    words: str


def _refused(problem: str) -> PydanticCustomError:
    return PydanticCustomError("refused", "{problem}", {"problem": problem})


def _require_expression(targets: tuple[str, ...] | str) -> tuple[str, ...] | str:
    if isinstance(targets, str):
        if len(names := re.split(r"[,;\s]+", targets.strip(",; "))) > 1 and all(
            re.fullmatch(r"[\w.]+", n) for n in names
        ):
            raise _refused(f"{targets} is one text; write a list of names: [{', '.join(names)}]")
        try:
            NamePatterns([targets])
        except ValueError as error:
            problem = f"{error}; correct it, or write a list of names"
            raise _refused(problem) from error
    return targets


def _refuse_dropout(dropout: float) -> float:
    if dropout:
        raise _refused(
            f"is {dropout}, but only 0 is supported, because the dropped elements would depend on the packing, the "
            "number of ranks and the resumes of the run; remove the key"
        )
    return dropout


def _require_day(date: str) -> str:
    try:
        datetime.date.fromisoformat(date)
    except ValueError as error:
        raise _refused(f"{date}: {error}") from error
    return date


def _require_inside(name: str) -> str:
    """Refuses a name that would lead out of the Hub's cache, because the libraries turn it into a path there."""
    if {"", ".", ".."} & {*name.split("/")} or not name.isprintable():
        raise _refused(f"{name!r} cannot be a name on the Hub: it has an empty part, only dots, or a control character")
    return name


_MAX_ACCUMULATION = 2**20

Text = Annotated[str, Field(min_length=1), Wanted("text")]
ControlToken = Annotated[str, Field(min_length=1), Wanted("the text of a control token")]
PathText = Annotated[str, Field(min_length=1), AfterValidator(expand_home), Wanted("text")]
Revision = Annotated[
    str,
    Field(pattern=r"^[\w.][\w.+/-]*$"),
    AfterValidator(_require_inside),
    Wanted("the name of a branch or a tag, or a commit"),
]
HubConfig = Annotated[
    str, Field(pattern=r"^[^/\\]+$"), AfterValidator(_require_inside), Wanted("the name of a configuration")
]
Name = Annotated[
    str,
    Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$", max_length=200),  # file systems have names of up to 255 bytes
    Wanted("a plain name (up to 200 letters, digits, . _ -)"),
]
Positive = Annotated[int, Field(ge=1, lt=2**63), Wanted("a whole number above 0")]
TwoOrMore = Annotated[int, Field(ge=2), Wanted("a whole number above 1")]
Rank = Annotated[int, Field(ge=1, le=2**16), Wanted("a whole number from 1 to 65536")]
Workers = Annotated[int, Field(ge=0, le=2**8), Wanted("a whole number from 0 to 256")]
WarmUp = Annotated[
    Annotated[int, Field(ge=0, lt=2**63)] | Annotated[float, Field(ge=0, lt=1)],
    Wanted("a whole number of steps, or their share of the run, from 0 and below 1"),
]
Seed = Annotated[int, Field(ge=0, lt=2**32), Wanted("a whole number from 0 to 4294967295")]
PositiveNumber = Annotated[float, Field(gt=0, lt=3e38), Wanted("a number above 0, below 3e38")]
NonNegativeNumber = Annotated[float, Field(ge=0, lt=3e38), Wanted("a number from 0, below 3e38")]
Share = Annotated[float, Field(ge=0, le=1), Wanted("a number from 0 to 1")]
PositiveShare = Annotated[float, Field(gt=0, le=1), Wanted("a number above 0, up to 1")]
Beta = Annotated[float, Field(ge=0, lt=1)]
# YAML gives lists where frozen models hold tuples, hence strict=False on the container; its items stay strict.
Betas = Annotated[tuple[Beta, Beta], Field(strict=False), Wanted("a list of two numbers, each at least 0 and below 1")]
Texts = Annotated[tuple[Text, ...], Field(strict=False), Wanted("a list of text")]
Names = Annotated[dict[Text, Text], Wanted("a mapping of names to names")]
TemplateKwargs = Annotated[dict[Text, Any], Wanted("a mapping of names to values")]
TextsByRole = Annotated[dict[Text, Texts], Wanted("a mapping of roles to lists of text")]
TrainedRole = Literal["assistant", "answer", "reasoning", "tool_call", "user", "system", "tool"]
TrainedRoles = Annotated[
    tuple[TrainedRole, ...],
    Field(strict=False, min_length=1),
    Wanted("a list of assistant, answer, reasoning, tool_call, user, system or tool"),
]
Targets = Annotated[
    Annotated[tuple[Text, ...], Field(strict=False, min_length=1)] | Text,
    AfterValidator(_require_expression),
    Wanted("all-linear, a list of names, such as [q_proj, v_proj], or a regular expression"),
]
ModulesToSave = Annotated[
    tuple[Literal["embed_tokens", "lm_head"], ...],
    Field(strict=False),
    Wanted("a list of embed_tokens or lm_head"),
]
RowFormatName = Literal[
    "auto",
    "messages",
    "sharegpt",
    "prompt_completion",
    "query_response",
    "question_answer",
    "alpaca",
    "input_ids",
    "text",
]
Dropout = Annotated[float, AfterValidator(_refuse_dropout), Wanted("0")]
SetupFunction = Annotated[
    str,
    # The second is what a run writes whose parts were arguments in Python.
    Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$|^open_trainer\(.*\)$"),
    Wanted("module:function, as my_package.my_module:setup"),
]
OptionsOfSetup = Annotated[dict[str, Any], Wanted("a mapping of any keys and values")]
SourceHash = Annotated[str, Field(pattern=r"^[0-9a-f]{12}$"), Wanted("12 hexadecimal digits")]
Day = Annotated[
    str, Field(pattern=r"^\d{4}-\d\d-\d\d$"), AfterValidator(_require_day), Wanted('a date, as "2026-01-31"')
]
Accumulation = Annotated[
    int, Field(ge=1, le=_MAX_ACCUMULATION), Wanted(f"a whole number from 1 to {_MAX_ACCUMULATION}")
]
Checkpoint = Annotated[
    str, Field(min_length=1), AfterValidator(expand_home), Wanted("auto, never or the path of a checkpoint")
]
Repository = Annotated[str, Field(pattern=r"^[\w.-]+/[\w.-]+$"), Wanted("the name of a repository, user/name")]
Trackers = Annotated[
    tuple[
        Literal["wandb", "trackio", "tensorboard", "mlflow", "aim", "clearml", "comet_ml", "dvclive", "swanlab"], ...
    ],
    Field(strict=False),
    Wanted("a list of wandb, trackio, tensorboard, mlflow, aim, clearml, comet_ml, dvclive or swanlab"),
]


Contradictions = Iterator[tuple[str, str]]
"""Pairs of dotted keys, separated by spaces, and the problem, which is reported at the first of them."""


class Section(BaseModel):
    """Frozen and strict: an unknown key, a quoted number, or a bool for a number is an error."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        serialize_by_alias=True,
    )

    def contradictions(self, before: Mapping[str, Any]) -> Contradictions:
        """Yields contradictions between values that are valid by themselves.

        Args:
            before: The valid sections above this one in `Config`, by name.
        """
        return iter(())
