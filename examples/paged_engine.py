"""A small inference engine in numpy: named weights, a paged KV pool, sessions that can move.

It computes no language, but what it computes follows from its weights and tokens alone, and its KV
pages are a true cache: an engine that was handed a session's pages goes on exactly as the one that
made them. So examples and tests can see whether weights and pages arrived.

    python paged_engine.py           work alone, to see what an engine is
    python paged_engine.py NAME      attach as instance NAME, serve until stdin ends
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from tensorcast_dask.instance import attach

LAYERS, HEADS, WIDTH, VOCABULARY, PAGE_TOKENS = 2, 2, 8, 64, 4


def make_weights(seed: int) -> dict[str, np.ndarray]:
    """A model: the same seed is the same model."""
    chance = np.random.default_rng(seed)
    hidden = HEADS * WIDTH
    model = {"embed": chance.normal(size=(VOCABULARY, hidden)).astype(np.float32)}
    for layer in range(LAYERS):
        for part in ("key", "value"):
            drawn = chance.normal(size=(hidden, hidden)).astype(np.float32)
            model[f"layers.{layer}.{part}"] = drawn
    model["head"] = chance.normal(size=(hidden, VOCABULARY)).astype(np.float32)
    return model


class Session:
    """Tokens, and the pages that hold their keys and values."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.pages: list[int] = []


class PagedEngine:
    """Weights, a pool of pages, and sessions over them.

    Parameters
    ----------
    seed : int
        Of the model that it begins with.
    pages : int
        How many pages the pool has.
    """

    framework = "numpy"

    def __init__(self, seed: int = 0, pages: int = 64) -> None:
        self._weights = make_weights(seed)
        # Of each page: layers, keys and values, tokens, heads, width.
        shape = (pages, LAYERS, 2, PAGE_TOKENS, HEADS, WIDTH)
        self.pool = np.zeros(shape, np.float32)
        self.free = list(range(pages))
        self.sessions: dict[str, Session] = {}
        #: Tokens that were computed, not taken from pages.
        self.computed = 0

    # ------------------------------------------------------------ inference
    def generate(self, session: str, prompt: list[int], count: int = 4) -> list[int]:
        """Add a prompt to a session and go on for so many tokens."""
        state = self.sessions.setdefault(session, Session())
        for token in prompt:
            self._append(state, token)
        made = []
        for _ in range(count):
            made.append(self._next(state))
            self._append(state, made[-1])
        return made

    def _append(self, state: Session, token: int) -> None:
        at = len(state.tokens) % PAGE_TOKENS
        if not at:
            if not self.free:
                raise MemoryError("the KV pool is full; evict a session")
            state.pages.append(self.free.pop())
        state.tokens.append(token % VOCABULARY)
        page = self.pool[state.pages[-1]]
        hidden = self._weights["embed"][token % VOCABULARY]
        for layer in range(LAYERS):
            for number, part in enumerate(("key", "value")):
                made = hidden @ self._weights[f"layers.{layer}.{part}"]
                page[layer, number, at] = made.reshape(HEADS, WIDTH)
        self.computed += 1

    def _next(self, state: Session) -> int:
        """The next token, of everything that the pages hold."""
        kv = self.pool[state.pages]
        total = kv.sum(axis=(0, 1, 2, 3)).reshape(-1)
        return int(np.argmax(total @ self._weights["head"]))

    # ------------------------------------------------------------ the contract
    def weights(self) -> dict[str, np.ndarray]:
        """The live weights."""
        return self._weights

    def manifest(self) -> dict[str, Any]:
        """What there is to know."""
        return {
            "sessions": {name: len(s.tokens) for name, s in self.sessions.items()},
            "free_pages": len(self.free),
            "computed": self.computed,
        }

    def publish_session(self, session: str) -> dict[str, np.ndarray]:
        """A session's pages, packed, and its tokens."""
        state = self.sessions[session]
        tokens = np.array(state.tokens, np.int64)
        return {"kv": self.pool[state.pages], "tokens": tokens}

    def hydrate(self, session: str, tensors: Mapping[str, Any]) -> dict[str, int]:
        """Take a session in: all of it, or nothing."""
        kv, tokens = tensors["kv"], tensors["tokens"]
        if kv.shape[1:] != self.pool.shape[1:] or len(kv) > len(self.free):
            raise ValueError(f"no room for {len(kv)} pages of {kv.shape[1:]}")
        self.evict_local(session)
        state = Session()
        state.pages = [self.free.pop() for _ in range(len(kv))]
        state.tokens = [int(token) for token in tokens]
        self.pool[state.pages] = kv
        self.sessions[session] = state
        return {"pages": len(kv), "tokens": len(tokens)}

    def evict_local(self, session: str) -> bool:
        """Give a session's pages back."""
        state = self.sessions.pop(session, None)
        if state is not None:
            self.free.extend(state.pages)
        return state is not None


def main() -> None:
    if len(sys.argv) == 1:
        print("alone:", PagedEngine(seed=0).generate("a session", [1, 2, 3], 4))
        return
    name = sys.argv[1]
    engine = PagedEngine(seed=int(os.environ.get("SEED", "0")))
    with attach(name, engine=engine, labels={"model": "toy"}) as instance:

        @instance.function
        def generate(session: str, prompt: list[int], count: int = 4) -> list[int]:
            made = engine.generate(session, prompt, count)
            instance.push_load(
                sessions=len(engine.sessions), free_pages=len(engine.free)
            )
            return made

        print("attached", instance.where, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
