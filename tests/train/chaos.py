"""A run that is killed at random, again and again, and a run that hops between numbers of ranks; and what must hold.

`tools/chaos.py` does it with torchrun, a few kills are a test (test_chaos.py), with a launcher that starts quicker.
"""

import itertools
import math
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from safetensors.torch import load_file

from sftron.checkpoint.checkpoint import verify_checkpoint
from sftron.checks.rank_checks import torchrun
from sftron.checks.replay import OpenedRun, audit_run
from tests.conftest import ROOT
from tests.train import ranks
from tests.train.runs import make_model_folder, metrics, settings, write_config, write_rows

Who = Literal["rank", "worker", "launcher", "all"]
Start = Callable[[Path, int, Path], ranks.Launcher]
"""Starts a run: (config, number of ranks, folder for its output)."""

Steps = list[dict[str, Any]]
"""The lines of metrics.jsonl."""

_COUNTS = ("step", "tokens", "trained_tokens", "total_tokens", "conversations", "epoch", "fill", "dropped")
ROUNDING = 1e-6
"""The most by which losses and gradient norms may differ between layouts, relative."""
_PACKS_A_STEP = 4
_STEPS_AT_FULL_RATE = 40
"""Beyond, the rate falls with the number of steps: at 1e-3, the rounding of 400 steps grows to 7e-6 of a norm."""
_LAYOUTS = ((4, 2), (4, 1), (1, 1), (4, 4), (2, 1), (2, 2))
"""The number of ranks, and of those that share each pack, by turns."""
_TIME_TO_DIE_S = 10.0
_MOST_STEPS_A_LIFE = 6


