"""The process groups of a layout: which ranks form tp, cp, pp, dp and ep, after the placement."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from cost_models.rank_grid import RankGrid

if TYPE_CHECKING:
    from cost_models.layout import Layout


class Groups:
    """The communicators of this process. Every rank makes all of them, in the same order.

    Args:
        layout: degrees; their product is the size of the world.
        device_type: `npu`, `cuda` or `cpu`.
        experts: whether the model has experts.
    """

    def __init__(self, layout: Layout, device_type: str, *, experts: bool) -> None:
        self.layout = layout
        self.grid = RankGrid.of(layout)
        self.rank = dist.get_rank()
        self.at = self.grid.coordinates(self.rank)
        names = ("pp", "replicate", "shard", "tp")
        self.dense = _mesh(device_type, self.grid.dense(), names)
        self.tp = self._of(self.dense, "tp", layout.tp)
        self.pp = self._of(self.dense, "pp", layout.pp)
        self.cp = _subgroup(self.grid.ranks.transpose(0, 1, 3, 2).reshape(-1, layout.cp)) if layout.cp > 1 else None
        self.dp: dist.ProcessGroup | None = None
        if experts and layout.dp > 1:
            self.dp = _subgroup(self.grid.ranks.transpose(0, 2, 3, 1).reshape(-1, layout.dp))
        self.experts = self.dense
        self.ep: dist.ProcessGroup | None = None
        if experts and layout.ep > 1:
            names = ("pp", "replicate", "shard", "ep")
            self.experts = _mesh(device_type, self.grid.experts(), names)
            self.ep = self._of(self.experts, "ep", layout.ep)
        self._sequence: dist.ProcessGroup | None = None
        self._ends: dist.ProcessGroup | None = None
        if experts and layout.cp > 1 and layout.sp:
            self._sequence = _subgroup(self.grid.ranks.reshape(-1, layout.cp * layout.tp))

    @staticmethod
    def _of(mesh: DeviceMesh, name: str, size: int) -> dist.ProcessGroup | None:
        return mesh.get_group(name) if size > 1 else None

    @property
    def sequence(self) -> dist.ProcessGroup | None:
        """Ranks that share out the tokens of a sequence: cp, and tp under sequence parallelism."""
        if self._sequence is not None:
            return self._sequence
        return self.cp if self.layout.cp > 1 else (self.tp if self.layout.sp else None)

    def ends(self) -> dist.ProcessGroup | None:
        """First and last pipeline rank of this process's pipeline, for a tied embedding; None on the others."""
        if self.layout.pp == 1:
            return None
        pairs = self.grid.ranks[[0, -1]].reshape(2, -1).T
        self._ends = _subgroup(pairs)
        return self._ends

    def names(self) -> dict[str, str]:
        """Dimension by torch's name of the group."""
        named = {
            "sequence": self._sequence,
            "ends": self._ends,
            "dp": self.dp,
            "ep": self.ep,
            "cp": self.cp,
            "expert_shard": self.experts.get_group("shard"),
            "expert_replicate": self.experts.get_group("replicate"),
            "dp_shard": self.dense.get_group("shard"),
            "dp_replicate": self.dense.get_group("replicate"),
            "pp": self.pp,
            "tp": self.tp,
        }
        return {group.group_name: name for name, group in named.items() if group is not None}


def _mesh(device_type: str, ranks: np.ndarray, names: tuple[str, ...]) -> DeviceMesh:
    """torch reads the strides of what it is given as the mesh's layout: a transposed view would be misread."""
    return DeviceMesh(device_type, np.ascontiguousarray(ranks), mesh_dim_names=names)


def _subgroup(rows: np.ndarray) -> dist.ProcessGroup | None:
    """Make a group of each row; the one that this process is in."""
    mine: dist.ProcessGroup | None = None
    for row in rows.tolist():
        group = dist.new_group(row)
        if dist.get_rank() in row:
            mine = group
    return mine
