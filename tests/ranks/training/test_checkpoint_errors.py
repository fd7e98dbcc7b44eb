"""A file that one of two ranks cannot read or write ends both with the same error, which names it."""

from pathlib import Path

from tests.ranks.training.launch import report, run_ranks


def test_all_ranks_raise_the_error_of_one(model_path: str, tmp_path: Path) -> None:
    run_ranks("tests.ranks.training.checkpoint_error_ranks", model_path, str(tmp_path), timeout_s=240)
    found = report(tmp_path, 0)
    assert found == report(tmp_path, 1)
    random = tmp_path / "state" / "random" / "rank_1.json"
    assert found["state"].startswith(f"DataError: {random} must be a file of a trainer checkpoint, got [Errno 21]")
    assert found["tensors"].startswith(f"WorkerError: rank 0: could not read its part of {tmp_path / 'tensors'}: Saf")
    assert found["header"].startswith(f"DataError: {tmp_path / 'header' / 'trainer.json'} must be a file of a trainer")
    assert found["save"].startswith(f"WorkerError: rank 1: could not write its part of {tmp_path / 'save'}: IsADir")
    assert found["critic"].startswith(f"WorkerError: rank 0: could not write its part of {tmp_path / 'critic'}")
