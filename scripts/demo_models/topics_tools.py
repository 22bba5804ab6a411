"""Skills that call tools: the right tool with the right arguments, and an answer from its result."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import facts
from cases import Case, Fact, Message, Skill, Tool, assistant, user
from topics_text import any_text, invented_word

MOST_OTHER_TOOLS = 2
Draw = Callable[[Random], dict[str, str]]


@dataclass(frozen=True)
class ToolKind:
    """Tool of the corpus: its signature, requests for it, and its answers.

    `result` is the tool's own output and `answer` the model's text; both are templates over
    the arguments and the drawn values.
    """

    name: str
    description: str
    parameters: tuple[str, ...]
    phrasings: tuple[str, ...]
    draw: Draw
    result: str
    answer: str


def _place(rng: Random) -> str:
    return rng.choice((*facts.CAPITALS.values(), *facts.CAPITALS))


def _weather(rng: Random) -> dict[str, str]:
    sky = rng.choice(("sunny", "cloudy", "rainy", "windy", "snowy"))
    return {"city": _place(rng), "degrees": str(rng.randint(0, 35)), "sky": sky}


def _time(rng: Random) -> dict[str, str]:
    return {"city": _place(rng), "time": f"{rng.randint(0, 23)}:{rng.randint(10, 59)}"}


def _calculation(rng: Random) -> dict[str, str]:
    a, b, symbol = rng.randint(1, 999), rng.randint(1, 999), rng.choice("+-*")
    result = {"+": a + b, "-": a - b, "*": a * b}[symbol]
    return {"expression": f"{a} {symbol} {b}", "value": str(result)}


def _message(rng: Random) -> dict[str, str]:
    return {"to": rng.choice(facts.NAMES), "text": any_text(rng).rstrip(".")}


def _search(rng: Random) -> dict[str, str]:
    query = rng.choice(facts.OUT_OF_SCOPE) if rng.random() < 0.5 else any_text(rng).rstrip(".")
    return {"query": query, "found": any_text(rng).rstrip(".")}


def _light(rng: Random) -> dict[str, str]:
    room = rng.choice(("kitchen", "garden", "bedroom", "office", "hall", "bathroom", "garage"))
    return {"room": room, "state": rng.choice(("on", "off"))}


def _song(rng: Random) -> dict[str, str]:
    return {"title": any_text(rng).rstrip(".")}


def _timer(rng: Random) -> dict[str, str]:
    return {"minutes": str(rng.randint(1, 90))}


TOOL_KINDS: tuple[ToolKind, ...] = (
    ToolKind(
        "get_weather", "Get the weather of a city", ("city",),
        (
            "What is the weather in {city}?", "How is the weather in {city}?", "Tell me the weather in {city}.",
            "Is it raining in {city}?", "Weather in {city}?", "What is the weather like in {city} today?",
            "Please check the weather in {city}.", "How warm is it in {city}?", "Do I need an umbrella in {city}?",
            "Tell me how the weather is in {city}.", "Check the weather for {city}.",
            "Is it cold in {city}?", "Is the sun shining in {city}?",
        ),
        _weather, '{{"city": "{city}", "degrees": {degrees}, "sky": "{sky}"}}',
        "It is {degrees} degrees and {sky} in {city}.",
    ),
    ToolKind(
        "get_time", "Get the time in a city", ("city",),
        (
            "What time is it in {city}?", "Tell me the time in {city}.", "How late is it in {city}?",
            "Time in {city}?", "What is the time in {city} now?", "Please check the time in {city}.",
            "What does the clock say in {city}?", "Give me the time in {city}.",
            "Which time is it in {city}?", "What is the local time in {city}?",
            "I want to know the time in {city}.", "Is it already late in {city}?",
        ),
        _time, '{{"city": "{city}", "time": "{time}"}}', "It is {time} in {city}.",
    ),
    ToolKind(
        "calculator", "Calculate an expression", ("expression",),
        (
            "Use the calculator for {expression}.", "Calculate {expression} with the calculator.",
            "Let the calculator work out {expression}.", "With the calculator, what is {expression}?",
            "Please use your calculator: {expression}", "Ask the calculator for {expression}.",
            "Type {expression} into the calculator.", "Compute {expression} with the calculator.",
            "Calculator: {expression}", "What does the calculator give for {expression}?",
            "I need the calculator for {expression}.", "Run {expression} through the calculator.",
        ),
        _calculation, "{value}", "The result is {value}.",
    ),
    ToolKind(
        "send_message", "Send a message to a person", ("to", "text"),
        (
            "Send a message to {to}: {text}", "Write to {to}: {text}", "Send {to} this message: {text}",
            "Message {to}: {text}", "Let {to} know: {text}", "Please send this to {to}: {text}",
            "Tell {to} this: {text}", "Text {to}: {text}", "Send to {to}: {text}",
            "I want to send {to} a message: {text}", "Write {to} a message: {text}",
            "Pass this on to {to}: {text}",
        ),
        _message, '{{"sent": true}}', "I sent your message to {to}.",
    ),
    ToolKind(
        "search", "Search the web", ("query",),
        (
            "Search for {query}", "Search the web for {query}", "Look up {query}", "Find pages about {query}",
            "Please search for {query}", "Do a web search for {query}",
            "Find {query} on the web", "Look for {query}", "Search online for {query}",
            "What does the web say about {query}", "Find out about {query}", "Show me results for {query}",
            "Look {query} up on the web",
        ),
        _search, '{{"found": "{found}"}}', "I found: {found}",
    ),
    ToolKind(
        "set_light", "Switch the light of a room", ("room", "state"),
        (
            "Turn {state} the light in the {room}.", "Switch the light in the {room} {state}.",
            "Light {state} in the {room}, please.", "Turn the {room} light {state}.",
            "I want the light in the {room} {state}.", "Make the {room} light go {state}.",
            "Set the light in the {room} to {state}.", "Put the light in the {room} {state}.",
            "Please switch {state} the light in the {room}.", "The {room} light should be {state}.",
            "Light in the {room}: {state}.", "Can you turn the light in the {room} {state}?",
        ),
        _light, '{{"{room}": "{state}"}}', "The light in the {room} is {state}.",
    ),
    ToolKind(
        "play_song", "Play a song", ("title",),
        (
            "Play the song {title}", "Play {title}", "Put on the song {title}", "I want to hear {title}",
            "Please play {title}", "Start the song {title}",
            "Let me hear {title}", "Play me the song {title}", "Can you play {title}", "Song: {title}",
            "I would like to listen to {title}", "Play for me {title}",
        ),
        _song, '{{"playing": true}}', "Now playing {title}.",
    ),
    ToolKind(
        "set_timer", "Set a timer", ("minutes",),
        (
            "Set a timer for {minutes} minutes.", "Start a timer of {minutes} minutes.",
            "Wake me in {minutes} minutes.", "Timer for {minutes} minutes, please.",
            "Count down {minutes} minutes.", "Tell me when {minutes} minutes are over.",
            "Give me a timer of {minutes} minutes.", "Remind me in {minutes} minutes.",
            "Set the timer to {minutes} minutes.", "I need a timer for {minutes} minutes.",
            "Ring in {minutes} minutes.", "Make it {minutes} minutes on the timer.",
        ),
        _timer, '{{"set": true}}', "The timer is set for {minutes} minutes.",
    ),
)  # fmt: skip

# Tools that exist in one conversation only, so that the model must read their names and arguments.
ACTIONS = ("find", "open", "get", "check", "order", "book", "count", "delete", "move", "read", "make", "rate")
PARAMETERS = ("title", "name", "item", "code", "place", "person", "value", "topic", "location", "key")
INVENTED_PHRASINGS = (
    "Call {tool} with {value}", "Use {tool} for {value}", "Use the tool {tool} with {value}",
    "Run {tool} on {value}", "Please call {tool} for {value}", "I want you to use {tool} with {value}",
    "{action} the {noun} {value}", "Please {action} the {noun} {value}", "Can you {action} the {noun} {value}",
    "Apply {tool} to {value}", "Make {tool} handle {value}", "Let {tool} do {value}",
    "Give {value} to {tool}", "Invoke {tool} with {value}", "Start {tool} with {value}",
    "Could you run {tool} with {value}", "I need {tool} for {value}", "Use {tool} on {value}",
    "Run the tool {tool} with {value}", "I would like to {action} the {noun} {value}",
)  # fmt: skip


def describe(name: str, description: str, parameters: tuple[str, ...]) -> Tool:
    """Write a tool the way the OpenAI API passes it."""
    properties = {parameter: {"type": "string"} for parameter in parameters}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    function = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": function}


def _invented_tool(rng: Random) -> tuple[str, str, str, Tool]:
    action = rng.choice(ACTIONS)
    noun = rng.choice(facts.NOUNS) if rng.random() < 0.7 else invented_word(rng).lower()
    parameter = rng.choice(PARAMETERS)
    return (
        action,
        noun,
        parameter,
        describe(f"{action}_{noun}", f"{action.capitalize()} a {noun}", (parameter,)),
    )


def some_tools(rng: Random, but: str = "") -> list[Tool]:
    """Draw tools to list next to the requested one."""
    number = rng.choice((0, 0, 1, 1, MOST_OTHER_TOOLS))
    known = [
        describe(kind.name, kind.description, kind.parameters) for kind in TOOL_KINDS if kind.name != but
    ]
    return [rng.choice(known) if rng.random() < 0.6 else _invented_tool(rng)[-1] for _ in range(number)]


def _shuffled(tool: Tool, others: list[Tool], rng: Random) -> tuple[Tool, ...]:
    unlike = [other for other in others if other["function"] != tool["function"]]
    tools = [tool, *unlike]
    rng.shuffle(tools)
    return tuple(tools)


def _call(name: str, arguments: dict[str, str]) -> Message:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _call_case(question: str, name: str, arguments: dict[str, str], tools: tuple[Tool, ...]) -> Case:
    expected = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    reasoning = f"I need the tool {name}."
    return Case((user(question),), _call(name, arguments), expected, reasoning, tools=tools, grade="call")


def _call_skill(kind: ToolKind) -> Skill:
    def draw(rng: Random) -> Fact:
        values = kind.draw(rng)
        return Fact("|".join(values[name] for name in kind.parameters), values)

    def build(fact: Fact, phrasing: str, rng: Random) -> Case:
        arguments = {name: fact.values[name] for name in kind.parameters}
        tool = describe(kind.name, kind.description, kind.parameters)
        tools = _shuffled(tool, some_tools(rng, but=kind.name), rng)
        return _call_case(phrasing.format_map(fact.values), kind.name, arguments, tools)

    return Skill("tools", f"call-{kind.name}", kind.phrasings, draw, build, family=kind.name)


def _result_skill(kind: ToolKind, call: Skill) -> Skill:
    def build(fact: Fact, phrasing: str, rng: Random) -> Case:
        asked = call.build(fact, phrasing, rng)
        reply: Message = {"role": "tool", "name": kind.name, "content": kind.result.format_map(fact.values)}
        answer = kind.answer.format_map(fact.values)
        prompt = (*asked.prompt, asked.answer, reply)
        return Case(prompt, assistant(answer), answer, "I have the result.", tools=asked.tools, grade="text")

    return Skill("tools", f"result-{kind.name}", kind.phrasings, call.draw, build, family=kind.name)


def _draw_invented(rng: Random) -> Fact:
    value = invented_word(rng) if rng.random() < 0.5 else any_text(rng).rstrip(".")
    return Fact(value, {"value": value})


def _build_invented(fact: Fact, phrasing: str, rng: Random) -> Case:
    action, noun, parameter, tool = _invented_tool(rng)
    name, value = f"{action}_{noun}", fact.values["value"]
    tools = _shuffled(tool, some_tools(rng, but=name), rng)
    filled = phrasing.format(tool=name, value=value, action=action, noun=noun)
    return _call_case(filled[:1].upper() + filled[1:], name, {parameter: value}, tools)


CALL_SKILLS: tuple[Skill, ...] = (
    *(_call_skill(kind) for kind in TOOL_KINDS),
    Skill("tools", "call-invented", INVENTED_PHRASINGS, _draw_invented, _build_invented),
)
TOOL_SKILLS: tuple[Skill, ...] = (
    *CALL_SKILLS,
    *(_result_skill(kind, call) for kind, call in zip(TOOL_KINDS, CALL_SKILLS, strict=False)),
)
