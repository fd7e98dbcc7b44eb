"""Agents that generate trajectories: they run somewhere, and know a URL of the gateway, tools or an environment."""

from rlscale.agents.environment import Action, Environment, Observation, StepResult, Task
from rlscale.agents.tool import Tool, ToolError, tool

__all__ = ["Action", "Environment", "Observation", "StepResult", "Task", "Tool", "ToolError", "tool"]
