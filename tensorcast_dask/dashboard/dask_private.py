"""Everything of Dask's dashboard that we touch and that its documentation does not offer.

Tried with distributed 2026.7 and 2026.8; `tests/cluster/test_dashboard.py` tries it:

* `scheduler.http_application.applications`: what the scheduler's port serves; the dashboard is
  the `BokehTornado` among them. Another one beside it is asked when that knows no answer.
* `BokehTornado._applications`: by address. `/individual-plots.json`, and with it JupyterLab's
  extension, lists what the first one has.
* `distributed.dashboard.scheduler.template_variables`: memoised, so that what is put into its
  lists stands in the navigation of every page.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from distributed import Scheduler

__all__ = ["has_dashboard", "serve"]


def _dashboard(scheduler: Scheduler) -> Any:  # noqa: ANN401
    try:
        from bokeh.server.tornado import BokehTornado  # noqa: PLC0415 - optional
    except ImportError:
        return None
    served = getattr(scheduler.http_application, "applications", ())
    return next((one for one in served if isinstance(one, BokehTornado)), None)


def has_dashboard(scheduler: Scheduler) -> bool:
    """Whether Dask shows a dashboard."""
    return _dashboard(scheduler) is not None


def serve(
    scheduler: Scheduler, applications: Mapping[str, Callable[..., None]], *, page: str
) -> Callable[[], None]:
    """Serve pages beside Dask's own; what is returned takes them away.

    Parameters
    ----------
    scheduler : Scheduler
        With a dashboard.
    applications : mapping
        By address: called with the scheduler, the variables of Dask's templates, and a document.
    page : str
        What the navigation of all pages leads to.
    """
    from distributed.dashboard.core import BokehApplication  # noqa: PLC0415
    from distributed.dashboard.scheduler import template_variables  # noqa: PLC0415
    from tornado.ioloop import IOLoop  # noqa: PLC0415

    theirs = _dashboard(scheduler)
    frame = template_variables(scheduler)
    ours = BokehApplication(  # type: ignore[no-untyped-call]
        applications, scheduler, prefix=theirs.prefix, template_variables=frame
    )
    served = scheduler.http_application.applications
    served.append(ours)
    ours.initialize(IOLoop.current())
    ours.start()
    plots = {
        name: one for name, one in ours.applications.items() if "individual" in name
    }
    theirs._applications.update(plots)  # noqa: SLF001
    entries = [
        {"url": name.strip("/"), "name": " ".join(name.split("-")[1:]).title()}
        for name in plots
    ]
    frame["pages"].insert(-1, page)
    frame["plots"].extend(entries)

    def hide() -> None:
        with suppress(ValueError):
            frame["pages"].remove(page)
        for entry in entries:
            with suppress(ValueError):
                frame["plots"].remove(entry)
        for name in plots:
            theirs._applications.pop(name, None)  # noqa: SLF001
        with suppress(ValueError):
            served.remove(ours)
        ours.stop(wait=False)  # at the end its event loop runs still

    return hide
