"""The metrics of a step: the losses of its tokens by role and data set, and one record of all its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sftron.data.types import Role
from sftron.models.loss import RowMeasures
from sftron.visible_text import counted


class TokenSums:
    """Sums of RowMeasures over any number of batches, computed without waiting for the device.

    Args:
        num_datasets: The number of data sets whose losses are measured.
        names: The names of the objective's own measures, each of which is a sum; see `add_measure`.
        with_untrained: Whether the losses of untrained tokens are measured too.

    Attributes:
        table_G4: float64 [groups, 4]. The rows are all roles by number, followed by the data sets by index. The columns
            are the number of tokens and the sums of their losses, entropies and hits. If a loss function gives no
            entropies or hits, those sums are NaN. The tables of several ranks can be added.
    """

    def __init__(
        self, num_datasets: int, device: torch.device, names: Sequence[str] = (), *, with_untrained: bool = False
    ) -> None:
        self.names, self.with_untrained = tuple(names), with_untrained
        self.sums_N = torch.zeros(len(self.names), dtype=torch.float64, device=device)
        self.table_G4 = torch.zeros(len(Role) + num_datasets, 4, dtype=torch.float64, device=device)
        self._groups_role_G = torch.arange(len(Role), device=device)
        self._groups_source_G = torch.arange(num_datasets, device=device)

    def add(self, measures: RowMeasures, roles: Tensor, sources: Tensor | None = None) -> None:
        """Adds the measures of R tokens.

        Args:
            measures: The loss, entropy and hit of each token.
            roles: uint8 [R], the role of each token.
            sources: int32 [R], the index of each token's data set; None if the tokens count toward their roles only.
        """
        losses_R, entropies_R, hits_R = measures
        unknown_R = torch.full_like(losses_R, float("nan"))
        columns = [losses_R] + [unknown_R if each_R is None else each_R for each_R in (entropies_R, hits_R)]
        columns_R4 = torch.stack([torch.ones_like(losses_R), *columns], dim=1)
        if sources is None:
            sources = torch.full_like(roles, -1, dtype=torch.int32)
        is_of_GR = torch.cat([self._groups_role_G[:, None] == roles, self._groups_source_G[:, None] == sources])
        # torch.where, not a product with 0 and 1, so that a loss that is not finite affects only its own groups.
        selected_GR4 = torch.where(is_of_GR[..., None], columns_R4, 0.0)
        self.table_G4 += selected_GR4.sum(dim=1, dtype=torch.float64)

    def add_measure(self, name: str, value: Tensor) -> None:
        """Adds a scalar to the sum of one of the `names`. The step reports each sum divided by its denominator."""
        if name not in self.names:
            raise ValueError(
                f"the measure {name!r} is not among the names of the objective, {list(self.names)}; add it"
            )
        found = torch.as_tensor(value).detach()
        if found.ndim:
            raise ValueError(f"the measure {name!r} has shape {tuple(found.shape)}; give the sum, a single number")
        self.sums_N[self.names.index(name)] += found


@dataclass(frozen=True, slots=True)
class MeanLoss:
    """The unweighted mean loss of some tokens in nats, and their number; the loss is None if there are no tokens."""

    loss: float | None
    tokens: int


@dataclass(frozen=True, slots=True)
class TokenLosses:
    """Unweighted mean losses over tokens, by role and data set."""

    roles: dict[str, MeanLoss]
    """The mean of each role that has tokens, by lower-case name."""
    datasets: list[MeanLoss]
    """The mean of each data set, by index."""
    all: MeanLoss
    """The mean over all tokens that have a data set, as for the next two fields."""
    token_accuracy: float | None
    """The share of tokens to which the model gave the highest probability; None if the loss function does not measure
    it."""
    entropy: float | None
    """The mean entropy of the predicted distributions in nats; None if the loss function does not measure it."""

    @classmethod
    def of(cls, numbers: Sequence[float]) -> TokenLosses:
        """Returns the means from a flattened `TokenSums.table_G4` that was summed over ranks and moved to the CPU."""
        groups = [numbers[start : start + 4] for start in range(0, len(numbers), 4)]
        groups.append([sum(column) for column in zip(*groups[len(Role) :], strict=True)])
        *means, mean_of_all = [MeanLoss(loss / count if count else None, int(count)) for count, loss, *_ in groups]
        count, _, entropy, hits = groups[-1]

        def known_mean(total: float) -> float | None:
            return total / count if count and total == total else None

        return cls(
            roles={role.name.lower(): means[role] for role in Role if means[role].tokens},
            datasets=means[len(Role) :],
            all=mean_of_all,
            token_accuracy=known_mean(hits),
            entropy=known_mean(entropy),
        )


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """The loads of the experts over all real tokens of a step; see `Routing`."""

    aux_loss: float
    """The auxiliary loss, without its coefficient. It is the number of experts of a token if all loads are equal."""
    largest_share: float
    """The largest share of the tokens' choices in a layer that one expert has; 1 / experts if all loads are equal."""


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """The metrics of one optimizer step over all micro-batches and ranks.

    docs/metrics.md describes each field, with its unit.
    """

    step: int
    loss: float | None
    roles: dict[str, dict[str, Any]]
    token_accuracy: float | None
    entropy: float | None
    learning_rate: float
    grad_norm: float | None
    epoch: float | None
    tokens: int
    trained_tokens: int
    total_tokens: int
    total_trained_tokens: int
    fill: float
    trained_share: float
    conversations: int
    conversations_per_pack: float
    sum_squared_lengths: int
    sum_squared_lengths_spread: float
    dropped: dict[str, int]
    truncated: int
    tokens_per_second: float
    tokens_per_second_per_gpu: float
    trained_tokens_per_second: float
    trained_tokens_per_second_per_gpu: float
    step_seconds: float
    data_seconds: float
    checkpoint_seconds: float
    evaluation_seconds: float
    peak_memory_gb: float
    peak_reserved_gb: float | None
    tflops: float
    mfu: float | None
    hfu: float | None
    peak_tflops: float | None
    weights_seconds: float | None = None
    experts: dict[str, float] = field(default_factory=dict)
    skipped: str | None = None
    datasets: dict[str, dict[str, Any]] = field(default_factory=dict)
    changed_settings: dict[str, list[Any]] = field(default_factory=dict)
    measures: dict[str, float] = field(default_factory=dict)
    rows: dict[str, Any] = field(default_factory=dict)
    """What `sftron audit` compares; from `step_rows`."""

    def for_terminal(self, num_steps: int | str | None, time_left: str | None = None) -> str:
        """Returns the line for a terminal: a short selection of the numbers, and every warning. `as_line` has all."""
        left = _left(time_left)
        rate = f"lr {self.learning_rate:.2e}"
        return " | ".join([*self._head(num_steps), *self._skipped, rate, self._speed, *left, *self._dropped])

    def as_line(self, num_steps: int | str | None, time_left: str | None = None) -> str:
        """Returns the line for console.log: the numbers of metrics.jsonl, rounded, and the time left."""
        accuracy = [] if self.token_accuracy is None else [f"accuracy {self.token_accuracy:.1%}"]
        norm = "  none" if self.grad_norm is None else f"{self.grad_norm:6.2f}"
        is_one_gpu = self.tokens_per_second_per_gpu == self.tokens_per_second
        per_gpu = "" if is_one_gpu else f" ({self.tokens_per_second_per_gpu:,.0f} a GPU)"
        mfu = "" if self.mfu is None else f", mfu {self.mfu:.1%}"
        reserved, memory = self.peak_reserved_gb, f"memory {self.peak_memory_gb:.1f} GB"
        epochs = [self.epoch] if self.epoch is not None else [count["epoch"] for count in self.datasets.values()]
        highest = f" to {max(epochs):.2f}" if len(epochs) > 1 else ""
        roles = ", ".join(f"{name} {role['loss']:.4f}" for name, role in self.roles.items())
        parts = [
            *self._head(num_steps),
            *accuracy,
            f"lr {self.learning_rate:.2e}",
            f"grad norm {norm}",
            f"{counted(self.tokens, 'tokens')}, {self.trained_share:.0%} trained",
            f"fill {self.fill:.1%}",
            f"{self._speed}{per_gpu}, {self.tflops:.3g} TFLOP/s{mfu}",
            f"epoch {min(epochs):.2f}{highest}",
            f"data wait {self.data_seconds:.2f} s",
            *([] if self.weights_seconds is None else [f"weights wait {self.weights_seconds:.2f} s"]),
            *([] if reserved is None else [f"{memory}, {reserved:.1f} reserved"]),
            *_left(time_left),
            *self._dropped,
            *([f"by role: {roles}"] if len(self.roles) > 1 else []),
            *(f"{name} {value:.4f}" for name, value in self.measures.items()),
            *self._experts,
            *self._skipped,
        ]
        return " | ".join(parts)

    def _head(self, num_steps: int | str | None) -> list[str]:
        of = f"/{num_steps}" if num_steps else ""
        return [f"step {self.step:>4}{of}", "loss    none" if self.loss is None else f"loss {self.loss:7.4f}"]

    @property
    def _speed(self) -> str:
        return f"{self.tokens_per_second:,.0f} tokens/s"

    @property
    def _dropped(self) -> list[str]:
        return [f"dropped {sum(self.dropped.values())}"] if self.dropped else []

    @property
    def _experts(self) -> list[str]:
        if not self.experts:
            return []
        return [f"router aux loss {self.experts['aux_loss']:.3f}, largest expert {self.experts['largest_share']:.1%}"]

    @property
    def _skipped(self) -> list[str]:
        return [f"SKIPPED: {self.skipped}"] if self.skipped else []


def _left(time_left: str | None) -> list[str]:
    return [] if time_left is None else [f"{time_left} left"]
