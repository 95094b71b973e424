"""The operator table against published formulas (Korthikanti 2022, Narayanan 2021) and against counts by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models.catalog import find_model
from cost_models.layer_backward import BackwardOfLayer
from cost_models.layout import Layout, Layouts
from cost_models.model import MlaSpec, ModelSpec, MoeSpec
from cost_models.operators import Operator, OperatorTable, Shapes, saved_bytes
from cost_models.stack import STACKS, TITAN, Stack
from cost_models.workload import Workload

MEGATRON = STACKS["megatron"]


def table_of(model: ModelSpec, workload: Workload, layout: Layout, stack: Stack = MEGATRON) -> OperatorTable:
    shapes = Shapes.of(Layouts.of([layout]), workload)
    return OperatorTable(model, workload, stack, shapes, softmax_statistics_bytes=0.0)


def kept(operators: tuple[Operator, ...], redone: frozenset[str] = frozenset()) -> float:
    """Saved bytes without norm statistics, 8 bytes a token that the published formulas leave out."""
    every = float(np.asarray(saved_bytes(operators, redone)).item())
    return every - sum(
        float(s.n_bytes.item()) for op in operators for s in op.saved if s.name.endswith("norm_statistics")
    )


def forward_flops(operators: tuple[Operator, ...]) -> float:
    gemms = [2.0 * g.m * g.k * g.n * g.count for op in operators for g in op.gemms]
    attention = [op.attention_flops for op in operators]
    return float(np.asarray(sum([*gemms, *attention], np.zeros(1))).item())


# --- saved activations: Korthikanti et al. 2022, arXiv:2205.05198, table 2 ---

SIZES = [(2048, 1, 12288, 96), (2048, 4, 6144, 64), (1024, 8, 1600, 25)]


def gpt(hidden: int, heads: int, n_layers: int = 2, vocab: int = 51200) -> ModelSpec:
    return ModelSpec(
        name="gpt",
        hidden_dim=hidden,
        n_layers=n_layers,
        n_heads=heads,
        n_kv_heads=heads,
        head_dim=hidden // heads,
        ffn_dim=4 * hidden,
        vocab_size=vocab,
        gated_mlp=False,
        norm="layernorm",
        position="learned",
        positions=2048,
        tied_embeddings=True,
    )


def gpt_layer(s: int, b: int, h: int, a: int, t: int, *, sp: bool) -> tuple[Operator, ...]:
    workload = Workload(seq_len=s, global_batch=b, precision="fp16", fused_attention=False, dropout=True)
    return table_of(gpt(h, a), workload, Layout(tp=t, sp=sp, micro_batch=b)).dense_layer()


@pytest.mark.parametrize(("s", "b", "h", "a"), SIZES)
def test_a_gpt_layer_keeps_what_korthikanti_counts_without_parallelism(s: int, b: int, h: int, a: int) -> None:
    assert kept(gpt_layer(s, b, h, a, 1, sp=False)) == pytest.approx(s * b * h * (34 + 5 * a * s / h), rel=1e-12)


@pytest.mark.parametrize("t", [2, 4, 8])
@pytest.mark.parametrize(("s", "b", "h", "a"), SIZES[:2])
def test_tensor_parallelism_alone_leaves_ten_bytes_whole(s: int, b: int, h: int, a: int, t: int) -> None:
    expected = s * b * h * (10 + 24 / t + 5 * a * s / (h * t))
    assert kept(gpt_layer(s, b, h, a, t, sp=False)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("t", [2, 4, 8])
@pytest.mark.parametrize(("s", "b", "h", "a"), SIZES[:2])
def test_sequence_parallelism_divides_all_of_a_layer_by_tp(s: int, b: int, h: int, a: int, t: int) -> None:
    expected = s * b * h / t * (34 + 5 * a * s / h)
    assert kept(gpt_layer(s, b, h, a, t, sp=True)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("t", [1, 2, 8])
def test_selective_recompute_leaves_34_bytes(t: int) -> None:
    s, b, h, a = SIZES[0]
    layer = gpt_layer(s, b, h, a, t, sp=t > 1)
    assert kept(layer, MEGATRON.selective) == pytest.approx(34 * s * b * h / t, rel=1e-12)


def test_the_input_of_a_layer_is_all_that_full_recompute_keeps() -> None:
    s, b, h, a = SIZES[0]
    first, *_ = (saved for op in gpt_layer(s, b, h, a, 1, sp=False) for saved in op.saved)
    assert (first.name, first.n_bytes.item()) == ("attention_norm_input", 2 * s * b * h)


def test_norm_statistics_are_eight_bytes_a_token_and_norm() -> None:
    s, b, h, a = SIZES[0]
    layer = gpt_layer(s, b, h, a, 1, sp=False)
    every = float(np.asarray(saved_bytes(layer)).item())
    assert every - kept(layer) == 2 * 8 * s * b


def test_fused_attention_without_dropout_keeps_32_bytes_and_statistics() -> None:
    """34 less the scores and the two dropout masks; what the kernel keeps is also the input of the projection."""
    s, b, h, a = SIZES[0]
    workload = Workload(seq_len=s, global_batch=b, precision="fp16")
    assert kept(table_of(gpt(h, a), workload, Layout(micro_batch=b)).dense_layer()) == 32 * s * b * h


def test_gathered_inputs_are_kept_whole_by_a_stack_that_says_so() -> None:
    """Two column-parallel inputs of 2 sbh each are then not divided by tp."""
    s, b, h, a = SIZES[0]
    workload = Workload(seq_len=s, global_batch=b, precision="fp16")
    layout, stack = Layout(tp=4, sp=True, micro_batch=b), Stack(name="keeps", saves_gathered_inputs=True)
    keeping = kept(table_of(gpt(h, a), workload, layout, stack).dense_layer())
    sharding = kept(table_of(gpt(h, a), workload, layout).dense_layer())
    assert keeping - sharding == pytest.approx(2 * 2 * s * b * h * (1 - 1 / 4), rel=1e-12)


def test_logits_in_full_precision_are_kept_from_forward_to_backward() -> None:
    """Korthikanti 2022, section 4.3: 4 s b v / t for the logits, 4 s b h / t for final norm and head input."""
    s, b, h, a, t = 2048, 2, 12288, 96, 8
    workload = Workload(seq_len=s, global_batch=b, precision="fp16", fused_attention=False, dropout=True)
    head = table_of(gpt(h, a), workload, Layout(tp=t, sp=True, micro_batch=b)).head()
    assert kept(head) == pytest.approx(4 * s * b * (51200 + h) / t, rel=1e-12)


def test_llama_layer_by_hand() -> None:
    """Llama 2 7B, tp 1, bf16: ten tensors of width h, three of width 11008."""
    s, h, ffn = 4096, 4096, 11008
    layer = table_of(find_model("llama2-7b"), Workload(seq_len=s, global_batch=1), Layout()).dense_layer()
    norm_inputs, column_inputs, qkv_and_output, mlp = 2 * h, 2 * h, 4 * h, 3 * ffn
    assert kept(layer) == 2 * s * (norm_inputs + column_inputs + qkv_and_output + mlp)


def test_single_precision_doubles_what_a_layer_keeps() -> None:
    model = find_model("llama2-7b")
    half, single = (
        kept(table_of(model, Workload(seq_len=512, global_batch=1, precision=p), Layout()).dense_layer())
        for p in ("bf16", "fp32")
    )
    assert single == 2 * half


# --- FLOPs ---


def model_sizes(**changes: Any) -> ModelSpec:  # noqa: ANN401 - fields of ModelSpec
    sizes: dict[str, Any] = {
        "name": "m",
        "hidden_dim": 512,
        "n_layers": 6,
        "n_heads": 16,
        "n_kv_heads": 8,
        "head_dim": 48,
        "ffn_dim": 1536,
        "vocab_size": 4096,
    }
    return ModelSpec(**(sizes | changes))


ROUTED = MoeSpec(experts=8, top_k=3, ffn_dim=256, dense_layers=2)
LATENT = MlaSpec(q_lora_rank=96, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=24)
PLAIN_QUERIES = MlaSpec(q_lora_rank=0, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=24)
MODELS = {
    "gated GQA": model_sizes(),
    "plain MLP": model_sizes(gated_mlp=False, n_kv_heads=16),
    "window": model_sizes(sliding_window=128),
    "tied": model_sizes(tied_embeddings=True),
    "routed": model_sizes(moe=ROUTED),
    "shared experts": model_sizes(moe=MoeSpec(experts=8, top_k=2, ffn_dim=256, shared_ffn_dim=512)),
    "latent": model_sizes(mla=LATENT),
    "latent, plain queries": model_sizes(mla=PLAIN_QUERIES, n_kv_heads=16),
    "latent and routed": model_sizes(mla=LATENT, moe=ROUTED),
}
# Ranks of one model replica's micro batch; ep beyond tp x cp takes data-parallel ranks, whose own tokens count.
LAYOUTS = [
    Layout(),
    Layout(micro_batch=4),
    Layout(tp=4, sp=True),
    Layout(tp=8, sp=True, micro_batch=2),
    Layout(cp=4, cp_kind="ring"),
    Layout(cp=2, cp_kind="ulysses", tp=2, sp=True),
    Layout(cp=8, cp_kind="allgather"),
    Layout(ep=4, dp=4),
    Layout(tp=2, sp=True, ep=2),
    Layout(tp=2, sp=True, cp=2, cp_kind="ring", ep=8, dp=2),
]


def whole_model_flops(model: ModelSpec, workload: Workload, layout: Layout) -> float:
    table = table_of(model, workload, layout)
    dense, moe, head = (forward_flops(part) for part in (table.dense_layer(), table.moe_layer(), table.head()))
    return (model.dense_layers * dense + model.moe_layers * moe + head) * layout.tp * layout.cp


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize("name", MODELS)
def test_flops_of_all_ranks_are_those_of_the_model(name: str, layout: Layout) -> None:
    model, workload = MODELS[name], Workload(seq_len=1024, global_batch=64)
    expected = model.forward_flops_per_sequence(1024) * layout.micro_batch
    assert whole_model_flops(model, workload, layout) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", ["gated GQA", "plain MLP", "routed"])
def test_tensor_parallelism_without_sequence_parallelism_computes_the_same(name: str) -> None:
    """All but the router (on all tokens of every rank) is divided by tp whether the sequence is sharded or not."""
    model, workload = MODELS[name], Workload(seq_len=1024, global_batch=64)
    with_sp = whole_model_flops(model, workload, Layout(tp=4, sp=True))
    without = whole_model_flops(model, workload, Layout(tp=4))
    router = 2.0 * 1024 * model.hidden_dim * model.moe.experts * model.moe_layers if model.moe else 0.0
    assert without - with_sp == pytest.approx(3 * router, rel=1e-9)


@pytest.mark.parametrize("name", ["gated GQA", "window", "latent"])
def test_attention_without_a_mask_counts_the_whole_square(name: str) -> None:
    model, workload = MODELS[name], Workload(seq_len=1024, global_batch=1, causal=False)
    gemms = 2.0 * model.matmul_params_per_token() * 1024
    square = 2.0 * model.n_layers * model.n_heads * (model.qk_head_dim + model.v_head_dim) * 1024**2
    assert whole_model_flops(model, workload, Layout()) == pytest.approx(gemms + square, rel=1e-12)


def test_unfused_attention_computes_the_masked_half_too() -> None:
    model = MODELS["gated GQA"]
    fused, unfused = (
        whole_model_flops(model, Workload(seq_len=1024, global_batch=1, fused_attention=fused), Layout())
        for fused in (True, False)
    )
    half = 2.0 * model.n_layers * model.n_heads * 2 * model.head_dim * 1024**2 / 2
    assert unfused - fused == pytest.approx(half, rel=1e-12)


@given(
    heads=st.sampled_from([(8, 8), (8, 2), (8, 1)]),
    head_dim=st.sampled_from([16, 40, 128]),
    hidden=st.sampled_from([64, 320, 1024]),
    ffn=st.sampled_from([128, 704, 4096]),
    gated=st.booleans(),
    vocab=st.sampled_from([512, 32000]),
    micro=st.integers(1, 8),
    seq=st.sampled_from([64, 256, 8192]),
    cp=st.sampled_from([1, 2, 4]),
)
def test_flops_of_random_dense_models_agree_with_the_model(
    heads: tuple[int, int], head_dim: int, hidden: int, ffn: int, gated: bool, vocab: int, micro: int, seq: int, cp: int
) -> None:
    model = model_sizes(
        n_heads=heads[0],
        n_kv_heads=heads[1],
        head_dim=head_dim,
        hidden_dim=hidden,
        ffn_dim=ffn,
        gated_mlp=gated,
        vocab_size=vocab,
    )
    layout = Layout(cp=cp, cp_kind="ring" if cp > 1 else "none", micro_batch=micro)
    expected = model.forward_flops_per_sequence(seq) * micro
    assert whole_model_flops(model, Workload(seq_len=seq, global_batch=micro), layout) == pytest.approx(expected)


# --- collectives of one Llama layer by hand ---


def traffic(operators: tuple[Operator, ...], layout: Layout) -> dict[tuple[str, str, str], float]:
    """Bytes by kind, dimension and phase, of groups with more than one member."""
    total: dict[tuple[str, str, str], float] = {}
    degrees = {"tp": layout.tp, "cp": layout.cp, "ep": layout.ep}
    for op in operators:
        for call in op.collectives:
            key = (call.kind, call.dimension, call.phase)
            total[key] = total.get(key, 0.0) + float(np.asarray(call.n_bytes * call.count).item())
    return {key: n_bytes for key, n_bytes in total.items() if n_bytes and degrees[key[1]] > 1}


def layer_traffic(name: str, seq_len: int, layout: Layout, stack: Stack = TITAN) -> dict[tuple[str, str, str], float]:
    model, workload = find_model(name), Workload(seq_len=seq_len, global_batch=layout.micro_batch)
    table = table_of(model, workload, layout, stack)
    return traffic(table.moe_layer() if model.moe else table.dense_layer(), layout)


def llama_traffic(layout: Layout, stack: Stack = TITAN) -> dict[tuple[str, str, str], float]:
    return layer_traffic("llama2-7b", 4096, layout, stack)


WHOLE = 2 * 4096 * 4096 * 2
"""[2 sequences, 4096 tokens, hidden 4096] in bf16."""


def test_a_layer_without_sp_reduces_four_times() -> None:
    """Shoeybi et al. 2019 (arXiv:1909.08053), figure 4: two all-reduces in forward, two in backward."""
    assert llama_traffic(Layout(tp=8, micro_batch=2)) == {
        ("all_reduce", "tp", "forward"): 2 * WHOLE,
        ("all_reduce", "tp", "backward"): 2 * WHOLE,
    }


def test_a_layer_with_sp_gathers_and_scatters() -> None:
    """Korthikanti 2022, section 4.2.2: two of each in both directions; inputs gathered again for their weights."""
    assert llama_traffic(Layout(tp=8, sp=True, micro_batch=2)) == {
        ("all_gather", "tp", "forward"): 2 * WHOLE,
        ("reduce_scatter", "tp", "forward"): 2 * WHOLE,
        ("all_gather", "tp", "backward"): (2 + 2) * WHOLE,
        ("reduce_scatter", "tp", "backward"): 2 * WHOLE,
    }


def test_kept_gathered_inputs_are_not_gathered_again() -> None:
    stack = Stack(name="keeps", saves_gathered_inputs=True)
    backward = llama_traffic(Layout(tp=8, sp=True, micro_batch=2), stack)["all_gather", "tp", "backward"]
    assert backward == 2 * WHOLE


def test_ulysses_exchanges_query_key_value_and_output() -> None:
    """arXiv:2309.14509, section 3.2: four tensors of s h / p a rank, each way."""
    assert llama_traffic(Layout(cp=4, cp_kind="ulysses", micro_batch=2)) == {
        ("all_to_all", "cp", "forward"): 4 * WHOLE / 4,
        ("all_to_all", "cp", "backward"): 4 * WHOLE / 4,
    }


def test_ring_passes_keys_and_values_to_each_other_rank() -> None:
    """arXiv:2310.01889: in backward their gradients travel along; our trainer scatters those when all are there."""
    layout, passed = Layout(cp=4, cp_kind="ring", micro_batch=2), 3 * 2 * WHOLE / 4
    assert llama_traffic(layout, MEGATRON) == {
        ("send_recv", "cp", "forward"): passed,
        ("send_recv", "cp", "backward"): 2 * passed,
    }
    assert llama_traffic(layout, TITAN) == {
        ("send_recv", "cp", "forward"): passed,
        ("send_recv", "cp", "backward"): passed,
        ("reduce_scatter", "cp", "backward"): 2 * WHOLE,
    }


def test_all_gather_attention_collects_keys_and_values() -> None:
    assert llama_traffic(Layout(cp=4, cp_kind="allgather", micro_batch=2)) == {
        ("all_gather", "cp", "forward"): 2 * WHOLE,
        ("all_gather", "cp", "backward"): 2 * WHOLE,
        ("reduce_scatter", "cp", "backward"): 2 * WHOLE,
    }


def test_grouped_key_values_make_context_parallel_traffic_smaller() -> None:
    """Llama 3.1 8B has 8 key/value heads for 32 query heads."""
    ring = layer_traffic("llama3.1-8b", 8192, Layout(cp=2, cp_kind="ring"))
    assert ring["send_recv", "cp", "forward"] == 2 * (8192 / 2) * 8 * 128 * 2


def test_ulysses_repeats_keys_and_values_where_there_are_fewer_heads_than_ranks() -> None:
    moved = layer_traffic("llama3.1-8b", 8192, Layout(cp=16, cp_kind="ulysses"))
    query_and_output, key_and_value = 2 * 32 * 128, 2 * 16 * 128
    assert moved["all_to_all", "cp", "forward"] == 8192 / 16 * (query_and_output + key_and_value) * 2


def test_experts_receive_and_return_top_k_copies_of_each_token() -> None:
    """Mixtral 8x7B: 2 of 8 experts a token; the exchange carries each token twice, there and back.

    Each copy has its weight with it (2 bytes, and its gradient), and each rank tells how many come (8 bytes an expert).
    """
    moved = layer_traffic("mixtral-8x7b", 4096, Layout(ep=8, dp=8))
    once, weights, counts = 4096 * 2 * 4096 * 2, 4096 * 2 * 2, 8 * 8
    assert moved == {
        ("all_to_all", "ep", "forward"): 2 * once + weights + counts,
        ("all_to_all", "ep", "backward"): 2 * once + weights,
    }


def test_experts_cut_by_tp_exchange_nothing_over_ep() -> None:
    """As a dense MLP of width top_k x ffn_dim: the same four all-reduces, and one of the weights' gradients."""
    whole, weights = 4096 * 4096 * 2, 4096 * 2 * 2
    assert layer_traffic("mixtral-8x7b", 4096, Layout(tp=4)) == {
        ("all_reduce", "tp", "forward"): 2 * whole,
        ("all_reduce", "tp", "backward"): 2 * whole + weights,
    }


