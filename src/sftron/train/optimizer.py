"""AdamW, with moments in fp32 or in 8 bits, Muon, a user's own optimizer, and the learning-rate schedule."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from sftron.models.quantization import import_bitsandbytes, is_matrix
from sftron.models.sharding import local_shard

if TYPE_CHECKING:  # an optimizer needs no package of the configuration
    from sftron.train.extension import MakeOptimizer


_BLOCK, _MIN_VALUES = 256, 4096
"""The values of an 8-bit block, and of the smallest matrix with 8-bit moments; both are those of bitsandbytes."""


ANY_LAYOUT = "any layout"
"""The name of the optimizer for `general.deterministic: layout`."""


def make_by_name(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    *,
    learning_rate: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    name: str = "adamw",
) -> torch.optim.Optimizer:
    """Returns the optimizer of this name for the parameters that require a gradient.

    Weight decay applies to matrices, not to norms and biases.

    Args:
        name: A key of OPTIMIZERS.

    Raises:
        ValueError: It is adamw_8bit, and bitsandbytes is not installed.
    """
    groups = parameter_groups(named_parameters, weight_decay=weight_decay)
    return with_state_shapes(OPTIMIZERS[name](groups, lr=learning_rate, betas=betas, eps=eps))


def own_optimizer(make: MakeOptimizer, model: nn.Module) -> torch.optim.Optimizer:
    """Returns the optimizer that a user's function makes of the trained parameters.

    Raises ValueError if it is no torch optimizer, or does not hold all of these parameters.
    """
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    optimizer = make(trained)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(f"optimizer: the function returned {type(optimizer).__name__}; return a torch.optim.Optimizer")
    held = {id(each) for group in optimizer.param_groups for each in group["params"]}
    if missing := [name for name, parameter in trained if id(parameter) not in held]:
        raise ValueError(
            f"optimizer: {len(missing)} of {len(trained)} trained parameters are in no group, such as {missing[0]}; "
            "give the optimizer all of them, or freeze them"
        )
    _require_resumable(optimizer)
    largest = max(group["lr"] for group in optimizer.param_groups)
    if not largest > 0:
        raise ValueError(
            "optimizer: all groups have the learning rate 0, so the schedule has no ratio; give another one"
        )
    for group in optimizer.param_groups:  # the schedule keeps the ratios between the groups' rates
        group.setdefault("learning_rate_factor", float(group["lr"] / largest))
    return with_state_shapes(optimizer)


def _require_resumable(optimizer: torch.optim.Optimizer) -> None:
    """Raises ValueError if the optimizer keeps state where no checkpoint saves it, or none that can be saved."""
    kind, held = type(optimizer).__name__, vars(optimizer)
    if "step" in held:
        raise ValueError(
            f"optimizer: a scheduler or hook wraps the step of {kind}; remove it, and set optimizer.schedule instead"
        )
    inner = [each for value in held.values() for each in (value if isinstance(value, list | tuple) else [value])]
    if any(isinstance(each, torch.optim.Optimizer) for each in inner):
        raise ValueError(
            f"optimizer: {kind} holds other optimizers, whose state no checkpoint would save and whose learning rates "
            "the schedule would not set; keep all in one optimizer's groups and state"
        )
    for group in optimizer.param_groups:
        for parameter in {each.ndim: each for each in group["params"]}.values():
            getattr(optimizer, "state_shapes", partial(probed_state_shapes, optimizer))(parameter)


def _differ(value: Any, before: Mapping[str, Any], name: str) -> bool:
    return name not in before or bool(torch.as_tensor(value != before[name]).any())


def with_state_shapes(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Returns the optimizer with a method `state_shapes`, which tells a checkpoint the tensors that it keeps."""
    if not hasattr(optimizer, "state_shapes"):
        optimizer.state_shapes = partial(probed_state_shapes, optimizer)  # pyright: ignore[reportAttributeAccessIssue]
    return optimizer


