"""Memory that an instance lends, as its store keeps it."""

from __future__ import annotations

from typing import Any

import pytest

from tensorcast_dask.exceptions import OwnerGone
from tensorcast_dask.store.loans import Loans
from tensorcast_dask.tensors.ids import RequestId
from tensorcast_dask.tensors.messages import BeginLending, InstanceRecord


def test_nothing_is_begun_for_an_instance_that_was_seen_to_be_gone_meanwhile() -> None:
    nobody: Any = None
    loans = Loans(
        "a",
        nobody,
        core=nobody,
        identity=nobody,
        devices=nobody,
        say=nobody,
        say_later=nobody,
    )
    record = InstanceRecord(name="e", attachment="a")
    loans.close("its process ended")
    with pytest.raises(OwnerGone, match="its process ended"):
        loans.take(BeginLending(rid=RequestId("r")), record)
    assert loans.lending is None
