"""Formulas that methods share; nothing here knows of a network."""
