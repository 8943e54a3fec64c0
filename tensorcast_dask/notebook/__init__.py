"""What notebooks show: HTML and SVG text, drawn from values that others have asked for."""
