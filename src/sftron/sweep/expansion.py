"""The settings that a sweep file asks for, in the order in which they are run."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

from sftron.sweep.sweep_file import Parameter, SweepError, SweepFile

Settings = dict[str, Any]
"""A value for each parameter, by dotted key, in the file's order."""
_MAX_RUNS = 10_000
_MAX_DRAWS_IN_VAIN = 1000


def expand(sweep: SweepFile, *, count: int | None = None, seed: int = 0) -> list[Settings]:
    """The settings of each run, all different.

    grid: every combination, the file's last parameter changing fastest. random: `count` of them, else the file's
    run_cap, drawn by `seed`: the first n are the same for every count. Raises SweepError.
    """
    most = min((number for number in (count, sweep.run_cap) if number is not None), default=None)
    if sweep.method == "grid":
        size = math.prod(len(parameter.values) for parameter in sweep.parameters)
        if (most or size) > _MAX_RUNS and size > _MAX_RUNS:
            raise SweepError(f"{sweep.path}: the grid has {size:,} runs, above {_MAX_RUNS:,}: give run_cap")
        combinations = itertools.product(*(parameter.values for parameter in sweep.parameters))
        keys = [parameter.key for parameter in sweep.parameters]
        return [dict(zip(keys, values, strict=True)) for values in itertools.islice(combinations, most)]
    if most is None:
        raise SweepError(f"{sweep.path}: method random has no end: give run_cap in the file, or --count")
    return _draw(sweep, most, random.Random(seed))


def _draw(sweep: SweepFile, count: int, source: random.Random) -> list[Settings]:
    drawn: dict[str, Settings] = {}
    in_vain = 0
    while len(drawn) < count:
        settings = {parameter.key: draw(parameter, source) for parameter in sweep.parameters}
        if repr(settings) in drawn:
            in_vain += 1
            if in_vain == _MAX_DRAWS_IN_VAIN:
                raise SweepError(f"{sweep.path}: {count} different runs are wanted, and there seem to be {len(drawn)}")
            continue
        in_vain = 0
        drawn[repr(settings)] = settings
    return list(drawn.values())


def draw(parameter: Parameter, source: random.Random) -> Any:
    """One value."""
    if parameter.values:
        return source.choices(parameter.values, parameter.probabilities or None)[0]
    options = dict(parameter.options)
    low, high = options.get("min", 0.0), options.get("max", 0.0)
    if parameter.distribution == "int_uniform":
        return source.randint(int(low), int(high))
    kind = parameter.distribution.removeprefix("q_")
    if kind == "uniform":
        value = source.uniform(low, high)
    elif kind == "log_uniform":
        value = math.exp(source.uniform(low, high))
    elif kind == "log_uniform_values":
        value = math.exp(source.uniform(math.log(low), math.log(high)))
    else:
        value = source.gauss(options["mu"], options["sigma"])
        value = math.exp(value) if kind == "log_normal" else value
    q = options.get("q")
    if q is None:
        return value
    rounded = round(value / q) * q
    # 0.30000000000000004 is 3 x 0.1; a whole q gives whole numbers.
    return rounded if isinstance(q, int) else round(rounded, 12)
