"""Layouts: places of ranks, layers of stages, and every misfit by its key."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl360.errors import ConfigError
from rl360.models.megatron.layout import Layout, Place

MODEL = SimpleNamespace(
    num_layers=12, num_heads=8, num_kv_heads=4, hidden_size=64, intermediate_size=96, vocab_size=1000
)
sizes = st.sampled_from([1, 2, 3, 4])


def test_data_parallelism_takes_what_is_left():
    layout = Layout.of(64, tensor=2, context=4, model=MODEL)
    assert (layout.data, layout.world_size, layout.sequence_parallel) == (8, 64, True)
    assert Layout.of(4).sequence_parallel is False  # one tensor rank has nobody to share tokens with


@given(sizes, sizes, sizes, sizes)
def test_places_are_megatrons_order_and_each_rank_has_its_own(tensor, context, data, pipeline):
    layout = Layout(tensor=tensor, context=context, data=data, pipeline=pipeline)
    places = [layout.place(rank) for rank in range(layout.world_size)]
    assert len(set(places)) == layout.world_size
    assert [layout.rank(place) for place in places] == list(range(layout.world_size))
    # tp-cp-dp-pp: neighbours differ in the tensor index, a whole stage comes before the next
    ordered = sorted(places, key=lambda p: (p.pipeline, p.data, p.context, p.tensor))
    assert places == ordered


def test_place_by_hand():
    assert Layout(tensor=2, context=2, data=2, pipeline=2).place(13) == Place(tensor=1, context=0, data=1, pipeline=1)


@given(st.sampled_from([1, 2, 4]), st.sampled_from([None, 2, 3]))
def test_stages_hold_every_layer_once_in_order(pipeline, virtual):
    layout = Layout(pipeline=pipeline, virtual_pipeline=virtual)
    stages = [layout.layers(24, rank, chunk) for chunk in range(layout.chunks) for rank in range(pipeline)]
    assert [layer for stage in stages for layer in stage] == list(range(24))


def test_interleaved_layers_by_hand():
    layout = Layout(pipeline=2, virtual_pipeline=2)
    held = [list(layout.layers(8, rank, chunk)) for rank in (0, 1) for chunk in (0, 1)]
    assert held == [[0, 1], [4, 5], [2, 3], [6, 7]]


@pytest.mark.parametrize(
    ("tensor", "padded"),
    [(1, 250624), (2, 250624), (4, 250880), (8, 250880)],  # facts of K2 Horizon
)
def test_padded_vocabulary(tensor, padded):
    assert Layout(tensor=tensor).padded_vocab(250624) == padded


def test_multiples():
    assert Layout().token_multiple == 1
    assert Layout(tensor=2).token_multiple == 2
    assert Layout(tensor=2, context=4).token_multiple == 16
    assert Layout(pipeline=4).micro_batch_multiple == 1
    assert Layout(pipeline=4, virtual_pipeline=2).micro_batch_multiple == 4


def test_every_misfit_is_named_at_once():
    with pytest.raises(ConfigError) as caught:
        Layout.of(10, tensor=3, pipeline=5, virtual_pipeline=2, model=MODEL)
    text = "\n".join(caught.value.problems)
    for part in (
        "10 is no multiple of tensor 3 x pipeline 5 x context 1 = 15",
        "3 does not divide the model's 8 attention heads",
        "3 does not divide the model's 4 key/value heads",
        "pipeline_parallel_size 5 x virtual_pipeline_parallel_size 2 does not divide the model's 12 layers",
    ):
        assert part in text
    assert len(caught.value.problems) == 4


@pytest.mark.parametrize("bad", [{"num_gpus": 0}, {"num_gpus": 4, "tensor": 0}, {"num_gpus": 4, "virtual_pipeline": 2}])
def test_sizes_without_meaning(bad):
    with pytest.raises(ConfigError, match=r"trainer\."):
        Layout.of(**bad)
