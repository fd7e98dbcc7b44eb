"""Trainer logprobs of requested samples."""

from dataclasses import replace

import torch

from rlscale.training.loss.logprob_collector import LogprobCollector
from rlscale.training.packing.microbatch import pack
from tests.unit.training.rollouts import make_batch

CPU = torch.device("cpu")


def test_only_trainable_tokens_of_requested_samples_are_kept() -> None:
    # Rows of the responses: 2 3 4 | 6 | 9 10 | 12 13; the samples are not requested in their order.
    batch = replace(make_batch([(2, 3), (1, 1), (2, 2), (1, 2)]), logprob_samples=(2, 0))
    batch.loss_mask[3] = 0
    collector = LogprobCollector(batch)
    for samples in ([0, 3], [1, 2]):
        micro = pack(batch, samples, device=CPU)
        collector.add(micro, torch.from_numpy(-1.0 * micro.batch_rows))
    found = {int(i): float(v) for indices, values in collector._found for i, v in zip(indices, values, strict=True)}
    # Of sample 2 the tokens 0 and 1, then those of sample 0, without the masked one.
    assert found == {0: -9.0, 1: -10.0, 2: -2.0, 4: -4.0}


def test_nothing_is_kept_without_a_request() -> None:
    batch = make_batch([(2, 3)])
    collector = LogprobCollector(batch)
    collector.add(pack(batch, [0], device=CPU), None)
    assert collector.gather(CPU) == {}
