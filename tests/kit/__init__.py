"""What the tests share: bounded waiting, leak checks, fakes and oracles.

Rules:

1. Everything here is typed and imported by its full name (`tests.kit.eventually`).
2. Only this folder may read a clock or wait; tests ask it to.
"""
