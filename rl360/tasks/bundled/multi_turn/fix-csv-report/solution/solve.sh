#!/bin/sh
cat >/app/report.py <<'END'
"""Totals by category of a CSV file."""

import csv
import sys
from decimal import Decimal, InvalidOperation


def totals(path):
    result = {}
    with open(path, newline="") as file:
        rows = csv.DictReader(file)
        for row in rows:
            text = row["amount"] or ""
            try:
                amount = Decimal(text.replace(",", "").strip())
            except InvalidOperation:
                print(f"line {rows.line_num}: bad amount {text!r}", file=sys.stderr)
                continue
            category = row["category"].strip()
            result[category] = amount + result.get(category, Decimal(0))
    return result


def main():
    for category, total in sorted(totals(sys.argv[1]).items()):
        print(f"{category}: {total:.2f}")


if __name__ == "__main__":
    main()
END
