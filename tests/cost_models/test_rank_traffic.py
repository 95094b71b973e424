"""Messages of one rank against counts by hand, and by what all ranks of a layout must agree on."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models.calibration import calibration_of
from cost_models.catalog import find_cluster, find_model
from cost_models.layout import PLACEMENTS, Layout
from cost_models.model import ModelSpec
from cost_models.rank_messages import RankGroups, RankMessage
from cost_models.rank_parameters import chunk_parameters
from cost_models.rank_shards import own_numel, padded_numel
from cost_models.rank_traffic import rank_messages
from cost_models.setting import Setting
from cost_models.stack import TITAN
from cost_models.workload import Workload

LLAMA = replace(find_model("llama2-7b"), n_layers=2)
SEQ = 4096
HIDDEN = SEQ * 4096 * 2
"""One sequence of hidden states in bf16."""
LAYER = 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096
TABLE = 32000 * 4096


def messages(model: ModelSpec, layout: Layout, rank: int = 0, precision: str = "bf16") -> list[RankMessage]:
    batch = layout.dp * layout.micro_batch * layout.accumulation
    setting = Setting(
        model=model,
        workload=Workload(seq_len=SEQ, global_batch=batch, precision=precision),
        cluster=find_cluster("atlas-800t-a2"),
        stack=TITAN,
        calibration=calibration_of("local-cpu"),
        n_devices=layout.devices,
    )
    return list(rank_messages(setting, layout, rank))


def counts(found: list[RankMessage]) -> dict[tuple[str, str], tuple[int, int]]:
    return {(m.group, m.kind): (m.count, m.n_bytes) for m in found}


def test_one_device_sends_nothing() -> None:
    assert messages(LLAMA, Layout()) == []


def test_a_step_of_tensor_parallel_ranks_by_hand() -> None:
    """Each layer: two gathers and two scatters forward, four and two backward; head one each; embedding likewise.

    The loss tells three numbers a token, four messages of two norms a layer and the final one are summed once.
    """
    found = counts(messages(LLAMA, Layout(tp=2, sp=True)))
    chunks, norms = SEQ // 1024, 5 * 4096
    assert found == {
        ("tp", "all_gather"): (2 * 6 + 1 + 1, 14 * HIDDEN),
        ("tp", "reduce_scatter"): (2 * 4 + 1 + 1, 10 * HIDDEN),
        ("tp", "all_reduce"): (2 * chunks + 1, 3 * SEQ * 4 + norms * 4),
        ("world", "all_reduce"): (1, 16),
    }


def test_sharded_weights_are_gathered_once_a_step_and_under_zero_3_twice_a_micro_batch() -> None:
    """Embedding, two layers and head with its norm are a message each; gradients travel in full precision."""
    every = 2 * TABLE + 2 * LAYER + 4096
    once = counts(messages(LLAMA, Layout(dp=4, dp_shard=4, zero=2)))
    assert once["dp_shard", "all_gather"] == (4, every * 2)
    assert once["dp_shard", "reduce_scatter"] == (4, every * 4)
    thrice = counts(messages(LLAMA, Layout(dp=4, dp_shard=4, zero=3)))
    assert thrice["dp_shard", "all_gather"] == (4 + 2, (every + 2 * LAYER) * 2)
    assert thrice["dp_shard", "reduce_scatter"] == once["dp_shard", "reduce_scatter"]


def test_gradients_reduced_every_micro_batch_travel_as_often() -> None:
    layout = Layout(dp=2, dp_shard=2, zero=2, accumulation=3)
    last, every = (
        counts(messages(LLAMA, replace(layout, reduce_gradients=when)))["dp_shard", "reduce_scatter"]
        for when in ("last", "every")
    )
    assert every == (3 * last[0], 3 * last[1])


def test_replicas_of_shards_sum_what_a_shard_holds() -> None:
    found = counts(messages(LLAMA, Layout(dp=8, dp_shard=4, zero=1)))
    scattered = found["dp_shard", "reduce_scatter"]
    assert found["dp_replicate", "all_reduce"] == (scattered[0], scattered[1] // 4)


def test_copies_sum_all_gradients_in_buckets() -> None:
    """A bucket closes at 25 MiB, so each large matrix makes one; what they carry is every gradient once."""
    found = counts(messages(LLAMA, Layout(dp=2)))["dp_replicate", "all_reduce"]
    assert found[1] == (2 * TABLE + 2 * LAYER + 4096) * 4
    assert 4 <= found[0] <= 2 * 7 + 2


def test_neighbours_exchange_hidden_states_and_their_gradients() -> None:
    layout = Layout(pp=2, schedule="1f1b", accumulation=4)
    for rank in range(2):
        found = counts(messages(LLAMA, layout, rank))
        assert found["pp", "send"] == found["pp", "recv"] == (4, 4 * HIDDEN)


def test_a_folded_pipeline_keeps_its_turn_on_one_rank() -> None:
    """zb-v: the last rank holds the two middle stages, the first one both ends."""
    model = replace(LLAMA, n_layers=4)
    layout = Layout(pp=2, vpp=2, schedule="zb-v", accumulation=4)
    assert [layout.stages_on(rank) for rank in range(2)] == [(0, 3), (1, 2)]
    for rank in range(2):
        assert counts(messages(model, layout, rank))["pp", "send"] == (2 * 4, 2 * 4 * HIDDEN)


def test_only_the_ends_of_a_pipeline_sum_a_tied_table() -> None:
    model = replace(LLAMA, n_layers=4, tied_embeddings=True)
    layout = Layout(pp=4, schedule="1f1b", accumulation=4)
    found = [counts(messages(model, layout, rank)).get(("ends", "all_reduce")) for rank in range(4)]
    assert found == [(1, TABLE * 4), None, None, (1, TABLE * 4)]


def test_recomputation_sends_forward_again() -> None:
    plain, redone = (counts(messages(LLAMA, Layout(tp=2, sp=True, recompute=kind))) for kind in ("none", "full"))
    assert redone["tp", "all_gather"][0] - plain["tp", "all_gather"][0] == 2 * 2
    # Of each of the 2 layers, the attention's output alone: the down projection's is behind the last tensor kept.
    assert redone["tp", "reduce_scatter"][0] - plain["tp", "reduce_scatter"][0] == 2 * 1


LAYOUTS = [
    Layout(tp=2, sp=True, dp=4, dp_shard=2, zero=3, accumulation=2),
    Layout(pp=2, dp=2, dp_shard=2, tp=2, zero=2, schedule="1f1b", accumulation=4, placement=PLACEMENTS[1]),
    Layout(cp=2, cp_kind="ring", dp=2, dp_shard=2, zero=1),
    Layout(pp=2, vpp=2, dp=2, schedule="interleaved", accumulation=4),
    Layout(tp=2, sp=True, ep=4, dp=4, dp_shard=4, zero=2, recompute="full"),
    Layout(cp=2, cp_kind="ulysses", tp=2, sp=True, ep=8, dp=4),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_all_members_of_a_group_tell_the_same_of_it(layout: Layout) -> None:
    """A collective that one member forgets would hang; in a pipeline each stage sends what the others receive."""
    model = replace(find_model("mixtral-8x7b"), n_layers=4) if layout.ep > 1 else replace(LLAMA, n_layers=4)
    told: Counter[RankMessage] = Counter()
    sent: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for rank in range(layout.devices):
        for message in messages(model, layout, rank):
            assert rank in message.ranks
            if message.kind in {"send", "recv"}:
                sent[message.group, message.ranks] += message.n_bytes * (1 if message.kind == "send" else -1)
            elif message.group != "tp":  # the ends of a pipeline say more over tp, each all members the same
                told[message] += 1
    assert told
    assert all(count == len(message.ranks) for message, count in told.items())
    assert set(sent.values()) <= {0}


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize("group", ["tp", "cp", "ep", "pp", "dp_shard", "dp_replicate", "expert_shard", "sequence"])
def test_groups_part_the_ranks(layout: Layout, group: str) -> None:
    found = {RankGroups(layout, rank).ranks(group) for rank in range(layout.devices)}
    assert sorted(rank for ranks in found for rank in ranks) == list(range(layout.devices))


@pytest.mark.parametrize(
    "name", ["llama2-7b", "llama3.1-8b", "gpt3-175b", "mixtral-8x7b", "deepseek-v3", "deepseek-v2-lite"]
)
def test_parameters_of_the_whole_model_are_those_that_are_published(name: str) -> None:
    """The bias of a router is a buffer of the trainer."""
    model = find_model(name)
    found = sum(p.numel for p in chunk_parameters(model, Layout(), 0))
    biases = model.moe.experts * model.moe.router_bias * model.moe_layers if model.moe else 0
    assert found == model.total_params - biases


@given(
    shape=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    shards=st.integers(1, 16),
)
def test_shards_hold_all_elements_and_padding_fills_them_up(shape: list[int], shards: int) -> None:
    held = [own_numel(shape, shards, place) for place in range(shards)]
    total = 1
    for length in shape:
        total *= length
    assert sum(held) == total
    assert padded_numel(shape, shards) == shards * max(held)
