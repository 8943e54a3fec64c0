from __future__ import annotations

import pytest

from tensorcast_dask.exceptions import DeviceError, InvalidArgument
from tensorcast_dask.store.state.orders import Order, Orders
from tensorcast_dask.tensors.messages import Act, DeviceOrder, OrderEnded


def add(orders: Orders, act: Act = Act.FILL) -> Order:
    return orders.add(DeviceOrder(number=orders.number(), act=act))


def attached() -> Orders:
    orders = Orders()
    orders.attached = True
    return orders


def test_orders_are_given_out_one_at_a_time_in_their_order() -> None:
    orders = attached()
    one, two = add(orders), add(orders, Act.FREE)
    assert orders.next() is one
    assert orders.next() is None
    assert orders.ended(OrderEnded(number=1)) is one
    assert one.outcome == OrderEnded(number=1)
    assert orders.next() is two
    assert len(orders) == 1


def test_an_outcome_of_another_order_is_refused_and_changes_nothing() -> None:
    orders = attached()
    one = add(orders)
    with pytest.raises(InvalidArgument):
        orders.ended(OrderEnded(number=1))
    orders.next()
    with pytest.raises(InvalidArgument):
        orders.ended(OrderEnded(number=2))
    assert (one.outcome, orders.next()) == (None, None)


def test_an_order_is_taken_back_only_while_it_waits() -> None:
    orders = attached()
    one, two = add(orders), add(orders)
    orders.next()
    assert not orders.take_back(one)
    assert orders.take_back(two)
    orders.ended(OrderEnded(number=1))
    assert orders.next() is None


def test_the_end_of_the_process_ends_every_order_and_refuses_new_ones() -> None:
    orders = attached()
    lost = [add(orders), add(orders)]
    orders.next()
    assert orders.detach("it died") == lost
    for order in lost:
        assert order.outcome is not None
        assert order.outcome.fault is not None
        assert isinstance(order.outcome.fault.error(), DeviceError)
    with pytest.raises(DeviceError):
        add(orders)
    assert len(orders) == 0


def test_what_waits_for_another_node_holds_nobody_up_and_ends_when_it_does() -> None:
    orders = attached()
    send, fill, receive = (
        add(orders, act) for act in (Act.SEND, Act.FILL, Act.RECEIVE)
    )
    assert [orders.next(), orders.next(), orders.next()] == [send, fill, None]
    assert orders.ended(OrderEnded(number=2)) is fill
    assert orders.next() is receive
    assert len(orders) == 2
    assert orders.ended(OrderEnded(number=1)) is send
    with pytest.raises(InvalidArgument):
        orders.ended(OrderEnded(number=1))
    assert not orders.take_back(receive)
    assert orders.detach("it died") == [receive]
