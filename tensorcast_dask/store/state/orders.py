"""What the device process is asked to do, and who hears how it went.

Rules:

1. Orders are carried out one at a time, in the order in which they were given: what frees a
   slab comes before what needs its room, and nothing is written to a slab that was given to
   somebody else meanwhile. What waits for another node (`Act.beside`) begins in its turn and
   holds nobody up: two nodes may wait for each other. Its leases keep its slab.
2. Every order ends once: done, refused, or lost with the process. Nobody waits for ever.
3. An order that is under way cannot be taken back; one that still waits can.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tensorcast_dask.exceptions import DeviceError, InvalidArgument
from tensorcast_dask.tensors.messages import Fault, OrderEnded

if TYPE_CHECKING:
    from tensorcast_dask.tensors.messages import DeviceOrder

__all__ = ["Order", "Orders"]


@dataclass(slots=True, eq=False)
class Order:
    """One order and its outcome."""

    told: DeviceOrder
    outcome: OrderEnded | None = None


class Orders:
    """The orders of one device process.

    Attributes
    ----------
    attached : bool
        Whether there is one.
    """

    def __init__(self) -> None:
        self.attached = False
        self._waiting: deque[Order] = deque()
        self._under_way: Order | None = None
        #: Those that others do not wait for, by their number.
        self._beside: dict[int, Order] = {}
        self._count = 0

    def __len__(self) -> int:
        waiting = len(self._waiting) + len(self._beside)
        return waiting + (self._under_way is not None)

    def number(self) -> int:
        """Mint the number of the next order."""
        self._count += 1
        return self._count

    def add(self, told: DeviceOrder) -> Order:
        """Give an order.

        Raises
        ------
        DeviceError
            When no device process is attached.
        """
        if not self.attached:
            message = "the device process of this node is gone, and what it held with it; read another replica"
            raise DeviceError(message)
        order = Order(told)
        self._waiting.append(order)
        return order

    def next(self) -> Order | None:
        """Take the next order, once the one before has ended."""
        if self._under_way is not None or not self._waiting:
            return None
        order = self._waiting.popleft()
        if order.told.act.beside:
            self._beside[order.told.number] = order
        else:
            self._under_way = order
        return order

    def ended(self, how: OrderEnded) -> Order:
        """Take the outcome of an order that is under way.

        Raises
        ------
        InvalidArgument
            When it is not.
        """
        order = self._beside.pop(how.number, None)
        if order is None:
            order = self._under_way
            if order is None or order.told.number != how.number:
                message = f"order {how.number} is not under way; attach again"
                raise InvalidArgument(message)
            self._under_way = None
        order.outcome = how
        return order

    def take_back(self, order: Order) -> bool:
        """Withdraw an order that still waits; False when it is too late."""
        if order not in self._waiting:
            return False
        self._waiting.remove(order)
        return True

    def detach(self, why: str) -> list[Order]:
        """End all orders: the process is gone; return them."""
        self.attached = False
        lost = [] if self._under_way is None else [self._under_way]
        lost += [*self._beside.values(), *self._waiting]
        self._under_way = None
        self._beside.clear()
        self._waiting.clear()
        for order in lost:
            fault = Fault.of(DeviceError(why))
            order.outcome = OrderEnded(number=order.told.number, fault=fault)
        return lost
