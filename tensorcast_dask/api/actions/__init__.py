"""What the calls of a session do; a file for each kind of action."""
