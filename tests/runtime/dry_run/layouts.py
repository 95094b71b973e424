"""Small models and layouts of every kind, on which the cost model and a dry run of the trainer are held together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cost_models.calibration import calibration_of
from cost_models.catalog import find_cluster
from cost_models.layout import Layout
from cost_models.model import MlaSpec, ModelSpec, MoeSpec
from cost_models.setting import Setting
from cost_models.stack import TITAN
from cost_models.workload import Workload
from runtime.config_values import TrainConfig
from runtime.dry_run import dry_run

if TYPE_CHECKING:
    from runtime.dry_run import DryRun

CLUSTER = "atlas-800t-a2"


def model_of(**changes: Any) -> ModelSpec:  # noqa: ANN401 - fields of ModelSpec
    """Two layers of width 64, 4 heads over 2 key/value heads, an odd vocabulary that tp pads."""
    sizes: dict[str, Any] = {
        "name": "small",
        "hidden_dim": 64,
        "n_layers": 2,
        "n_heads": 4,
        "n_kv_heads": 2,
        "head_dim": 16,
        "ffn_dim": 128,
        "vocab_size": 509,
    }
    return ModelSpec(**(sizes | changes))


_LATENT = MlaSpec(q_lora_rank=32, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12)
_PLAIN_QUERIES = MlaSpec(q_lora_rank=0, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16)
_SHARED = MoeSpec(experts=8, top_k=2, ffn_dim=32, shared_ffn_dim=32, shared_gate=True, dense_layers=1, router_bias=True)
MODELS: dict[str, ModelSpec] = {
    "gqa": model_of(),
    "four": model_of(n_layers=4),
    "eight": model_of(n_layers=8, n_kv_heads=4),
    "mha": model_of(n_kv_heads=4, gated_mlp=False, tied_embeddings=True),
    "mqa": model_of(n_kv_heads=1, qk_norm=True),
    "tied": model_of(n_layers=4, tied_embeddings=True),
    "gpt": model_of(
        n_kv_heads=4,
        norm="layernorm",
        position="learned",
        positions=200,
        embedding_norm=True,
        qkv_bias=True,
        attention_out_bias=True,
        mlp_bias=True,
        gated_mlp=False,
    ),
    "alibi": model_of(n_kv_heads=4, position="alibi"),
    "window": model_of(sliding_window=32),
    "moe": model_of(moe=MoeSpec(experts=8, top_k=2, ffn_dim=32)),
    "shared": model_of(moe=_SHARED),
    "latent": model_of(n_kv_heads=4, mla=_LATENT, moe=_SHARED),
    "plain-latent": model_of(n_kv_heads=4, mla=_PLAIN_QUERIES, qkv_bias=True),
    "wide": model_of(hidden_dim=256, ffn_dim=1024, vocab_size=4096, n_layers=4),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One rank of one layout of one model."""

    model: str
    rank: int = 0
    precision: str = "bf16"
    seq_len: int = 64
    layout: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """As the test is called."""
        return f"{self.model}-{self.precision}-{self.config.layout.name}-rank{self.rank}"

    @property
    def config(self) -> TrainConfig:
        """What the trainer is given."""
        given = dict(self.layout)
        if given.get("zero"):
            given.setdefault("dp_shard", given.get("dp", 1))
        layout = Layout(**given)
        batch = layout.dp * layout.micro_batch * layout.accumulation
        workload = Workload(seq_len=self.seq_len, global_batch=batch, precision=self.precision)
        return TrainConfig(model=MODELS[self.model], workload=workload, layout=layout, cluster=CLUSTER)

    @property
    def setting(self) -> Setting:
        """What the cost model is given."""
        config = self.config
        return Setting(
            model=config.model,
            workload=config.workload,
            cluster=find_cluster(CLUSTER),
            stack=TITAN,
            calibration=calibration_of("local-cpu"),
            n_devices=config.layout.devices,
        )


def case(model: str, rank: int = 0, **layout: Any) -> Case:  # noqa: ANN401 - fields of Layout, or of Case
    """A case in one line."""
    own = {name: layout.pop(name) for name in ("precision", "seq_len") if name in layout}
    return Case(model=model, rank=rank, layout=layout, **own)


def counted(case_: Case) -> DryRun:
    """What the dry run of a case counts."""
    return dry_run(case_.config, case_.rank)
