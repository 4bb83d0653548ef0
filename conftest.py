"""Loads the book's own check: the snippet runner."""

pytest_plugins = ["tests.plugin.snippets"]
