"""Arithmetic of the benchmark of long runs: windows, growth, verdict, names of processes."""

import json
from pathlib import Path

import pytest

MB = 10**6


def samples(**memory: list[float | None]) -> list:
    """A sample at every 100 steps, one second apart; memory in MB, None: the process does not live."""
    from soak_growth import MemorySample

    return [
        MemorySample(
            seconds=float(i),
            steps=100 * i,
            memory={name: int(values[i] * MB) for name, values in memory.items() if values[i] is not None},
        )
        for i in range(len(next(iter(memory.values()))))
    ]


def line(start: float, end: float, num: int = 101) -> list[float | None]:
    return [start + (end - start) * i / (num - 1) for i in range(num)]


def test_medians_of_the_first_and_last_tenth_after_the_warm_up_are_compared() -> None:
    from soak_growth import growths, windows

    # Steps 0 to 10,000: after a warm-up of 2,000 the windows are steps 2,000 to 2,800 and 9,200 to 10,000.
    found = samples(driver=line(100, 200))
    first, last = windows(found, warmup=2000)
    assert [first[0].steps, first[-1].steps, last[0].steps, last[-1].steps] == [2000, 2800, 9200, 10_000]
    (growth,) = growths(found, warmup=2000)
    assert (growth.first, growth.last) == (124 * MB, 196 * MB)
    assert growth.share == pytest.approx(196 / 124 - 1)


def test_the_warm_up_and_single_peaks_do_not_count() -> None:
    from soak_growth import find_faults, growths

    memory = [50.0] * 20 + [100.0] * 81
    memory[24] = memory[97] = 900.0
    assert find_faults(growths(samples(engine=memory), warmup=2000)) == []


@pytest.mark.parametrize(("end", "faults"), [(101.9, []), (102.1, ["engine grew by 2.1%"])])
def test_the_limit_is_two_percent_of_any_process_of_ours(end: float, faults: list[str]) -> None:
    from soak_growth import find_faults, growths

    memory = [100.0] * 50 + [end] * 51
    found = samples(driver=[300.0] * 101, engine=memory, **{"Ray: raylet": line(10, 20)})
    assert find_faults(growths(found, warmup=2000)) == faults


def test_a_replaced_process_is_a_fault_and_a_short_one_is_not() -> None:
    from soak_growth import find_faults, growths

    old, new, short = [9.0] * 60 + [None] * 41, [None] * 60 + [9.0] * 41, [None] * 99 + [9.0] * 2
    found = growths(samples(driver=[9.0] * 101, old=old, new=new, short=short), warmup=2000)
    assert [each.name for each in found] == ["driver", "old", "new"]
    assert find_faults(found) == ["old ended during the measured steps", "new began during the measured steps"]


@pytest.mark.parametrize("num", [0, 10, 22])
def test_too_few_samples_give_no_verdict(num: int) -> None:
    from soak_growth import find_faults, growths

    found = growths(samples(driver=[100.0] * num), warmup=2000)
    assert found == []
    assert find_faults(found) == ["there are too few samples after the warm-up"]


def test_steps_per_second_by_tenth() -> None:
    from soak_growth import part_table, parts

    found = samples(driver=line(100, 200))
    assert [rate for _, rate in parts(found)] == [100.0] * 10
    rows = part_table(found, ["driver"]).splitlines()
    assert rows[2] == "| to 1,000 | 100.0 | 105.0 |" and len(rows) == 12


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("python -m rlscale.cli.train run.dir=x", "driver"),
        ("ray::_PolicyActor.call", "trainer rank"),
        ("ray::_EngineActor", "engine actor"),
        ("/venv/bin/python -m rlscale.cli.serve --model-path=m", "engine"),
        ("/venv/bin/python -m rlscale.gateway.serve_gateway gateway_arguments.json", "gateway"),
        ("python -P -c from rlscale.rewards.reward_child import main; main(3, 4, 5)", "reward process"),
        ("ray::IDLE", "Ray: IDLE"),
        ("/lib/ray/core/src/ray/gcs/gcs_server --log_dir=/tmp/ray/x", "Ray: gcs_server"),
        ("python -u /lib/ray/_private/log_monitor.py --session-dir=/tmp/ray/x", "Ray: log_monitor"),
        ("git status", "other"),
    ],
)
def test_processes_are_named_by_their_part(command: str, name: str) -> None:
    from soak_growth import describe_process

    assert describe_process(1 if name == "driver" else 2, command, driver=1) == name


def test_processes_of_one_part_are_numbered_and_keep_their_names() -> None:
    from soak import ProcessNames

    names = ProcessNames(driver=1)
    assert [names.name(pid, "-c rlscale.rewards.reward_child") for pid in (5, 6, 5)] == [
        "reward process",
        "reward process 2",
        "reward process",
    ]


def test_steps_are_counted_as_they_are_written(tmp_path: Path) -> None:
    from soak import StepCounter

    path = tmp_path / "metrics.jsonl"
    counter = StepCounter(path)
    assert counter.read() == 0
    record = [json.dumps({"step": step, "train/loss": 0.1}) for step in (0, 1, 2)]
    path.write_text(f"{record[0]}\n{record[1]}\n" + '{"step": 7, "eval/reward_mean": 0.1}\n' + record[2])
    assert counter.read() == 2
    with path.open("a") as file:
        file.write("\n")
    assert counter.read() == 3


def test_snapshots_show_bytes_in_use(tmp_path: Path) -> None:
    from soak import Soak, bytes_in_use, report, summarise

    assert bytes_in_use(tmp_path) == {}
    for stamp, used in (("20260101T000000", 5 * MB), ("20260102T000000", 7 * MB)):
        content = json.dumps({"allocated_bytes": used, "freed_bytes": 2 * MB})
        (tmp_path / f"memory_{stamp}_rank_0.json").write_text(content)
    soak = Soak(folder=tmp_path, num_steps=10)
    summary = summarise(soak, 1)
    assert summary["bytes_in_use"] == {"trainer rank, in use": [5 * MB, 7 * MB], "trainer rank, kept": [2 * MB, 2 * MB]}
    assert "Snapshots of the allocator: trainer rank, in use 5.0 -> 7.0 MB;" in report(soak, summary, 0.0)
