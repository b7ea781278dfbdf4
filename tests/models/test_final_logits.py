import pytest
import torch

from rl360.models.final_logits import UPCAST_ROWS, final_logits, logits_dtype


def test_a_logit_of_twenty_is_on_a_grid_of_an_eighth_in_bf16_and_not_in_fp32():
    # 4 x 5 + 0.25 x 0.25 = 20.0625 and 4 x 5 + 0.25 x 0.75 = 20.1875: in bf16 both lie between two neighbours, 1/8
    # apart, and go to the even one of them
    hidden = torch.tensor([[4.0, 0.25]]).bfloat16()
    weight = torch.tensor([[5.0, 0.25], [5.0, 0.75]]).bfloat16()
    assert final_logits(hidden, weight, fp32=True).tolist() == [[20.0625, 20.1875]]
    assert final_logits(hidden, weight, fp32=False).tolist() == [[20.0, 20.25]]
    # so that e^(1/8) = 1.13 becomes e^(1/4) = 1.28 between the two tokens
    odds = [(row[0, 1] - row[0, 0]).item() for row in (final_logits(hidden, weight, wide) for wide in (True, False))]
    assert odds == [0.125, 0.25]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_products_in_fp32_equal_fp64_to_its_last_bits(dtype):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(5, 96, generator=generator).to(dtype)
    weight = torch.randn(UPCAST_ROWS + 7, 96, generator=generator).to(dtype)  # two blocks
    exact = hidden.double() @ weight.double().t()
    found = final_logits(hidden, weight, fp32=True)
    assert (found.dtype, found.shape) == (torch.float32, exact.shape)
    assert (found - exact).abs().max() < 2e-5  # of values up to 45
    rounded = final_logits(hidden, weight, fp32=False)
    assert rounded.dtype == dtype
    assert (rounded - exact).abs().max() > 1e-3


@pytest.mark.parametrize("fp32", [True, False])
def test_a_buffer_is_filled_and_its_neighbours_are_left_alone(fp32):
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(3, 8, generator=generator).bfloat16()
    weight = torch.randn(16, 8, generator=generator).bfloat16()
    whole = torch.full((4, 16), 7.0, dtype=logits_dtype(torch.bfloat16, fp32))
    found = final_logits(hidden, weight, fp32, out_NV=whole[:3])
    assert found.data_ptr() == whole.data_ptr()
    torch.testing.assert_close(whole[:3], final_logits(hidden, weight, fp32))
    assert (whole[3] == 7).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wide_weights_give_the_same_either_way(dtype):
    generator = torch.Generator().manual_seed(2)
    hidden, weight = (torch.randn(n, 8, generator=generator, dtype=dtype) for n in (3, 16))
    assert logits_dtype(dtype, True) == logits_dtype(dtype, False) == dtype
    assert torch.equal(final_logits(hidden, weight, True), final_logits(hidden, weight, False))


@pytest.mark.gpu
def test_on_cuda_the_sum_stays_in_fp32_without_an_fp32_product():
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(33, 576, generator=generator).bfloat16()
    weight = torch.randn(1000, 576, generator=generator).bfloat16()
    exact = hidden.double() @ weight.double().t()
    on_device = hidden.cuda(), weight.cuda()
    found = final_logits(*on_device, fp32=True)
    assert found.dtype == torch.float32
    assert (found.cpu() - exact).abs().max() < 2e-4
    assert (final_logits(*on_device, fp32=False).cpu() - exact).abs().max() > 1e-2
    buffer = torch.full((34, 1000), 7.0, device="cuda")
    assert torch.equal(final_logits(*on_device, True, out_NV=buffer[:33]), found)
    assert (buffer[33] == 7).all()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    final_logits(*on_device, True, out_NV=buffer[:33])
    assert torch.cuda.max_memory_allocated() - before < weight.numel()  # no copy of the weight in fp32
