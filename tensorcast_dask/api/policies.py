"""Policies and quotas, for a program.

Rules:

1. A policy is pickled here and runs at the scheduler, in a process of its own: what it closes
   over goes with it, what it imports must be there.
2. A session that ends takes no policy with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distributed.protocol.pickle import dumps

from tensorcast_dask.exceptions import InvalidArgument
from tensorcast_dask.policies import Role
from tensorcast_dask.tensors.messages import (
    InstallPolicy,
    PoliciesAsked,
    PolicyState,
    PolicyStates,
    QuotaState,
    RemovePolicy,
    SetQuota,
)

if TYPE_CHECKING:
    from tensorcast_dask.api.connection.core import Core

__all__ = ["PolicyBook"]


class PolicyBook:
    """The policies of a session's cluster."""

    def __init__(self, session: Any) -> None:
        self._core: Core = session._core  # noqa: SLF001 - the book's own session

    def __repr__(self) -> str:
        return "<policies: install(), list(), remove(), set_quota(), quotas()>"

    def install(
        self,
        policy: Any,
        *,
        name: str | None = None,
        every: float = 1.0,
        limit: float = 0.25,
    ) -> Any:
        """Let a policy decide from now on.

        Parameters
        ----------
        policy : tensorcast_dask.policies.Policy
            Any object with a `role` and a `decide`.
        name : str, optional
            What it is called; by default its class. The same name is the same policy: it is
            replaced. Of evict, admit and place there is one, whatever its name.
        every : float
            How often it is asked, in seconds; admit and place are asked by what comes.
        limit : float
            Seconds that one decision may take; then it is set aside.

        Returns
        -------
        PolicyState

        Raises
        ------
        InvalidArgument
            When it is no policy, or cannot be loaded at the scheduler.
        """
        role = getattr(policy, "role", None)
        if isinstance(policy, type):
            message = f"give a policy, {policy.__name__}(...), and not its class"
            raise InvalidArgument(message)
        if role not in list(Role) or not callable(getattr(policy, "decide", None)):
            message = (
                f"a policy has a role ({', '.join(Role)}) and decide(view, wanted), "
                f"{policy!r} has not"
            )
            raise InvalidArgument(message)
        try:
            blob: bytes = dumps(policy)  # type: ignore[no-untyped-call]
        except Exception as error:
            message = f"{policy!r} cannot be pickled, so it cannot go to the scheduler"
            raise InvalidArgument(message) from error
        request = InstallPolicy(
            rid=self._core.link.next_rid(),
            name=type(policy).__name__ if name is None else name,
            role=str(role),
            blob=blob,
            every_s=every,
            limit_s=limit,
        )
        return self._ask(request, PolicyState)

    def remove(self, name: str) -> Any:
        """Let a policy decide no more; the default takes over.

        Raises
        ------
        NotFound
            When there is none of that name.
        """
        request = RemovePolicy(rid=self._core.link.next_rid(), name=name)
        return self._ask(request, type(None))

    def list(self) -> Any:
        """List the policies that were installed, those too that were set aside, and why."""

        async def work() -> list[PolicyState]:
            return [*(await self._states()).policies]

        return self._core.bridge(work)

    # ------------------------------------------------------------ quotas
    def set_quota(
        self,
        name: str,
        *,
        prefix: str = "",
        tenant: str = "",
        nbytes: int | None = None,
        artifacts: int | None = None,
    ) -> Any:
        """Bound what artifacts take together; without a limit, take the quota away.

        What would pass it is refused with QuotaExceeded before anything is allocated; what is
        there already stays.

        Parameters
        ----------
        name : str
            Of the quota.
        prefix : str
            Of the ids that it counts.
        tenant : str
            Counts only artifacts with the label `tenant` of this value.
        nbytes : int, optional
            Most bytes, of one copy of each version.
        artifacts : int, optional
            Most versions.

        Returns
        -------
        QuotaState
            With what is used.
        """
        request = SetQuota(
            rid=self._core.link.next_rid(),
            name=name,
            prefix=prefix,
            tenant=tenant,
            nbytes=-1 if nbytes is None else nbytes,
            artifacts=-1 if artifacts is None else artifacts,
        )
        return self._ask(request, QuotaState)

    def quotas(self) -> Any:
        """List the quotas, with what is used of each."""

        async def work() -> list[QuotaState]:
            return [*(await self._states()).quotas]

        return self._core.bridge(work)

    async def _states(self) -> PolicyStates:
        request = PoliciesAsked(rid=self._core.link.next_rid())
        return await self._core.ask(request, PolicyStates, self._core.deadline(None))

    def _ask(self, request: Any, kind: type[Any]) -> Any:
        limit = self._core.deadline(None)
        return self._core.bridge(lambda: self._core.ask(request, kind, limit))
