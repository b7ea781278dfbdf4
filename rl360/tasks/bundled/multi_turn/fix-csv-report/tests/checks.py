"""The given file and three others."""

FILES = {
    "plain": ("category,amount\nb,1\na,2.5\nb,-0.25\n", "a: 2.50\nb: 0.75\n", []),
    "columns in another order": (
        'note,amount,category\n"x, y","2,000",tools\n"two\nlines",0.1,tools\n,0.2, tools \n',
        "tools: 2000.30\n",
        [],
    ),
    "bad amounts": (
        "category,amount\na,1\n\na,x\nb,\na,2\n",
        "a: 3.00\n",
        ["line 4: bad amount 'x'", "line 5: bad amount ''"],
    ),
    "quotes": (
        'category,amount\n"say ""hi""",1\n"a,b",2\n',
        'a,b: 2.00\nsay "hi": 1.00\n',
        [],
    ),
}
GIVEN = 'category,amount,note\ngarden,12.50,spade\nkitchen,3.20,"spoon, wooden"\n\n"garden",7.00,gloves\n' \
    'office,"1,250.50","desk ""large"""\nkitchen ,0.10,salt\noffice,?,unknown\n'


def judge(work, text, out, errors):
    copy = work.copy({"input.csv": text})
    result = work.run(["python3", "report.py", "input.csv"], copy)
    equal(result.out, out, "standard output")
    equal(result.err.splitlines(), errors, "standard error")


def check_the_given_file(work):
    judge(work, GIVEN, "garden: 19.50\nkitchen: 3.30\noffice: 1250.50\n", ["line 8: bad amount '?'"])


def check_other_files(work):
    for text, out, errors in FILES.values():
        judge(work, text, out, errors)
