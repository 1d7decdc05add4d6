"""Keys of object stores: read from a private file, and never repeated in a message."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from safepoint.errors import NotFoundError, SafepointError, UsageError
from safepoint.jobs.local.attempt.launchers import launcher_environment
from safepoint.jobs.local.outputs import check_output
from safepoint.jobs.local.paths import state_folder
from safepoint.jobs.model.connections import connections_file, keys_of
from safepoint.storage.options import StorageOptions
from tests.support.job_values import job_spec

SECRET = "geheim-123"
GOOD = f"""
[minio]
AWS_ACCESS_KEY_ID = "me"
AWS_SECRET_ACCESS_KEY = "{SECRET}"
AWS_S3_ENDPOINT = "https://minio.example:9000"
"""


@pytest.fixture(autouse=True)
def _own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)


def write(text: str | bytes, mode: int = 0o600) -> None:
    path = connections_file()
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    path.chmod(mode)


def refused(name: str = "minio") -> str:
    """The message of the refusal, with everything that a traceback would show of its causes."""
    with pytest.raises(SafepointError) as caught:
        keys_of(name, {})
    shown: list[str] = []
    error: BaseException | None = caught.value
    while error is not None:
        shown.append(f"{error} {error!r}")
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    assert SECRET not in "".join(shown)
    return str(caught.value)


def test_the_keys_of_a_name() -> None:
    """As they are written; numbers and truth values become text."""
    write(GOOD + "AWS_MAX_ATTEMPTS = 3\n")
    assert keys_of("minio", {}) == {
        "AWS_ACCESS_KEY_ID": "me",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_S3_ENDPOINT": "https://minio.example:9000",
        "AWS_MAX_ATTEMPTS": "3",
    }


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o644, 0o660])
def test_a_file_that_others_may_read_is_not_used(mode: int) -> None:
    """The message says what to do."""
    write(GOOD, mode)
    assert "chmod 600" in refused()


@pytest.mark.parametrize("key", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
def test_a_missing_key_is_named(key: str) -> None:
    """One that is empty counts as missing."""
    write(GOOD.replace(key, "OTHER"))
    assert f"has no {key}" in refused()
    write("\n".join(f'{key} = ""' if line.startswith(key) else line for line in GOOD.splitlines()))
    assert f"has no {key}" in refused()


@pytest.mark.parametrize(
    "text",
    [
        f"[minio]\nAWS_SECRET_ACCESS_KEY = {SECRET}\n",
        f'[minio]\nAWS_SECRET_ACCESS_KEY = "{SECRET}\n',
        f"[minio\n{SECRET}",
        f'[minio]\na = "{SECRET}"\na = "{SECRET}"\n',
        f"[minio]\na = {{ {SECRET} = 1, {SECRET} = 2 }}\n",
        f'minio = "{SECRET}"\n',
        f'[minio]\nAWS_ACCESS_KEY_ID = "{SECRET}\\u0000"\n',
        f'[minio]\nAWS_ACCESS_KEY_ID = ["{SECRET}"]\n',
        f'[minio]\n"A=B" = "{SECRET}"\n',
    ],
)
def test_what_cannot_be_meant_is_refused_without_a_quotation(text: str) -> None:
    """Parsers quote what they stumble over; it may be a key."""
    write(text)
    assert str(connections_file()) in refused()


def test_a_file_that_is_no_text_is_refused() -> None:
    """Some editors write UTF-16."""
    write(GOOD.encode("utf-16"))
    assert "not valid TOML" in refused()


def test_where_it_is_wrong_is_said() -> None:
    """Line and column, without the content."""
    write(f"\n\n[minio]\nx = {SECRET}\n")
    assert "line 4" in refused()


def test_without_the_name_the_environment_counts() -> None:
    """All its AWS_* variables, when both keys are there."""
    environ = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "r", "HOME": "/"}
    assert keys_of("other", environ) == {name: environ[name] for name in environ if name != "HOME"}
    write(GOOD)
    assert keys_of("other", environ)["AWS_ACCESS_KEY_ID"] == "a"
    assert keys_of("minio", environ)["AWS_ACCESS_KEY_ID"] == "me"


def test_without_either_it_says_where_to_write_them() -> None:
    """The file, the table, the variables."""
    message = refused()
    assert str(connections_file()) in message
    assert "[minio]" in message
    with pytest.raises(NotFoundError):
        keys_of("minio", {"AWS_ACCESS_KEY_ID": "half"})


def test_a_file_that_cannot_be_read_is_a_usage_error() -> None:
    """A folder in its place, for example."""
    connections_file().mkdir(parents=True)
    with pytest.raises(UsageError, match="cannot be read"):
        keys_of("minio", {})


def test_jobs_are_looked_at_with_their_own_keys_and_nothing_is_mixed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A job's folder, claims and keys are its own, and this process's environment is what it was meanwhile."""
    write(GOOD)
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of-somebody-else")
    before = dict(os.environ)
    seen: list[StorageOptions] = []

    def look(store: object, **_: object) -> None:
        assert dict(os.environ) == before
        seen.append(store._options)  # type: ignore[attr-defined]

    monkeypatch.setattr("safepoint.training.context.outputs.check_access", look)
    env = {"AWS_REGION": "here", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    check_output(job_spec(data_connection="minio", env=env), "s3://bucket/run")
    [options] = seen
    assert (options.secret_access_key, options.region, options.session_token) == (SECRET, "here", None)
    assert os.listdir(tmp_path / "cache" / "safepoint" / "outputs")
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: os.mkfifo(path, 0o600), "is not a file"),
        (lambda path: path.mkdir(mode=0o700), "cannot be read"),
        (lambda path: path.symlink_to(path), "cannot be read"),
    ],
)
def test_what_is_no_file_is_refused_at_once(make: Callable[[Path], None], message: str) -> None:
    """A pipe would be waited for, for ever."""
    connections_file().parent.mkdir(parents=True, exist_ok=True)
    make(connections_file())
    with pytest.raises(UsageError, match=message):
        keys_of("minio", {})


