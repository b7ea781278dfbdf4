"""What the benchmark of weight syncs says of two servers, by hand."""

from benchmarks.weight_sync import difference


def view(next_tokens, ids, logprobs):
    return {
        "next": [{"ids": [token], "logprobs": [logprob]} for token, logprob in next_tokens],
        "long": {"ids": ids, "logprobs": logprobs},
    }


def test_a_continuation_is_compared_as_far_as_both_have_the_same_text():
    one = view([(5, -1.0), (6, -2.0)], [1, 2, 3, 4], [-1.0, -2.0, -3.0, -4.0])
    tie = view([(5, -1.25), (7, -2.0)], [1, 2, 9, 9], [-1.0, -2.5, -3.125, -9.0])
    assert difference(one, tie) == {
        "next_ids_different": 1,
        "next_logprob_difference_max": 0.25,
        "continuation_same_tokens": 2,
        "continuation_logprob_difference_max": 0.5,  # -9 follows another token
    }
    assert difference(one, one) == {
        "next_ids_different": 0,
        "next_logprob_difference_max": 0.0,
        "continuation_same_tokens": 4,
        "continuation_logprob_difference_max": 0.0,
    }
