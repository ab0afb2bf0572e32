"""What a run is, before its weights are loaded: its configuration, ranks, data and model, and their fingerprints.

`build_run.build_run` makes a Setup; everything else in `train` takes one.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from sftron.checkpoint.export import BASE_WEIGHTS
from sftron.checkpoint.frozen_files import Stamp
from sftron.checkpoint.source import ExportSource
from sftron.config import Config
from sftron.config.data_schema import KeptDataset
from sftron.data.chat.template import TemplateError
from sftron.data.chat.tokenizer import ChatTokenizer
from sftron.data.dataset import PackedDataset
from sftron.data.lanes.lane import num_consumed
from sftron.data.prepare import Preparation
from sftron.data.types import DataError, LabeledConversation, Message
from sftron.errors import without_secrets
from sftron.models.adapters import AdapterStart
from sftron.models.architecture import OF_THE_MODEL, LlamaConfig, architecture_facts
from sftron.models.quantization import NF4
from sftron.train.extension import NO_EXTENSION, Extension
from sftron.train.flops import Peak, TrainedMatrices
from sftron.train.optimizer import learning_rate_factor
from sftron.train.progress import Progress
from sftron.train.ranks import Ranks
from sftron.train.sample import RunProjection, Sample
from sftron.visible_text import counted

_LONGEST_SHOWN = 40

# --- The data ---


@dataclass(frozen=True, eq=False)
class EvaluationSet:
    """A named set of conversations for evaluation, kept in memory at 13 bytes per token."""

    name: str
    preparation: Preparation
    conversations: tuple[LabeledConversation, ...]
    """The conversations, of which only completions have labels, even if data.train_on_completions_only is false. So the
    runs of an ablation are compared on the same tokens."""
    dropped: Counter[str]
    """The number of dropped rows, by reason."""
    limit: KeptDataset | None = None
    """The limit for the rise of its loss, for a set of evaluation.keep."""

    @cached_property
    def fingerprint(self) -> str:
        """The digest of the name and of all that its losses depend on besides the model: ids, labels and roles.

        So no key changes it that changes none of these, such as a tokens.sequence_length that all rows fit.
        """
        digest = sha256(self.name.encode())
        for each in self.conversations:
            digest.update(len(each).to_bytes(8, "little"))
            for array in (each.input_ids, each.labels, each.role_ids):
                digest.update(array.tobytes())
        return digest.hexdigest()

    @property
    def made_of(self) -> dict[str, str]:
        """The fingerprint, and what the conversations are made of, by name: it says why a fingerprint has changed."""
        made_of = self.preparation.fingerprint
        rows = made_of.pop("data.datasets.0")
        return {f"rows of {self.name}": rows, f"tokens of {self.name}": self.fingerprint, **made_of}


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt: messages that end in a user turn."""

    messages: tuple[Message, ...]
    row: Mapping[str, Any]
    """The row of the file, for a user's `compute_metrics`."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """The row's values of variables of the chat template."""
    location: str = ""
    """The row's location for error messages (file:line)."""

    def ids(self, chat_tokenizer: ChatTokenizer) -> list[int]:
        """Returns the ids of the prompt, up to where the answer begins. Raises DataError."""
        try:
            return chat_tokenizer.encode_prompt(self.messages, self.template_kwargs)
        except TemplateError as error:
            raise DataError(f"{self.location}: {error}") from error

    @property
    def text(self) -> str:
        return self.messages[-1].content or ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """The opened data of a run, and a sample of rows that has been checked in full."""

    chat_tokenizer: ChatTokenizer
    dataset: PackedDataset
    sample: Sample
    projection: RunProjection
    evaluation_sets: tuple[EvaluationSet, ...]
    questions: list[Question]
    file_stamps: list[tuple[str, int, int, int, int]]
    """The metadata of the data files before they were opened."""

    @property
    def preparation(self) -> Preparation:
        return self.dataset.preparation

    @property
    def is_evaluated(self) -> bool:
        return bool(self.evaluation_sets or self.questions)

    @property
    def fingerprints(self) -> dict[str, Any]:
        """The hashes of rows, tokenizer and template: {"training": hash, "evaluation": {set name: hash}}.

        They are equal for two runs whose losses are computed over the same tokens, regardless of seed, lanes and model.
        """
        training = sha256(json.dumps(self.preparation.fingerprint, sort_keys=True).encode()).hexdigest()
        return {"training": training, "evaluation": {each.name: each.fingerprint for each in self.evaluation_sets}}


