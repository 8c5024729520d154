"""Keras models that a strategy trains in step: `compile` in its scope, then `fit`.

Imports Keras: `Strategy.scope` imports this package, and only where the program has imported Keras.
"""
