"""Cases of the rules about arguments that cannot work; see `cases.CASES` for the columns."""

from tests.unit.config.rules.valid_config import CORE_ARGS, MEGATRON, SGLANG, Values

SERVER_ARGS = "sglang.server_args"
VIRTUAL = {"virtual_pipeline_model_parallel_size": 2}

CASES: list[tuple[str, Values, str, Values]] = [
    (
        "engine_arguments_can_work",
        {**SGLANG, SERVER_ARGS: {"tokenizer_worker_num": 4}},
        "sglang.tokenizer_worker_num must be 1, got 4; remove it: a new weight version would reach one of several HTTP "
        "workers only",
        {**SGLANG, SERVER_ARGS: {"tokenizer_worker_num": 1, "ssl_certfile": None, "skip_tokenizer_init": False}},
    ),
    (
        "engine_arguments_can_work",
        {**SGLANG, SERVER_ARGS: {"ssl_certfile": "/a.pem"}},
        "sglang.ssl_certfile must be null, got /a.pem; remove it: rlscale calls its servers by http://",
        {SERVER_ARGS: {"ssl_certfile": "/a.pem"}},
    ),
    (
        "megatron_fields_can_work",
        {**MEGATRON, CORE_ARGS: {"softmax_type": "learnable", "loss_scale": 2.0}},
        "megatron.loss_scale must be null, got 2.0; remove it: the loss is not scaled, so gradients would be divided",
        {**MEGATRON, CORE_ARGS: {"softmax_type": "vanilla", "loss_scale": None}},
    ),
    (
        "megatron_fields_can_work",
        {**MEGATRON, CORE_ARGS: {"qk_l2_norm": True}},
        "megatron.qk_l2_norm must be false, got true; remove it: the layers must be those of the model's config.json",
        {"train.backend": "fsdp", CORE_ARGS: {"qk_l2_norm": True}},
    ),
    (
        "interleaved_stages_exchange_single_messages",
        {**MEGATRON, CORE_ARGS: {**VIRTUAL, "batch_p2p_comm": True}},
        "megatron.batch_p2p_comm must be false with megatron.virtual_pipeline_model_parallel_size, got true",
        {**MEGATRON, CORE_ARGS: {"batch_p2p_comm": True}},
    ),
    (
        "interleaved_stages_exchange_single_messages",
        {**MEGATRON, CORE_ARGS: {**VIRTUAL, "overlap_p2p_comm": False}},
        "megatron.overlap_p2p_comm must be true with megatron.virtual_pipeline_model_parallel_size, got false",
        {**MEGATRON, CORE_ARGS: {**VIRTUAL, "overlap_p2p_comm": True}},
    ),
]
