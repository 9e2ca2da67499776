"""One file a route: validate, prepare, generate, format."""
