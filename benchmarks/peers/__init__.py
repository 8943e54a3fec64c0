"""The neighbours that a bar names, each by its own best API."""
