"""The run's configuration, declared once: every section, key, default and range."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from sftron.config.data_schema import Data, Tokenizer, Tokens
from sftron.config.results_schema import Checkpoints, Evaluation, Hub, Logging
from sftron.config.values import (
    Betas,
    Contradictions,
    Dropout,
    ModulesToSave,
    Name,
    NonNegativeNumber,
    OptionsOfSetup,
    PathText,
    Positive,
    PositiveNumber,
    PositiveShare,
    Rank,
    Revision,
    Section,
    Seed,
    SetupFunction,
    Share,
    SourceHash,
    Targets,
    WarmUp,
)

DECAY_SHARE = 0.2


class General(Section):
    """The run as a whole."""

    run_name: Name
    """Names the run's directory, {output_dir}/{run_name}, and the run in its loggers. `{section.key}` in it stands for
    the value of that key, as in `seed_{general.seed}`: the runs of a sweep need directories of their own."""
    output_dir: PathText = "runs"
    """Where run directories are made. As in every path here, `~` is the home folder, and a relative one begins in the
    working directory."""
    seed: Seed = 42
    """Decides the order of the data and every other random choice."""
    deterministic: bool | Literal["layout"] = False
    """true: only deterministic kernels, so the same run twice gives the same bits, more slowly. layout: also add the
    gradients of packs as integers, so weights have the same bits on any number of ranks and workers."""


class Model(Section):
    """The model to start from; its architecture comes from its own config.json."""

    path: PathText
    """A local folder in Hugging Face format, or a Hub id."""
    revision: Revision | None = None
    """The branch, tag or commit of a Hub id; null: the branch main. A run asks the Hub once which commit this is, and
    writes it to its config.yaml for later resumes."""
    attention: Literal["auto", "sdpa", "varlen", "flash_attn", "flex"] = "auto"
    """The attention backend. auto chooses, for each layer, the first one that supports the layer and works on this
    device, and the run prints the choice. flash_attn takes the newest flash-attention package (2, 3 or 4) that works;
    auto never takes version 4."""
    loss: Literal["auto", "native", "liger"] = "auto"
    """The implementation of cross entropy; auto is native, which needs no package and never waits for the device."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """selective recomputes norms and SwiGLU in the backward pass, but no matrix product, and saves a third of the
    activations. full recomputes every block: it keeps a seventeenth of the activations and takes a third more compute.
    The gradients are the same."""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile for every block, around its attention; auto is off, until it has been measured on a GPU."""
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """The type of the forward and backward pass; trained weights are always float32."""
    router_aux_loss_coef: NonNegativeNumber | None = None
    """For mixtures of experts: the factor of the loss that balances the experts, over the real tokens of the step. null
    takes it from config.json: router_aux_loss_coef if output_router_logits is true, else 0. With accumulation, a factor
    above 0 costs one more forward pass of all micro-batches but one."""
    freeze_router: bool = False
    """For mixtures of experts: leave the weights of the routers untrained."""
    frozen_dtype: Literal["auto", "float32", "bfloat16", "nf4"] = "auto"
    """With lora: the type of the matrices that are not trained; auto is compute_dtype. nf4 has 4 bits a weight, rounded
    by blocks (QLoRA, arXiv 2305.14314). Norms and biases stay float32."""
    frozen_base: Literal["resident", "stream"] = "resident"
    """With lora: where frozen matrices are. stream leaves them in their files and reads each block as it is needed, so
    that memory holds two blocks and the head; the bits are the same. nf4 is stored once in the run's directory."""


class Lora(Section):
    """Low-rank adapters are trained instead of the model's weights (LoRA, arXiv 2106.09685). `lora: {}` takes the
    defaults; without the section, or with null, all weights are trained."""

    rank: Rank | None = None
    """The rank of every adapter; null: 16, or the rank of the adapter to continue from."""
    alpha: PositiveNumber | None = None
    """Adapters are scaled by alpha / rank; null: twice the rank, or the alpha of the adapter to continue from."""
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
    """A folder in peft's format to continue from; null: new adapters. It decides rank, alpha, targets, rslora, dora and
    modules_to_save: leave them at their defaults, or give the same values."""

    def contradictions(self, before: Mapping[str, Any]) -> Contradictions:
        if self.adapter is not None and self.init != "default":
            problem = f"is {self.init}, but adapter gives the initial values: remove one of them"
            yield "lora.init lora.adapter", problem


class Parallelism(Section):
    """Ranks, as torchrun starts them. Their number is dp_replicate x dp_shard x context."""

    dp_replicate: Positive = 1
    """Copies of the model; more than 1 is HSDP: sharded within a copy, gradients summed over copies."""
    dp_shard: Literal["auto"] | Positive = "auto"
    """Ranks with packs of their own that share one copy, each with its part of weights, gradients and optimizer state
    (FSDP2); auto: all."""
    context: Positive = 1
    """Ranks that share each pack, for long conversations: each has a part of its tokens and of the heads (Ulysses,
    arXiv 2309.14509). They share a copy too. At most as many as query heads; packs and losses do not depend on it."""
    timeout_seconds: Positive = 600
    """How long a rank waits for other ranks, or for its loader workers, before it ends the run."""

    def contradictions(self, before: Mapping[str, Any]) -> Contradictions:
        tokens = before.get("tokens")
        if tokens and self.context > (budget := tokens.sequence_length * tokens.micro_batch_size):
            problem = f"{self.context} ranks cannot share a pack of {budget} tokens: lower context"
            yield "parallelism.context tokens.sequence_length", problem
        if self.context > 1 and (general := before.get("general")) and general.deterministic == "layout":
            problem = f"is {self.context}, but general.deterministic: layout requires that one rank compute each whole "
            problem += (
                "pack, because each rank rounds its part of a gradient: set context to 1, or deterministic to true"
            )
            yield "parallelism.context general.deterministic", problem


