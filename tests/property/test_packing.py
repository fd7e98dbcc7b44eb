"""Packing loses no token, and the micro-batches of a step change neither its loss nor its gradient."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlscale.training.distributed import join_world, leave_world
from rlscale.training.fsdp.backend import FsdpBackend
from rlscale.training.packing.microbatch import pack
from tests.unit.training.rollouts import make_batch, plan, spec, tiny_model

LENGTHS = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40)), min_size=1, max_size=12)
CPU = torch.device("cpu")


@given(lengths=LENGTHS, data=st.data())
def test_packing_loses_and_moves_no_token(lengths: list[tuple[int, int]], data: st.DataObject) -> None:
    batch = make_batch(lengths)
    chosen = data.draw(st.lists(st.integers(0, len(lengths) - 1), min_size=1, unique=True))
    micro = pack(batch, chosen, device=CPU)
    assert sorted(micro.sample_indices.tolist()) == sorted(chosen)
    starts = micro.packing.cu_seqlens.tolist()
    for i, start, stop in zip(micro.sample_indices, starts[:-1], starts[1:], strict=True):
        expected = batch.tokens[batch.offsets[i] : batch.offsets[i + 1]]
        assert micro.input_ids[0, start:stop].tolist() == expected.tolist()
        assert micro.position_ids[0, start:stop].tolist() == list(range(len(expected)))
    trainable = sorted(t for i in chosen for t in range(batch.offsets[i], batch.offsets[i + 1]) if batch.loss_mask[t])
    if trainable:
        assert sorted(micro.batch_rows.tolist()) == trainable
        assert micro.targets.tolist() == batch.tokens[micro.batch_rows].tolist()
        owner = np.searchsorted(batch.offsets, micro.batch_rows, side="right") - 1
        assert micro.sample_indices[micro.layout.sample_ids_T.numpy()].tolist() == owner.tolist()


@given(lengths=LENGTHS)
def test_buckets_cover_every_row_once(lengths: list[tuple[int, int]]) -> None:
    batch = make_batch(lengths)
    layout = pack(batch, range(len(lengths)), device=CPU).packing
    ends = [0]
    for bucket in layout.buckets:
        assert bucket.start == ends[-1]
        ends.append(bucket.stop)
        num_slots = bucket.num_samples * bucket.max_len
        assert num_slots * 4 <= (bucket.stop - bucket.start) * 5 + bucket.num_samples * 32  # little padding
        if bucket.slots is not None and bucket.rows is not None:
            assert len(bucket.rows) == num_slots
            assert bucket.rows[bucket.slots].tolist() == list(range(bucket.stop - bucket.start))
    assert ends[-1] == len(batch.tokens)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FsdpBackend]:
    join_world(0, 1, "127.0.0.1", 0, "gloo", 60.0)
    model = tiny_model(tmp_path_factory.mktemp("models"))
    yield FsdpBackend(spec(model, lr=0.0, clip_grad=0.0, adam_beta1=0.0), rank=0, world_size=1)
    leave_world()


def loss_and_gradient(trainer: FsdpBackend, batch_seed: int, cut: list[list[int]]) -> dict[str, torch.Tensor]:
    batch = make_batch([(3, 2), (2, 7), (5, 20), (1, 1), (4, 66), (2, 0), (3, 5), (6, 2)], seed=batch_seed)
    result = trainer.train(batch, [plan(batch, [cut])]).steps[0]
    # With beta1 = 0 Adam's first moment is the gradient of the step.
    named = trainer.policy.model.named_parameters()
    gradients = {name: trainer.policy.optimizer.state[p]["exp_avg"].clone() for name, p in named}
    return gradients | {"loss": torch.tensor(result["loss"]), "entropy": torch.tensor(result["entropy"])}


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.slow
def test_cuts_keep_loss_and_gradient(trainer: FsdpBackend, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(8)))
    bounds = sorted(data.draw(st.lists(st.integers(0, 8), max_size=5)))  # equal bounds make empty micro-batches
    cut = [list(order[a:b]) for a, b in zip([0, *bounds], [*bounds, 8], strict=True)]
    expected = loss_and_gradient(trainer, 0, [list(range(8))])
    for name, got in loss_and_gradient(trainer, 0, cut).items():
        torch.testing.assert_close(got, expected[name], atol=1e-6, rtol=1e-4, msg=f"{name} for {cut}")
