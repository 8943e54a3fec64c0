"""Which names speak of a secret."""

from __future__ import annotations

import pytest

from tensorcast_dask.tensors.secrets import HIDDEN, is_secret, labels_shown

SECRET = [
    "token",
    "api-token",
    "API_KEY",
    "awsSecretKey",
    "db.password",
    "auth",
    "my private",
    "APIToken",
    "DBPassword",
    "api_keys",
    "Authorization",
]
OPEN = ["tenant", "stage", "tokens-seen", "keyboard", "author", "monkey", "run"]


@pytest.mark.parametrize("key", SECRET)
def test_a_key_that_says_secret_is_one(key: str) -> None:
    assert is_secret(key)


@pytest.mark.parametrize("key", OPEN)
def test_a_key_that_only_looks_alike_is_none(key: str) -> None:
    assert not is_secret(key)


def test_a_label_that_is_a_secret_by_its_name_is_shown_without_its_value() -> None:
    labels = {"team": "a", "hf-token": "x"}
    assert labels_shown(labels) == {"team": "a", "hf-token": HIDDEN}
    assert labels == {"team": "a", "hf-token": "x"}
