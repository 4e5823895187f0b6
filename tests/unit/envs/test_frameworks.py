"""Agent frameworks that find the endpoint by environment variables, unmodified."""

import pytest

from tests.helpers.agents import play


def call(a, b):
    return f'<tool_call>\n{{"name": "add", "arguments": {{"a": {a}, "b": {b}}}}}\n</tool_call>'


async def test_an_agent_of_openai_agents_is_one_branch(monkeypatch):
    agents = pytest.importorskip("agents", reason="openai-agents is not installed")
    agents.set_tracing_disabled(True)

    @agents.function_tool
    def add(a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)

    async def agent(task):
        for name, value in task.variables.items():
            monkeypatch.setenv(name, value)
        helper = agents.Agent(name="helper", instructions="Use the tool.", tools=[add], model="policy")
        run = agents.Runner.run_streamed(helper, task.messages[-1]["content"])
        async for _ in run.stream_events():
            pass
        return float(run.final_output == task.ground_truth)

    for api in ("responses", "chat_completions"):  # in one event loop: the framework keeps its connections
        agents.set_default_openai_api(api)
        [trajectory], source = await play(
            agent, "I add. " + call(3, 5), call(0, 8) + call(8, 0), "8", max_turns=5, max_response_tokens=2000
        )
        assert (trajectory.error, trajectory.reward, trajectory.turns) == (None, 1.0, 3)
        assert [m["content"] for m in trajectory.messages if m["role"] == "tool"] == ["8", "8", "8"]
        assert (source.stats.branches, source.stats.unmatched) == (0, 0)