def probed_state_shapes(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, torch.Size]:
    """Returns the shape of each state tensor of a parameter over all ranks, from one step on a tiny parameter.

    Raises ValueError if a tensor has neither the parameter's shape nor a single value.
    """
    group = next(each for each in optimizer.param_groups if any(one is parameter for one in each["params"]))
    device = _local(parameter).device
    tiny = nn.Parameter(torch.ones((2,) * parameter.ndim, dtype=parameter.dtype, device=device))
    tiny.grad = torch.ones_like(tiny)
    probe = object.__new__(type(optimizer))
    probe.__dict__.update(optimizer.__dict__)
    own = {name: value for name, value in group.items() if name != "params"}
    probe.state, probe.param_groups = defaultdict(dict), [{**deepcopy(own), "params": [tiny]}]
    kind = type(optimizer).__name__
    try:
        probe.step()
    except Exception as error:
        raise ValueError(f"optimizer: a step of {kind} failed: {type(error).__name__}: {error}") from error
    if changed := [
        name for name, value in probe.param_groups[0].items() if name != "params" and _differ(value, own, name)
    ]:
        raise ValueError(
            f"optimizer: {kind} keeps {', '.join(changed)} in its groups, which a checkpoint does not save; keep it in "
            "the state of each parameter"
        )
    shapes = dict[str, torch.Size]()
    for name, value in probe.state[tiny].items():
        if not isinstance(value, Tensor) or (value.shape != tiny.shape and value.ndim):
            found = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise ValueError(
                f"optimizer: {kind} keeps {name}, {found}, which cannot be saved by shards: give it a "
                "method state_shapes(parameter) that returns the shape of each of its tensors"
            )
        shapes[name] = parameter.shape if value.shape == tiny.shape else torch.Size()
    return shapes


def parameter_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]], *, weight_decay: float
) -> list[dict[str, Any]]:
    """Returns the groups of the parameters that require a gradient, none of them empty.

    Each has a `learning_rate_factor`, by which `set_learning_rate` multiplies the rate of the schedule.
    """
    trained = [(is_matrix(*each), *each) for each in named_parameters if each[1].requires_grad]
    groups = [
        {**_named(trained, decays=True), "weight_decay": weight_decay},
        {**_named(trained, decays=False), "weight_decay": 0.0},
    ]
    return [{**group, "learning_rate_factor": 1.0} for group in groups if group["params"]]


def _named(trained: Sequence[tuple[bool, str, nn.Parameter]], *, decays: bool) -> dict[str, list[Any]]:
    kept = [(name, parameter) for own, name, parameter in trained if own == decays]
    return {"params": [parameter for _, parameter in kept], "names": [name for name, _ in kept]}


