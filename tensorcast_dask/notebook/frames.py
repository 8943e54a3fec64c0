"""A page within a notebook."""

from __future__ import annotations

from html import escape

from tensorcast_dask.notebook.markup import Html, joined, link

__all__ = ["frame"]


def frame(shown: str, address: str, *, height: int) -> str:
    """Give a frame with a link below it, for where frames are not shown.

    Parameters
    ----------
    shown : str
        Address of what stands in the frame.
    address : str
        Of what the link leads to.
    height : int
        Pixels.
    """
    if not shown.startswith(("http://", "https://", "/")):
        return joined((address,))
    where = escape(shown, quote=True)
    made = (
        f"<iframe src='{where}' width='100%' height='{height:d}' style='border:0' "
        "loading='lazy' referrerpolicy='no-referrer'></iframe>"
    )
    return joined((Html(made), Html("<div>"), link(address), Html("</div>")))
