"""An unchanged agent of a framework, by its URL: the agent gets the URL and the key of each trajectory as its model."""

from typing import cast

try:
    from agents import OpenAIProvider, RunConfig, Runner, TResponseInputItem
except ModuleNotFoundError as error:
    # Its name is that of another package, which pip would install.
    raise ModuleNotFoundError("openai-agents is missing; pip install 'rlscale[examples]'") from error

from rlscale.agents.run_task import AgentSession, AgentTask
from rlscale.examples.calculator_agent import AGENT


async def run(task: AgentTask, session: AgentSession) -> None:
    """Runs the agent to its end; the reward of the config grades its answer."""
    model = OpenAIProvider(base_url=session.base_url, api_key=session.api_key, use_responses=False)
    messages = cast(list[TResponseInputItem], task.messages)
    # Traces would be sent to OpenAI.
    await Runner.run(AGENT, messages, run_config=RunConfig(model_provider=model, tracing_disabled=True))
