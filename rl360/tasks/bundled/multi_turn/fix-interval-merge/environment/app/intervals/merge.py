"""Half-open intervals: [start, end] stands for start <= x < end. Empty ones (start >= end) hold nothing."""


def merge(intervals):
    """The same numbers as disjoint intervals in order; ones that overlap or touch become one, empty ones go.

    merge([[5, 7], [1, 3], [3, 4]]) == [[1, 4], [5, 7]]
    """
    result = []
    for start, end in intervals:
        if result and start < result[-1][1]:
            result[-1][1] = end
        else:
            result.append([start, end])
    return result


def covered(intervals):
    """How many whole numbers lie in at least one of the intervals."""
    return sum(end - start for start, end in intervals)


def gaps(intervals):
    """The intervals between the merged ones, in order.

    gaps([[1, 2], [4, 6]]) == [[2, 4]]
    """
    merged = merge(intervals)
    return [[left[1], right[0]] for left, right in zip(merged, merged[1:])]
