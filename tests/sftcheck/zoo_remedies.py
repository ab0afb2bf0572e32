"""The broken set-ups of the zoo with the remedy that their report prints: each is applied, and its row passes then."""

from collections.abc import Callable
from typing import Any, NamedTuple

import transformers
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import Trainer
from trl import SFTTrainer

from tests.conftest import ASSETS, LLAMA3_TEMPLATE
from tests.sftcheck import documented_examples as documented
from tests.sftcheck.zoo_materials import (
    ANSWERS,
    LONG,
    MISTRAL_LIKE,
    PAIRS,
    ROWS,
    SMOLLM2,
    Rows,
    chatml,
    encoded,
    flat,
    model,
    of_marks,
    padded,
    plain,
    sft,
    smollm2,
    tok,
    trl_template,
)
from tests.sftcheck.zoo_texts import WITH_PASTED_TEXT, thinking
from tests.sftcheck.zoo_training import KeepsLogits, of_a_base_model, with_new_tokens


class Applied(NamedTuple):
    row: str
    words: str
    """What the remedy of that row says."""
    make: Callable[[], Trainer]
    """The set-up with the remedy."""
    conversations: Any = None
    """Those of `make`, if they are not the set-up's."""


def everything(features: Rows) -> Rows:
    return [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in features]


def flat_texts(tokenizer: Any) -> Trainer:
    return plain(everything(encoded(tokenizer)), tokenizer, transformers.DataCollatorWithFlattening())


def llama3_messages() -> Trainer:
    tokenizer = tok("chatml", LLAMA3_TEMPLATE)
    tokenizer.eos_token = "<|eot_id|>"
    return sft(ROWS, tokenizer)


def without_system() -> Trainer:
    tokenizer = tok("llama2", MISTRAL_LIKE)
    tokenizer.pad_token = "<unk>"
    return plain(encoded(tokenizer, [row for row in ROWS if row["messages"][0]["role"] != "system"]), tokenizer)


def with_stop() -> Trainer:
    """A template of one's own with a stop token, given as chat_template_path."""
    path = ASSETS / "templates/with_generation_marks.jinja"
    return sft(ANSWERS, tok("chatml"), chat_template_path=str(path))


def adapters(**given: Any) -> Trainer:
    tokenizer = tok("chatml")
    return plain(encoded(tokenizer), tokenizer,
                 their_model=get_peft_model(model(tokenizer), LoraConfig(task_type="CAUSAL_LM", **given)))  # fmt: skip


def thoughts() -> Trainer:
    rows = [row["messages"] for row in thinking().train_dataset.select_columns("messages")]
    return sft([{"prompt": row[:-1], "completion": row[-1:]} for row in rows], tok(template=trl_template("qwen3")))


def of_messages(folder: str, **given: Any) -> Trainer:
    return SFTTrainer(folder, documented.config(**given), train_dataset=Dataset.from_list(ROWS))


def of_pairs(folder: str, peft_config: Any = None, **given: Any) -> Trainer:
    data = Dataset.from_list(ANSWERS)
    return SFTTrainer(folder, documented.config(**given), train_dataset=data, peft_config=peft_config)


def evaluated(rows: Rows) -> Trainer:
    return chatml(eval_dataset=Dataset.from_list(rows))


INSTRUCTED = [
    {"messages": [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}]}
    for row in PAIRS
]


_LABELS = "Give labels of -100 to all but the answers"
_PAIRS = "Give rows of prompt and completion, one for each answer"
_FLAT = "DataCollatorWithFlattening()"
_BFD = "packing_strategy='bfd'"
_OWN_LOSS = "not override compute_loss"
_MESSAGES = "Give rows of messages"