# --- The model ---


@dataclass(frozen=True, slots=True)
class RunAdapters:
    """The adapters of a run, before the weights are read."""

    start: AdapterStart
    trained: TrainedMatrices
    num_trained: int
    """The number of trained parameters."""
    is_quantized: bool
    """Whether the base is rounded to NF4, and so is another base."""
    origin: str = ""
    """Where the first values come from, if not from the initialization."""

    @property
    def facts(self) -> dict[str, str]:
        """Returns the entries of a checkpoint's fingerprint, one for each key; see `architecture_facts`."""
        spec = self.start.spec
        values = {
            "rank": _one_or_digest(spec.ranks),
            "alpha": _one_or_digest(spec.alphas),
            "targets": f"{len(spec.ranks)} layers, {_digest(sorted(spec.ranks))}",
            "rslora": str(spec.rslora),
            "dora": str(spec.dora),
            "modules_to_save": ", ".join(sorted(spec.modules_to_save)) or "none",
        }
        base = {f"{OF_THE_MODEL}base in NF4": str(self.is_quantized)}
        return base | {f"{OF_THE_MODEL}lora.{key}": value for key, value in values.items()}


def _one_or_digest(values: Mapping[str, float]) -> str:
    """Returns the value of all projections, or the smallest and the largest with a digest of all of them."""
    low, high = min(values.values()), max(values.values())
    return f"{low:g}" if low == high else f"{low:g} to {high:g}, {_digest(sorted(values.items()))}"


def _digest(value: object) -> str:
    return sha256(repr(value).encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunModel:
    """The model of a run without its weights: its architecture and the implementations that compute it."""

    folder: Path
    stored_architecture: LlamaConfig
    """The architecture in the folder's config.json."""
    architecture: LlamaConfig
    """The architecture that is trained, which has more embeddings if tokenizer.add_tokens needs them."""
    compute_dtype: torch.dtype
    attention: tuple[str, ...]
    """The attention backend of each layer; "" for a layer without attention."""
    attention_failures: Sequence[str]
    """A line for each backend that failed on the device and is not used."""
    loss: str
    peak: Peak
    initialize_ids: list[int]
    """The ids of tokens whose embeddings are initialized to the mean of all embeddings."""
    export_source: ExportSource | None
    """None if the run exports nothing."""
    adapters: RunAdapters | None = None
    """None for full fine-tuning."""
    base_digest: str | None = None
    """The hash of the weight files, which a checkpoint of adapters refers to; None for full fine-tuning."""
    base_stamps: Mapping[Path, Stamp] = field(default_factory=dict)
    """Those of the weight files before they were read for the hash."""
    router_aux_loss_coef: float = 0.0
    """The factor of the auxiliary loss of routers; 0 for a model without experts."""

    @property
    def trained(self) -> TrainedMatrices:
        return TrainedMatrices() if self.adapters is None else self.adapters.trained

    @property
    def fingerprint(self) -> dict[str, str]:
        """The part of a checkpoint's fingerprint that describes the model."""
        facts = architecture_facts(self.architecture)
        if self.adapters is not None:
            facts |= self.adapters.facts | {BASE_WEIGHTS: str(self.base_digest)}
        return facts


def frozen_dtype(config: Config) -> torch.dtype:
    """Returns the type of frozen matrices. In the compute type, a frozen matrix need not be cast at each step."""
    name = config.model.frozen_dtype
    return NF4 if name == "nf4" else getattr(torch, config.model.compute_dtype if name == "auto" else name)


# --- Its settings ---


@dataclass(frozen=True, slots=True)
class Change:
    """A change of one configuration key between two starts of the run."""

    step: int
    """The first step that is trained with `new`."""
    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key}: {shown(self.old)} -> {shown(self.new)}"


