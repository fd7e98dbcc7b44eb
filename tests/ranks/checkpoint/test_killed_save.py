"""A process that is killed while it saves a checkpoint."""

import subprocess
import sys
from pathlib import Path

from rlscale.checkpoint.store import CheckpointStore

KILLED = """
import os, sys
from pathlib import Path
from rlscale.checkpoint.store import CheckpointStore

store = CheckpointStore(Path(sys.argv[1]), keep_last=1)
(store.begin(1) / "model.bin").write_text("one")
store.commit(1, {"n": 1})
(store.begin(2) / "model.bin").write_text("half of tw")
os.fsync = lambda descriptor: os._exit(9)  # everything is written, nothing is renamed
store.commit(2, {"n": 2})
"""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_process_killed_in_a_save_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    # Opening the folder again deletes the unfinished save.
    code = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False).returncode
    assert code == 9
    assert names(tmp_path) == ["rollout_00000001", "rollout_00000002.saving"]
    latest = CheckpointStore(tmp_path, keep_last=1).latest()
    assert latest is not None
    assert latest.state == {"n": 1}
    assert names(tmp_path) == ["rollout_00000001"]
