"""Start-up, asynchronous progress and shutdown of communicators."""
