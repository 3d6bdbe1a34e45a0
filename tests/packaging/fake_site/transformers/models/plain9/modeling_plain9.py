"""A family without torch, for environments without it."""

ANSWER = 42
