"""What a user's own Python adds to a run: an objective, callbacks, rows, an optimizer and metrics.

`extend.setup` of a configuration names a function that returns an `Extension`; `open_trainer` takes its parts as
arguments. The run names them, with a hash of their source, in its settings, so a resume with other code says so.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import isfinite
from numbers import Real
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from huggingface_hub import constants
from torch import Tensor, nn

from sftron.config.schema import Extend
from sftron.regular_file import where_missing

if TYPE_CHECKING:
    from sftron.models.llama import LlamaForSFT
    from sftron.train.objective import Objective


class Callback:
    """Events of a run; override those that you need.

    All but `on_before_step` are called on the main rank, with values. If one raises, the run saves its last finished
    step and ends with the error. If `on_before_step` raises, nothing is saved, as it may have changed the model.
    """

    def on_start(self, step: int, folder: Path) -> None:
        """Training begins after `step`, in the run directory `folder`."""

    def on_before_step(self, step: int, model: LlamaForSFT) -> None:
        """Step `step` is next. Every rank calls it, and it may change the model, so the model card names it."""

    def on_step(self, metrics: Mapping[str, Any]) -> None:
        """A step was made; `metrics` is its line in metrics.jsonl."""

    def on_evaluation(self, evaluation: Mapping[str, Any]) -> None:
        """An evaluation was made; `evaluation` is its line in evaluations.jsonl."""

    def on_save(self, step: int, folder: Path) -> None:
        """The checkpoint of `step` is complete in `folder`."""

    def on_end(self, status: str) -> None:
        """Training has ended, with the status of result.json: completed, diverged, forgot, preempted or failed."""


class MakeOptimizer(Protocol):
    """Makes the optimizer from the names and the parameters that are trained."""

    def __call__(self, named_parameters: Sequence[tuple[str, nn.Parameter]], /) -> torch.optim.Optimizer: ...


@dataclass(frozen=True, slots=True)
class Answer:
    """The model's greedy answer to a prompt."""

    prompt: str
    answer: str
    tokens: int
    """The number of generated tokens, including the stop token."""
    stopped: bool
    """Whether the answer ended with a stop token rather than at the length limit."""


class ComputeMetrics(Protocol):
    """Computes numbers by name from the answers to `evaluation.prompts` and the rows of that file, in their order."""

    def __call__(self, answers: Sequence[Answer], rows: Sequence[Mapping[str, Any]], /) -> Mapping[str, float]: ...


