"""Runs the program of a kubeconfig that gives the token (an exec plugin).

It may ask a person, so it has some minutes. After that it is ended, so that no command waits for ever.
"""

import json
import os
import subprocess
import tempfile
from collections.abc import Generator
from typing import Any

import httpx2
from lightkube.config.models import UserExec
from lightkube.core.exceptions import ConfigError

from safepoint.foundation import clock

_WITHIN_S = 180.0
_LOOK_S = 0.02
_MOST_BYTES = 1 << 20
_UNAUTHORIZED = 401


class TokenProgram(httpx2.Auth):
    """Sends the token that a program has printed. If the cluster refuses it, the program is run again.

    Args:
        program: as the kubeconfig describes it.
    """

    def __init__(self, program: UserExec) -> None:
        self._program = program
        self._token: str | None = None

    def sync_auth_flow(self, request: httpx2.Request) -> Generator[httpx2.Request, httpx2.Response, None]:
        """See `httpx2.Auth`.

        Raises:
            ConfigError: the program failed, or gave no token in time.
        """
        if self._token is not None:
            request.headers["Authorization"] = f"Bearer {self._token}"
            response = yield request
            if response.status_code != _UNAUTHORIZED:
                return
        self._token = _token_in(_output_of(self._program))
        request.headers["Authorization"] = f"Bearer {self._token}"
        yield request


def _output_of(program: UserExec) -> bytes:
    environ = {**os.environ, **{variable.name: variable.value for variable in program.env or []}}
    # Files, and not pipes: a process that the program leaves behind may keep a pipe open.
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [program.command, *(program.args or [])], env=environ, stdout=output, stderr=errors
        )
        until_s = clock.monotonic_s() + _WITHIN_S
        try:
            while process.poll() is None:
                if clock.monotonic_s() > until_s:
                    raise ConfigError(f"{program.command} gave no token within {_WITHIN_S:g} s, and was ended")
                if any(os.fstat(file.fileno()).st_size > _MOST_BYTES for file in (output, errors)):
                    raise ConfigError(f"{program.command} printed more than {_MOST_BYTES:,} bytes, and was ended")
                clock.sleep(_LOOK_S)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        for file in (output, errors):
            file.seek(0)
        if process.returncode != 0:
            said = errors.read(_MOST_BYTES).decode(errors="replace").strip()
            raise ConfigError(f"{program.command} returned {process.returncode}: {said}")
        return output.read(_MOST_BYTES)


def _token_in(output: bytes) -> str:
    try:
        token: Any = json.loads(output)["status"]["token"]
    except RecursionError as error:
        raise ConfigError("its answer is nested too deep") from error
    if not isinstance(token, str) or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError("its answer has no valid token")
    return token
