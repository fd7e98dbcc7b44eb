"""The HTTP server that the embedded engine and the fake engine share."""
