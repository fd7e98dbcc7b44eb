"""Cases of the rules about the rollout buffer and HTTP requests; see `cases.CASES` for the columns."""

from tests.unit.config.rules.valid_config import Values

URL = "http://10.0.0.1:8889"

CASES: list[tuple[str, Values, str, Values]] = [
    (
        "gateway_host_is_an_address",
        {"gateway.enabled": True, "gateway.host": "0.0.0.0"},
        "gateway.host must be the address of one interface, got 0.0.0.0; write the address at which agents reach",
        {"gateway.enabled": True, "gateway.host": "10.0.0.1"},
    ),
    (
        "gateway_host_is_an_address",
        {"gateway.enabled": True, "gateway.host": "http://node:80"},
        "got http://node:80",
        {"gateway.host": "http://node:80"},
    ),
    (
        "buffer_url_is_a_url",
        {"buffer.url": "10.0.0.1:8889"},
        "buffer.url must be http://<host>:<port> or https://<host>:<port>, got 10.0.0.1:8889; write e.g. " + URL,
        {"buffer.url": "https://buffer.example/path"},
    ),
    (
        "buffer_url_is_a_url",
        {"buffer.url": "http://user:word@host:99999"},
        "got http://host:99999; write e.g.",
        {"buffer.url": URL},
    ),
    (
        "buffer_excludes_a_rollout_function",
        {"buffer.url": URL, "rollout.function_path": "a:b"},
        "rollout.function_path must be null with buffer.url, got a:b; remove it",
        {"rollout.function_path": "a:b"},
    ),
    (
        "buffer_has_no_routes",
        {"buffer.url": URL, "algo.use_rollout_routing_replay": True},
        "algo.use_rollout_routing_replay must be false with buffer.url, got true; remove it",
        {"algo.use_rollout_routing_replay": True},
    ),
    (
        "buffer_has_one_reward",
        {"buffer.url": URL, "reward.weights": {"a": 1.0}},
        "reward.weights must be empty with buffer.url, got",
        {"reward.weights": {"a": 1.0}},
    ),
    (
        "proxy_is_a_url",
        {"network.http_proxy": "https://user:word@proxy:3128"},
        "network.http_proxy must be http://<host>:<port>, got https://proxy:3128; write e.g. http://10.0.0.1:3128",
        {"network.http_proxy": "http://user:word@proxy:3128"},
    ),
]
