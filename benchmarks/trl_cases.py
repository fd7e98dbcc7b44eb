"""Cases of `trl_step.py`: models, prompts, sizes and settings of both sides."""

import json
import math
import random
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from rlscale.config import ModelBuild, ModelConfig
from rlscale.models.hf_models import load_causal_lm, load_tokenizer
from rlscale.models.resolve_model import resolve_model

ARITHMETIC = Path(__file__).parent.parent / "data" / "arithmetic" / "train.jsonl"
CONSTANT = 0.05
"""Value of the hidden channel that is constant over all positions of a prepared model."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One comparison. Both sides get the same folder, prompts and sizes."""

    name: str
    title: str
    min_ratio: float  # required ratio of samples/s, rlscale to TRL
    num_prompts: int
    num_samples: int
    max_new_tokens: int
    dtype: str
    num_steps: int  # per run
    num_warmup: int  # steps at the start of a run that are dropped
    reward: str
    micro_batch: int  # TRL's, in samples
    max_tokens: int  # rlscale's, in tokens
    compile: bool = False  # TRL with torch.compile
    prompt_len: int = 0  # 0: sums of the quickstart
    end_rate: float | None = None  # share of tokens that end an answer; 0: none. None: unchanged model
    figures: dict[str, int | bool] = field(
        default_factory=dict
    )  # sizes of the model; empty: the quickstart's, warmed up

    @property
    def samples_per_step(self) -> int:
        return self.num_prompts * self.num_samples


