"""Adapters for training frameworks, one module each; import the one of your framework."""
