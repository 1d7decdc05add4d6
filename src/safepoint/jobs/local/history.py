"""The history of all jobs: one SQLite file, which commands and supervisors share.

A supervisor is the process that starts the launchers of one job, and watches them.

Promises: changes are atomic and survive a power cut. Several processes can read and write at once. A file of a newer
release is refused, and stays unchanged.
"""

import contextlib
import json
import logging
import shutil
import sqlite3
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, TypeVar

from safepoint.errors import ConflictError, NotFoundError, SafepointError, StorageError
from safepoint.foundation import clock
from safepoint.foundation.processes import ProcessId, kill, processes_of
from safepoint.jobs.local.paths import history_file, job_folder, make_private
from safepoint.jobs.model.job_place import UnknownJobError
from safepoint.jobs.model.records import (
    AttemptRecord,
    JobEvent,
    JobRecord,
    JobSummary,
    NodeRecord,
    RequestedAction,
    command_line,
)
from safepoint.jobs.model.spec import JobSpec
from safepoint.jobs.model.states import JobState

_FIRST_SCHEMA = """
CREATE TABLE job (
  name TEXT PRIMARY KEY, spec TEXT NOT NULL, state TEXT NOT NULL, wanted TEXT NOT NULL, created TEXT NOT NULL,
  changed TEXT NOT NULL, message TEXT NOT NULL DEFAULT '', exit_code INTEGER, attempt INTEGER NOT NULL DEFAULT 0,
  safe_step INTEGER, setbacks INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE INDEX job_by_state ON job (state);
CREATE TABLE attempt (
  job TEXT NOT NULL REFERENCES job (name) ON DELETE CASCADE, number INTEGER NOT NULL, num_nodes INTEGER NOT NULL,
  started TEXT NOT NULL, ended TEXT, outcome TEXT NOT NULL DEFAULT '', exit_code INTEGER, PRIMARY KEY (job, number)
) STRICT;
CREATE TABLE node (
  job TEXT NOT NULL, attempt INTEGER NOT NULL, node INTEGER NOT NULL, pid INTEGER NOT NULL,
  start_ticks INTEGER NOT NULL, boot TEXT NOT NULL, gpus TEXT NOT NULL, PRIMARY KEY (job, attempt, node),
  FOREIGN KEY (job, attempt) REFERENCES attempt (job, number) ON DELETE CASCADE
) STRICT;
CREATE TABLE event (
  id INTEGER PRIMARY KEY, job TEXT NOT NULL REFERENCES job (name) ON DELETE CASCADE, time TEXT NOT NULL,
  name TEXT NOT NULL, actor TEXT NOT NULL, cause TEXT NOT NULL, detail TEXT NOT NULL
) STRICT;
CREATE INDEX event_by_job ON event (job, id);
"""
_SCHEMAS = (
    _FIRST_SCHEMA,
    "ALTER TABLE job ADD COLUMN target_nodes INTEGER",
    "ALTER TABLE job ADD COLUMN image TEXT",
    "ALTER TABLE job ADD COLUMN from_checkpoint INTEGER NOT NULL DEFAULT 0",
)
"""For each version of the schema, the statements that make it from the previous version.

For a new file, the statements of all versions are executed.
"""
SCHEMA_VERSION = len(_SCHEMAS)
_BUSY_S = 30.0
_RETRY_AFTER_S = 0.01
_OVER = (JobState.COMPLETE, JobState.FAILED)
_log = logging.getLogger("safepoint")
_SHOWS_JOBS = "`safepoint list` shows the jobs"
_Job = TypeVar("_Job", JobRecord, JobSummary)
_COLUMNS = (
    "name, spec, state, wanted, created, changed, message, exit_code, attempt, safe_step, setbacks, target_nodes, "
    "image, from_checkpoint"
)


class HistoryError(StorageError):
    """The history cannot be used: the disk is full, access is denied, or the file is damaged."""


