"""Scoped attention on GPUs: launches the Triton kernels, as operators that autograd and torch.compile support.

Nothing here reads a tensor on the host: scopes may change between calls without recompiling or waiting.

Shape suffixes: B batch, L tokens (Lq queries, Lk keys), N query heads, K key-value heads, H head dim.
"""

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from farsight.kernels import triton_rows
from farsight.kernels.scoped_attention.autograd import new_outputs, register_backward
from farsight.kernels.scoped_attention.triton.backward import delta_kernel, dkv_kernel, dq_kernel
from farsight.kernels.scoped_attention.triton.blocks import LOG2_E
from farsight.kernels.scoped_attention.triton.forward import forward_kernel
from farsight.kernels.scoped_attention.triton.tiles import Tiles, tiles
from farsight.kernels.scoped_attention.visibility import Visibility
from farsight.kernels.triton_rows import contiguous_rows, described, padded

DELTA_ROWS = 64


def check_runs(q: Tensor) -> None:
    """Raises ValueError unless the kernels support queries [..., H] of this dtype, head dim H and device."""
    if q.shape[-1] > 128:
        raise ValueError(f'backend "triton" takes head dims up to 128, not {q.shape[-1]}: use "banded"')
    triton_rows.check_runs(q, "banded")


def triton_attention(q_BLNH: Tensor, k_BLKH: Tensor, v_BLKH: Tensor, visibility: Visibility, scale: float) -> Tensor:
    """`api.scoped_attention` with all arguments given.

    Raises:
        ValueError: the kernels cannot run here, or the bias is not ALiBi.
    """
    check_runs(q_BLNH)
    scopes_N, document_starts_BL, _, _, q_offset = visibility.parts()
    slopes_N = visibility.alibi_slopes("triton")
    return triton_forward(q_BLNH, k_BLKH, v_BLKH, scopes_N, document_starts_BL, slopes_N, q_offset, scale)[0]


@torch.library.custom_op("farsight::triton_attention", mutates_args=())
def triton_forward(
    q_BLNH: Tensor,
    k_BLKH: Tensor,
    v_BLKH: Tensor,
    scopes_N: Tensor,
    document_starts_BL: Tensor | None,
    alibi_slopes_N: Tensor | None,
    q_offset: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Output [B, Lq, N, H] in q's dtype, and the log-sum-exp of each row's scores [B, N, Lq], fp32."""
    call = _Call(q_BLNH, k_BLKH, v_BLKH, scopes_N, document_starts_BL, alibi_slopes_N, q_offset)
    o_BLNH = torch.empty(q_BLNH.shape, dtype=q_BLNH.dtype, device=q_BLNH.device)
    lse_BNL = torch.empty((call.B, call.N, call.Lq), dtype=torch.float32, device=q_BLNH.device)
    tile = call.tiles("forward")
    forward_kernel[(triton.cdiv(call.Lq, tile.block_m), call.B, call.N)](
        call.q, *call.steps("forward", call.k, call.v), o_BLNH, lse_BNL, call.scopes, call.widest_first, call.starts,
        call.slopes, *call.strides, o_BLNH.stride()[:3], call.Lq, q_offset, call.N, scale * LOG2_E.value,
        **call.constants, **tile.options(),
    )  # fmt: skip
    return o_BLNH, lse_BNL


triton_forward.register_fake(new_outputs)


@torch.library.custom_op("farsight::triton_attention_backward", mutates_args=())
def triton_backward(
    do_BLNH: Tensor,
    q_BLNH: Tensor,
    k_BLKH: Tensor,
    v_BLKH: Tensor,
    o_BLNH: Tensor,
    lse_BNL: Tensor,
    scopes_N: Tensor,
    document_starts_BL: Tensor | None,
    alibi_slopes_N: Tensor | None,
    q_offset: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v in their dtypes and shapes; sums are fp32."""
    call = _Call(q_BLNH, k_BLKH, v_BLKH, scopes_N, document_starts_BL, alibi_slopes_N, q_offset)
    do = contiguous_rows(do_BLNH)
    delta_BNL = torch.empty_like(lse_BNL)
    delta_kernel[(triton.cdiv(call.Lq, DELTA_ROWS), call.B, call.N)](
        o_BLNH, do, delta_BNL, o_BLNH.stride()[:3], do.stride()[:3], call.Lq, call.N, call.H, DELTA_ROWS
    )
    dq_BLNH, dk_BLKH, dv_BLKH = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q_BLNH, k_BLKH, v_BLKH))
    strides = (*call.strides, do.stride()[:3])
    tile = call.tiles("dq")
    dq_kernel[(triton.cdiv(call.Lq, tile.block_m), call.B, call.N)](
        call.q, *call.steps("dq", call.k, call.v), do, dq_BLNH, lse_BNL, delta_BNL, call.scopes, call.widest_first,
        call.starts, call.slopes, *strides, dq_BLNH.stride()[:3], call.Lq, q_offset, call.N, scale,
        **call.constants, **tile.options(),
    )  # fmt: skip
    tile = call.tiles("dkv")
    q_steps, do_steps = call.steps("dkv", call.q, do)
    widest_group_first = call.scopes.view(call.K, -1).amax(1).argsort(descending=True)
    dkv_kernel[(triton.cdiv(call.Lk, tile.block_n), call.B, call.K)](
        q_steps, call.k, call.v, do_steps, dk_BLKH, dv_BLKH, lse_BNL, delta_BNL, call.scopes, widest_group_first,
        call.document_ends(), call.slopes, *strides, dk_BLKH.stride()[:3], call.Lq, q_offset, call.N,
        scale, **call.constants, **tile.options(),
    )  # fmt: skip
    return dq_BLNH, dk_BLKH, dv_BLKH