class ExtensionError(RuntimeError):
    """A user's code has raised; the message names the code and the error."""

    def __init__(self, message: str, *, may_save: bool) -> None:
        super().__init__(message)
        self.may_save = may_save
        """Whether the weights are those of the last finished step."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Extension:
    """The parts that a run takes from a user's code; without any, the run is sftron's own.

    Raises ValueError if a part is of another type.
    """

    objective: Objective | None = None
    data: Any = None
    """The rows of the first data set, in place of its `path`: a sequence, or a `datasets.Dataset`."""
    callbacks: Sequence[Callback] = ()
    optimizer: MakeOptimizer | None = None
    compute_metrics: ComputeMetrics | None = None

    def __post_init__(self) -> None:
        if isinstance(self.callbacks, Callback) or not isinstance(self.callbacks, Iterable):
            raise ValueError(f"callbacks: found {type(self.callbacks).__name__}; give a list of callbacks")
        object.__setattr__(self, "callbacks", tuple(self.callbacks))  # an iterator could be read only once
        if self.objective is not None:
            _require_objective(self.objective)
        for each in self.callbacks:
            if isinstance(each, type):
                raise ValueError(f"callbacks: {each.__name__} is a class; make an instance of it")
            if not isinstance(each, Callback):
                raise ValueError(f"callbacks: {type(each).__name__} is not a Callback; inherit from sftron.Callback")
        for name in ("optimizer", "compute_metrics"):
            if (given := getattr(self, name)) is not None and not callable(given):
                raise ValueError(f"{name}: {type(given).__name__} is not a function")
        if self.data is not None:
            _require_rows(self.data)

    @property
    def parts(self) -> dict[str, list[Any]]:
        """The given objects by the name of their argument."""
        given = {
            "objective": [self.objective],
            "data": [self.data],
            "callbacks": [*self.callbacks],
            "optimizer": [self.optimizer],
            "compute_metrics": [self.compute_metrics],
        }
        return {name: kept for name, own in given.items() if (kept := [each for each in own if each is not None])}

    @property
    def changes_model(self) -> list[str]:
        """The names of the callbacks that get the model before each step."""
        return [_name(each) for each in self.callbacks if type(each).on_before_step is not Callback.on_before_step]

    def describe(self, options: Extend | None) -> Extend | None:
        """Returns the section `extend` with the source's hash, which the run writes to its config.yaml.

        Parts that were given as arguments are named in place of a setup function, with the numbers and texts among
        their attributes and bound arguments; those of callbacks are left out, as they change no bit of the run. None
        for a run without extension.
        """
        if options is not None and not options.was_given_in_python:
            return options.model_copy(update={"source": self._source(options.setup.partition(":")[0])})
        if not self.parts:
            return None
        names = ", ".join(f"{part}={'+'.join(map(_name, own))}" for part, own in self.parts.items())
        values = {} if self.objective is None else _plain_values(self.objective)
        for part in ("optimizer", "compute_metrics"):
            if bound := _plain_values(getattr(self, part)):
                values[part] = bound
        return Extend(setup=f"open_trainer({names})", options=values, source=self._source())

    def _source(self, *modules: str) -> str:
        """Returns the hash of the source of the modules that define the parts and of those that they import, 12 digits.

        Installed packages are left out; the run records their versions.
        """
        kinds = [_type_of(each) for own in self.parts.values() for each in own]
        names = [*modules, *(base.__module__ for kind in kinds for base in getattr(kind, "__mro__", [kind]))]
        sources: dict[str, str] = {}
        while names:
            name = names.pop()
            if name not in sources and _is_own(name):
                sources[name] = _source_of(name)
                names += _imported_by(name, sources[name])
                sources[name] = sources[name] or "".join(_code_in(kind) for kind in kinds if kind.__module__ == name)
        digest = hashlib.sha256("".join(f"{name}\n{sources[name]}\n" for name in sorted(sources)).encode())
        return digest.hexdigest()[:12]


def _require_objective(objective: Any) -> None:
    kind = type(objective).__name__
    if isinstance(objective, type):
        raise ValueError(f"objective: {objective.__name__} is a class; make an instance of it")
    for name in ("denominator", "loss_sum", "names"):
        if not hasattr(objective, name):
            raise ValueError(
                f"objective: {kind} has no {name}; inherit from TokenLoss, or give it the names, denominator and "
                "loss_sum of an Objective"
            )
    names = objective.names
    if isinstance(names, str) or not all(isinstance(each, str) for each in names) or len({*names}) < len(names):
        raise ValueError(f"objective: {kind}.names is {names!r}; give a list of different texts")
    for name, value in _attributes(objective).items():
        tensors = value.parameters() if isinstance(value, nn.Module) else [value]
        if any(isinstance(each, nn.Parameter) and each.requires_grad for each in tensors):
            raise ValueError(
                f"objective: {kind}.{name} has parameters, which no optimizer of the run trains and no checkpoint "
                "saves; freeze them, or make them part of the model"
            )


def _require_rows(data: Any) -> None:
    kind = type(data).__name__
    if hasattr(data, "to_dict") and hasattr(data, "columns") and not hasattr(data, "with_format"):
        raise ValueError(f"data: found a {kind}; give datasets.Dataset.from_pandas(frame)")
    if isinstance(data, Mapping):
        raise ValueError(
            f"data: found a {kind} with {', '.join(map(str, data))}; give one of them, such as data['train']"
        )
    if isinstance(data, str):
        raise ValueError(f"data: found the text {data!r}; a path belongs in data.datasets")
    if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise ValueError(
            f"data: {kind} has no length or no index, so a resume could not find its place; give a sequence of rows "
            "or a datasets.Dataset, or name a streamed data set in data.datasets (streaming: true)"
        )
    if len(data) == 0:
        raise ValueError("data: there are 0 rows; give at least one")
    if not isinstance(data[0], Mapping):
        raise ValueError(
            f"data: row 0 is of type {type(data[0]).__name__}; give rows as mappings, {{'messages': [...]}}"
        )


NO_EXTENSION = Extension()


def _type_of(value: Any) -> Any:
    """Returns the function or the class of a part, whose module has its source."""
    value = getattr(value, "func", value)  # of functools.partial
    return value if inspect.isfunction(value) or inspect.isclass(value) else type(value)


def _name(value: Any) -> str:
    kind = _type_of(value)
    return f"{kind.__module__}.{kind.__qualname__}"


def _attributes(value: Any) -> dict[str, Any]:
    if isinstance(value, partial):
        return {"args": value.args, **value.keywords}
    return dict(getattr(value, "__dict__", {}))


def _plain_values(value: Any) -> dict[str, Any]:
    """Returns the attributes of an object that are numbers, texts or lists of them."""
    plain = (bool, int, float, str, type(None))
    return {
        name: list(found) if isinstance(found, tuple) else found
        for name, found in sorted(_attributes(value).items())
        if isinstance(found, plain)
        or (isinstance(found, list | tuple) and len(found) < 100 and all(isinstance(each, plain) for each in found))
    }


def _is_own(module: str) -> bool:
    """Returns whether a module is the user's: neither installed, nor of Python, nor of sftron."""
    if module not in sys.modules or module.partition(".")[0] in ("sftron", "sftcheck", *sys.stdlib_module_names):
        return False
    path = getattr(sys.modules[module], "__file__", None) or ""  # a notebook has none
    return {"site-packages", "dist-packages"}.isdisjoint(Path(path).parts)


