"""Times of checkpoints, and their order of writes."""

import asyncio
import copy
from pathlib import Path
from typing import Any

from rlscale.checkpoint.pending_groups import load_dropped, load_groups, save_dropped, save_groups
from rlscale.checkpoint.store import Checkpoint
from rlscale.control.file_io import write_in_thread
from rlscale.control.loop_config import LoopConfig, LoopDeps, Progress
from rlscale.control.producer import Producer, ProducerState


class CheckpointSchedule:
    """Saves at `checkpoint.save_interval`, on a `StopRequest` and at the end of a run.

        save ──> trainers and pending groups write into an unfinished folder
                 metrics are written
        commit ──> the folder gets its name: from now on it is a checkpoint

    A checkpoint counts the metrics as written, so that they come first: a kill between the two repeats a rollout with
    its metrics; the other order would lose them.
    """

    def __init__(self, config: LoopConfig, deps: LoopDeps, progress: Progress, producer: Producer) -> None:
        self._config, self._deps, self._progress, self._producer = config, deps, progress, producer
        self._committing: asyncio.Task[None] | None = None
        self._saved_source: dict[str, Any] = {}

    def load(self, checkpoint: Checkpoint) -> None:
        """Restores the position of the prompts and the groups that were not trained on."""
        self._deps.source.load_state_dict(checkpoint.state["source"])
        self._producer.restore(load_groups(checkpoint.folder), load_dropped(checkpoint.folder))

    @property
    def is_at_interval(self) -> bool:
        interval = self._config.run.checkpoint.save_interval
        return interval is not None and self._config.ends_interval(interval, self._progress.next_rollout)

    @property
    def is_due(self) -> bool:
        is_last = self._config.is_done(self._progress) and self._config.run.checkpoint.save_final
        return self.is_at_interval or is_last or self._deps.stop.is_set

    async def save(self, state: ProducerState) -> None:
        """Writes the trainers' state and pending groups. They are a checkpoint only after `commit`.

        Args:
            state: of the producer when the page of the ledger was closed that this checkpoint counts.
        """
        await self.finish()  # one save at a time
        self._saved_source = state.source
        done, trainers = self._progress.next_rollout, self._deps.trainers
        folder = self._deps.store.begin(done)
        await trainers.save(folder)
        save_hf = self._config.run.checkpoint.save_hf
        if save_hf is not None:
            await trainers.export_hf(Path(save_hf.replace("{rollout_id}", str(done))))
        # A resumed run reuses these groups, and finishes those that are not.
        await write_in_thread(save_groups, folder, state.pending)
        await write_in_thread(save_dropped, folder, state.dropped)

    async def commit(self, tasks: asyncio.TaskGroup) -> None:
        """Makes a checkpoint of the saved files: now, or with a background save once all of them are on disk."""
        # A copy: other tasks change the state while it is written.
        state = copy.deepcopy({"progress": self._progress.state_dict(), "source": self._saved_source})
        number = self._progress.next_rollout
        if self._config.saves_in_background:
            self._committing = tasks.create_task(self._commit_written(number, state))
        else:
            # Not in the event loop: a slow disk would stall requests and signals.
            await write_in_thread(self._deps.store.commit, number, state)

    async def finish(self) -> None:
        """Waits for the checkpoint that a background save is still writing."""
        if self._committing is not None:
            await self._committing

    async def _commit_written(self, number: int, state: dict[str, Any]) -> None:
        await self._deps.trainers.finish_saving()
        await write_in_thread(self._deps.store.commit, number, state)
