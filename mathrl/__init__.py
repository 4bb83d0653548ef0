"""The math of RL post-training: small functions, each one derived and attacked in the book.

Importing the package is light; every module is imported by name, for example
`from mathrl.arithmetic import verify`, and only the differentiable ones import torch.
"""