APPLIED: dict[str, Applied] = {
    # isolation and positions
    "bfd_packing_of_falcon": Applied("isolation", "packing=False", lambda: of_marks(kind="falcon")),
    "bfd_packing_of_gpt_oss": Applied(
        "isolation", "packing=False", lambda: of_marks(kind="gpt_oss", attention="eager")
    ),
    "padding_free_of_bloom": Applied(
        "isolation", "padding_free=False", lambda: sft(ANSWERS, tok("chatml"), kind="bloom", attention="eager")
    ),
    "flattening_of_qwen3_5": Applied("isolation", "DataCollatorForSeq2Seq", lambda: chatml(kind="qwen3_5_text")),
    "cache_and_packing": Applied("isolation", "use_cache=False", lambda: flat(use_cache=False)),
    "mask_of_ones_and_packing": Applied("isolation", f"Leave the mask out of the batch, as {_FLAT}", flat),
    "wrapped_packing": Applied("isolation", _BFD, lambda: sft(ROWS, tok("chatml"), packing=True)),
    "group_texts": Applied("truncation", _FLAT, lambda: flat_texts(tok("chatml"))),
    "labels_across_borders": Applied("positions", _FLAT, flat),
    "left_padding_of_gpt2": Applied("positions", "padding_side = 'right'", lambda: padded(kind="gpt2")),
    # ids
    "doubled_bos": Applied("ids", _MESSAGES, lambda: sft(ROWS, tok("llama3"))),
    "doubled_bos_of_llama2": Applied("ids", _MESSAGES, lambda: sft(ROWS, tok("llama2"))),
    "missing_bos": Applied("ids", _MESSAGES, llama3_messages),
    "text_of_another_format": Applied("ids", _MESSAGES, lambda: sft(ROWS)),
    "training_template_is_not_saved": Applied(
        "ids", "set tokenizer.chat_template", lambda: plain(encoded(t := tok(template="llama2_like")), t)
    ),
    "system_prompts_lost": Applied("truncation", "keep every message", lambda: of_marks()),
    "template_applied_twice": Applied("ids", "Render the messages once", smollm2),
    "template_applied_twice_by_trl": Applied("ids", "Give TRL the messages as they are", lambda: sft(ANSWERS)),
    # labels
    "loss_over_prompts": Applied("trained tokens", _PAIRS, lambda: sft(ANSWERS)),
    "labels_shifted_twice": Applied("trained tokens", "equal input_ids at the same index", padded),
    "response_template_not_found": Applied("trained tokens", _LABELS, without_system),
    "last_answer_alone": Applied("trained tokens", _LABELS, chatml),
    "everything_after_the_first_prompt": Applied("trained tokens", _LABELS, chatml),
    "masked_stop_tokens": Applied(
        "stop tokens", "DataCollatorForSeq2Seq", lambda: plain(everything(encoded(tok())), tok())
    ),
    "marks_without_stop": Applied("stop tokens", "{% endgeneration %} behind its stop", lambda: of_marks()),
    "marks_before_the_line_break": Applied(
        "trained tokens", "{% generation %} behind the header", lambda: of_marks()
    ),
    "labels_end_before_the_stop": Applied("stop tokens", "stop token, which has its label too", chatml),
    "labels_begin_with_the_line_break": Applied("trained tokens", _LABELS, chatml),
    "template_without_stop": Applied("stop tokens", "chat_template_path=", with_stop),
    "stop_of_the_last_answer_alone": Applied("stop tokens", "stop token, which has its label too", chatml),
    "mask_history": Applied("trained tokens", _LABELS, smollm2),
    "response_template_that_misses_some_rows": Applied("trained tokens", _LABELS, chatml),
    "masked_language_modeling": Applied(
        "trained tokens", "DataCollatorForLanguageModeling(mlm=False)", lambda: language_modeling()
    ),
    # truncation
    "answers_cut_by_max_length": Applied("truncation", "SFTConfig(max_length=...)", lambda: of_marks()),
    "prompts_cut_by_keep_end": Applied(
        "truncation", "SFTConfig(max_length=...)", lambda: of_marks(LONG, truncation_mode="keep_end")
    ),
    "answers_cut_by_bfd_packing": Applied(
        "truncation", "SFTConfig(max_length=...)", lambda: of_marks(packing=True)
    ),
    "rows_dropped_by_max_length": Applied(
        "truncation", "SFTConfig(max_length=...)", lambda: sft(WITH_PASTED_TEXT, max_length=8192)
    ),
    "nothing_left_to_train": Applied(
        "truncation", "above the longest conversation",
        lambda: smollm2([{"messages": row["prompt"] + row["completion"]} for row in WITH_PASTED_TEXT]),
    ),
    "questions_and_answers_cut": Applied("truncation", "above the longest", lambda: smollm2(ROWS[12:])),
    "cut_within_a_header": Applied(
        "truncation", "above the longest", lambda: chatml(everything(encoded(tok("chatml"), LONG)))
    ),
    # loss and padding
    "sum_of_means": Applied("loss", _OWN_LOSS, lambda: chatml(gradient_accumulation_steps=4)),
    "mean_of_means": Applied(
        "loss", "trainer.model_accepts_loss_kwargs = True",
        lambda: chatml(gradient_accumulation_steps=4, per_device_train_batch_size=1),
    ),
    "mean_over_padding": Applied("loss", _OWN_LOSS, chatml),
    "mean_of_rows_without_accumulation": Applied("loss", _OWN_LOSS, lambda: chatml(gradient_accumulation_steps=4)),
    "prompts_counted_in_the_denominator": Applied(
        "loss", "not override get_batch_samples", lambda: chatml(gradient_accumulation_steps=2)
    ),
    "loss_without_shift": Applied("loss", _OWN_LOSS, chatml),
    "loss_without_shift_of_an_untrained_model": Applied(
        "loss", _OWN_LOSS, lambda: chatml(their_model=model(tok("chatml"), initializer_range=1e-4))
    ),
    "loss_of_half_of_the_answers": Applied("loss", _OWN_LOSS, chatml),
    "sum_without_division": Applied("loss", _OWN_LOSS, lambda: chatml(gradient_accumulation_steps=2)),
    "logits_to_keep_is_one_less": Applied(
        "loss", _OWN_LOSS, lambda: chatml(trainer=KeepsLogits, gradient_accumulation_steps=2)
    ),
    "left_padding_without_mask": Applied("padding", "Pass the attention_mask", lambda: padded("left")),
    "trained_padding": Applied("padding", "Pad labels with -100", padded),
    "mask_from_the_ids_of_padding": Applied("padding", "Make it from their lengths", smollm2),
    "mask_that_shows_the_future": Applied("isolation", "or pass none", flat),
    "token_types_of_gpt2": Applied("positions", "no token_type_ids", lambda: chatml(kind="gpt2")),
    "neat_packing_without_its_patch": Applied("isolation", f"Leave the mask out of the batch, as {_FLAT}", flat),
    "positions_of_the_whole_pack": Applied("isolation", _FLAT, flat),
    # forgery, adapters and generation
    "forged_turn": Applied("forgery", "Remove the control tokens from the texts", smollm2, ROWS),
    "new_tokens_never_trained": Applied(
        "adapters", "modules_to_save=['embed_tokens', 'lm_head']",
        lambda: with_new_tokens(modules_to_save=["embed_tokens", "lm_head"]),
    ),
    "optimizer_without_adapters": Applied(
        "adapters", "the optimizer's parameters",
        lambda: of_marks(peft_config=LoraConfig(target_modules="all-linear")),
    ),
    "head_left_out_of_the_optimizer": Applied(
        "adapters", "the optimizer's parameters",
        lambda: chatml(their_model=model(tok("chatml"), tie_word_embeddings=False)),
    ),
    "base_trained_beside_its_adapter": Applied(
        "adapters", "Leave the base frozen", lambda: adapters(target_modules="all-linear")
    ),
    "stop_of_the_base_model": Applied(
        "generation", "SFTConfig(eos_token='<|im_end|>')", lambda: of_a_base_model(eos_token="<|im_end|>")
    ),
    **{
        name: Applied(
            "gradients",
            "Do not override training_step",
            lambda: chatml(gradient_accumulation_steps=2),
        )
        for name in ("gradient_divided_once_more", "clipped_in_each_micro_batch", "zeroed_between_micro_batches")
    },
    "saved_without_template": Applied("ids", "Set tokenizer.chat_template", chatml),
    # the evaluation
    "evaluation_over_prompts": Applied("trained tokens", _LABELS, lambda: evaluated(encoded(tok("chatml"), ROWS[:8]))),
    "evaluation_of_messages": Applied(
        "trained tokens", _PAIRS,
        lambda: sft(ANSWERS, tok("chatml"), eval_dataset=Dataset.from_list(ANSWERS[:8])),
    ),
    "evaluation_of_another_template": Applied(
        "ids", "apply_chat_template(tokenize=True)", lambda: evaluated(encoded(tok("chatml"), ROWS[:8]))
    ),
    "evaluation_cut": Applied("truncation", "above the longest", lambda: evaluated(encoded(tok("chatml"), ROWS[:8]))),
    "default_system_prompt_left_out": Applied("ids", "apply_chat_template(tokenize=True)", smollm2),
    "rendered_with_a_generation_prompt": Applied("ids", _MESSAGES, lambda: sft(ROWS, tok("chatml"))),
    # the documented examples
    "thinking_kept_by_the_training_template": Applied("ids", _PAIRS, thoughts),
    "trl_quick_start": Applied("trained tokens", _PAIRS, lambda: of_pairs(documented.qwen3())),
    "trl_readme": Applied("generation", "eos_token='<|im_end|>'", lambda: of_messages(
        documented.qwen2_5_base(), eos_token="<|im_end|>")),
    "trl_with_peft": Applied("trained tokens", _PAIRS, lambda: of_pairs(documented.qwen3(), LoraConfig())),
    "trl_assistant_only_loss": Applied("ids", _PAIRS, lambda: of_pairs(documented.qwen3())),
    "trl_instruction_tuning": Applied("trained tokens", _PAIRS, lambda: instruction_pairs()),
    "blog_flattening_of_falcon": Applied(
        "isolation", "DataCollatorForSeq2Seq",
        lambda: plain(everything(encoded(tok())), tok(), kind="falcon"),
    ),
    "blog_completion_only_as_it_was": Applied(
        "ids", "apply_chat_template(tokenize=True)", lambda: smollm2(INSTRUCTED), INSTRUCTED
    ),
    "transformers_language_modeling": Applied("isolation", _FLAT, lambda: flat_texts(tok())),
}  # fmt: skip


def language_modeling() -> Trainer:
    tokenizer = tok("chatml")
    collator = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)
    return plain([{"input_ids": row["input_ids"]} for row in encoded(tokenizer)], tokenizer, collator)


def instruction_pairs() -> Trainer:
    documented.trl_instruction_tuning()  # which saves the base model
    folder = documented.hub("Qwen3-0.6B-Base", tok("llama2"), "qwen3")
    return of_pairs(folder, chat_template_path=str(SMOLLM2))
