"""Zebra puzzles: clues, a solver whose order is canonical, a generator, tokens and a verifier.

Standard library and numpy only. Houses, values and attributes count from 0 everywhere except in
text for readers, where houses count from 1.
"""
