"""CRIU, which freezes whole processes. Nothing else needs it, so its absence is not a fault."""

import shutil
from pathlib import Path

from safepoint.doctor.finding import Finding, Status
from safepoint.doctor.programs import ask

_LIMIT_S = 5.0
_CAPABILITIES = {"CAP_CHECKPOINT_RESTORE": 40, "CAP_SYS_ADMIN": 21}


def examine_criu(status: Path = Path("/proc/self/status")) -> Finding:
    """Whether it is here, works, and may be used by this user."""
    check, why = "criu", "it freezes processes that cannot save themselves; checkpoints of trainings do not need it"
    program = shutil.which("criu")
    held = _held(status)
    rights = " and ".join(held) if held else f"without {' or '.join(_CAPABILITIES)}"
    if program is None:
        return Finding(check=check, status=Status.OK, found=f"not installed; this process is {_with(held)}", why=why)
    try:
        answer = ask([program, "check"], limit_s=_LIMIT_S)
    except OSError as error:
        return Finding(
            check=check,
            status=Status.WARNING,
            found=f"{program}: {error.strerror}",
            why=why,
            fix="reinstall it",
        )
    if answer.code == 0 and held:
        return Finding(check=check, status=Status.OK, found=f"{program} works, {_with(held)}", why=why)
    said = (
        f"does not answer in {_LIMIT_S:.0f} s"
        if answer.code is None
        else answer.complaint or f"ends with {answer.code}"
    )
    return Finding(
        check=check,
        status=Status.WARNING,
        found=f"{program} check: {'it works' if answer.code == 0 else said}; {rights}",
        why=why,
        fix="give the container CAP_CHECKPOINT_RESTORE and CAP_SYS_PTRACE, and a kernel of 5.9 or newer",
    )


def _with(held: list[str]) -> str:
    return f"with {' and '.join(held)}" if held else f"without {' and '.join(_CAPABILITIES)}"


def _held(status: Path) -> list[str]:
    try:
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
        effective = int(lines["CapEff"], 16)
    except (OSError, KeyError, ValueError):
        return []
    return [name for name, bit in _CAPABILITIES.items() if effective >> bit & 1]
