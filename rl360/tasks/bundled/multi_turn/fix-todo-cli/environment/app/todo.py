"""A todo list; see README.md."""

import json
import sys

FILE = "todo.json"


def load():
    try:
        with open(FILE, encoding="utf-8") as file:
            return json.load(file)
    except FileNotFoundError:
        return []


def save(items):
    with open(FILE, "w", encoding="latin-1", errors="replace") as file:
        json.dump(items, file, ensure_ascii=False)


def main(arguments):
    items = load()
    command = arguments[0]
    if command == "add":
        items.append({"text": arguments[1], "done": False})
        print(len(items))
    elif command == "done":
        items[int(arguments[1])]["done"] = True
    elif command == "remove":
        del items[int(arguments[1]) - 1]
    elif command == "list":
        for number, item in enumerate(items, 1):
            if "--open" in arguments and not item["done"]:
                continue
            mark = "x" if item["done"] else " "
            print(f"{number} [{mark}] {item['text']}")
    save(items)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