class History:
    """The history, open for reading and writing.

    Args:
        path: the file; created when it does not exist.

    Raises:
        ConflictError: a newer release has written the file.
        StorageError: the file cannot be read or written, or is damaged.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = history_file() if path is None else path
        self._unreadable: set[str] = set()
        make_private(self._path.parent)
        with self._explained():
            self._db = sqlite3.connect(self._path, timeout=_BUSY_S, isolation_level=None)
            try:
                self._prepare()
            except BaseException:
                self._db.close()
                raise

    def _query(self, statement: str, *values: Any) -> list[Any]:
        with self._explained():
            return self._db.execute(statement, values).fetchall()

    def _prepare(self) -> None:
        version = self._version()
        if version > SCHEMA_VERSION:
            raise ConflictError(
                f"the job history {self._path} was written by a newer release of Safepoint: it has schema {version}, "
                f"and this release supports {SCHEMA_VERSION}; it was not changed",
                hint="install the newer release, or set XDG_STATE_HOME to another folder",
            )
        self._use_write_ahead_log()
        self._db.execute("PRAGMA synchronous = FULL")
        self._db.execute("PRAGMA foreign_keys = ON")
        if version < SCHEMA_VERSION:
            try:
                self._path.chmod(0o600)
            except OSError as error:
                raise StorageError(f"the job history {self._path} cannot be used: {error.strerror}") from error
            with self.transaction():
                # Read the version again, because another process may have upgraded the file.
                for schema in _SCHEMAS[self._version() :]:
                    for statement in schema.split(";\n"):
                        self._db.execute(statement)
                self._db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def _use_write_ahead_log(self) -> None:
        """Let processes read while another process writes.

        If several processes request this for a new file at the same time, SQLite accepts one request. For the other
        requests, SQLite reports at once that the file is locked. So this method tries again.
        """
        deadline_s = clock.monotonic_s() + _BUSY_S
        while True:
            try:
                self._db.execute("PRAGMA journal_mode = WAL")
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or clock.monotonic_s() > deadline_s:
                    raise
                clock.sleep(_RETRY_AFTER_S)
            else:
                return

    def _version(self) -> int:
        return self._db.execute("PRAGMA user_version").fetchone()[0]

    @contextlib.contextmanager
    def _explained(self) -> Generator[None]:
        """Raise HistoryError, with a hint, for an error of SQLite."""
        try:
            yield
        except sqlite3.DatabaseError as error:
            raise HistoryError(
                f"the job history {self._path} cannot be used: {error}",
                hint="check the folder's permissions and free space; if the file is damaged, move it aside: its jobs "
                "are then lost, but not their checkpoints",
            ) from error

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def transaction(self) -> Generator[None]:
        """Make all changes in the block or, if the block fails, no change.

        While the block runs, no other process can write. May be nested.
        """
        if self._db.in_transaction:
            yield
            return
        with self._explained():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:  # on a full disk, SQLite may have rolled the transaction back itself
                    self._db.execute("ROLLBACK")
                raise

    # ---- reading ----------------------------------------------------------------------------------------------

    def change_number(self) -> int:
        """A number that changes when another process has changed the history."""
        return self._query("PRAGMA data_version")[0][0]

    def jobs(self, states: Sequence[JobState] | None = None) -> list[JobRecord]:
        """All jobs, or the jobs in the given states, oldest first.

        A job whose entry cannot be read is left out, with a warning.
        """
        if states is None:
            return self._select("")
        return self._select(f"WHERE state IN ({', '.join('?' * len(states))})", *states)

    def unfinished(self) -> list[JobRecord]:
        """Jobs that have not ended, and jobs that are to be deleted."""
        return self._select("WHERE state NOT IN (?, ?) OR wanted = ?", *_OVER, RequestedAction.DELETE)

    def _select(self, condition: str, *values: str) -> list[JobRecord]:
        rows = self._query(f"SELECT {_COLUMNS} FROM job {condition} ORDER BY created, name", *values)
        return [job for row in rows if (job := self._readable(_job, row)) is not None]

    def summaries(self) -> list[JobSummary]:
        """Summaries of all jobs, oldest first; fast for thousands of jobs."""
        rows = self._query("SELECT name, spec, state, message, created, safe_step FROM job ORDER BY created, name")
        return [job for row in rows if (job := self._readable(_summary, row)) is not None]

    def _readable(self, read: Callable[[tuple[Any, ...]], _Job], row: tuple[Any, ...]) -> _Job | None:
        try:
            return read(row)
        except StorageError as error:
            if row[0] not in self._unreadable:
                self._unreadable.add(row[0])
                _log.warning("%s", error)
            return None

    def find(self, name: str) -> JobRecord | None:
        """The job of exactly this name; None if it does not exist."""
        rows = self._query(f"SELECT {_COLUMNS} FROM job WHERE name = ?", name)
        return _job(rows[0]) if rows else None

    def knows(self, name: str) -> bool:
        """Whether there is a job of exactly this name, readable or not."""
        return bool(self._query("SELECT 1 FROM job WHERE name = ?", name))

    def job(self, name: str) -> JobRecord:
        """The job with this name, or the only job whose name starts with `name`.

        Raises:
            NotFoundError: no job matches.
            ConflictError: several jobs match.
            StorageError: the entry of the job cannot be read.
        """
        name = self.name_of(name)
        job = self.find(name)
        if job is None:
            raise NotFoundError(f"there is no job {name!r} any more", hint=_SHOWS_JOBS)
        return job

    def name_of(self, name: str) -> str:
        """The full name of a job, from its name or its first letters; see `job`."""
        # Names are ASCII, and SQLite would refuse a string that is not UTF-8.
        statement = "SELECT name FROM job WHERE substr(name, 1, ?) = ? ORDER BY name"
        rows = self._query(statement, len(name), name) if name and name.isascii() else []
        names = [row[0] for row in rows]
        if name in names:
            return name
        if not names:
            known = [row[0] for row in self._query("SELECT name FROM job ORDER BY name")]
            raise UnknownJobError(f"there is no job {name!r}", name=name, known=known, hint=_SHOWS_JOBS)
        if len(names) > 1:
            shown = ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
            raise ConflictError(f"{name!r} matches {len(names)} jobs: {shown}", hint="use more letters of the name")
        return names[0]

    def attempts(self, name: str) -> list[AttemptRecord]:
        """The attempts of a job, oldest first."""
        keys = ("number", "num_nodes", "started", "ended", "outcome", "exit_code")
        rows = self._query(f"SELECT {', '.join(keys)} FROM attempt WHERE job = ? ORDER BY number", name)
        return [AttemptRecord(**dict(zip(keys, row, strict=True))) for row in rows]

    def nodes(self, name: str, attempt: int) -> list[NodeRecord]:
        """The launchers of an attempt."""
        rows = self._query(
            "SELECT node, pid, start_ticks, boot, gpus FROM node WHERE job = ? AND attempt = ? ORDER BY node",
            *(name, attempt),
        )
        return [
            NodeRecord(
                node=node,
                process=ProcessId(pid=pid, start_ticks=ticks, boot=boot),
                gpus=tuple(map(str, json.loads(gpus))),
            )
            for node, pid, ticks, boot, gpus in rows
        ]

    def events(self, name: str) -> list[JobEvent]:
        """The events of a job, oldest first."""
        rows = self._query("SELECT time, name, actor, cause, detail FROM event WHERE job = ? ORDER BY id", name)
        return [
            JobEvent(time=time, name=event, actor=actor, cause=cause, detail=json.loads(detail))
            for time, event, actor, cause, detail in rows
        ]

    # ---- changes by commands ----------------------------------------------------------------------------------

    def add(self, spec: JobSpec, *, actor: str) -> None:
        """Store a new job.

        Raises:
            ConflictError: a job has this name.
        """
        now = clock.utc_now()
        with self.transaction():
            if self.knows(spec.name):
                raise ConflictError(
                    f"there is already a job {spec.name!r}; nothing was submitted",
                    hint=f"choose another name, or first run `safepoint delete {spec.name}`; its checkpoints stay",
                )
            self._db.execute(
                "INSERT INTO job (name, spec, state, wanted, created, changed) VALUES (?, ?, ?, ?, ?, ?)",
                (spec.name, spec.to_json(), JobState.CREATED, RequestedAction.RUN, now, now),
            )
            self._note(spec.name, "submitted", actor)

    def request(self, name: str, wanted: RequestedAction, *, actor: str, cause: str = "") -> None:
        """Request an action for a job."""
        with self.transaction():
            self._change(name, "wanted = ?", wanted)
            self._note(name, f"{wanted}_requested", actor, cause)

    def request_nodes(self, job: JobRecord, num_nodes: int, *, actor: str) -> None:
        """Request a number of nodes for a job with launchers. The supervisor restarts the job with that number."""
        with self.transaction():
            self._change(job.name, "target_nodes = ?", num_nodes)
            self._note(job.name, "scale_requested", actor, f"to {num_nodes} nodes")

    def change_nodes(self, job: JobRecord, num_nodes: int, *, actor: str) -> None:
        """Change the number of nodes of a job without launchers, and clear `target_nodes`."""
        spec = replace(job.spec, num_nodes=num_nodes)
        with self.transaction():
            self._change(job.name, "spec = ?, target_nodes = NULL", spec.to_json())
            self._note(job.name, "changed", actor, f"{job.spec.num_nodes} → {num_nodes} nodes")

    def change_spec(self, job: JobRecord, spec: JobSpec, *, actor: str, what: str, from_checkpoint: bool) -> None:
        """Change with what a job starts next; `what` describes the change, for the event; see `JobRecord`."""
        with self.transaction():
            self._change(job.name, "spec = ?, from_checkpoint = ?", spec.to_json(), int(from_checkpoint))
            if spec != job.spec:
                self._note(job.name, "changed", actor, what)

    def note_image(self, name: str, image: str, *, actor: str) -> None:
        """Store the newest process image of a job's newest attempt."""
        with self.transaction():
            self._change(name, "image = ?", image)
            self._note(name, "frozen", actor, image)

    def forget(self, name: str) -> None:
        """Remove a job from the history; its folder stays."""
        self._query("DELETE FROM job WHERE name = ?", name)

    def remove(self, name: str) -> None:
        """Remove a job that has no processes: first its folder, then its entry in the history. Checkpoints stay.

        Raises:
            StorageError: the folder cannot be removed; the entry stays.
        """
        folder = job_folder(name)
        try:
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(folder)
        except OSError as error:
            raise StorageError(
                f"the folder of job {name} cannot be removed: {error.strerror}: {error.filename}; the job was not "
                "deleted",
                hint=f"the job still exists; remove {folder}, and delete the job once more",
            ) from error
        self.forget(name)

    def remove_remains(self, name: str) -> None:
        """Kill the processes and remove the folder of a job that is not in the history."""
        with self.transaction():  # meanwhile no job of this name can be submitted
            if not self.knows(name):
                kill(processes_of(job_folder(name)))
                shutil.rmtree(job_folder(name), ignore_errors=True)

    # ---- changes by supervisors -------------------------------------------------------------------------------

    def become(
        self, name: str, state: JobState, *, actor: str, cause: str = "", message: str = "", **columns: Any
    ) -> None:
        """Change the state of a job.

        Args:
            name: the name of the job.
            state: the new state.
            actor: the user or the process that changes it.
            cause: why.
            message: the new message, which is shown with the job.
            columns: other columns of the job, with their new values.
        """
        unknown = columns.keys() - {"exit_code", "safe_step", "setbacks", "attempt", "wanted", "image"}
        if unknown:
            raise ValueError(f"a job has no column {', '.join(sorted(unknown))}")
        changes = "".join(f", {column} = ?" for column in columns)
        # A job that has ended has no supervisor that could change the number of nodes.
        changes += ", target_nodes = NULL" if state.is_over else ""
        values = (state, clock.utc_now(), message, *columns.values())
        with self.transaction():
            self._change(name, f"state = ?, changed = ?, message = ?{changes}", *values)
            self._note(name, str(state).lower(), actor, cause or message, **columns)

    def begin_attempt(self, name: str, number: int, num_nodes: int) -> None:
        """Store the start of an attempt from a checkpoint, or from the beginning."""
        with self.transaction():
            self._query(
                "INSERT INTO attempt (job, number, num_nodes, started) VALUES (?, ?, ?, ?)",
                *(name, number, num_nodes, clock.utc_now()),
            )
            self._change(name, "from_checkpoint = 0")

    def add_node(self, name: str, attempt: int, node: NodeRecord) -> None:
        """Store a launcher."""
        process = node.process
        self._query(
            "INSERT OR REPLACE INTO node (job, attempt, node, pid, start_ticks, boot, gpus) "
            "VALUES (?, ?, ?, ?, ?, ?, ?)",
            *(name, attempt, node.node, process.pid, process.start_ticks, process.boot, json.dumps(node.gpus)),
        )

    def end_attempt(self, name: str, number: int, *, outcome: str, exit_code: int | None) -> None:
        """Store the end of an attempt."""
        self._query(
            "UPDATE attempt SET ended = ?, outcome = ?, exit_code = ? WHERE job = ? AND number = ?",
            *(clock.utc_now(), outcome, exit_code, name, number),
        )

    def reopen_attempt(self, name: str, number: int) -> None:
        """Store that an attempt has not ended: its processes were restored."""
        self._query(
            "UPDATE attempt SET ended = NULL, outcome = '', exit_code = NULL WHERE job = ? AND number = ?",
            name,
            number,
        )

    def _change(self, name: str, columns: str, *values: Any) -> None:
        if self._db.execute(f"UPDATE job SET {columns} WHERE name = ?", (*values, name)).rowcount == 0:
            raise NotFoundError(f"there is no job {name} any more")

    def _note(self, name: str, event: str, actor: str, cause: str = "", **detail: Any) -> None:
        self._db.execute(
            "INSERT INTO event (job, time, name, actor, cause, detail) VALUES (?, ?, ?, ?, ?, ?)",
            (name, clock.utc_now(), event, actor, cause, json.dumps(detail)),
        )


