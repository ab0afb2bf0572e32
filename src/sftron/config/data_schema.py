"""The sections of the configuration that turn rows into packs: the tokenizer, the data and their lengths."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from sftron.config.values import (
    Accumulation,
    Contradictions,
    ControlToken,
    Day,
    HubConfig,
    Name,
    Names,
    NonNegativeNumber,
    PathText,
    Positive,
    PositiveNumber,
    Revision,
    RowFormatName,
    Section,
    Share,
    TemplateKwargs,
    Text,
    Texts,
    TextsByRole,
    TrainedRoles,
    TwoOrMore,
    Wanted,
    Workers,
)

POOL_SIZE = 256
_MOST_TOKENS_IN_A_PACK = 2**26


class Tokenizer(Section):
    """The tokenizer and its chat template."""

    path: PathText | None = None
    """A local folder or Hub id; null means model.path."""
    revision: Revision | None = None
    """Like model.revision, for the tokenizer; null: the model's revision or, with path, the branch main."""
    chat_template: PathText | None = None
    """A .jinja file, or chatml, hermes, llama3, alpaca, vicuna, zephyr or plain; null means the tokenizer's own."""
    add_tokens: Texts = ()
    """Control tokens to add if the tokenizer lacks them; their embeddings start as the mean of all embeddings."""
    date: Day | None = None
    """For templates that write today's date: the date to write; null means today, and a resume must be of that day."""
    template_kwargs: TemplateKwargs = Field(default={})
    """Values for the variables of the template, such as {enable_thinking: false}; a row's own values take
    precedence."""
    document_end: ControlToken | None = None
    """The control token that ends each document of format text, such as <|endoftext|>; null: what the tokenizer
    adds."""

    def contradictions(self, before: Mapping[str, Any]) -> Contradictions:
        lora = before.get("lora")
        # An adapter to continue from has its own modules_to_save; they are checked when it is read.
        if self.add_tokens and lora and lora.adapter is None and "embed_tokens" not in lora.modules_to_save:
            problem = f"adds {', '.join(self.add_tokens)}, but with lora their embeddings would not be trained"
            yield (
                "tokenizer.add_tokens lora.modules_to_save lora.adapter",
                f"{problem}: set lora.modules_to_save to [embed_tokens]",
            )


class Rows(Section):
    """Rows of conversations, and how they are read."""

    path: PathText
    """A .jsonl, .json, .csv or .tsv file (also .gz, .zst), .parquet, .arrow, a folder or pattern of these, a Hub id."""
    name: Text | None = None
    """Names the data set in metrics and reports; null means its path."""
    split: Text = "train"
    """The split of a Hub data set or a folder of splits. Or a part of it: train[:5%], train[100:200], train[-10%:]."""
    config: HubConfig | None = None
    """The configuration of a Hub data set (or its local copy) that has several; null: the default one."""
    revision: Revision | None = None
    """The branch, tag or commit of a Hub data set, as model.revision; null: the branch main."""
    format: RowFormatName = "auto"
    """How rows hold conversations. auto detects it from the first rows, and refuses ambiguous ones. text trains whole
    documents of plain text, as in pretraining."""
    documents: Literal["file", "line"] | None = None
    """For format text and .txt files: whether each file is a document, or each line; null: each file."""
    prompt_template: Text | None = None
    """For query_response, question_answer and alpaca: cot, alpaca, or a text with {query}; null: the query as it is."""
    columns: Names = Field({})
    """Renames columns: maps the format's names to the data's, {messages: dialogue}."""
    max_samples: Positive | None = None
    """Take only the first rows; null: all."""

    @property
    def txt_documents(self) -> Literal["file", "line"] | None:
        """What is a document of a .txt file; None if the rows are not of format text, so that .txt files hold none."""
        return (self.documents or "file") if self.format == "text" else None


class Dataset(Rows):
    """One data set."""

    weight: PositiveNumber | None = None
    """Share of the tokens, relative to the other weights. Give every data set a weight, or none; without weights, the
    run trains each row once an epoch."""
    streaming: bool = False
    """Read rows forward, shuffled in windows of 10,000, for sets larger than the disk; a resume reads past the earlier
    rows."""


class EvaluationDataset(Rows):
    """One evaluation set."""

    name: Name | None = None
    """Names the set in metrics, eval/NAME/loss; null means its file's name without the ending."""

    @property
    def set_name(self) -> str:
        return self.name or Path(self.path).name.partition(".")[0] or self.path


class KeptDataset(EvaluationDataset):
    """An evaluation set whose loss may rise only so far. It has one of the two limits."""

    max_rise: NonNegativeNumber | None = None
    """How far the loss may rise above its value before the first step, in nats per token, such as 0.02."""
    max_rise_percent: NonNegativeNumber | None = None
    """The same in percent of the loss before the first step."""
    on_exceeded: Literal["warn", "stop"] = "warn"
    """warn prints a warning at each evaluation above the limit. stop ends the run with status 4 and exports the best
    earlier checkpoint within the limits, by checkpoints.keep_best or else the last one."""

    def allowed_rise(self, before: float) -> float:
        """Returns the largest allowed rise above the loss before the first step, in nats."""
        return before * (self.max_rise_percent or 0.0) / 100 if self.max_rise is None else self.max_rise