class Optimizer(Section):
    """The optimizer and its learning rate."""

    name: Literal["adamw", "adamw_8bit", "muon"] = "adamw"
    """adamw_8bit rounds Adam's two moments by blocks (arXiv 2110.02861), to a quarter of the memory. muon updates the
    matrices of the blocks with torch.optim.Muon, and all else with AdamW, at the same learning rate."""

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
    max_grad_norm: PositiveNumber | None = 1.0
    """Gradients are scaled down to this norm; null: no clipping."""

    def contradictions(self, before: Mapping[str, Any]) -> Contradictions:
        tokens = before.get("tokens")
        if self.decay_share != DECAY_SHARE and self.schedule != "wsd":
            problem = f"works only with schedule wsd, but schedule is {self.schedule}: remove the key"
            yield "optimizer.decay_share optimizer.schedule", problem
        if self.min_learning_rate_ratio and self.schedule == "constant":
            problem = f"is {self.min_learning_rate_ratio}, but schedule constant never falls: remove the key"
            yield "optimizer.min_learning_rate_ratio optimizer.schedule", problem
        if tokens and tokens.train_steps is not None and self.warmup_steps >= tokens.train_steps:
            problem = f"{self.warmup_steps} is not below tokens.train_steps {tokens.train_steps}"
            problem += ", so the learning rate would never reach its peak: lower warmup_steps"
            yield "optimizer.warmup_steps tokens.train_steps", problem
        if self.name != "adamw" and (general := before.get("general")) and general.deterministic == "layout":
            problem = (
                f"is {self.name}, but general.deterministic: layout needs an update that does not depend on the shards"
            )
            yield "optimizer.name general.deterministic", f"{problem}: use adamw"


class Extend(Section):
    """Python code of your own that takes part in the run (docs/extending.md). `extend: my_module:setup` alone is
    read too."""

    setup: SetupFunction
    """module:function, in the working directory or installed. The function gets `options`, and returns a
    sftron.Extension."""
    options: OptionsOfSetup = Field(default={})
    """Any keys and values for the function."""
    source: SourceHash | None = None
    """The hash of the code, which the run writes to its config.yaml; the run refuses other code. null: any code."""

    @property
    def was_given_in_python(self) -> bool:
        """Whether the parts were arguments of open_trainer, which the run names in place of a function."""
        return ":" not in self.setup


class Config(Section):
    """A whole run."""

    general: General
    model: Model
    lora: Lora | None = Field(None, validate_default=True)
    tokenizer: Tokenizer = Tokenizer()
    data: Data
    tokens: Tokens
    parallelism: Parallelism = Parallelism()
    optimizer: Optimizer
    checkpoints: Checkpoints = Checkpoints()
    hub: Hub = Hub()
    evaluation: Evaluation = Evaluation()
    logging: Logging = Logging()
    extend: Extend | None = None

    @field_validator("extend", mode="before")
    @classmethod
    def _takes_a_name(cls, value: Any) -> Any:
        return {"setup": value} if isinstance(value, str) else value

    @property
    def tokenizer_path(self) -> str:
        return self.tokenizer.path or self.model.path

    @property
    def tokenizer_revision(self) -> str | None:
        return self.tokenizer.revision or (None if self.tokenizer.path else self.model.revision)

    @property
    def run_dir(self) -> Path:
        return Path(self.general.output_dir) / self.general.run_name

    @field_validator("*")
    @classmethod
    def _nothing_contradicts(cls, section: Section | None, info: ValidationInfo) -> Section | None:
        found = list(section.contradictions(info.data)) if section else []
        model = info.data.get("model")
        if info.field_name == "lora" and section is None and model and model.frozen_dtype != "auto":
            problem = f"is {model.frozen_dtype}, but without lora no weight is frozen, and trained weights are float32"
            found.append(("model.frozen_dtype lora", f"{problem}: write lora: {{}}, or remove the key"))
        if info.field_name == "lora" and model and model.frozen_base == "stream":
            if section is None:
                problem = "is stream, but without lora no weight is frozen: write lora: {}, or set it to resident"
                found.append(("model.frozen_base lora", problem))
            if model.compile == "on":
                problem = "is stream, but compiled blocks cannot follow weights that move between two buffers: set "
                found.append(("model.frozen_base model.compile", f"{problem}compile to off"))
        if found:
            problems = "; ".join(f"{keys.split()[0]}: {problem}" for keys, problem in found)
            raise PydanticCustomError("contradictions", "{problems}", {"problems": problems, "found": found})
        return section