def test_a_relative_place_is_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As the specification of these variables says; every process would look somewhere else."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", "config")
    monkeypatch.setenv("XDG_STATE_HOME", "state")
    assert connections_file() == tmp_path / ".config" / "safepoint" / "connections.toml"
    assert state_folder() == tmp_path / ".local" / "state" / "safepoint"


def test_the_state_folder_has_one_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A job's processes are known by it."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "link"))
    assert state_folder() == tmp_path / "real" / "safepoint"


def test_launchers_get_one_identity_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session token of the user's shell makes the store refuse the keys of the connection."""
    write(GOOD)
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of-somebody-else")
    monkeypatch.setenv("AWS_CA_BUNDLE", "/bundle")
    environ = launcher_environment(job_spec(), keys_of("minio"), None)
    assert environ["AWS_SECRET_ACCESS_KEY"] == SECRET
    assert "AWS_SESSION_TOKEN" not in environ
    assert environ["AWS_CA_BUNDLE"] == "/bundle"
    assert launcher_environment(job_spec(), {}, None)["AWS_SESSION_TOKEN"] == "of-somebody-else"


def test_launchers_get_no_settings_of_another_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that is submitted from within a run has settings of its own, and its own variables count most."""
    for name in ("SAFEPOINT_RESUME", "PET_NNODES", "TORCHELASTIC_RUN_ID", "RANK", "MASTER_PORT", "SAFEPOINT_JOB_DIR"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("SAFEPOINT_VERIFY_TLS", "0")
    monkeypatch.setenv("PYTHONPATH", "/mine")
    environ = launcher_environment(job_spec(env={"RANK": "7"}), {}, Path("/packages"))
    assert not {"SAFEPOINT_RESUME", "PET_NNODES", "TORCHELASTIC_RUN_ID", "MASTER_PORT", "SAFEPOINT_JOB_DIR"} & set(
        environ
    )
    assert environ["RANK"] == "7"
    assert environ["SAFEPOINT_VERIFY_TLS"] == "0"
    assert environ["PYTHONPATH"] == "/packages:/mine"
