"""Warpsmith inside other libraries: one module for each, imported only when asked for."""
