"""A sweep file, which `wandb sweep` reads as well. What is not done here is refused by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from sftron.regular_file import read_regular


class SweepError(ValueError):
    """What is wrong with a sweep, for the user; one line a problem."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A key of the configuration and what it may be.

    values: to choose from, with `probabilities` or equally often; empty for a distribution of numbers.
    distribution, options: wandb's name of it, and its min, max, mu, sigma and q.
    """

    key: str
    values: tuple[Any, ...] = ()
    probabilities: tuple[float, ...] = ()
    distribution: str = "categorical"
    options: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Metric:
    """name: as wandb has it. goal: minimize or maximize."""

    name: str
    goal: str


@dataclass(frozen=True, slots=True)
class SweepFile:
    """method: grid or random. run_cap: the most runs. command: with wandb's macros, ${args} among them. metric: what
    the runs are sorted by."""

    path: Path
    name: str
    method: str
    parameters: tuple[Parameter, ...]
    command: tuple[str, ...]
    program: str
    run_cap: int | None
    metric: Metric | None = None


DISTRIBUTIONS: dict[str, tuple[str, ...]] = {
    "uniform": ("min", "max"),
    "int_uniform": ("min", "max"),
    "q_uniform": ("min", "max", "q"),
    "log_uniform": ("min", "max"),
    "log_uniform_values": ("min", "max"),
    "q_log_uniform_values": ("min", "max", "q"),
    "normal": ("mu", "sigma"),
    "q_normal": ("mu", "sigma", "q"),
    "log_normal": ("mu", "sigma"),
}
"""With what each needs. As wandb has it, log_uniform's min and max are exponents of e; those of _values are values."""
_DEFAULTS = {"mu": 0.0, "sigma": 1.0, "q": 1.0}

# The server's side of a sweep: who owns it, and how it is called there.
_UNUSED_KEYS = {"name", "description", "project", "entity"}
_KEYS = {"method", "metric", "parameters", "command", "program", "run_cap", *_UNUSED_KEYS}
_DEFAULT_COMMAND = ("${env}", "${interpreter}", "${program}", "${args}")


_MAX_FILE_BYTES = 256 * 2**10


