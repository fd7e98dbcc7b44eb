"""What the channels through a shared folder have in common."""

import shutil
from pathlib import Path

from rlscale.weights.channel import EngineChannel, MakeEngine


class FolderChannel(EngineChannel):
    """Brings weights to engines through a folder that both sides see. See EngineChannel.

    Args:
        folder: of this channel alone; what is in it is removed.
        bucket_bytes: most bytes of one file of a full folder.
        model_folder: a Hugging Face folder whose configuration and tokenizer go with the weights.
    """

    def __init__(
        self,
        *,
        make_engine: MakeEngine,
        rank: int,
        folder: Path,
        bucket_bytes: int,
        timeout_s: float,
        model_folder: Path | None = None,
    ) -> None:
        super().__init__(make_engine=make_engine, rank=rank, timeout_s=timeout_s)
        self._folder, self._bucket_bytes, self._model_folder = folder, bucket_bytes, model_folder

    def _open(self) -> None:
        # What new engines hold is not known, nor what an earlier trainer left here.
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
