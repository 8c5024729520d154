"""Refusal of models of torch, Keras and TensorFlow that no strategy was given.

A strategy synchronizes its own `Variable`, and the models that `distribute` or `compile` has given
to it. Any other model of a framework would train independently on each rank. Nothing here imports a
framework: unless the program has imported it, its objects can't exist.
"""
