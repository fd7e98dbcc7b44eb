"""The report of a rehearsal on a narrow terminal."""

import io

from rich.console import Console

from rlscale.rehearsal.rehearsal_report import RehearsalReport, print_report

LONG = "megatron.overlap_cpu_optimizer_d2h_h2d_and_more"


def test_keys_are_shown_whole_on_a_narrow_terminal() -> None:
    report = RehearsalReport(
        experiment="qwen3",
        layout="dp2",
        rehearsed_layout="dp2",
        cuts=(),
        checked=(),
        rehearsed=(("rollouts", "2 with prompts, chat template, requests, rewards and advantages"),),
        not_rehearsed=((LONG, "the engines of the run answer with eight tokens at random"),),
        generated=(),
        processes=2,
        peak_bytes=1,
        seconds=1.0,
    )
    output = io.StringIO()
    print_report(report, Console(width=60, file=output))
    first_column = "".join(line[:40].split("  ")[0].strip() for line in output.getvalue().splitlines())
    assert LONG in first_column
