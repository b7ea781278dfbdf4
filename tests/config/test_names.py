from rl360.config.names import suggestion


def test_a_near_name_is_suggested():
    assert suggestion("clip_hihg", ["clip_low", "clip_high"]) == "; did you mean clip_high?"


def test_without_a_near_name_all_are_listed_in_order():
    assert suggestion("zzz", ["torch", "megatron"]) == "; there are: megatron, torch"


def test_nothing_known_says_nothing():
    assert suggestion("x", []) == ""
