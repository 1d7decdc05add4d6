"""Decides the state of a job after an attempt, from exit codes and the requested action. No side effects."""

from collections.abc import Sequence
from dataclasses import dataclass

from safepoint.errors import ExitCode
from safepoint.jobs.model.records import RequestedAction
from safepoint.jobs.model.states import JobState

MAX_SETBACKS = 6
"""How often a job restarts after interruptions that were not requested, if it makes no progress in between."""
_INTERRUPTED = {ExitCode.INTERRUPTED_SAVED, ExitCode.TERMINATED_UNSAVED, ExitCode.SIGINT}
_MEANINGS = {
    ExitCode.FAILED: "the program failed",
    ExitCode.USAGE: "one of its options or arguments is invalid",
    ExitCode.CONFLICT: "its output folder is in use, or its checkpoint contradicts its settings",
    ExitCode.STORAGE: "its output location cannot be used",
    ExitCode.NOTHING_VALID: "all its checkpoints are damaged",
    ExitCode.NOT_SUPPORTED: "this machine or installation does not support it",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The job after the attempt.

    Args:
        state: its new state.
        exit_code: the exit code of the attempt; None when its launchers were killed; 75 if they were frozen.
        message: why.
        setbacks: consecutive interruptions without progress.
    """

    state: JobState
    exit_code: int | None
    message: str
    setbacks: int = 0


def conclude(
    exit_codes: Sequence[int | None],
    wanted: RequestedAction,
    *,
    safe_step: int | None,
    missing_in: str = "",
    has_progressed: bool,
    setbacks: int,
    early_end: str = "",
    image: str | None = None,
    cause: str = "",
) -> Outcome:
    """Decide the state of a job whose launchers have all ended.

    Args:
        exit_codes: the exit codes of the launchers, by node; None for a launcher that was killed.
        wanted: the requested action when the launchers ended.
        safe_step: the newest step that is committed.
        missing_in: the object store, if the checkpoint of `safe_step` was not uploaded to it; otherwise empty.
        has_progressed: whether this attempt committed a later step than the step with which it began.
        setbacks: the number of consecutive interruptions without progress before this attempt.
        early_end: see `Progress.early_end`.
        image: the process image of the launchers; None if they were not frozen.
        cause: why Safepoint has killed the launchers, as a clause that follows the job's name; empty if Safepoint has
            not killed them.
    """
    if all(code == ExitCode.OK for code in exit_codes):
        return Outcome(state=JobState.COMPLETE, exit_code=0, message=early_end)
    was_asked = wanted is not RequestedAction.RUN
    failure = _failure_of(exit_codes)
    if failure is not None and not (was_asked and failure == ExitCode.STORAGE):
        return Outcome(state=JobState.FAILED, exit_code=failure, message=_describe(failure))
    saved = any(code == ExitCode.INTERRUPTED_SAVED for code in exit_codes)
    code = ExitCode.INTERRUPTED_SAVED if saved else next((code for code in exit_codes if code), None)
    without_step = "its state is saved" if saved else "nothing is saved yet"
    what_is_saved = without_step if safe_step is None else f"step {safe_step} is saved"
    if missing_in and safe_step is not None:
        what_is_saved += f" on this machine only; when the job resumes, this step is uploaded to {missing_in}"
    if was_asked and not saved and image is not None:
        state = JobState.PREEMPTED if wanted is RequestedAction.PREEMPT else JobState.SUSPENDED
        message = f"its process image is {image}; {what_is_saved}"
        return Outcome(state=state, exit_code=ExitCode.INTERRUPTED_SAVED, message=message)
    if was_asked:
        state = JobState.PREEMPTED if wanted is RequestedAction.PREEMPT else JobState.SUSPENDED
        message = what_is_saved if saved else f"it was stopped without a save; {what_is_saved}"
        if failure is not None and not missing_in:
            message += "; the upload to the object store is not complete"
        return Outcome(state=state, exit_code=code if saved or failure is None else failure, message=message)
    setbacks = 0 if has_progressed else setbacks
    what = cause or ("was interrupted from outside" if None not in exit_codes else "was killed")
    if setbacks >= MAX_SETBACKS:
        message = f"it {what} {setbacks + 1} times without progress; {what_is_saved}"
        return Outcome(state=JobState.FAILED, exit_code=code, message=message, setbacks=setbacks)
    message = f"it {what}; {what_is_saved}"
    return Outcome(state=JobState.RESTARTING, exit_code=code, message=message, setbacks=setbacks + 1)


def _failure_of(exit_codes: Sequence[int | None]) -> int | None:
    """The exit code that shows why the job has failed; None when the job has not failed.

    Any other code takes precedence over 1, because a rank that has lost its connection to another rank ends with 1.
    If a launcher was killed, the code 1 of another launcher is only a consequence, and does not count.
    """
    failures = [code for code in exit_codes if code is not None and code not in _INTERRUPTED and code != ExitCode.OK]
    own = next((code for code in failures if code != ExitCode.FAILED), None)
    if own is not None or not failures:
        return own
    return None if None in exit_codes else failures[0]


def _describe(code: int) -> str:
    meaning = _MEANINGS.get(ExitCode(code)) if code in set(ExitCode) else None
    return f"exit code {code}" + (f": {meaning}" if meaning else "") + "; see its logs"
