"""The parts of a live trainer, collected as source text, and the rows from which its batches are made."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from sftcheck.faults import library_of
from sftcheck.program.program import Program
from sftcheck.program.quoting import NoSourceError, called, literal
from sftcheck.program.seen import Suspect, all_rows, facts_of, suspects
from sftcheck.program.source import Names, dataclass_changes
from sftcheck.trainer.trainer_subject import TrainerSubject

SMALL = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 64),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "ffn_hidden_size", "ffn_dim"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), 4),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts"), 4),
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts_per_tok": 2,
}
"""The sizes of a small model; those that a configuration has are stated, and none is larger than it was."""
_NOT_OF_THE_MODEL = {
    "architectures", "dtype", "model_type", "name_or_path", "torch_dtype", "transformers_version", "use_cache",
    "vocab_size", "attn_implementation",
}  # fmt: skip
_NOT_OF_THE_RUN = {
    "bf16", "dataset_num_proc", "disable_tqdm", "fp16", "hub_token", "logging_dir", "logging_steps",
    "logging_strategy", "output_dir", "project", "report_to", "run_name", "save_strategy", "seed", "use_cpu",
}  # fmt: skip
_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token", "mask_token")
IMPORTS = {
    "AutoConfig": "from transformers import AutoConfig",
    "AutoModelForCausalLM": "from transformers import AutoModelForCausalLM",
    "AutoTokenizer": "from transformers import AutoTokenizer",
    "Dataset": "from datasets import Dataset",
    "GenerationConfig": "from transformers import GenerationConfig",
    "get_peft_model": "from peft import get_peft_model",
    "get_peft_model_state_dict": "from peft import get_peft_model_state_dict",
    "TemplateProcessing": "from tokenizers.processors import TemplateProcessing",
    "cross_entropy": "from torch.nn.functional import cross_entropy",
    "groupby": "from itertools import groupby",
    **{name: f"import {name}" for name in ("re", "sys", "tempfile", "torch")},
}


@dataclass
class Materials:
    """What a program needs to build the trainer, as it was when it was checked."""

    program: Program
    """Without a tokenizer, a configuration, rows and a measurement."""
    tokenizer_name: str
    tokenizer_state: Mapping[str, Any]
    config: Mapping[str, Any]
    defaults: Mapping[str, Any]
    """The configuration of a new model of the type."""
    ways: Sequence[str]
    """From what the rows of a program may be made, the likeliest first.

    TRL makes ids of texts and messages, and keeps these but for packed rows; their labels may be those of the user.
    """
    completion_only: bool
    suspects: Mapping[tuple[str, bool], Sequence[Suspect]]
    """By the name of the row, and whether it is about the evaluation."""
    training_rows: Sequence[Suspect]
    problems: list[str] = field(default_factory=list)
    """Parts that have no source text, and are left out."""


def collect(subject: TrainerSubject, rows: Sequence[str]) -> Materials:
    """Collects the parts of a checked trainer. Raises NoSourceError if one that is needed has no source text.

    Args:
        rows: The names of the table's rows that a program may be asked for.
    """
    trainer, config, names = subject.trainer, subject.model.unwrapped.config, Names(IMPORTS)
    tokenizer = subject.training.tokenizer
    if not tokenizer.name_or_path:
        raise NoSourceError("the tokenizer does not name the folder or repository that it is from")
    problems, is_trl = list[str](), library_of(trainer) == "trl"
    arguments = dict(_sources(names, dataclass_changes(trainer.args), _NOT_OF_THE_RUN, list[str]()))
    fixed = {"use_cpu": "True"} | ({"bf16": "False"} if is_trl else {})
    options = dict(_options(trainer, names, problems))
    program = Program(
        names=names,
        tokenizer_object=tokenizer,
        model_type=config.model_type,
        model_options={"attn_implementation": literal(config._attn_implementation)},
        model_lines=tuple(_adapter_lines(trainer, names, options, problems)),
        dataset="Dataset.from_list({})" if hasattr(trainer.train_dataset, "column_names") else "{}",
        arguments_class=names.name_of(type(trainer.args)),
        arguments=fixed | arguments,
        trainer=names.name_of(type(trainer)),
        options=options,
        after=("trainer.model_accepts_loss_kwargs = False",) if trainer.model_accepts_loss_kwargs is False else (),
        facts=facts_of(subject),
    )
    of_texts = ("columns", "conversations") if getattr(trainer.args, "packing", False) else ("columns",)
    return Materials(
        program=program,
        tokenizer_name=tokenizer.name_or_path,
        tokenizer_state=_tokenizer_state(tokenizer),
        config=settings_of(config),
        defaults=defaults_of(config),
        ways=(*of_texts, "ids") if is_trl else ("ids",),
        completion_only=bool(getattr(trainer, "completion_only_loss", False)),
        suspects={pair: each for name in rows for pair, each in suspects(subject, name)},
        training_rows=all_rows(subject.training),
        problems=problems,
    )


# -- parts -------------------------------------------------------------------------------------------------------------


def _sources(
    names: Names, values: Mapping[str, Any], left_out: set[str], problems: list[str]
) -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if name in left_out:
            continue
        try:
            yield name, names.expression(value)
        except NoSourceError as error:
            problems.append(f"{name}: {error}")


def settings_of(config: Any) -> dict[str, Any]:
    """Returns what a configuration says about the model's form."""
    return {
        name: value
        for name, value in config.to_dict().items()
        if name.lstrip("_") not in _NOT_OF_THE_MODEL and not name.startswith("_")
    }