@dataclass(frozen=True, slots=True)
class Settings:
    """The resolved configuration in force (as JSON values, without secrets), and its changes so far.

    A checkpoint stores the settings of its steps. After a kill, a resume therefore starts from the settings of the
    saved steps, even if other settings were tried in between.
    """

    config: Mapping[str, Any]
    changes: tuple[Change, ...] = ()

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Settings:
        """Returns the settings that `state()` gave."""
        return cls(dict(state["config"]), tuple(Change(**change) for change in state["changes"]))

    def state(self) -> dict[str, Any]:
        """Returns the settings for a checkpoint, as JSON values."""
        return {"config": self.config, "changes": [asdict(each) for each in self.changes]}

    def changes_to(self, now: Settings, *, after_step: int) -> tuple[Change, ...]:
        """Returns a change for every key whose value differs in `now`; it takes effect after step `after_step`."""
        old, new = dict(_dotted(self.config)), dict(_dotted(now.config))
        return tuple(
            Change(after_step + 1, key, old.get(key), new.get(key)) for key in old | new if old.get(key) != new.get(key)
        )

    def changed_at(self, step: int) -> dict[str, list[Any]]:
        """Returns the keys that change at `step`, each with its old and new value."""
        return {each.key: [each.old, each.new] for each in self.changes if each.step == step}

    def periods(self) -> dict[str, list[tuple[int, int | None, Any]]]:
        """Returns for each changed key its values, as (first step, last step or None if still in force, value)."""
        periods: dict[str, list[tuple[int, int | None, Any]]] = {}
        for change in self.changes:
            own = periods.setdefault(change.key, [(1, None, change.old)])
            own[-1] = (own[-1][0], change.step - 1, own[-1][2])
            own.append((change.step, None, change.new))
        return periods

    def as_comment(self) -> str:
        """Returns the comment at the top of config.yaml; empty if nothing has changed."""
        lines = [
            f"#   {key}: " + ", ".join(f"{shown(value)} {period_words(first, last)}" for first, last, value in own)
            for key, own in self.periods().items()
        ]
        return "\n".join(["# Settings that changed during the run:", *lines, ""]) if lines else ""

    def as_config(self) -> Config | None:
        """Returns the configuration; None if this version of sftron cannot read it."""
        try:
            return Config.model_validate(self.config)
        except ValidationError:
            return None


def shown(value: Any) -> str:
    """Returns a value as JSON, which is one line of ASCII."""
    return json.dumps(value)


def period_words(first: int, last: int | None) -> str:
    if last is None:
        return f"from step {first} on"
    return f"in step {first}" if first == last else f"in steps {first} to {last}"