def read_sweep_file(path: Path) -> SweepFile:
    """Raises SweepError with every problem, one line each."""
    try:
        # As wandb reads it, so that both get the same values.
        tree = yaml.safe_load(read_regular(path, _MAX_FILE_BYTES).decode("utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise SweepError(f"{path}: cannot be read: {error}") from error
    if not isinstance(tree, dict):
        raise SweepError(f"{path}: wanted a mapping with the keys method, parameters and command")
    problems = list(_refusals(tree))
    parameters = []
    given = tree.get("parameters")
    for key, options in (given if isinstance(given, dict) else {}).items():
        try:
            parameters.append(_parameter(str(key), options, tree.get("method")))
        except SweepError as error:
            problems.append(f"parameters.{key}: {error}")
    command = tree.get("command", list(_DEFAULT_COMMAND))
    if not isinstance(command, list) or not command:
        problems.append("command: wanted a list of words, one an item")
    if problems:
        raise SweepError("\n".join(f"{path}: {problem}" for problem in problems))
    return SweepFile(
        path=path,
        name=str(tree.get("name") or path.stem),
        method=tree["method"],
        parameters=tuple(parameters),
        command=tuple(map(str, command)),
        program=str(tree.get("program") or "run_train.py"),
        run_cap=tree.get("run_cap"),
        metric=Metric(tree["metric"]["name"], tree["metric"].get("goal", "minimize")) if "metric" in tree else None,
    )


def _refusals(tree: Mapping[str, Any]) -> Sequence[str]:
    problems = []
    method = tree.get("method")
    if method == "bayes":
        problems.append("method: bayes needs wandb's server: use `wandb sweep`, or method: random")
    elif method not in ("grid", "random"):
        problems.append(f"method: found {method!r}; wanted grid or random")
    for key in tree:
        if key == "early_terminate":
            problems.append("early_terminate: needs wandb's server: use `wandb sweep`, or leave it out")
        elif key not in _KEYS:
            problems.append(f"{key}: not known here; the keys are {', '.join(sorted(_KEYS))}")
    if not isinstance(tree.get("parameters"), dict) or not tree["parameters"]:
        problems.append("parameters: wanted a mapping of dotted configuration keys, as data.remove_cross_attention")
    metric = tree.get("metric", {"name": "loss"})
    if not isinstance(metric, dict) or not isinstance(metric.get("name"), str):
        problems.append(f"metric: found {metric!r}; wanted a mapping with name, as eval/held_out/loss, and goal")
    elif metric.get("goal", "minimize") not in ("minimize", "maximize"):
        problems.append(f"metric.goal: found {metric['goal']!r}; wanted minimize or maximize")
    run_cap = tree.get("run_cap")
    if run_cap is not None and (type(run_cap) is not int or run_cap < 1):
        problems.append(f"run_cap: found {run_cap!r}; wanted a whole number above 0")
    return problems


def _parameter(key: str, options: Any, method: Any) -> Parameter:
    if not isinstance(options, dict):
        raise SweepError(f"found {options!r}; wanted value, values, or min and max")
    if "parameters" in options:
        raise SweepError(f"nested parameters are not read: write dotted keys, as {key}.{next(iter(options))}")
    if "value" in options or "values" in options:
        return _choice(key, options)
    distribution = str(options["distribution"]) if "distribution" in options else _guess(options)
    if distribution not in DISTRIBUTIONS:
        known = ", ".join(["categorical", "constant", *DISTRIBUTIONS])
        raise SweepError(f"distribution {distribution} is not done here; these are: {known}")
    if method == "grid":
        raise SweepError(f"a grid needs values; {distribution} has no end of them: use method: random")
    wanted = DISTRIBUTIONS[distribution]
    _require_known(options, {"distribution", *wanted})
    numbers = {name: options.get(name, _DEFAULTS.get(name)) for name in wanted}
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            remedy = "; write 1.0e-4 for 1e-4, which this YAML takes for text" if isinstance(number, str) else ""
            raise SweepError(f"{name}: found {number!r}; wanted a number{remedy}")
    if "min" in numbers and not numbers["min"] < numbers["max"]:
        raise SweepError(f"min {numbers['min']} is not below max {numbers['max']}")
    if distribution.endswith("log_uniform_values") and numbers["min"] <= 0:
        raise SweepError(f"min is {numbers['min']}; the logarithm wants it above 0")
    return Parameter(key, distribution=distribution, options=tuple(numbers.items()))


def _choice(key: str, options: Mapping[str, Any]) -> Parameter:
    _require_known(options, {"value", "values", "probabilities", "distribution"})
    values = options["values"] if "values" in options else [options["value"]]
    if not isinstance(values, list) or not values:
        raise SweepError(f"values: found {values!r}; wanted a list")
    if any(value is None for value in values):
        raise SweepError("null is written as None by wandb, which a run reads as text: give the value itself")
    if repeated := [value for place, value in enumerate(values) if repr(value) in map(repr, values[:place])]:
        raise SweepError(f"values: {repeated[0]!r} is given twice, and would be the same run twice: keep one")
    probabilities = options.get("probabilities") or []
    if probabilities and not _are_probabilities(probabilities, len(values)):
        raise SweepError(f"probabilities: wanted {len(values)} numbers from 0 with the sum 1, found {probabilities!r}")
    return Parameter(key, values=tuple(values), probabilities=tuple(probabilities))


def _are_probabilities(found: Any, count: int) -> bool:
    if not isinstance(found, list) or len(found) != count:
        return False
    return all(type(each) in (int, float) and each >= 0 for each in found) and abs(sum(found) - 1) <= 1e-6


def _guess(options: Mapping[str, Any]) -> str:
    """As wandb does: by the types of min and max."""
    bounds = (options.get("min"), options.get("max"))
    if all(isinstance(bound, int) for bound in bounds):
        return "int_uniform"
    if all(isinstance(bound, float) for bound in bounds):
        return "uniform"
    raise SweepError(
        f"found {dict(options)}; wanted value, values, or min and max, both whole numbers or both with a decimal point"
    )


def _require_known(options: Mapping[str, Any], known: set[str]) -> None:
    if unknown := sorted(set(options) - known):
        raise SweepError(f"{', '.join(unknown)}: not known beside {', '.join(sorted(set(options) & known))}")