def defaults_of(config: Any) -> dict[str, Any]:
    """Returns the settings of a configuration of the same class that is given none; {} if the class needs some."""
    try:
        return settings_of(type(config)())
    except Exception:  # of the user's own class
        return {}


def _tokenizer_state(tokenizer: Any) -> dict[str, Any]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    processor = getattr(backend, "post_processor", None)
    state = {name: getattr(tokenizer, name, None) for name in (*_SPECIAL, "chat_template", "padding_side")}
    state["added"] = sorted(tokenizer.get_added_vocab(), key=tokenizer.get_added_vocab().get)
    state["processor"] = None if processor is None else json.loads(processor.__getstate__())
    return state


def with_sizes(materials: Materials, *, is_small: bool) -> Program:
    """Returns the program with its tokenizer and the configuration of its model, as it is or small."""
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(materials.tokenizer_name, trust_remote_code=False)
    own, state = materials.tokenizer_state, _tokenizer_state(loaded)
    lines = [f"tokenizer = AutoTokenizer.from_pretrained({literal(materials.tokenizer_name)})"]
    new = [token for token in own["added"] if token not in state["added"]]
    if new:
        lines.append(f"tokenizer.add_tokens({literal(new)}, special_tokens=True)")
    names = [name for name in (*_SPECIAL, "padding_side", "chat_template") if own[name] != state[name]]
    lines += [f"tokenizer.{name} = {literal(own[name])}" for name in names]
    processor = own["processor"]
    if processor != state["processor"] and processor is not None and processor["type"] == "TemplateProcessing":
        parts = [each["SpecialToken"]["id"] if "SpecialToken" in each else "$A" for each in processor["single"]]
        marks = [(name, each["ids"][0]) for name, each in processor["special_tokens"].items()]
        call = f"TemplateProcessing(single={literal(' '.join(parts))}, special_tokens={literal(marks)})"
        lines.append(f"tokenizer.backend_tokenizer.post_processor = {call}")
    base = materials.program
    config = config_of(base.names, materials.config, materials.defaults, "len(tokenizer)", is_small=is_small)
    model_lines = base.model_lines
    if new:  # the model is made without them, and is resized
        is_new = {name for name, value in config.items() if value.isdigit() and int(value) >= len(loaded)}
        config = {name: value for name, value in config.items() if not (name.endswith("_token_id") and name in is_new)}
        config["vocab_size"] = repr(len(loaded))
        model_lines = ("model.resize_token_embeddings(len(tokenizer))", *model_lines)
    own_names = frozenset({*SMALL, *materials.defaults, "vocab_size"})
    return replace(base, tokenizer=tuple(lines), config=config, own_config=own_names, model_lines=model_lines)


def config_of(
    names: Names, config: Mapping[str, Any], defaults: Mapping[str, Any], vocabulary: str, *, is_small: bool
) -> dict[str, str]:
    """Returns the arguments of a configuration that are not the defaults of its class, and those of its sizes."""
    found = {"vocab_size": vocabulary}
    for name, value in config.items():
        if is_small and name in SMALL and isinstance(value, int):
            found[name] = literal(min(value, SMALL[name]))
        elif is_small and name in ("layer_types", "layers_block_type") and isinstance(value, list):
            kinds = list(dict.fromkeys(map(str, value)))[:2]
            found[name] = literal((kinds * 2)[:2])
        elif name in SMALL or value != defaults.get(name):
            with suppress(NoSourceError):
                found[name] = names.expression(value)
    return found


def _adapter_lines(trainer: Any, names: Names, options: dict[str, str], problems: list[str]) -> list[str]:
    """Returns the lines that add the adapters; TRL adds them itself, and is given their configuration."""
    if not hasattr(trainer.model, "peft_config"):
        return []
    config = trainer.model.peft_config["default"]
    left_out = {"peft_type", "base_model_name_or_path", "auto_mapping", "revision", "inference_mode", "peft_version"}
    given = _sources(names, dataclass_changes(config), left_out, problems)
    call = called(names.name_of(type(config)), [], dict(given))
    if library_of(trainer) == "trl":
        options["peft_config"] = call
        return []
    lines = [f"model = get_peft_model(model, {call})"]
    base = [each for name, each in trainer.model.named_parameters() if "lora_" not in name]
    if base and all(each.requires_grad for each in base):
        lines.append("model.requires_grad_(True)")
    return lines


def _options(trainer: Any, names: Names, problems: list[str]) -> Iterator[tuple[str, str]]:
    """Yields the arguments of the trainer that may matter; the search drops the others."""
    values = {name: getattr(trainer, name) for name in ("data_collator", "compute_loss_func")}
    left_out = {name for name, value in values.items() if value is None}
    if library_of(trainer) == "trl" and type(trainer.data_collator).__module__.startswith("trl."):
        left_out.add("data_collator")  # TRL's own default, which it refuses to be given
    yield from _sources(names, values, left_out, problems)
    if trainer.optimizer is not None:
        yield "optimizers", _optimizer(trainer, names)


def _optimizer(trainer: Any, names: Names) -> str:
    """Returns the pair of a given optimizer and no scheduler."""
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    held = {id(each) for group in optimizer.param_groups for each in group["params"]}
    own = [(name, each) for name, each in trainer.model.named_parameters() if "lora_" not in name]
    missing = [name for name, each in own if id(each) not in held]
    parameters = "model.parameters()"
    if missing and len(missing) < len(own):
        parameters = f"[each for name, each in model.named_parameters() if name not in {literal(missing)}]"
    return f"({names.name_of(type(optimizer))}({parameters}, lr={literal(optimizer.defaults['lr'])}), None)"
