"""Log lines, each in a process of its own, because logging belongs to a whole process; the log buffer."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mlx_ring.core.environment import inherited_environment
from mlx_ring.core.logs import (
    BUFFERED_LINES,
    LONGEST_BUFFERED_LINE,
    LogBuffer,
    LogFormat,
    is_tagged,
    make_formatter,
)

TAG = re.compile(
    r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3} (DEBUG|INFO|WARNING|ERROR|CRITICAL) "
    r"node=mini process=worker-1-0 rank=0 epoch=(-|\d+) \S+: "
)
CONFIGURE = (
    "import logging, sys, warnings, threading; from pathlib import Path; "
    "from mlx_ring.core.logs import configure_logging, set_log_epoch; "
    "configure_logging(process='worker-1-0', node='mini', rank=0, level='info', log_dir=Path(sys.argv[1])); "
)


def run(code: str, log_dir: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, str(log_dir)],
        capture_output=True,
        text=True,
        env=inherited_environment({"TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"}),
        check=False,
    )


def lines_of(code: str, log_dir: Path, *, before: str = "") -> list[str]:
    """Return the lines of such a process on stderr; check that its file has the same."""
    done = run(before + CONFIGURE + code, log_dir)
    lines = done.stderr.splitlines()
    file = log_dir / "worker-1-0.log"
    if file.exists():
        assert file.read_text().splitlines() == lines
    return lines


def test_a_line_carries_node_process_rank_and_epoch(tmp_path: Path) -> None:
    (line, later) = lines_of(
        "log = logging.getLogger('a.b'); log.info('hello %d', 1); set_log_epoch(3); log.info('again')",
        tmp_path,
    )
    assert TAG.match(line)
    assert line.endswith("rank=0 epoch=- a.b: hello 1")
    assert later.endswith("rank=0 epoch=3 a.b: again")


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("name", "import_code"),
    [
        ("uvicorn.access", "import uvicorn.config; "),
        ("transformers", "import transformers.utils.logging as t; t.get_logger('transformers'); "),
        ("huggingface_hub", "import huggingface_hub.utils.logging as h; h.get_logger('huggingface_hub'); "),
        ("grpc", "import grpc; "),
        ("httpx", "import httpx; "),
    ],
)
def test_lines_of_third_party_loggers_carry_the_tag_whenever_they_were_made(
    name: str, import_code: str, when: str, tmp_path: Path
) -> None:
    code = f"logging.getLogger({name!r}).warning('theirs')"
    (line,) = (
        lines_of(code, tmp_path, before=import_code)
        if when == "before"
        else lines_of(import_code + code, tmp_path)
    )
    assert TAG.match(line)
    assert line.endswith(f"{name}: theirs")


def test_a_handler_attached_later_by_a_library_writes_nothing(tmp_path: Path) -> None:
    code = (
        "theirs = logging.getLogger('theirs'); theirs.addHandler(logging.StreamHandler()); "
        "theirs.propagate = False; theirs.warning('once')"
    )
    assert len(lines_of(code, tmp_path)) == 1


def test_warnings_are_logged(tmp_path: Path) -> None:
    lines = lines_of("warnings.warn('careful')", tmp_path)
    assert lines
    assert all(TAG.match(line) for line in lines)
    assert "py.warnings" in lines[0]


@pytest.mark.parametrize(
    "code",
    [
        "1 / 0",
        "exec('try: 1 / 0\\nexcept ZeroDivisionError: logging.exception(\"caught\")')",
        "thread = threading.Thread(target=lambda: 1 / 0); thread.start(); thread.join()",
    ],
)
def test_each_line_of_a_traceback_carries_the_tag(code: str, tmp_path: Path) -> None:
    lines = lines_of(code, tmp_path)
    assert "ZeroDivisionError" in lines[-1]
    assert all(TAG.match(line) for line in lines)


def test_records_below_the_level_are_not_written(tmp_path: Path) -> None:
    chatty = "; ".join(f"logging.getLogger({name!r}).info('no')" for name in ("httpx", "httpx2.client"))
    assert lines_of(f"logging.debug('no'); {chatty}", tmp_path) == []


def test_a_log_folder_that_cannot_be_made_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    lines = lines_of("logging.info('continues')", tmp_path / "file" / "logs")
    assert "logs cannot be written (File exists): log lines" in lines[0]
    assert lines[1].endswith("continues")


def test_a_message_that_grpc_cannot_decode_is_one_line(tmp_path: Path) -> None:
    code = (
        "class DecodeError(Exception): pass\n"
        "log = logging.getLogger('grpc._common')\n"
        "for error in (DecodeError('wire format was corrupt'), ValueError('our own')):\n"
        "    try: raise error\n"
        "    except Exception: log.exception('could not deserialize')\n"
    )
    first, *others = lines_of("\n" + code, tmp_path)
    assert first.endswith("could not deserialize: wire format was corrupt")
    assert any("ValueError: our own" in line for line in others)
    assert any("Traceback" in line for line in others)


def test_early_records_are_shown_at_once_and_written_to_the_log_later(tmp_path: Path) -> None:
    early = (
        "import logging; from mlx_ring.core.logs import keep_early_records; keep_early_records(); "
        "logging.getLogger('a').warning('early'); "
    )
    done = run(early + CONFIGURE + "logging.getLogger('a').info('later')", tmp_path)
    shown, later = done.stderr.splitlines()
    assert shown == "early"
    first, second = (tmp_path / "worker-1-0.log").read_text().splitlines()
    assert second == later
    assert TAG.match(first)
    assert first.endswith(" a: early")
    quiet = run(early + CONFIGURE.replace("'info'", "'error'"), tmp_path / "quiet")
    assert quiet.stderr == "early\n"
    assert (tmp_path / "quiet" / "worker-1-0.log").read_text() == ""


QUIET = CONFIGURE.replace("log_dir=", "to_stderr=False, log_dir=")


def test_without_stderr_the_file_has_all_lines_and_stderr_only_the_final_error(
    tmp_path: Path,
) -> None:
    code = (
        "from mlx_ring.core.logs import pass_on; logging.getLogger('a').error('once'); pass_on('a child line'); "
        "raise ValueError('the end')"
    )
    done = run(QUIET + code, tmp_path)
    assert all(TAG.match(line) for line in done.stderr.splitlines())
    assert done.stderr.splitlines()[0].endswith("Ended by an error.")
    assert "ValueError: the end" in done.stderr
    assert "once" not in done.stderr
    assert "child" not in done.stderr
    lines = (tmp_path / "worker-1-0.log").read_text()
    assert "a: once" in lines
    assert "ValueError: the end" in lines


def test_stderr_has_all_lines_if_the_file_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = run(QUIET + "logging.getLogger('a').info('once')", tmp_path / "file")
    assert "log lines are written to stderr only" in done.stderr
    assert done.stderr.splitlines()[-1].endswith("a: once")


FULL_DISK = """
import resource
log = logging.getLogger('a')
_, most = resource.getrlimit(resource.RLIMIT_FSIZE)
log.info('before')
for outage in range(2):
    resource.setrlimit(resource.RLIMIT_FSIZE, (SPACE, most))
    for number in range(50):
        log.info('lost %d', number)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    for number in range(50):
        log.info('kept %d in %d', number, outage)
