"""Instructor, over OpenAI's and Anthropic's SDKs."""

from __future__ import annotations

from typing import Any, Literal

import anthropic
import instructor
import openai
from checks import KEY, LAMP_REQUEST, MODEL, URL, WRONG_KEY, check, expect, raises, run
from pydantic import BaseModel, ConfigDict


class Lamp(BaseModel):
    """A lamp."""

    model_config = ConfigDict(extra="forbid")

    room: Literal["kitchen", "garden", "hall"]
    on: bool


conversation = [{"role": "user", "content": LAMP_REQUEST}]


def client_with(mode: instructor.Mode, key: str = KEY) -> Any:
    return instructor.from_openai(openai.OpenAI(base_url=f"{URL}/v1", api_key=key, max_retries=0), mode=mode)


def lamp_by(client: Any, **fields: Any) -> Any:
    fields = {"model": MODEL, "response_model": Lamp, "max_retries": 0, "max_tokens": 200} | fields
    return client.chat.completions.create(messages=conversation, **fields)


@check("tools")
def by_tools() -> None:
    expect(isinstance(lamp_by(client_with(instructor.Mode.TOOLS)), Lamp))


@check("tools, strict")
def by_strict_tools() -> None:
    expect(isinstance(lamp_by(client_with(instructor.Mode.TOOLS_STRICT), temperature=1, seed=2), Lamp))


@check("schema")
def by_schema() -> None:
    client = client_with(instructor.Mode.JSON_SCHEMA)
    expect(isinstance(lamp_by(client, temperature=1, seed=3), Lamp))


@check("schema, streamed in parts")
def in_parts() -> None:
    client = client_with(instructor.Mode.JSON_SCHEMA)
    parts = list(
        client.chat.completions.create_partial(
            model=MODEL, messages=conversation, response_model=Lamp, max_tokens=200
        )
    )
    expect(parts, parts)
    Lamp.model_validate(parts[-1].model_dump())


@check("responses, tools")
def by_responses() -> None:
    client = client_with(instructor.Mode.RESPONSES_TOOLS)
    lamp = client.responses.create(model=MODEL, input=LAMP_REQUEST, response_model=Lamp, max_retries=0)
    expect(isinstance(lamp, Lamp), lamp)


@check("as Anthropic, tools")
def by_anthropic() -> None:
    client = instructor.from_anthropic(anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0))
    expect(isinstance(lamp_by(client), Lamp))


@check("errors")
def errs() -> None:
    error = raises(Exception, lambda: lamp_by(client_with(instructor.Mode.TOOLS, WRONG_KEY)))
    expect("401" in str(error), error)


run()
