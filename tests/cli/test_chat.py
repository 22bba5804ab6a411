"""The terminal chat against a real server over a twin service."""

from __future__ import annotations

import gc
import io
import json
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console
from tests.api.clients import serving
from tests.api.twins import ANSWER_TEXT, MarkingTokenizer, TwinService
from tests.default_settings import make_api_settings
from tests.eventually import eventually
from tests.processes import run_in_process

from mlx_ring.cli import INTERRUPTED
from mlx_ring.cli import chat as chat_module
from mlx_ring.cli.chat import ChatSession, run_chat
from mlx_ring.cli.head_client import ChatServer
from mlx_ring.core.errors import WorkerLost


def lines(*given: str | type[BaseException]) -> Callable[[], str]:
    """Return a reader of a line that gives these lines or keys, one a call, and then Ctrl-D."""
    rest: Iterable[str | type[BaseException]] = iter((*given, EOFError))

    def read() -> str:
        line = next(iter(rest))
        if isinstance(line, str):
            return line
        raise line

    return read


def chat(
    url: str, *given: str | type[BaseException], system: str | None = None, model: str | None = None
) -> tuple[int, str]:
    """Return the exit code and the screen's text."""
    screen = io.StringIO()
    console = Console(file=screen, width=200)
    code = run_chat(url, model, system, console=console, read_line=lines(*given))
    return code, screen.getvalue()


@pytest.fixture(scope="module")
def twin() -> Iterator[tuple[TwinService, str]]:
    """Serve a twin, and yield it with its URL."""
    service = TwinService()
    with serving(service) as url:
        yield service, url


