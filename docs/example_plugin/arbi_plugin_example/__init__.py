"""A complete arbi plugin, explained in docs/plugin-authors.md."""