def test_experts_cut_by_tp_gather_tokens_weights_and_choices_once() -> None:
    """The gathered tokens are kept, so that only attention's input is gathered again (Korthikanti 2022)."""
    whole, weights, choices = 4096 * 4096 * 2, 4096 * 2 * 2, 4096 * 2 * 8
    assert layer_traffic("mixtral-8x7b", 4096, Layout(tp=4, sp=True)) == {
        ("all_gather", "tp", "forward"): 2 * whole + weights + choices,
        ("all_gather", "tp", "backward"): 3 * whole,
        ("reduce_scatter", "tp", "forward"): 2 * whole,
        ("reduce_scatter", "tp", "backward"): 2 * whole + weights,
    }


def test_a_loss_in_chunks_gathers_its_input_once_and_tells_three_numbers_a_token() -> None:
    """Of each chunk a maximum, then a sum of exponents and the label's logit, in full precision."""
    model, workload = find_model("llama2-7b"), Workload(seq_len=4096, global_batch=2)
    head = table_of(model, workload, Layout(tp=8, sp=True, micro_batch=2), TITAN).head()
    assert traffic(head, Layout(tp=8)) == {
        ("all_gather", "tp", "forward"): WHOLE,
        ("reduce_scatter", "tp", "forward"): WHOLE,
        ("all_reduce", "tp", "forward"): 3 * 4 * 2 * 4096,
    }
    calls = [float(np.asarray(c.count).item()) for op in head for c in op.collectives if c.kind == "all_reduce"]
    assert calls[1:] == [8, 8]


