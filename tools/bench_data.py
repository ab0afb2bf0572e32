"""How fast rows become packed tensors, beside the tokenizer alone, apply_chat_template and TRL; and what opening costs.

    python tools/bench_data.py --tokenizer path/to/model --data rows.jsonl

All on one core, on Linux; what each line means is in docs/benchmarks/data.md. Exit status: 0 all checks hold, 1 one
does not, 2 the data, the tokenizer or the template cannot be used.

Over 300 lines, because all that is compared is measured in one run, and each way has to be seen to be fair.
"""

import os

# Read by the libraries that are imported below.
os.environ["OMP_NUM_THREADS"] = os.environ["RAYON_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import argparse
import ctypes
import datetime
import gc
import json
import platform
import random
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import datasets
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from sftron.config import Config
from sftron.config.refusal import exit_with, refuse
from sftron.data.dataloader import collate
from sftron.data.dataset import PackedDataset
from sftron.data.preparation import Preparation
from sftron.data.sources import open_source
from sftron.data.template_check import require_own_ids
from sftron.data.template_input import plain_messages
from sftron.data.types import Conversation, DataError, Dropped, Pack, Role
from sftron.train import feed

SFTRON, ENCODE, TRL = "sftron: rows to packed tensors", "tokenizer.encode_batch", "TRL: every token trained"
NUM_COMPARED, NUM_PACKS, MANY_LANES, BATCH = 200, 200, 240, 256

Work = Callable[[], tuple[int, int]]
"""Does it once, and says how many tokens came out, and how many packs (0 where there are none)."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """The conversations that are kept of the data, as each way takes them. num_rows: of the data, dropped ones too."""

    options: argparse.Namespace
    conversations: list[Conversation]
    messages: list[list[dict[str, Any]]]
    tools: list[list[dict[str, Any]] | None]
    num_rows: int
    num_tokens: int
    holds_control_text: bool


def config_of(options: argparse.Namespace, *, num_lanes: int = 1, endless: bool = False) -> Config:
    """num_lanes: one gives the packs of `auto`, without measuring the rows first."""
    dataset = {"path": str(options.data), "format": options.format, "max_samples": options.rows}
    sections = {
        "general": {"run_name": "bench"},
        "model": {"path": options.tokenizer},
        "tokenizer": {"chat_template": options.chat_template},
        "data": {"datasets": [dataset], "num_lanes": num_lanes},
        "tokens": {"sequence_length": options.sequence_length, "train_steps" if endless else "train_epochs": 1},
        "optimizer": {"learning_rate": 1e-4},
    }
    return Config.model_validate(sections)


def read_corpus(options: argparse.Namespace, preparation: Preparation) -> Corpus:
    """Raises DataError where the data cannot be benchmarked."""
    keys = list(preparation.all_keys())
    kept = [each for each in preparation.tokenize_many(keys) if not isinstance(each, Dropped)]
    conversations = [each for each in map(preparation.parse, (t.key for t in kept)) if isinstance(each, Conversation)]
    if not conversations or len(conversations) < len(kept):
        problem = "rows of ids have no text" if kept else f"no conversation of up to {options.sequence_length} tokens"
        raise DataError(f"{options.data}: {problem}; give a file of conversations, or raise --sequence-length")
    template_for = preparation.chat_tokenizer.template_for
    return Corpus(
        options,
        conversations,
        [plain_messages(each.messages, template_for(each)) for each in conversations],
        [[dict(tool) for tool in each.tools] or None for each in conversations],
        num_rows=len(keys),
        num_tokens=sum(map(len, kept)),
        holds_control_text=any(each.holds_control_text for each in kept),
    )


def one_epoch(dataset: PackedDataset) -> Iterator[Pack]:
    num_left = dataset.preparation.num_rows or 0
    for pack in dataset:
        num_left -= pack.num_rows
        if pack.keys:
            yield pack
        if not num_left:
            return


def in_batches(items: Sequence[Any]) -> list[Sequence[Any]]:
    return [items[start : start + BATCH] for start in range(0, len(items), BATCH)]


# --- The ways to do it; each makes one with nothing remembered from before, and gives what does the work ---


def ways_of(corpus: Corpus, trl_rows: dict[str, datasets.Dataset]) -> dict[str, Callable[[], Work]]:
    return {
        SFTRON: lambda: sftron_packs(corpus),
        "sftron: Preparation.read_many": lambda: sftron_read_many(corpus),
        ENCODE: lambda: bare_tokenizer(corpus, "encode_batch"),
        "tokenizer.encode_batch_fast": lambda: bare_tokenizer(corpus, "encode_batch_fast"),
        "tokenizer.apply_chat_template": lambda: apply_chat_template(corpus),
        **{name: partial(trl_preparation, corpus.options, rows) for name, rows in trl_rows.items()},
    }


def rows_for_trl(corpus: Corpus) -> tuple[dict[str, datasets.Dataset], str]:
    """By what it does with them; or none, and why."""
    if not find_spec("trl"):
        return {}, "it is not installed (pip install trl)"
    tools = {"tools": [json.dumps(each) for each in corpus.tools]} if any(corpus.tools) else {}
    columns = {TRL: {"messages": corpus.messages}}
    # TRL trains the answers alone with any template only where a conversation has one, at its end.
    if all(is_one_answer([message.role for message in each.messages]) for each in corpus.conversations):
        halves = {"prompt": [m[:-1] for m in corpus.messages], "completion": [m[-1:] for m in corpus.messages]}
        columns["TRL: completions trained"] = halves
    try:
        rows = {name: datasets.Dataset.from_dict({**values, **tools}) for name, values in columns.items()}
        for each in rows.values():
            trl_preparation(corpus.options, each.select(range(min(NUM_COMPARED, len(each)))))()
    except Exception as error:  # what Arrow fills in where messages have different fields fails templates in many ways
        return {}, f"it cannot prepare these rows: {error}"
    return rows, ""


def is_one_answer(roles: list[Role]) -> bool:
    return len(roles) > 1 and roles.count(Role.ASSISTANT) == 1 and roles[-1] is Role.ASSISTANT


def fresh_preparation(corpus: Corpus) -> Preparation:
    """It has made its copy of the tokenizer (`measure_opening` tells how long that takes), and knows no words yet."""
    chat_tokenizer = feed.load_chat_tokenizer(config_of(corpus.options))
    chat_tokenizer.encode(corpus.conversations[0])
    return feed.prepare(config_of(corpus.options), chat_tokenizer)


def sftron_packs(corpus: Corpus) -> Work:
    preparation = fresh_preparation(corpus)

    def work() -> tuple[int, int]:
        dataset = feed.make_dataset(config_of(corpus.options), preparation)
        sizes = [collate(pack, keep_tail=True).pack.num_tokens for pack in one_epoch(dataset)]
        return sum(sizes), len(sizes)

    return work


def sftron_read_many(corpus: Corpus) -> Work:
    preparation = fresh_preparation(corpus)
    shuffled = random.Random(0).sample(range(corpus.num_rows), corpus.num_rows)
    batches = in_batches([preparation.key(row) for row in shuffled])

    def work() -> tuple[int, int]:
        read = (each for batch in batches for each in preparation.read_many(batch))
        return sum(len(each) for each in read if not isinstance(each, Dropped)), 0

    return work


def plain_tokenizer(options: argparse.Namespace) -> Any:
    """Hugging Face's own, with the template that is asked for."""
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    if options.chat_template:
        tokenizer.chat_template = feed.load_chat_tokenizer(config_of(options)).template.source
    return tokenizer


def bare_tokenizer(corpus: Corpus, method: str) -> Work:
    tokenizer = plain_tokenizer(corpus.options)
    inputs = zip(corpus.messages, corpus.tools, strict=True)
    texts = [tokenizer.apply_chat_template(messages, tools=tools, tokenize=False) for messages, tools in inputs]
    encode, batches = getattr(tokenizer.backend_tokenizer, method), in_batches(texts)
    return lambda: (sum(len(each) for batch in batches for each in encode(batch, add_special_tokens=False)), 0)


def apply_chat_template(corpus: Corpus) -> Work:
    apply, flags = plain_tokenizer(corpus.options).apply_chat_template, {"return_assistant_tokens_mask": False}
    inputs = list(zip(corpus.messages, corpus.tools, strict=True))
    return lambda: (sum(len(apply(m, tools=t, return_dict=True, **flags)["input_ids"]) for m, t in inputs), 0)


def trl_preparation(options: argparse.Namespace, rows: datasets.Dataset) -> Work:
    """SFTTrainer's own preparation, up to its packed rows in memory; the model beside it is a few numbers."""
    from trl import SFTConfig, SFTTrainer  # pyright: ignore[reportMissingImports]

    tokenizer = plain_tokenizer(options)
    sizes = dict.fromkeys(("hidden_size", "intermediate_size"), 8)
    sizes |= dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 1)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes))
    with tempfile.TemporaryDirectory() as folder:
        packing = {"packing": True, "packing_strategy": "bfd", "max_length": options.sequence_length}
        not_yet = {"skip_prepare_dataset": True}
        arguments = SFTConfig(folder, use_cpu=True, bf16=False, report_to=[], dataset_kwargs=not_yet, **packing)
        trainer = SFTTrainer(model, arguments, train_dataset=rows, processing_class=tokenizer)

    def work() -> tuple[int, int]:
        packed = trainer._prepare_dataset(rows, tokenizer, arguments, True, None, "train")
        return sum(map(sum, packed["seq_lengths"])), len(packed)

    return work


