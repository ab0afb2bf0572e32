"""The run's configuration, declared once: every section, key, default and range."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from sftron.config.contradictions import DECAY_SHARE, contradictions
from sftron.config.data_schema import Data, EvaluationDataset, Tokenizer, Tokens
from sftron.config.values import (
    Betas,
    Checkpoint,
    Dropout,
    ModulesToSave,
    NonNegativeNumber,
    PathText,
    Positive,
    PositiveNumber,
    PositiveShare,
    Rank,
    Repository,
    Revision,
    RunName,
    Section,
    Seed,
    Share,
    Targets,
    Text,
    Texts,
    Trackers,
    TwoOrMore,
    Wanted,
    WarmUp,
)


class General(Section):
    """The run as a whole."""

    run_name: RunName
    """Names the run's directory, {output_dir}/{run_name}, and the run in its loggers. `{section.key}` in it stands for
    the value of that key, as in `seed_{general.seed}`: the runs of a sweep need directories of their own."""
    output_dir: PathText = "runs"
    """Where run directories are made. Like every relative path here, relative to the working directory."""
    seed: Seed = 42
    """Decides the order of the data and every other random choice."""
    deterministic: bool = False
    """Use only deterministic kernels: the same run twice gives the same bits, more slowly."""


class Model(Section):
    """The model to start from; its architecture comes from its own config.json."""

    path: PathText
    """A local folder in Hugging Face format, or a Hub id."""
    revision: Revision | None = None
    """The branch, tag or commit of a Hub id; null: the branch main. A run asks the Hub once which commit that is: it
    writes the commit to its config.yaml, and a resume uses it."""
    attention: Literal["auto", "sdpa", "varlen", "flash_attn", "flex"] = "auto"
    """The attention backend; auto takes the fastest one that keeps documents apart on this device, and the run prints
    it. flash_attn: the newest of the flash-attention packages (2, 3, 4) that is installed and supports the device."""
    loss: Literal["auto", "native", "liger"] = "auto"
    """Whose cross entropy; auto is native, the only one that needs no package and never waits for the device."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """selective recomputes norms and SwiGLU in the backward pass, and no matrix product: a third less of activations.
    full recomputes every block: a seventeenth of them, and a third more compute. The gradients are the same."""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile for every block, around its attention; auto is off, until it has been measured on a GPU."""
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """The type of the forward and backward pass; trained weights are always float32."""
    router_aux_loss_coef: NonNegativeNumber | None = None
    """For mixtures of experts: the factor of the loss that balances the experts, over the real tokens of the step. null
    is that of config.json: its router_aux_loss_coef if its output_router_logits is true, else 0. With accumulation, a
    factor above 0 costs one more forward pass of all micro-batches but one."""
    freeze_router: bool = False
    """For mixtures of experts: do not train the weights of the routers."""
    frozen_dtype: Literal["auto", "float32", "bfloat16", "nf4"] = "auto"
    """With lora: the type of the matrices that are not trained; auto is compute_dtype. nf4 has 4 bits a weight, rounded
    by blocks (QLoRA, arXiv 2305.14314). Norms and biases stay float32."""


class Lora(Section):
    """Low-rank adapters are trained instead of the model's weights (LoRA, arXiv 2106.09685). `lora: {}` takes the
    defaults; without the section, or with null, all weights are trained."""

    rank: Rank | None = None
    """The rank of every adapter; null: 16, or that of the adapter to go on from."""
    alpha: PositiveNumber | None = None
    """Adapters are scaled by alpha / rank; null: twice the rank, or that of the adapter to go on from."""
    dropout: Dropout = 0.0
    """Only 0: dropped elements would depend on the packing, the number of ranks and the resumes of the run."""
    targets: Targets = "all-linear"
    """The linear layers with an adapter, by peft's rules: all-linear, which leaves out the head; ends of names, such as
    [q_proj, v_proj]; or an expression that matches whole names, such as model.layers.0.self_attn.q_proj."""
    merge: bool = True
    """Also export the whole model with its adapters merged, to hf/step-N; adapters are exported to adapter/step-N."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank) instead, so that higher ranks need no other learning rate (arXiv 2312.03732)."""
    dora: bool = False
    """Also train the norm of each row of an adapted weight (DoRA, arXiv 2402.09353)."""
    init: Literal["default", "gaussian"] = "default"
    """How A begins, as in peft: uniform in +-1 / sqrt(input size), or normal with deviation 1 / rank. B begins as 0."""
    modules_to_save: ModulesToSave = ()
    """Layers that are trained in full besides the adapters, and saved with them: embed_tokens, lm_head."""
    adapter: PathText | None = None
    """A folder in peft's format to go on from; null: new adapters. It decides rank, alpha, targets, rslora, dora and
    modules_to_save: leave them at their defaults, or give the same values."""


