"""A complete run with the examples of docs/how-to/your-own-loss.md in the working directory, on two ranks."""

import re
from pathlib import Path

from tests.integration.conftest import Command

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "your-own-loss.md"


def test_user_functions_train_and_get_the_custom_node(command: Command) -> None:
    for text, name in re.findall(r"```python\n(# (\w+)\.py.*?)```", PAGE.read_text(), re.DOTALL):
        (command.folder / f"{name}.py").write_text(text)
    done = command.run(
        "algo.custom_advantage_function_path=my_advantages:best_only",
        "algo.use_tis=true",
        "algo.custom_tis_function_path=my_weights:near",
        "algo.custom_reducer_function_path=my_reducer:by_prompt",
        "train.rollout_data_postprocess_path=my_postprocess:bounded",
        "custom.max_advantage=0.5",
        "cluster.actor_num_gpus_per_node=2",
        "eval.prompt_data=null",
        "eval.interval=null",
    )
    assert done.code == 0, done.err
    steps = [m for m in command.metrics() if "train/loss" in m]
    assert len(steps) == 3
    # Advantages are 1 for the best of a prompt and 0 for others, so the bound of 0.5 cuts those of the best.
    assert all(0 < m["rollout/bounded"] <= 1 and m["train/near"] > 0.99 for m in steps)
