import unittest

from intervals import covered, merge


class MergeTest(unittest.TestCase):
    def test_touching(self):
        self.assertEqual(merge([[5, 7], [1, 3], [3, 4]]), [[1, 4], [5, 7]])

    def test_one(self):
        self.assertEqual(merge([[2, 9]]), [[2, 9]])
        self.assertEqual(covered([[2, 9]]), 7)
