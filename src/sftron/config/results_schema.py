"""The sections of the configuration about a run's results: checkpoints and exports, evaluations and logs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from sftron.config.data_schema import EvaluationDataset, KeptDataset
from sftron.config.values import (
    Checkpoint,
    Contradictions,
    PathText,
    Positive,
    PositiveNumber,
    Repository,
    Section,
    Text,
    Texts,
    Trackers,
    TwoOrMore,
    Wanted,
)


class Checkpoints(Section):
    """Saving and resuming."""

    interval: Literal["auto"] | Positive | None = "auto"
    """Steps between checkpoints. auto: 15 minutes of training, or longer if saves would take more than a twentieth of
    the time. null: only at the end."""
    keep_last: TwoOrMore = 2
    """Older checkpoints are removed once a newer one is complete."""
    resume: Checkpoint = "auto"
    """auto continues from the newest complete checkpoint of this run, if any; with never, finding one is an error."""
    load: Literal["all", "weights"] = "all"
    """weights starts a new run at step 0 from the weights of the checkpoint that resume names."""
    asynchronous: Annotated[bool, Field(alias="async")] = False
    """Training waits only for a copy in host memory, 12 bytes a parameter; a thread writes it during the next steps."""
    allow_data_change: bool = False
    """Continue although data, tokenizer or packing have changed: weights and step are kept, and the next epoch
    begins."""
    export_hf: bool = True
    """At the end, also write the model in Hugging Face format, under hf/step-N."""
    export_interval: Positive | None = None
    """Steps between exports, all of which stay; null: only at the end."""
    keep_best: Text | None = None
    """Also keep and export the checkpoint with the best value of this metric, such as eval/held_out/loss."""

    def contradictions(self, before: Mapping[str, Any]) -> Contradictions:
        if self.export_interval is not None and not self.export_hf:
            problem = f"is {self.export_interval}, but export_hf is false: remove one of them"
            yield "checkpoints.export_interval checkpoints.export_hf", problem
        if self.load == "weights" and self.resume in ("auto", "never"):
            problem = f"is weights, but resume is {self.resume}"
            problem += ": set resume to the path of the checkpoint that has the weights"
            yield "checkpoints.load checkpoints.resume", problem


class Hub(Section):
    """Pushes exports to a repository on the Hub, with the token of `hf auth login` or HF_TOKEN."""

    push_to: Repository | None = None
    """The repository; it is created if it does not exist. null: nothing is pushed."""
    private: bool = True
    """Whether a new repository is private."""
    every: Literal["exports", "end"] | Positive = "end"
    """exports: every export (see checkpoints.export_interval); end: the last one; a number N: exports at multiples of N
    steps, and the last one."""

    def contradictions(self, before: Mapping[str, Any]) -> Contradictions:
        checkpoints = before.get("checkpoints")
        if self.push_to is None:
            for key, value, default in (("hub.private", self.private, True), ("hub.every", self.every, "end")):
                if value != default:
                    problem = "is set, but push_to is null, and nothing is pushed: set it, or remove the key"
                    yield f"{key} hub.push_to", problem
        elif checkpoints and not checkpoints.export_hf:
            problem = f"is {self.push_to}, but checkpoints.export_hf is false, so there is no export to push"
            yield "hub.push_to checkpoints.export_hf", f"{problem}: remove one of them"
        interval = checkpoints and checkpoints.export_interval
        if isinstance(self.every, int) and checkpoints and (interval is None or self.every % interval):
            problem = f"is {self.every}, but checkpoints.export_interval is {'null' if interval is None else interval}"
            problem += ", and only exports are pushed: give a multiple of it, exports or end"
            yield "hub.every checkpoints.export_interval", problem


class Evaluation(Section):
    """Losses on rows that are not trained on, and answers to prompts: before, during and after training."""

    share: Annotated[float, Field(ge=0, lt=1), Wanted("a number from 0, below 1")] = 0.0
    """Share of every data set that is held out of training, always the same rows: the evaluation set held_out."""
    datasets: Annotated[tuple[EvaluationDataset, ...], Field(strict=False), Wanted("a list of evaluation sets")] = ()
    """Evaluation sets of their own: a list of mappings with the keys below."""
    keep: Annotated[tuple[KeptDataset, ...], Field(strict=False), Wanted("a list of evaluation sets with limits")] = ()
    """Evaluation sets that the model must not forget, each with a limit for the rise of its loss (docs/keep.md)."""
    interval: Positive | None = None
    """Steps between evaluations; null: only at the start and at the end."""
    at_start: bool = True
    """Also evaluate the model before its first step."""
    tokens_per_batch: Positive | None = None
    """Tokens of one row of a rank; null: as in training. Changes speed and memory, not the results."""
    patience: Positive | None = None
    """Stop training after this many evaluations in a row without a better value of metric; null: train to the end."""
    metric: Text | None = None
    """The metric that patience watches, as eval/held_out/loss; losses should fall, others rise. null: the metric of
    checkpoints.keep_best or, without it, the loss of the first set."""
    prompts: PathText | None = None
    """JSONL of `messages` that end in a user turn, answered greedily at every evaluation; null: none."""
    max_new_tokens: Positive = 48
    """Longest answer, in tokens."""

    @property
    def stops_at_limit(self) -> bool:
        """Whether a kept set ends the run."""
        return any(each.on_exceeded == "stop" for each in self.keep)

    def contradictions(self, before: Mapping[str, Any]) -> Contradictions:
        tokens, data, checkpoints = before.get("tokens"), before.get("data"), before.get("checkpoints")
        for index, each in enumerate(self.keep):
            key = f"evaluation.keep.{index}.max_rise"
            if each.max_rise is None and each.max_rise_percent is None:
                yield f"{key} {key}_percent", "is missing; set it, in nats, or max_rise_percent"
            elif each.max_rise is not None and each.max_rise_percent is not None:
                problem = f"is {each.max_rise:g} and max_rise_percent is {each.max_rise_percent:g}; keep one of them"
                yield f"{key} {key}_percent", problem
        if self.keep and self.interval is None:
            problem = "has a limit, but interval is null, so it is not checked on the way: set evaluation.interval"
            yield "evaluation.keep evaluation.interval", problem
        if self.keep and not self.at_start:
            problem = "is false, but keep measures a rise from the loss before the first step; remove the key"
            yield "evaluation.at_start evaluation.keep", problem
        if self.metric is not None and self.patience is None:
            problem = f"is {self.metric}, but patience is null: set it, or remove the key"
            yield "evaluation.metric evaluation.patience", problem
        if tokens and self.tokens_per_batch is not None and self.tokens_per_batch < tokens.sequence_length:
            problem = f"{self.tokens_per_batch} is below tokens.sequence_length {tokens.sequence_length}"
            problem += ", and no conversation is split"
            yield "evaluation.tokens_per_batch tokens.sequence_length", problem
        if self.share and data and data.streams:
            problem = f"is {self.share}, but no rows can be held out of a streamed data set; remove the key"
            yield "evaluation.share data.datasets", problem
        if not (self.share or self.datasets or self.keep or self.prompts):
            wanting = {"evaluation.interval": self.interval, "evaluation.patience": self.patience}
            wanting["checkpoints.keep_best"] = checkpoints and checkpoints.keep_best
            for key, value in wanting.items():
                if value is not None:
                    problem = f"is {value}, but nothing is evaluated: give evaluation.share, datasets or prompts"
                    keys = f"{key} evaluation.share evaluation.datasets evaluation.prompts"
                    yield keys, f"{problem}, or remove the key"
        elif self.patience is not None and self.interval is None:
            problem = f"is {self.patience}, but interval is null, so nothing is evaluated during training"
            yield "evaluation.patience evaluation.interval", f"{problem}: set evaluation.interval"


class Wandb(Section):
    """Logging to Weights & Biases, from rank 0 only."""

    mode: Literal["disabled", "offline", "online"] | None = None
    """offline writes files to sync later; online needs a project. null: online if logging.to has wandb, else
    disabled."""
    project: Text | None = None
    """The wandb project."""
    name: Text | None = None
    """The run's name there; null: general.run_name."""
    entity: Text | None = None
    """The user or team; null: the account's default."""
    group: Text | None = None
    """Groups runs, for example the runs of an ablation."""
    job_type: Text | None = None
    """The kind of run within its group, for example sft."""
    tags: Texts = ()
    """Labels to filter runs by."""
    notes: Text | None = None
    """A description of the run."""
    sample: bool = True
    """Also send the first pack as the page samples.html, which contains text of your data."""