def _summary(row: tuple[Any, ...]) -> JobSummary:
    name, text, state, message, created, safe_step = row
    with _altered(name):
        clock.parse_utc(created)
        spec: dict[str, Any] = json.loads(text)
        return JobSummary(
            name=name,
            state=JobState(state),
            message=message,
            created=created,
            safe_step=safe_step,
            command=command_line(spec["program"], is_module=spec["is_module"]),
        )


def _job(row: tuple[Any, ...]) -> JobRecord:
    name, spec, state, wanted, created, changed, message, exit_code, attempt, *others = row
    safe_step, setbacks, target_nodes, image, from_checkpoint = others
    with _altered(name):
        for time in (created, changed):
            clock.parse_utc(time)
        return JobRecord(
            name=name,
            spec=JobSpec.from_json(spec),
            state=JobState(state),
            wanted=RequestedAction(wanted),
            created=created,
            changed=changed,
            message=message,
            exit_code=exit_code,
            attempt=attempt,
            safe_step=safe_step,
            setbacks=setbacks,
            target_nodes=target_nodes,
            image=image,
            from_checkpoint=bool(from_checkpoint),
        )


@contextlib.contextmanager
def _altered(name: str) -> Generator[None]:
    """Raise StorageError for an entry that cannot be read: another program has changed it."""
    try:
        yield
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError, SafepointError) as error:
        raise StorageError(
            f"the job {name!r} cannot be read from the history: {error}",
            hint="another program has changed its entry; delete the job",
        ) from error
