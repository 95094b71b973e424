"""Rules: what makes a layout valid. The planner's filter and the trainer's guard are the same rules.

Each rule has a stable code, a vector form over columns (True where the layout is fine), and words that show the
arithmetic for one layout. A rejected layout keeps the code of the first rule it breaks, in the order of `RULES`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cost_models import rule_checks as checks
from cost_models.layout import Column, Layout, Layouts
from cost_models.operators import padded_vocab

if TYPE_CHECKING:
    from cost_models.setting import Setting


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule.

    Attributes:
        holds: True where the layout keeps the rule; columns broadcast.
        reason: the arithmetic for one layout that breaks it.
        explanation: the rule in general, for `explain CODE`.
        example: a layout that breaks it, in words.
        source: document, paper or code that the rule comes from.
        trainer_only: a limit of our own trainer, not of training programs in general.
        per_choice: depends on ZeRO, recomputation or what is swapped; the others hold or fail for all choices alike.
    """

    code: str
    title: str
    holds: Callable[[Setting, Layouts], Column]
    reason: Callable[[Setting, Layout], str]
    explanation: str
    example: str
    source: str
    trainer_only: bool = False
    per_choice: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """Why one layout is invalid."""

    code: str
    reason: str


def first_violations(setting: Setting, layouts: Layouts, rules: tuple[Rule, ...] | None = None) -> Column:
    """Index into `rules` (RULES by default) of the first rule that each layout breaks; -1 where it keeps all."""
    found = np.asarray(-1, dtype=np.int16)
    for index, rule in reversed(tuple(enumerate(RULES if rules is None else rules))):
        found = np.where(rule.holds(setting, layouts), found, np.int16(index))
    return found


def violation(setting: Setting, layout: Layout, *, trainer: bool = True) -> Violation | None:
    """The first rule that one layout breaks, in words; None where it is valid.

    Args:
        trainer: apply the limits of our own trainer as well.
    """
    rules = RULES if trainer else GENERAL_RULES
    index = int(first_violations(setting, Layouts.of([layout]), rules)[0])
    return None if index < 0 else Violation(code=rules[index].code, reason=rules[index].reason(setting, layout))


_MEGATRON = "Megatron-Core arguments.py; torchtitan parallel_dims.py and models/common/decoder.py"
_TORCH_PIPELINES = "torch 2.13 torch/distributed/pipelining/schedules.py"

