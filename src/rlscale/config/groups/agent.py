"""Group `agent`: trajectories of several turns with tools or an environment."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from rlscale.config.groups.base import DOTTED_PATH, ConfigGroup


class OnToolError(StrEnum):
    """Reactions to a tool that crashed or was too late."""

    retry = "retry"
    message = "message"
    fail = "fail"


class McpSessions(StrEnum):
    """Owners of a session with an MCP server."""

    shared = "shared"
    trajectory = "trajectory"


class EnvironmentReward(StrEnum):
    """Rewards of a trajectory from those of its steps."""

    sum = "sum"
    last = "last"


class AgentIsolation(StrEnum):
    """Places of an agent that is a function."""

    thread = "thread"
    process = "process"


POLICY_ERRORS = (
    "MaxTurnsExceeded",  # openai-agents
    "ModelBehaviorError",
    "UnexpectedModelBehavior",  # pydantic-ai
    "UsageLimitExceeded",
    "AgentMaxStepsError",  # smolagents
    "AgentParsingError",
)
"""Exceptions of common frameworks for an answer that cannot be used, and for turns that are used up."""


@dataclass(kw_only=True)
class AgentConfig(ConfigGroup):
    """Trajectories of several turns: the policy calls tools, or acts in an environment."""

    # Tools.
    tools: Annotated[list[str] | None, Field(min_length=1)] = None
    """Tools of the policy, each as `package.module:name`: a function with the decorator `rlscale.agents.tool`, or a
    list of such functions. The policy calls them until it answers without a call. None: no tools.
    """

    mcp_servers: Annotated[list[str] | None, Field(min_length=1)] = None
    """MCP servers whose tools the policy may call, too: each the URL of a running server, `http://host:port/mcp`, or a
    command that is started and speaks over its standard input and output, e.g. `python my_server.py`. None: no
    servers. Needs `pip install 'rlscale[agents]'`.
    """

    mcp_sessions: McpSessions = McpSessions.shared
    """Owner of a session with an MCP server, and of its process if it is a command. `shared`: all trajectories.
    `trajectory`: each trajectory has its own, for servers that keep a state.
    """

    on_tool_error: OnToolError = OnToolError.retry
    """Reaction to a tool that raises, crashes or is too late. `retry`: it is called `agent.tool_retries` times again,
    then the trajectory has failed, and starts again. `message`: the policy gets the error as the result. `fail`: the
    trajectory has failed at once. Wrong arguments and errors of the type `rlscale.agents.ToolError` are always results.
    """

    tool_retries: Annotated[int, Field(ge=0)] = 2
    """Number of further calls of a tool that failed. Only with `agent.on_tool_error=retry`."""

    tool_timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 60.0
    """Maximum time of one call of a tool, in seconds."""

    tool_processes: Annotated[int, Field(ge=1)] = 4
    """Maximum number of processes for plain tools; each makes one call at a time. Tools that are coroutines share one
    more process.
    """

    max_tool_chars: Annotated[int, Field(ge=1)] = 20_000
    """Maximum characters of a tool's result, or of an observation of an environment; the rest is cut off."""

    # Environments.
    environment_path: Annotated[str | None, Field(pattern=DOTTED_PATH)] = None
    """Environment in which the policy acts, `package.module:Class`: a class, or a function that returns an object,
    with the methods of `rlscale.agents.Environment`. One is created for each trajectory. None: no environment.
    """

    environment_timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 60.0
    """Maximum time of one call of an environment, in seconds: of its creation with `reset`, of `step` or of `close`."""

    environment_processes: Annotated[int, Field(ge=1)] = 2
    """Number of processes that the environments of a run share. Methods that are plain functions run in threads."""

    environment_reward: EnvironmentReward = EnvironmentReward.sum
    """Reward of a trajectory. `sum`: the sum of the rewards of its steps. `last`: the reward of the last step. If no
    step has a reward, the reward of the config grades the trajectory.
    """

    # Agents that know a URL.
    function_path: Annotated[str | None, Field(pattern=DOTTED_PATH)] = None
    """Agent that is a function, `package.module:name`, called with a task (`messages`, `label`, `metadata`) and a
    session (`base_url`, `api_key`, `model`); `async`, or a plain function. It returns a reward, None, or a mapping of
    `reward` and `metadata`. Without a reward, that of the config grades the trajectory. None: no such agent.
    """

    isolation: AgentIsolation = AgentIsolation.thread
    """Place of `agent.function_path`. `thread`: in the process of the run, outside of its event loop. `process`: in a
    separate process for each trajectory, which ends at `agent.timeout_s` with all that it started.
    """

    command: Annotated[list[str] | None, Field(min_length=1)] = None
    """Agent that is a command, e.g. `[python, my_agent.py, "{task_file}"]`; `python` is that of the run, and
    `{result_file}`, `{base_url}` and `{model}` are replaced, too. Clients find OPENAI_BASE_URL, OPENAI_API_KEY,
    ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY in their environment. RLSCALE_TASK is a file with the task,
    RLSCALE_RESULT the file for its result, as of `agent.function_path`, both JSON. The working folder is a new one.
    None: no such agent.
    """

    url: Annotated[str | None, Field(min_length=1)] = None
    """Agent behind a URL: a server that gets POST requests with a JSON object of `task`, `base_url`, `api_key`, `model`
    and `deadline_s`, and answers with a result, as of `agent.function_path`. Its key, if it has one, is in the
    environment variable RLSCALE_AGENT_API_KEY. None: no such agent.
    """

    env: dict[str, str] = field(default_factory=dict)
    """Further environment variables of `agent.command` and of functions in processes."""

    pass_env: list[str] = field(default_factory=list)
    """Variables of the run's environment that agents in processes get although their names look like secrets, e.g.
    `[SEARCH_API_KEY]`. They get all others.
    """

    policy_errors: list[str] = field(default_factory=lambda: list(POLICY_ERRORS))
    """Exceptions that are the fault of the policy: the trajectory is graded. After any other one it starts again. By
    the name of the class, and of a function also by that of a base class; of `agent.command` in the last line of its
    output, where Python writes it.
    """

    max_concurrent: Annotated[int | None, Field(ge=1)] = None
    """Maximum number of trajectories of agents at once. Fewer run while their expected conversations do not fit the
    KV cache of the engines. None: as many as the engines answer requests at once; with tools or an environment, which
    need no process, as many as fit the cache, or four times the requests if its size is not known.
    """

    keep_logs: Annotated[int, Field(ge=1)] = 1000
    """Number of trajectories whose logs are kept in the run folder: `agents/<version>/<trajectory>.log`, and at least
    as many episodes of environments, `environments/*.jsonl`.
    """

    max_log_bytes: Annotated[int, Field(ge=1000)] = 1_000_000
    """Maximum bytes of output in the log of one attempt; of a longer output the first and the last half are kept."""

    # All agents.
    max_turns: Annotated[int, Field(ge=1)] = 16
    """Maximum number of answers of the policy in one trajectory; then it ends as truncated. All answers together have
    at most `rollout.max_response_len` tokens.
    """

    timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 3600.0
    """Maximum time of one attempt at a trajectory, in seconds; a longer one has failed, and starts again."""
