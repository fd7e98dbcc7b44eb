"""TRL's side of `trl_step.py`: trains as a JSON file specifies. Runs in TRL's environment and does not import rlscale.

    python trl_side.py job.json

The job contains model folder, prompts with labels, sizes, number format and performance settings. Writes the end time
of every step (seconds of a monotonic clock) and the lengths of its samples to the job's `output`.
"""

import json
import sys
import time
from pathlib import Path

import datasets
import torch
import transformers
import trl


class StepClock(transformers.TrainerCallback):
    """Records the end time of each optimiser step."""

    def __init__(self):
        self.ends = []

    def on_step_end(self, args, state, control, **kwargs):
        self.ends.append(time.perf_counter())


class TimedTrainer(trl.GRPOTrainer):
    """GRPOTrainer that also records the seconds of its generation."""

    def _generate(self, prompts):
        began = time.perf_counter()
        result = super()._generate(prompts)
        self.generate_s.append(time.perf_counter() - began)
        return result


def exact(completions, label, **kwargs):
    """Returns 1 if the text equals the label, else 0."""
    return [float(text == expected) for text, expected in zip(completions, label, strict=True)]


def parity(completion_ids, **kwargs):
    """Returns 1 if the sum of the ids is even, else 0. Needs no text."""
    return [float(sum(ids) % 2 == 0) for ids in completion_ids]


REWARDS = {"exact": exact, "parity": parity}


def arguments(job):
    """Settings with which TRL is fastest on a CPU without a change of the trained model."""
    return trl.GRPOConfig(
        output_dir=job["folder"],
        use_cpu=True,
        bf16=job["dtype"] == "bfloat16",  # weights stay float32, the forward pass runs under autocast
        optim="adamw_torch_fused",
        torch_compile=job["compile"],
        gradient_checkpointing=False,
        per_device_train_batch_size=job["micro_batch"],
        gradient_accumulation_steps=job["num_prompts"] * job["num_samples"] // job["micro_batch"],
        num_generations=job["num_samples"],
        max_completion_length=job["max_new_tokens"],
        temperature=1.0,
        beta=0.0,
        loss_type="grpo",
        learning_rate=job["lr"],
        lr_scheduler_type="constant",
        max_steps=job["num_steps"],
        shuffle_dataset=False,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        log_unique_prompts=False,
        seed=job["seed"],
    )


def check_prompts(tokenizer, job):
    """Checks that both sides use the same prompt ids."""
    for text, ids in zip(job["texts"], job["prompt_ids"], strict=True):
        found = tokenizer(text)["input_ids"]
        assert found == ids, f"prompt {text!r} must have the ids {ids}, got {found}"


def main():
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(job["threads"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(job["model"], padding_side="left")
    check_prompts(tokenizer, job)
    model = transformers.AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    lengths = []

    def reward(prompts, completions, completion_ids, **columns):
        lengths.append([len(ids) for ids in completion_ids])
        return REWARDS[job["reward"]](completions=completions, completion_ids=completion_ids, **columns)

    clock = StepClock()
    TimedTrainer.generate_s = []
    trainer = TimedTrainer(
        model=model,
        args=arguments(job),
        reward_funcs=reward,
        train_dataset=datasets.Dataset.from_dict({"prompt": job["texts"], "label": job["labels"]}),
        processing_class=tokenizer,
        callbacks=[clock],
    )
    trainer.train()
    versions = {m.__name__: m.__version__ for m in (trl, transformers, torch)}
    result = {"ends": clock.ends, "lengths": lengths, "generate_s": trainer.generate_s, "versions": versions}
    Path(job["output"]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