def timed(work: Callable[[], Any]) -> tuple[Any, tuple[float, float]]:
    """What it gives, and its seconds of the processor and of the clock."""
    gc.collect()
    processor, clock = process_time(), perf_counter()
    return work(), (process_time() - processor, perf_counter() - clock)


def measure(ways: dict[str, Callable[[], Work]], num_repetitions: int) -> dict[str, dict[str, Any]]:
    """All ways by turns, so that what else the machine does falls on all alike: two passes of a fresh one each time."""
    measured: dict[str, dict[str, Any]] = {name: {"first passes": [], "second passes": []} for name in ways}
    gc.collect()
    gc.freeze()  # what the benchmark itself holds is no way's to look through
    for _ in range(num_repetitions):
        for name, make in ways.items():
            work = make()
            for passes in ("first passes", "second passes"):
                (measured[name]["tokens"], measured[name]["packs"]), seconds = timed(work)
                measured[name][passes].append(seconds)
    return measured


# --- What opening costs; in a process of its own ---


def measure_opening(options: argparse.Namespace, conversation: Conversation) -> dict[str, float]:
    """Memory is what is held beyond imports and tokenizers; MB are 1e6 bytes, seconds are of the clock."""
    config = config_of(options, endless=True)
    chat_tokenizer, (_, loading) = timed(lambda: feed.load_chat_tokenizer(config))
    _, (_, copying) = timed(lambda: chat_tokenizer.encode(conversation))
    before = held()
    preparation, (_, opening) = timed(lambda: feed.prepare(config, chat_tokenizer))
    opened = held()
    dataset = feed.make_dataset(config, preparation)
    packs = iter(dataset)
    _, (_, first_pack) = timed(lambda: collate(next(packs), keep_tail=True))
    consume(packs, NUM_PACKS - 1)
    later = held()
    many_lanes = feed.make_dataset(config_of(options, num_lanes=MANY_LANES, endless=True), preparation)
    consume(iter(many_lanes), max(NUM_PACKS, MANY_LANES))
    return {
        "rows": preparation.num_rows,
        "load the tokenizer, s": loading,
        "make its copy, s": copying,
        "open the rows, s": opening,
        "the first pack from there, s": first_pack,
        **{f"{what}, opened": opened[what] - before[what] for what in before},
        **{f"{what}, after {NUM_PACKS} packs": later[what] - before[what] for what in before},
        "lanes": dataset.num_lanes,
        "state, bytes": len(json.dumps(dataset.state_dict())),
        f"state with {MANY_LANES} lanes, bytes": len(json.dumps(many_lanes.state_dict())),
    }


