"""Runs the program of a kubeconfig that gives the token (an exec plugin).

The program may ask a person to log in, so it may run for three minutes. Then it is killed, so that no command waits
for ever.
"""

import json
import os
import subprocess
import tempfile
from typing import Any

from lightkube.config.models import UserExec
from lightkube.core.exceptions import ConfigError

from safepoint.foundation import clock

_WITHIN_S = 180.0
_LOOK_S = 0.02
_MOST_BYTES = 1 << 20


def token_from(program: UserExec) -> str:
    """The token that a program prints.

    Args:
        program: the program, as the kubeconfig describes it.

    Raises:
        ConfigError: the program failed, gave no token in time, or printed too much.
        OSError: the program cannot be started.
        KeyError, TypeError, ValueError: its answer has no token.
    """
    try:
        token: Any = json.loads(_output_of(program))["status"]["token"]
    except RecursionError as error:
        raise ConfigError("its answer is nested too deep") from error
    if not isinstance(token, str):
        raise ConfigError("its answer has no valid token")
    return token


def _output_of(program: UserExec) -> bytes:
    environ = {**os.environ, **{variable.name: variable.value for variable in program.env or []}}
    # The output goes to files, not to pipes: a process that the program leaves behind may keep a pipe open.
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