@pytest.mark.parametrize("typed", ["Other", "other:latest", "OTHER:LATEST", "./folder"])
def test_every_name_of_a_served_model_chooses_it_with_one_request(
    typed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    served, asked = {"org/twin": {"org/twin"}, "a": {"a", "other", str(tmp_path / "folder")}}, list[str]()
    monkeypatch.setattr(ChatServer, "served", lambda self: asked.append(self.url) or served)  # pyright: ignore[reportUnknownLambdaType, reportUnknownMemberType, reportUnknownArgumentType]
    assert run_chat("http://127.0.0.1:9", question=typed, read_line=lines()) == 0
    assert capsys.readouterr().out.startswith("a at http://")
    assert len(asked) == 1


def test_a_model_may_stand_before_the_question(twin: tuple[TwinService, str], tmp_path: Path) -> None:
    service, url = twin
    done = run_in_process("chat", "ORG/twin", "What is TCP/IP?", "--url", url, folder=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"{ANSWER_TEXT}\n")
    assert [message["content"] for message in service.tokenizer.conversation] == ["What is TCP/IP?"]
    both = run_in_process("chat", "a", "Hi.", "--model", "b", "--url", url, folder=tmp_path)
    assert (both.returncode, both.stderr.count("name the model once.")) == (2, 1)


@pytest.mark.parametrize(
    ("question", "given"), [("twins", "for another program\n"), ("org/twin", ""), ("qwen3:8b", "")]
)
def test_the_argument_of_a_script_is_the_question_unless_it_names_the_model_of_those_from_the_pipe(
    question: str,
    given: str,
    twin: tuple[TwinService, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    service, url = twin
    monkeypatch.setattr("sys.stdin", io.StringIO(given))
    assert run_chat(url, question=question) == 0
    assert capsys.readouterr() == (f"{ANSWER_TEXT}\n", "")
    assert service.tokenizer.conversation[-1]["content"] == question
    assert sys.stdin.readline() == given


def test_a_model_beside_a_pipe_gets_the_questions_from_it(
    twin: tuple[TwinService, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    service, url = twin
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello.\nAnd you?\n"))
    assert run_chat(url, question="ORG/twin") == 0
    assert capsys.readouterr().out == f"{ANSWER_TEXT}\n" * 2
    asked = [each["content"] for each in service.tokenizer.conversation if each["role"] == "user"]
    assert asked == ["Hello.", "And you?"]
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello.\n"))
    assert run_chat(url, question="qwen3:8b") == 2
    assert "does not serve 'qwen3:8b'; it has org/twin." in capsys.readouterr().err


def test_a_missing_api_key_is_asked_for_by_its_flag() -> None:
    with serving(TwinService(), make_api_settings(api_keys=("key",))) as url:
        code, screen = chat(url, "Hello.")
    assert code != 0
    assert screen == "This server requires an API key: give it with --api-key, or set MLX_RING_API_KEY.\n"


def test_answers_are_printed_and_sent_with_the_next_message(twin: tuple[TwinService, str]) -> None:
    service, url = twin
    code, screen = chat(f"{url}/v1/", "Hello.", "", "And you?", system="Be kind.")
    assert code == 0
    assert screen.count(ANSWER_TEXT) == 2
    assert f"{len(ANSWER_TEXT.encode()) + 1} tokens" in screen
    assert [message["content"] for message in service.tokenizer.conversation] == [
        "Be kind.",
        "Hello.",
        ANSWER_TEXT,
        "And you?",
    ]


def test_reasoning_is_shown_before_the_answer_and_not_sent_again() -> None:
    service = TwinService(tokenizer=MarkingTokenizer(), says="<think>Hm.</think>Hello.")
    with serving(service) as url:
        _, screen = chat(url, "One.", "Two.")
    assert screen.count("Hm.\n\nHello.\n") == 2
    assert [message["content"] for message in service.tokenizer.conversation] == ["One.", "Hello.", "Two."]


def test_reset_drops_the_messages_and_keeps_the_system_prompt(twin: tuple[TwinService, str]) -> None:
    service, url = twin
    chat(url, "Hello.", "/system Be brief.", "One.", "/reset", "Two.")
    assert [message["content"] for message in service.tokenizer.conversation] == ["Be brief.", "Two."]


def opened(service: TwinService) -> list[Any]:
    """Return the sampling parameters of each request."""
    operations = (operation for step in service.executor.sent for operation in step.operations)
    return [operation.open.sampling for operation in operations if operation.HasField("open")]


def test_sampling_parameters_go_with_every_question() -> None:
    service = TwinService()
    with serving(service) as url:
        screen = io.StringIO()
        given = {"temperature": 0.25, "top_p": None, "max_tokens": 7, "seed": None}
        asked = lines("One.", "/set temperature", "/set top_p 0.5", "/set seed 3", "Two.")
        run_chat(url, sampling=given, console=Console(file=screen, width=200), read_line=asked)
    first, second = opened(service)
    assert (first.temperature, first.top_p) == (0.25, 1.0)
    assert (second.temperature, second.top_p) == (1.0, 0.5)
    assert "seed is 3." in screen.getvalue()
    assert screen.getvalue().count("7 tokens, ") == 2


@pytest.mark.parametrize("given", ["", "heat 1", "temperature warm", "temperature nan", "max_tokens 1.5"])
def test_a_parameter_that_cannot_be_set_is_named_and_changes_nothing(given: str) -> None:
    service = TwinService()
    with serving(service) as url:
        _, screen = chat(url, f"/set {given}", "Hello.")
    name, _, value = given.partition(" ")
    assert f"'{value}' is no number for {name}." in screen or f"not '{name}'." in screen
    assert [sampling.temperature for sampling in opened(service)] == [1.0]


def test_one_question_prints_its_answer_alone(capfd: pytest.CaptureFixture[str]) -> None:
    service = TwinService(tokenizer=MarkingTokenizer(), says="<think>Hm.</think>Hello.")
    with serving(service) as url:
        assert run_chat(url, question="Hi.") == 0
        assert capfd.readouterr() == ("Hello.\n", "")
        service.error = WorkerLost("Worker 1 of stage 0 died.")
        assert run_chat(url, question="Hi.") == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("Worker 1 of stage 0 died.")


def test_a_number_that_no_request_carries_is_named(tmp_path: Path) -> None:
    done = run_in_process("chat", "Hi.", "--temperature", "inf", folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "mlx-ring: --temperature is inf; it must be a finite number.\n"


def test_help_and_unknown_commands_send_no_request() -> None:
    service = TwinService()
    with serving(service) as url:
        _, screen = chat(url, "/help", "/nonsense [b]", "/exit", "never read")
    assert "/reset" in screen
    assert "no /nonsense" in screen
    assert not service.executor.sent


@pytest.fixture
def interrupts() -> Generator[None]:
    """Let Ctrl-C interrupt this process: a run in the background of a shell inherits that it is ignored.

    Python drops an interrupt that comes during a callback of the garbage collector, and pytest reports it as a fault.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.disable()
    yield
    gc.enable()
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts")
def test_ctrl_c_stops_the_answer_and_not_the_chat() -> None:
    service = TwinService(automatic=False)

    def requests() -> int:
        scheduler = service.engine.stats().scheduler
        return scheduler.running + scheduler.waiting

    def press() -> None:
        main = threading.main_thread().ident
        assert main is not None
        eventually(requests)
        while requests():
            signal.pthread_kill(main, signal.SIGINT)
            # It is dropped where an object is being freed.
            again_at = time.monotonic() + 5
            eventually(lambda again_at=again_at: not requests() or time.monotonic() > again_at)

    with serving(service, make_api_settings(keep_alive_s=0.2)) as url:
        presser = threading.Thread(target=press)
        presser.start()
        code, screen = chat(url, "Hello.", KeyboardInterrupt, "/help")
        presser.join()
    assert code == 0
    assert "stopped" in screen
    assert "Ctrl-D leaves" in screen
    assert "/system TEXT" in screen
    assert service.engine.stats().finished == {"abort": 1}


def test_an_error_is_shown_and_the_chat_continues(
    twin: tuple[TwinService, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    service, url = twin
    monkeypatch.setattr(service, "error", WorkerLost("Worker 1 of stage 0 died [exit 9]."))
    code, screen = chat(url, "Hello.", "/help")
    assert code == 0
    assert "Worker 1 of stage 0 died [exit 9]." in screen
    assert "/system TEXT" in screen


def test_a_message_without_an_answer_is_dropped(twin: tuple[TwinService, str]) -> None:
    service, url = twin
    _, screen = chat(url, "x" * 5000, "Hello.")
    assert "context" in screen
    assert [message["content"] for message in service.tokenizer.conversation] == ["Hello."]


def test_the_first_line_has_an_ipv6_address_with_its_brackets(monkeypatch: pytest.MonkeyPatch) -> None:
    def served(_server: ChatServer) -> dict[str, set[str]]:
        return {"demo": {"demo"}}

    monkeypatch.setattr(ChatServer, "served", served)
    code, screen = chat("http://[fe80::1%25en0]:8100/v1")
    assert code == 0
    assert screen.startswith("demo at http://[fe80::1%en0]:8100. Type /help")


def test_a_missing_server_is_reported_in_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    code, screen = chat(f"http://127.0.0.1:{port}")
    assert code == 2
    assert screen == f"No server answers at http://127.0.0.1:{port}. Start one with: mlx-ring serve\n"


@pytest.mark.parametrize("url", ["127.0.0.1:8100", "ftp://x", ""])
def test_an_invalid_address_is_reported_in_one_line(url: str) -> None:
    code, screen = chat(url)
    assert code == 2
    assert "no address" in screen
    assert screen.count("\n") == 1


@pytest.mark.parametrize(
    ("typed", "code", "said"),
    [
        ("org/twin", 0, "org/twin at http://"),
        ("qwen3:8b", 2, "does not serve 'qwen3:8b'; it has org/twin."),
        ("twins", 0, ANSWER_TEXT),
        ("a:b", 0, ANSWER_TEXT),
        ("ORG/Twin", 0, "org/twin at http://"),
        ("demo", 2, "does not serve 'demo'; it has org/twin."),
        ("qwen3:latest", 2, "does not serve 'qwen3:latest'; it has org/twin."),
        ("Qwen/Qwen3-0.6B", 2, "does not serve 'Qwen/Qwen3-0.6B'; it has org/twin."),
        ("mlx-community/Qwen3-8B-4bit", 2, "does not serve 'mlx-community/Qwen3-8B-4bit'"),
        ("./folder", 2, "does not serve './folder'"),
        ("TCP/IP", 0, ANSWER_TEXT),
        ("IPv4/IPv6", 0, ANSWER_TEXT),
        ("Phi4:", 0, ANSWER_TEXT),
        ("qwen3 : 8b", 0, ANSWER_TEXT),
        ("Why is org/twin slow", 0, ANSWER_TEXT),
    ],
)
def test_a_model_in_the_place_of_the_question_is_not_asked_as_one(
    typed: str, code: int, said: str, twin: tuple[TwinService, str], capsys: pytest.CaptureFixture[str]
) -> None:
    _, url = twin
    assert run_chat(url, question=typed, read_line=lines()) == code
    assert said in "".join(capsys.readouterr())


def test_an_unknown_model_is_reported_with_the_served_models(twin: tuple[TwinService, str]) -> None:
    _, url = twin
    assert chat(url, model="twin")[0] == 0
    code, screen = chat(url, model="other")
    assert code == 2
    assert "'other'" in screen
    assert "org/twin" in screen


def test_an_answer_cannot_send_terminal_control_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    def send(_: object, request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        content = (
            b'data: {"choices":[{"delta":{"content":"a\\u001b[2J\\u009bb[bold]\\n"}}]}\n\ndata: [DONE]\n\n'
        )
        return httpx.Response(200, content=content)

    monkeypatch.setattr(httpx.HTTPTransport, "handle_request", send)
    _, screen = chat("http://127.0.0.1:1", "Hello.")
    assert "a[2Jb[bold]\n" in screen
    assert "\x1b" not in screen


@contextmanager
def scripted_server(*answers: tuple[int, str]) -> Generator[tuple[str, list[str | None]]]:
    """Serve a model whose chats get these statuses and bodies in turn. Yield the URL, and the ids that chats sent."""
    rest, sent = iter(answers), list[str | None]()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(200, '{"data": [{"id": "m"}]}')

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            sent.append(self.headers["last-event-id"])
            self.answer(*next(rest))

        def answer(self, status: int, body: str) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name in the base class
            del format, args

    with served(Handler) as url:
        yield url, sent


def kept_event(number: int, text: str) -> str:
    delta = {"choices": [{"delta": {"content": text}, "finish_reason": None}]}
    return f"id: c:{number}\ndata: {json.dumps(delta)}\n\n"


def test_answer_of_a_journal_goes_on_after_a_broken_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_ring.cli.head_client._TRY_EVERY_S", 0.0)
    answers = (
        (200, kept_event(0, "Par") + ": keep-alive\n"),
        (503, '{"error": {"message": "The model is being loaded."}}'),
        (200, kept_event(1, "is.") + "data: [DONE]\n\n"),
    )
    with scripted_server(*answers) as (url, sent):
        _, screen = chat(url, "Hello.")
    assert "Paris." in screen
    assert sent == [None, "c:0", "c:0"]


def test_answer_that_no_journal_keeps_ends_with_its_connection() -> None:
    event = kept_event(0, "Par").partition("\n")[2]
    with scripted_server((200, event)) as (url, sent):
        _, screen = chat(url, "Hello.")
    assert "broke off" in screen
    assert sent == [None]


def event(content: object) -> str:
    return f"data: {json.dumps(content)}\n\n"


NOT_AS_OPENAI = "answers, but not as an OpenAI API does."


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"choices": [{"delta": None}]}, "Par\n"),
        ({"choices": [{"message": {"content": "x"}}]}, "Par\n"),
        ({"choices": None, "usage": {"prompt_tokens": 3}, "performance": None}, "Par\n"),
        ({"choices": [{"delta": {"content": [{"text": "x"}]}}]}, NOT_AS_OPENAI),
        ({"choices": ["x"]}, NOT_AS_OPENAI),
        ({"choices": [], "usage": "x"}, NOT_AS_OPENAI),
        ([1], NOT_AS_OPENAI),
        ({"error": "overloaded"}, "Par\noverloaded\n"),
        ({"error": {"code": 500}}, "Par\n{'code': 500}\n"),
        ({"error": 5}, "Par\n5\n"),
        ({"error": None, "choices": []}, "Par\n"),
    ],
)
def test_an_event_of_another_server_ends_no_chat(content: object, said: str) -> None:
    first = event({"choices": [{"delta": {"content": "Par"}}]})
    with scripted_server((200, first + event(content) + "data: [DONE]\n\n")) as (url, _):
        code, screen = chat(url, "Hello.", "/help")
    assert code == 0
    assert said in screen
    assert "/system TEXT" in screen


def test_reasoning_of_another_server_is_shown_under_its_second_name() -> None:
    reasoning = event({"choices": [{"delta": {"reasoning_content": "Hm."}}]})
    with scripted_server((200, f"{reasoning}data: [DONE]\n\n")) as (url, _):
        _, screen = chat(url, "Hello.")
    assert "Hm." in screen


def test_a_refusal_that_is_a_text_alone_is_shown() -> None:
    with scripted_server((400, '{"error": "Too long."}')) as (url, _):
        _, screen = chat(url, "Hello.")
    assert "\nToo long.\n" in screen


def test_a_server_without_models_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def send(_: object, _request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={"data": []})

    monkeypatch.setattr(httpx.HTTPTransport, "handle_request", send)
    assert chat("http://127.0.0.1:1") == (2, "http://127.0.0.1:1 serves no model.\n")


def piped(
    url: str, data: bytes, monkeypatch: pytest.MonkeyPatch, *, errors: str = "strict"
) -> tuple[int, str]:
    """Return the exit code and the standard output of a chat whose questions come from a pipe."""
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8", errors=errors))
    screen = io.StringIO()
    code = run_chat(url, console=Console(file=screen, width=40))
    return code, screen.getvalue()


def test_the_exit_code_says_whether_questions_from_a_pipe_were_answered(
    twin: tuple[TwinService, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    service, url = twin
    assert piped(url, b"Hello.\nAnd you?\n", monkeypatch) == (0, f"{ANSWER_TEXT}\n" * 2), (
        "nothing but answers"
    )
    monkeypatch.setattr(
        service, "error", WorkerLost("Worker 1 of stage 0 died [exit 9], as the log of it says.")
    )
    capsys.readouterr()
    assert piped(url, b"Hello.\n", monkeypatch) == (1, "")
    problem = "Worker 1 of stage 0 died [exit 9], as the log of it says. The model is loaded again.\n"
    assert capsys.readouterr().err == problem


def test_a_question_from_a_pipe_may_begin_with_a_path_and_commands_remain_commands(
    twin: tuple[TwinService, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = b"/etc/hosts: what is it?\n/reset\n/set seed 1\n/help\n/exit\nHello.\n"
    assert piped(twin[1], data, monkeypatch) == (0, f"{ANSWER_TEXT}\n")
    said = capsys.readouterr().err
    assert "There is no" not in said
    assert "New conversation." in said


def interrupt(*_: object) -> str:
    raise KeyboardInterrupt


@pytest.mark.parametrize(("place", "name"), [(chat_module, "_read_line"), (ChatSession, "_print_stream")])
def test_ctrl_c_ends_a_chat_from_a_pipe_and_prints_nothing(
    place: object, name: str, twin: tuple[TwinService, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, name, interrupt)
    assert piped(twin[1], b"Hello.\nAnd you?\n", monkeypatch) == (INTERRUPTED, "")


@pytest.mark.parametrize(("errors", "code"), [("strict", 2), ("surrogateescape", 1)])
def test_input_that_is_no_text_is_not_taken_for_a_fault_of_the_server(
    errors: str,
    code: int,
    twin: tuple[TwinService, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert piped(twin[1], b"Hel\xfflo.\n", monkeypatch, errors=errors) == (code, "")
    problem = capsys.readouterr().err
    assert "not text in UTF-8" in problem or "not UTF-8" in problem
    assert "OpenAI" not in problem


def test_a_key_that_no_header_carries_is_refused(tmp_path: Path) -> None:
    for command in (["chat"], ["run", "demo"], ["models", "load", "demo"], ["bench"]):
        done = run_in_process(*command, "--api-key", "schl\u00fcssel", folder=tmp_path)
        assert done.returncode == 2
        assert "printable ASCII characters" in done.stderr
        assert "schl" not in done.stderr


@pytest.mark.parametrize(
    "command",
    [
        ("chat", "hello"),
        ("run", "m", "hello"),
        ("models", "load", "m"),
        ("cluster", "status"),
        ("plan", "demo"),
        ("capacity", "demo"),
        ("node", "drain", "mini"),
        ("replan",),
        ("bench",),
    ],
    ids=" ".join,
)
def test_a_key_in_a_file_is_not_sent_to_a_server_that_the_file_does_not_set_up(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / ".env").write_text(
        "MLX_RING_API_KEY=of-the-file\nMLX_RING_HOST=0.0.0.0\nMLX_RING_PORT=8123\n"
    )
    with stranger() as (url, keys):
        refused = run_in_process(*command, "--url", url, folder=tmp_path)
        assert keys
        assert set(keys) == {None}, "sent to another server"
        said = " ".join(refused.stderr.split())
        assert (
            "sent only to the server that the file sets up: for that one, use --url http://127.0.0.1:8123."
            in said
        )
        keys.clear()
        run_in_process(*command, "--url", url, "--api-key", "of-the-flag", folder=tmp_path)
        assert set(keys) == {"Bearer of-the-flag"}


@contextmanager
def stranger() -> Generator[tuple[str, list[str | None]]]:
    """Serve nothing but refusals of keys. Yield the URL, and the keys that were sent."""
    keys: list[str | None] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            keys.append(self.headers["authorization"])
            body = b'{"error": {"message": "Give a key."}}'
            self.rfile.read(int(self.headers["content-length"] or 0))
            self.send_response(401)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET  # noqa: N815 - its name in the base class

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name in the base class
            del format, args

    with served(Handler) as url:
        yield url, keys


@contextmanager
def served(handler: type[BaseHTTPRequestHandler]) -> Generator[str]:
    """Serve with a handler of requests, and yield the URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
