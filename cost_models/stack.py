"""Stack: the behaviours of a training program that change memory, traffic or overlap. Named facts, no fudge factors."""

from __future__ import annotations

from dataclasses import dataclass

from cost_models.errors import TitanPlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """What one training program keeps, hides and redoes.

    Attributes:
        gradient_bytes: bytes a parameter of the gradient that is accumulated and reduced, in mixed precision.
        fsdp: data parallelism works unit by unit (PyTorch FSDP2): from ZeRO-1 on, weights are gathered in the first
            forward and freed layer by layer in the last backward, and gradients are reduced through a full-precision
            copy of a unit, which lives until the next unit's is made.
        whole_gradients: gradients stay whole on each rank until the step, whatever ZeRO says.
        selective: operator kinds that selective recomputation redoes: "softmax" (unfused scores), "norm" (outputs of
            norms), "activation" (output of the MLP activation).
        recompute_to_last_saved: recomputation stops at the last tensor that backward needs (torch's non-reentrant
            checkpoint with early stop). In a dense layer that is the down projection's input, so the product and its
            collective are not redone; behind routed experts only the addition to the residual stream is not.
        loss_chunk_tokens: tokens whose logits are alive at once; 0 for all of a micro batch.
        logits_bytes: bytes of a logit while its loss is computed, gradient included.
        saves_gathered_inputs: a column-parallel layer keeps the gathered input instead of gathering it again.
        norm_saved_values: full-size values in activation bytes that a norm keeps besides its input's own copy.
        statistics_bytes: softmax statistics a token and head that attention keeps of what its kernel makes; None: all.
        fused_norm_and_rope: norms, rotary and the gated activation are one kernel each.
        fused_accumulation: weight gradients are added to the accumulated ones inside the GEMM.
        computes_masked_bias: attention under a sliding window or ALiBi computes the whole square of scores, since its
            kernel takes the mask as a bias.
        ring_passes_gradients: ring attention passes gradients of keys and values on as well; otherwise they are summed
            by a reduce-scatter at the end.
        prefetches_weights: ZeRO-3's gather of the next layer hides under the current one.
        overlaps_gradients: gradient reduction hides under backward.
        overlaps_parameters: the gather of updated weights hides under forward.
        tensor_overlap: share of tensor-parallel communication that fused matmul-communication kernels hide.
        source: where the behaviour is documented.
    """

    name: str
    gradient_bytes: int = 4
    fsdp: bool = False
    whole_gradients: bool = False
    selective: frozenset[str] = frozenset({"softmax"})
    recompute_to_last_saved: bool = False
    loss_chunk_tokens: int = 0
    logits_bytes: int = 10
    saves_gathered_inputs: bool = False
    norm_saved_values: int = 0
    statistics_bytes: float | None = None
    fused_norm_and_rope: bool = True
    fused_accumulation: bool = True
    computes_masked_bias: bool = False
    ring_passes_gradients: bool = True
    prefetches_weights: bool = True
    overlaps_gradients: bool = True
    overlaps_parameters: bool = True
    tensor_overlap: float = 0.0
    source: str = ""


TITAN = Stack(
    name="titan",
    fsdp=True,
    selective=frozenset({"softmax", "norm", "activation"}),
    recompute_to_last_saved=True,
    loss_chunk_tokens=1024,
    statistics_bytes=4.0,
    fused_accumulation=False,
    computes_masked_bias=True,
    ring_passes_gradients=False,
    source="runtime/: our own trainer (FSDP2, DTensor, torch.distributed.pipelining)",
)

_STACKS = (
    TITAN,
    Stack(
        name="megatron",
        whole_gradients=True,
        source="NVIDIA Megatron-Core: distributed optimizer keeps bf16 weights and fp32 main gradients whole",
    ),
    Stack(
        name="megatron-deepspeed",
        gradient_bytes=2,
        whole_gradients=True,
        fused_norm_and_rope=False,
        fused_accumulation=False,
        overlaps_gradients=False,
        overlaps_parameters=False,
        source="bigscience-workshop/Megatron-DeepSpeed: fp16 gradients, reduction after the last backward",
    ),
    Stack(
        name="fsdp",
        fsdp=True,
        fused_accumulation=False,
        source="PyTorch FSDP (llm-foundry, fms-fsdp): fp32 shards, bf16 gathered weights",
    ),
    Stack(
        name="mindspeed",
        whole_gradients=True,
        fused_accumulation=False,
        source="Ascend/MindSpeed-LLM over Megatron-Core; the example scripts pass no-gradient-accumulation-fusion",
    ),
    Stack(
        name="mindspeed-mc2",
        whole_gradients=True,
        fused_accumulation=False,
        tensor_overlap=0.6,
        source="as mindspeed with use-mc2; 0.6: overlap of fused GEMM and all-reduce measured on 910B, "
        "pto-isa (808.9 us in sequence, 560.6 us fused, of at most 437 us to hide)",
    ),
    Stack(
        name="mindformers",
        whole_gradients=True,
        fused_accumulation=False,
        source="MindSpore Transformers, graph mode",
    ),
)

STACKS: dict[str, Stack] = {stack.name: stack for stack in _STACKS}


def find_stack(name: str) -> Stack:
    """A stack by name; C611 with the known names otherwise."""
    if name not in STACKS:
        raise TitanPlanError("C611", f"unknown software stack {name!r}", f"one of: {', '.join(STACKS)}")
    return STACKS[name]
