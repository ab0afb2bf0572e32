"""Products of bf16 matrices, added up in fp32.

shape suffixes: V rows and H columns of the sum, C summed over
"""

import torch
from torch import Tensor

_ELEMENTS_AT_ONCE = 2**22
"""Of a bf16 product on a CPU; 8 MB stay in its cache: 0.07 s where the whole product took 0.10 (49152 x 576 x 1024)."""


def add_product_(total_VH: Tensor, left_VC: Tensor, right_CH: Tensor, *, is_first: bool) -> None:
    """total += left @ right; `is_first`: total = left @ right, whatever total held, NaN too.

    total_VH: fp32. left_VC, right_CH: both fp32, or both bf16: then on a GPU no product is ever rounded to bf16. On a
        CPU, where fp32 factors take three times as long, each is, once: by 1 part in 256 at most, unbiased.
    """
    beta = 0 if is_first else 1
    if left_VC.dtype == torch.float32:
        total_VH.addmm_(left_VC, right_CH, beta=beta)
    elif total_VH.is_cuda:
        _add_product_cuda(total_VH, left_VC, right_CH, beta)
    else:
        num_rows = max(1, _ELEMENTS_AT_ONCE // right_CH.shape[1])
        for total, left in zip(total_VH.split(num_rows), left_VC.split(num_rows), strict=True):
            total.copy_(left @ right_CH) if is_first else total.add_(left @ right_CH)


@torch.library.custom_op("sftron::add_product_", mutates_args=("total_VH",))
def _add_product_cuda(total_VH: Tensor, left_VC: Tensor, right_CH: Tensor, beta: int) -> None:
    """An op of its own, because torch's fake addmm with an out_dtype is missing (2.11) or allocates the sum three times
    (2.13). On a GPU it takes an fp32 sum since torch 2.10 (pytorch#167931)."""
    torch.addmm(total_VH, left_VC, right_CH, beta=beta, out_dtype=torch.float32, out=total_VH)


@_add_product_cuda.register_fake
def _(total_VH: Tensor, left_VC: Tensor, right_CH: Tensor, beta: int) -> None:
    pass
