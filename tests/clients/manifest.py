"""Tested clients, and the settings that connect each to a server."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

PINS = Path(__file__).parent / "pins"
PROGRAMS = Path(__file__).parent / "programs"
_NAMED_CHECK = re.compile(r'^@?check\("([^"]+)"', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Client:
    name: str
    """Name, also of its requirements in `pins/` and of its environment."""
    package: str
    """Package whose version the page shows."""
    program: str
    settings: str
    """Settings for a server at URL that requires KEY, as docs/clients.md shows them."""
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    """Variables that keep it from using the internet."""
    only_on: tuple[str, str] | None = None
    """System and processor of its package, by `sys.platform` and `platform.machine()`; None if it runs everywhere."""

    @property
    def in_javascript(self) -> bool:
        return self.program.endswith(".mjs")

    @property
    def pin(self) -> Path:
        """Lock file of its environment, with exact versions of all packages."""
        return PINS / self.name / "package-lock.json" if self.in_javascript else PINS / f"{self.name}.txt"

    @property
    def version(self) -> str:
        text = self.pin.read_text(encoding="utf-8")
        pattern = (
            rf'"node_modules/{self.package}": {{\s*"version": "([^"]+)"'
            if self.in_javascript
            else rf"^{self.package}==(\S+)"
        )
        found = re.search(pattern, text, re.MULTILINE)
        if found is None:
            raise LookupError(f"{self.pin} pins no {self.package}; run scripts/pin_clients {self.name}.")
        return found.group(1)

    @property
    def checks(self) -> Sequence[str]:
        """Names of the checks in its program, in order."""
        return _NAMED_CHECK.findall((PROGRAMS / self.program).read_text(encoding="utf-8"))


def _openai(major: int) -> Client:
    return Client(f"openai-{major}", "openai", "with_openai.py", '`OpenAI(base_url="URL/v1", api_key="KEY")`')


def _anthropic(major: int) -> Client:
    return Client(
        f"anthropic-{major}", "anthropic", "with_anthropic.py", '`Anthropic(base_url="URL", api_key="KEY")`'
    )


_LOCAL_COSTS = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}

_LINUX_X86 = ("linux", "x86_64")

CLIENTS: Sequence[Client] = (
    _openai(1),
    _openai(2),
    _openai(3),
    _anthropic(0),
    _anthropic(2),
    Client(
        "ollama", "ollama", "with_ollama.py", '`Client(host="URL", headers={"Authorization": "Bearer KEY"})`'
    ),
    Client(
        "litellm",
        "litellm",
        "with_litellm.py",
        '`completion(model="openai/MODEL", api_base="URL/v1", api_key="KEY")`; `anthropic/`, `ollama_chat/` with `api_base="URL"`, '
        "`hosted_vllm/` with `/v1`",
        _LOCAL_COSTS,
    ),
    Client(
        "langchain-openai",
        "langchain-openai",
        "with_langchain_openai.py",
        '`ChatOpenAI(base_url="URL/v1", api_key="KEY", model="MODEL")`; `OpenAIEmbeddings(..., check_embedding_ctx_length=False)`, '
        "because it would otherwise send token ids of another model",
    ),
    Client(
        "langgraph",
        "langgraph",
        "with_langgraph.py",
        'a graph with `ChatOpenAI(base_url="URL/v1", api_key="KEY", model="MODEL")`',
    ),
    Client(
        "llama-index",
        "llama-index-core",
        "with_llama_index.py",
        '`OpenAILike(api_base="URL/v1", api_key="KEY", model="MODEL", is_chat_model=True, is_function_calling_model=True)`',
    ),
    Client(
        "haystack",
        "haystack-ai",
        "with_haystack.py",
        '`OpenAIChatGenerator(api_base_url="URL/v1", api_key=Secret.from_token("KEY"), model="MODEL")`',
        {"HAYSTACK_TELEMETRY_ENABLED": "False"},
    ),
    Client(
        "smolagents",
        "smolagents",
        "with_smolagents.py",
        '`OpenAIModel("MODEL", api_base="URL/v1", api_key="KEY")`',
    ),
    Client(
        "instructor",
        "instructor",
        "with_instructor.py",
        '`instructor.from_openai(OpenAI(base_url="URL/v1", api_key="KEY"), mode=Mode.JSON_SCHEMA)`',
    ),
    Client(
        "pydantic-ai",
        "pydantic-ai-slim",
        "with_pydantic_ai.py",
        '`OpenAIChatModel("MODEL", provider=OpenAIProvider(base_url="URL/v1", api_key="KEY"))`',
    ),
    Client(
        "openai-agents",
        "openai-agents",
        "with_openai_agents.py",
        '`OpenAIChatCompletionsModel(model="MODEL", openai_client=AsyncOpenAI(base_url="URL/v1", api_key="KEY"))`; '
        "`set_tracing_disabled(True)`, because it would otherwise report to OpenAI",
    ),
    Client(
        "llm",
        "llm",
        "with_llm.py",
        "in `extra-openai-models.yaml`: `model_id`, `model_name: MODEL`, `api_base: URL/v1`, `api_key_name`, `supports_tools: true`, "
        "`supports_schema: true`",
    ),
    Client(
        "aider",
        "aider-chat",
        "with_aider.py",
        "`aider --model openai/MODEL --openai-api-base URL/v1 --openai-api-key KEY`",
        _LOCAL_COSTS,
    ),
    Client("openai-js", "openai", "with_openai.mjs", '`new OpenAI({ baseURL: "URL/v1", apiKey: "KEY" })`'),
    Client(
        "anthropic-js",
        "@anthropic-ai/sdk",
        "with_anthropic.mjs",
        '`new Anthropic({ baseURL: "URL", apiKey: "KEY" })`',
    ),
    Client(
        "ollama-js",
        "ollama",
        "with_ollama.mjs",
        '`new Ollama({ host: "URL", headers: { Authorization: "Bearer KEY" } })`',
    ),
    Client(
        "vercel-ai",
        "ai",
        "with_vercel_ai.mjs",
        '`createOpenAICompatible({ name: "mlx-ring", baseURL: "URL/v1", apiKey: "KEY" })("MODEL")`; '
        '`createAnthropic({ baseURL: "URL/v1", apiKey: "KEY" })("MODEL")`',
    ),
    Client(
        "codex",
        "@openai/codex",
        "with_codex.mjs",
        'in `~/.codex/config.toml`: `model`, `model_provider`, and under `[model_providers.NAME]` `name`, `base_url = "URL/v1"`, '
        '`env_key`, `wire_api = "responses"`',
    ),
    Client(
        "claude-code",
        "@anthropic-ai/claude-code",
        "with_claude_code.mjs",
        "`ANTHROPIC_BASE_URL=URL ANTHROPIC_AUTH_TOKEN=KEY claude --model MODEL`",
        {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1"},
    ),
    Client(
        "continue-cli",
        "@continuedev/cli",
        "with_continue_cli.mjs",
        "`cn --config config.yaml`, with `provider: openai`, `apiBase: URL/v1`, `apiKey: KEY` and `model: MODEL`",
        {"CONTINUE_TELEMETRY_ENABLED": "0", "CONTINUE_METRICS_ENABLED": "0"},
    ),
    Client(
        "opencode",
        "opencode-linux-x64",
        "with_opencode.mjs",
        'in `opencode.json`: a provider with `"npm": "@ai-sdk/openai-compatible"`, '
        '`"options": {"baseURL": "URL/v1", "apiKey": "KEY"}` and `models`, as in [apps.md](apps.md#opencode)',
        {
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
        },
        only_on=_LINUX_X86,
    ),
    Client(
        "cline",
        "@cline/cli-linux-x64",
        "with_cline.mjs",
        "`cline auth -p openai -k KEY -b URL/v1 -m MODEL`",
        only_on=_LINUX_X86,
    ),
    Client(
        "llm-comply",
        "llm-comply",
        "with_llm_comply.py",
        "`llm-comply --format openai-chat -u URL/v1 -k KEY -m MODEL`",
    ),
    Client(
        "aiperf",
        "aiperf",
        "with_aiperf.py",
        "`aiperf profile --url URL --model MODEL --api-key KEY --endpoint-type chat --streaming --tokenizer FOLDER`",
    ),
)