def consume(packs: Iterator[Pack], number: int) -> None:
    for _ in islice(packs, number):
        pass


def held() -> dict[str, float]:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # else what loading the tokenizers left free would be filled unseen
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="utf-8").splitlines()[1:]
    sizes = {name: int(kilobytes) * 1024 / 1e6 for name, kilobytes, _ in map(str.split, lines)}
    mapped = sizes["Rss:"] - sizes["Anonymous:"]
    return {"anonymous MB": sizes["Anonymous:"], "mapped MB": mapped, "Python objects": len(gc.get_objects())}


def openings(options: argparse.Namespace, conversation: Conversation) -> dict[str, dict[str, float]]:
    """Of the data as it is, and of a JSONL file of its rows several times over."""
    source = open_source(str(options.data), max_samples=options.rows)
    rows = "".join(json.dumps(source[row]) + "\n" for row in range(len(source)))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        with path.open("w", encoding="utf-8") as file:
            file.writelines(rows for _ in range(options.times))
        larger = argparse.Namespace(**{**vars(options), "data": path, "rows": None})
        opened = {}
        for name, size in (("as it is", options), (f"x {options.times}", larger)):
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                opened[name] = pool.submit(measure_opening, size, conversation).result()
    return opened


# --- The report ---


def benchmark(options: argparse.Namespace) -> dict[str, Any]:
    config, described = config_of(options), machine()
    preparation = feed.prepare(config, feed.load_chat_tokenizer(config))
    corpus = read_corpus(options, preparation)
    packs = list(one_epoch(feed.make_dataset(config, preparation)))
    endless = islice(feed.make_dataset(config_of(options, endless=True), preparation), len(packs))
    fill = sum(pack.num_tokens for pack in endless) / (len(packs) * options.sequence_length)
    trl_rows, why_without_trl = rows_for_trl(corpus)
    measured = measure(ways_of(corpus, trl_rows), options.repeat)
    data = {
        "data": options.data.name,
        "rows": corpus.num_rows,
        "conversations": len(corpus.conversations),
        "tokenizer": Path(options.tokenizer).name,
        "chat template": options.chat_template or "its own",
        "sequence length": options.sequence_length,
        "repetitions": options.repeat,
        "fill without an end": round(fill, 4),
    }
    return {
        "machine": described,
        "data": data,
        "ways": {name: rates(name, measured, corpus) for name in measured},
        "passes": measured,
        "why TRL is left out": why_without_trl,
        "opening": openings(options, corpus.conversations[0]),
        "checks": checks(corpus, preparation, packs, measured),
    }


