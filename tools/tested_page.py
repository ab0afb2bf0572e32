#!/usr/bin/env python
"""docs/how-it-is-tested.md, from the numbers of the last nightly commands, which tools/tested.json has:
`python tools/tested_page.py [--count] [--layouts] [--mutants DIR] [--fresh DIR] [--simulator FILE] [--chaos FILE]
[--fuzz N]`.

Each option takes new numbers into tools/tested.json; then the page is written. Without options the page alone is
written. `--count` counts tests, laws and families; `--layouts` trains, on two cores for about half an hour.

A mutant that survived is `killed` by a test that was added or found since, `equivalent` with the reason why it changes
nothing that a law states, or `open`. This is written by hand into tools/tested.json, at the `outcome`, `by` and
`reason` of the mutant, and kept when the results are taken again.
"""

import argparse
import datetime
import importlib.metadata
import json
import platform
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sftron.errors import exit_with

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
NUMBERS, PAGE = ROOT / "tools/tested.json", ROOT / "docs/how-it-is-tested.md"
Numbers = dict[str, Any]

INTRODUCTION = """\
# How it is tested

How many tests there are, and how often a change of the code goes unseen by those of the [laws](invariants.md).
`tools/tested_page.py` writes this page from the numbers of the nightly commands ([CONTRIBUTING](../CONTRIBUTING.md)).
"""


def stamp() -> Numbers:
    """Returns the date and the versions with which numbers were measured."""
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    return {"date": datetime.date.today().isoformat(), "versions": {"python": platform.python_version()} | versions}


# -- the numbers -------------------------------------------------------------------------------------------------------


def counts() -> Numbers:
    """Counts the tests, as pytest collects them, the laws and the families."""
    from sftron.models.families.table import FAMILIES
    from tools.mutants import files_of_laws

    laws = re.findall(r"^## \d+\. ", (ROOT / "docs/invariants.md").read_text(encoding="utf-8"), re.MULTILINE)
    return stamp() | {
        "tests by day": _collected(),
        "tests by night": _collected("-m", "nightly"),
        "test files of laws": len(files_of_laws()),
        "tests of laws": _collected("-m", "nightly or not nightly", *files_of_laws()),
        "laws": len(laws),
        "families": len(FAMILIES),
    }


def _collected(*options: str) -> int:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *options]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return sum(map(int, re.findall(r"^tests/\S+: (\d+)$", out, re.MULTILINE)))


def mutants(folder: Path, before: Numbers) -> Numbers:
    """Returns the score of `tools/mutants.py`, and what survived, with the reasons that were given before."""
    drawn = json.loads((folder / "drawn.json").read_text(encoding="utf-8"))
    results = [json.loads(line) for line in (folder / "results.jsonl").read_text(encoding="utf-8").splitlines()]
    first, last = dict[str, Numbers](), dict[str, Numbers]()
    for line in results:
        first.setdefault(line["name"], line)
        last[line["name"]] = line
    known = {each["name"]: each for each in before.get("survivors", ())}
    new = {"outcome": "open", "by": "", "reason": ""}
    survivors = list[Numbers]()
    for name, line in sorted(first.items()):
        if line["outcome"] != "killed":
            verdict = {key: known.get(name, new)[key] for key in new}
            if last[name]["outcome"] == "killed":
                verdict = {"outcome": "killed", "by": last[name]["by"], "reason": ""}
            survivors.append({"name": name, "change": line["change"], **verdict})
    by_folder = Counter(str(Path(each["path"]).parent).removeprefix("src/sftron/") for each in first.values())
    alive = Counter(str(Path(first[each["name"]]["path"]).parent).removeprefix("src/sftron/") for each in survivors)
    folders = {name: [number, number - alive[name]] for name, number in sorted(by_folder.items())}
    return stamp() | drawn | {"folders": folders, "survivors": survivors}


def layouts(num_steps: int = 50) -> Numbers:
    """Trains each model on all layouts and in a run that hops through them; returns the digests of what is trained."""
    from tests.train.test_layouts import LAYOUTS, MODELS, Runs, digests_of

    digests = dict[str, dict[str, str]]()
    for name in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            digests[name] = digests_of(Runs(Path(folder), name), LAYOUTS, num_steps)
    return stamp() | {"steps": num_steps, "models": digests}


# -- the page ----------------------------------------------------------------------------------------------------------


def page(numbers: Numbers) -> str:
    parts = [INTRODUCTION, *_counted(numbers)]
    for name, of_command in (("mutants", _of_mutants), ("simulator", _of_simulator), ("layouts", _of_layouts)):
        if name in numbers:
            parts += of_command(numbers[name])
    return "\n".join(parts)


