"""Inputs that are almost right, for everything that reads files of others; see tools/fuzz.py."""
