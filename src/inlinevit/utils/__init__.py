"""Helpers that every package may use: validation, safe reading, atomic writing, seeds, memory."""
