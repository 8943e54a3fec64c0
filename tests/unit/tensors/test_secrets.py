"""Which names speak of a secret."""

from __future__ import annotations

from tensorcast_dask.tensors.secrets import HIDDEN, is_secret, labels_shown


def test_names_that_speak_of_a_secret_are_known_in_every_spelling() -> None:
    for name in (
        "token",
        "HF_TOKEN",
        "my-secret",
        "db.password",
        "apiKey",
        "PRIVATE-KEY",
    ):
        assert is_secret(name)
    for name in ("team", "key", "monkey", "tokyo", ""):
        assert not is_secret(name)


def test_a_label_that_is_a_secret_by_its_name_is_shown_without_its_value() -> None:
    labels = {"team": "a", "hf-token": "x"}
    assert labels_shown(labels) == {"team": "a", "hf-token": HIDDEN}
    assert labels == {"team": "a", "hf-token": "x"}