class AdamW8bit(torch.optim.Optimizer):
    """AdamW with moments in 8 bits (arXiv 2110.02861), updated by bitsandbytes; all other moments are fp32.

    The optimizers of bitsandbytes know no sharded parameters, so its update is called with the shards of this rank. The
    moments of a matrix have 8 bits if it has 4,096 values or more and its shards consist of whole blocks of 256 values.
    A block then holds the same values for any number of ranks, and so do checkpoints:

        exp_avg, exp_avg_sq                 uint8, the shape of the parameter
        exp_avg_scale, exp_avg_sq_scale     fp32 [rows / R, scales of R rows], where R is the least number of rows whose
                                            values fill whole blocks
    """

    def __init__(
        self, groups: Iterable[Mapping[str, Any]], *, lr: float, betas: tuple[float, float], eps: float
    ) -> None:
        self._bitsandbytes = import_bitsandbytes("optimizer.name: adamw_8bit").functional
        super().__init__(map(dict, groups), {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    def state_shapes(self, parameter: Tensor) -> dict[str, torch.Size]:
        """Returns the shape of each state tensor of a parameter, over all ranks."""
        shapes = dict.fromkeys(("exp_avg", "exp_avg_sq"), parameter.shape) | {"step": torch.Size()}
        if (rows := _rows_of_blocks(parameter)) is not None:
            scales = torch.Size([len(parameter) // rows, parameter.shape[1] * rows // _BLOCK])
            shapes |= dict.fromkeys(("exp_avg_scale", "exp_avg_sq_scale"), scales)
        return shapes

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes the state of a checkpoint as it is; torch would cast the 8-bit values to fp32."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, state in state_dict["state"].items():
            parameter = parameters[index]
            self.state[parameter] = {field: value.to(parameter.device) for field, value in state.items()}
            if "exp_avg_scale" in state:
                self.state[parameter]["step"] = state["step"]  # stays on the CPU, as in `_initial_state`

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in trained:
                if not self.state[parameter]:
                    self.state[parameter].update(self._initial_state(parameter))
            in_fp32 = [parameter for parameter in trained if "exp_avg_scale" not in self.state[parameter]]
            self._update_fp32(in_fp32, group)
            for parameter in trained:
                if "exp_avg_scale" in self.state[parameter]:
                    self._update_8bit(parameter, group)

    def _initial_state(self, parameter: Tensor) -> dict[str, Tensor]:
        rows = _rows_of_blocks(parameter)
        if rows is None:
            state = {field: torch.zeros_like(parameter) for field in ("exp_avg", "exp_avg_sq")}
            return {"step": torch.zeros((), device=parameter.device), **state}
        local, shape = _local(parameter), self.state_shapes(parameter)["exp_avg_scale"]
        state = {"step": torch.zeros(())}  # on the CPU, so that reading it never waits for a GPU
        for field in ("exp_avg", "exp_avg_sq"):
            scales = local.new_zeros(len(local) // rows, shape[1], dtype=torch.float32)
            state[field] = _sharded_like(parameter, torch.zeros_like(local, dtype=torch.uint8), parameter.shape)
            state[f"{field}_scale"] = _sharded_like(parameter, scales, shape)
        return state

    def _update_fp32(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        if not parameters:
            return
        states = [self.state[parameter] for parameter in parameters]
        beta1, beta2 = group["betas"]
        adamw(
            parameters,
            [parameter.grad for parameter in parameters if parameter.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _update_8bit(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        state["step"] += 1
        own = _local(parameter)
        if not len(own):  # a rank without rows
            return
        assert parameter.grad is not None
        fields = "exp_avg", "exp_avg_sq"
        beta1, beta2 = group["betas"]
        self._bitsandbytes.optimizer_update_8bit_blockwise(
            "adam",
            _local(parameter.grad).contiguous(),
            own,
            *(_local(state[field]) for field in fields),
            beta1,
            beta2,
            0.0,
            0.0,
            group["eps"],
            int(state["step"]),
            group["lr"],
            *(_code(self._bitsandbytes, is_signed, own.device) for is_signed in (True, False)),
            *(_local(state[f"{field}_scale"]).view(-1) for field in fields),
            group["weight_decay"],
        )


class AdamWForAnyLayout(torch.optim.AdamW):
    """AdamW with fp32 moments, whose update of a value has the same bits wherever shards begin.

    The fused kernel computes the last values of a tensor without vector instructions, and rounds them otherwise. Here
    each operation is one that IEEE 754 rounds correctly in either way.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.zeros(())
                    state |= {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                state["step"] += 1
                weight, gradient = _local(parameter), _local(parameter.grad)
                mean, square = _local(state["exp_avg"]), _local(state["exp_avg_sq"])
                number = int(state["step"])
                mean.mul_(beta1).add_(gradient * (1 - beta1))
                square.mul_(beta2).add_(gradient.square() * (1 - beta2))
                root = square.sqrt().div_(math.sqrt(1 - beta2**number)).add_(group["eps"])
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.sub_((mean / root).mul_(group["lr"] / (1 - beta1**number)))


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon (torch.optim.Muon) for the matrices of the blocks, and AdamW for embeddings, head, norms and other tensors.

    Muon's update of a matrix is scaled to the size of AdamW's, so both take the same learning rate.
    """

    def __init__(
        self, groups: Iterable[Mapping[str, Any]], *, lr: float, betas: tuple[float, float], eps: float
    ) -> None:
        super().__init__(list(_split(groups)), {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self._join()

    def _join(self) -> None:
        """Gives the two optimizers these groups and this state, which loading replaces."""
        self._parts = list[torch.optim.Optimizer]()
        muon = partial(torch.optim.Muon, adjust_lr_fn="match_rms_adamw")
        for make, is_muon in ((muon, True), (partial(torch.optim.AdamW, fused=True), False)):
            groups = [group for group in self.param_groups if group["is_muon"] == is_muon]
            if groups:
                part = make([each for group in groups for each in group["params"]], lr=self.defaults["lr"])
                for group in groups:
                    for name, value in part.param_groups[0].items():
                        group.setdefault(name, value)
                part.param_groups, part.state = groups, self.state
                self._parts.append(part)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().load_state_dict(dict(state_dict))
        self._join()

    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for part in self._parts:
            part.step()

    def state_shapes(self, parameter: Tensor) -> dict[str, torch.Size]:
        """Returns the shape of each state tensor of a parameter, over all ranks."""
        of_part = (
            part for part in self._parts for group in part.param_groups for p in group["params"] if p is parameter
        )
        return probed_state_shapes(next(of_part), parameter)


def _split(groups: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields each group as the part that Muon updates and the other one, none of them empty."""
    for group in groups:
        named = list(zip(group["names"], group["params"], strict=True))
        for is_muon in (True, False):
            if kept := [each for each in named if is_of_muon(*each) == is_muon]:
                names, parameters = map(list, zip(*kept, strict=True))
                yield {**group, "names": names, "params": parameters, "is_muon": is_muon}


def is_of_muon(name: str, parameter: Tensor) -> bool:
    """Returns whether Muon updates a tensor: a matrix of a block."""
    return parameter.ndim == 2 and ".layers." in name


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, fused=True),
    "adamw_8bit": AdamW8bit,
    "muon": MuonWithAdamW,
    ANY_LAYOUT: AdamWForAnyLayout,
}
"""The optimizers by `optimizer.name`, or ANY_LAYOUT; each takes groups, lr, betas and eps."""


@cache
def _code(functional: Any, is_signed: bool, device: torch.device) -> Tensor:
    """Returns the values of the 256 codes, fp32."""
    return functional.create_dynamic_map(signed=is_signed).to(device)


def _rows_of_blocks(parameter: Tensor) -> int | None:
    """Returns the least number of rows that fill whole blocks; None if the moments of the parameter are fp32."""
    if parameter.ndim != 2 or parameter.numel() < _MIN_VALUES:
        return None
    rows = _BLOCK // math.gcd(_BLOCK, parameter.shape[1])
    num_shards = 1
    if isinstance(parameter, DTensor):
        sizes = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
        num_shards = math.prod(size for placement, size in sizes if not placement.is_replicate())
        if any(placement.is_shard() and not placement.is_shard(dim=0) for placement in parameter.placements):
            return None
    # FSDP2 gives each rank this number of rows, and the last ones fewer.
    return None if len(parameter) % rows or -(-len(parameter) // num_shards) % rows else rows


def state_bytes(name: str, parameter: Tensor, optimizer: str) -> int:
    """Returns the bytes of the state of a parameter over all ranks, with the optimizer of this name."""
    if optimizer == "muon" and is_of_muon(name, parameter):
        return 4 * parameter.numel()
    if optimizer == "adamw_8bit" and _rows_of_blocks(parameter) is not None:
        return 2 * (parameter.numel() + 4 * parameter.numel() // _BLOCK)
    return 8 * parameter.numel()


def _local(tensor: Tensor) -> Tensor:
    return local_shard(tensor.detach())[0]


def _sharded_like(parameter: Tensor, local: Tensor, shape: torch.Size) -> Tensor:
    """Returns a tensor of `shape`, of which this rank holds `local`, sharded over the ranks as the parameter is."""
    if not isinstance(parameter, DTensor):
        return local
    stride = (shape[1], 1)
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def learning_rate_factor(schedule: str, *, warm_up: float, decay: float, min_ratio: float, decay_share: float) -> float:
    """Returns the factor that multiplies the peak learning rate; see `RunLength` for the progress of its two phases.

    In the warm-up it is `warm_up`, which rises to 1. Then `decay` goes from 0 to 1, the end of training: `cosine` and
    `linear` fall to min_ratio, and `constant` stays at 1. `wsd` (warm-up, stable, decay) stays at 1 until the last
    decay_share of the way, then falls linearly to min_ratio.
    """
    if warm_up < 1:
        return warm_up
    progress = min(1.0, max(0.0, decay))
    if schedule == "constant":
        return 1.0
    if schedule == "cosine":
        remaining = 0.5 * (1 + math.cos(math.pi * progress))
    elif schedule == "linear":
        remaining = 1 - progress
    else:
        assert schedule == "wsd", schedule
        remaining = min(1.0, (1 - progress) / decay_share)
    return min_ratio + (1 - min_ratio) * remaining


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Sets the learning rate of each group, the given one times the group's factor."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group.get("learning_rate_factor", 1.0)
