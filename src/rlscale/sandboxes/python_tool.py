"""The tool `python`: runs code that a model wrote, and returns what it printed."""

from rlscale.sandboxes.sandbox import ExecResult, Sandbox

MAX_SHOWN = 10_000
"""Characters of an output that the model gets; the middle of longer ones is cut out."""


async def run_python(sandbox: Sandbox, code: str, *, timeout_s: float | None = None) -> str:
    """Runs Python code in a sandbox and describes the result for a model: output, and errors if there are any.

    Raises SandboxError if the sandbox fails. Whatever the code does is a text.
    """
    return describe_result(await sandbox.exec(code=code, timeout_s=timeout_s))


def describe_result(result: ExecResult) -> str:
    """The output of a program as the text of a tool result."""
    parts = [_shorten(result.stdout.rstrip("\n"))]
    if result.stderr.strip():
        parts.append(_shorten(result.stderr.strip()))
    if result.truncated:
        parts.append("[output cut]")
    if result.exit_code and not result.stderr.strip():
        parts.append(f"[exit code {result.exit_code}]")
    return "\n".join(part for part in parts if part) or "[no output]"


def _shorten(text: str) -> str:
    if len(text) <= MAX_SHOWN:
        return text
    half = MAX_SHOWN // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters ...]\n{text[-half:]}"
