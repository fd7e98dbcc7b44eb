"""The cut of a layout to what one machine runs."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlscale.config import load_config_with_notes
from rlscale.errors import ConfigError
from rlscale.rehearsal.cut_layout import MAX_PROCESSES, LayoutSizes, cut_layout, list_cuts, read_sizes


def sizes_of(experiment: str) -> LayoutSizes:
    return read_sizes(load_config_with_notes([f"experiment={experiment}"], to_run=False).config)


def test_a_layout_that_fits_is_not_cut() -> None:
    sizes = sizes_of("qwen3_30b_a3b_gspo")
    assert (sizes.ranks, sizes.tensor, sizes.expert, sizes.data, sizes.processes) == (8, 4, 8, 2, 9)
    assert cut_layout(sizes) == sizes and list_cuts(sizes, sizes) == []


def test_whole_replicas_go_first_and_two_nodes_stay() -> None:
    sizes = LayoutSizes(nodes=8, gpus=8, gpus_per_node=8, engines=64, colocate=True)
    cut = cut_layout(sizes)
    assert (cut.nodes, cut.gpus, cut.engines, cut.processes) == (2, 8, 16, 32)
    assert cut.ranks_per_model == sizes.ranks_per_model


def test_one_large_replica_loses_context_then_tensor_and_expert_ranks() -> None:
    sizes = sizes_of("deepseek_r1")
    assert (sizes.ranks, sizes.engines, sizes.servers) == (128, 2, 16)
    cut = cut_layout(sizes)
    assert (cut.pipeline, cut.context, cut.tensor, cut.expert) == (4, 1, 2, 4)
    assert (cut.ranks, cut.nodes, cut.engines, cut.servers) == (16, 2, 1, 2)
    assert ("context-parallel size", 4, 1) in list_cuts(sizes, cut)


# Sizes of context, tensor, expert tensor and expert parallelism; each limit is just too small for the sizes before.
@pytest.mark.parametrize(
    ("sizes", "max_processes", "expected"),
    [
        ((4, 4, 1, 1), 31, (2, 4, 1, 1)),
        ((4, 4, 1, 1), 15, (1, 4, 1, 1)),
        ((4, 4, 1, 1), 7, (1, 2, 1, 1)),
        ((4, 4, 4, 4), 31, (1, 2, 2, 4)),
        ((4, 4, 4, 4), 15, (1, 2, 2, 2)),
        ((4, 4, 4, 4), 7, (1, 2, 2, 1)),
        ((4, 4, 4, 4), 3, (1, 1, 1, 1)),
    ],
)
def test_context_is_divided_first_then_tensor_then_expert_ranks(
    sizes: tuple[int, ...], max_processes: int, expected: tuple[int, ...]
) -> None:
    names = ("context", "tensor", "expert_tensor", "expert")
    whole = replace(LayoutSizes(pipeline=2, nodes=8, gpus=8, gpus_per_node=8), **dict(zip(names, sizes, strict=True)))
    cut = cut_layout(whole, max_processes=max_processes)
    assert tuple(getattr(cut, name) for name in names) == expected


def test_a_separate_critic_is_cut_with_the_policy() -> None:
    sizes = LayoutSizes(
        nodes=4, gpus=8, gpus_per_node=8, engines=8, gpus_per_engine=1, critic_nodes=4, critic_gpus=8, tensor=2
    )
    cut = cut_layout(sizes)
    assert cut.processes <= MAX_PROCESSES and cut.critic_ranks and cut.critic_ranks % 2 == 0 and cut.tensor == 2


def test_too_many_stages_are_refused_by_name() -> None:
    sizes = LayoutSizes(nodes=8, gpus=8, gpus_per_node=8, pipeline=64)
    with pytest.raises(ConfigError, match=r"pipeline_model_parallel_size must be below 32"):
        cut_layout(sizes)


POWERS = st.sampled_from([1, 2, 4, 8])


@st.composite
def layouts(draw: st.DrawFn) -> LayoutSizes:
    """Valid layouts of up to 64 nodes, on equal nodes of 8 GPUs."""
    sizes = LayoutSizes(
        tensor=draw(POWERS),
        pipeline=draw(POWERS),
        context=draw(st.sampled_from([1, 2, 3, 4])),
        expert=draw(st.sampled_from([1, 2, 8, 32])),
        expert_tensor=draw(st.sampled_from([1, 2])),
        nodes=1,
        gpus=8,
        gpus_per_node=8,
        colocate=draw(st.booleans()),
        gpus_per_engine=draw(st.sampled_from([1, 2, 8, 16])),
    )
    wanted = -(-sizes.ranks_per_replica // 8) * draw(st.sampled_from([1, 2, 3]))
    nodes = next(n for n in range(wanted, 64 * wanted) if n * 8 % sizes.ranks_per_replica == 0)
    sizes = replace(sizes, nodes=nodes)
    most = sizes.ranks // sizes.gpus_per_engine if sizes.colocate else 8
    return replace(sizes, engines=draw(st.integers(min_value=0, max_value=most)))


@pytest.mark.slow
@settings(deadline=None)
@given(layouts())
def test_every_cut_is_a_valid_layout_of_at_most_32_processes(sizes: LayoutSizes) -> None:
    cut = cut_layout(sizes)
    assert cut.processes <= MAX_PROCESSES and cut.pipeline == sizes.pipeline
    for name in ("tensor", "context", "expert", "expert_tensor", "gpus", "gpus_per_engine"):
        assert getattr(sizes, name) % getattr(cut, name) == 0, name
    assert cut.tensor == sizes.tensor or cut.context == 1
    assert cut.expert == sizes.expert or (cut.context == 1 and max(cut.tensor, cut.expert_tensor) <= 2)
    assert cut.tensor > 1 or sizes.tensor == 1 or cut.expert == 1
    assert cut.ranks % cut.ranks_per_model == 0
    assert cut.ranks // cut.pipeline % (cut.expert * cut.expert_tensor) == 0
    assert bool(cut.engines) == bool(sizes.engines) and cut.engines <= sizes.engines
    if cut.engines and cut.colocate:
        assert cut.engines * cut.gpus_per_engine <= cut.ranks
    if cut.engines and cut.gpus_per_engine > cut.gpus_per_node:
        assert cut.gpus_per_engine % cut.gpus_per_node == 0
    # A cut is never made where it is not needed.
    assert cut == sizes or sizes.processes > MAX_PROCESSES


def test_prefill_and_decode_engines_are_cut_together_and_keep_their_ratio() -> None:
    sizes = LayoutSizes(
        nodes=1, gpus=8, gpus_per_node=8, engines=20, gpus_per_engine=8, prefill_engines=20, gpus_per_prefill_engine=4
    )
    assert (sizes.servers, sizes.rollout_gpus, sizes.total_gpus) == (40, 240, 248)
    cut = cut_layout(sizes)
    assert cut.processes <= MAX_PROCESSES and min(cut.engines, cut.prefill_engines) >= 2
    assert (cut.gpus_per_engine, cut.gpus_per_prefill_engine) == (8, 4)
    small = cut_layout(replace(sizes, gpus_per_engine=32, gpus_per_prefill_engine=16, gpus_per_node=4), max_processes=5)
    assert (small.gpus_per_engine, small.gpus_per_prefill_engine) in [(8, 4), (4, 2)]
    assert small.engines and small.prefill_engines


def test_colocated_decode_engines_begin_where_they_fit_on_a_node() -> None:
    sizes = LayoutSizes(
        nodes=8,
        gpus=8,
        gpus_per_node=8,
        engines=8,
        gpus_per_engine=4,
        prefill_engines=16,
        gpus_per_prefill_engine=2,
        colocate=True,
    )
    cut = cut_layout(sizes, max_processes=24)
    assert cut.prefill_engines % 2 == 0 and cut.rollout_gpus <= cut.ranks
