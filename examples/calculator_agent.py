"""GSM8K with a calculator by the client of OpenAI: an agent that runs tools of its own (docs/agents.md)."""

import json
from typing import Any

from openai import AsyncOpenAI, BadRequestError, DefaultAsyncHttpxClient

from posttrain.envs.agents import AgentTask
from posttrain.tools.calculator import Calculator

CALCULATOR = Calculator()


async def play(task: AgentTask) -> None:
    """Ask until the model calls the calculator no more. The grader of the data gives the reward."""
    http = DefaultAsyncHttpxClient(verify=False)  # certificates, of no use on loopback, take 20 ms to read
    messages: list[Any] = list(task.messages)
    tools: list[Any] = [CALCULATOR.schema]
    async with AsyncOpenAI(base_url=task.openai_url, api_key=task.api_key, http_client=http) as client:
        while True:
            try:
                answer = await client.chat.completions.create(model="policy", messages=messages, tools=tools)
            except BadRequestError:  # no turns or tokens are left
                return
            message = answer.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                return
            for call in message.tool_calls:
                assert call.type == "function"
                result = await CALCULATOR.call(None, json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result.text})
