"""tokens.sequence_length: 32768, from rows to updated weights."""

from pathlib import Path

import pytest

from tests.train.runs import chat_line, make_config, make_model_folder, metrics, run

LENGTH = 32768


@pytest.mark.nightly
def test_conversations_of_nearly_32768_tokens_are_packed_to_the_brim_and_trained(tmp_path: Path) -> None:
    one_head = {"num_attention_heads": 1, "num_key_value_heads": 1, "num_hidden_layers": 1, "head_dim": 8}
    folder = make_model_folder(tmp_path / "model", max_position_embeddings=LENGTH, **one_head)
    # 5 tokens each time; short ones fill the rest of a pack.
    rows = [chat_line("Count.", " ".join(["one more than"] * size)) for size in (6000, 5500, *[40] * 60)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows) + "\n")
    config = make_config(
        tmp_path,
        folder,
        tokens__sequence_length=LENGTH,
        tokens__batch_accumulation_per_replica=1,
        tokens__train_steps=2,
        data__num_lanes=1,
        model__compute_dtype="bfloat16",
        model__activation_checkpointing="full",
    )
    trainer = run(config)
    steps = metrics(trainer.directory.folder)
    assert max(len(row[1]) for row in trainer.setup.data.sample.rows if isinstance(row, tuple)) > 30_000
    assert all(step["fill"] > 0.99 and step["conversations"] > 1 for step in steps)
    assert steps[1]["loss"] < steps[0]["loss"]
