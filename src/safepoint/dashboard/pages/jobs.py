"""The list of jobs."""

from typing import Any
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from safepoint.answers.consequence import Action, actions_of
from safepoint.answers.job_documents import document_of, safe_step
from safepoint.dashboard.pages.context import Context, context_of, in_thread
from safepoint.dashboard.reading.job_list import Choice, Group, JobList, Order, read_list
from safepoint.dashboard.reading.places import ListedJob, PlaceReader
from safepoint.dashboard.reading.room_view import without_room
from safepoint.dashboard.rendering import json_response, respond
from safepoint.jobs.model.job_place import JobPlace
from safepoint.presentation.drawings import sparkline
from safepoint.presentation.tones import TONES

_FIRST = (Action.SUSPEND, Action.RESUME)
"""The actions that have a button in each row; the others come after a further click."""


async def jobs(request: Request) -> Response:
    """The list that the query selects; as JSON, what `safepoint list --json` prints."""
    context, choice = context_of(request), Choice.of(request.query_params)
    if request.state.wants_json:
        return await json_response(await in_thread(request, lambda: _documents(context, choice)))
    found, rows = await in_thread(request, lambda: _page(context, choice))

    def link(**changes: str | int) -> str:
        chosen = {
            "q": choice.query,
            "state": choice.group,
            "place": choice.place,
            "sort": choice.order,
            "page": choice.page,
        } | ({"page": 1} | changes)
        usual = {"q": "", "state": Group.ALL, "place": "", "sort": Order.ATTENTION, "page": 1}
        query = urlencode({name: text for name, text in chosen.items() if text != usual[name]})
        return f"/jobs?{query}" if query else "/jobs"

    return await respond(
        request,
        "jobs.html",
        [],
        found=found,
        rows=rows,
        choice=choice,
        link=link,
        groups=list(Group),
        orders=list(Order),
        places=list(context.places.readers.values()),
    )


def _page(context: Context, choice: Choice) -> tuple[JobList, list[dict[str, Any]]]:
    problems = without_room(context.places, context.usage, sizes=context.settings.bucket_sizes)
    found = read_list(context.places, choice, problems=problems)
    return found, [_row(reader, one) for reader, one in found.rows]


def _row(reader: PlaceReader, one: ListedJob) -> dict[str, Any]:
    actions = actions_of(one.job)
    return {
        "reader": reader,
        "one": one,
        "job": one.job,
        "progress": one.progress,
        "tone": TONES[one.job.state],
        "safe_step": safe_step(one.job, one.progress),
        "place": "/".join(filter(None, (reader.title, one.job.particulars.get("namespace")))),
        "queue": one.job.particulars.get("queue") or "",
        "priority": one.job.particulars.get("priority") or one.job.particulars.get("priority_class") or "",
        "actions": [action for action in actions if action in _FIRST],
        "others": [action for action in actions if action not in _FIRST],
        "sparkline": sparkline(reader.losses(one)),
    }


def _documents(context: Context, choice: Choice) -> list[dict[str, Any]]:
    found = read_list(context.places, choice, page_size=None)
    outputs: dict[str, str | None] = {}
    for reader in {reader.key: reader for reader, _ in found.rows}.values():
        of_place = [one for _, one in found.rows if one.place == reader.key]
        outputs |= reader.call(lambda jobs, of_place=of_place: _outputs(jobs, of_place))
    is_short = len(context.places.readers) > 1
    return [
        {
            **document_of(one.job, one.progress, outputs[one.key]),
            **({"place": reader.name} if is_short else {}),
        }
        for reader, one in found.rows
    ]


def _outputs(jobs: JobPlace[Any], found: list[ListedJob]) -> dict[str, str | None]:
    return {one.key: jobs.output_of(one.job) for one in found}


routes = [Route("/jobs", jobs)]