def rates(name: str, measured: dict[str, dict[str, Any]], corpus: Corpus) -> dict[str, float | None]:
    """Of the best first pass, by the processor's seconds, but for what says otherwise."""
    best = {each: min(measured[each]["first passes"])[0] for each in measured}
    tokens, packs, num_conversations = measured[name]["tokens"], measured[name]["packs"], len(corpus.conversations)
    return {
        "tokens": tokens,
        "s": best[name],
        "clock s": min(clock for _, clock in measured[name]["first passes"]),
        "tokens/s": tokens / best[name],
        "us/conversation": 1e6 * best[name] / num_conversations,
        "second pass": 1e6 * min(measured[name]["second passes"])[0] / num_conversations,
        "x encode_batch": best[ENCODE] / best[name],
        "x TRL": best[TRL] / best[name] if TRL in best else None,
        "packs": packs or None,
        "fill": tokens / (packs * corpus.options.sequence_length) if packs else None,
        "conversations/pack": num_conversations / packs if packs else None,
    }


def checks(corpus: Corpus, preparation: Preparation, packs: list[Pack], measured: dict[str, Any]) -> dict[str, bool]:
    keys = {key for pack in packs for key in pack.keys}
    some = random.Random(0).sample(corpus.conversations, min(NUM_COMPARED, len(corpus.conversations)))
    # What a text spells of control tokens is text to us alone, and TRL may see rows of many fields otherwise.
    alike = [name for name in measured if name.startswith("sftron" if corpus.holds_control_text else ("sftron", "tok"))]
    return {
        "an epoch's packs hold every conversation": keys == {each.key for each in corpus.conversations},
        "once": sum(len(pack.keys) for pack in packs) == len(keys),
        "and all their tokens": sum(pack.num_tokens for pack in packs) == corpus.num_tokens,
        f"{len(some)} conversations have the ids of apply_chat_template": all(
            has_own_ids(preparation, c) for c in some
        ),
        f"{len(alike)} ways give as many tokens": {measured[name]["tokens"] for name in alike} == {corpus.num_tokens},
    }