class Packing(Section):
    """How conversations are combined into packs."""

    strategy: Literal["pool", "minibatch", "none"] = "pool"
    """pool fills packs to the brim; minibatch flattens tokens.micro_batch_size conversations; none takes one."""
    pool_size: Positive = POOL_SIZE
    """Conversations that wait to be packed, for strategy pool."""


class Data(Section):
    """The conversations, and which of their tokens are trained."""

    datasets: Annotated[
        tuple[Dataset, ...],
        Field(strict=False, min_length=1),
        Wanted("a list of at least one data set, such as [{path: rows.jsonl}]"),
    ]
    """What to train on, at least one: a list of mappings with the keys below."""
    train_on_completions_only: bool = True
    """Train only what the model itself generates: assistant contents and their stop tokens. false: every token."""
    remove_cross_attention: bool = True
    """Conversations in one pack do not see each other. false: plain causal attention over the pack."""
    train_on_roles: TrainedRoles = ("assistant",)
    """Whose text is trained. assistant is everything the model generates; answer, reasoning and tool_call are its
    parts."""
    train_on_turns: Literal["all", "last"] = "all"
    """last trains only the last turn of a trained role in each conversation."""
    reasoning: Literal["keep", "last", "strip"] = "keep"
    """Which reasoning of the assistant reaches the template: all, only the last turn's, or none."""
    allow_control_tokens: TextsByRole = Field({})
    """Control tokens that a role's text may contain, such as {assistant: ["<think>", "</think>"]}; all others stay
    text."""
    overlong: Literal["drop", "truncate_turns", "error"] = "drop"
    """What to do with a conversation longer than tokens.sequence_length."""
    max_dropped_share: Share = 0.05
    """The run does not start if more than this share of the sampled rows is dropped. From 200 rows on, a larger share
    stops it."""
    on_bad_row: Literal["error", "skip"] = "error"
    """A row that cannot be read or parsed stops the run, or is skipped and counted by reason."""
    max_row_bytes: Positive = 4 * 2**20
    """The longest row, in bytes as stored: a line of JSON, the values of a Parquet or Arrow row; longer are bad."""
    num_workers: Workers = 1
    """Loader processes per rank; 0 loads in the training process."""
    num_lanes: Literal["auto"] | Positive = "auto"
    """Streams that pack rows; ranks x workers must divide their number. auto: one, which suits any layout; 48 for large
    sets."""
    packing: Packing = Packing()

    @property
    def has_weights(self) -> bool:
        return any(each.weight is not None for each in self.datasets)

    @property
    def streams(self) -> bool:
        return any(each.streaming for each in self.datasets)

    def contradictions(self, before: Mapping[str, Any]) -> Contradictions:
        without = [f"data.datasets.{index}.weight" for index, each in enumerate(self.datasets) if each.weight is None]
        if self.has_weights and without:
            problem = f"{', '.join(without)} missing, while others are given"
            yield "data.datasets", f"{problem}; give every data set a weight, or none"
        elif len(without) > 1 and self.streams:
            yield "data.datasets", "a streamed data set cannot be joined with the others; give every data set a weight"
        if self.packing.pool_size != POOL_SIZE and self.packing.strategy != "pool":
            problem = f"works only with strategy pool, but strategy is {self.packing.strategy}: remove the key"
            yield "data.packing.pool_size data.packing.strategy", problem


class Tokens(Section):
    """Sizes and lengths, in tokens and steps. A pack holds sequence_length x micro_batch_size tokens."""

    sequence_length: TwoOrMore
    """The longest conversation, in tokens."""
    micro_batch_size: Positive = 1
    """Multiplies the token budget of a pack, which is one flat row."""
    batch_accumulation_per_replica: Accumulation = 1
    """Packs per rank in one optimizer step."""
    train_steps: Positive | None = None
    """Optimizer steps to train. Give this or train_epochs."""
    train_epochs: Positive | None = None
    """Passes over the data to train. Give this or train_steps."""

    def contradictions(self, before: Mapping[str, Any]) -> Contradictions:
        lengths, data = "tokens.train_steps tokens.train_epochs", before.get("data")
        if self.train_steps is None and self.train_epochs is None:
            yield lengths, "set train_steps or train_epochs; neither is given"
        if self.train_steps is not None and self.train_epochs is not None:
            problem = f"train_steps is {self.train_steps} and train_epochs is {self.train_epochs}; keep one of them"
            yield lengths, problem
        if self.micro_batch_size * self.sequence_length > _MOST_TOKENS_IN_A_PACK:
            problem = f"a pack of {self.micro_batch_size} x {self.sequence_length} tokens is more than any device holds"
            yield "tokens.micro_batch_size tokens.sequence_length", f"{problem}; lower it"
        if self.train_epochs is not None and data is not None and (data.has_weights or data.streams):
            why = "weighted data sets end at different times"
            why = why if data.has_weights else "the end of a streamed data set is unknown"
            problem = f"is {self.train_epochs}, but {why}; set train_steps"
            yield "tokens.train_epochs data.datasets", problem
