"""transformers' attention, layer by layer, behind the contexts of our own models (`model.context`).

transformers' models hand queries and keys, with their positions applied, to a function that is looked up by name. The one
registered here passes them through the layer's context, which may record them (`analysis.capture`) or attend in the model's
place (`inference.extend`). Without a context, or with one that only records, the model's own function attends.

Shapes: B batch, L tokens of the call, T keys so far, N query heads, K key/value heads, H head dim, V head dim of the values.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from farsight.kernels.scoped_attention import Visibility
from farsight.model.context import SequenceContext

PREFIX = "farsight_"
"""Goes before the name of the function that the model would use by itself, such as sdpa."""
_LAYER = "_farsight_layer"

Attend = Callable[..., tuple[Tensor, Tensor | None]]
"""An attention function of transformers: (module, q [B, N, L, H], k [B, K, T, H], v [B, K, T, V], mask, **settings) gives
([B, L, N, V], weights or None)."""


class ForeignLayer:
    """A layer's attention module; what `model.attention.Attention` is in our own models.

    Attributes:
        context: as in `Attention`.
        scopes: tokens that each query head sees; DENSE_SCOPE is all.
        slopes_N: ALiBi's slopes in score units per token, fp32; None without ALiBi.
        scaling: factor of q·k in the scores.
    """

    context: SequenceContext | None = None
    scopes: tuple[int, ...] = ()

    def __init__(
        self, module: nn.Module, q_BNLH: Tensor, k_BKTH: Tensor, v_BKTV: Tensor, settings: dict[str, Any]
    ) -> None:
        self.module, self.calls = module, 0
        (_, self.n_heads, _, self.head_dim), self.n_kv_heads = q_BNLH.shape, k_BKTH.shape[1]
        self.value_dim = v_BKTV.shape[-1]
        scaling = settings.get("scaling")
        self.scaling = self.head_dim**-0.5 if scaling is None else float(scaling)
        self.window: int | None = settings.get("sliding_window")
        self.slopes_N: Tensor | None = None
        self.heads = slice(0, self.n_heads)
        self.group = max(1, self.n_heads // self.n_kv_heads)
        self._theirs: Callable[[Tensor], Tensor] | None = None

    def attend(self, q_BLNH: Tensor, k_BLKH: Tensor, v_BLKV: Tensor, theirs: Callable[[Tensor], Tensor]) -> Tensor:
        """Attention through the context, [B, L, N, V].

        Args:
            k_BLKH, v_BLKV: of the call's tokens.
            theirs: the model's own attention of queries [B, L, N, H], over cached keys too.
        """
        assert self.context is not None
        bias_PN = None
        if self.context.rotates:
            # Our scores are divided by √H; what the model's own scale has beyond that goes into the queries.
            q_BLNH = q_BLNH * (self.scaling * self.head_dim**0.5)
            bias_PN = None if self.slopes_N is None else self.slopes_N[None].to(q_BLNH.device)
        scopes_N = torch.tensor(self.scopes, dtype=torch.int32, device=q_BLNH.device)
        visibility = Visibility.of_parts(scopes_N, None, bias_PN, None if bias_PN is None else "alibi")
        self._theirs = theirs
        try:
            return self.context.exchange(k_BLKH, v_BLKV, self.scopes).attend(q_BLNH, visibility, "auto")
        finally:
            self._theirs = None

    def their_attention(self, q_BLNH: Tensor) -> Tensor:
        """The model's own attention in the current call, [B, L, N, V]."""
        assert self._theirs is not None
        return self._theirs(q_BLNH)


class TheirCache:
    """A context that leaves keys, values and attention to transformers.

    Args:
        cached: gives the tensors that transformers caches for the layer.
    """

    rotates = False

    def __init__(self, layer: ForeignLayer, cached: Callable[[], Sequence[Tensor]]) -> None:
        self.layer, self._cached = layer, cached

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self._cached())

    def exchange(self, k_BLKH: Tensor, v_BLKH: Tensor, scopes: Sequence[int]) -> "TheirCache":
        return self

    def attend(self, q_BLNH: Tensor, visibility: Visibility, backend: str) -> Tensor:
        return self.layer.their_attention(q_BLNH)


def route(
    plain: Attend | None,
    module: nn.Module,
    q_BNLH: Tensor,
    k_BKTH: Tensor,
    v_BKTV: Tensor,
    mask: Tensor | None,
    slopes_N: Tensor | None = None,
    **settings: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention through the layer's context, as transformers' models call it.

    Args:
        plain: the function to attend with; None takes the one in the module's own file, which transformers calls "eager".
        slopes_N: ALiBi's, where an adapter knows them; the mask has the bias already.
    """
    layer: ForeignLayer | None = vars(module).get(_LAYER)
    if layer is None:
        layer = ForeignLayer(module, q_BNLH, k_BKTH, v_BKTV, settings)
        layer.slopes_N = None if slopes_N is None else slopes_N.detach().float()
        setattr(module, _LAYER, layer)
    layer.calls += 1
    attend = plain or sys.modules[type(module).__module__].eager_attention_forward
    if layer.context is None:
        return attend(module, q_BNLH, k_BKTH, v_BKTV, mask, **settings)
    L = q_BNLH.shape[2]
    k_BLKH, v_BLKV = (x[:, :, -L:].transpose(1, 2) for x in (k_BKTH, v_BKTV))

    def theirs(q_BLNH: Tensor) -> Tensor:
        return attend(module, q_BLNH.transpose(1, 2), k_BKTH, v_BKTV, mask, **settings)[0]

    return layer.attend(q_BNLH.transpose(1, 2), k_BLKH, v_BLKV, theirs), None


def route_interface(model: PreTrainedModel) -> None:
    """Makes a model that goes through transformers' attention interface call `route`, with the function that it uses now."""
    name = model.config._attn_implementation
    AttentionInterface.register(PREFIX + name, partial(route, ALL_ATTENTION_FUNCTIONS.get(name)))
    AttentionMaskInterface.register(PREFIX + name, ALL_MASK_ATTENTION_FUNCTIONS[name])
    model.set_attn_implementation(PREFIX + name)


def routed_layers(model: PreTrainedModel) -> dict[str, ForeignLayer]:
    """The layers that have called `route`, by the name of their module, in the model's order."""
    return {name: vars(module)[_LAYER] for name, module in model.named_modules() if _LAYER in vars(module)}