def _imported_by(module: str, source: str) -> Iterator[str]:
    """Yields the names of the modules that a module's source imports, anywhere in it."""
    package = getattr(sys.modules[module], "__package__", None) or ""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{each.name}" for each in node.names)


def _code_in(kind: Any) -> str:
    """Returns the code of a function, or of a class's own functions, whose source is nowhere, as in a notebook."""
    functions = [kind] if inspect.isfunction(kind) else vars(kind).values()
    return "".join(_code(each.__code__) for each in functions if inspect.isfunction(each))


def _code(code: CodeType) -> str:
    def told(constant: Any) -> str:
        if isinstance(constant, CodeType):
            return _code(constant)
        # The order of a set of texts is another one in each process.
        return repr(sorted(map(repr, constant))) if isinstance(constant, frozenset) else repr(constant)

    return f"{code.co_code.hex()} {code.co_names} {' '.join(map(told, code.co_consts))}\n"


def _source_of(module: str) -> str:
    try:
        return inspect.getsource(sys.modules[module])
    except (KeyError, OSError, TypeError):  # a notebook's cell, or compiled code
        return ""


# --- From the configuration ---


def load_extension(options: Extend | None, model_path: str) -> Extension:
    """Calls the setup function that `extend` names, which runs the user's code.

    Raises:
        ValueError: The module cannot be imported, lies in a folder of a model or of the Hub's cache, or has other
            source than `extend.source` states; or the function fails or returns something else than an `Extension`.
    """
    if options is None:
        return NO_EXTENSION
    if options.was_given_in_python:
        raise ValueError(
            f"extend.setup: the run was opened in Python, as {options.setup}; call open_trainer with these parts, "
            "or remove the section"
        )
    module_name, _, function_name = options.setup.partition(":")
    with _folder_importable():
        _refuse_downloaded(module_name, model_path)
        try:
            module = importlib.import_module(module_name)
        except Exception as error:
            raise _failed(options, f"{module_name} cannot be imported", error) from error
        function = getattr(module, function_name, None)
        if not inspect.isfunction(function):
            raise ValueError(f"extend.setup: {module_name} has no function {function_name}")
        # Otherwise a configuration alone could call any function of an installed package.
        if function.__annotations__.get("return") not in (Extension, "Extension", "sftron.Extension"):
            raise ValueError(
                f"extend.setup: {options.setup} does not state that it returns an Extension; write `def "
                f"{function_name}(options) -> Extension:`"
            )
        try:
            extension = function(options.options)
        except Exception as error:
            raise _failed(options, f"{options.setup} failed", error) from error
    if not isinstance(extension, Extension):
        found = type(extension).__name__
        raise ValueError(f"extend.setup: {options.setup} returned {found}; return a sftron.Extension")
    described = extension.describe(options)
    if options.source is not None and described is not None and described.source != options.source:
        raise ValueError(
            f"extend.source: {options.source}, but the source of {module_name} now has {described.source}; restore the "
            "source, or remove the key"
        )
    return extension


