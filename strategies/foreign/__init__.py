"""Refusal of models of torch, Keras and TensorFlow, which no strategy synchronizes yet.

A strategy synchronizes its own `Variable` only. A model of another framework would train
independently on each rank. Nothing here imports a framework: unless the program has imported it,
its objects can't exist.
"""
