"""The command `rlscale-serve` as a process: imports at start-up, and the `curl` commands of its page."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from rlscale.engines.ports import free_port
from rlscale.engines.process import EngineProcess
from tests.tiny_model import write_tiny_qwen3

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "talk-to-an-engine.md"


def test_no_transformers_at_the_start() -> None:
    # Importing it would more than double the time until the server is ready.
    code = "import sys, rlscale.cli.serve; sys.exit('transformers' in sys.modules or 'ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_curl_commands_of_the_page_work(tmp_path: Path) -> None:
    model, port = write_tiny_qwen3(tmp_path / "model"), free_port("127.0.0.1")
    (model / "chat_template.jinja").write_text("{% for each in messages %}{{ each.content }}\n{% endfor %}")
    (block,) = re.findall(r"```bash\n(curl.*?)```", PAGE.read_text(), re.DOTALL)
    commands = block.replace("127.0.0.1:30000", f"127.0.0.1:{port}").replace("\\\n", " ").splitlines()
    words = [sys.executable, "-m", "rlscale.cli.serve", "--model-path", str(model), "--port", str(port)]
    url = f"http://127.0.0.1:{port}"
    server = EngineProcess(words, name="engine 0", url=url, env=os.environ, log_path=tmp_path / "serve.log")
    server.start()
    try:
        server.wait_ready(timeout_s=120)
        printed = [subprocess.run(["bash", "-c", each], capture_output=True, text=True).stdout for each in commands]
    finally:
        server.stop()
    whole, events, chat = printed
    answer = json.loads(whole)
    assert len(answer["output_ids"]) == 8 and answer["text"]
    lines = [line.removeprefix("data: ") for line in events.splitlines() if line]
    # The events of a greedy answer end with the text of the first command.
    assert lines[-1] == "[DONE]" and json.loads(lines[-2])["text"] == answer["text"]
    assert json.loads(chat)["choices"][0]["message"]["role"] == "assistant"
