"""Folders of all kinds, and what is left of them."""

import os

USAGE = "usage: rotate.sh FOLDER KEEP\n"


def folder(work, names):
    return work.copy({"logs dir/" + name: name for name in names})


def rotate(work, copy, *arguments):
    return work.run(["sh", "rotate.sh", *arguments], copy)


def left(copy):
    found = []
    for parent, _, files in os.walk(os.path.join(copy, "logs dir")):
        found += [os.path.relpath(os.path.join(parent, name), os.path.join(copy, "logs dir")) for name in files]
    return sorted(found)


def judge(work, names, keep, deleted):
    copy = folder(work, names)
    result = rotate(work, copy, "logs dir", str(keep))
    equal([result.code, result.out], [0, "".join(name + "\n" for name in deleted)], "rotate.sh with KEEP %s" % keep)
    equal(left(copy), sorted(set(names) - set(deleted)), "what is left")


def check_how_many_stay(work):
    days = ["2025-01-%02d.log" % day for day in range(1, 6)]
    for keep in (0, 1, 3, 5, 9, 10):
        judge(work, days, keep, days[: max(0, len(days) - keep)])
    many = ["%03d.log" % number for number in range(12)]
    judge(work, many, 10, many[:2])


def check_names(work):
    names = ["a b.log", "a  c.log", "-n.log", "-rf.log", "star*.log", "x.log", "$(touch y).log", "q'q.log", 'd"d.log']
    judge(work, names, 2, sorted(names)[:-2])


def check_others_stay(work):
    others = ["notes.txt", "a.log.gz", ".hidden.log", "sub.log/inner.log", "sub/b.log", "log", "c.logs"]
    judge(work, [*others, "k.log", "m.log"], 1, ["k.log"])
    judge(work, others, 0, [])


def check_usage(work):
    for arguments in (["missing", "1"], ["logs dir", "x"], ["logs dir", "-1"], ["logs dir"], [], ["logs dir", ""], ["logs dir", "1.5"]):
        copy = folder(work, ["a.log", "b.log"])
        result = rotate(work, copy, *arguments)
        equal([result.code, result.out, result.err], [2, "", USAGE], "rotate.sh " + " ".join(arguments))
        equal(left(copy), ["a.log", "b.log"], "what is left")
