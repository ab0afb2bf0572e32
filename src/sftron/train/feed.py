"""The run's data, from its configuration: everything up to the loader, checked before any weight is read."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from transformers import AddedToken, AutoTokenizer, PreTrainedTokenizerBase

from sftron.config import Config
from sftron.data.chat_tokenizer import ChatTokenizer
from sftron.data.conversations import settle_format
from sftron.data.dataloader import PackLoader, collate
from sftron.data.dataset import PackedDataset
from sftron.data.labels import DEFAULT_TRAINED_ROLES, Targets
from sftron.data.lanes import auto_num_lanes
from sftron.data.named_templates import NAMES, named_template
from sftron.data.packing import lay_out, make_packing
from sftron.data.preparation import DataSet, Preparation
from sftron.data.sources import open_source
from sftron.data.template_check import require_own_ids
from sftron.data.types import (
    IGNORE_INDEX,
    Batch,
    Conversation,
    ConversationKey,
    DataError,
    Dropped,
    LabeledConversation,
    Message,
    Role,
    TokenizedConversation,
)
from sftron.data.views import hold_out
from sftron.models.llama_config import LlamaConfig
from sftron.report.audit import Audit, AuditedRow
from sftron.train.progress import too_many_dropped

_NUM_SAMPLED_ROWS = 400


def load_chat_tokenizer(config: Config) -> ChatTokenizer:
    """Raises ValueError where the folder, the tokenizer or the template cannot be used."""
    path = config.tokenizer_path
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except Exception as error:  # tokenizers raises bare Exceptions for a broken tokenizer.json
        raise ValueError(f"no tokenizer can be loaded from {path}: {error}") from error
    if added := [token for token in config.tokenizer.add_tokens if token not in tokenizer.get_vocab()]:
        tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in added])
    date = datetime.date.fromisoformat(config.tokenizer.date) if config.tokenizer.date else None
    return ChatTokenizer(
        tokenizer, _chat_template(config.tokenizer.chat_template, tokenizer), date, config.data.allow_control_tokens
    )


def _chat_template(template: str | None, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The source of a template given as a file, by one of our names, or by one of the tokenizer's own."""
    if template is None:
        return None
    if template in NAMES:
        return named_template(template, tokenizer)
    if isinstance(tokenizer.chat_template, dict) and template in tokenizer.chat_template:
        return tokenizer.chat_template[template]
    if not Path(template).is_file():
        raise ValueError(
            f"tokenizer.chat_template: {template} is not a file, nor one of {', '.join(NAMES)}; give the path of a "
            "Jinja template"
        )
    return _read_template(Path(template))


def _read_template(path: Path) -> str:
    try:
        source = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"tokenizer.chat_template: {path} is not UTF-8 text ({error}); save it as UTF-8") from error
    if not source.strip():
        raise ValueError(f"tokenizer.chat_template: {path} is empty; write a Jinja template, or remove the key")
    return source


def prepare(config: Config, chat_tokenizer: ChatTokenizer) -> Preparation:
    """Open the data sets and settle their formats. Raises DataError."""
    datasets = []
    for options in config.data.datasets:
        source = open_source(options.path, options.split, max_samples=options.max_samples)
        row_format = settle_format(source, options.format, options.columns, options.prompt_template)
        training, held_out = hold_out(source, config.evaluation.share)
        datasets.append(DataSet(options.name or source.name, training, row_format, held_out=held_out))
    return Preparation(
        datasets,
        chat_tokenizer,
        sequence_length=config.tokens.sequence_length,
        overlong=config.data.overlong,
        on_bad_row=config.data.on_bad_row,
        reasoning=config.data.reasoning,
        train_on_completions_only=config.data.train_on_completions_only,
        targets=Targets.named(config.data.train_on_roles, config.data.train_on_turns),
    )


def token_budget(config: Config) -> int:
    """Tokens of a pack, the row of one micro-batch."""
    return config.tokens.sequence_length * config.tokens.micro_batch_size


