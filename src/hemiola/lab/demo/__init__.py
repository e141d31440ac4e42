"""The demo: three troubles with their cures, then all of them at once."""