CASES = (
    Case(
        name="small",
        title="0.8M parameters, 16 prompts x 8 samples of about 4 tokens",
        min_ratio=1.5,
        num_prompts=16,
        num_samples=8,
        max_new_tokens=6,
        dtype="float32",
        num_steps=60,
        num_warmup=20,
        reward="exact",
        micro_batch=128,
        max_tokens=8192,
    ),
    Case(
        name="long_tail",
        title="3M parameters, 8 x 8 samples of long-tailed lengths up to 64",
        min_ratio=3.0,
        num_prompts=8,
        num_samples=8,
        max_new_tokens=64,
        dtype="float32",
        num_steps=24,
        num_warmup=6,
        reward="parity",
        micro_batch=64,
        max_tokens=8192,
        prompt_len=16,
        end_rate=1 / 24,
        figures={
            "num_layers": 4,
            "hidden_size": 256,
            "intermediate_size": 768,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "tie_word_embeddings": False,
        },
    ),
    Case(
        name="large",
        title="50M parameters, vocabulary 32k, 8 x 4 samples of 128 tokens, prompt 64",
        min_ratio=3.0,
        num_prompts=8,
        num_samples=4,
        max_new_tokens=128,
        dtype="bfloat16",
        num_steps=4,
        num_warmup=1,
        reward="parity",
        micro_batch=8,
        max_tokens=8192,
        prompt_len=64,
        end_rate=0,
        figures={
            "num_layers": 10,
            "hidden_size": 512,
            "intermediate_size": 1664,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 64,
            "vocab_size": 32_000,
        },
    ),
)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Files of a case."""

    model: Path
    prompts: Path
    texts: list[str]
    labels: list[str]
    prompt_ids: list[list[int]]
    num_parameters: int


def prepare(case: Case, folder: Path) -> Prepared:
    """Creates model and prompts below `folder`, or reuses them."""
    model = _warmed_up(folder) if not case.figures else _prepared_model(case, folder)
    rows = _arithmetic() if not case.prompt_len else _random_prompts(case)
    prompts = folder / f"{case.name}.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = load_tokenizer(str(model))
    texts = [row["prompt"] for row in rows]
    weights = load_file(model / "model.safetensors")
    return Prepared(
        model=model,
        prompts=prompts,
        texts=texts,
        labels=[row["label"] for row in rows],
        prompt_ids=[tokenizer(text)["input_ids"] for text in texts],
        num_parameters=sum(tensor.numel() for tensor in weights.values()),
    )


def _warmed_up(folder: Path) -> Path:
    """Model of the quickstart after its warm-up, which runs if it has not run before."""
    run = folder / "warmup"
    if not (run / "finished.json").exists():
        shutil.rmtree(run, ignore_errors=True)
        overrides = ["+experiment=quickstart_warmup", f"run.dir={run}", "logging.console=none"]
        subprocess.run([sys.executable, "-m", "rlscale.cli.train", *overrides], check=True, stdout=subprocess.DEVNULL)
    return run / "hf"


def _arithmetic() -> list[dict[str, str]]:
    """Sums of the quickstart, formatted by its chat template."""
    rows = [json.loads(line) for line in ARITHMETIC.read_text().splitlines()[:4096]]
    return [{"prompt": f"<|user|>{row['prompt']}<|assistant|>", "label": row["label"]} for row in rows]


def _random_prompts(case: Case) -> list[dict[str, str]]:
    draw = random.Random(case.name)
    texts = ["".join(draw.choices("0123456789+=", k=case.prompt_len)) for _ in range(1024)]
    return [{"prompt": text, "label": ""} for text in texts]


def _prepared_model(case: Case, folder: Path) -> Path:
    """Model with random weights whose answers end with probability `case.end_rate` per token."""
    target = folder / f"{case.name}_model"
    if (target / "model.safetensors").exists():
        return target
    config = ModelConfig(build=ModelBuild.tiny_qwen3, cache_dir=str(folder), **case.figures)
    source = Path(resolve_model(config))
    shutil.copytree(source, target, dirs_exist_ok=True)
    end_id = load_tokenizer(str(source)).eos_token_id
    weights = with_constant_channel(load_file(source / "model.safetensors"), end_id=end_id)
    file = target / "model.safetensors"
    save_file(weights, file, metadata={"format": "pt"})
    constant, others = _final_state(target, case)
    rate = max(case.end_rate or 0.0, 1e-12)
    set_end_logit(weights, end_id=end_id, logit=math.log(rate / (1 - rate)) + others, constant=constant)
    save_file(weights, file, metadata={"format": "pt"})
    return target


def with_constant_channel(weights: dict[str, torch.Tensor], *, end_id: int) -> dict[str, torch.Tensor]:
    """Weights in which no layer writes to hidden channel 0, and the logit of the end token depends only on it.

    Nothing else about the model changes. Both sides compute as for any other weights and need no rule about lengths:
    answers end when the end token is sampled.
    """
    changed = {name: tensor.clone() for name, tensor in weights.items()}
    embedding, norm = changed["model.embed_tokens.weight"], changed["model.norm.weight"]
    embedding[:, 0] = CONSTANT
    for name, tensor in changed.items():
        if name.endswith(("self_attn.o_proj.weight", "mlp.down_proj.weight")):
            tensor[0] = 0.0
    norm[0] = norm[0] / CONSTANT
    head = changed.get("lm_head.weight", embedding)
    if head is not embedding:
        head[:, 0] = 0.0
    head[end_id] = 0.0
    return changed


def set_end_logit(weights: dict[str, torch.Tensor], *, end_id: int, logit: float, constant: float) -> None:
    """Sets the logit of the end token in place. `constant` is the value of channel 0 before the output layer."""
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    head[end_id, 0] = logit / constant


@torch.no_grad()
def _final_state(model: Path, case: Case) -> tuple[float, float]:
    """Mean of channel 0 before the output layer, and mean logsumexp of the logits, over some answers of the model."""
    loaded = load_causal_lm(str(model), dtype=torch.float32)
    tokenizer = load_tokenizer(str(model))
    texts = [row["prompt"] for row in _random_prompts(case)[:16]]
    ids = torch.tensor([tokenizer(text)["input_ids"] for text in texts])
    torch.manual_seed(0)
    answers = loaded.generate(ids, do_sample=True, max_new_tokens=32, min_new_tokens=32, top_k=0)
    hidden = loaded.model(answers).last_hidden_state[:, case.prompt_len :]
    logits = loaded.lm_head(hidden).logsumexp(dim=-1)
    return float(hidden[..., 0].mean()), float(logits.mean())
