"""Cases of the rules about sandboxes; see `cases.CASES` for the columns."""

from tests.unit.config.rules.valid_config import Values

TOOL = {"agent.tools": ["rlscale.agents.sandbox_tool:python"]}

CASES: list[tuple[str, Values, str, Values]] = [
    (
        "the_python_tool_has_sandboxes",
        TOOL,
        "sandbox.kind must be set with the tool rlscale.agents.sandbox_tool:python, got null; set it to subprocess",
        {"agent.tools": ["my_tools:python"]},
    ),
    (
        "sandbox_url_fits_the_kind",
        {"sandbox.kind": "fusion"},
        "with sandbox.kind=fusion, got null; write e.g. http://10.0.0.1:8080",
        {"sandbox.kind": "subprocess"},
    ),
    (
        "sandbox_url_fits_the_kind",
        {"sandbox.kind": "docker", "sandbox.url": "/run/docker.sock"},
        "sandbox.url must start with one of unix://",
        {"sandbox.kind": "subprocess", "sandbox.url": "unix:///run/docker.sock"},
    ),
    (
        "read_only_folders_are_absolute",
        {"sandbox.read_only_folders": ["/opt/a", "/opt/b/../c", "packages"]},
        "sandbox.read_only_folders must contain absolute paths, got packages; write [",
        {"sandbox.read_only_folders": ["/opt/a"]},
    ),
    (
        "read_only_folders_are_free",
        {"sandbox.read_only_folders": ["/opt/a", "/proc/self"]},
        "must not contain / or paths in /dev, /proc, /sandbox, /sys, got /proc/self; remove it",
        {"sandbox.read_only_folders": ["/process"]},
    ),
    (
        "read_only_folders_are_free",
        {"sandbox.read_only_folders": ["/"]},
        "got /; remove it, or copy its files into another folder",
        {"sandbox.read_only_folders": ["/opt"]},
    ),
    (
        "read_only_folders_are_free",
        {"sandbox.read_only_folders": ["/opt/../proc"]},
        "must not contain / or paths in /dev, /proc, /sandbox, /sys, got /opt/../proc; remove it",
        {"sandbox.read_only_folders": ["/sys/../opt"]},
    ),
]
