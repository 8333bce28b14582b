"""Operations on lists of tensors: one launch for the whole list. They have no public names."""

import torch

CHECKED = {"torch": "2.11 to 2.15"}

copy_each = torch._foreach_copy_  # copies each tensor of one list into that of another; any strides and dtypes
scale_each = torch._foreach_mul_  # multiplies each tensor of a list in place
norm_of_each = torch._foreach_norm  # a tensor [] for each tensor of a list
