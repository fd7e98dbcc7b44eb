"""A cached model and its tokenizer are loaded without torch."""

import subprocess
import sys
from pathlib import Path

from rlscale.config import ModelBuild, ModelConfig
from rlscale.models.resolve_model import resolve_model


def test_a_cached_model_and_its_tokenizer_need_no_torch(tmp_path: Path) -> None:
    folder = resolve_model(
        ModelConfig(build=ModelBuild.tiny_qwen3, cache_dir=str(tmp_path), num_layers=1, hidden_size=16, head_dim=8)
    )
    code = f"""
import sys
from rlscale.config import ModelConfig
from rlscale.models.hf_models import load_tokenizer
from rlscale.models.resolve_model import resolve_model
fields = dict(num_layers=1, hidden_size=16, head_dim=8)
path = resolve_model(ModelConfig(build="tiny_qwen3", cache_dir={str(tmp_path)!r}, **fields))
assert path == {folder!r}, path
load_tokenizer(path)
sys.exit("torch was imported" if "torch" in sys.modules else 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