# From what a mesh breaks to what only one choice on it breaks: the search drops whole meshes by the first ones.
RULES: tuple[Rule, ...] = (
    Rule(
        code="T310",
        title="degrees multiply to the devices",
        holds=checks.devices,
        reason=checks.devices_reason,
        explanation="tp x cp x pp x dp is the number of devices; a plan uses all of them.",
        example="tp 4 x pp 4 x dp 4 on 32 devices",
        source="torchtitan ParallelDims._validate",
    ),
    Rule(
        code="D202",
        title="attention heads split over tp",
        holds=checks.heads,
        reason=lambda s, x: f"{s.model.n_heads} attention heads do not split over tp {x.tp}",
        explanation="Each tensor-parallel rank computes whole heads.",
        example="64 heads over tp 6",
        source=_MEGATRON,
    ),
    Rule(
        code="D203",
        title="key/value heads split over tp",
        holds=checks.kv_heads,
        reason=lambda s, x: f"{s.model.attention_kv_heads} key/value heads do not split over tp {x.tp}",
        explanation="With grouped-query attention each tensor-parallel rank holds whole key/value heads.",
        example="8 key/value heads over tp 16",
        source=_MEGATRON,
    ),
    Rule(
        code="D204",
        title="MLP width splits over tp",
        holds=checks.ffn,
        reason=lambda s, x: f"MLP width {s.model.ffn_dim} (or that of the experts) does not split over tp {x.tp}",
        explanation="Gate, up and down projections are cut by tp; so are experts where ep is 1.",
        example="ffn_dim 11008 over tp 3",
        source=_MEGATRON,
    ),
    Rule(
        code="D209",
        title="vocabulary padding stays small",
        holds=checks.vocabulary,
        reason=lambda s, x: (
            f"vocabulary {s.model.vocab_size} over tp {x.tp} pads to "
            f"{int(padded_vocab(s.model.vocab_size, np.asarray(float(x.tp))))}, more than 5 % in vain"
        ),
        explanation="The vocabulary is padded to a multiple of tp so that ranks hold equal parts; over 5 % is waste.",
        example="a vocabulary of 10 over tp 8 pads to 16",
        source="Megatron-LM tokenizer padding (make-vocab-size-divisible-by)",
    ),
    Rule(
        code="R703",
        title="sequence parallelism is inside tp",
        holds=checks.sp_has_tp,
        reason=lambda _, x: f"sequence parallelism with tp {x.tp}",
        explanation="Sequence parallelism shards norms and residuals over the tp group; with tp 1 there is none.",
        example="sp with tp 1",
        source="Korthikanti et al. 2022, section 4.2",
    ),
    Rule(
        code="D207",
        title="sequence splits over cp",
        holds=checks.sequence_cp,
        reason=lambda s, x: (
            f"sequence {s.workload.seq_len} does not split over "
            + (f"cp {x.cp}" if x.cp_kind == "ulysses" else f"2 x cp {x.cp} (two chunks a rank)")
        ),
        explanation="Context-parallel ranks hold equal parts of the sequence; ring and all-gather pair an early with a "
        "late chunk so that the causal mask leaves each rank the same work.",
        example="sequence 4096 over cp 3",
        source="Megatron-Core context parallelism; torchtitan seq_len_divisor",
    ),
    Rule(
        code="D208",
        title="sequence splits over tp with sp",
        holds=checks.sequence_tp,
        reason=lambda s, x: f"sequence {s.workload.seq_len} / cp {x.cp} does not split over tp {x.tp}",
        explanation="Sequence parallelism shards the sequence of each cp rank over the tp group.",
        example="sequence 100 over tp 8",
        source="Korthikanti et al. 2022, section 4.2; torchtitan seq_len_divisor",
    ),
    Rule(
        code="D210",
        title="Ulysses deals whole heads",
        holds=checks.ulysses,
        reason=lambda s, x: (
            f"{s.model.n_heads} heads ({s.model.attention_kv_heads} key/value) do not deal out over "
            f"tp {x.tp} x cp {x.cp}"
        ),
        explanation="Ulysses exchanges sequence for heads: each of the tp x cp ranks needs whole query heads, and "
        "whole or evenly repeated key/value heads.",
        example="12 heads over tp 4 x cp 8",
        source="DeepSpeed Ulysses, arXiv:2309.14509; torchtitan-npu ulysses check",
    ),
    Rule(
        code="R701",
        title="context parallelism has a kind, and fused attention",
        holds=checks.context_kind,
        reason=lambda s, x: (
            f"cp {x.cp} with kind {x.cp_kind} and "
            + ("fused" if s.workload.fused_attention else "unfused")
            + " attention"
        ),
        explanation="cp above 1 names ulysses, allgather or ring, cp 1 names none; all three need fused attention.",
        example="cp 2 with kind none",
        source="runtime/parallel: one interface for all kinds",
    ),
    Rule(
        code="R705",
        title="the trainer runs this workload",
        holds=checks.workload_runs,
        reason=lambda s, _: checks.workload_reason(s),
        explanation="The trainer computes in bf16, fp16 or fp32, without dropout, with fused causal attention, and a "
        "model with learned positions sees no more tokens than it has.",
        example="precision fp8",
        source="runtime/: what its operators compute",
        trainer_only=True,
    ),
    Rule(
        code="D205",
        title="experts split over ep",
        holds=checks.experts,
        reason=checks.experts_reason,
        explanation="Each expert-parallel rank holds whole experts; a dense model has none.",
        example="8 experts over ep 3",
        source=_MEGATRON,
    ),
    Rule(
        code="R704",
        title="experts over tensor-parallel ranks need sp",
        holds=checks.experts_need_sp,
        reason=lambda _, x: f"ep {x.ep} with tp {x.tp} but without sequence parallelism",
        explanation="With ep above 1 each tp rank sends its own tokens to the experts; without sp all hold the same.",
        example="tp 2, ep 4, sp off",
        source="Megatron-Core MoE: sequence parallelism is required with tp and ep",
    ),
    Rule(
        code="D201",
        title="layers split over pp x vpp",
        holds=checks.layers,
        reason=checks.layers_reason,
        explanation="Every virtual stage holds the same number of layers, except that the first and the last may be "
        "short: embedding and head stand for the missing ones.",
        example="80 layers over pp 3 x vpp 2",
        source="Megatron-Core; Llama 3 (arXiv:2407.21783, section 3.3.2) keeps one layer less in first and last stage",
    ),
    Rule(
        code="S408",
        title="every virtual stage has a layer",
        holds=checks.no_empty_stage,
        reason=checks.no_empty_stage_reason,
        explanation="A stage of the trainer holds at least one layer; Megatron also runs stages with the embedding or "
        "the head alone.",
        example="126 layers over pp 16 x vpp 8 with both ends one layer short",
        source="torchtitan generate_llm_fqn_per_model_part: every stage at least one layer",
        trainer_only=True,
    ),
    Rule(
        code="S402",
        title="short stages belong to a pipeline",
        holds=checks.short_needs_pp,
        reason=lambda _, x: f"first stage {x.short_first} and last stage {x.short_last} short with pp {x.pp}",
        explanation="Only a pipeline has first and last stages that can be short.",
        example="short stages with pp 1",
        source="this planner",
    ),
    Rule(
        code="B501",
        title="micro batch x accumulation x dp = global batch",
        holds=checks.batch,
        reason=checks.batch_reason,
        explanation="The global batch is an exact product; nothing is dropped or padded.",
        example="micro batch 1 x accumulation 8 x dp 4 = 32, not 256",
        source="Megatron-Core num_microbatches_calculator; torchtitan train.py",
    ),
    Rule(
        code="S407",
        title="the schedule has this many stages",
        holds=checks.schedule_stages,
        reason=lambda _, x: f"schedule {x.schedule} with pp {x.pp} x vpp {x.vpp} stages",
        explanation="One rank has no pipeline schedule and a pipeline has one; only interleaved schedules hold several "
        "virtual stages a rank, and zb-v exactly two.",
        example="pp 4 with schedule none",
        source="Narayanan et al. 2021, arXiv:2104.04473, section 2.2; Qi et al. 2023, arXiv:2401.10241",
    ),
    Rule(
        code="S401",
        title="the schedule takes this pipeline",
        holds=checks.schedule,
        reason=checks.schedule_reason,
        explanation="1F1B needs a full pipeline, interleaved schedules need vpp of 2 or more and even rounds, zb-v "
        "exactly two stages a rank.",
        example="interleaved with vpp 1",
        source=_TORCH_PIPELINES,
        trainer_only=True,
    ),
    Rule(
        code="D206",
        title="ep divides the ranks it takes",
        holds=checks.expert_ranks,
        reason=checks.expert_ranks_reason,
        explanation="ep takes tensor-parallel ranks first, then cp, then dp; each must divide evenly. "
        "Of dp with ZeRO it takes a part of a group of shards, or several whole groups.",
        example="ep 3 over tp 2 x cp 1 x dp 4",
        source="runtime/parallel/groups.py; torchtitan build_mesh takes within a group of shards only",
        per_choice=True,
    ),
    Rule(
        code="D211",
        title="shard group divides dp",
        holds=checks.shards,
        reason=lambda _, x: f"dp_shard {x.dp_shard} with dp {x.dp} and ZeRO-{x.zero}",
        explanation="dp = replicas x shards; ZeRO-0 shards nothing, so its dp_shard is 1.",
        example="dp 8 with dp_shard 3",
        source="torchtitan ParallelDims._validate",
        per_choice=True,
    ),
    Rule(
        code="D212",
        title="ZeRO has something to shard over",
        holds=checks.something_to_shard,
        reason=lambda _, x: f"ZeRO-{x.zero} over dp_shard {x.dp_shard} x cp {x.cp} = 1 rank",
        explanation="ZeRO-1, 2 and 3 shard over dp_shard x cp ranks; over one rank they are ZeRO-0.",
        example="ZeRO-2 with dp 1",
        source="Rajbhandari et al. 2020, arXiv:1910.02054",
        per_choice=True,
    ),
    Rule(
        code="B502",
        title="reducing after every micro batch needs ZeRO-2 and accumulation",
        holds=checks.every,
        reason=lambda _, x: (
            f"gradients reduced after every micro batch with ZeRO-{x.zero}, accumulation {x.accumulation}"
        ),
        explanation="Reducing early saves memory only where gradients are then kept sharded and there is more than one "
        "micro batch.",
        example="reduce_gradients every with ZeRO-1",
        source="this planner; torch PipelineStage keeps whole gradients until the last micro batch",
        per_choice=True,
    ),
    Rule(
        code="S403",
        title="recomputed layers are part of a stage",
        holds=checks.recompute_layers,
        reason=lambda _, x: f"{x.recompute_layers} layers recomputed in each virtual stage, recompute {x.recompute}",
        explanation="`layers=N` recomputes fewer layers than a virtual stage has; all of them is `full`.",
        example="layers=4 where a stage has 4 layers",
        source="Megatron-Core recompute-method block",
        per_choice=True,
    ),
)

# Rules that tp, cp, pp and dp alone decide; they come first, so that a mesh falls before its rows are made.
MESH_RULES: tuple[Rule, ...] = RULES[:3]
CHOICE_RULES: tuple[Rule, ...] = tuple(rule for rule in RULES if rule.per_choice)
GENERAL_RULES: tuple[Rule, ...] = tuple(rule for rule in RULES if not rule.trainer_only)
