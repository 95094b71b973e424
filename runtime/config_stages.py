"""`stage_layers` of config.yaml, the layers of each virtual stage, and the short first and last stage of a Layout."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cost_models.errors import TitanPlanError

if TYPE_CHECKING:
    from cost_models.layout import Layout

_SHAPES = "all stages alike, or with fewer layers in the first or the last, such as [9, 10, 10, 9]"


def short_stages(layers: tuple[int, ...], stages: int, n_layers: int, origin: str) -> tuple[int, int]:
    """Give (short_first, short_last) of a list of layers.

    Of two stages only one can be short: [9, 9] is two whole stages, whatever a Layout said before.
    """
    shown = f"{origin}: distributed.stage_layers {list(layers)}"
    if len(layers) != stages:
        hint = f"pp_size x virtual_pp_size = {stages} numbers are needed"
        raise TitanPlanError("S404", f"{shown} has {len(layers)} numbers, there are {stages} virtual stages", hint)
    if sum(layers) != n_layers:
        hint = f"the numbers have to sum to {n_layers}"
        raise TitanPlanError("S404", f"{shown} sums to {sum(layers)}, the model has {n_layers} layers", hint)
    whole = max(layers)
    if any(count != whole for count in layers[1:-1]):
        raise TitanPlanError("S404", f"{shown}: stages between the first and the last differ", _SHAPES)
    return whole - layers[0], whole - layers[-1]


def stage_list(layout: Layout, n_layers: int) -> list[int] | None:
    """The list of a layout with a short stage; None for stages alike, which need no list."""
    if not layout.short_first and not layout.short_last:
        return None
    return list(layout.stage_layers(n_layers))