def _counted(numbers: Numbers) -> Iterator[str]:
    count = numbers.get("counts", {})
    of_laws = f"tests in the {count.get('test files of laws')} files that the laws name"
    rows = [
        ("laws", "counts", "laws", "[invariants.md](invariants.md)"),
        ("tests on each change", "counts", "tests by day", "`make test`"),
        ("tests by night", "counts", "tests by night", "`make long-tests`"),
        (of_laws, "counts", "tests of laws", "both"),
        ("model types, each compared with transformers", "counts", "families", "both"),
        ("kills of a run of two ranks at random instants", "chaos", "kills", "`make chaos`"),
        ("hops of a run between layouts", "chaos", "hops", "`make chaos`"),
        ("mutated inputs of five readers", "fuzz", "inputs", "`make fuzz`"),
        ("simulated runs with faults", "simulator", "runs", "`make simulate`"),
        ("changes of the code", "mutants", "number", "`make mutants`"),
    ]
    rows = [(what, f"{numbers[of][key]:,}", how, numbers[of]["date"]) for what, of, key, how in rows if of in numbers]
    yield "| what | number | with | on |\n|---|---:|---|---|"
    yield "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"
    versions = ", ".join(f"{name} {version}" for name, version in count.get("versions", {}).items())
    yield f"Measured with {versions or 'unknown versions'}, on a CPU.\n"


def _of_mutants(found: Numbers) -> Iterator[str]:
    number, survivors = found["number"], found["survivors"]
    now = Counter(each["outcome"] for each in survivors)
    killed = number - len(survivors)
    yield "## Changes of the code\n"
    yield (
        "`make mutants` changes one place of the code in which the laws stand: another operator, another number, a "
        f"condition turned round, a loop that never runs. {number:,} such mutants were drawn with the seed "
        f"{found['seed']} from {found['mutants']:,} mutants of {found['places']:,} places in {found['files']} files "
        f"({found['date']}, commit {found['commit']}). Only tests of the files that [invariants.md](invariants.md) "
        f"names count, at first up to {found['seconds']:g} seconds of those that execute the line; a mutant of a line "
        "that none executes has survived.\n"
    )
    score = (killed + now["killed"]) / (number - now["equivalent"])
    yield (
        f"**{killed:,} of {number:,} were killed ({killed / number:.1%}).** Of the {len(survivors)} that survived, "
        "tests that were added since, that take longer, or that run ranks, whose lines coverage does not see, kill "
        f"{now['killed']}; "
        f"{now['equivalent']} change nothing that a law states, and {now['open']} are open: **{score:.1%}** of those "
        "that may change something are killed.\n"
    )
    if fresh := found.get("fresh"):
        yield (
            f"As tests were written for these survivors, another sample says how many other changes are seen: of "
            f"{fresh['number']} mutants that were drawn afterwards with the seed {fresh['seed']} ({fresh['date']}, "
            f"commit {fresh['commit']}), **{fresh['killed']} were killed ({fresh['killed'] / fresh['number']:.1%})** "
            f"by up to {fresh['seconds']:g} seconds of tests.\n"
        )
    yield "| code | mutants | killed at first |\n|---|---:|---:|"
    yield "\n".join(f"| {name} | {all_} | {dead} |" for name, (all_, dead) in found["folders"].items()) + "\n"
    for outcome, title in (
        ("killed", "### Survivors that became tests"),
        ("open", "### Open"),
        ("equivalent", "### Survivors that change nothing"),
    ):
        if now[outcome]:
            yield title + "\n"
            yield "| mutant | change | |\n|---|---|---|"
            yield "\n".join(map(_line_of, [each for each in survivors if each["outcome"] == outcome])) + "\n"


def _line_of(survivor: Numbers) -> str:
    path = survivor["name"].removeprefix("src/sftron/").partition(" ")[0]
    change = [line[0] + " " + line[1:].strip() for line in survivor["change"]]
    code = "<br>".join(f"`{_cell(line)}`" for line in change)
    said = f"`{survivor['by'].partition('::')[2] or survivor['by']}`" if survivor["outcome"] == "killed" else ""
    return f"| {path} | {code} | {_cell(' '.join(filter(None, (survivor['reason'], said))))} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


