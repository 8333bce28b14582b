"""Operations on lists of tensors: one launch for all where a loop makes one for each. They have no public names."""

import torch

CHECKED = {"torch": "2.11 to 2.13"}

copy_each = torch._foreach_copy_  # into each tensor of a list, from that of another; of any strides and dtypes
norm_of_each = torch._foreach_norm  # a tensor [] for each tensor of a list
