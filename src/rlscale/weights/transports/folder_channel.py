"""What the channels through a shared folder have in common."""

import shutil
from pathlib import Path

from rlscale.weights.multi_sender import ShareChannel
from rlscale.weights.sender_group import SenderGroup
from rlscale.weights.sync import MakeEngine


class FolderChannel(ShareChannel):
    """Brings weights to engines through a folder that both sides see. See ShareChannel.

    Args:
        folder: of this channel alone; what is in it is removed.
        bucket_bytes: most bytes of one file of a full folder.
        model_folder: a Hugging Face folder whose configuration and tokenizer go with the weights.
    """

    def __init__(
        self,
        *,
        make_engine: MakeEngine,
        team: SenderGroup,
        folder: Path,
        bucket_bytes: int,
        timeout_s: float,
        model_folder: Path | None = None,
    ) -> None:
        super().__init__(make_engine=make_engine, team=team, timeout_s=timeout_s)
        self._folder, self._bucket_bytes, self._model_folder = folder, bucket_bytes, model_folder

    def _open(self) -> None:
        if self._rank == 0:
            # What new engines hold is not known, nor what an earlier trainer left here.
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder.mkdir(parents=True)
