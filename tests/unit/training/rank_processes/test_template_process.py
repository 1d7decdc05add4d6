"""A template that fails: the launcher notices it, says so, and starts ranks in the ordinary way."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.api import SubprocessContext

from safepoint.training.rank_processes import births, template_process
from safepoint.training.rank_processes.template_process import TemplateProcess

_READY = """
import json, os, socket, struct, sys, time
link = socket.socket(fileno=int(os.environ["SAFEPOINT_TEMPLATE"]))
def send(kind, **message):
    body = json.dumps({"type": kind, **message}).encode()
    link.sendall(struct.pack("<II", len(body), 0) + body)
def read(size):
    found = b""
    while len(found) < size:
        found += link.recv(size - len(found))
    return found
def receive():
    size, _ = struct.unpack("<II", read(8))
    return json.loads(read(size))
assert receive()["type"] == "Plan"
"""


@pytest.fixture
def template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., TemplateProcess]:
    """Makes a launcher's side whose template runs the given code."""
    real = sys.executable

    def make(code: str, *, is_stopping: bool = False) -> TemplateProcess:
        (tmp_path / "template.py").write_text(_READY + code)
        fake = tmp_path / "python"
        fake.write_text(f"#!/bin/sh\nexec {real} -S {tmp_path / 'template.py'}\n")
        fake.chmod(0o700)
        monkeypatch.setattr(sys, "executable", str(fake))
        return TemplateProcess(["train.py"], is_module=False, is_stopping=lambda: is_stopping)

    return make


def bear(template: TemplateProcess) -> tuple[int, ...] | None:
    return template.bear([dict(os.environ)], [(1, 2)], 0)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("link.sendall(b'\\xff' * 4096); time.sleep(600)", "it announced a frame of 4294967295 bytes"),
        (
            "link.sendall(struct.pack('<II', 5, 0) + b'hello'); time.sleep(600)",
            "it sent something that is not a message",
        ),
        ("sys.exit(3)", "it has ended"),
        ("send('Born', pids=[1]); time.sleep(600)", "it sent a message that does not fit"),
        (
            "send('Ready', num_modules=1, took_s=1.0); receive(); send('Born', pids=[]); receive()",
            "not fit",
        ),
        ("send('Ready', num_modules=1, took_s=1.0); receive(); sys.exit(3)", "it has ended"),
    ],
)
def test_a_template_that_fails_is_replaced_twice(
    code: str, reason: str, template: Callable[..., TemplateProcess], caplog: pytest.LogCaptureFixture
) -> None:
    """Each failure is one warning with the reason; after the third one there is no template any more."""
    one = template(code)
    for number in range(3):
        assert bear(one) is None
        assert one.pid is None
        assert len(caplog.records) == number + 1
        assert reason in caplog.records[-1].getMessage()
    assert "failed 3 times" in caplog.records[-1].getMessage()
    assert bear(one) is None
    assert one.ensure() is False
    assert one.pid is None
    assert len(caplog.records) == 3


def test_a_template_that_does_not_answer_is_given_up(
    template: Callable[..., TemplateProcess], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After a limit, or at once if SIGSTOP has suspended it."""
    monkeypatch.setattr(template_process, "_ANSWER_S", 0.2)
    one = template("send('Ready', num_modules=1, took_s=1.0); time.sleep(600)")
    assert bear(one) is None
    assert "it does not answer" in caplog.records[-1].getMessage()
    one = template("import signal; os.kill(os.getpid(), signal.SIGSTOP)")
    assert bear(one) is None
    assert "it is suspended, for example by SIGSTOP" in caplog.records[-1].getMessage()


def test_an_unfit_template_is_not_replaced(
    template: Callable[..., TemplateProcess], caplog: pytest.LogCaptureFixture
) -> None:
    """The next one would be as unfit; the line names the package."""
    one = template("send('Unfit', name='ray', reason='has started a thread'); time.sleep(600)")
    assert bear(one) is None
    one.start()
    assert one.pid is None
    (record,) = caplog.records
    assert "packages: ray has started a thread; the ranks import" in record.getMessage()


def test_after_a_stop_request_nothing_is_waited_for(
    template: Callable[..., TemplateProcess], caplog: pytest.LogCaptureFixture
) -> None:
    """And nothing is said: the ranks end before they begin."""
    one = template("time.sleep(600)", is_stopping=True)
    assert bear(one) is None
    assert one.pid is None
    assert caplog.records == []


def test_more_imports_wait_for_a_template_that_is_ready(template: Callable[..., TemplateProcess]) -> None:
    """The launcher asks again and again, and never waits."""
    code = "time.sleep(0.2); send('Ready', num_modules=1, took_s=1.0); print(receive()['modules']); time.sleep(600)"
    one = template(code)
    assert one.becomes_ready() is False, "there is none"
    one.start()
    while not one.becomes_ready():
        assert one.pid is not None
    one.import_more(["json"])
    assert one.ensure() is True
    one.end()


def test_ranks_that_are_bound_to_cores_are_not_copied(
    template: Callable[..., TemplateProcess], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch starts each of them through a program that binds it. One warning says so, and the template ends."""
    one, started = template("time.sleep(600)"), []
    one.start()

    def start(ranks: SubprocessContext) -> None:
        started.append(ranks)

    monkeypatch.setattr(SubprocessContext, "_start", start)
    ranks = object.__new__(births._CopiedRanks)
    ranks._template = one
    ranks._numa_options = object()
    ranks._start()
    ranks._start()
    assert started == [ranks, ranks]
    assert one.pid is None
    (record,) = caplog.records
    assert "NUMA binding was requested" in record.getMessage()