@pytest.mark.parametrize("changes", [{"sliding_window": 128}, {"position": "alibi"}])
def test_our_kernel_computes_what_a_bias_hides(changes: dict[str, Any]) -> None:
    """A window or ALiBi is a bias that the kernel adds to the whole square of scores."""
    model, workload = model_sizes(**changes), Workload(seq_len=1024, global_batch=1)
    (core,) = (op for op in table_of(model, workload, Layout(), TITAN).dense_layer() if op.name == "attention")
    assert float(np.asarray(core.attention_flops).item()) == 2.0 * 16 * (48 + 48) * 1024**2


@pytest.mark.parametrize("name", ["deepseek-v3", "deepseek-v2-lite"])
def test_latent_attention_without_sp_reduces_the_gradient_of_what_its_heads_read(name: str) -> None:
    """Heads are cut by tp and read the same latents, so each rank has but a part of the latents' gradient."""
    model = find_model(name)
    assert model.mla is not None
    workload = Workload(seq_len=4096, global_batch=1)
    layer = table_of(model, workload, Layout(tp=8)).dense_layer()
    (up,) = (op for op in layer if op.name == "latent_up")
    reduced = sum(float(np.asarray(c.n_bytes).item()) for c in up.collectives if c.kind == "all_reduce")
    queries = model.mla.q_lora_rank or model.hidden_dim
    assert reduced == 4096 * 2 * (queries + model.mla.kv_lora_rank + model.mla.qk_rope_head_dim)


