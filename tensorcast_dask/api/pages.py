"""The address of a page in Dask's dashboard, and the page itself in a notebook."""

from __future__ import annotations

import webbrowser
from typing import TYPE_CHECKING, Final
from urllib.parse import urlencode, urlsplit

from tensorcast_dask.exceptions import InvalidArgument
from tensorcast_dask.notebook.frames import frame

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["PAGES", "Page"]

PAGES: Final = ("placement", "memory", "transfers", "plans", "events")
_MOST_PIXELS: Final = 10_000


class Page:
    """A page of the tensor service in Dask's dashboard. Made by `Session.dashboard`.

    A notebook shows the page, with a link to it below; everything else its address.

    Parameters
    ----------
    link : str
        Address of Dask's dashboard, as the Dask client gives it.
    name : str
        One of `PAGES`.
    asked : mapping of str to str
        What the page is asked for.
    height : int
        Of the page in a notebook, in pixels.

    Attributes
    ----------
    address : str
        Of the page, with Dask's navigation.
    plot : str
        Of the page alone.
    """

    def __init__(
        self, link: str, name: str, asked: Mapping[str, str], height: int
    ) -> None:
        if name not in PAGES:
            message = f"there is no page {name!r}; there are {', '.join(PAGES)}"
            raise InvalidArgument(message)
        pixels: object = height
        if type(pixels) is not int or not 0 < pixels <= _MOST_PIXELS:
            message = f"height must be pixels, 1 to {_MOST_PIXELS}, not {height!r}"
            raise InvalidArgument(message)
        root = link.rstrip("/").removesuffix("/status")
        query = f"?{urlencode(asked)}" if asked else ""
        self.name = name
        self.height = height
        self.address = f"{root}/tensorcast-{name}{query}"
        self.plot = f"{root}/individual-tensorcast-{name}{query}"

    def open(self) -> bool:
        """Open it in a browser of this machine; False where there is none.

        Raises
        ------
        InvalidArgument
            When Dask gives an address without a host, as behind a notebook server's proxy.
        """
        if not urlsplit(self.address).netloc:
            message = f"{self.address} is relative to a notebook server; open it there"
            raise InvalidArgument(message)
        return webbrowser.open(self.address)

    def __repr__(self) -> str:
        return f"<Page {self.name!r} {self.address}>"

    def _repr_html_(self) -> str:
        return frame(self.plot, self.address, height=self.height)