_FOUND_BY_SIMULATION = (
    (
        "The folders above a new checkpoint were not synced: after a loss of power it was gone. A checkpoint that was "
        "being removed could keep its name and lose files.",
        "`tests/checkpoint/test_power_loss.py`",
    ),
    (
        "`result.json` and `best.json` were renamed before they were on disk, and could be empty; a run could be "
        "complete before `latest` was.",
        "`tests/checkpoint/test_power_loss.py`",
    ),
    (
        "`evaluations.jsonl` was not on disk before a checkpoint that counts its evaluations as made: they were lost.",
        "`test_lines_are_on_the_disk_before_a_checkpoint_that_knows_their_steps_and_evaluations`",
    ),
    (
        "A kill between the best checkpoint and `best.json` left it out, or at the one before.",
        "`test_a_resume_writes_the_best_json_that_a_kill_after_the_checkpoint_has_prevented`",
    ),
    (
        "A run whose disk was full at its very end was complete, and `latest` named an older export.",
        "`test_a_link_that_cannot_be_moved_to_a_newer_export_is_removed_and_does_not_name_the_older_one`",
    ),
    (
        "`metrics.jsonl` was on disk, but not its entry in its folder: with the first checkpoint kept, it was lost.",
        "`test_lines_are_on_the_disk_before_a_checkpoint_that_knows_their_steps_and_evaluations`",
    ),
)


def _of_simulator(found: Numbers) -> Iterator[str]:
    num_failures = len(found["failures"])
    seeds = ", ".join(map(str, found.get("again", ())))
    again = f" (seed {seeds} after a mend of the simulator itself)" if seeds else ""
    yield "## Simulated faults\n"
    yield (
        "`make simulate` trains a model of one matrix with the real lanes, loader, checkpoints and resume, over a "
        "simulated disk, clock, ranks and workers, all under one seed; `make simulate SEED=7` replays one, to the "
        f"bit. {found['runs']:,} runs from the seed {found['first_seed']} on ({found['date']}): "
        f"{num_failures or 'no'} {'run' if num_failures == 1 else 'runs'} failed{again}. In each run by epochs, every "
        "row came once an epoch; in each run, the weights were those of the undisturbed run, and the newest valid "
        "checkpoint was the one that was loaded. What a fault excuses, such as lines that a full disk does not take, "
        "is in `tools/simulator/drill.py`. Seven faults are put back on purpose, and found "
        "(`test_each_fault_that_is_put_back_is_found`).\n"
    )
    yield "| fault | times |\n|---|---:|"
    yield "\n".join(f"| {name} | {times:,} |" for name, times in sorted(found["faults"].items())) + "\n"
    yield "What it found that no test had, each mended:\n"
    yield "| fault | test since |\n|---|---|"
    yield "\n".join(f"| {fault} | {test} |" for fault, test in _FOUND_BY_SIMULATION) + "\n"


def _of_layouts(found: Numbers) -> Iterator[str]:
    yield "## The same bits on any layout\n"
    yield (
        f"With [`general.deterministic: layout`](resume.md), the SHA-256 of all weights and optimizer state after "
        f"{found['steps']} steps, on each layout (ranks, copies, workers) and in a run that hops through all of them "
        f"({found['date']}; its first 12 digits):\n"
    )
    models = found["models"]
    layouts = list(next(iter(models.values())))
    yield f"| layout | {' | '.join(models)} |\n|---|{'---|' * len(models)}"
    yield (
        "\n".join(f"| {each} | {' | '.join(f'`{m[each][:12]}`' for m in models.values())} |" for each in layouts) + "\n"
    )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", action="store_true", help="count tests, laws and families")
    parser.add_argument("--mutants", type=Path, metavar="DIR", help="the folder of tools/mutants.py")
    parser.add_argument("--fresh", type=Path, metavar="DIR", help="that of mutants drawn after the tests were written")
    parser.add_argument("--layouts", action="store_true", help="train on eight layouts with the same bits")
    for name in ("simulator", "chaos"):
        parser.add_argument(f"--{name}", type=Path, metavar="FILE", help="what its command wrote")
    parser.add_argument(
        "--fuzz", type=int, metavar="N", help="the number of inputs of all targets, none of which failed"
    )
    options = parser.parse_args(arguments)
    new = Numbers()
    if options.count:
        new["counts"] = counts()
    if options.layouts:
        new["layouts"] = layouts()
    for name in ("simulator", "chaos"):
        if file := getattr(options, name):
            new[name] = stamp() | json.loads(file.read_text(encoding="utf-8"))
    if options.fuzz:
        new["fuzz"] = stamp() | {"inputs": options.fuzz}
    numbers: Numbers = json.loads(NUMBERS.read_text(encoding="utf-8")) if NUMBERS.exists() else {}
    if options.mutants:
        before = numbers.get("mutants", {})
        new["mutants"] = mutants(options.mutants, before) | {key: before[key] for key in ("fresh",) if key in before}
    if options.fresh:
        sample = mutants(options.fresh, {})
        sample["killed"] = sample["number"] - len(sample.pop("survivors"))
        new["mutants"] = new.get("mutants", numbers["mutants"]) | {"fresh": sample}
    numbers |= new
    NUMBERS.write_text(json.dumps(numbers, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    PAGE.write_text(page(numbers), encoding="utf-8")
    return 0


if __name__ == "__main__":
    exit_with(lambda: main(sys.argv[1:]))
