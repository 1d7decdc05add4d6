"""Storage and costs of all jobs."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from safepoint.dashboard.pages.context import context_of, in_thread
from safepoint.dashboard.reading.cost_view import MOST_JOBS, hours, read_costs
from safepoint.dashboard.reading.room_view import MOST_FOLDERS, read_rooms
from safepoint.dashboard.rendering import respond

_LIST_WITHIN_S = 5.0


async def storage(request: Request) -> Response:
    """How full the output locations are, and when they will be full.

    The page is shown at once, and changes when a location was listed. A request for JSON waits for the listings.
    """
    context, wait_s = context_of(request), _LIST_WITHIN_S if request.state.wants_json else 0.0
    sizes = context.settings.bucket_sizes
    rooms, num_older = await in_thread(
        request, lambda: read_rooms(context.places, context.usage, sizes=sizes, wait_s=wait_s)
    )
    return await respond(
        request,
        "storage.html",
        [room.to_document() for room in rooms],
        rooms=rooms,
        num_older=num_older,
        most_folders=MOST_FOLDERS,
    )


async def costs(request: Request) -> Response:
    """What jobs have cost in hours and money: slots held, work lost, and work saved; and their time in queues."""
    context = context_of(request)
    settings = context.settings
    found, num_older = await in_thread(request, lambda: read_costs(context.places, price_of=settings.price_of))
    units = sorted({cost.unit for cost in found}, reverse=True)
    totals = {
        unit: {
            name: _sum_of_hours([getattr(cost, f"{name}_s") for cost in found if cost.unit == unit])
            for name in ("held", "lost", "down", "saved", "waited")
        }
        for unit in units
    }
    return await respond(
        request,
        "costs.html",
        [{"place": cost.listed.place, **cost.document} for cost in found],
        costs=found,
        num_older=num_older,
        most_jobs=MOST_JOBS,
        totals=totals,
        prices={unit: settings.price_of(unit) for unit in units},
        hours=hours,
    )


def _sum_of_hours(seconds: list[float | None]) -> float | None:
    """The sum of the known times, in hours; None if no time is known."""
    known = [one for one in seconds if one is not None]
    return hours(sum(known)) if known else None


routes = [Route("/storage", storage), Route("/costs", costs)]