def _dotted(tree: Mapping[str, Any] | Sequence[Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields every value with its dotted key; items in a list of mappings have an index, as in data.datasets.0.path."""
    for key, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
        is_mappings = isinstance(value, list) and value and all(isinstance(each, Mapping) for each in value)
        if is_mappings or (isinstance(value, Mapping) and value):
            yield from _dotted(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


# --- The run ---


@dataclass(frozen=True, slots=True)
class Setup:
    """Everything that a run needs except weights and training state."""

    config: Config
    """The configuration, with commits in place of the revisions of what is on the Hub."""
    ranks: Ranks
    data: RunData
    model: RunModel
    commits: Mapping[str, str] = field(default_factory=dict)
    """The commits; see `find_commits`."""
    extension: Extension = NO_EXTENSION

    @property
    def fingerprint(self) -> dict[str, str]:
        """The architecture and everything that pack n depends on (law 5), by name.

        A resume with another fingerprint is refused, unless checkpoints.allow_data_change permits it.
        """
        return self.model.fingerprint | data_fingerprint(self.config, self.data.dataset)

    @property
    def settings(self) -> Settings:
        """The settings of a new run."""
        return Settings(without_secrets(self.resolved_config.model_dump(mode="json")))

    @property
    def length(self) -> RunLength:
        """The length of the run, in steps or in epochs of the current data."""
        return RunLength(self.config, self.data.preparation.num_rows)

    @property
    def resolved_config(self) -> Config:
        """The configuration with what the run took from elsewhere: the date, if its template writes one, so that a
        later day changes nothing; the factor of the auxiliary loss, if the model has experts; and the hash of a user's
        own code."""
        resolved: dict[str, Any] = {"extend": self.extension.describe(self.config.extend)}
        if (date := self.data.chat_tokenizer.template.date) is not None:
            resolved["tokenizer"] = self.config.tokenizer.model_copy(update={"date": date.isoformat()})
        if self.model.architecture.mixture is not None:
            update = {"router_aux_loss_coef": self.model.router_aux_loss_coef}
            resolved["model"] = self.config.model.model_copy(update=update)
        return self.config.model_copy(update=resolved)


def data_fingerprint(config: Config, dataset: PackedDataset) -> dict[str, str]:
    """Returns everything that pack n depends on (law 5), by name."""
    return {
        **dataset.preparation.fingerprint,
        "tokens.sequence_length x micro_batch_size": str(dataset.token_budget),
        "data.packing.strategy": config.data.packing.strategy,
        "data.packing.pool_size": str(dataset.packing.pool_size),
        "data.num_lanes": str(dataset.num_lanes),
        "data.max_row_bytes": str(config.data.max_row_bytes),
        "general.seed": str(dataset.seed),
        **({"planned packing": "best-fit decreasing"} if dataset.is_best_fit else {}),
    }


# --- The length ---


def schedule_progress(
    progress: Progress, *, warmup_steps: float, train_steps: int | None, num_rows: int | None, step_rows: int
) -> tuple[float, float]:
    """Returns the progress of the warm-up and of the decay after it, for the next step; each ends at 1.

    The warm-up of W steps is at (n + 1) / (W + 1) in step n, counted from 0, so the first rate is above zero and step W
    has the peak. The run is measured in steps if their number is configured, and otherwise in rows, because the number
    of steps in an epoch is known only at its end. A warm-up that is a share of the run is measured in the same unit,
    so it is a function of the position alone, and a resume goes on with it.

    Args:
        warmup_steps: The length of the warm-up in steps if it is an int, and as a share of the run if it is a float.
        num_rows: The number of rows in all epochs together.
        step_rows: The number of rows that the next step consumes.
    """
    total = num_rows if train_steps is None else train_steps
    assert total is not None
    done, size = (progress.rows, step_rows) if train_steps is None else (progress.step, 1)
    if isinstance(warmup_steps, float):
        end = warmup_steps * total
        warm_up = (done + size) / (end + size)
    else:
        end = progress.rows_at_peak if train_steps is None else warmup_steps
        warm_up = (progress.step + 1) / (warmup_steps + 1)
    return warm_up, (done - end) / max(1, total - end)


@dataclass(frozen=True, slots=True)
class RunLength:
    """The length of a run, in steps or epochs, and the values that depend on it."""

    config: Config
    num_rows: int | None
    """The number of rows in an epoch of the current data version; None if it is unknown, and the length is in steps."""

    def rows_of_run(self, progress: Progress) -> int | None:
        """Returns the number of rows in the whole run; None if its length is given in steps.

        Rows that were trained beyond its epochs come on top of those in its epochs, so the run ends when these are
        whole.
        """
        rows = self._rows_of_epochs(progress)
        return None if rows is None else progress.before.rows + rows + progress.rows_beyond

    def _rows_of_epochs(self, progress: Progress) -> int | None:
        """Returns the number of rows in the epochs of the current data version; None if the length is in steps."""
        num_epochs = self.config.tokens.train_epochs
        if self.num_rows is None or num_epochs is None:
            return None
        return self.num_rows * max(0, num_epochs - progress.first_epoch)

    def count_rows_beyond(self, progress: Progress, lanes: Mapping[Any, str], num_lanes: int) -> None:
        """Sets `progress.rows_beyond` from the states of all lanes. Raises ValueError if a state is invalid."""
        rows = self._rows_of_epochs(progress)
        consumed = progress.rows - progress.before.rows
        progress.rows_beyond = 0 if rows is None else consumed - num_consumed(lanes, num_lanes, rows)

    def require_whole_epochs(self, progress: Progress, lanes: Mapping[Any, str], num_lanes: int) -> None:
        """Raises RuntimeError if the lanes, whose states know each row, have not consumed every row of the epochs."""
        rows = self._rows_of_epochs(progress)
        if rows is not None and (found := num_consumed(lanes, num_lanes, rows)) < rows:
            raise RuntimeError(
                f"the run trained {found} of {rows} rows in tokens.train_epochs: {self.config.tokens.train_epochs}, "
                f"but counted {progress.rows} rows; run `sftron audit` to see which are missing"
            )

    def is_done(self, progress: Progress) -> bool:
        if (train_steps := self.config.tokens.train_steps) is not None:
            return progress.step >= train_steps
        rows = self.rows_of_run(progress)
        return rows is not None and progress.rows >= rows

    def share_done(self, progress: Progress) -> float:
        if (train_steps := self.config.tokens.train_steps) is not None:
            return progress.step / train_steps
        return progress.rows / (self.rows_of_run(progress) or 1)

    def steps_in_words(self, progress: Progress) -> str:
        """Returns the number of steps of the run; with train_epochs as `~29`, from the rows of the steps so far."""
        if (train_steps := self.config.tokens.train_steps) is not None:
            return str(train_steps)
        return f"~{max(progress.step, round(progress.step / self.share_done(progress)))}"

    def require_more_data(self, progress: Progress, num_empty: int, num_lanes: int) -> None:
        """Raises RuntimeError if `num_empty` packs in a row had no conversation, so that every lane is exhausted, but
        not all rows have been counted."""
        if num_empty >= num_lanes and not self.is_done(progress):
            raise RuntimeError(
                f"the data has ended at {progress.rows} of {self.rows_of_run(progress)} rows: "
                f"{counted(num_empty, 'packs')} in a row had no conversation. Were the data files changed while the "
                "run read them?"
            )

    def learning_rate(self, progress: Progress, step_rows: int) -> float:
        """Returns the learning rate of the next step, which consumes `step_rows` rows."""
        options = self.config.optimizer
        warm_up, decay = schedule_progress(
            progress,
            warmup_steps=options.warmup_steps,
            train_steps=self.config.tokens.train_steps,
            num_rows=self.rows_of_run(progress),
            step_rows=step_rows,
        )
        return options.learning_rate * learning_rate_factor(
            options.schedule,
            warm_up=warm_up,
            decay=decay,
            min_ratio=options.min_learning_rate_ratio,
            decay_share=options.decay_share,
        )


def changes(*, saved: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Returns the differences between two fingerprints, as "name: a in the checkpoint, b now"."""
    return [
        f"{name}: {_short(saved.get(name))} in the checkpoint, {_short(now.get(name))} now"
        for name in sorted(saved.keys() | now.keys())
        if saved.get(name) != now.get(name)
    ]


def _short(value: Any) -> str:  # a checkpoint may hold anything
    text = "absent" if value is None else str(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:12]}..."
