"""The public calls of a session: names, arguments, docstrings; a file for each kind."""
