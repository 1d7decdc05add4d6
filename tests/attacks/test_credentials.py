"""Passwords and tokens in addresses: no message, event, record, answer or exception has them."""

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from safepoint.cli.output import print_answer, print_warning
from safepoint.doctor.output_location import judge_store, look_at_store
from safepoint.errors import SafepointError, StorageError, UsageError, printable, without_credentials
from safepoint.foundation.events import console
from safepoint.foundation.events.run_events import Failed, SaveFailed
from safepoint.foundation.events.stream import EventLog
from safepoint.progress.record import Progress, State
from safepoint.storage.location import parse_location
from safepoint.storage.opening import Tried
from safepoint.storage.options import StorageOptions
from safepoint.training.state import base_model
from tests.support.commands import safepoint

SECRET = "Zz9secret"
ADDRESSES = [
    f"http://user:{SECRET}@host:9000/path",
    f"https://user:{SECRET}@host",
    f"HTTPS://USER:{SECRET}@HOST",
    f"http://:{SECRET}@host",
    f"http://{SECRET}@host/path?x=1",
    f"http://user:a@{SECRET}@host",
    f"http://user:a/{SECRET}@host",
    f"http://user:12/{SECRET}@host",
    f"http://user:a?{SECRET}@host",
    f"http://user:a#{SECRET}@host",
    f"http://us%20er:{SECRET}%21@host",
    f"http://user:{SECRET}@[::1]:9000",
    f"http:/user:{SECRET}@host",
    f"s3://user:{SECRET}@bucket/run",
    f"git+ssh://user:{SECRET}@host/repository",
    f"socks5h://user:{SECRET}@proxy:1080",
    f"https://host/path?X-Amz-Signature={SECRET}&x=1",
    f"https://host/path?x=1&X-Amz-Security-Token={SECRET}",
    f"https://account.blob.core.windows.net/c/b?sv=2020&sig={SECRET}",
    f"https://host/?access_token={SECRET}#top",
    f"https://host/?api_key={SECRET}",
    f"https://host/?client-secret={SECRET}",
    f"https://host/?PASSWORD={SECRET}",
]
PLAIN = [
    "s3://bucket/run@2/checkpoint-4",
    "https://host:9000/path",
    "file:///home/user/a b@c",
    "user@host, launcher 12: out/checkpoint-4",
    "see http://host:9000 and mail a@b",
    "https://host/path?prefix=a&max=3",
    "12:30:01 rank 3: /tmp/x@y",
]


@pytest.fixture(params=ADDRESSES)
def address(request: pytest.FixtureRequest) -> str:
    return request.param


def test_every_way_of_writing_one(address: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    said = [
        without_credentials(address),
        printable(f"(see '{address}', \"{address}\" or <{address}>)"),
        str(SafepointError(f"{address} cannot be used", hint=f"try {address}")),
        repr(UsageError(f"{address}!").args),
        SafepointError(address).message,
        SafepointError("", hint=address).hint or "",
    ]
    print_answer(False, {}, [address])
    print_answer(True, {"where": address, address: [f"at {address}"]}, [])
    print_warning(address)
    logged = console._Line(colour=False)
    said += [logged.format(logging_record(address)), *capsys.readouterr()]
    events = EventLog(tmp_path / "events")
    events.write(Failed(rank=0, exit_code=1, reason=address, error=f"it was {address}"))
    events.write(SaveFailed(step=1, trigger="x", reason=f'"{address}"', consequence=address))
    said.append((tmp_path / "events").read_text())
    progress = Progress(time="", state=State.FAILED, message=f"{address} failed", location=address).to_bytes()
    said.append(progress.decode())
    for text in said:
        assert SECRET not in text, text
    assert len([json.loads(line) for line in (tmp_path / "events").read_text().splitlines()]) == 2
    assert Progress.from_bytes(progress).state is State.FAILED
    assert any(host in said[0].lower() for host in ("host", "bucket", "proxy", "account", "[::1]"))


def logging_record(text: str) -> Any:
    import logging

    return logging.LogRecord("safepoint", logging.WARNING, "", 0, "%s: %s", (OSError(text), text), None)


@pytest.mark.parametrize("text", PLAIN)
def test_what_has_none_stays(text: str) -> None:
    assert without_credentials(text) == text


def test_hostile_text_does_not_take_long() -> None:
    begun = time.monotonic()
    for text in ("a:/" * 400_000, "a." * 500_000 + "://", "http://" + "a" * 1_000_000, "a:/?" + "token" * 200_000,
                 "http://a:" * 100_000, "?" * 1_000_000 + ":/", "a://b:c" + "@" * 500_000):  # fmt: skip
        without_credentials(text)
    assert time.monotonic() - begun < 30


@pytest.mark.parametrize(
    "address", [text for text in ADDRESSES if "host" in text.lower() and text.lower()[:4] == "http"]
)
def test_doctor_and_the_options_of_a_store(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_S3_ENDPOINT", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", address)
    try:
        options = repr(StorageOptions.from_environment(os.environ))
    except ValueError as error:
        options = str(error)
    assert SECRET not in options
    location = parse_location("s3://bucket/run")
    for tried in (Tried(duration_s=1.0, clock_ahead_s=0.0), StorageError(f"{address} cannot be reached"), None):
        assert SECRET not in repr(judge_store(tried, location))


@pytest.mark.parametrize("endpoint", [f"ftp://user:{SECRET}@host", f"user:{SECRET}@host:9000"])
def test_an_endpoint_that_is_none(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint)
    if "://" not in endpoint:
        assert SECRET not in repr(StorageOptions.from_environment(os.environ))
    else:
        assert SECRET not in str(look_at_store(parse_location("s3://bucket/run")))


@pytest.mark.parametrize(
    "location", [f"s3://user:{SECRET}@bucket/run", f"https://user:{SECRET}@host/run", f"gs://{SECRET}@bucket"]
)
def test_a_location_with_a_password(location: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused, and not repeated: by commands, with and without --json, and by a run."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="location") as error:
        parse_location(location)
    assert SECRET not in str(error.value)
    for arguments in (("checkpoints", "list", location), ("doctor", "--output-dir", location),
                      ("run", "--output-dir", location, "script.py"), ("config",)):  # fmt: skip
        for extra in ((), ("--json",)):
            if extra and arguments[0] == "run":
                continue
            outcome = safepoint(*arguments[:1], *arguments[1:2], *extra, *arguments[2:])
            assert SECRET not in outcome.stdout + outcome.stderr, outcome


def test_the_base_model_of_a_manifest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base_model, "has_adapters", lambda model: True)
    monkeypatch.setattr(base_model, "_digest_of", lambda model, num_ranks: "xxh3-128:0")
    config = SimpleNamespace(base_model_name_or_path=f"https://user:{SECRET}@hub.example/model", revision=None)
    model: Any = torch.nn.Module()
    model.peft_config = {"default": config}
    model.get_base_model = torch.nn.Module
    assert base_model.base_of(model, num_ranks=1) == {
        "name": "https://hub.example/model", "revision": "", "digest": "xxh3-128:0"
    }  # fmt: skip