class Logging(Section):
    """What a run reports while training. It always writes metrics.jsonl in its run directory."""

    to: Trackers = ()
    """Where rank 0 also sends the numbers: any of these, each with its own package. No failure ends the run."""

    interval: Positive = 1
    """Steps between printed lines."""
    peak_tflops: PositiveNumber | None = None
    """Dense bf16 TFLOP/s of one GPU, the reference of mfu; null: the value for the GPU's name, if known."""
    untrained_roles_interval: Positive | None = 20
    """Steps between measurements of the losses of roles that are not trained, from step 1 on; null: never."""
    wandb: Wandb = Wandb()

    @property
    def wandb_mode(self) -> Literal["disabled", "offline", "online"]:
        """logging.wandb.mode, with null resolved."""
        return self.wandb.mode or ("online" if "wandb" in self.to else "disabled")

    def contradictions(self, before: Mapping[str, Any]) -> Contradictions:
        if len(set(self.to)) < len(self.to):
            yield "logging.to", f"{', '.join(self.to)} has a logger twice; name each logger once"
        if self.wandb.mode == "disabled" and "wandb" in self.to:
            yield "logging.wandb.mode logging.to", "is disabled, but logging.to has wandb: remove one of them"
        if self.wandb_mode == "online" and self.wandb.project is None:
            problem = f"is missing, but {'mode is online' if self.wandb.mode else 'logging.to has wandb'}"
            keys = "logging.wandb.project logging.wandb.mode logging.to"
            yield keys, f"{problem}; set it, or mode: offline"
