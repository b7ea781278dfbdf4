"""Totals by category of a CSV file."""

import sys


def totals(path):
    result = {}
    lines = open(path).read().split("\n")
    for line in lines[1:]:
        fields = line.split(",")
        category = fields[0]
        amount = float(fields[1])
        result[category] = amount + result.get(category, 0)
    return result


def main():
    for category, total in totals(sys.argv[1]).items():
        print(f"{category}: {total}")


if __name__ == "__main__":
    main()
