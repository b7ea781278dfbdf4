import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl360.trainers.logprobs import Predictions, backward_through_head, token_logprobs


def case(seed, positions=11, tokens=17, vocab=29, width=6, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(positions, width, generator=generator, dtype=dtype)
    head = torch.randn(vocab, width, generator=generator, dtype=dtype)
    slots = torch.randint(positions, (tokens,), generator=generator).sort().values
    predictions = Predictions(
        temperatures_U=torch.rand(positions, generator=generator) + 0.5,
        slots_M=slots,
        targets_M=torch.randint(vocab, (tokens,), generator=generator),
    )
    return hidden, head, predictions


def whole(hidden, head, predictions):
    """Every logit at once."""
    logits = (hidden @ head.T / predictions.temperatures_U[:, None])[predictions.slots_M]
    distribution = torch.distributions.Categorical(logits=logits)
    return distribution.log_prob(predictions.targets_M), distribution.entropy()


def test_two_tokens_by_hand():
    # logits 0, 0, log 2 at temperature 1: probabilities 1/4, 1/4, 1/2
    hidden, head = torch.tensor([[1.0]]), torch.tensor([[0.0], [0.0], [math.log(2)]])
    predictions = Predictions(torch.ones(1), torch.tensor([0, 0]), torch.tensor([2, 0]))
    assert token_logprobs(hidden, head, predictions, 4).exp().tolist() == pytest.approx([0.5, 0.25])
    grad = torch.zeros_like(head)
    hidden_grad, entropy = backward_through_head(
        hidden, head, predictions, 4, lambda _, logp: torch.tensor([1.0, 0.0]), grad
    )
    # d log p(2) / d logits = onehot(2) - p
    assert grad.flatten().tolist() == pytest.approx([-0.25, -0.25, 0.5])
    assert hidden_grad.item() == pytest.approx(0.5 * math.log(2))
    # entropy of (1/4, 1/4, 1/2) is 1.5 bits, counted for both tokens
    assert entropy.item() == pytest.approx(2 * 1.5 * math.log(2))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 13))
def test_chunks_equal_all_logits_at_once(seed, chunk):
    hidden, head, predictions = case(seed)
    coefficients = torch.randn(17, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))

    leaf, weight = hidden.clone().requires_grad_(), head.clone().requires_grad_()
    logp, entropy = whole(leaf, weight, predictions)
    (coefficients * logp.exp()).sum().backward()

    torch.testing.assert_close(token_logprobs(hidden, head, predictions, chunk), logp.detach())
    head_grad = torch.ones_like(head)
    hidden_grad, entropy_sum = backward_through_head(
        hidden, head, predictions, chunk, lambda tokens, x: coefficients[tokens] * x.exp(), head_grad
    )
    torch.testing.assert_close(hidden_grad, leaf.grad)
    torch.testing.assert_close(head_grad - 1, weight.grad)
    assert entropy_sum.item() == pytest.approx(entropy.sum().item())


def test_bf16_hidden_states_give_fp32_logprobs_and_an_fp32_head_gradient():
    hidden, head, predictions = case(0, dtype=torch.float32)
    narrow = hidden.bfloat16(), head.bfloat16()
    logprobs = token_logprobs(*narrow, predictions, 4)
    assert logprobs.dtype == torch.float32
    expected, _ = whole(narrow[0].float(), narrow[1].float(), predictions)
    torch.testing.assert_close(logprobs, expected, atol=0.05, rtol=0.02)
    head_grad = torch.zeros_like(head)
    hidden_grad, _ = backward_through_head(*narrow, predictions, 4, lambda _, x: torch.ones_like(x), head_grad)
    assert hidden_grad.dtype == torch.bfloat16
    assert head_grad.abs().sum() > 0


def test_fp32_logits_of_bf16_weights_are_exact_and_rounded_ones_are_not():
    hidden, head, predictions = case(4, tokens=40, vocab=200, width=64, dtype=torch.float32)
    hidden, head = (2 * hidden).bfloat16(), head.bfloat16()  # logits of up to 60
    expected, _ = whole(hidden.double(), head.double(), predictions)
    coefficients = torch.randn(40, generator=torch.Generator().manual_seed(4))
    exact_grad = torch.zeros(200, 64, dtype=torch.float64)
    exact_hidden, exact_entropy = backward_through_head(
        hidden.double(), head.double(), predictions, 4, lambda part, x: coefficients[part] * x.exp(), exact_grad
    )
    far = {}
    for fp32 in (True, False):
        logprobs = token_logprobs(hidden, head, predictions, 4, fp32_logits=fp32)
        head_grad = torch.zeros(200, 64)
        seen = []

        def token_loss(part, x, seen=seen):
            seen.append(x)
            return coefficients[part] * x.exp()

        hidden_grad, entropy = backward_through_head(hidden, head, predictions, 4, token_loss, head_grad, fp32)
        assert torch.equal(torch.cat(seen), logprobs)
        far[fp32] = [
            ((found - exact).norm() / exact.norm()).item()
            for found, exact in (
                (logprobs, expected),
                (entropy, exact_entropy),
                (hidden_grad, exact_hidden),
                (head_grad, exact_grad),
            )
        ]
    # logprobs and entropies in fp32; gradients pass through bf16 products either way, from better logits
    assert max(far[True][:2]) < 1e-6
    assert min(far[False][:2]) > 1e-3
    assert all(wide < 0.5 * narrow for wide, narrow in zip(far[True][2:], far[False][2:], strict=True))