@pytest.mark.parametrize(("stack", "kept_bytes"), [(TITAN, 4), (Stack(name="as the kernel makes them"), 64)])
def test_softmax_statistics_are_those_that_the_stack_keeps_of_the_kernels(stack: Stack, kept_bytes: int) -> None:
    s, b, h, a = SIZES[0]
    workload = Workload(seq_len=s, global_batch=b, precision="fp16")
    shapes = Shapes.of(Layouts.of([Layout(micro_batch=b)]), workload)
    table = OperatorTable(gpt(h, a), workload, stack, shapes, softmax_statistics_bytes=64.0)
    (found,) = [t for op in table.dense_layer() for t in op.saved if t.name == "softmax_statistics"]
    assert found.n_bytes.item() == kept_bytes * s * b * a


def test_statistics_that_are_made_again_are_there_in_attentions_backward_alone() -> None:
    s, b, h, a = SIZES[0]
    workload = Workload(seq_len=s, global_batch=b, precision="fp16")
    layouts = Layouts.of([Layout(tp=2, sp=True, micro_batch=b)])
    shapes = Shapes.of(layouts, workload)
    operators = OperatorTable(gpt(h, a), workload, TITAN, shapes).dense_layer()
    plain, npu = (BackwardOfLayer(gpt(h, a), shapes, 2, n).follow(operators, frozenset()) for n in (0.0, 64.0))
    more = [there.alive - here.alive for here, there in zip(plain.instants, npu.instants, strict=True)]
    assert sorted(float(m.item()) for m in more) == [0.0] * (len(more) - 1) + [64 * s * b * a / 2]
