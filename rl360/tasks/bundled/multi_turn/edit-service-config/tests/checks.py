"""The values, and the lines that had to stay."""

import configparser

WANT = {
    "server": {"host": "0.0.0.0", "port": "8443", "tls": "yes", "legacy_port": "8081"},
    "database": {"url": "postgres://db.internal/service", "pool_size": "20", "timeout": "30"},
    "logging": {"level": "info", "debug": "true", "file": "/var/log/service.log"},
}
STAY = """# Settings of the service. Lines that begin with # are comments.

[server]
# where it listens
host = 0.0.0.0

# kept for old clients
legacy_port = 8081

[database]
url = postgres://db.internal/service
# seconds
timeout = 30

[logging]
level = info
debug = true
"""


def check_values(work):
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str
    parser.read_string(work.read("service.ini"))
    equal({name: dict(parser[name]) for name in parser.sections()}, WANT, "service.ini")


def check_the_rest_stays(work):
    changed = ("port", "tls", "pool_size", "file")
    lines = work.read("service.ini").rstrip("\n").split("\n")
    kept = [line for line in lines if line.partition("=")[0].strip() not in changed]
    equal(kept, STAY.rstrip("\n").split("\n"), "the lines that had to stay")


def check_places(work):
    lines = [line.partition("=")[0].strip() for line in work.read("service.ini").split("\n")]
    order = ["[server]", "host", "port", "tls", "legacy_port", "[database]", "url", "pool_size", "timeout", "[logging]"]
    equal([line for line in lines if line in order], order, "the order of sections and keys")
