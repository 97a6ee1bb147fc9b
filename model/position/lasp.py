"""LASP: a RoPE scale and base for each layer (Anchors First, Reason Later; section 5.1, Eq. 8–11).

The first L_anchor layers ramp the scale up and keep the base; the layers after them keep the scale and let
the base grow. Layers count from 0. The formulas are used as printed, so the base approaches b_max but would
reach it only one past the last layer.

The paper does not say how S(l) combines with the factor of a host such as YaRN: here it *replaces* that factor
at layer l, and the two are never multiplied. YaRN's attention temperature follows the factor layer by layer,
unless `attention_factor` fixes it.
"""

from dataclasses import replace

from farsight.configs.schema import (
    DynamicNtkRope,
    Lasp,
    LinearRope,
    Llama3Rope,
    LongRope,
    NoRotary,
    NtkRope,
    Rope,
    Rotary,
    YarnRope,
)


def lasp_scale(lasp: Lasp, layer: int) -> float:
    """S(l), Eq. 10: from s_min at layer 0 linearly to s_max at layer L_anchor, and s_max from there on.

    Raises ValueError for scales or an L_anchor that the equation cannot take.
    """
    check_lasp(lasp)
    if layer >= lasp.anchor_layers:
        return lasp.s_max
    return lasp.s_min + layer * (lasp.s_max - lasp.s_min) / lasp.anchor_layers


def lasp_base(lasp: Lasp, layer: int, n_layers: int) -> float:
    """B(l), Eq. 11: b_min below layer L_anchor, then growing by (b_max − b_min) / (L_tot − L_anchor) per layer.

    When every layer is an anchor layer (L_anchor = L_tot) the base is b_min throughout.
    Raises ValueError for bases or an L_anchor that the equation cannot take.
    """
    check_lasp(lasp, n_layers)
    assert 0 <= layer < n_layers, f"layer {layer} of {n_layers}"
    if layer < lasp.anchor_layers:
        return lasp.b_min
    growth = (lasp.b_max - lasp.b_min) / (n_layers - lasp.anchor_layers)
    return lasp.b_min + growth * (layer - lasp.anchor_layers)


def apply_lasp(rotary: Rotary, lasp: Lasp, layer: int, n_layers: int) -> Rotary:
    """The host RoPE with LASP applied at one layer: factor S(l), theta B(l), or both, according to `lasp.schedule`.

    Plain RoPE with a scale becomes linear RoPE (Eq. 9). A layer without rotation is left as it is.
    Raises ValueError for a LongRoPE host with a scale schedule, and as `lasp_scale` and `lasp_base` do.
    """
    check_lasp(lasp, n_layers)
    if isinstance(rotary, NoRotary):
        return rotary
    if lasp.schedule != "scale":
        rotary = replace(rotary, theta=lasp_base(lasp, layer, n_layers))
    if lasp.schedule == "base":
        return rotary

    scale = lasp_scale(lasp, layer)
    match rotary:
        case Rope():
            return LinearRope(theta=rotary.theta, factor=scale)
        case LinearRope() | NtkRope() | DynamicNtkRope() | YarnRope() | Llama3Rope():
            return replace(rotary, factor=scale)
        case LongRope():
            raise ValueError(
                f"position.lasp.schedule is '{lasp.schedule}' on LongRoPE, which scales each dimension by its own "
                "searched factor, so one S(l) a layer does not apply. Give short_factor and long_factor for each "
                "layer in [[position.rules]], and set position.lasp.schedule = 'base' or leave [position.lasp] out"
            )
        case _:
            raise ValueError(
                f"position.lasp.schedule is '{lasp.schedule}' on RoPE of kind '{rotary.kind}', which has no factor that S(l) "
                "could replace; set position.lasp.schedule = 'base' or leave [position.lasp] out"
            )


def check_lasp(lasp: Lasp, n_layers: int | None = None) -> None:
    """Raises ValueError for scales, bases or an L_anchor that the equations cannot take."""
    for name in ("s_min", "s_max", "b_min", "b_max"):
        value = getattr(lasp, name)
        if not value > 0:
            wanted = "1.0 for unscaled RoPE" if name.startswith("s_") else "the model's RoPE base, such as 500000.0"
            raise ValueError(f"position.lasp.{name} is {value}; set a number above 0 ({wanted})")
    if lasp.anchor_layers < 1 or (n_layers is not None and lasp.anchor_layers > n_layers):
        upper = "the number of layers" if n_layers is None else f"{n_layers}, the number of layers"
        default = " by default" * (lasp.anchor_layers == Lasp.anchor_layers)
        raise ValueError(f"position.lasp.anchor_layers is {lasp.anchor_layers}{default}; set it from 1 to {upper}")
