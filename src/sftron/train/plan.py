"""What a run is made of, opened and checked before any weight is read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from sftron.checkpoint.hf_weights import read_config
from sftron.checkpoint.model_files import check_files
from sftron.config import Config
from sftron.data.chat.tokenizer import ChatTokenizer
from sftron.data.dataset import PackedDataset
from sftron.data.prepare import Preparation
from sftron.models.architecture import LlamaConfig
from sftron.models.attention import resolve_attention
from sftron.models.loss import resolve_loss
from sftron.train import feed
from sftron.train.evaluation import Question, read_questions, require_metric
from sftron.train.evaluation_sets import EvaluationSet, open_evaluation_sets
from sftron.train.flops import Peak, find_peak
from sftron.train.model_folder import ExportParts, check_model_folder, local_folder, read_export_parts
from sftron.train.projection import Projection, project, require_a_peak
from sftron.train.ranks import Ranks
from sftron.train.sample import Sample, check_sample


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """Everything but the weights.

    fingerprint: see feed.fingerprint.
    export_parts: None where nothing is to be exported.
    """

    config: Config
    ranks: Ranks
    model_folder: Path
    llama_config: LlamaConfig
    compute_dtype: torch.dtype
    attention: str
    loss: str
    peak: Peak
    chat_tokenizer: ChatTokenizer
    questions: list[Question]
    evaluation_sets: tuple[EvaluationSet, ...]
    sample: Sample
    dataset: PackedDataset
    fingerprint: dict[str, str]
    projection: Projection
    export_parts: ExportParts | None

    @property
    def preparation(self) -> Preparation:
        return self.dataset.preparation

    @property
    def resolved_config(self) -> Config:
        """What starts this run again on any day: the configuration with the date that the template writes."""
        return feed.with_date(self.config, self.chat_tokenizer)

    @property
    def data_fingerprints(self) -> dict[str, Any]:
        """{"training": of rows, tokenizer and template, "evaluation": {set: the same}}; equal for runs whose losses are
        over the same tokens, whatever their seeds, lanes and models."""
        training = sha256(json.dumps(self.preparation.fingerprint, sort_keys=True).encode()).hexdigest()
        return {"training": training, "evaluation": {each.name: each.fingerprint for each in self.evaluation_sets}}

    @property
    def evaluates(self) -> bool:
        return bool(self.evaluation_sets or self.questions)

    @property
    def num_positions(self) -> int:
        """Of the model's table: the unused tail is a document, and may be as long as the row."""
        return max(self.dataset.token_budget, self.llama_config.max_position_embeddings)


def plan_run(config: Config, ranks: Ranks) -> RunPlan:
    """Raises ValueError, of which DataError is one, with a message for the user.

    What is on the Hub has to be on this machine by now; see nodes.py.
    """
    model_folder = local_folder(config.model.path, download=False)
    check_files(model_folder)
    # Before the tokenizer, whose loader has no clear word for a folder that holds no model.
    read_config(model_folder)
    chat_tokenizer = feed.load_chat_tokenizer(
        config, local_folder(config.tokenizer_path, with_weights=False, download=False)
    )
    questions = read_questions(config.evaluation.prompts)
    preparation = feed.prepare(config, chat_tokenizer)
    sample = check_sample(preparation, config.data.max_dropped_share)
    evaluation_sets = open_evaluation_sets(config, chat_tokenizer, preparation)
    if config.checkpoints.keep_best is not None:
        require_metric(config.checkpoints.keep_best, evaluation_sets, has_prompts=bool(questions))
    dataset = feed.make_dataset(config, preparation, dp_rank=ranks.dp_rank, dp_world_size=ranks.dp_world_size)
    compute_dtype = getattr(torch, config.model.compute_dtype)
    loss = resolve_loss(config.model.loss, ranks.device, compute_dtype)
    llama_config = check_model_folder(
        model_folder,
        chat_tokenizer.tokenizer,
        feed.longest_document(config),
        documents_are_conversations=config.data.remove_cross_attention,
        may_grow=bool(config.tokenizer.add_tokens),
    )
    attention = resolve_attention(config.model.attention, ranks.device, compute_dtype, llama_config.head_dim)
    projection = project(config, preparation, sample, dp_world_size=ranks.dp_world_size)
    require_a_peak(config, projection)
    export_parts = read_export_parts(config, model_folder, chat_tokenizer) if config.checkpoints.export_hf else None
    return RunPlan(
        config=config,
        ranks=ranks,
        model_folder=model_folder,
        llama_config=llama_config,
        compute_dtype=compute_dtype,
        attention=attention,
        loss=loss,
        peak=find_peak(ranks.device, config.logging.peak_tflops),
        chat_tokenizer=chat_tokenizer,
        questions=questions,
        evaluation_sets=evaluation_sets,
        sample=sample,
        dataset=dataset,
        fingerprint=feed.fingerprint(config, dataset, llama_config),
        projection=projection,
        export_parts=export_parts,
    )
