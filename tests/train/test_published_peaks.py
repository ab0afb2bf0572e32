"""docs/benchmarks/memory.md: the peaks that others published, beside those that sftron predicts for the same layout."""

import json
from dataclasses import dataclass, field, fields
from typing import Any

import pytest
import torch

from sftron.models.architecture import LlamaConfig
from sftron.models.quantization import NF4
from tests.conftest import ASSETS, ROOT, rest_nightly
from tests.train.gpu_memory import predict_on_gpu

PAGE = ROOT / "docs" / "benchmarks" / "memory.md"
PUBLISHED = json.loads((ASSETS / "published_configs.json").read_text(encoding="utf-8"))["implemented"]
PUBLISHED["Qwen3-235B-A22B"] = PUBLISHED["Qwen/Qwen3-30B-A3B"] | {
    "hidden_size": 4096,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "moe_intermediate_size": 1536,
}
PUBLISHED["Llama-3.1-70B"] = PUBLISHED["meta-llama/Llama-3.1-8B"] | {
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "intermediate_size": 28672,
}
MODELS = {name.removesuffix(" (text_config)").split("/")[-1]: config for name, config in PUBLISHED.items()}
TUNE_TARGETS = ("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Row:
    source: str
    model: str
    way: str
    published: float
    """In GiB."""
    reserved: bool
    """Whether it is torch.cuda.max_memory_reserved, which is compared with 1.15 times the prediction."""
    tokens: int
    length: int
    logits_bytes: int = 0
    """The bytes for each token and entry of the vocabulary that the other trainer keeps, and sftron does not."""
    why: str = ""
    options: dict[str, Any] = field(default_factory=dict)

    def predicted(self) -> float:
        config = LlamaConfig.from_hf(MODELS[self.model])
        options = {"rank": None, "frozen": torch.float32, "mode": "full"} | self.options
        step = predict_on_gpu(config, num_tokens=self.tokens, length=self.length, **options)
        peak = step.peak + self.logits_bytes * self.tokens * config.vocab_size
        return (1.15 if self.reserved else 1) * peak / GIB

    def line(self) -> str:
        predicted, num_gpus = self.predicted(), self.options.get("num_gpus", 1)
        tokens = f"{self.tokens // self.length} x {self.length:,}"
        kind = "reserved" if self.reserved else "allocated"
        cells = [self.source, self.model, self.way, str(num_gpus), tokens, self.options.get("mode", "full"), kind]
        numbers = [f"{self.published:.1f}", f"{predicted:.1f}", f"{predicted / self.published:.2f}"]
        logits = f"{self.logits_bytes} bytes a logit added" if self.logits_bytes else ""
        return f"| {' | '.join([*cells, *numbers, '; '.join(filter(None, [logits, self.why]))])} |"


def row(source: str, model: str, way: str, tokens: int, published: float, **row: Any) -> Row:
    names = [each.name for each in fields(Row)]
    options = {name: row.pop(name) for name in [*row] if name not in names}
    shared: dict[str, Any] = {"reserved": True, "length": tokens} | row
    return Row(source=source, model=model, way=way, tokens=tokens, published=published, options=options, **shared)


def prime(model: str, way: str, tokens: int, published: float, num_gpus: int = 1, **others: Any) -> Row:
    # Four adapters of rank 16 at a time, and an fp32 base.
    rank = 64 if way == "LoRA" else None
    return row("prime-rl [1]", model, way, tokens, published, rank=rank, num_gpus=num_gpus, **others)


LOGITS_14: dict[str, Any] = {"logits_bytes": 14}
LOGITS_10: dict[str, Any] = {"logits_bytes": 10}
HALF: dict[str, Any] = {"why": "its selective mode keeps every second product, sftron's all"}
COPIES: dict[str, Any] = {"why": "its norms keep fp32 copies"}
UNSAID: dict[str, Any] = {"why": "not known; its page does not say what was measured"}
FP32_ROWS: dict[str, Any] = {"why": "its experts weight the rows of all 8 experts of a token in fp32"}
EXPERTS = "it gathers an eighth of a block's experts (expert parallelism 8), sftron all"
INSTRUCT, LLAMA = "Qwen3-4B-Instruct-2507", "Llama-3.1-8B"
TUNE: dict[str, Any] = {"length": 2048, "reserved": False, "targets": TUNE_TARGETS}
BF16, QLORA = {"frozen": torch.bfloat16}, {"frozen": NF4}
AXOLOTL: dict[str, Any] = QLORA | {"length": 2048, "optimizer": "adamw_8bit", "accumulates": True}
GPT: dict[str, Any] = BF16 | {"reserved": False, "rank": 8, "mode": "none", "targets": ("q_proj", "v_proj")} | LOGITS_10
ROWS = [
    prime("Qwen3-0.6B", "full", 16384, 12.5),
    prime("Qwen3-0.6B", "full", 65536, 19.5),
    prime("Qwen3-0.6B", "full", 65536, 12.4, 4),
    prime("Qwen3-0.6B", "full", 16384, 52.8, **LOGITS_14),
    prime(INSTRUCT, "full", 16384, 17.1, 8),
    prime(INSTRUCT, "full", 65536, 36.1, 8),
    prime(INSTRUCT, "full", 16384, 54.6, 8, **LOGITS_14),
    prime(INSTRUCT, "LoRA", 16384, 23.3),
    prime(INSTRUCT, "LoRA", 65536, 42.0),
    prime(INSTRUCT, "LoRA", 16384, 10.2, 8),
    prime(INSTRUCT, "LoRA", 65536, 28.8, 8),
    prime("Qwen3-30B-A3B", "full", 16384, 74.6, 8),
    prime("Qwen3-30B-A3B", "full", 65536, 105.4, 8, **FP32_ROWS),
    prime("Qwen3-30B-A3B", "LoRA", 16384, 32.0, 8),
    prime("Qwen3-30B-A3B", "LoRA", 65536, 64.8, 8, **FP32_ROWS),
    prime("Qwen3-235B-A22B", "LoRA", 16384, 161.5, 8),
    row("prime-rl [2]", "Qwen3-235B-A22B", "full", 16384, 141.0, num_gpus=32, why=EXPERTS),
    row("torchtitan [2]", "Qwen3-235B-A22B", "full", 16384, 144.0, num_gpus=32, why=EXPERTS),
    row("torchtitan [3]", LLAMA, "full", 16384, 82.4, length=8192, mode="selective", num_gpus=8, **HALF, **LOGITS_10),
    row("torchtitan [3]", LLAMA, "full", 16384, 67.0, length=8192, mode="selective", num_gpus=128, **HALF, **LOGITS_10),
    row("torchtitan [3]", LLAMA, "full", 32768, 83.9, num_gpus=8, **LOGITS_10),
    row("torchtune [4]", LLAMA, "LoRA", 4096, 16.2, rank=8, **BF16, **TUNE),
    row("torchtune [4]", LLAMA, "LoRA", 4096, 30.3, rank=8, mode="none", **BF16, **TUNE),
    row("torchtune [4]", LLAMA, "QLoRA", 4096, 7.4, rank=8, **QLORA, **TUNE),
    row("torchtune [4]", "Llama-3.1-70B", "LoRA", 4096, 27.6, rank=16, num_gpus=8, **BF16, **TUNE),
    row("axolotl [5]", "gemma-4-31B-it", "QLoRA", 2048, 25.2, rank=16, **AXOLOTL),
    row("axolotl [5]", "Seed-OSS-36B-Instruct", "QLoRA", 4096, 27.7, rank=32, **AXOLOTL, **UNSAID),
    row("axolotl [5]", "Apertus-8B-Instruct-2509", "QLoRA", 4096, 8.7, rank=32, **AXOLOTL, **UNSAID),
    row("axolotl [5]", "Olmo-3-7B-Instruct", "QLoRA", 4096, 11.3, rank=32, **AXOLOTL, **UNSAID),
    row("litgpt [6]", "Llama-2-7b-hf", "LoRA", 1304, 21.30e9 / GIB, **GPT),
    row(
        "litgpt [6]",
        "Llama-2-7b-hf",
        "LoRA",
        2608,
        29.07e9 / GIB,
        why="its norms and rotations keep fp32 copies",
        **GPT,
    ),
    row("litgpt [6]", "phi-1_5", "LoRA", 1044, 4.82e9 / GIB, **GPT),
    row("Automodel [7]", "Llama-3.2-1B-Instruct", "full", 16384, 7.3e9 / GIB, length=2048, reserved=False, num_gpus=8),
]
FAST = [ROWS[0], ROWS[18], ROWS[23]]


@pytest.mark.parametrize("each", rest_nightly(ROWS, FAST), ids=lambda each: f"{each.model}-{each.published:.1f}")
def test_a_published_peak_is_predicted_within_15_percent_or_the_row_says_why_not(each: Row) -> None:
    assert each.line() in PAGE.read_text(encoding="utf-8")
    is_near = each.predicted() == pytest.approx(each.published, rel=0.15)
    assert is_near or each.why


def test_the_page_has_these_rows_and_no_others() -> None:
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    assert len(lines) == 1 + len(ROWS)
    assert [line.split(" | ")[7] for line in lines[1:]] == [f"{each.published:.1f}" for each in ROWS]
