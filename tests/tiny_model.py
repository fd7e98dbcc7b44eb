"""A random Qwen3 of a few thousand parameters, as a Hugging Face folder."""

from pathlib import Path

VOCAB_SIZE = 100
MAX_CONTEXT_LEN = 512
EOS_ID = 1


def write_tiny_qwen3(folder: Path, *, seed: int = 0, tied: bool = True) -> Path:
    """Writes the model into `folder`. Its weights are large enough for logits that are far from uniform."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=MAX_CONTEXT_LEN,
        tie_word_embeddings=tied,
        bos_token_id=0,
        eos_token_id=EOS_ID,
        pad_token_id=0,
    )
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)
    model.save_pretrained(folder)
    return folder
