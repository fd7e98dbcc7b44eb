"""Output of a check that is not ok, as the report shows it."""

from rlscale.doctor.run_checks import order_stacks


def test_the_last_line_of_a_stack_shows_where_the_thread_was() -> None:
    first, last = "(most recent call first):", "(most recent call last):"
    output = [
        "waiting",
        f"Thread 0x1 {first}",
        '  File "queue.py", line 3 in get',
        '  File "worker.py", line 2 in run',
        f"Thread 0x2 {first}",
        '  File "gloo.py", line 9 in all_reduce',
        '  File "check.py", line 8 in fsdp_step',
        "  ...",
    ]
    assert order_stacks(output) == [
        "waiting",
        f"Thread 0x1 {last}",
        '  File "worker.py", line 2 in run',
        '  File "queue.py", line 3 in get',
        f"Thread 0x2 {last}",
        "  ...",
        '  File "check.py", line 8 in fsdp_step',
        '  File "gloo.py", line 9 in all_reduce',
    ]
    other = ["Traceback (most recent call last):", '  File "a.py", line 1 in a', "ValueError: b"]
    assert order_stacks([*output[:3], *other]) == ["waiting", f"Thread 0x1 {last}", output[2], *other]