def make_dataset(
    config: Config, preparation: Preparation, *, dp_rank: int = 0, dp_world_size: int = 1
) -> PackedDataset:
    num_lanes = config.data.num_lanes
    return PackedDataset(
        preparation,
        make_packing(
            config.data.packing.strategy,
            pool_size=config.data.packing.pool_size,
            micro_batch_size=config.tokens.micro_batch_size,
        ),
        token_budget=token_budget(config),
        num_lanes=auto_num_lanes(preparation.num_rows) if num_lanes == "auto" else num_lanes,
        seed=config.general.seed,
        num_epochs=config.tokens.train_epochs,
        remove_cross_attention=config.data.remove_cross_attention,
        dp_rank=dp_rank,
        dp_world_size=dp_world_size,
    )


def make_loader(config: Config, dataset: PackedDataset, *, keep_tail: bool, pin_memory: bool) -> PackLoader:
    """Takes fewer workers, and the caller says so, where the wanted number does not divide the lanes."""
    return PackLoader(dataset, num_workers=num_workers(config, dataset), keep_tail=keep_tail, pin_memory=pin_memory)


def num_workers(config: Config, dataset: PackedDataset) -> int:
    """The configured number, or the next lower one that divides the rank's lanes."""
    wanted = config.data.num_workers
    return next(number for number in range(wanted, -1, -1) if number == 0 or dataset.num_own_lanes % number == 0)


def fingerprint(config: Config, dataset: PackedDataset, architecture: LlamaConfig) -> dict[str, str]:
    """All that pack n depends on (law 5) and the model's architecture, by name; a resume with another is refused."""
    return {
        **{f"the model's {name}": str(value) for name, value in asdict(architecture).items()},
        **dataset.preparation.fingerprint,
        "tokens.sequence_length x micro_batch_size": str(dataset.token_budget),
        "data.packing.strategy": config.data.packing.strategy,
        "data.packing.pool_size": str(dataset.packing.pool_size),
        "data.num_lanes": str(dataset.num_lanes),
        "general.seed": str(dataset.seed),
    }


@dataclass(frozen=True, slots=True)
class Sample:
    """Some rows of the data, taken all the way.

    rows: what became of each. num_ready_made: how many of the kept ones are rows of ids. num_equal: how many have
    exactly apply_chat_template's ids; the other kept ones, but for the former, spell a control token in their text.
    stop_ids: control tokens that end an assistant's turn, or a trained stretch of a row of ids, most frequent first.
    control_ids: the control tokens that occur, which are the template's.
    other_prompt: the end of an assistant's header as it is trained, and the end of the template's generation prompt,
    where these differ.
    """

    rows: tuple[AuditedRow, ...]
    audit: Audit
    num_ready_made: int
    num_equal: int
    stop_ids: tuple[int, ...]
    control_ids: frozenset[int]
    other_prompt: tuple[str, str] | None

    @property
    def mean_tokens(self) -> float:
        """Of a kept row."""
        return self.audit.row_roles.num_tokens / self.audit.num_kept


