"""What is checked. See grading.py for what `work` can do; `equal` and `Failed` are there too."""

TEXTS = {"": 0, "one": 1, "two words": 2, "  blanks \n\t and lines\n": 3}


def check_counts(work):
    for text, words in TEXTS.items():
        result = work.run(["python3", "count_words.py"], work.copy(), stdin=text)
        equal([result.code, result.out], [0, f"{words}\n"], f"words of {text!r}")
