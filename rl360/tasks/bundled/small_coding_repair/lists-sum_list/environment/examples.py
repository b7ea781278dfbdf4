"""What /app/solution.py has to do, by example. `python3 /app/examples.py` tries it; the tests try more."""

if __name__ == "__main__":
    import ast
    import contextlib
    import io
    import resource
    import signal
    import traceback

    def too_slow(number, frame):
        raise TimeoutError("no answer after 5 s")

    with open(__file__) as file:
        asserts = [node.test for node in ast.parse(file.read()).body if isinstance(node, ast.Assert)]
    path, space = __file__.replace("examples.py", "solution.py"), {"__name__": "solution"}
    tried, found = "/app/solution.py", None
    signal.signal(signal.SIGALRM, too_slow)
    signal.alarm(5)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 29, 1 << 29))  # an error that can be shown, before the sandbox ends
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # what is printed below comes first and alone
            with open(path) as file:
                exec(compile(file.read(), path, "exec"), space)
            for test in asserts:
                tried = ast.unparse(test.left)
                got, expected = (eval(ast.unparse(side), space) for side in (test.left, test.comparators[0]))
                if got != expected:
                    found = f"{tried} gave {got!r:.100}, expected {expected!r}"
                    break
    except BaseException as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
        lines += [error.lineno] if isinstance(error, SyntaxError) else []
        text = error.msg if isinstance(error, SyntaxError) else str(error)
        found = f"{tried}: {type(error).__name__}: {text:.200}{f' (line {lines[-1]})' if lines else ''}"
    print(found or "the examples are right")
    raise SystemExit(1 if found else 0)
assert sum_list([1, 2, 3]) == 6
assert sum_list([]) == 0
