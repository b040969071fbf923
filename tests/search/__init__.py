"""A search over random whole graphs for gradients that are wrong, `make search`; docs/search.md."""
