"""The response as a whole: what it repeats of the request, and what it cost."""

from __future__ import annotations

from mlx_ring.api.json_lines import Json
from mlx_ring.api.openai.formats import JsonObjectFormat
from mlx_ring.api.openai.responses.request import (
    FunctionTool,
    JsonSchemaFormat,
    ResponsesRequest,
)
from mlx_ring.core.types import SamplingParams


def response_of(fields: ResponsesRequest, sampling: SamplingParams, **identity: object) -> Json:
    """All that is known before the answer.

    Args:
        fields: the request.
        sampling: how tokens are drawn, the model's own defaults included.
        identity: `id`, `model` and `created_at`.
    """
    return identity | {
        "object": "response",
        "status": "in_progress",
        "background": False,
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "max_tool_calls": fields.max_tool_calls,
        "metadata": fields.metadata or {},
        "output": [],
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "previous_response_id": None,
        "prompt_cache_key": fields.prompt_cache_key,
        "reasoning": _reasoning(fields),
        "safety_identifier": fields.safety_identifier,
        "service_tier": "default",
        "store": False,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "text": _text(fields),
        "tool_choice": _tool_choice(fields),
        "tools": [_tool(tool) for tool in fields.tools or ()],
        "top_logprobs": fields.top_logprobs or 0,
        "truncation": "disabled",
        "usage": None,
        "user": fields.user,
    }


def usage_of(prompt: int, cached: int, completion: int, reasoning: int) -> Json:
    """Tokens: cached ones are of the prompt, those of reasoning of what was generated."""
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": prompt + completion,
    }


def _reasoning(fields: ResponsesRequest) -> Json:
    given = fields.reasoning
    return (
        {"effort": None, "summary": None}
        if given is None
        else {"effort": given.effort, "summary": given.summary}
    )


def _text(fields: ResponsesRequest) -> Json:
    given = fields.text
    shown = {"type": "text"} if given is None or given.format is None else _format(given.format)
    return {"format": shown, "verbosity": (given and given.verbosity) or "medium"}


def _format(given: object) -> Json:
    if isinstance(given, JsonSchemaFormat):
        return {
            "type": "json_schema",
            "name": given.name,
            "schema": given.schema_,
            "description": given.description,
            "strict": given.strict,
        }
    return {"type": "json_object" if isinstance(given, JsonObjectFormat) else "text"}


def _tool_choice(fields: ResponsesRequest) -> object:
    choice = fields.tool_choice or "auto"
    return choice if isinstance(choice, str) else choice.model_dump()


def _tool(tool: FunctionTool) -> Json:
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": bool(tool.strict),
    }