def has_own_ids(preparation: Preparation, conversation: Conversation) -> bool:
    try:
        encoded = preparation.chat_tokenizer.encode(conversation)
        require_own_ids(preparation.chat_tokenizer, conversation, encoded)
    except DataError as error:
        print(error, file=sys.stderr)
        return False
    return True


def machine() -> dict[str, str]:
    names = [line.split(": ")[1] for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    packages = [name for name in ("tokenizers", "transformers", "torch", "datasets", "trl") if find_spec(name)]
    return {
        "machine": f"1 core of {os.cpu_count()}, {names[0] if names else platform.machine()}",
        "load before": f"{os.getloadavg()[0]:.1f}",
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
    }


def report(results: dict[str, Any]) -> str:
    by_size, ways = results["opening"], results["ways"]
    opening = {name: {size: by_size[size][name] for size in by_size} for name in next(iter(by_size.values()))}
    parts = [
        *(", ".join(f"{name} {value}" for name, value in results[part].items()) for part in ("machine", "data")),
        table(ways),
        *([f"TRL is left out: {why}"] if (why := results["why TRL is left out"]) else []),
        table(opening),
        "\n".join(f"{'PASS' if passed else 'FAIL'}  {name}" for name, passed in results["checks"].items()),
    ]
    return "\n\n".join(parts)


def table(lines: dict[str, dict[str, float | None]]) -> str:
    """A line for each, its name at the left; the columns are the first one's."""
    cells = [["", *next(iter(lines.values()))], *([name, *map(as_text, lines[name].values())] for name in lines)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    aligned = ([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in cells)
    return "\n".join("  ".join(row) for row in aligned)


def as_text(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True, metavar="FOLDER", help="a Hugging Face tokenizer")
    parser.add_argument("--chat-template", metavar="NAME_OR_FILE", help="as tokenizer.chat_template; else its own")
    parser.add_argument("--data", type=Path, required=True, metavar="FILE", help="rows of conversations")
    parser.add_argument("--format", default="auto", help="as data.datasets.format (default: %(default)s)")
    parser.add_argument("--rows", type=positive, help="take the first ROWS rows only")
    parser.add_argument(
        "--sequence-length", type=positive, default=2048, help="tokens of a pack (default: %(default)s)"
    )
    parser.add_argument(
        "--repeat", type=positive, default=3, help="repetitions; the best counts (default: %(default)s)"
    )
    parser.add_argument("--times", type=positive, default=100, help="opens TIMES the rows too (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="means --rows 300 --repeat 1 --times 10")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there too")
    options = parser.parse_args()
    if options.quick:
        options.rows, options.repeat, options.times = 300, 1, 10
    return options


def positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise ValueError
    return number


def settle_process() -> None:
    """One core and one thread; nothing printed on the way, and nothing cached that would be found a second time."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    disable_progress_bar()
    set_verbosity_error()
    warnings.simplefilter("ignore", FutureWarning)  # TRL sets what transformers is about to rename
    datasets.disable_progress_bars()
    datasets.disable_caching()


def main() -> int:
    options = parse_arguments()
    settle_process()
    try:
        results = benchmark(options)
        print(report(results))
        if options.json:
            options.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    except (ValueError, OSError) as error:
        return refuse(error, "bench_data")
    return 0 if all(results["checks"].values()) else 1


if __name__ == "__main__":
    exit_with(main)
