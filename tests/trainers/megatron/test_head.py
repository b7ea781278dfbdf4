import itertools
import math

import pytest
import torch
import torch.multiprocessing
from hypothesis import given, settings
from hypothesis import strategies as st

from rl360.trainers.logprobs import Predictions, backward_through_head, token_logprobs
from rl360.trainers.megatron.head import HeadPredictions, head_logprobs, head_loss
from tests.trainers.megatron.head_ranks import CASES, case, check, on_host, run_rank


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_together_equal_one_process(size, tmp_path):
    torch.multiprocessing.spawn(run_rank, args=(size, str(tmp_path / "store")), nprocs=size)


@pytest.mark.parametrize("arguments", CASES, ids=lambda arguments: f"seed{arguments['seed']}")
def test_one_process_without_a_group(arguments):
    check(0, 1, None, **arguments)


def test_two_tokens_by_hand():
    # logits 0, 0, log 2 at temperature 1, and a padded column: probabilities 1/4, 1/4, 1/2
    hidden = torch.tensor([[1.0]], requires_grad=True)
    weight = torch.tensor([[0.0], [0.0], [math.log(2)], [50.0]])
    predictions = on_host(torch.ones(1), torch.tensor([0, 0]), torch.tensor([2, 0]))
    assert head_logprobs(hidden, weight, predictions, 4, vocab_size=3).exp().tolist() == pytest.approx([0.5, 0.25])
    grad = torch.zeros_like(weight)
    loss, entropy = head_loss(
        hidden, weight, predictions, 4, lambda _, logp: torch.tensor([1.0, 0.0]), grad, vocab_size=3
    )
    loss.backward()
    # d log p(2) / d logits = onehot(2) - p
    assert grad.flatten().tolist() == pytest.approx([-0.25, -0.25, 0.5, 0.0])
    assert hidden.grad.item() == pytest.approx(0.5 * math.log(2))
    # entropy of (1/4, 1/4, 1/2) is 1.5 bits, counted for both tokens
    assert entropy.item() == pytest.approx(2 * 1.5 * math.log(2))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 14))
def test_against_every_logit_at_once_in_fp64(seed, chunk):
    hidden, head, temperatures, slots, targets = case(seed, positions=12, tokens=9, vocab=29)
    coefficients = torch.randn(slots.numel(), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    leaf, weight = hidden.clone().requires_grad_(), head.clone().requires_grad_()
    distribution = torch.distributions.Categorical(logits=(leaf @ weight.T / temperatures[:, None])[slots])
    logprobs = distribution.log_prob(targets)
    (coefficients * logprobs.exp()).sum().backward()

    own = hidden.clone().requires_grad_()
    head_grad = torch.zeros_like(head)
    seen = []

    def token_loss(tokens, x):
        seen.append(x)
        return coefficients[tokens] * x.exp()

    loss, entropy_sum = head_loss(own, head, Predictions(temperatures, slots, targets), chunk, token_loss, head_grad)
    loss.backward()
    torch.testing.assert_close(torch.cat(seen), logprobs.detach())
    torch.testing.assert_close(own.grad, leaf.grad)
    torch.testing.assert_close(head_grad, weight.grad)
    assert entropy_sum.item() == pytest.approx(distribution.entropy().sum().item())


def test_a_nearly_certain_token_keeps_its_small_gradient_in_bf16():
    # p = 1 - 1.1e-4: -p and the one-hot 1, rounded apart to bf16, would leave 0 or 4e-3 instead of 1.1e-4
    hidden, weight = torch.tensor([[1.0]]).bfloat16(), torch.tensor([[9.125], [0.0]]).bfloat16()
    grad = torch.zeros(2, 1)
    head_loss(
        hidden, weight, on_host(torch.ones(1), torch.tensor([0]), torch.tensor([0])), 1, lambda _, x: x * 0 + 1, grad
    )
    small = 1 / (1 + math.exp(9.125))
    assert grad.flatten().tolist() == pytest.approx([small, -small], rel=0.01)


def test_large_logits_stay_finite():
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[800.0], [-800.0], [799.0]])
    predictions = on_host(torch.full((1,), 0.5), torch.tensor([0, 0]), torch.tensor([2, 1]))
    logprobs = head_logprobs(hidden, weight, predictions, 1)
    assert logprobs.tolist() == pytest.approx([-2 - math.log1p(math.exp(-2)), -3200 - math.log1p(math.exp(-2))])
    _, entropy = head_loss(hidden, weight, predictions, 1, lambda _, x: torch.ones_like(x), torch.zeros(3, 1))
    p = 1 / (1 + math.exp(-2))
    assert entropy.item() == pytest.approx(2 * (-p * math.log(p) - (1 - p) * math.log(1 - p)), rel=1e-5)


