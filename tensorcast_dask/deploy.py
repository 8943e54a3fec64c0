"""Installs the three plugins, and does nothing else.

* By the scheduler's operator: ``dask scheduler --preload tensorcast_dask.deploy``. Workers
  need no flag: the scheduler hands their plugins on.
* By a client: `install(client)`, which `connect` calls where the scheduler has none.
"""

from __future__ import annotations

import inspect
import pickle
from typing import TYPE_CHECKING, Any

from tensorcast_dask.dashboard.main import show
from tensorcast_dask.device.launch import launch as launch_device
from tensorcast_dask.exceptions import CatalogUnavailable
from tensorcast_dask.metrics.main import tell, tell_of_worker
from tensorcast_dask.scheduler_plugin.installation import ABOUT_OP, About
from tensorcast_dask.scheduler_plugin.plugin import PLUGIN_NAME, CatalogPlugin
from tensorcast_dask.store.ends import grant_of
from tensorcast_dask.store.launch import launch
from tensorcast_dask.worker_plugin import capsule
from tensorcast_dask.worker_plugin.nanny import NANNY_PLUGIN_NAME, MemoryCheckPlugin
from tensorcast_dask.worker_plugin.plugin import WORKER_PLUGIN_NAME, NodePlugin

if TYPE_CHECKING:
    from distributed import Client, Scheduler

    from tensorcast_dask.config import Tree

__all__ = ["about", "dask_setup", "install", "make_plugins", "scheduler_plugin"]


def make_plugins(about: About) -> tuple[tuple[str, bytes], tuple[str, bytes]]:
    """Make the worker and the nanny plugin of one catalog, pickled, with their names."""
    worker_plugin = NodePlugin(
        version=about.version,
        cluster_name=about.cluster_name,
        link=about.link,
        tree=about.tree,
        arguments=about.arguments,
        launch=launch,
        launch_device=launch_device,
        measure=tell_of_worker,
    )
    nanny_plugin = MemoryCheckPlugin(about.tree, about.arguments)
    return (
        (WORKER_PLUGIN_NAME, _packed(worker_plugin, WORKER_PLUGIN_NAME, worker=True)),
        (NANNY_PLUGIN_NAME, _packed(nanny_plugin, NANNY_PLUGIN_NAME, worker=False)),
    )


class _Capsule:
    """Pickles as the text of `worker_plugin.capsule`, which opens it on arrival."""

    def __init__(self, inner: bytes, name: str, *, worker: bool) -> None:
        self._space = {
            "text": inspect.getsource(capsule),
            "space": {"__name__": "tensorcast_capsule"},
            "inner": inner,
            "name": name,
            "worker": worker,
        }

    def __reduce__(self) -> tuple[object, tuple[str, dict[str, object]]]:
        opened = "space['open_capsule'](inner, name=name, worker=worker)"
        return eval, (f"[exec(text, space), {opened}][1]", self._space)


def _packed(plugin: object, name: str, *, worker: bool) -> bytes:
    return pickle.dumps(_Capsule(pickle.dumps(plugin), name, worker=worker))


def scheduler_plugin(arguments: Tree | None = None) -> CatalogPlugin:
    """Make a scheduler plugin.

    Parameters
    ----------
    arguments : dict, optional
        Settings over those of the scheduler's own configuration.
    """
    return CatalogPlugin(
        ship=make_plugins,
        sign=grant_of,
        show=show,
        measure=tell,
        arguments=arguments,
    )


def dask_setup(scheduler: Scheduler) -> None:
    """Preload hook of the scheduler. Dask calls the plugin's `start` by itself."""
    scheduler.add_plugin(scheduler_plugin(), idempotent=True)


async def install(client: Client, arguments: Tree | None = None) -> None:
    """Install the plugins through a client; they stay when it closes.

    Any number of clients may do it at once; the first one's arguments hold. What an
    earlier installation of the same release holds is kept.

    Parameters
    ----------
    client : Client
        Connected, on its own event loop.
    arguments : dict, optional
        Settings over those of the scheduler's own configuration.

    Raises
    ------
    CatalogUnavailable
        When the scheduler cannot load the plugin, or its catalog cannot be started.
    Mismatch
        When the scheduler runs another release of this package.
    """
    assert client.scheduler is not None, "install: a connected client has a scheduler"
    try:
        await client.scheduler.register_scheduler_plugin(
            plugin=pickle.dumps(scheduler_plugin(arguments)),
            name=PLUGIN_NAME,
            idempotent=True,
        )
    except (ImportError, AttributeError) as error:
        message = (
            f"the scheduler cannot load this package ({error}); install tensorcast_dask "
            "there, in the release that is here"
        )
        raise CatalogUnavailable(message) from error
    except OSError as error:
        message = (
            f"the scheduler went away during the installation ({error}); try again"
        )
        raise CatalogUnavailable(message) from error


async def about(client: Client) -> dict[str, Any] | None:
    """Ask a scheduler which catalog it has; None when it has none."""
    answer = await getattr(client.scheduler, ABOUT_OP)()
    return answer if isinstance(answer, dict) else None
