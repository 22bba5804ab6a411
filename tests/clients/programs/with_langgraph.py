"""LangGraph: an agent as a graph of a model and its tools, and one with kept state."""

from __future__ import annotations

from typing import Any

import openai
from checks import (
    ANSWER,
    KEY,
    MODEL,
    QUESTION,
    URL,
    WEATHER_ANSWER,
    WEATHER_QUESTION,
    WEATHER_RESULT,
    WRONG_KEY,
    check,
    equal,
    expect,
    raises,
    run,
)
from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition


@tool
def get_weather(city: str) -> str:
    """Get the weather of a city."""
    return WEATHER_RESULT if city == "Paris" else "{}"


def agent_with(checkpointer: InMemorySaver | None = None, **fields: Any) -> Any:
    """Return a graph in which the model calls tools until it answers."""
    fields = {"api_key": KEY, "model": MODEL, "temperature": 0, "max_tokens": 200, "max_retries": 0} | fields
    model = ChatOpenAI(base_url=f"{URL}/v1", **fields).bind_tools([get_weather])
    graph = StateGraph(MessagesState)
    graph.add_node("model", lambda state: {"messages": [model.invoke(state["messages"])]})
    graph.add_node("tools", ToolNode([get_weather]))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    return graph.compile(checkpointer=checkpointer)


def ask(question: str) -> dict[str, Any]:
    return {"messages": [HumanMessage(question)]}


agent = agent_with()


@check("chat")
def answers() -> None:
    equal(agent.invoke(ask(QUESTION))["messages"][-1].content, ANSWER)


@check("tools, run by the graph")
def runs_tools() -> None:
    _, call, result, answer = agent.invoke(ask(WEATHER_QUESTION))["messages"]
    equal([(each["name"], each["args"]) for each in call.tool_calls], [("get_weather", {"city": "Paris"})])
    expect(isinstance(result, ToolMessage), result)
    equal((result.content, answer.content), (WEATHER_RESULT, WEATHER_ANSWER))


@check("tools, streamed")
def streams() -> None:
    pieces = [
        piece
        for piece, _ in agent.stream(ask(WEATHER_QUESTION), stream_mode="messages")
        if isinstance(piece, AIMessageChunk)
    ]
    equal("".join(str(piece.content) for piece in pieces), WEATHER_ANSWER)
    expect(len(pieces) > 2, pieces)


@check("continued chat")
def continues() -> None:
    own = agent_with(InMemorySaver())
    thread = {"configurable": {"thread_id": "1"}}
    own.invoke(ask(WEATHER_QUESTION), thread)
    messages = own.invoke(ask(QUESTION), thread)["messages"]
    equal((len(messages), messages[3].content), (6, WEATHER_ANSWER))
    expect(messages[-1].content, messages[-1])


@check("errors")
def errs() -> None:
    raises(openai.AuthenticationError, lambda: agent_with(api_key=WRONG_KEY).invoke(ask(QUESTION)))
    raises(openai.NotFoundError, lambda: agent_with(model="no/such-model").invoke(ask(QUESTION)))
    raises(openai.BadRequestError, lambda: agent_with(temperature=9).invoke(ask(QUESTION)))


run()
