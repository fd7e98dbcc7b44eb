"""Cases of the rules about agents."""

from tests.unit.config.rules.valid_config import Values

CASES: list[tuple[str, Values, str, Values]] = [
    (
        "tools_are_dotted_paths",
        {"agent.tools": ["a:b", "add"]},
        "agent.tools.1 must be a dotted path, got add; write package.module:name",
        {"agent.tools": ["a:b", "a.b"]},
    ),
    (
        "mcp_servers_are_urls_or_commands",
        {"agent.mcp_servers": ["python 'server.py"]},
        "agent.mcp_servers.0 must be a URL or a command, got python 'server.py",
        {"agent.mcp_servers": ["python server.py", "http://127.0.0.1:9/mcp"], "agent.tools": ["a:b"]},
    ),
    (
        "mcp_servers_are_urls_or_commands",
        {"agent.mcp_servers": ["python server.py http://a", "ftp://10.0.0.1/mcp"]},
        "agent.mcp_servers.1 must be a URL or a command, got ftp://10.0.0.1/mcp; write http://<host>:<port>/mcp",
        {"agent.mcp_servers": ["https://10.0.0.1/mcp?key=a"]},
    ),
    (
        "one_key_generates_trajectories",
        {"agent.mcp_servers": ["a"], "agent.environment_path": "a:B"},
        "agent.environment_path must be null with agent.mcp_servers",
        {"agent.mcp_servers": ["a"]},
    ),
    (
        "one_key_generates_trajectories",
        {"agent.tools": ["a:b"], "agent.environment_path": "a:B"},
        "agent.environment_path must be null with agent.tools, got a:B; keep one of them: set agent.tools=null or ",
        {"agent.tools": ["a:b"]},
    ),
    (
        "one_key_generates_trajectories",
        {"agent.environment_path": "a:B", "sampling.custom_generate_function_path": "a:b"},
        "sampling.custom_generate_function_path must be null with agent.environment_path",
        {"agent.environment_path": "a:B"},
    ),
    (
        "one_key_generates_trajectories",
        {"agent.function_path": "a:b", "agent.url": "http://10.0.0.1:9000/run"},
        "agent.url must be null with agent.function_path",
        {"agent.url": "http://10.0.0.1:9000/run"},
    ),
    (
        "agent_url_is_a_url",
        {"agent.url": "10.0.0.1:9000"},
        "agent.url must be http://<host>:<port>/<path> or https://<host>/<path>, got 10.0.0.1:9000",
        {"agent.url": "https://agents.example/run"},
    ),
    (
        "agents_that_start_again_have_no_rounds",
        {"agent.environment_path": "a:B", "sampling.partial_rollout": True, "sampling.round_tokens": 4},
        "sampling.round_tokens must be null with an agent whose state outlives a call",
        {"agent.tools": ["a:b"], "sampling.partial_rollout": True, "sampling.round_tokens": 4},
    ),
]