@dataclass
class Chaos:
    """Drills in `folder` with runs that `start` starts. `table` is what was done, of which `report` is given each line.

    options: Keys of all runs, as {"section__key": value}.
    violations: What did not hold.
    """

    folder: Path
    start: Start
    seed: int = 0
    report: Callable[[str], object] = lambda line: None
    options: dict[str, Any] = field(default_factory=dict)
    table: list[str] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    _of_start: Callable[[], int] = field(default_factory=lambda: itertools.count(1).__next__)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.random = random.Random(self.seed)
        self.model = make_model_folder(self.folder / "model")
        write_rows(self.folder / "rows.jsonl", 200)

    # -- kills --------------------------------------------------------------------------------------------------------

    def kill(self, num_kills: int, whom: tuple[Who, ...] = ("rank", "worker", "launcher", "all")) -> None:
        """Kills a run of 2 ranks `num_kills` times, `whom` by turns; it must be the run left alone, bit for bit."""
        num_steps = (num_kills + 1) * 2 * _MOST_STEPS_A_LIFE  # some are made before the kill arrives
        began = time.monotonic()
        self._to_the_end("alone", 2, num_steps)
        self._time_to_train = (time.monotonic() - began) / 2
        for number in range(num_kills):
            self._kill_once(whom[number % len(whom)], num_steps)
        self._to_the_end("killed", 2, num_steps)
        alone, killed = self._run("alone"), self._run("killed")
        self.compare(metrics(alone), metrics(killed), "kills", most_apart=0)
        for file in sorted((alone / "checkpoints" / f"step-{num_steps}").glob("*.safetensors")):
            other = killed / "checkpoints" / file.parent.name / file.name
            self._require(_bits(file) == _bits(other), f"other bits in {file.name} after kills")
        self._audit("killed")

    def _kill_once(self, who: Who, num_steps: int) -> None:
        """At once, while it starts, or within some steps."""
        run = self._run("killed")
        before = len(metrics(run)) if (run / "metrics.jsonl").exists() else 0
        launcher = self._start("killed", 2, num_steps)
        began, known = time.monotonic(), {}
        at = self.random.uniform(0, self._time_to_train) if self.random.random() < 1 / 3 else None
        goal = before + self.random.randint(1, _MOST_STEPS_A_LIFE)
        while time.monotonic() - began < (at or 120):
            known |= below(launcher.pid)
            if _num_lines(run / "metrics.jsonl") >= goal:
                time.sleep(self.random.uniform(0, 0.05))
                break
            time.sleep(0.005)
        known |= below(launcher.pid)
        killed_at = time.monotonic()
        targets = _targets(launcher.pid, who) or [launcher.pid]
        for target in targets if who == "all" else [self.random.choice(targets)]:
            _signal(target, signal.SIGKILL)
        while (living := alive(known)) and time.monotonic() - killed_at < _TIME_TO_DIE_S:
            known |= below(launcher.pid)
            time.sleep(0.05)
        self._require(_num_lines(run / "metrics.jsonl") < num_steps, f"the run had ended before a {who} was killed")
        died_in = time.monotonic() - killed_at
        self._require(not living, f"{len(living)} processes live {_TIME_TO_DIE_S:.0f} s after a {who} was killed")
        for process in living:
            _signal(process, signal.SIGKILL)
        launcher.wait(10)
        published = [path for path in (run / "checkpoints").glob("step-*") if path.suffix == ""]
        saved = sorted(published, key=lambda path: path.stat().st_mtime)
        for path in saved:
            self._require((problem := verify_checkpoint(path)) is None, f"{path.name}: {problem}")
        self._add(
            f"{who:<9} killed {killed_at - began:5.1f} s after the start, {_num_lines(run / 'metrics.jsonl'):>3} steps "
            f"logged, {saved[-1].name if saved else 'nothing'} saved; all dead in {died_in:.1f} s"
        )

    # -- hops ---------------------------------------------------------------------------------------------------------

    def hop(self, num_hops: int, steps_a_hop: int = 2) -> None:
        """Resumes in each of the layouts, by turns; data and losses have to be those of 1 rank."""
        num_steps = num_hops * steps_a_hop
        # The batch of a step is the same for any layout; so are the steps of a constant rate.
        rate = 1e-3 * min(1.0, _STEPS_AT_FULL_RATE / num_steps)
        options: dict[str, Any] = {"optimizer__schedule": "constant", "optimizer__learning_rate": rate}
        options["parallelism__timeout_seconds"] = 120  # 4 ranks may start on 2 cores
        accumulation = "tokens__batch_accumulation_per_replica"
        self._to_the_end("straight", 1, num_steps, **options, **{accumulation: _PACKS_A_STEP})
        for hop in range(num_hops):
            num_ranks, context = _LAYOUTS[hop % len(_LAYOUTS)]
            layout = {"parallelism__context": context, accumulation: _PACKS_A_STEP * context // num_ranks}
            self._to_the_end("hopping", num_ranks, (hop + 1) * steps_a_hop, **options, **layout)
        straight, hopping = metrics(self._run("straight")), metrics(self._run("hopping"))
        worst = self.compare(straight, hopping, "hops", most_apart=ROUNDING)
        layouts = ", ".join(f"{num_ranks} by {context}" for num_ranks, context in _LAYOUTS[:num_hops])
        self._add(f"{num_hops} hops ({layouts}), {num_steps} steps; losses differ by {worst:.1e} at most")
        self._audit("hopping")

    # -- runs ---------------------------------------------------------------------------------------------------------

    def _run(self, name: str) -> Path:
        return self.folder / "runs" / name

    def _start(self, name: str, num_ranks: int, num_steps: int, **overrides: Any) -> ranks.Launcher:
        options = {
            "general__deterministic": True,
            "data__num_workers": 1,
            "tokens__train_steps": num_steps,
            "tokens__batch_accumulation_per_replica": 1,
            "checkpoints__interval": 3,
            "checkpoints__export_hf": False,
            "logging__interval": 1,
            "parallelism__timeout_seconds": 30,
        }
        tree = settings(self.folder, self.model, general__run_name=name, **(options | self.options | overrides))
        config = write_config(self.folder / f"{name}.yaml", tree)
        output = self.folder / "output" / f"{self._of_start():03}-{name}"
        output.mkdir(parents=True)
        return self.start(config, num_ranks, output)

    def _to_the_end(self, *arguments: Any, **overrides: Any) -> None:
        status = self._start(*arguments, **overrides).wait(300)
        if status:
            *_, output = sorted((self.folder / "output").iterdir())
            said = "\n".join((output / "log").read_text(encoding="utf-8", errors="replace").splitlines()[-60:])
            self._require(False, f"a run of {arguments} that nobody killed ended with {status}:\n{said}")

    def compare(self, alone: Steps, other: Steps, after: str, *, most_apart: float) -> float:
        """Requires the same counts of both runs, and losses and norms whose ratio is 1 but for `most_apart`. Returns
        the largest difference."""
        self._require([*map(_counts, alone)] == [*map(_counts, other)], f"other data after {after}")
        pairs = zip(map(_measured, alone), map(_measured, other), strict=False)
        worst = max(abs(b[name] / a[name] - 1) if a.keys() == b.keys() else math.inf for a, b in pairs for name in a)
        self._require(worst <= most_apart, f"losses or norms differ by {worst:.1e} after {after}")
        return worst

    def _audit(self, name: str) -> None:
        audit = audit_run(OpenedRun(self._run(name), []))
        self._require(audit.passed, f"the audit of {name}:\n{audit.as_text()}")

    def _add(self, line: str) -> None:
        self.table.append(line)
        self.report(line)

    def _require(self, law: bool, otherwise: str) -> None:
        if not law:
            self.violations.append(otherwise)


def _counts(step: dict[str, Any]) -> dict[str, Any]:
    """What no layout changes by a bit: the rows and tokens of the step, in all and by data set."""
    by_set = {name: {**of_set, "loss": None} for name, of_set in step["datasets"].items()}
    return {key: step[key] for key in _COUNTS} | {"datasets": by_set}


def _measured(step: dict[str, Any]) -> dict[str, float]:
    """What the model computes: equal to the bit within a layout, and but for rounding between layouts."""
    by_set = {f"loss of {name}": of_set["loss"] for name, of_set in step["datasets"].items()}
    return {"loss": step["loss"], "grad_norm": step["grad_norm"], **by_set}


def _bits(path: Path) -> dict[str, bytes]:
    """By name, as the optimizer's state may stand in another order in the file."""
    return {name: tensor.numpy().tobytes() for name, tensor in load_file(path).items()}


def _num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


# -- processes --------------------------------------------------------------------------------------------------------


def start_torchrun(config: Path, num_ranks: int, folder: Path) -> ranks.Launcher:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT / "src")}
    with (folder / "log").open("w") as file:
        process = subprocess.Popen(
            [*torchrun(num_ranks), "run_train.py", "--config", str(config)],
            cwd=ROOT,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def wait(timeout_s: float) -> int | None:
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    return ranks.Launcher(process.pid, wait)


def _stat(process: int) -> list[str] | None:
    """State, parent, ..., as in proc(5) from the third field on; None for a process that has ended."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields


def is_alive(process: int) -> bool:
    return _stat(process) is not None


def _children() -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and (fields := _stat(int(path.name))):
            found.setdefault(int(fields[1]), []).append(int(path.name))
    return found


def below(process: int) -> dict[int, str]:
    """The process and all that it has started, with the time each began, as numbers come again."""

    def walk(each: int) -> Iterator[int]:
        yield each
        for child in children.get(each, []):
            yield from walk(child)

    children = _children()
    return {each: fields[19] for each in walk(process) if (fields := _stat(each))}


def alive(known: dict[int, str]) -> list[int]:
    return [process for process, began in known.items() if (fields := _stat(process)) and fields[19] == began]


def _targets(launcher: int, who: Who) -> list[int]:
    children = _children()
    own = children.get(launcher, [])
    if who == "launcher":
        return [launcher]
    if who == "rank":
        return own
    workers = [worker for rank in own for worker in children.get(rank, [])]
    return workers if who == "worker" else [launcher, *own, *workers]


def _signal(process: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, number)