register_backward(triton_forward, triton_backward)


class _Call:
    """The arguments that all kernels of a call share."""

    def __init__(
        self,
        q_BLNH: Tensor,
        k_BLKH: Tensor,
        v_BLKH: Tensor,
        scopes_N: Tensor,
        document_starts_BL: Tensor | None,
        alibi_slopes_N: Tensor | None,
        q_offset: int,
    ) -> None:
        self.q, self.k, self.v = (contiguous_rows(x) for x in (q_BLNH, k_BLKH, v_BLKH))
        self.B, self.Lq, self.N, self.H = q_BLNH.shape
        self.Lk, self.K = k_BLKH.shape[1:3]
        self.scopes = scopes_N.to(device=q_BLNH.device, dtype=torch.int64).contiguous()
        self.widest_first = self.scopes.argsort(descending=True)
        self.starts = (
            None if document_starts_BL is None else document_starts_BL.to(q_BLNH.device, torch.int32).contiguous()
        )
        self.slopes = None if alibi_slopes_N is None else alibi_slopes_N.to(q_BLNH.device, torch.float32).contiguous()
        self.strides = tuple(x.stride()[:3] for x in (self.q, self.k, self.v))
        self.constants = {"GROUP": self.N // self.K, "HEAD_DIM": self.H}

    def tiles(self, kernel: str) -> Tiles:
        major = torch.cuda.get_device_capability(self.q.device)[0] if self.q.is_cuda else 0
        return tiles(kernel, padded(self.H), self.q.itemsize, major)

    def steps(self, kernel: str, *tensors: Tensor) -> list[Tensor | TensorDescriptor]:
        """The tensors of a kernel's inner loop, as descriptors if its tiles ask for them."""
        tile = self.tiles(kernel)
        return [described(x, tile.step(kernel)) if tile.descriptors else x for x in tensors]

    def document_ends(self) -> Tensor | None:
        """int32 [B, Lk]: one past the last token of each token's document; None without documents."""
        if self.starts is None:
            return None
        tokens = torch.arange(self.Lk, dtype=torch.int32, device=self.starts.device).expand(self.B, -1).contiguous()
        # Starts never fall, so token i is seen up to the last token whose document starts no later than i.
        return torch.searchsorted(self.starts, tokens, right=True, out_int32=True)
