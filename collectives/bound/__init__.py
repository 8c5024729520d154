"""Bound calls: what a kind of call needs is looked up once and kept in a function (`bind`)."""
