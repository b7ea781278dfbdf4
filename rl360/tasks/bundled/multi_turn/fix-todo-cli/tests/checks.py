"""Sessions with the tool, each in a folder of its own."""


def todo(work, copy, *arguments):
    return work.run(["python3", "todo.py", *arguments], copy)


def session(work, *steps):
    copy = work.copy()
    for arguments, out in steps:
        result = todo(work, copy, *arguments)
        equal([result.code, result.out], [0, out], "todo.py " + " ".join(arguments))
    return copy


def check_numbers_and_marks(work):
    session(
        work,
        (["list"], ""),
        (["add", "buy milk"], "1\n"),
        (["add", "call home"], "2\n"),
        (["add", "sleep"], "3\n"),
        (["done", "2"], ""),
        (["list"], "1 [ ] buy milk\n2 [x] call home\n3 [ ] sleep\n"),
        (["list", "--open"], "1 [ ] buy milk\n3 [ ] sleep\n"),
        (["done", "1"], ""),
        (["list", "--open"], "3 [ ] sleep\n"),
    )


def check_letters(work):
    session(work, (["add", "Käse 漢字 €"], "1\n"), (["add", "é"], "2\n"), (["list"], "1 [ ] Käse 漢字 €\n2 [ ] é\n"))


def check_numbers_are_never_used_again(work):
    session(
        work,
        (["add", "a"], "1\n"),
        (["add", "b"], "2\n"),
        (["add", "c"], "3\n"),
        (["remove", "3"], ""),
        (["add", "d"], "4\n"),
        (["remove", "1"], ""),
        (["list"], "2 [ ] b\n4 [ ] d\n"),
        (["done", "4"], ""),
        (["list"], "2 [ ] b\n4 [x] d\n"),
    )


def check_unknown_numbers(work):
    copy = session(work, (["add", "a"], "1\n"), (["add", "b"], "2\n"))
    before = work.read("todo.json", copy)
    for arguments in (["done", "3"], ["remove", "0"], ["done", "-1"], ["remove", "7"]):
        result = todo(work, copy, *arguments)
        want = [1, "", f"no item {arguments[1]}\n"]
        equal([result.code, result.out, result.err], want, "todo.py " + " ".join(arguments))
        equal(work.read("todo.json", copy), before, "todo.json after an error")