def test_the_token_loss_is_called_once_a_chunk_in_order():
    hidden, head, temperatures, slots, targets = case(0, positions=10, tokens=0, vocab=16)
    seen = []
    head_loss(
        hidden, head, on_host(temperatures, slots, targets), 4,
        lambda tokens, x: seen.append((tokens.start, tokens.stop)) or torch.zeros_like(x), torch.zeros_like(head),
    )  # fmt: skip
    bounds = torch.searchsorted(slots, torch.tensor([0, 4, 8, 10])).tolist()
    assert seen == list(itertools.pairwise(bounds))


def test_leaders_join_equal_targets_of_a_position():
    found = on_host(torch.ones(3), torch.tensor([0, 0, 0, 1, 2, 2]), torch.tensor([5, 4, 5, 5, 7, 7]))
    assert found.leaders_M.tolist() == [0, 1, 0, 3, 4, 4]


def test_slots_out_of_order_are_refused():
    with pytest.raises(ValueError, match="ascend"):
        on_host(torch.ones(2), torch.tensor([1, 0]), torch.tensor([0, 0]))


@pytest.mark.slow
def test_compiled_passes_equal_plain_ones():
    hidden, head, *rest = case(3, positions=40, tokens=30, vocab=61, dtype=torch.float32)
    predictions = on_host(*rest)
    found = {}
    for compiled in (False, True):
        leaf, head_grad = hidden.clone().requires_grad_(), torch.zeros_like(head)
        loss, entropy = head_loss(
            leaf, head, predictions, 16, lambda _, x: x.exp(), head_grad, vocab_size=59, compiled=compiled
        )
        loss.backward()
        logprobs = head_logprobs(hidden, head, predictions, 16, vocab_size=59, compiled=compiled)
        found[compiled] = (leaf.grad, head_grad, entropy.float(), logprobs)
    for plain, fused in zip(found[False], found[True], strict=True):
        torch.testing.assert_close(fused, plain)


@pytest.mark.parametrize("fp32_logits", [True, False])
def test_bf16_weights_give_the_torch_trainers_numbers_in_both_modes(fp32_logits):
    # Multiples of 1/16 up to 60: sums are exact in fp32 whatever their order, and bf16 rounds many of them.
    generator = torch.Generator().manual_seed(5)
    hidden, head = (torch.randint(-8, 9, (n, 16), generator=generator).div(4).bfloat16() for n in (11, 61))
    _, _, temperatures, slots, targets = case(5, positions=11, tokens=9, vocab=61)
    predictions, plain = on_host(temperatures, slots, targets), Predictions(temperatures, slots, targets)
    expected = token_logprobs(hidden, head, plain, 4, fp32_logits)
    other = token_logprobs(hidden, head, plain, 4, not fp32_logits)
    found = head_logprobs(hidden, head, predictions, 3, fp32_logits=fp32_logits)
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=2e-6)
    assert (found - other).abs().max() > 0.01  # the mode matters

    coefficients = torch.randn(slots.numel(), generator=generator)

    def token_loss(part, logprobs):
        return coefficients[part] * logprobs.exp()

    expected_grad, head_grad, leaf = torch.zeros(61, 16), torch.zeros(61, 16), hidden.clone().requires_grad_()
    hidden_grad, entropy = backward_through_head(hidden, head, plain, 4, token_loss, expected_grad, fp32_logits)
    loss, entropy_sum = head_loss(leaf, head, predictions, 3, token_loss, head_grad, fp32_logits=fp32_logits)
    loss.backward()
    assert entropy_sum.item() == pytest.approx(entropy.item(), rel=1e-6)
    assert head_grad.dtype == torch.float32
    torch.testing.assert_close(leaf.grad, hidden_grad, atol=1e-3, rtol=0.02)  # bf16's last bits
    torch.testing.assert_close(head_grad, expected_grad, atol=1e-3, rtol=0.02)


