"""Workload: what a step trains on, in which precision, with which optimizer."""

from __future__ import annotations

from dataclasses import dataclass

from cost_models.errors import TitanPlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Bytes a parameter takes in each role, and a value in activations.

    Attributes:
        compute: what the GEMMs run in; names a peak of the device.
        weight_bytes: the copy that forward and backward read.
        main_weight_bytes: the master copy that the optimizer updates; 0 where it is the weight itself.
        activation_bytes: a value passed between layers.
    """

    name: str
    compute: str
    weight_bytes: int
    main_weight_bytes: int
    activation_bytes: int


PRECISIONS: dict[str, Precision] = {
    "bf16": Precision(name="bf16", compute="bf16", weight_bytes=2, main_weight_bytes=4, activation_bytes=2),
    "fp16": Precision(name="fp16", compute="fp16", weight_bytes=2, main_weight_bytes=4, activation_bytes=2),
    "fp32": Precision(name="fp32", compute="fp32", weight_bytes=4, main_weight_bytes=0, activation_bytes=4),
    # GEMMs in fp8, everything else as bf16 (Transformer Engine's recipe); our trainer does not run it.
    "fp8": Precision(name="fp8", compute="fp8", weight_bytes=2, main_weight_bytes=4, activation_bytes=2),
}

# Bytes of optimizer state a parameter, main weights apart.
OPTIMIZER_STATE_BYTES: dict[str, int] = {"adamw": 8, "adam": 8, "sgd": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One training step.

    Attributes:
        seq_len: tokens of a sequence.
        global_batch: sequences of a step over all devices.
        fused_attention: the attention kernel keeps softmax statistics, not the score matrix.
        dropout: dropout after attention and MLP (and inside unfused attention), as GPT-2 and GPT-3 trained.
        causal: attention kernels skip the masked half.
        optimizer: "sgd" keeps one momentum.
    """

    seq_len: int
    global_batch: int
    precision: str = "bf16"
    optimizer: str = "adamw"
    fused_attention: bool = True
    dropout: bool = False
    causal: bool = True

    def __post_init__(self) -> None:
        for name in ("seq_len", "global_batch"):
            if getattr(self, name) < 1:
                raise TitanPlanError(
                    "C610", f"{name} is {getattr(self, name)}", "a whole number of at least 1 is needed"
                )
        _require_known("precision", self.precision, PRECISIONS)
        _require_known("optimizer", self.optimizer, OPTIMIZER_STATE_BYTES)

    @property
    def numbers(self) -> Precision:
        """The bytes of the chosen precision."""
        return PRECISIONS[self.precision]

    @property
    def optimizer_state_bytes(self) -> int:
        """Optimizer moments, bytes a parameter."""
        return OPTIMIZER_STATE_BYTES[self.optimizer]

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.seq_len * self.global_batch


def _require_known(key: str, value: str, known: dict[str, object] | dict[str, int] | dict[str, Precision]) -> None:
    """Reject a name that is not in the table."""
    if value not in known:
        raise TitanPlanError("C611", f"{key} is {value!r}", f"one of: {', '.join(known)}")
