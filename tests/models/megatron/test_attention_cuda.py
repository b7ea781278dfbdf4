"""The kernels against a plain product in fp32, on a GPU."""

import pytest
import torch

from rl360.errors import ConfigError
from rl360.models.megatron import attention_cuda
from rl360.models.megatron.attention_cuda import attend_varlen, kernel_name


def plain(q, k, v, lengths_q, lengths_k):
    """Query i of n sees keys up to i + m - n of m; fp32, [N, H, D]."""
    outs = []
    for q_part, k_part, v_part in zip(q.split(lengths_q), k.split(lengths_k), v.split(lengths_k), strict=True):
        n, m, shared = q_part.shape[0], k_part.shape[0], q_part.shape[1] // k_part.shape[1]
        keys, values = (x.float().repeat_interleave(shared, dim=1).transpose(0, 1) for x in (k_part, v_part))
        scores = q_part.float().transpose(0, 1) @ keys.transpose(1, 2) * q.shape[-1] ** -0.5
        hidden = torch.ones(n, m, dtype=torch.bool, device=q.device).triu(1 + m - n)
        outs.append((scores.masked_fill(hidden, float("-inf")).softmax(-1) @ values).transpose(0, 1))
    return torch.cat(outs)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["fa4", "torch"])
@pytest.mark.parametrize(
    ("lengths_q", "lengths_k"),
    [([300, 1, 77, 130], [300, 1, 77, 130]), ([128, 5, 64], [128, 200, 321])],
    ids=["whole", "last_queries_only"],
)
def test_values_and_gradients_are_those_of_the_plain_product(kernel, lengths_q, lengths_k):
    if kernel == "fa4" and kernel_name(torch.device("cuda", 0)) != "fa4":
        pytest.skip("no FlashAttention 4 on this machine")
    device = torch.device("cuda", 0)
    generator = torch.Generator(device).manual_seed(0)

    def drawn(tokens, heads):
        values = torch.randn(tokens, heads, 128, device=device, generator=generator, dtype=torch.bfloat16)
        return values.requires_grad_()

    q, k, v = drawn(sum(lengths_q), 8), drawn(sum(lengths_k), 2), drawn(sum(lengths_k), 2)
    toward = torch.randn(q.shape, device=device, generator=generator)
    bounds_q, bounds_k = (
        torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device=device)
        for lengths in (lengths_q, lengths_k)
    )

    out = attend_varlen(q, k, v, bounds_q, bounds_k, max(lengths_q), max(lengths_k), kernel=kernel)
    expected = plain(q, k, v, lengths_q, lengths_k)

    assert torch.allclose(out.float(), expected, atol=2e-2)
    grads = torch.autograd.grad((out.float() * toward).sum(), (q, k, v))
    expected_grads = torch.autograd.grad((expected * toward).sum(), (q, k, v))
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        assert (grad.float() - expected_grad.float()).norm() < 2e-2 * expected_grad.float().norm()


def test_an_unknown_kernel_is_named():
    with pytest.raises(ConfigError, match="'fa5'; expected one of auto, fa4, torch"):
        kernel_name(torch.device("cuda", 0), "fa5")


def test_without_flash_attention_4_torch_is_taken(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(attention_cuda, "_import_fa4", lambda: None)

    assert kernel_name(torch.device("cuda", 0)) == "torch"


def test_before_hopper_torch_is_taken(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(attention_cuda, "_import_fa4", lambda: pytest.fail("not asked on this device"))

    assert kernel_name(torch.device("cuda", 0)) == "torch"
