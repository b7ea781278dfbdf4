#!/bin/sh
cat >/app/todo.py <<'END'
"""A todo list; see README.md."""

import json
import sys

FILE = "todo.json"


def load():
    try:
        with open(FILE, encoding="utf-8") as file:
            return json.load(file)
    except FileNotFoundError:
        return {"next": 1, "items": []}


def save(state):
    with open(FILE, "w", encoding="utf-8") as file:
        json.dump(state, file, ensure_ascii=False)


def main(arguments):
    state = load()
    items = state["items"]
    command = arguments[0]
    if command == "add":
        number = state["next"]
        items.append({"number": number, "text": arguments[1], "done": False})
        state["next"] = number + 1
        print(number)
    elif command in ("done", "remove"):
        found = [item for item in items if str(item["number"]) == arguments[1]]
        if not found:
            print(f"no item {arguments[1]}", file=sys.stderr)
            return 1
        if command == "done":
            found[0]["done"] = True
        else:
            items.remove(found[0])
    elif command == "list":
        for item in items:
            if not ("--open" in arguments and item["done"]):
                print(f"{item['number']} [{'x' if item['done'] else ' '}] {item['text']}")
        return 0
    save(state)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
END