def test_the_split_vocabulary_keeps_fp32_logits_and_leaves_padding_alone():
    # Rows 3 and 4 are padding of other values; logits 20.0625 and 20.1875 are 1/8 apart in fp32, 1/4 in bf16.
    hidden = torch.tensor([[4.0, 0.25]]).bfloat16()
    weight = torch.tensor([[5.0, 0.25], [5.0, 0.75], [0.0, 0.0], [9.0, 9.0], [9.0, 9.0]]).bfloat16()
    predictions = on_host(torch.ones(1), torch.tensor([0, 0]), torch.tensor([0, 1]))
    for fp32_logits, apart in ((True, 0.125), (False, 0.25)):
        first, second = head_logprobs(hidden, weight, predictions, 1, vocab_size=3, fp32_logits=fp32_logits).tolist()
        assert second - first == pytest.approx(apart, abs=1e-6)
        grad = torch.zeros(5, 2)
        head_loss(
            hidden, weight, predictions, 1, lambda _, x: torch.tensor([0.0, 1.0]), grad, vocab_size=3,
            fp32_logits=fp32_logits,
        )  # fmt: skip
        p = 1 / (1 + math.exp(-apart))  # of the second token; the third has e^-20
        assert grad[:2, 0].tolist() == pytest.approx([-4 * (1 - p), 4 * (1 - p)], rel=0.01)
        assert (grad[3:] == 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_on_cuda_fp32_logits_are_those_of_fp64_and_rounded_ones_are_not(compiled):
    hidden, head, temperatures, slots, targets = case(2, 50, 20, 2001, width=64, dtype=torch.float32)
    hidden, head = (2 * hidden).bfloat16(), head.bfloat16()  # logits of up to 70
    plain = Predictions(temperatures, slots, targets)
    expected = token_logprobs(hidden.double(), head.double(), plain, 1000)
    predictions = HeadPredictions.of(temperatures.numpy(), slots.numpy(), targets.numpy(), "cuda")
    weight = torch.zeros(2048, 64, dtype=torch.bfloat16, device="cuda")
    weight[:2001] = head.cuda()
    far = {}
    for fp32_logits in (True, False):
        arguments = {"vocab_size": 2001, "compiled": compiled, "fp32_logits": fp32_logits}
        found = head_logprobs(hidden.cuda(), weight, predictions, 16, **arguments)
        far[fp32_logits] = (found.cpu() - expected).abs().max().item()
        seen = []
        head_loss(
            hidden.cuda(), weight, predictions, 16, lambda _, x, seen=seen: seen.append(x) or torch.zeros_like(x),
            torch.zeros(2048, 64, device="cuda"), **arguments,
        )  # fmt: skip
        assert torch.equal(torch.cat(seen), found)
    assert far[True] < 2e-4
    assert far[False] > 0.05


@pytest.mark.gpu
@pytest.mark.parametrize("fp32_logits", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_on_cuda_in_bf16_without_waiting_for_the_device(compiled, fp32_logits):
    hidden, head, temperatures, slots, targets = case(1, 50, 20, 2001, width=64, dtype=torch.float32)
    head /= 8
    coefficients = torch.randn(slots.numel(), generator=torch.Generator().manual_seed(0))
    reference = hidden.bfloat16().double(), head.bfloat16().double()
    exact = on_host(temperatures, slots, targets)
    expected_head = torch.zeros_like(reference[1])
    leaf = reference[0].clone().requires_grad_()
    loss, entropy = head_loss(leaf, reference[1], exact, 1000, lambda t, x: coefficients[t] * x.exp(), expected_head)
    loss.backward()

    predictions = HeadPredictions.of(temperatures.numpy(), slots.numpy(), targets.numpy(), "cuda")
    weight = torch.zeros(2048, 64, dtype=torch.bfloat16, device="cuda")
    weight[:2001] = head.bfloat16().cuda()
    on_device, coefficients = hidden.bfloat16().cuda().requires_grad_(), coefficients.cuda()
    head_grad = torch.zeros(2048, 64, device="cuda")

    def run():
        return head_loss(
            on_device, weight, predictions, 16, lambda t, x: coefficients[t] * x.exp(), head_grad,
            vocab_size=2001, compiled=compiled, fp32_logits=fp32_logits,
        )  # fmt: skip

    run()  # compiles
    head_grad.zero_()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found, found_entropy = run()
        found.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")

    def far(a, b):
        return ((a.double().cpu() - b).norm() / b.norm()).item()

    assert far(on_device.grad, leaf.grad) < 0.02
    assert far(head_grad[:2001], expected_head) < 0.02
    assert (head_grad[2001:] == 0).all()
    assert found_entropy.item() == pytest.approx(entropy.item(), rel=2e-3)
