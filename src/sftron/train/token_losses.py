"""Losses of single tokens, summed by role and by data set where they were made, and read once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sftron.data.types import Role
from sftron.models.loss import RowMeasures

NO_SOURCE = -1
"""Of rows that count for their role alone, as they are not trained."""


class TokenSums:
    """Sums of RowMeasures over any number of batches; nothing in here waits for the device.

    table_G4: float64 [groups, 4], the groups being all roles by number and then the data sets by index; the number of
        rows, and the sums of their losses, entropies and hits (NaN where there are none of these). Tables of several
        ranks may be added.
    """

    def __init__(self, num_datasets: int, device: torch.device) -> None:
        self.table_G4 = torch.zeros(len(Role) + num_datasets, 4, dtype=torch.float64, device=device)
        self._groups_role_G = torch.arange(len(Role), device=device)
        self._groups_source_G = torch.arange(num_datasets, device=device)

    def add(self, measures: RowMeasures, roles: Tensor, sources: Tensor | None = None) -> None:
        """roles: uint8 [R], of the tokens that the labels name. sources: int32 [R], indices of data sets, or NO_SOURCE
        for rows that count for their role alone; None if none has one."""
        losses_R, entropies_R, hits_R = measures
        unknown_R = losses_R.new_full((), float("nan")).expand_as(losses_R)
        columns_R4 = torch.stack(
            [
                torch.ones_like(losses_R),
                losses_R,
                unknown_R if entropies_R is None else entropies_R,
                unknown_R if hits_R is None else hits_R,
            ],
            dim=1,
        )
        if sources is None:
            sources = torch.full_like(roles, NO_SOURCE, dtype=torch.int32)
        is_of_GR = torch.cat([self._groups_role_G[:, None] == roles, self._groups_source_G[:, None] == sources])
        # Chosen, not multiplied by 0 and 1: a loss that is not finite is that of its own groups alone.
        chosen_GR4 = torch.where(is_of_GR[..., None], columns_R4, 0.0)
        self.table_G4 += chosen_GR4.sum(dim=1, dtype=torch.float64)


@dataclass(frozen=True, slots=True)
class MeanLoss:
    """loss: the unweighted mean over `tokens` tokens, in nats; None without any."""

    loss: float | None
    tokens: int


@dataclass(frozen=True, slots=True)
class TokenLosses:
    """Means over tokens, none of them weighted.

    roles: by lower-case name, those with a token. datasets: by index. all: of all rows that have a data set, as have
    token_accuracy, the share of tokens that were the most likely one, and entropy, of the predicted distributions in
    nats; both None without any token, or where the loss function tells neither.
    """

    roles: dict[str, MeanLoss]
    datasets: list[MeanLoss]
    all: MeanLoss
    token_accuracy: float | None
    entropy: float | None

    @classmethod
    def of(cls, numbers: Sequence[float]) -> TokenLosses:
        """From a TokenSums' table_G4, flattened, summed over ranks and brought to the CPU."""
        groups = [numbers[start : start + 4] for start in range(0, len(numbers), 4)]
        means = [MeanLoss(loss / count if count else None, int(count)) for count, loss, _, _ in groups]
        count, loss, entropy, hits = (sum(column) for column in zip((0.0,) * 4, *groups[len(Role) :], strict=True))
        return cls(
            roles={role.name.lower(): means[role] for role in Role if means[role].tokens},
            datasets=means[len(Role) :],
            all=MeanLoss(loss / count if count else None, int(count)),
            token_accuracy=_known(hits / count) if count else None,
            entropy=_known(entropy / count) if count else None,
        )


def _known(value: float) -> float | None:
    return None if value != value else value