def given_rows(options: Extend | None, model_path: str) -> Any:
    """Returns the rows that `extend.setup` gives in place of the first data set; None if it gives none.

    Rows that were an argument of open_trainer are not known here, so the data set's own path is read.
    """
    return None if options is None or options.was_given_in_python else load_extension(options, model_path).data


def _failed(options: Extend, problem: str, error: Exception) -> ValueError:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{frame.filename}:{frame.lineno}"
    return ValueError(f"extend.setup: {problem}: {type(error).__name__}: {error} ({where}); correct {options.setup}")


def _refuse_downloaded(module: str, model_path: str) -> None:
    """Raises ValueError if a module would be imported from a model's folder or from a cache of downloads."""
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names:
        raise ValueError(f"extend.setup: {module} is a module of Python; name one of your own")
    try:
        found = importlib.util.find_spec(top)  # which runs nothing yet
    except (ImportError, ValueError):
        found = None
    if found is None:
        path = Path(*module.split(".")).with_suffix(".py")
        raise ValueError(
            f"extend.setup: there is no module {module}{where_missing(path)}; it is looked up in the working directory "
            "and in the installed packages"
        )
    # What the module imports is looked up in the working directory, too.
    origins = [str(Path.cwd()), *([found.origin] if found.origin else []), *(found.submodule_search_locations or [])]
    for folder in (Path(model_path), Path(constants.HF_HOME), Path(constants.HF_HUB_CACHE)):
        if any(Path(each).resolve().is_relative_to(folder.resolve()) for each in origins):
            raise ValueError(
                f"extend.setup: {module} or the working directory lies in {folder}, which holds downloaded files; code "
                "runs only from your own folders: copy the module there after you have read it"
            )


@contextmanager
def _folder_importable() -> Iterator[None]:
    """Looks modules up in the working directory too, as `python -m` does."""
    folder = str(Path.cwd())
    sys.path.insert(0, folder)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(folder)


# --- Events ---


class Events:
    """Calls the callbacks, and keeps the first error until the run has saved its step."""

    def __init__(self, callbacks: Sequence[Callback], *, is_main: bool) -> None:
        self._callbacks, self._is_main = callbacks, is_main
        self.error: Exception | None = None
        self.problem = ""
        """What the error was, in which callback."""

    def call(self, event: str, *values: Any, on_all_ranks: bool = False) -> None:
        """Calls an event of every callback, such as "on_step", on the main rank or on all ranks.

        After an error, only "on_end" is still called.
        """
        if not (self._is_main or on_all_ranks) or (self.error is not None and event != "on_end"):
            return
        for callback in self._callbacks:
            try:
                getattr(callback, event)(*values)
            except Exception as error:
                if self.error is None:
                    self.error = error
                    self.problem = f"{_name(callback)}.{event} raised {type(error).__name__}: {error}"
                return


# --- Numbers of answers ---


def call_compute_metrics(
    compute: ComputeMetrics, answers: Sequence[Answer], rows: Sequence[Mapping[str, Any]]
) -> dict[str, float]:
    """Returns what a user's function computes from the answers.

    Raises ExtensionError if the function raises, or returns anything but finite numbers by name.
    """
    name = _name(compute)
    try:
        found = compute(answers, rows)
    except Exception as error:
        raise ExtensionError(f"{name} raised {type(error).__name__}: {error}", may_save=True) from error
    if not isinstance(found, Mapping):
        raise ExtensionError(f"{name} gives {type(found).__name__}; return numbers by name", may_save=True)
    measures = dict[str, float]()
    for key, given in found.items():
        if not isinstance(key, str) or not key or "/" in key:
            raise ExtensionError(f"{name} gives the name {key!r}; write a text without /", may_save=True)
        value = given.item() if isinstance(given, Tensor) and given.numel() == 1 else given
        if not isinstance(value, Real) or not isfinite(value):
            raise ExtensionError(f"{name} gives {given!r:.60} for {key}; give a finite number", may_save=True)
        measures[key] = float(value)
    return measures


Setup = Callable[[Mapping[str, Any]], Extension]
"""The type of the function that `extend.setup` names; it gets `extend.options`."""
