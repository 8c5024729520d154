"""Schedules of messages, and what each collective must achieve."""
