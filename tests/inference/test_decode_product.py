"""Products of the few rows of a decode step."""

import pytest
import torch

from megatron.context_parallel.inference import decode_product
from megatron.context_parallel.inference.decode_product import FEW, VERY_FEW, Product


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [1, 2, FEW, FEW + 1])
@pytest.mark.parametrize("intel", [False, True])
def test_a_product_is_that_of_the_rows_that_the_buffer_has_now(intel, rows, dtype, monkeypatch):
    monkeypatch.setattr(decode_product, "has_fast_vector_products", lambda: intel)
    x, weight, bias = torch.randn(rows, 12, dtype=dtype), torch.randn(7, 12, dtype=dtype), torch.randn(7, dtype=dtype)
    out = torch.full((rows, 7), float("nan"), dtype=dtype)
    product = Product(x, out)
    assert product.few == (rows <= FEW and dtype is torch.float32 and not (intel and rows <= VERY_FEW))
    for given in (None, bias):
        x.normal_()
        product(weight, given)
        assert torch.allclose(out, torch.nn.functional.linear(x, weight, given), rtol=1e-4, atol=1e-5)


def test_a_row_does_not_depend_on_the_others():
    weight = torch.randn(40, 24)
    x, first, second = torch.randn(3, 24), torch.empty(3, 40), torch.empty(3, 40)
    Product(x, first)(weight)
    x[1:] = float("nan")
    Product(x, second)(weight)
    assert torch.equal(first[0], second[0])
