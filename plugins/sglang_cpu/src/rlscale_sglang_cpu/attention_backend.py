"""SGLang's `torch_native` attention backend with batched attention.

It keeps the name: SGLang selects code without kernels in Triton by it.
"""

import os
from typing import Any

from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from torch import Tensor

from rlscale_sglang_cpu.attention import Plan, Workspace, attend
from rlscale_sglang_cpu.decode_cache import DecodeCache, DecodeStep
from rlscale_sglang_cpu.seeds import ATTENTION_BACKEND

STOCK_VARIABLE = "RLSCALE_SGLANG_STOCK_ATTENTION"
"""Set to 1: SGLang's own backend, one sequence after the other. For comparisons."""


def use_batched_attention() -> None:
    """Replaces the backend. Called in the processes that compute."""
    if os.environ.get(STOCK_VARIABLE) != "1":
        ATTENTION_BACKENDS[ATTENTION_BACKEND] = BatchedAttention


class BatchedAttention(TorchNativeAttnBackend):  # type: ignore[misc]  # SGLang is in another environment
    """Computes causal self-attention in batches; everything else as SGLang does."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        self._plan: Plan | None = None
        self._step: DecodeStep | None = None
        self._workspace = Workspace()
        self._cache = DecodeCache(model_runner.model_config.num_hidden_layers)
        # With pipeline stages batches alternate, and each would take the entries of the other.
        self._has_copies = model_runner.server_args.pp_size == 1

    def init_forward_metadata(self, forward_batch: Any) -> None:
        super().init_forward_metadata(forward_batch)
        self._plan = self._step = None

    def _run_sdpa_forward_decode(
        self,
        query: Tensor,
        output: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        req_to_token: Tensor,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        encoder_lens: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        if encoder_lens is not None or self.use_sliding_window_kv_pool:
            return super()._run_sdpa_forward_decode(
                query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, encoder_lens, **options
            )
        scale, window = options.get("scaling"), options.get("sliding_window_size")
        if self._step is None or not self._step.fits(seq_lens):
            self._step, rows, num_keys = None, req_pool_indices.tolist(), seq_lens.tolist()
            if self._has_copies and self._cache.has_room(num_keys, k_cache[0].nbytes + v_cache[0].nbytes):
                self._step = self._cache.next_step(req_to_token, rows, num_keys)
        if self._step is not None:
            return self._cache.attend(query, output, k_cache, v_cache, self._step, scale=scale, window=window)
        if self._plan is None or not self._plan.fits(seq_lens):
            shared = query.shape[1] // k_cache.shape[1]
            self._plan = Plan(req_to_token, req_pool_indices, [1] * len(seq_lens), seq_lens.tolist(), shared)
        return self._attend(query, output, k_cache, v_cache, self._plan, options)

    def _run_sdpa_forward_extend(
        self,
        query: Tensor,
        output: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        req_to_token: Tensor,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        extend_prefix_lens: Tensor,
        extend_seq_lens: Tensor,
        encoder_lens: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        if encoder_lens is not None or self.use_sliding_window_kv_pool or not options.get("causal"):
            return super()._run_sdpa_forward_extend(
                query,
                output,
                k_cache,
                v_cache,
                req_to_token,
                req_pool_indices,
                seq_lens,
                extend_prefix_lens,
                extend_seq_lens,
                encoder_lens,
                **options,
            )
        if self._plan is None or not self._plan.fits(seq_lens):
            self._cache.invalidate(req_pool_indices.tolist())
            shared = query.shape[1] // k_cache.shape[1]
            self._plan = Plan(req_to_token, req_pool_indices, extend_seq_lens.tolist(), seq_lens.tolist(), shared)
        return self._attend(query, output, k_cache, v_cache, self._plan, options)

    def _attend(
        self, query: Tensor, output: Tensor, k_cache: Tensor, v_cache: Tensor, plan: Plan, options: dict[str, Any]
    ) -> Tensor:
        scale, window = options.get("scaling"), options.get("sliding_window_size")
        return attend(query, output, k_cache, v_cache, plan, self._workspace, scale=scale, window=window)
