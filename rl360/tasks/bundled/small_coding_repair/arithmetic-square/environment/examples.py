"""What /app/solution.py has to do, by example. `python3 /app/examples.py` tries it; the tests try more."""

if __name__ == "__main__":
    import ast
    import signal
    import traceback

    with open(__file__) as file:
        asserts = [node.test for node in ast.parse(file.read()).body if isinstance(node, ast.Assert)]
    path, space = __file__.replace("examples.py", "solution.py"), {"__name__": "solution"}
    signal.alarm(10)  # ends an endless loop
    tried, found = "/app/solution.py", None
    try:
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
assert square(5) == 25
assert square(-3) == 9
