"""What the comparison with transformers found, for people and for machines."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report: what was compared, what came out, what was allowed."""

    name: str
    passed: bool
    measured: str
    allowed: str


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where a greedy generation first differs from transformers'; `margin` is ours, best logit less runner-up."""

    prompt: int
    step: int
    token_id: int | None
    reference_token_id: int | None
    margin: float
    is_tie: bool
    """The margin is within twice the tolerance: either token is right, as rounding alone decides."""


@dataclass(frozen=True, slots=True)
class ParityReport:
    model: str
    attention: str
    dtype: str
    num_prompts: int
    checks: tuple[Check, ...]
    divergences: tuple[Divergence, ...]

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"passed": self.passed, **asdict(self)}

    def table(self) -> str:
        """For people: a header, one aligned line a check, and the divergences."""
        rows = [("", "check", "measured", "allowed")]
        rows += [("PASS" if c.passed else "FAIL", c.name, c.measured, c.allowed) for c in self.checks]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        header = (
            f"{self.model}: {self.num_prompts} prompts, LlamaForSFT in {self.dtype} with attention {self.attention}"
        )
        notes = [
            f"prompt {d.prompt}, step {d.step}: ours {d.token_id}, transformers {d.reference_token_id}, "
            f"our margin {d.margin:.2e}{' (a tie: rounding decides)' if d.is_tie else ''}"
            for d in self.divergences
        ]
        return "\n".join([header, "", *lines, *notes])