def check_sample(preparation: Preparation, max_dropped_share: float) -> Sample:
    """Take some hundred rows, evenly spread, all the way, and hold them against apply_chat_template.

    Raises DataError for a bad row, for ids that differ, for whatever the audit finds wrong, and where a larger share of
    the rows is dropped than the run would go on with.
    """
    rows: list[AuditedRow] = []
    audit = Audit(preparation.source_names, preparation.targets)
    stops: Counter[int] = Counter()
    control_ids: set[int] = set()
    num_ready_made = num_equal = 0
    for row in range(0, preparation.num_rows, max(1, preparation.num_rows // _NUM_SAMPLED_ROWS)):
        key = preparation.key(row)
        tokenized = preparation.tokenize(key)
        if isinstance(tokenized, Dropped):
            rows.append(tokenized)
        else:
            control_ids |= set(tokenized.input_ids.tolist()) & preparation.chat_tokenizer.control_ids
            parsed = preparation.parse(key)
            if isinstance(parsed, Conversation):
                if not tokenized.num_truncated_turns:
                    require_own_ids(preparation.chat_tokenizer, parsed, tokenized)
                num_equal += not tokenized.holds_control_text
                turns = [turn for turn in tokenized.turns if turn.role is Role.ASSISTANT and turn.stop is not None]
                stops.update(int(tokenized.input_ids[turn.stop]) for turn in turns)
            else:
                num_ready_made += 1
                stops.update(stops_of_ready_made(tokenized, preparation.chat_tokenizer.control_ids))
            rows.append((tokenized, preparation.label(tokenized)))
        audit.add_row(rows[-1])
    num_dropped = audit.dropped.total()
    if num_dropped > max_dropped_share * len(rows):
        audit_problems = [*audit.problems, too_many_dropped(num_dropped, len(rows), max_dropped_share)]
    else:
        audit_problems = audit.problems
    if audit_problems:
        drops = [f"{count} {reason}; the first: {first}" for reason, count, first in audit.drops()]
        raise DataError("\n".join([f"{len(rows)} rows were sampled:", *audit_problems, *drops]))
    stop_ids = tuple(token_id for token_id, _ in stops.most_common())
    return Sample(
        tuple(rows),
        audit,
        num_ready_made,
        num_equal,
        stop_ids,
        frozenset(control_ids),
        _other_prompt(preparation.chat_tokenizer),
    )


def stops_of_ready_made(tokenized: TokenizedConversation, control_ids: Collection[int]) -> list[int]:
    """Control tokens that end what the model says in a row of ids; a word that does is no stop token."""
    is_said = np.isin(tokenized.role_ids, list(DEFAULT_TRAINED_ROLES))
    last_ids = tokenized.input_ids[is_said & ~np.append(is_said[1:], False)].tolist()
    return [token_id for token_id in last_ids if token_id in control_ids]


def _other_prompt(chat_tokenizer: ChatTokenizer) -> tuple[str, str] | None:
    """What the model is trained to answer after, and what it will be asked with, if that is something else."""
    messages = (Message(Role.USER, "Hi"), Message(Role.ASSISTANT, "Yo"))
    try:
        trained = chat_tokenizer.encode(Conversation(messages, ConversationKey(0, 0), "a probe"))
        asked = chat_tokenizer.encode_prompt(messages[:1])
    except ValueError:
        return None  # some templates take no conversation as plain as this
    header = trained.input_ids[: int(np.flatnonzero(Targets().of(trained))[0])].tolist()
    return None if asked == header else (chat_tokenizer.decode(header[-8:]), chat_tokenizer.decode(asked[-8:]))


@dataclass(frozen=True, slots=True)
class Projection:
    """What an epoch will be, estimated from the sample."""

    tokens_per_epoch: int
    steps_per_epoch: float
    tokens_per_step: int


def project(config: Config, preparation: Preparation, sample: Sample, *, dp_world_size: int) -> Projection:
    """Packs are taken as full for strategy `pool`, which fills 99 % and more."""
    conversations = preparation.num_rows * sample.audit.num_kept / sample.audit.num_rows
    tokens = conversations * sample.mean_tokens
    conversations_per_pack = {
        "pool": token_budget(config) / sample.mean_tokens,
        "minibatch": config.tokens.micro_batch_size,
        "none": 1,
    }[config.data.packing.strategy]
    packs_per_step = config.tokens.batch_accumulation_per_replica * dp_world_size
    steps = conversations / conversations_per_pack / packs_per_step
    return Projection(round(tokens), steps, round(tokens / steps))


def require_a_peak(config: Config, projection: Projection) -> None:
    """Raises ValueError where a run of so many epochs would end within its warm-up."""
    epochs, warmup_steps = config.tokens.train_epochs, config.optimizer.warmup_steps
    if epochs and warmup_steps >= (steps := epochs * projection.steps_per_epoch):
        raise ValueError(
            f"optimizer.warmup_steps: {warmup_steps} is not below the {steps:,.0f} steps or so of {epochs} epochs, so "
            "the learning rate would never reach its peak; lower it"
        )


def maximal_batch(config: Config) -> Batch:
    """The most that a micro-batch can ask of memory: no unused tail, and a label at every token but the last ones."""
    length = config.tokens.sequence_length
    conversation = LabeledConversation(
        input_ids=np.zeros(length, dtype=np.int32),
        labels=np.append(np.zeros(length - 1), IGNORE_INDEX).astype(np.int32),
        loss_weights=np.append(np.ones(length - 1), 0).astype(np.float32),
        role_ids=np.full(length, Role.ASSISTANT, dtype=np.uint8),
        key=ConversationKey(0, 0),
    )
    pack = lay_out(
        [conversation] * config.tokens.micro_batch_size,
        token_budget=token_budget(config),
        remove_cross_attention=config.data.remove_cross_attention,
        pad_id=0,
    )
    return collate(pack, keep_tail=True)
