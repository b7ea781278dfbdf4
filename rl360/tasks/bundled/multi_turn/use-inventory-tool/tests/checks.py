"""What the inventory holds in the end, by its own file and by the export."""

import csv
import hashlib
import json

HEADER = ["number", "shelf", "quantity", "name"]
ROWS = [['K-100', 'B1', '16', 'spring 6 mm'],
 ['K-102', 'B1', '41', 'spring 4 mm'],
 ['K-103', 'B1', '39', 'bolt 10 mm'],
 ['K-104', 'B1', '9', 'handle 6 mm'],
 ['K-105', 'B1', '13', 'latch 10 mm'],
 ['K-108', 'B1', '48', 'bolt 4 mm'],
 ['K-109', 'B1', '11', 'spring 4 mm'],
 ['K-110', 'C2', '20', 'bolt 8 mm'],
 ['K-111', 'C2', '31', 'spring 10 mm'],
 ['K-113', 'C2', '47', 'spring 10 mm']]
RETIRED = ['K-101', 'K-106', 'K-107', 'K-112']


def check_stock(work):
    stock = work.json("stock.json")
    sealed = stock.pop("seal")
    text = "inventory:" + json.dumps(stock, sort_keys=True)
    equal(sealed, hashlib.sha256(text.encode()).hexdigest(), "the seal of stock.json")
    rows = [[number, item["shelf"], str(item["quantity"]), item["name"]] for number, item in sorted(stock["items"].items())]
    equal(rows, ROWS, "items of stock.json")
    equal(sorted(stock["retired"]), [[number, "empty"] for number in RETIRED], "retired items")


def check_export(work):
    equal(list(csv.reader(work.read("export.csv").splitlines())), [HEADER, *ROWS], "export.csv")