"""


@pytest.mark.parametrize("space", ["1", "os.path.getsize(log_file) + 30"])
def test_a_full_disk_is_reported_once_per_outage_and_the_file_has_all_later_lines(
    space: str, tmp_path: Path
) -> None:
    file = tmp_path / "worker-1-0.log"
    code = f"import os; log_file = {str(file)!r}\n" + FULL_DISK.replace("SPACE", space)
    shown = run(CONFIGURE + code, tmp_path).stderr.splitlines()
    assert all(TAG.match(line) for line in shown)
    (problem, again) = [line for line in shown if " a: " not in line]
    assert "WARNING" in problem
    assert f"The log file {file} cannot be written (File too large)" in problem
    assert again.split(": ", 1)[1] == problem.split(": ", 1)[1]
    written = file.read_text()
    kept = [f"a: kept {number} in {outage}" for outage in range(2) for number in range(50)]
    assert [line.partition(" epoch=- ")[2] for line in written.splitlines() if "kept" in line] == kept
    assert all(TAG.match(line) for line in written.splitlines() if "kept" in line)


def test_a_full_disk_is_an_object_in_json_and_not_reported_to_a_closed_stderr(tmp_path: Path) -> None:
    code = FULL_DISK.replace("SPACE", "1").replace("'lost %d', number", "'lost'")
    as_json = run(CONFIGURE.replace("log_dir=", "log_format='json', log_dir=") + "pass\n" + code, tmp_path)
    messages = [json.loads(line)["message"] for line in as_json.stderr.splitlines()]
    assert sum("cannot be written" in message for message in messages) == 2
    assert run(QUIET + "pass\n" + code, tmp_path / "other").stderr == ""


PEOPLE = CONFIGURE.replace("log_dir=", "is_for_people=True, log_dir=")
CHILD = "2026-11-20T22:45:08.123 {} node=n process=worker-0-0 rank=0 epoch=1 mlx_ring.worker: {}"
PASS_ON = (
    "from mlx_ring.core.logs import pass_on; "
    f"pass_on({CHILD.format('INFO', 'loaded')!r}); pass_on({CHILD.format('WARNING', 'slow')!r}); "
    "logging.getLogger('a').info('own')"
)


def test_people_see_warnings_of_children_and_all_lines_of_the_process_itself(tmp_path: Path) -> None:
    shown = run(PEOPLE + PASS_ON, tmp_path).stderr
    assert [line.rpartition(": ")[2] for line in shown.splitlines()] == ["slow", "own"]


@pytest.mark.parametrize("change", [("'info'", "'debug'"), ("log_dir=", "log_format='json', log_dir=")])
def test_all_lines_of_children_are_shown_for_debugging_and_to_programs(
    change: tuple[str, str], tmp_path: Path
) -> None:
    shown = run(PEOPLE.replace(*change) + PASS_ON, tmp_path).stderr
    assert "loaded" in shown
    assert "slow" in shown


def test_all_lines_of_children_are_shown_if_their_files_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "loaded" in run(PEOPLE + PASS_ON, tmp_path / "file").stderr


JSON = CONFIGURE.replace("log_dir=", "log_format='json', log_dir=") + "\n"
FIELDS = {"time", "level", "logger", "message", "node", "process", "stage", "rank", "epoch"}


def objects_of(code: str, log_dir: Path) -> list[dict[str, Any]]:
    """Return the JSON objects of such a process on stderr; check that its file has the same lines."""
    done = run(JSON + code, log_dir)
    lines = done.stderr.splitlines()
    assert (log_dir / "worker-1-0.log").read_text().splitlines() == lines
    objects = [json.loads(line) for line in lines]
    assert all(set(each) >= FIELDS for each in objects)
    return objects


def test_json_lines_of_every_logger_are_objects(tmp_path: Path) -> None:
    code = (
        "import uvicorn.config, grpc\n"
        "log = logging.getLogger('a.b')\n"
        "log.info('two\\nlines and \"quotes\" %d', 1, extra={'status': 200, 'path': Path('/x')})\n"
        "set_log_epoch(3)\n"
        "logging.getLogger('uvicorn.access').warning('theirs')\n"
        "warnings.warn('careful')\n"
        "thread = threading.Thread(target=lambda: 1 / 0); thread.start(); thread.join()\n"
        "1 / 0\n"
    )
    first, theirs, warned, thread, end = objects_of(code, tmp_path)
    assert first["message"] == 'two\nlines and "quotes" 1'
    assert (first["node"], first["stage"], first["rank"], first["epoch"]) == ("mini", 1, 0, None)
    assert (first["status"], first["path"], first["level"], first["logger"]) == (200, "/x", "INFO", "a.b")
    assert (theirs["logger"], theirs["epoch"]) == ("uvicorn.access", 3)
    assert "careful" in warned["message"]
    for failed in (thread, end):
        assert failed["exception"].splitlines()[-1] == "ZeroDivisionError: division by zero"


def test_a_json_line_names_its_request_and_trace(tmp_path: Path) -> None:
    code = (
        "from mlx_ring.core.traces import REQUEST_ID, TRACEPARENT\n"
        "logging.info('before'); REQUEST_ID.set('req_1'); logging.info('in it')\n"
        "TRACEPARENT.set('00-abc-def-01')\n"
        "logging.info('another', extra={'request_id': 'req_2'})\n"
    )
    objects = objects_of(code, tmp_path)
    assert [each.get("request_id") for each in objects] == [None, "req_1", "req_2"]
    assert [each.get("trace_id") for each in objects] == [None, None, "abc"]


def test_a_childs_json_line_is_tagged_and_a_raw_line_becomes_an_object(tmp_path: Path) -> None:
    code = "logging.getLogger('a').info('hello')"
    (line,) = run(JSON + code, tmp_path).stderr.splitlines()
    assert is_tagged(line)
    assert not is_tagged('{"message": "another program\'s"}')
    relayed = "logging.warning('raw', extra={'child_process': 'worker-2-1', 'child_rank': '1'})"
    (written,) = objects_of(relayed, tmp_path / "other")
    assert (written["process"], written["stage"], written["rank"]) == ("worker-2-1", 2, 1)


def make_buffer() -> LogBuffer:
    lines = LogBuffer()
    lines.setFormatter(make_formatter("text", "mini", "head", None))
    return lines


def record(text: str, level: int = logging.INFO) -> logging.LogRecord:
    return logging.LogRecord("mlx_ring.node", level, "file", 1, text, (), None)


def test_lines_are_numbered_and_returned_after_a_number() -> None:
    lines = make_buffer()
    for text in ("one", "two", "three"):
        lines.handle(record(text))
    assert [(line.number, line.text) for line in lines.after(1)] == [(2, "two"), (3, "three")]
    assert lines.after(3) == []
    (first, *_) = lines.after(0)
    assert (first.level, first.process, first.logger) == ("INFO", "head", "mlx_ring.node")


def test_the_buffer_keeps_the_last_lines_and_truncates_long_ones() -> None:
    lines = make_buffer()
    for number in range(BUFFERED_LINES + 5):
        lines.handle(record(f"{number} " + "x" * 10_000))
    kept = lines.after(0)
    assert (len(kept), kept[0].number, kept[-1].number) == (BUFFERED_LINES, 6, BUFFERED_LINES + 5)
    assert {len(line.text) for line in kept} == {LONGEST_BUFFERED_LINE}


def test_a_childs_line_is_kept_unchanged_in_either_format() -> None:
    written = record("loaded layers [0, 5): in 0.1 s", logging.WARNING)
    formats: tuple[LogFormat, ...] = ("text", "json")
    for format_ in formats:
        lines = make_buffer()
        lines.keep_tagged(make_formatter(format_, "mini", "worker-1-0", 0).format(written))
        (line,) = lines.after(0)
        assert (line.level, line.process, line.logger) == ("WARNING", "worker-1-0", "mlx_ring.node")
        assert line.text == "loaded layers [0, 5): in 0.1 s"
        assert abs(line.unix_time_s - written.created) < 0.01


def test_an_untagged_line_is_left_out_of_the_buffer() -> None:
    lines = make_buffer()
    for text in ("", "Traceback", "{", '{"time": 1'):
        lines.keep_tagged(text)
    assert lines.after(0) == []
