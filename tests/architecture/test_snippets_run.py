"""What the snippet runner takes from a document, and what it leaves out."""

from __future__ import annotations

from tests.architecture.test_snippets import blocks

DOCUMENT = """\
# Title

```python
first = 1
```

<!-- not run: needs a device -->
```python
second = 2
```

- a list

  ```python
  if first:
      third = 3
  ```

```console
$ fourth
```
"""


def test_blocks_keep_their_order_their_lines_and_their_reasons() -> None:
    assert blocks(DOCUMENT) == [
        (4, "first = 1\n", ""),
        (9, "second = 2\n", "needs a device"),
        (15, "if first:\n    third = 3\n", ""),
    ]
