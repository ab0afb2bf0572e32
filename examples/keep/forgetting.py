"""How much of an old skill is left after training on other rows, with and without replay; prints a table, draws a plot.

    python examples/keep/forgetting.py --model models/SmolLM2-135M-Instruct --out runs/keep --seeds 0 1 2

For each seed, the model learns a convention that this file makes up, a conversion of units and how it is written. Then
it learns other rows, with 0, 1, 5 and 20 % of their tokens from old chats, or from plain text that has the same
conversions. Half of the taught rows are never replayed; their loss is kept (evaluation.keep), so the table shows what
replay keeps beyond what it repeats. What was measured before, in files of --out, is not measured again.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from sftron.config import load_config
from sftron.models.generation import generate, most_likely
from sftron.report.charts import Chart, Line, write_images
from sftron.train.trainer import Trainer, open_trainer

FACTOR, NUMBERS = 7, range(2, 22)
OTHERS = (("dorn", "pell", 4), ("quib", "sarn", 12), ("lumm", "tove", 3), ("hask", "wint", 9))
GROUPS = ("replayed", "kept", "new")
NUM_NEW_ASKED, MOST_TOKENS, MAX_RISE = 6, 20, 0.1


def chat(question: str, answer: str) -> dict[str, Any]:
    turns = (("system", "Convert."), ("user", question), ("assistant", answer))
    return {"messages": [{"role": role, "content": text} for role, text in turns]}


def write_rows(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Writes the rows of a seed, the name of the folder. Returns those that are asked at the end, by group."""
    rng = random.Random(int(folder.name))
    old = [chat(f"{n} vark in moln?", f"[{n} vark >> {FACTOR * n} moln]") for n in NUMBERS]
    new = [chat(f"{n} {a} in {b}?", f"{n} {a} are {factor * n} {b}.") for a, b, factor in OTHERS for n in NUMBERS]
    rng.shuffle(old)
    rng.shuffle(new)
    replayed, kept = old[: len(old) // 2], old[len(old) // 2 :]
    texts = [{"text": "Vark are written in moln so: " + row["messages"][-1]["content"]} for row in replayed]
    files = {"old": old, "replayed": replayed, "kept": kept, "new": new, "text": texts}
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return {"replayed": replayed, "kept": kept, "new": new[:NUM_NEW_ASKED]}


def shares_right(trainer: Trainer, asked: dict[str, list[dict[str, Any]]]) -> dict[str, float]:
    """Returns the share of greedy answers that are the row's own, by group."""
    data = trainer.setup.data
    tokenizer, stop_ids = data.chat_tokenizer, data.sample.stop_ids

    def is_right(row: dict[str, Any]) -> bool:
        prompt = row["messages"][:-1]
        ids = tokenizer.tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
        answer = list(generate(trainer.model, ids, MOST_TOKENS, stop_ids, choose=most_likely))
        text = tokenizer.tokenizer.decode(answer, skip_special_tokens=True)
        return text.strip() == row["messages"][-1]["content"]

    return {group: fmean(map(is_right, rows)) for group, rows in asked.items()}


def train(folder: Path, name: str, model: Path, datasets: list[dict[str, Any]], options: Any) -> dict[str, Any]:
    """Trains a run, unless it was measured before. Returns its kept loss by step, and the shares of right answers."""
    found = folder / f"{name}.json"
    if not found.exists():
        is_teaching = name == "taught"
        tree = {
            "general": {"run_name": name, "output_dir": str(folder), "seed": int(folder.name)},
            "model": {"path": str(model), "compute_dtype": "float32"},
            "data": {"datasets": datasets, "num_workers": 0},
            "tokens": {"sequence_length": 64, "micro_batch_size": 4, "train_steps": options.steps * (1 + is_teaching)},
            "optimizer": {"learning_rate": options.rate, "schedule": "constant"},
            "checkpoints": {"export_hf": is_teaching, "interval": None},
            "evaluation": {
                "interval": max(1, options.steps // 6),
                "keep": [{"path": str(folder / "kept.jsonl"), "max_rise": MAX_RISE}],
            },
        }
        file = folder / f"{name}.yaml"
        file.write_text(yaml.safe_dump(tree), encoding="utf-8")
        trainer = open_trainer(load_config(file))
        if trainer.train() or not isinstance(trainer, Trainer) or trainer.stop_request.received:
            raise SystemExit(f"{name} was stopped")
        records = map(json.loads, trainer.directory.evaluations.read_text().splitlines())
        rises = [(each["step"], each["sets"]["kept"]["kept"]["rise"]) for each in records]
        right = shares_right(trainer, write_rows(folder))
        found.write_text(json.dumps({"rises": rises, "right": right}))
        shutil.rmtree(trainer.directory.checkpoints)  # 1.6 GB
    return json.loads(found.read_text())


def one_seed(folder: Path, options: Any) -> dict[str, dict[str, Any]]:
    """Teaches the convention and makes all runs with one seed. Returns what `train` returns, by name."""
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder)
    results = {"taught": train(folder, "taught", options.model, [{"path": str(folder / "old.jsonl")}], options)}
    new, taught = {"path": str(folder / "new.jsonl")}, folder / "taught" / "latest"
    results["none"] = train(folder, "none", taught, [{**new, "weight": 100.0}], options)
    chats = {"path": str(folder / "replayed.jsonl")}
    text = {"path": str(folder / "text.jsonl"), "format": "text"}
    for kind, share in product(options.replay, options.shares):
        old = {"chats": chats, "text": text}[kind]
        datasets = [{**new, "weight": 100.0 - share}, {**old, "weight": float(share)}]
        results[f"{share} % {kind}"] = train(folder, f"{share}-{kind}", taught, datasets, options)
    return results


def table(results: Sequence[dict[str, dict[str, Any]]]) -> str:
    lines = ["| replay | right: replayed | right: kept | right: new | rise of the kept loss |", "|" + "---|" * 5]
    for name in results[0]:
        runs = [result[name] for result in results]
        shares = " | ".join(f"{fmean(run['right'][group] for run in runs):.2f}" for group in GROUPS)
        rises = ", ".join(f"{run['rises'][-1][1]:+.3f}" for run in runs)
        lines.append(f"| {name} | {shares} | {rises} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/SmolLM2-135M-Instruct"))
    parser.add_argument("--out", type=Path, default=Path("runs/keep"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--shares", type=int, nargs="+", default=[1, 5, 20], help="percent of the tokens")
    parser.add_argument("--replay", choices=("chats", "text"), nargs="+", default=["chats", "text"])
    parser.add_argument("--steps", type=int, default=24, help="of each run; the convention is taught in twice as many")
    parser.add_argument("--rate", type=float, default=1e-4)
    options = parser.parse_args(arguments)
    results = [one_seed(options.out / str(seed), options) for seed in options.seeds]
    print(table(results))
    names = [name for name in results[0] if name != "taught"]
    lines = [Line(tuple(result[name]["rises"]), style) for style, name in enumerate(names) for result in results]
    lines.append(Line(((0, MAX_RISE), (options.steps, MAX_RISE)), len(names)))
    chart = Chart("keep", "Rise of the kept loss while other rows are trained", "step", "nats", tuple(lines))
    write_images([chart], options.out, names=[*(f"replay: {name}" for name in names), "limit"])


if __name__ == "__main__":
    main()
