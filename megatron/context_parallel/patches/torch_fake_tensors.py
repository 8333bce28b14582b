"""Tensors with a shape, a dtype and a device, but without memory. PyTorch has no public name for their mode."""

from torch._subclasses import FakeTensorMode as FakeTensorMode

CHECKED = {"torch": "2.11 to 2.15"}
