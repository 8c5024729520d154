"""The torch.distributed backend compared with gloo, in one program.

Named like the library that it measures: imports in it are absolute.
"""