class Parallelism(Section):
    """Ranks, as torchrun starts them. dp_replicate x dp_shard is their number."""

    dp_replicate: Positive = 1
    """Copies of the model; more than 1 is HSDP: sharded within a copy, gradients summed over copies."""
    dp_shard: Literal["auto"] | Positive = "auto"
    """Ranks that share one copy, each with its part of weights, gradients and optimizer state (FSDP2); auto: all."""
    timeout_seconds: Positive = 600
    """How long a rank waits for the others, or for its loader workers, before it takes them for dead and all end."""


class Optimizer(Section):
    """AdamW and its learning rate."""

    learning_rate: PositiveNumber
    """The peak, reached after the warm-up."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """How the rate falls after the warm-up; wsd (warm-up, stable, decay) stays at the peak, then falls linearly."""
    warmup_steps: WarmUp = 0
    """Steps of linear rise from zero; below 1, their share of the run, as in transformers 5 (TRL's warmup_ratio)."""
    decay_share: PositiveShare = DECAY_SHARE
    """The share of the steps after the warm-up that wsd decays over, at the end."""
    min_learning_rate_ratio: Share = 0.0
    """Where the schedule ends, as a share of learning_rate."""
    weight_decay: NonNegativeNumber = 0.0
    """Decoupled weight decay; never on norms."""
    betas: Betas = (0.9, 0.95)
    """Adam's decay rates of the two moments."""
    eps: PositiveNumber = 1e-8
    """Adam's epsilon."""
    state: Literal["fp32", "8bit"] = "fp32"
    """The type of Adam's two moments. 8bit rounds them by blocks (arXiv 2110.02861), to a quarter of the memory."""
    max_grad_norm: PositiveNumber | None = 1.0
    """Gradients are scaled down to this norm; null: no clipping."""


class Checkpoints(Section):
    """Saving and resuming."""

    interval: Literal["auto"] | Positive | None = "auto"
    """Steps between checkpoints; auto: 15 minutes of training, or longer where saves would take over a twentieth of
    the time, so that a kill costs no more than that; null: only at the end."""
    keep_last: TwoOrMore = 2
    """Older checkpoints are removed once a newer one is complete."""
    resume: Checkpoint = "auto"
    """auto continues from the newest complete checkpoint of this run, if any; with never, finding one is an error."""
    load: Literal["all", "weights"] = "all"
    """weights begins a run of its own, at step 0, with the weights of the checkpoint whose path is resume."""
    asynchronous: Annotated[bool, Field(alias="async")] = False
    """Training waits only for a copy in host memory, 12 bytes a parameter; a thread writes it during the next steps."""
    allow_data_change: bool = False
    """Go on though data, tokenizer or packing have changed: weights and step are kept, the next epoch begins."""
    export_hf: bool = True
    """At the end, also write the model in Hugging Face format, under hf/step-N."""
    export_interval: Positive | None = None
    """Steps between exports, all of which stay; null: only at the end."""
    keep_best: Text | None = None
    """Also keep the checkpoint whose evaluation is best by this metric, as eval/held_out/loss; it is exported too."""


class Hub(Section):
    """Pushing of exports to a repository on the Hub, with the token of `hf auth login` or HF_TOKEN."""

    push_to: Repository | None = None
    """The repository, which is made if it does not exist; null: nothing is pushed."""
    private: bool = True
    """Whether a repository that is made is private."""
    every: Literal["exports", "end"] | Positive = "end"
    """exports: every export (see checkpoints.export_interval); end: the last one; a number: those of every so many
    steps, and the last one."""


class Evaluation(Section):
    """Losses on rows that are not trained on, and answers to prompts: before training, on the way and at the end."""

    share: Annotated[float, Field(ge=0, lt=1), Wanted("a number from 0, below 1")] = 0.0
    """Share of every data set's rows that is kept out of training, always the same rows: the set held_out."""
    datasets: Annotated[tuple[EvaluationDataset, ...], Field(strict=False), Wanted("a list of evaluation sets")] = ()
    """Evaluation sets of their own: a list of mappings with the keys below."""
    interval: Positive | None = None
    """Steps between evaluations; null: only at the start and at the end."""
    at_start: bool = True
    """Also evaluate the model before its first step."""
    tokens_per_batch: Positive | None = None
    """Tokens of one row of a rank; null: as in training. Changes speed and memory, not the results."""
    patience: Positive | None = None
    """Stop training after so many evaluations in a row without a better value of metric; null: train to the end."""
    metric: Text | None = None
    """What patience watches, as eval/held_out/loss; losses should fall, other metrics rise. null: that of
    checkpoints.keep_best or, without it, the loss of the first set."""
    prompts: PathText | None = None
    """JSONL of `messages` that end in a user turn, answered greedily at every evaluation; null: none."""
    max_new_tokens: Positive = 48
    """Longest answer, in tokens."""


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
    """Puts runs together, for example those of one ablation."""
    job_type: Text | None = None
    """What kind of run it is within its group, for example sft."""
    tags: Texts = ()
    """Labels to filter runs by."""
    notes: Text | None = None
    """A description of the run."""
    sample: bool = True
    """Also send the first pack, as a table and as the page samples.html: text of your data."""


class Logging(Section):
    """What is reported while training. metrics.jsonl in the run directory is always written."""

    to: Trackers = ()
    """Where the numbers are sent too, by rank 0: any of these, each with its own package. No failure ends the run."""

    interval: Positive = 1
    """Steps between printed lines."""
    peak_tflops: PositiveNumber | None = None
    """Dense bf16 TFLOP/s of one GPU, which mfu is measured against; null: by the GPU's name, where that is known."""
    untrained_roles_interval: Positive | None = 20
    """Steps between measurements of the losses of roles that are not trained, from step 1 on; null: never."""
    ledger: bool = False
    """Also write which rows each step trained, so that `sftron audit` can prove it and name those of a step."""
    wandb: Wandb = Wandb()

    @property
    def wandb_mode(self) -> Literal["disabled", "offline", "online"]:
        """logging.wandb.mode, with null resolved."""
        return self.wandb.mode or ("online" if "wandb" in self.to else "disabled")


class Config(Section):
    """A whole run."""

    general: General
    model: Model
    lora: Lora | None = None
    tokenizer: Tokenizer = Tokenizer()
    data: Data
    tokens: Tokens
    parallelism: Parallelism = Parallelism()
    optimizer: Optimizer
    checkpoints: Checkpoints = Checkpoints()
    hub: Hub = Hub()
    evaluation: Evaluation = Evaluation()
    logging: Logging = Logging()

    @property
    def tokenizer_path(self) -> str:
        return self.tokenizer.path or self.model.path

    @property
    def tokenizer_revision(self) -> str | None:
        return self.tokenizer.revision or (None if self.tokenizer.path else self.model.revision)

    @property
    def run_dir(self) -> Path:
        return Path(self.general.output_dir) / self.general.run_name

    @model_validator(mode="after")
    def _nothing_contradicts(self) -> Config:
        if problems := [f"{keys[0]}: {problem}" for keys, problem in contradictions(self._value_of)]:
            raise PydanticCustomError("contradictions", "{problems}", {"problems": "; ".join(problems)})
        return self

    def _value_of(self, key: str) -> Any:
        value: Any = self
        for part in key.split("."):
            value = None if value is None else getattr(value, part)
        return value
