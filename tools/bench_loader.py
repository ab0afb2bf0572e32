"""What exact resume costs: the loader beside torch's plain DataLoader, and the first batch after a resume.

    python tools/bench_loader.py --tokenizer path/to/model

Ten million synthetic chats, made when they are asked for. Both loaders take the same packs in turns; processor time is
that of the loading process and its workers together, so that other work on the machine matters little. Exit status: 0
all checks hold, 1 one does not, 2 the tokenizer or its template cannot be used.
"""

import os

# Read by the libraries that are imported below.
os.environ["OMP_NUM_THREADS"] = os.environ["RAYON_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import argparse
import json
import statistics
from collections.abc import Iterable
from functools import partial
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import AutoTokenizer

from sftron.config.refusal import exit_with, refuse
from sftron.data.chat_tokenizer import ChatTokenizer
from sftron.data.conversations import RowFormat
from sftron.data.dataloader import PackLoader, collate
from sftron.data.dataset import PackedDataset
from sftron.data.packing import make_packing
from sftron.data.preparation import DataSet, Preparation
from sftron.data.types import Row

NUM_ROWS, BUDGET = 10_000_000, 4096
MOST_OVERHEAD, MOST_SECONDS, MOST_BYTES = 0.05, 1.0, 65_536
WORDS = ["the", "model", "says", "what", "it", "was", "asked", "and", "then", "a", "little", "more", "it", "knows"]


class Chats:
    """A RowSource: row n is a question and an answer of some ten to some hundred words."""

    name, fingerprint = "chats", "synthetic"

    def __len__(self) -> int:
        return NUM_ROWS

    def __getitem__(self, index: int) -> Row:
        answer = " ".join(WORDS[(index + n) % len(WORDS)] for n in range(10 + index * 2_654_435_761 % 400))
        return {
            "messages": [
                {"role": "user", "content": f"What is {index}?"},
                {"role": "assistant", "content": answer},
            ]
        }

    def locate(self, index: int) -> str:
        return f"row {index}"


def make_dataset(preparation: Preparation, num_lanes: int) -> PackedDataset:
    packing = make_packing("pool", pool_size=256, micro_batch_size=1)
    return PackedDataset(preparation, packing, token_budget=BUDGET, num_lanes=num_lanes, seed=1)


def state_at(share: float, num_lanes: int) -> dict[str, Any]:
    """Of a run that has dealt that share of the first epoch, and left a pool's width of holes in every lane."""
    low = int(share * NUM_ROWS / num_lanes)
    return {"next_pack": 1000 * num_lanes, "lanes": dict.fromkeys(range(num_lanes), f"{low:x}:{'5a' * 32}")}


def seconds_to_first_batch(preparation: Preparation, share: float, *, num_lanes: int, num_workers: int) -> float:
    loader = PackLoader(make_dataset(preparation, num_lanes), num_workers=num_workers, keep_tail=True)
    loader.load_state_dict(state_at(share, num_lanes))
    started = perf_counter()
    batches = iter(loader)
    next(batches)
    return perf_counter() - started


def processor_seconds() -> float:
    """Of this process and the workers that it has ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def processor_time(loader: Iterable[Any], num_batches: int) -> float:
    """Seconds a batch, of the process and its workers."""
    started = processor_seconds()
    batches = iter(loader)
    for _ in islice(batches, num_batches):
        pass
    del batches  # ends the workers, whose time counts once they have ended
    return (processor_seconds() - started) / num_batches


def overhead(
    preparation: Preparation, options: argparse.Namespace, *, num_lanes: int, num_workers: int
) -> dict[str, Any]:
    """Of PackLoader over torch's own loader with the same packs, in turns; the medians count."""
    times: dict[str, list[float]] = {"ours": [], "plain": []}
    for number in range(options.repeat):
        # Each goes first as often as second: whatever comes first warms the caches.
        for name in ("ours", "plain") if number % 2 else ("plain", "ours"):
            dataset = make_dataset(preparation, num_lanes)
            if name == "ours":
                loader = PackLoader(dataset, num_workers=num_workers, keep_tail=True)
            else:
                collate_fn: Any = partial(collate, keep_tail=True)
                loader = DataLoader(dataset, batch_size=None, num_workers=num_workers, collate_fn=collate_fn)
            times[name].append(processor_time(loader, options.batches))
    medians = {name: 1000 * statistics.median(each) for name, each in times.items()}
    ratios = sorted(ours / plain - 1 for ours, plain in zip(times["ours"], times["plain"], strict=True))
    return {**medians, "overhead": statistics.median(ratios), "from": ratios[0], "to": ratios[-1]}


def benchmark(options: argparse.Namespace) -> dict[str, Any]:
    chat_tokenizer = ChatTokenizer(AutoTokenizer.from_pretrained(options.tokenizer))
    dataset = DataSet("chats", Chats(), RowFormat("messages"))
    preparation = Preparation([dataset], chat_tokenizer, sequence_length=BUDGET)
    seconds_to_first_batch(preparation, 0.5, num_lanes=48, num_workers=0)  # what is made once, and is no resume
    resumes = {
        f"{share:.0%}, {num_lanes} lanes, {num_workers} workers": seconds_to_first_batch(
            preparation, share, num_lanes=num_lanes, num_workers=num_workers
        )
        for share in (0.01, 0.99)
        for num_lanes, num_workers in ((48, 0), (48, 1), (240, 0))
    }
    loaders = {
        f"{num_lanes} lanes, {num_workers} workers": overhead(
            preparation, options, num_lanes=num_lanes, num_workers=num_workers
        )
        for num_lanes, num_workers in ((48, 0), (240, 0), (48, 2), (240, 2))
    }
    loader = PackLoader(make_dataset(preparation, 240), num_workers=0, keep_tail=True)
    loader.load_state_dict(state_at(0.99, 240))
    size = len(json.dumps(loader.state_dict()))
    checks = {
        f"the first batch after a resume within {MOST_SECONDS} s": max(resumes.values()) <= MOST_SECONDS,
        f"overhead at most {MOST_OVERHEAD:.0%}": max(each["overhead"] for each in loaders.values()) <= MOST_OVERHEAD,
        f"the state of 240 lanes within {MOST_BYTES} bytes": size <= MOST_BYTES,
    }
    load = f"{os.getloadavg()[0]:.1f}"
    return {"load": load, "resumes": resumes, "loaders": loaders, "state, bytes": size, "checks": checks}


def report(results: dict[str, Any]) -> str:
    lines = [f"load of the machine {results['load']}; the state of 240 lanes has {results['state, bytes']:,} bytes"]
    lines += [f"first batch after {name}: {seconds:.3f} s" for name, seconds in results["resumes"].items()]
    for name, each in results["loaders"].items():
        times = f"{each['ours']:.2f} ms of processor a batch, a plain DataLoader's {each['plain']:.2f} ms"
        lines.append(f"{name}: {times}: {each['overhead']:+.1%} ({each['from']:+.1%} to {each['to']:+.1%})")
    return "\n".join([*lines, *(f"{'PASS' if ok else 'FAIL'}  {name}" for name, ok in results["checks"].items())])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True, metavar="FOLDER", help="a Hugging Face tokenizer")
    parser.add_argument("--batches", type=int, default=200, help="of each loader, a repetition (default: %(default)s)")
    parser.add_argument("--repeat", type=int, default=5, help="repetitions; medians count (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    try:
        results = benchmark(options)
        print(report(results))
        if options.json:
            options.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    except (ValueError, OSError) as error:
        return refuse(error, "bench_loader")
    return 0 if all(results["checks"].values()) else 1


if __name__ == "__main__":
    exit_with(main)
