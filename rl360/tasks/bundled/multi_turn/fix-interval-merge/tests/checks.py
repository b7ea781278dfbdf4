"""Random intervals, compared with sets of numbers."""

import random


def cases():
    rng = random.Random(7)
    made = [[], [[1, 3], [3, 4]], [[1, 10], [2, 3]], [[4, 4]], [[5, 2], [1, 2]], [[1, 10], [2, 3], [4, 5]]]
    for _ in range(60):
        made.append([[rng.randrange(-9, 20), rng.randrange(-9, 20)] for _ in range(rng.randrange(7))])
    return made


def runs(numbers):
    result = []
    for x in sorted(numbers):
        if result and result[-1][1] == x:
            result[-1][1] = x + 1
        else:
            result.append([x, x + 1])
    return result


def numbers(intervals):
    return {x for start, end in intervals for x in range(start, end)}


def check_merge(work):
    asked = cases()
    for case, reply in zip(asked, work.call("intervals", "merge", [[c] for c in asked])):
        want = runs(numbers(case))
        equal([reply[0], [list(pair) for pair in reply[1]]], ["value", want], "merge of one case")


def check_covered(work):
    asked = cases()
    for case, reply in zip(asked, work.call("intervals", "covered", [[c] for c in asked])):
        equal(reply, ["value", len(numbers(case))], "covered of one case")


def check_gaps(work):
    asked = cases()
    for case, reply in zip(asked, work.call("intervals", "gaps", [[c] for c in asked])):
        merged = runs(numbers(case))
        want = [[left[1], right[0]] for left, right in zip(merged, merged[1:])]
        equal([reply[0], [list(pair) for pair in reply[1]]], ["value", want], "gaps of one case")


def check_the_argument_is_not_changed(work):
    probe = "import json, intervals\nx = [[1, 3], [2, 4]]\nintervals.merge(x)\nprint(json.dumps(x))\n"
    copy = work.copy({"probe.py": probe})
    equal(work.run(["python3", "probe.py"], copy).out, "[[1, 3], [2, 4]]\n", "the argument after merge")
