"""Models as Hugging Face folders: made on the spot, checked, and loaded through transformers."""

from rlscale.models.load import load_causal_lm, load_tokenizer
from rlscale.models.megatron_folder import torch_dist_folder
from rlscale.models.resolve import cache_root, is_hf_folder, resolve_model

__all__ = ["cache_root", "is_hf_folder", "load_causal_lm", "load_tokenizer", "resolve_model", "torch_dist_folder"]
