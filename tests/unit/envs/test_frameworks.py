"""Agent frameworks that find the endpoint by environment variables, unmodified."""

import asyncio

import pytest

from posttrain.rollout.agents import with_branches
from tests.helpers.agents import play
from tests.helpers.scripted import EOS, tokens


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


async def test_an_agent_of_smolagents_tells_its_turns_in_other_words_and_each_is_a_branch(monkeypatch):
    smolagents = pytest.importorskip("smolagents", reason="smolagents is not installed")

    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: the first.
            b: the second.
        """
        return a + b

    final = '<tool_call>\n{"name": "final_answer", "arguments": {"answer": "8"}}\n</tool_call>'

    async def agent(task):
        for name, value in task.variables.items():
            monkeypatch.setenv(name, value)
        model = smolagents.OpenAIModel(model_id="policy")
        helper = smolagents.ToolCallingAgent(tools=[smolagents.tool(add)], model=model, max_steps=4, verbosity_level=0)
        return float(await asyncio.to_thread(helper.run, task.messages[-1]["content"]) == task.ground_truth)

    first = "I add. " + call(3, 5)
    [trajectory], source = await play(
        agent, first, final, max_turns=5, max_prompt_tokens=8000, max_response_tokens=4000
    )
    assert (trajectory.error, trajectory.reward) == (None, 1.0)
    assert (source.stats.branches, source.stats.unmatched) == (1, 1)
    sampled = [t.tokens[t.loss_mask].tolist() for t in with_branches([trajectory])]
    assert sampled == [[*tokens(final), EOS], [*tokens(first), EOS]]


async def test_an_agent_of_langgraph_is_one_branch(monkeypatch):
    langchain = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    graph = pytest.importorskip("langgraph.graph", reason="langgraph is not installed")
    from langgraph.prebuilt import ToolNode, tools_condition

    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    async def agent(task):
        for name, value in task.variables.items():
            monkeypatch.setenv(name, value)
        model = langchain.ChatOpenAI(model="policy", streaming=True).bind_tools([add])

        async def ask(state: graph.MessagesState):
            return {"messages": [await model.ainvoke(state["messages"])]}

        helper = graph.StateGraph(graph.MessagesState).add_node("model", ask).add_node("tools", ToolNode([add]))
        helper.add_edge(graph.START, "model").add_conditional_edges("model", tools_condition).add_edge("tools", "model")
        answer = await helper.compile().ainvoke({"messages": task.messages})
        return float(answer["messages"][-1].content == task.ground_truth)

    [trajectory], source = await play(
        agent, "I add. " + call(3, 5), call(0, 8) + call(8, 0), "8", max_turns=5, max_response_tokens=2000
    )
    assert (trajectory.error, trajectory.reward, trajectory.turns) == (None, 1.0, 3)
    assert [m["content"] for m in trajectory.messages if m["role"] == "tool"] == ["8", "8", "8"]
    assert (source.stats.branches, source.stats.unmatched) == (0, 0)
